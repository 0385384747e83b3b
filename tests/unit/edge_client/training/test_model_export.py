"""What the training process exports: after a round that made the model better, and at the end of the federation."""

import errno
from pathlib import Path

import pytest

from edge_client.config import ExportSection
from edge_client.session.signals import Chosen
from edge_client.store.private_store import PrivateStore
from export.errors import GateError
from export.model.manifest import read_manifest, required
from export.model.versions import Slots
from tests.support.edge.training_site import Site, real_spec


def test_at_the_end_the_best_candidate_is_exported_and_described_once(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec(), shadow=1, export=True)
    trainer = site.trainer()
    for number in (1, 2):
        trainer.do(site.round(number))
    command = site.end
    assert trainer.do(command) == Chosen(site.aggregate, succeeded=True)
    outcome = site.store.finalised()
    assert outcome["accuracy_personal"] == outcome[f"accuracy_{outcome['candidate']}"]
    assert outcome["accuracy_common_personal"] == outcome[f"accuracy_common_{outcome['candidate']}"]
    assert outcome["accuracy_onnx"] == pytest.approx(outcome["accuracy_personal"])
    assert outcome["accuracy_common_onnx"] == pytest.approx(outcome["accuracy_common_personal"])
    scores = site.state().generation.scores
    assert outcome["accuracy_local"] == scores["best_shadow.test"]
    assert outcome["accuracy_own"] == scores["best.test"]
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
        assert read_manifest(Slots(models).current()).round == best[-1]
    exported = site.events("exported")
    assert [event["round"] for event in exported] == sorted(set(best))
    assert [event["model_dir"] for event in exported] == [
        str(models / f"{version:04}") for version in range(1, len(exported) + 1)
    ]
    assert trainer.do(site.end) == Chosen(site.aggregate, succeeded=True)
    assert site.store.finalised()["model_dir"] == str(models / f"{len(exported) + 1:04}")


def test_an_export_that_finds_the_disk_full_is_told_and_the_version_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, real_spec(), export=True)
    trainer, models = site.trainer(), site.store.root / "models"
    report = trainer.do(site.round(1))
    trainer.afterwards(report)
    before = Slots(models).versions()

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("export.model.versions.fsync_path", full)
        trainer.afterwards(report)
    assert Slots(models).versions() == before
    (failed,) = site.events("export_failed")
    assert failed["round"] == 1
    assert "No space left" in str(failed["detail"])
    trainer.afterwards(report)
    assert len(Slots(models).versions()) == len(before) + 1


def test_a_model_that_the_gate_refuses_leaves_the_one_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, real_spec(), export=True)
    trainer = site.trainer()
    trainer.afterwards(trainer.do(site.round(1)))

    def refuse(*_: object, **__: object) -> None:
        raise GateError("worse than version 0001")

    monkeypatch.setattr("export.build.install_model.pass_gate", refuse)
    assert trainer.do(site.end) == Chosen(site.aggregate, succeeded=True)
    outcome = site.store.finalised()
    assert outcome["gate"] == "worse than version 0001"
    assert outcome["model_dir"] == str(site.store.root / "models" / "0001")
    assert outcome["accuracy_onnx"] == read_manifest(Path(str(outcome["model_dir"]))).verification.accuracy_onnx


def test_variants_of_the_chosen_model_are_judged_by_validation_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, real_spec(), export=True)
    site.configure(export=ExportSection())
    monkeypatch.setattr("export.build.variants.TIMING_S", 0.02)
    trainer = site.trainer()
    trainer.do(site.round(1))
    assert trainer.do(site.end) == Chosen(site.aggregate, succeeded=True)
    outcome = site.store.finalised()
    manifest = read_manifest(Path(str(outcome["model_dir"])))
    assert sorted(one.name for one in manifest.variants) == ["fp16", "fp32", "int8", "ort", "trt_fp16"]
    assert {one.images for one in manifest.variants if one.accuracy is not None} == {outcome["val_images"]}
    checked = [one.name for one in manifest.variants if one.file is not None and one.name != "fp32"]
    assert {one.images for one in manifest.verification.variants} <= {manifest.verification.images}
    assert set(checked) <= {one.name for one in manifest.verification.variants}
    assert outcome["served_variant"] == manifest.serves


def test_an_end_that_finds_the_disk_full_is_told_with_the_fix_and_the_process_lives(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PrivateStore, "save_finalised", full)
    chosen = site.trainer().do(site.end)
    assert chosen == Chosen(site.aggregate, succeeded=False)
    assert f"Free space on, or repair, {site.store.root}" in site.events("finalise_failed")[0]["detail"]
    assert f"Free space on, or repair, {site.store.root}" in caplog.text


def test_a_device_that_never_trained_has_no_model_and_says_so(site: Site) -> None:
    assert site.trainer().do(site.end) == Chosen(site.aggregate, succeeded=True)
    assert site.events("finalised")[0]["candidate"] is None
