"""`fedcg audit run` on a recording: figures, gates, a report, what is kept, and bad input."""

import json
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from audit.attacks.attack import Attack, Effort, Found, Trial, carried_out, get_attack
from audit.choices import ATTACKS, parse_gate
from audit.evidence.case import Earlier
from audit.measures import Outcome
from audit.report import judge
from audit.run import AuditFolder, AuditOptions, carry_out, identity_of
from fedcg.errors import BAD_INPUT, NOT_MET
from tests.support.audit import attack, audit_command, simulated_case, write_case
from tests.support.commands import data_of, run_fedcg, succeeds
from tests.support.present import present


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A coordinator's artifacts, a device's images and private weights."""
    folder = tmp_path_factory.mktemp("audit")
    coded = {"codec": "i8-delta", "aggregate_codec": "f16"}
    write_case(simulated_case(**coded, partition="dirichlet:0.1", local_epochs=4, rounds=3), folder)
    return folder


def test_an_audit_reports_what_came_back_and_a_gate_ends_it_with_8(place: Path, tmp_path: Path) -> None:
    gates = "label_l1_gain<0.01,label_l1_gain<3,mia_auc<0.6"
    done = run_fedcg(*audit_command(place, tmp_path / "out", "--attacks", "labels", "--gate", gates, "--json"))
    assert done.exit_code == NOT_MET, done.output
    report = data_of(done.stdout)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert [verdict["passed"] for verdict in report["gates"]] == [False, True, False]
    assert "not measured" in report["gates"][2]["why"]
    (labels,) = report["attacks"]
    best = max(figure["gain"]["value"] for figure in labels["figures"] if figure["name"] == "label_l1")
    assert best > 0.2  # of 3 classes or so in 86 images, from the update alone
    assert report["subject"]["sent"].keys() == {"classifier", "generator"}
    assert report["subject"]["start"].startswith("cohort secret, or the public spec seed")  # no store shows which
    assert labels["result"] in (tmp_path / "out" / "report.html").read_text()
    assert f"the attacks took {report['subject']['seconds']:.0f} s" in (tmp_path / "out" / "report.html").read_text()
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "out" / "report.html").stat().st_mode) == 0o600


@pytest.mark.slow
def test_what_was_done_is_not_done_again_and_another_audit_needs_another_folder(place: Path, tmp_path: Path) -> None:
    succeeds(*audit_command(place, tmp_path / "out", "--attacks", "labels"))
    kept = tmp_path / "out" / "attacks" / "labels.json"
    before = kept.stat().st_mtime_ns
    assert run_fedcg(*audit_command(place, tmp_path / "out", "--attacks", "labels")).exit_code == 0
    assert kept.stat().st_mtime_ns == before
    other = run_fedcg(*audit_command(place, tmp_path / "out", "--attacks", "labels", "--seed", 7))
    assert other.exit_code != 0
    assert "choose another --out, or --force" in other.stderr
    succeeds(*audit_command(place, tmp_path / "out", "--attacks", "labels", "--seed", 7, "--force"))
    assert kept.stat().st_mtime_ns != before


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--attacks", "lables"), "unknown attack 'lables'; choose from labels, inversion"),
        (("--gate", "mia_auc>0.5"), "write NAME<NUMBER"),
        (("--gate", "label_l1<0.3"), "write label_l1_gain<NUMBER"),
        (("--round", 9), "no update of client-1 in round 9"),
        (("--federation", "other"), "no federation other"),
        (("--auxiliary", "nowhere"), "nowhere: no such folder"),
        (("--cohort", __file__), "holds no cohort's secret"),
    ],
)
def test_bad_input_is_named_before_any_attack(place: Path, tmp_path: Path, more: tuple[object, ...], said: str) -> None:
    done = run_fedcg(*audit_command(place, tmp_path / "out", *more))
    assert done.exit_code != 0
    assert said in done.stderr
    assert not (tmp_path / "out" / "attacks").exists()


def test_the_device_s_own_images_are_not_an_attacker_s(place: Path, tmp_path: Path) -> None:
    command = audit_command(place, tmp_path / "out")
    done = run_fedcg(*command, "--auxiliary", command[command.index("--data") + 1])
    assert done.exit_code == BAD_INPUT
    assert "images are the device's own, which no attacker has" in done.stderr
    done = run_fedcg(*command, "--held-out", command[command.index("--data") + 1])
    assert done.exit_code == BAD_INPUT
    assert "which it trained on: give other labelled images of the same kind as --held-out" in done.stderr


@pytest.mark.slow
def test_an_attack_that_fails_ends_neither_the_others_nor_is_it_kept(tmp_path: Path) -> None:
    folder = AuditFolder(tmp_path, {"format": 1})
    seen: list[str] = []
    outcomes = carry_out(
        simulated_case(),
        [attack("no such attack")],
        Effort.QUICK,
        1,
        folder=folder,
        on_done=lambda outcome: seen.append(outcome.attack),
    )
    assert outcomes[0].skipped is not None
    assert outcomes[0].skipped.startswith("failed: UnknownAttackError")
    assert seen == ["no such attack"]
    assert folder.kept("no such attack") is None


def test_the_identity_holds_contents_and_not_numbers_of_images(tmp_path: Path) -> None:
    case = simulated_case()
    known = present(case.view.auxiliary)
    swapped = replace(known, labels=known.labels.roll(1))
    other = replace(case.truth, train=replace(case.truth.train, images=case.truth.train.images.roll(1, 0)))
    views = [case.view, replace(case.view, auxiliary=swapped), replace(case.view, others={})]
    views.append(replace(case.view, history=(Earlier(case.view.before, {"client-1": case.view.update}),)))
    cases = [*(replace(case, view=view) for view in views), replace(case, truth=other)]
    options = AuditOptions(tmp_path, tmp_path / "data.npz", tmp_path)
    found = [identity_of(options, one) for one in cases]
    assert len({json.dumps(one, sort_keys=True) for one in found}) == len(cases)
    assert found[0] == identity_of(options, replace(case, view=replace(case.view)))
    assert {"version", "program"} <= found[0].keys()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.py").write_text("first = 1")
    programs = [identity_of(replace(options, data=tmp_path / "a" / "program:mine:client"), case)["program"]]
    (tmp_path / "a" / "mine.py").write_text("first = 2")
    programs.append(identity_of(replace(options, data=tmp_path / "a" / "program:mine:client"), case)["program"])
    assert programs[0] != programs[1]


@pytest.mark.slow
def test_an_attack_that_is_not_done_in_time_is_stopped_and_passes_no_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Effort, "limit_s", property(lambda self: 0.5))
    folder = AuditFolder(tmp_path, {"format": 1})
    outcomes = carry_out(simulated_case(), [get_attack("membership")], Effort.QUICK, 1, folder=folder)
    assert "not done within" in present(outcomes[0].skipped)
    assert folder.kept("membership") is None
    (verdict,) = judge(parse_gate("mia_auc<0.9"), outcomes)
    assert not verdict.passed
    assert "not done within" in verdict.why


def test_in_this_process_too_an_attack_ends_at_its_next_step_after_the_deadline() -> None:
    def endless(trial: Trial) -> Iterator[Found]:
        while True:
            trial.progress(0, 1)

    slow = Attack("slow", "Slow", "When does it end?", "ours", endless)
    outcome = carried_out(slow, simulated_case(), Effort.QUICK, lambda done, total: None, time.monotonic() + 0.2)
    assert outcome.has_failed
    assert "not done within 3 minutes, the limit of effort quick" in present(outcome.skipped)


def test_a_damaged_outcome_is_made_again_and_a_damaged_folder_is_named(tmp_path: Path, place: Path) -> None:
    folder = AuditFolder(tmp_path, {"format": 1})
    folder.keep(Outcome("x"))
    (tmp_path / "attacks" / "x.json").write_text("{")
    assert folder.kept("x") is None
    (tmp_path / "audit.json").write_text("no")
    assert "audit.json can't be read" in run_fedcg(*audit_command(place, tmp_path, "--attacks", "labels")).stderr


def test_the_attacks_are_listed_with_their_papers() -> None:
    listed = data_of(run_fedcg("audit", "attacks", "--json").stdout)
    assert [one["name"] for one in listed] == list(ATTACKS)
    assert all(one["source"] and one["question"].endswith("?") for one in listed)
