"""The ONNX file is valid, does what the trained networks do, with or without their preprocessing, and is refused when it does not."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from export.build import to_onnx
from export.build.install_model import package_personal
from export.build.to_onnx import OPSET, export_personal
from export.errors import ConversionError, ManifestError, VerificationError
from export.model.manifest import read_manifest, write_manifest
from export.model.runtime import Model, Predictor, load_all
from export.model.versions import ModelVersions
from fedcg.imaging import Pixels
from fedcg.learning.data.image_folder import normalise, read_images
from fedcg.learning.networks import load_part
from fedcg.learning.spec import FederationSpec
from fedcg.learning.training.evaluation import evaluate
from fedcg.wire.parts import Part
from tests.support.learning import export_models

Parts = Mapping[Part, Mapping[str, torch.Tensor]]


@pytest.fixture
def path(tmp_path: Path, spec: FederationSpec, parts: Parts) -> Path:
    """The exported model's file; a test may write another model over it."""
    export_personal(spec, parts, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def _torch_logits(spec: FederationSpec, parts: Parts, pixels: np.ndarray) -> np.ndarray:
    extractor, classifier = (load_part(spec, part, parts[part]).eval() for part in (Part.EXTRACTOR, Part.CLASSIFIER))
    with torch.no_grad():
        batch = normalise(torch.from_numpy(pixels).permute(0, 3, 1, 2), spec.image)
        result: np.ndarray = classifier(extractor(batch)).numpy()
    return result


@pytest.mark.parametrize("split", ["lenet5", "lenet5_relu", "lenet5_wide", "cnn_bn", "timm:test_resnet+project:8"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_the_file_gives_the_logits_of_the_trained_networks_for_any_batch(tmp_path: Path, split: str, mode: str) -> None:
    sides = {"height": 64, "width": 72} if "timm" in split else {}
    spec = export_models.make_spec(export_models.image_form(mode, **sides), split)
    parts = export_models.make_parts(spec)
    path = tmp_path / "model.onnx"
    assert export_personal(spec, parts, path).exporter == "torchscript"
    session = onnxruntime.InferenceSession(path)  # plain onnxruntime, none of our code in between
    for count in (1, 3, 70):
        pixels = export_models.random_pixels(spec.image, count)
        logits, probabilities = session.run(["logits", "probabilities"], {"images": pixels})
        expected = _torch_logits(spec, parts, pixels)
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_allclose(probabilities, torch.from_numpy(expected).softmax(1).numpy(), atol=2e-5)
    assert np.ptp(expected, axis=0).max() > 0.1  # images do differ in their logits


def test_the_file_passes_the_checker_states_its_opset_and_says_what_it_is(
    tmp_path: Path, spec: FederationSpec, parts: Parts
) -> None:
    path = tmp_path / "model.onnx"
    exported = export_personal(spec, parts, path, round_number=4)
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    assert [(one.domain, one.version) for one in proto.opset_import] == [("", OPSET)]
    assert exported.opset == OPSET
    assert proto.ir_version <= 10  # what the onnxruntime of JetPack 6 (1.20 and later) reads
    told = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert (json.loads(told["classes"]), json.loads(told["input"])["mean"]) == (
        list(export_models.CLASSES),
        [0.5, 0.4, 0.3],
    )
    assert (told["federation"], told["round"], told["spec"]) == ("garden", "4", spec.digest)
    assert told["takes"] == "pixels"
    assert path.read_bytes() == exported.content


def test_same_weights_give_the_same_bytes_and_others_others(tmp_path: Path, spec: FederationSpec, parts: Parts) -> None:
    first = export_personal(spec, parts, tmp_path / "a.onnx")
    assert export_personal(spec, parts, tmp_path / "b.onnx").content == first.content
    assert export_personal(spec, export_models.make_parts(spec, seed=2), tmp_path / "c.onnx").content != first.content


def test_equal_weights_in_two_layers_both_stay(tmp_path: Path, spec: FederationSpec, parts: Parts) -> None:
    even = {part: {name: torch.full_like(tensor, 0.01) for name, tensor in parts[part].items()} for part in parts}
    path = tmp_path / "model.onnx"
    export_personal(spec, even, path)
    pixels = export_models.random_pixels(spec.image, 2)
    [logits] = onnxruntime.InferenceSession(path).run(["logits"], {"images": pixels})
    np.testing.assert_allclose(logits, _torch_logits(spec, even, pixels), rtol=1e-5)


def test_no_weights_of_other_parts_are_in_the_file(path: Path, spec: FederationSpec, parts: Parts) -> None:
    floats = sum(np.prod(one.dims) for one in onnx.load(path).graph.initializer)
    expected = sum(tensor.numel() for part in (Part.EXTRACTOR, Part.CLASSIFIER) for tensor in parts[part].values())
    assert floats <= expected + 2 * spec.image.channels


def test_the_second_exporter_is_used_when_the_first_is_gone_and_gives_the_same_logits(
    tmp_path: Path, spec: FederationSpec, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> onnx.ModelProto:
        raise TypeError("export() got an unexpected keyword argument 'dynamo'")

    monkeypatch.setattr(to_onnx, "_with_torchscript", gone)
    path = tmp_path / "model.onnx"
    assert export_personal(spec, parts, path).exporter == "dynamo"
    predictor = Predictor(path.read_bytes(), spec.image, spec.class_count)
    for count in (1, 3):
        pixels = export_models.random_pixels(spec.image, count)
        np.testing.assert_allclose(predictor.run(pixels).logits, _torch_logits(spec, parts, pixels), atol=1e-4)


def test_a_network_that_no_exporter_can_write_is_an_error_with_every_reason(
    tmp_path: Path, spec: FederationSpec, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> onnx.ModelProto:
        raise RuntimeError("operator aten::strange is not supported")

    monkeypatch.setattr(to_onnx, "_with_torchscript", unsupported)
    monkeypatch.setattr(to_onnx, "_with_dynamo", unsupported)
    with pytest.raises(ConversionError, match=r"torchscript: operator aten::strange.*dynamo: operator"):
        export_personal(spec, parts, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_verification_counts_what_both_models_get_right(
    path: Path, spec: FederationSpec, parts: Parts, images: export_models.TestImages
) -> None:
    checked = to_onnx.verify(path, spec, parts, images.files, images.labels)
    read = read_images(images.files[0].parent.parent, export_models.CLASSES, spec.image)
    data, entries = read.images, read.entries
    assert len(entries) == checked.images == len(images.files)
    expected = evaluate(spec, parts, data).accuracy
    assert checked.accuracy_torch == checked.accuracy_onnx == pytest.approx(expected)
    assert (checked.source, checked.top1_agreement) == ("files", 1.0)
    assert 0 <= checked.max_abs_difference < 1e-4


def test_without_files_random_pixels_are_compared_and_no_accuracy_is_claimed(
    path: Path, spec: FederationSpec, parts: Parts
) -> None:
    checked = to_onnx.verify(path, spec, parts, [], [])
    assert (checked.source, checked.accuracy_onnx, checked.images) == ("noise", None, to_onnx.NOISE_IMAGES)
    export_personal(spec, export_models.make_parts(spec, seed=2), path)
    with pytest.raises(VerificationError):
        to_onnx.verify(path, spec, parts, [], [])


@pytest.mark.parametrize("what", ["weights", "normalisation", "one small weight"])
def test_a_file_that_is_not_the_trained_model_is_refused(
    tmp_path: Path, spec: FederationSpec, parts: Parts, images: export_models.TestImages, what: str
) -> None:
    path = tmp_path / "model.onnx"
    if what == "weights":
        export_personal(spec, export_models.make_parts(spec, seed=2), path)
    elif what == "normalisation":
        swapped = export_models.image_form().model_copy(update={"mean": (0.3, 0.4, 0.5)})
        export_personal(export_models.make_spec(swapped), parts, path)
        proto = onnx.load(path)
        [told] = [one for one in proto.metadata_props if one.key == "input"]
        told.value = spec.image.model_dump_json()  # which it does not do
        onnx.save(proto, path)
    else:
        last = {name: tensor.clone() for name, tensor in parts[Part.CLASSIFIER].items()}
        last["5.bias"][0] += 1e-2
        export_personal(spec, {**parts, Part.CLASSIFIER: last}, path)
    with pytest.raises(VerificationError, match="differs from the trained model"):
        to_onnx.verify(path, spec, parts, images.files, images.labels)


def test_packaging_installs_a_model_that_runs_and_tells_where_it_comes_from(
    tmp_path: Path, spec: FederationSpec, parts: Parts, images: export_models.TestImages
) -> None:
    directory = export_models.install_model(
        tmp_path, images=images, metrics={"accuracy_personal": 0.75}, round_number=2
    )
    model = Model.load(tmp_path, threads=1)
    assert model.directory == directory == tmp_path / "0001"
    manifest = model.manifest
    assert (manifest.federation, manifest.round, manifest.spec) == ("garden", 2, spec.digest)
    assert (manifest.classes, manifest.metrics) == (export_models.CLASSES, {"accuracy_personal": 0.75})
    assert manifest.versions["torch"] == torch.__version__
    rows = model.predict(load_all(images.files, manifest.input))
    right = [
        model.top(row, 1)[0].label == export_models.CLASSES[label]
        for row, label in zip(rows, images.labels, strict=True)
    ]
    assert sum(right) / len(right) == pytest.approx(manifest.verification.accuracy_onnx)
    broken = {name: tensor * float("inf") for name, tensor in parts[Part.CLASSIFIER].items()}
    with pytest.raises(VerificationError):  # and the last good one stays
        package_personal(spec, {**parts, Part.CLASSIFIER: broken}, tmp_path, round_number=3)
    assert [version.name for version in ModelVersions(tmp_path).versions()] == ["0001"]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return export_models.install_model(tmp_path)


def test_many_images_are_predicted_in_batches_as_one_by_one(model_dir: Path, spec: FederationSpec) -> None:
    model = Model.load(model_dir, threads=1)
    pixels = export_models.random_pixels(spec.image, 300)
    together = model.predict(pixels)
    assert together.shape == (300, 3)
    np.testing.assert_allclose(together.sum(axis=1), 1, atol=1e-5)
    for row in (0, 255, 256, 299):
        np.testing.assert_allclose(model.predict([pixels[row]])[0], together[row], atol=1e-6)
    assert model.predict([]).shape == (0, 3)


def test_the_likeliest_classes_come_first_and_ties_keep_the_order_of_the_classes(model_dir: Path) -> None:
    model = Model.load(model_dir)
    guesses = model.top(np.array([0.25, 0.5, 0.25], dtype=np.float32), 3)
    assert [(guess.label, guess.probability) for guess in guesses] == [("bee", 0.5), ("ant", 0.25), ("cat", 0.25)]
    assert len(model.top(np.array([0.25, 0.5, 0.25], dtype=np.float32), 2)) == 2


@pytest.mark.parametrize(
    "image",
    [np.zeros((24, 20, 3), np.uint8), np.zeros((20, 24, 3), np.float32), np.zeros((20, 24), np.uint8)],
    ids=["sides swapped", "floats", "no channel"],
)
def test_an_image_of_another_shape_or_type_is_refused(model_dir: Path, image: Pixels) -> None:
    with pytest.raises(ValueError, match=r"the model takes uint8 \(20, 24, 3\)"):
        Model.load(model_dir).predict([image])


OTHERS: dict[str, dict[str, object]] = {
    "classes": {"classes": ("ant", "bee")},
    "height": {"input": export_models.image_form(height=21)},
    "mean": {"input": export_models.image_form().model_copy(update={"mean": (0.5, 0.4, 0.2)})},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_manifest_that_describes_another_model_is_refused(tmp_path: Path, other: dict[str, object]) -> None:
    directory = export_models.install_model(tmp_path)
    manifest = read_manifest(directory)
    assert manifest.takes == "pixels"
    assert Model.load(directory).predict(export_models.random_pixels(export_models.image_form(), 2)).shape == (2, 3)
    write_manifest(directory, manifest.model_copy(update=other))
    with pytest.raises(ManifestError, match="expected"):
        Model.load(directory)
