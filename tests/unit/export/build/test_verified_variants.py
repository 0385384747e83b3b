"""What was chosen is verified on image files that did not choose it; what fails is not served, and what serves stays."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from export.build import install_model as package
from export.build import variants
from export.build.variants import HeldOut
from export.model.manifest import read_manifest
from export.model.runtime import Model, load_image
from export.model.versions import Slots
from fedcg.imaging import Pixels
from tests.support.commands import data_of, run_fedcg
from tests.support.learning.export_models import TestImages, image_form, install_model, labels_by


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "TIMING_S", 0.02)
    monkeypatch.setattr(variants, "_latencies", lambda forms, _: [10.0 - number for number, _ in enumerate(forms)])


def _spoilt(content: bytes) -> bytes:
    """The same model with the weights of its largest layer gone."""
    proto = onnx.load_model_from_string(content)
    largest = max(proto.graph.initializer, key=lambda tensor: int(np.prod(tensor.dims)))
    zeros = np.zeros_like(onnx.numpy_helper.to_array(largest))
    largest.CopyFrom(onnx.numpy_helper.from_array(zeros, largest.name))
    done: bytes = proto.SerializeToString()
    return done


def _install(root: Path, images: TestImages) -> Path:
    """Labelled by the model itself, so that it gets every file right; what chooses the variants is other images."""
    plain = install_model(root.with_name("plain"))
    noise: list[Pixels] = [np.full(image_form().shape, shade, dtype=np.uint8) for shade in (0, 90, 255)]
    chosen_by = HeldOut(noise, labels_by(plain, noise), noise)
    labelled = TestImages(images.files, labels_by(plain, images.files))
    return install_model(root, images=labelled, variants=chosen_by)


def test_each_form_that_is_kept_says_what_it_gets_right_of_the_test_files(tmp_path: Path, images: TestImages) -> None:
    root = tmp_path / "models"
    directory = _install(root, images)
    manifest = read_manifest(directory)
    assert (manifest.verification.accuracy_torch, manifest.verification.accuracy_onnx) == (1.0, 1.0)
    checks = {one.name: one for one in manifest.verification.variants}
    assert {"ort", "fp16"} <= set(checks)
    for name, check in checks.items():
        assert (check.images, check.accuracy_fp32) == (len(images.files), 1.0)
        assert check.accuracy == check.top1_agreement  # fp32 gets all right, so what differs from it is wrong
        assert (check.max_abs_difference < 1e-4) == (name == "ort")
    served = Model.load(directory, threads=1)
    pictures = [load_image(file, manifest.image) for file in images.files]
    plain = Model.load(tmp_path / "plain", threads=1)
    agreement = (served.predict(pictures).argmax(axis=1) == plain.predict(pictures).argmax(axis=1)).mean()
    assert checks[manifest.serves].top1_agreement == agreement
    [row] = data_of(run_fedcg("model", "list", str(root), "--json").stdout)
    assert row["verification"] == manifest.verification.model_dump(mode="json")
    told = run_fedcg("model", "verify", str(root)).stdout
    assert f"accuracy on {len(images.files)} held-out images: torch 100.0%, ONNX 100.0%, ort 100.0%" in told


def test_a_form_that_only_did_well_where_it_was_chosen_is_not_served(
    tmp_path: Path, images: TestImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_int8(content: bytes, _calibration: Sequence[Pixels]) -> bytes:
        return _spoilt(content)

    monkeypatch.setitem(variants._CONVERSIONS, "int8", to_int8)
    monkeypatch.setattr(package, "add_variants", lambda *a, **k: variants.add_variants(*a, **k, budget=1.0))
    directory = _install(tmp_path / "models", images)
    manifest = read_manifest(directory)
    spoilt = next(one for one in manifest.variants if one.name == "int8")
    assert spoilt.file is None
    assert "held-out files that had no part in choosing it" in spoilt.reason
    assert not (directory / "model-int8.onnx").exists()
    assert manifest.serves == "fp16"
    assert Slots(tmp_path / "models").verify(directory.name)[0] == manifest
    [check] = [one for one in manifest.verification.variants if one.name == "int8"]
    assert check.accuracy < 0.99
