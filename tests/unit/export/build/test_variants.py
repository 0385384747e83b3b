"""float16 and int8 forms of a model: tried on this machine, judged by held-out images, kept only where they pay."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from export.build import variants
from export.build.variants import HeldOut, add_variants
from export.errors import ConversionError, ExportError, InputError, ManifestError, TamperedError
from export.model.image_files import labelled_images
from export.model.manifest import Manifest, Variant, read_manifest
from export.model.runtime import Floats, Model, load_image
from export.model.versions import Slots
from tests.support.commands import data_of, run_fedcg
from tests.support.learning.export_models import (
    CLASSES,
    encoded,
    flip_bit,
    image_form,
    install_model,
    labels_by,
    picture,
    write_images,
)

FORM = image_form()
Clock = Callable[..., None]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return install_model(tmp_path / "models")


@pytest.fixture
def held_out(directory: Path, folder: Path) -> HeldOut:
    """Labelled by the model itself, so that float32 gets all of them right."""
    pictures, _ = labelled_images(folder, CLASSES, FORM)
    return HeldOut(pictures, labels_by(directory, pictures), pictures[:8])


def _by_name(manifest: Manifest) -> Mapping[str, Variant]:
    return {one.name: one for one in manifest.variants}


def test_each_variant_is_measured_and_the_decision_recorded(
    directory: Path, held_out: HeldOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "TIMING_S", 0.02)
    manifest = add_variants(directory, held_out, threads=1)
    assert manifest == read_manifest(directory)
    tried = _by_name(manifest)
    assert list(tried) == ["fp32", "ort", "fp16", "int8", "trt_fp16"]
    assert tried["fp32"].file == manifest.model
    assert tried["trt_fp16"].reason == "not tried: no TensorRT here, only CPU"
    for name in ("fp32", "ort", "fp16", "int8"):
        one = tried[name]
        assert one.latency_ms is not None
        assert one.latency_ms > 0
        assert one.start_ms is not None
        assert (one.machine is None) == (name != "ort")
        assert one.images == len(held_out.images)
        assert one.reason
        assert one.top1_agreement is not None
        assert one.top1_agreement > 0.9
        assert one.file is None or (directory / one.file.name).stat().st_size == one.file.size
    assert tried[manifest.serves].file is not None


@pytest.mark.parametrize(
    ("milliseconds", "serves"),
    [
        ({"fp32": 3.0, "fp16": 2.0, "int8": 1.0}, "int8"),
        ({"fp32": 3.0, "fp16": 1.0, "int8": 2.0}, "fp16"),
        ({"fp32": 1.0, "fp16": 0.99, "int8": 3.0}, "fp32"),
    ],
)
def test_the_fastest_that_is_clearly_faster_is_served(
    directory: Path, held_out: HeldOut, clock: Clock, milliseconds: Mapping[str, float], serves: str
) -> None:
    clock(**milliseconds)
    manifest = add_variants(directory, held_out, budget=0.2, threads=1)
    assert manifest.serves == serves
    model = Model.load(directory, threads=1)
    assert model.predictor.name == str(directory / (model.served.file or manifest.model).name)
    assert model.served.name == serves
    agreement = (model.predict(held_out.images).argmax(axis=1) == np.asarray(held_out.labels)).mean()
    assert agreement == _by_name(manifest)[serves].accuracy
    slow = [
        one for one in manifest.variants if milliseconds.get(one.name, 0) >= milliseconds["fp32"] and one.name != "fp32"
    ]
    assert all(one.file is None and "times as fast" in one.reason for one in slow)


def test_a_variant_that_loses_too_much_is_not_kept(
    directory: Path, held_out: HeldOut, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(fp32=3.0, fp16=2.0, int8=1.0)
    plain = variants._CONVERSIONS["int8"]

    def spoilt(content: bytes, calibration: Sequence[Floats]) -> bytes:
        proto = onnx.load_model_from_string(plain(content, calibration))
        for tensor in proto.graph.initializer:
            if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) > 1:
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(tensor.dims, np.int8), tensor.name))
        done: bytes = proto.SerializeToString()
        return done

    monkeypatch.setitem(variants._CONVERSIONS, "int8", spoilt)
    manifest = add_variants(directory, held_out, threads=1)
    assert manifest.serves == "fp16"
    refused = _by_name(manifest)["int8"]
    assert refused.file is None
    assert "of accuracy, more than the 0.5%" in refused.reason
    assert not (directory / "model-int8.onnx").exists()


def test_a_conversion_that_fails_is_recorded_and_harms_nothing(
    directory: Path, held_out: HeldOut, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_content: bytes, _calibration: Sequence[Floats]) -> bytes:
        raise ConversionError("can't be made: no such operator")

    monkeypatch.setitem(variants._CONVERSIONS, "fp16", broken)
    monkeypatch.setitem(variants._CONVERSIONS, "int8", lambda *_: b"no model")
    clock()
    manifest = add_variants(directory, held_out, threads=1)
    assert manifest.serves == "fp32"
    assert _by_name(manifest)["fp16"].reason == "can't be made: no such operator"
    assert "onnxruntime cannot load it" in _by_name(manifest)["int8"].reason
    assert Model.load(directory, threads=1).predict(held_out.images).shape == (len(held_out.images), len(CLASSES))


def test_variants_convert_the_network_and_keep_the_preprocessing_and_what_the_model_says_of_itself(
    directory: Path, held_out: HeldOut, clock: Clock
) -> None:
    clock(fp32=3.0, fp16=2.0, int8=1.0)
    manifest = add_variants(directory, held_out, budget=1.0, threads=1)
    image = np.asarray(picture(5, 61, 50))
    fitted = load_image(encoded(picture(5, 61, 50), "PNG"), FORM)
    fronts, answers, told = [], [], []
    for file in manifest.files:
        nodes = onnx.load(directory / file.name).graph.node
        fronts.append([node for node in nodes if node.name.startswith("preprocess/")])
        session = onnxruntime.InferenceSession(directory / file.name)
        given, wanted = (session.run(["logits"], {"images": one[None]})[0] for one in (image, fitted))
        np.testing.assert_array_equal(given, wanted)
        answers.append(wanted)
        told.append(session.get_modelmeta().custom_metadata_map)
    assert all(told[0].items() <= one.items() for one in told)
    assert json.loads(told[0]["classes"]) == list(CLASSES)
    assert len(fronts[0]) > 5
    assert fronts[0] == fronts[1] == fronts[2]
    assert not np.array_equal(answers[0], answers[1])
    assert not np.array_equal(answers[0], answers[2])


def test_a_model_without_preprocessing_has_variants_without(folder: Path, tmp_path: Path, clock: Clock) -> None:
    clock(fp32=3.0, fp16=2.0, int8=1.0)
    directory = install_model(tmp_path, takes="normalised")
    pictures, _ = labelled_images(folder, CLASSES, FORM)
    labels = labels_by(directory, pictures)
    manifest = add_variants(directory, HeldOut(pictures, labels, pictures[:8]), budget=0.2, threads=1)
    assert (manifest.takes, manifest.serves) == ("normalised", "int8")
    for file in manifest.files:
        [taken] = onnxruntime.InferenceSession(directory / file.name).get_inputs()
        assert (taken.name, taken.type) == ("input", "tensor(float)")
    agreement = (Model.load(directory, threads=1).predict(pictures).argmax(axis=1) == np.asarray(labels)).mean()
    assert agreement == _by_name(manifest)["int8"].accuracy


def test_an_altered_variant_is_found_although_it_is_not_the_one_in_use(
    directory: Path, held_out: HeldOut, tmp_path: Path, clock: Clock
) -> None:
    clock(fp32=3.0, fp16=2.0, int8=1.0)
    slots = Slots(tmp_path / "slots")

    def fill(staging: Path) -> None:
        for path in directory.iterdir():
            (staging / path.name).write_bytes(path.read_bytes())
        add_variants(staging, held_out, budget=1.0, threads=1)

    version = slots.install(fill)
    flip_bit(version / "model-fp16.onnx", 1000)
    with pytest.raises(TamperedError, match=r"model-fp16\.onnx"):
        slots.verify(version.name)


def test_a_manifest_cannot_serve_what_was_not_kept(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"serves": "int8"}))
    with pytest.raises(ManifestError, match="serves int8, which was not kept"):
        read_manifest(directory)


def test_without_images_there_is_nothing_to_judge_by() -> None:
    with pytest.raises(ExportError, match="there are none"):
        HeldOut([], [], [])


def test_the_command_makes_a_new_version_that_can_be_rolled_back(folder: Path, tmp_path: Path, clock: Clock) -> None:
    install_model(tmp_path)
    clock(fp16=10.0)
    arguments = ["optimise", tmp_path, "--images", folder, "--threads", "1", "--budget", "100"]
    told = run_fedcg("model", *arguments, "--json")
    assert told.exit_code == 0, told.output
    document = data_of(told.stdout)
    assert document["model"] == str(tmp_path / "0002")
    assert [one["name"] for one in document["variants"]] == ["fp32", "ort", "fp16", "int8", "trt_fp16"]
    assert document["providers"] == ["CPUExecutionProvider"]
    assert document["serves"] == read_manifest(tmp_path / "0002").serves
    assert document["variants"][0]["images"] == 18  # every fourth of the 24 calibrates
    clock(int8=10.0)
    people = run_fedcg("model", *arguments, "--calibration", folder)
    assert people.exit_code == 0, people.output
    assert f"in use: {tmp_path / '0003'}" in people.stdout
    assert "* " in people.stdout
    assert Slots(tmp_path).rollback() == tmp_path / "0002"


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda images: (images / "dog").mkdir(), "the model has no such class"),
        (lambda images: (images / CLASSES[0] / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n"), "broken.png"),
    ],
)
def test_bad_images_are_named_and_nothing_is_installed(
    tmp_path: Path, spoil: Callable[[Path], object], told: str
) -> None:
    root = install_model(tmp_path / "models").parent
    images = write_images(tmp_path / "images", 12).files[0].parent.parent
    spoil(images)
    answer = run_fedcg("model", "optimise", root, "--images", images)
    assert answer.exit_code == 2
    assert told in answer.stderr
    assert [version.name for version in Slots(root).versions()] == ["0001"]


def test_an_empty_folder_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"CLASS/\*\.png"):
        labelled_images(tmp_path, CLASSES, FORM)
