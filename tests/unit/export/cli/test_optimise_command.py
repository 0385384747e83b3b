"""`fedcg model optimise`: what it puts in use, and what it leaves alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from export.build import variants
from export.build.install_model import package_personal
from export.errors import SlotError
from export.model.manifest import read_manifest
from export.model.runtime import Predictor
from export.model.signature import required, sign_manifest, signer_of
from export.model.versions import Slots
from fedcg.imaging import Pixels
from fedcg.wire.messages.signing import SigningKey
from tests.support.commands import run_fedcg
from tests.support.export_models import image_form, make_parts, make_spec, write_images

SPEC = make_spec(image_form())


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), 12).files[0].parent.parent


@pytest.fixture
def key(tmp_path: Path) -> Path:
    SigningKey.generate().save(tmp_path / "signing.key")
    return tmp_path / "signing.key"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("exported")
    return package_personal(
        SPEC, make_parts(SPEC), root, test_files=[], test_labels=[], metrics={}, round_number=2
    ).model_dir


def _install(model: Path, root: Path, key: Path | None = None) -> Path:
    def fill(directory: Path) -> None:
        shutil.copytree(model, directory, dirs_exist_ok=True)
        if key is not None:
            sign_manifest(directory, key)

    Slots(root).install(fill)
    return root


def _clock(monkeypatch: pytest.MonkeyPatch, **milliseconds: float) -> None:
    def latencies(predictors: Sequence[Predictor], _images: Sequence[Pixels]) -> list[float]:
        return [milliseconds.get(one.name, 100.0) for one in predictors]

    monkeypatch.setattr(variants, "_latencies", latencies)
    monkeypatch.setattr(variants, "START_GAIN_MS", 1e9)  # only the latencies count


def _optimise(root: Path, images: Path, *more: str) -> Result:
    arguments = ["optimise", str(root), "--images", str(images), "--threads", "1", "--budget", "100", *more]
    return run_fedcg("model", *arguments)


def test_nothing_is_installed_or_pruned_when_no_form_is_faster(
    model: Path, tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        root = _install(model, tmp_path / "models")
    before = Slots(root).versions()
    _clock(monkeypatch)
    told = _optimise(root, images)
    assert told.exit_code == 0, told.output
    assert Slots(root).versions() == before
    assert f"nothing is faster here: {root / '0003'} stays in use" in told.stdout
    assert "at least 1.05 is asked for" in told.stdout


def test_the_form_in_use_is_not_installed_a_second_time(
    model: Path, tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = _install(model, tmp_path / "models")
    _clock(monkeypatch, fp16=10.0)
    first = json.loads(_optimise(root, images, "--json").stdout)
    assert (first["model"], first["installed"], first["serves"]) == (str(root / "0002"), True, "fp16")
    again = json.loads(_optimise(root, images, "--json").stdout)
    assert (again["model"], again["installed"], again["serves"]) == (str(root / "0002"), False, "fp16")
    _clock(monkeypatch)  # on another machine it does not pay any more
    slower = json.loads(_optimise(root, images, "--json").stdout)
    assert (slower["model"], slower["installed"], slower["serves"]) == (str(root / "0003"), True, "fp32")


def test_an_unsigned_version_is_never_put_in_use_over_a_signed_one(
    model: Path, tmp_path: Path, images: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = _install(model, tmp_path / "models", key)
    _clock(monkeypatch, fp16=10.0)
    told = _optimise(root, images)
    assert told.exit_code == 2
    assert "--sign" in told.stderr
    assert "signing.key" in told.stderr
    assert [one.name for one in Slots(root).versions()] == ["0001"]
    done = _optimise(root, images, "--sign", str(key))
    assert done.exit_code == 0, done.output
    assert read_manifest(root / "0002", required(str(key))).serves == "fp16"


def test_no_other_writer_puts_an_unsigned_version_over_a_signed_one(model: Path, tmp_path: Path, key: Path) -> None:
    root = _install(model, tmp_path / "models", key)
    with pytest.raises(SlotError, match="--sign"):
        _install(model, root)
    assert [one.name for one in Slots(root).versions()] == ["0001"]
    assert signer_of(Slots(root).current()) is not None
