"""A model without its preprocessing: stated in file and manifest, run like any other, and not to be confused with one that has it."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file

from export.build.to_onnx import export_personal
from export.errors import ManifestError
from export.model.manifest import Takes, read_manifest, write_manifest
from export.model.runtime import Model, Predictor
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part
from tests.support.commands import data_of, run_fedcg
from tests.support.learning.export_models import (
    image_form,
    install_model,
    make_parts,
    make_spec,
    random_pixels,
    write_images,
)

Parts = Mapping[Part, Mapping[str, torch.Tensor]]


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
    pixels = random_pixels(spec.image, 3)
    mean, std = (np.array(form[name], dtype=np.float32) for name in ("mean", "std"))
    by_hand = ((pixels.astype(np.float32) / 255 - mean) / std).transpose(0, 3, 1, 2)
    [logits] = session.run(["logits"], {"input": by_hand})
    predictor = Predictor(path.read_bytes(), spec.image, spec.class_count, takes="normalised")
    np.testing.assert_allclose(predictor.run(pixels).logits, logits, atol=1e-6)
    export_personal(spec, parts, path)
    whole = Predictor(path.read_bytes(), spec.image, spec.class_count)
    np.testing.assert_array_equal(whole.run(pixels).logits, predictor.run(pixels).logits)


def test_a_manifest_that_says_another_thing_of_the_preprocessing_is_refused(
    tmp_path: Path, spec: FederationSpec
) -> None:
    kinds: tuple[tuple[Takes, Takes], ...] = (("pixels", "normalised"), ("normalised", "pixels"))
    for takes, other in kinds:
        directory = install_model(tmp_path, takes=takes)
        manifest = read_manifest(directory)
        assert manifest.takes == takes
        assert Model.load(directory).predict(random_pixels(spec.image, 2)).shape == (2, 3)
        write_manifest(directory, manifest.model_copy(update={"takes": other}))
        with pytest.raises(ManifestError, match=r"takes .*; expected"):
            Model.load(directory)


@pytest.mark.parametrize("takes", ["pixels", "normalised"])
def test_a_manifest_of_another_normalisation_is_refused(tmp_path: Path, takes: Takes) -> None:
    directory = install_model(tmp_path, takes=takes)
    manifest = read_manifest(directory)
    other = manifest.image.model_copy(update={"mean": (0.5, 0.4, 0.2)})
    write_manifest(directory, manifest.model_copy(update={"image": other}))
    with pytest.raises(ManifestError, match=r"was made for images .*0\.3\].*expected"):
        Model.load(directory)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory, spec: FederationSpec, parts: Parts) -> tuple[Path, Path]:
    """The same model twice, exported by the command: with its preprocessing, and without."""
    home = tmp_path_factory.mktemp("home")
    (home / "spec.json").write_bytes(spec.canonical())
    tensors = {f"{part.value}/{name}": tensor for part, weights in parts.items() for name, tensor in weights.items()}
    save_file(tensors, home / "weights.safetensors")
    words: list[str | Path] = ["--spec", home / "spec.json", "--weights", home / "weights.safetensors"]
    for name, options in (("whole", ()), ("raw", ("--raw",))):
        told = run_fedcg("export", *words, "--out", home / name, *options)
        assert told.exit_code == 0, told.output
    return home / "whole", home / "raw"


def _answers(root: Path, folder: Path) -> list[dict[str, object]]:
    told = run_fedcg("infer", "--model", root, "--json", folder)
    assert told.exit_code == 0, told.output
    results: list[dict[str, object]] = data_of(told.stdout)["results"]
    return results


def test_the_commands_export_check_and_run_it_with_the_same_answers(roots: tuple[Path, Path], tmp_path: Path) -> None:
    whole, raw = roots
    assert [read_manifest(root / "0001").takes for root in roots] == ["pixels", "normalised"]
    checked = run_fedcg("model", "verify", raw)
    assert checked.exit_code == 0
    assert checked.stdout.startswith("0001  as its manifest says")
    write_images(tmp_path)
    answers = _answers(raw, tmp_path)
    assert len(answers) == 12
    assert answers == _answers(whole, tmp_path)
