"""Which personal model a box serves, the rule by hand-worked numbers, and what it exports when."""

import errno
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_client.config import ExportSection, PolicySection
from edge_client.session.signals import ChooseModel, Chosen
from edge_client.store.private_store import FINALISED_FILE, PrivateStore
from edge_client.training import personal_model as finalise
from edge_client.training.personal_model import Candidate, choose
from edge_client.training.workplace import Measured, measure
from export.errors import GateError
from export.model.manifest import read_manifest, required
from export.model.versions import ModelVersions
from fedcg.learning.method import Weights
from fedcg.learning.registry import get_method
from fedcg.learning.spec import FederationSpec, ParameterValue
from fedcg.learning.tensor_conversion import to_weights
from fedcg.learning.training.evaluation import calibrated_loss
from fedcg.wire.artifacts.artifacts import unpack
from fedcg.wire.parts import Part
from tests.support.edge.training_site import Site, real_spec
from tests.support.raising import raising

NAMES = ["own", "downloaded", "interpolated", "tuned", "averaged"]


def two_classes(margin: float, right: int, wrong: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (0, margin) for every image; `right` of them are of class 1, `wrong` of class 0."""
    return torch.tensor([[0.0, margin]] * (right + wrong)), torch.tensor([1] * right + [0] * wrong)


def candidate(name: str, loss: float | None) -> Candidate:
    return Candidate(name, {}, Measured(), loss)


def test_the_calibrated_loss_does_not_depend_on_how_confident_a_model_is() -> None:
    # Three of four are right. The best any margin can say is 3/4, a margin of ln 3 = 1.0986; the loss there is
    # -3/4 ln 3/4 - 1/4 ln 1/4 = 0.2158 + 0.3466 = 0.5623. Plain cross-entropy at margin 8 is (3 ln(1 + e^-8) + 8) / 4 = 2.0003.
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    for margin in (math.log(3.0), 4.0, 8.0):
        assert calibrated_loss(*two_classes(margin, 3, 1)) == pytest.approx(entropy, abs=1e-3)
    confident = two_classes(8.0, 3, 1)
    assert float(torch.nn.functional.cross_entropy(*confident)) == pytest.approx(2.0003, abs=1e-3)
    # Half right: no margin says more than 1/2, ln 2 = 0.6931. By plain cross-entropy this one would be better than the confident.
    assert calibrated_loss(*two_classes(0.8, 2, 2)) == pytest.approx(math.log(2.0), abs=1e-3)


def test_a_model_is_not_made_more_confident_than_it_is() -> None:
    # All right at margin 1: ln(1 + e^-1) = 0.3133, at margin 2 ln(1 + e^-2) = 0.1269; sharpened, both would come to 0.
    assert calibrated_loss(*two_classes(1.0, 4, 0)) == pytest.approx(0.3133, abs=1e-4)
    assert calibrated_loss(*two_classes(2.0, 4, 0)) == pytest.approx(0.1269, abs=1e-4)


def test_the_least_loss_is_chosen_and_the_first_of_equals() -> None:
    assert choose([candidate("own", 1.5), candidate("tuned", 1.25), candidate("averaged", 1.25)]).name == "tuned"
    assert choose([candidate("own", 1.5), candidate("tuned", 1.5)]).name == "own"
    assert choose([candidate("own", None), candidate("tuned", None)]).name == "own"


def finished(root: Path, **params: ParameterValue) -> tuple[Site, ChooseModel]:
    """A box after two rounds, and the command that ends the federation."""
    site = Site(root, real_spec("fedcg", network=None, **params))
    for number in (1, 2):
        site.train(number)
    return site, site.end


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[Part, Weights]]:
    """The models that are measured from now on."""
    seen: list[Mapping[Part, Weights]] = []

    def noted(spec: FederationSpec, parts: Mapping[Part, Weights], *rest: Any) -> Measured:
        seen.append(parts)
        return measure(spec, parts, *rest)

    monkeypatch.setattr(finalise, "measure", noted)
    return seen


def test_the_five_candidates_are_measured_alike_and_two_are_means_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, command = finished(tmp_path)
    seen = watch(monkeypatch)
    site.trainer().do(command)
    outcome, latest = site.store.record(FINALISED_FILE), to_weights(site.state().slots["personal"])
    losses = {name: outcome[f"loss_val_{name}"] for name in NAMES}
    assert outcome["candidate"] == min(NAMES, key=lambda name: losses[name])
    assert len(set(losses.values())) > 1
    found = dict(zip(NAMES, seen, strict=True))
    for part in (Part.EXTRACTOR, Part.CLASSIFIER):
        for name, tensor in latest[part].items():
            for mean, other in (("interpolated", "downloaded"), ("averaged", "tuned")):
                halfway = (tensor + found[other][part][name]) / 2
                assert torch.allclose(found[mean][part][name], halfway, atol=1e-6), (mean, part, name)
    changed = found["tuned"][Part.EXTRACTOR], found["downloaded"][Part.EXTRACTOR]
    assert any(not torch.equal(changed[0][name], changed[1][name]) for name in changed[0])


def test_the_moving_average_of_the_last_rounds_steps_is_a_candidate_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, command = finished(tmp_path, ema=0.9)
    seen = watch(monkeypatch)
    site.trainer().do(command)
    outcome = site.store.record(FINALISED_FILE)
    assert outcome["loss_val_ema"] not in (None, outcome["loss_val_own"])
    kept = to_weights(site.state().extras)
    for part in (Part.EXTRACTOR, Part.CLASSIFIER):
        assert all(torch.equal(tensor, seen[1][part][name]) for name, tensor in kept[f"ema_{part.value}"].items())


@pytest.mark.parametrize(
    ("method", "brought"),
    [
        ("fedavg", {Part.EXTRACTOR, Part.CLASSIFIER}),
        ("fedper", {Part.EXTRACTOR}),
        ("fedcg", {Part.CLASSIFIER}),
        ("local", set()),
    ],
)
def test_the_downloaded_candidate_has_every_part_that_the_last_aggregate_brings(
    method: str, brought: set[Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, real_spec(method))
    site.configure(policy=PolicySection(allow_upload=frozenset({Part.EXTRACTOR, Part.CLASSIFIER, Part.GENERATOR})))
    site.train()
    seen = watch(monkeypatch)
    assert site.trainer().do(site.end) == Chosen(site.aggregate, succeeded=True)
    assert len(seen) == (5 if brought else 1)
    held = {part: site.spec.layouts[part] for part in get_method(method).payload.down}
    first, latest = unpack(site.store.artifacts.get(site.aggregate), held).parts, site.state().slots["personal"]
    for part in (Part.EXTRACTOR, Part.CLASSIFIER) if brought else ():
        wanted = first[part] if part in brought else latest[part]
        assert all(np.array_equal(seen[1][part][name].numpy(), wanted[name]) for name in wanted)


def test_test_and_common_images_have_no_part_in_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, command = finished(tmp_path)
    chosen, told = [], []
    for favourite in range(len(NAMES)):
        turns = iter(range(len(NAMES)))

        def flattered(*arguments: Any) -> Measured:
            score = 1.0 if next(turns) == favourite else 0.0  # noqa: B023 - called within the turn
            true = measure(*arguments)
            return Measured(val=true.val, val_loss=true.val_loss, test=score, common=score)

        monkeypatch.setattr(finalise, "measure", flattered)
        (site.store.root / "finalised.json").unlink(missing_ok=True)
        site.trainer().do(command)
        outcome = site.store.record(FINALISED_FILE)
        chosen.append(outcome["candidate"])
        told.append([outcome[f"accuracy_{name}"] for name in NAMES].index(1.0))
    assert told == list(range(len(NAMES)))  # every candidate was once the one that test images prefer
    assert len(set(chosen)) == 1


def test_at_the_end_the_best_candidate_is_exported_and_described_once(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec(), shadow=1, export=True)
    trainer = site.trainer()
    for number in (1, 2):
        trainer.do(site.round(number))
    command = site.end
    assert trainer.do(command) == Chosen(site.aggregate, succeeded=True)
    outcome = site.store.record(FINALISED_FILE)
    assert outcome["accuracy_personal"] == outcome[f"accuracy_{outcome['candidate']}"]
    assert outcome["accuracy_common_personal"] == outcome[f"accuracy_common_{outcome['candidate']}"]
    assert outcome["accuracy_onnx"] == pytest.approx(outcome["accuracy_personal"])
    assert outcome["accuracy_common_onnx"] == pytest.approx(outcome["accuracy_common_personal"])
    scores = site.state().generation.scores
    assert (outcome["accuracy_local"], outcome["accuracy_own"]) == (scores["best_shadow.test"], scores["best.test"])
    assert (outcome["test_images"], Path(outcome["onnx_model"]).is_file()) == (15, True)
    assert read_manifest(Path(outcome["model_dir"]), required(site.key.public.hex))
    assert site.trainer().do(command) == Chosen(site.aggregate, succeeded=True)
    assert [path.name for path in sorted((site.store.root / "models").glob("0*"))] == ["0001"]


def test_each_round_that_made_the_model_better_is_exported(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec(), export=True)
    site.configure(export=ExportSection(variants=False, gate_points=100.0))
    trainer, models = site.trainer(), site.store.root / "models"
    best = []
    for number in (1, 2, 3):
        trainer.afterwards(trainer.do(site.round(number)))
        best.append(int(site.state().generation.scores["best.round"]))
        assert read_manifest(ModelVersions(models).current()).round == best[-1]
    exported = site.events("exported")
    assert [event["round"] for event in exported] == sorted(set(best))
    assert [event["model_dir"] for event in exported] == [
        str(models / f"{version:04}") for version in range(1, len(exported) + 1)
    ]
    assert trainer.do(site.end) == Chosen(site.aggregate, succeeded=True)
    assert site.store.record(FINALISED_FILE)["model_dir"] == str(models / f"{len(exported) + 1:04}")


def test_an_export_that_finds_the_disk_full_is_told_and_the_version_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, real_spec(), export=True)
    trainer, models = site.trainer(), site.store.root / "models"
    report = trainer.do(site.round(1))
    trainer.afterwards(report)
    before = ModelVersions(models).versions()

    with monkeypatch.context() as broken:
        broken.setattr("export.model.versions.fsync_path", raising(OSError(errno.ENOSPC, "No space left on device")))
        trainer.afterwards(report)
    assert ModelVersions(models).versions() == before
    (failed,) = site.events("export_failed")
    assert failed["round"] == 1
    assert "No space left" in str(failed["detail"])
    trainer.afterwards(report)
    assert len(ModelVersions(models).versions()) == len(before) + 1


def test_a_model_that_the_gate_refuses_leaves_the_one_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, real_spec(), export=True)
    trainer = site.trainer()
    trainer.afterwards(trainer.do(site.round(1)))

    monkeypatch.setattr("export.build.install_model.pass_gate", raising(GateError("worse than version 0001")))
    assert trainer.do(site.end) == Chosen(site.aggregate, succeeded=True)
    outcome = site.store.record(FINALISED_FILE)
    assert outcome["gate"] == "worse than version 0001"
    assert outcome["model_dir"] == str(site.store.root / "models" / "0001")
    assert outcome["accuracy_onnx"] == read_manifest(Path(str(outcome["model_dir"]))).verification.accuracy_onnx


def test_an_end_that_finds_the_disk_full_is_told_with_the_fix_and_the_process_lives(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PrivateStore, "save_record", raising(OSError(errno.ENOSPC, "No space left on device")))
    assert site.trainer().do(site.end) == Chosen(site.aggregate, succeeded=False)
    assert f"Free space on, or repair, {site.store.root}" in site.events("finalise_failed")[0]["detail"]
    assert f"Free space on, or repair, {site.store.root}" in caplog.text


def test_a_device_that_never_trained_has_no_model_and_says_so(site: Site) -> None:
    assert site.trainer().do(site.end) == Chosen(site.aggregate, succeeded=True)
    assert site.events("finalised")[0]["candidate"] is None
