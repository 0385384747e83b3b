"""A new version must be as good as the one in service on the box's own held-out images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from export.build.accuracy_gate import pass_gate
from export.build.install_model import package_personal
from export.errors import GateError
from export.model.manifest import read_manifest
from export.model.preprocess import load_image
from export.model.runtime import Model
from export.model.versions import Slots
from tests.support.export_models import TestImages, image_form, make_parts, make_spec, write_images

FORM = image_form()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> TestImages:
    return write_images(tmp_path_factory.mktemp("images"), 40)


def _install(root: Path, images: TestImages, seed: int, labels: list[int], gate: float | None) -> Path:
    torch.set_num_threads(1)
    spec = make_spec(FORM)
    return package_personal(
        spec,
        make_parts(spec, seed=seed),
        root,
        test_files=images.files,
        test_labels=labels,
        metrics={},
        round_number=seed,
        gate=gate,
    ).model_dir


def _named_by(directory: Path, images: TestImages) -> list[int]:
    """Labels under which this model is always right."""
    predicted = Model.load(directory, threads=1).predict([load_image(one, FORM) for one in images.files])
    return [int(label) for label in predicted.argmax(axis=1)]


def test_the_first_version_has_nothing_to_be_compared_with(tmp_path: Path, images: TestImages) -> None:
    first = _install(tmp_path, images, 1, images.labels, gate=0.0)
    assert read_manifest(first).gate is None


def test_a_worse_model_is_not_installed_and_the_one_in_service_stays(tmp_path: Path, images: TestImages) -> None:
    first = _install(tmp_path, images, 1, images.labels, gate=None)
    labels = _named_by(first, images)
    with pytest.raises(GateError, match=r"version 0001 in service 100\.0%"):
        _install(tmp_path, images, 2, labels, gate=0.01)
    assert Slots(tmp_path).current() == first
    assert [version.name for version in Slots(tmp_path).versions()] == ["0001"]


def test_a_model_that_is_good_enough_says_against_what(tmp_path: Path, images: TestImages) -> None:
    first = _install(tmp_path, images, 1, images.labels, gate=None)
    labels = _named_by(first, images)
    second = _install(tmp_path, images, 2, labels, gate=1.0)
    gate = read_manifest(second).gate
    assert gate is not None
    assert (gate.against, gate.images, gate.before, gate.allowed) == ("0001", 40, 1.0, 1.0)
    assert gate.accuracy == read_manifest(second).verification.accuracy_onnx
    assert Slots(tmp_path).current() == second


def test_a_damaged_model_in_service_keeps_no_better_one_out(tmp_path: Path, images: TestImages) -> None:
    first = _install(tmp_path, images, 1, images.labels, gate=None)
    (first / "model.onnx").write_bytes(b"damaged")
    assert Slots(tmp_path).current() == first
    second = _install(tmp_path, images, 2, images.labels, gate=0.0)
    assert Slots(tmp_path).current() == second


def test_models_of_other_classes_are_not_compared(tmp_path: Path, images: TestImages) -> None:
    first = _install(tmp_path, images, 1, images.labels, gate=None)
    path = first / "manifest.json"
    path.write_text(path.read_text().replace('"ant"', '"owl"'))
    assert pass_gate(first, Slots(tmp_path), images.files, images.labels) is not None
    other = tmp_path / "other"
    assert (
        pass_gate(_install(other, images, 2, images.labels, None), Slots(tmp_path), images.files, images.labels) is None
    )
