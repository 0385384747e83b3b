"""An update is attacked on its own device before it is kept for sending, and stays there when the owner's gate says so."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from audit.attacks.attack import Attack, Effort, Found, Trial
from audit.evidence.case import Case, Knowledge
from audit.measures import Control, Figure, Interval, Outcome, Pictures, png
from edge_client.cli.status import read_status
from edge_client.config import AuditSection
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.seeds import spec_root
from fedcg.learning.tensor_conversion import to_arrays
from fedcg.wire.artifacts.artifacts import Base, codecs_for, unpack
from fedcg.wire.messages.schemas import DeclineReason
from fedcg.wire.parts import DEFAULT_ALLOW_REPORT, Part, ReportField
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import CLASSES, draw_images
from tests.support.raising import raising

GAIN = 0.25


def figure(name: str = "label_l1", high: float = GAIN, knowledge: Knowledge = Knowledge.UPDATE) -> Figure:
    gain = Interval(high - 0.05, high - 0.1, high)
    value = Interval(0.5, 0.45, 0.55)
    return Figure(name, "L1", f"{name} by {knowledge.value}", (knowledge,), value, 0.7, "uniform", gain, 30)


class StandIn:
    """An attack that keeps the case that it was given, shows one of its images, and comes to figures of our own."""

    def __init__(self, outcome: Callable[[], Outcome] | None = None) -> None:
        self.cases: list[Case] = []
        self.efforts: list[Effort] = []
        self._outcome = outcome or (
            lambda: Outcome("labels", (figure(), figure(high=0.9, knowledge=Knowledge.PRIVATE)))
        )

    def carry_out(self, trial: Trial) -> Iterator[Found]:
        self.cases.append(trial.case)
        self.efforts.append(trial.effort)
        tick = trial.steps(2)
        tick()
        tick()
        found = self._outcome()
        for kind in (found.figures, found.controls, found.pictures):
            yield from kind


def install(monkeypatch: pytest.MonkeyPatch, stand_in: StandIn) -> StandIn:
    attack = Attack("labels", "Label distribution", "Which labels?", "ours", stand_in.carry_out)
    monkeypatch.setitem(sys.modules, "audit.attacks.label_distribution", SimpleNamespace(ATTACK=attack))
    return stand_in


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install(monkeypatch, StandIn())


def audited_site(root: Path, gate: str = "", report: frozenset[ReportField] = DEFAULT_ALLOW_REPORT) -> Site:
    site = Site(root, real_spec())
    site.configure(
        audit=AuditSection(before_publish="quick", gate=gate, attacks=("labels",)), policy={"allow_report": report}
    )
    return site


def test_a_gate_that_does_not_hold_keeps_the_update_on_the_device_and_names_condition_value_and_setting(
    tmp_path: Path, stand_in: StandIn
) -> None:
    site = audited_site(tmp_path, "label_l1_gain<0.2")
    detail = site.declined(DeclineReason.WITHHELD)
    for text in (
        "label_l1_gain<0.2",
        "at most 0.25",
        "label_l1 by the update",
        str(site.store.root / "audit/report.html"),
    ):
        assert text in detail, detail
    assert site.store.generations.current() == (None, ())
    assert not site.events("committed")
    (told,) = site.events("audited")
    assert (told["passed"], told["round"], told["attempt"]) == (False, 1, 1)
    page = site.store.root / "audit" / "report.html"
    assert read_status(site.config)["last_audit"] == f"round 1, attempt 1: withheld; {page}"


def test_the_round_after_a_withheld_one_starts_from_the_state_before_it(tmp_path: Path, stand_in: StandIn) -> None:
    site, plain = audited_site(tmp_path / "a", "label_l1_gain<0.2"), Site(tmp_path / "b", real_spec())
    site.declined(DeclineReason.WITHHELD)
    site.configure(audit={"gate": "label_l1_gain<0.3"})
    for each in (site, plain):
        each.train(2)
    assert site.update() == plain.update()
    assert len(stand_in.cases) == 2


def test_the_very_bytes_that_are_kept_for_sending_are_attacked_with_the_devices_own_truth(
    tmp_path: Path, stand_in: StandIn
) -> None:
    site = audited_site(tmp_path)
    site.train()
    (case,), spec = stand_in.cases, site.spec
    base, codecs = Base(site.aggregate, site.brought()), codecs_for(site.shared, spec.codec, spec.with_base)
    sent = unpack(site.update(), site.shared, codecs=codecs, base=base)
    for part in spec.upload:
        for name, tensor in sent.parts[part].items():
            assert torch.equal(case.view.update[part][name], torch.from_numpy(tensor))
            assert torch.equal(case.view.before.parts[part][name], torch.from_numpy(base.parts[part][name]))
    assert case.view.report == sent.header.report
    assert (case.view.client, case.view.round) == (site.config.device, 1)
    counts = site.store.generations.snapshot(site.state().generation).counts()
    assert (len(case.truth.train), len(case.truth.held_out)) == (counts["train"], counts["val"] + counts["test"])
    start = to_arrays(initial_parts(spec, spec_root(spec.seed)))
    ended = site.state().slots["personal"]
    assert case.truth.before is not None
    assert case.truth.after is not None
    assert set(case.truth.before) == set(case.truth.after) == {Part.EXTRACTOR, Part.DISCRIMINATOR}
    for truth, expected in ((case.truth.before, start), (case.truth.after, ended)):
        for name, tensor in to_arrays(truth)[Part.EXTRACTOR].items():
            assert (tensor == expected[Part.EXTRACTOR][name]).all()
    assert stand_in.efforts == [Effort.QUICK]


def test_an_audit_changes_no_bit_of_what_is_sent_but_reported_figures(tmp_path: Path, stand_in: StandIn) -> None:
    with_figures = DEFAULT_ALLOW_REPORT | {ReportField.AUDIT}
    plain, audited = Site(tmp_path / "a", real_spec()), audited_site(tmp_path / "b", "label_l1_gain<0.6")
    telling = audited_site(tmp_path / "c", "label_l1_gain<0.6", with_figures)
    for site in (plain, audited, telling):
        site.train()
    assert plain.update() == audited.update()
    # The figure of an attacker who was given the private extractor is none that a real one can reach.
    assert telling.report().audit == {"label_l1": GAIN}
    assert telling.report().only(DEFAULT_ALLOW_REPORT) == plain.report()
    assert telling.update()[-1000:] == plain.update()[-1000:]


def test_the_report_with_its_pictures_lies_in_the_store_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome() -> Outcome:
        picture = png(attack.cases[-1].truth.train.images[0].float() / 255)
        return Outcome("labels", (figure(),), pictures=(Pictures("What came back", (("true", (picture,)),)),))

    attack = install(monkeypatch, StandIn(outcome))
    site = audited_site(tmp_path, "label_l1_gain<0.2")
    site.declined(DeclineReason.WITHHELD)
    folder = site.store.root / "audit"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "report.json": 0o600,
        "report.html": 0o600,
    }
    report = json.loads((folder / "report.json").read_text())
    assert (report["gates"][0]["passed"], report["subject"]["round"]) == (False, 1)
    assert report["subject"]["start"] == "public spec seed"
    assert outcome().pictures[0].rows[0][1][0] in (folder / "report.html").read_text()


def test_an_attack_that_fails_is_named_and_a_gate_on_its_figures_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, StandIn(raising(ArithmeticError("singular matrix"))))
    without_gate = audited_site(tmp_path / "a", report=DEFAULT_ALLOW_REPORT | {ReportField.AUDIT})
    without_gate.train()
    assert "singular matrix" in str(without_gate.events("audited")[0]["detail"])
    assert without_gate.report().audit == {}
    gated = audited_site(tmp_path / "b", "label_l1_gain<0.9")
    assert "not measured" in gated.declined(DeclineReason.WITHHELD)


def test_figures_of_an_attack_that_fails_its_positive_control_are_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control("a planted leak", 0.1, "above 0.9", passed=False)
    install(monkeypatch, StandIn(lambda: Outcome("labels", (figure(),), (control,))))
    site = audited_site(tmp_path, report=DEFAULT_ALLOW_REPORT | {ReportField.AUDIT})
    site.train()
    assert site.report().audit == {}


def test_auxiliary_images_reach_the_attacker_and_without_readable_ones_nothing_is_sent(
    tmp_path: Path, stand_in: StandIn
) -> None:
    site = audited_site(tmp_path / "site")
    draw_images(tmp_path / "aux", 4, seed=9)

    site.configure(audit={"auxiliary": tmp_path / "nothing"})
    assert "[audit] auxiliary" in site.declined(DeclineReason.WITHHELD)
    assert site.store.generations.current() == (None, ())
    site.configure(audit={"auxiliary": tmp_path / "aux"})
    site.train()
    images = stand_in.cases[-1].view.auxiliary
    assert images is not None
    assert len(images) == 4 * len(CLASSES)
