"""A new version must be as good as the one in service on the box's own held-out images."""

from pathlib import Path

import pytest

from export.build.install_model import pass_gate
from export.errors import GateError
from export.model.manifest import read_manifest, write_manifest
from export.model.versions import Slots
from tests.support.learning.export_models import TestImages, install_model, labels_by


def test_the_first_version_has_nothing_to_be_compared_with(tmp_path: Path, images: TestImages) -> None:
    first = install_model(tmp_path, seed=1, images=images, gate=0.0)
    assert read_manifest(first).gate is None


def test_a_worse_model_is_not_installed_and_the_one_in_service_stays(tmp_path: Path, images: TestImages) -> None:
    first = install_model(tmp_path, seed=1, images=images)
    labels = labels_by(first, images.files)
    with pytest.raises(GateError, match=r"version 0001 in service 100\.0%"):
        install_model(tmp_path, seed=2, images=TestImages(images.files, labels), gate=0.01)
    assert Slots(tmp_path).current() == first
    assert [version.name for version in Slots(tmp_path).versions()] == ["0001"]


def test_a_model_that_is_good_enough_says_against_what(tmp_path: Path, images: TestImages) -> None:
    first = install_model(tmp_path, seed=1, images=images)
    labels = labels_by(first, images.files)
    second = install_model(tmp_path, seed=2, images=TestImages(images.files, labels), gate=1.0)
    gate = read_manifest(second).gate
    assert gate is not None
    assert (gate.against, gate.images, gate.before, gate.allowed) == ("0001", 24, 1.0, 1.0)
    assert gate.accuracy == read_manifest(second).verification.accuracy_onnx
    assert Slots(tmp_path).current() == second


def test_a_damaged_model_in_service_keeps_no_better_one_out(tmp_path: Path, images: TestImages) -> None:
    first = install_model(tmp_path, seed=1, images=images)
    (first / "model.onnx").write_bytes(b"damaged")
    assert Slots(tmp_path).current() == first
    second = install_model(tmp_path, seed=2, images=images, gate=0.0)
    assert Slots(tmp_path).current() == second


def test_a_model_with_the_same_classes_in_another_order_is_compared_by_their_names(
    tmp_path: Path, images: TestImages
) -> None:
    first = install_model(tmp_path, seed=1, images=images)
    right = TestImages(images.files, labels_by(first, images.files))
    manifest = read_manifest(first)
    write_manifest(first, manifest.model_copy(update={"classes": (*manifest.classes[1:], manifest.classes[0])}))
    gate = read_manifest(install_model(tmp_path, seed=1, images=right, gate=1.0)).gate
    assert gate is not None
    assert (gate.before, gate.accuracy) == (0.0, 1.0)  # the one in service names each image wrongly


def test_models_of_other_classes_are_not_compared(tmp_path: Path, images: TestImages) -> None:
    first = install_model(tmp_path, seed=1, images=images)
    path = first / "manifest.json"
    path.write_text(path.read_text().replace('"ant"', '"owl"'))
    assert pass_gate(first, Slots(tmp_path), images.files, images.labels) is not None
    other = tmp_path / "other"
    assert pass_gate(install_model(other, seed=2, images=images), Slots(tmp_path), images.files, images.labels) is None
