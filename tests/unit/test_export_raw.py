"""A model without its preprocessing: stated in file and manifest, run like any other, and not to be confused with one that has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from export.errors import ManifestError
from export.manifest import Takes, read_manifest, write_manifest
from export.package import package_personal
from export.runtime import Model, Predictor
from export.to_onnx import export_personal
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part
from tests.export_models import image_form, make_parts, make_spec

Parts = Mapping[Part, Mapping[str, torch.Tensor]]


@pytest.fixture(scope="module")
def spec() -> FederationSpec:
    torch.set_num_threads(1)
    return make_spec()


@pytest.fixture(scope="module")
def parts(spec: FederationSpec) -> Parts:
    return make_parts(spec)


def _random_pixels(spec: FederationSpec, count: int) -> np.ndarray:
    form = spec.image
    shape = (count, form.height, form.width, form.channels)
    return np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_model_without_preprocessing_takes_normalised_pixels_and_says_so(tmp_path: Path, mode: str) -> None:
    spec = make_spec(image_form(mode))
    parts, path = make_parts(spec), tmp_path / "model.onnx"
    export_personal(spec, parts, path, takes="normalised")
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = onnxruntime.InferenceSession(path)
    [taken] = session.get_inputs()
    assert (taken.name, taken.type, taken.shape[1:]) == ("input", "tensor(float)", [spec.image.channels, 20, 24])
    told = session.get_modelmeta().custom_metadata_map
    form = json.loads(told["image"])
    assert (told["takes"], form) == ("normalised", json.loads(spec.image.model_dump_json()))
    pixels = _random_pixels(spec, 3)
    mean, std = (np.array(form[name], dtype=np.float32) for name in ("mean", "std"))
    by_hand = ((pixels.astype(np.float32) / 255 - mean) / std).transpose(0, 3, 1, 2)
    [logits] = session.run(["logits"], {"input": by_hand})
    predictor = Predictor(path.read_bytes(), spec.image, spec.class_count, takes="normalised")
    np.testing.assert_allclose(predictor.run(pixels).logits, logits, atol=1e-6)
    export_personal(spec, parts, path)
    whole = Predictor(path.read_bytes(), spec.image, spec.class_count)
    np.testing.assert_array_equal(whole.run(pixels).logits, predictor.run(pixels).logits)


def test_a_manifest_that_says_another_thing_of_the_preprocessing_is_refused(
    tmp_path: Path, spec: FederationSpec, parts: Parts
) -> None:
    kinds: tuple[tuple[Takes, Takes], ...] = (("pixels", "normalised"), ("normalised", "pixels"))
    for takes, other in kinds:
        directory = package_personal(
            spec, parts, tmp_path, test_files=[], test_labels=[], metrics={}, round_number=1, takes=takes
        ).model_dir
        manifest = read_manifest(directory)
        assert manifest.takes == takes
        assert Model.load(directory).predict(_random_pixels(spec, 2)).shape == (2, 3)
        write_manifest(directory, manifest.model_copy(update={"takes": other}))
        with pytest.raises(ManifestError, match=r"takes .*; expected"):
            Model.load(directory)


@pytest.mark.parametrize("takes", ["pixels", "normalised"])
def test_a_manifest_of_another_normalisation_is_refused(
    tmp_path: Path, spec: FederationSpec, parts: Parts, takes: Takes
) -> None:
    directory = package_personal(
        spec, parts, tmp_path, test_files=[], test_labels=[], metrics={}, round_number=1, takes=takes
    ).model_dir
    manifest = read_manifest(directory)
    other = manifest.image.model_copy(update={"mean": (0.5, 0.4, 0.2)})
    write_manifest(directory, manifest.model_copy(update={"image": other}))
    with pytest.raises(ManifestError, match=r"was made for images .*0\.3\].*expected"):
        Model.load(directory)
