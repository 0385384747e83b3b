"""float16 and int8 variants of a model: tried on this machine, evaluated on held-out images, kept if faster; `fedcg model optimise`."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from typer.testing import Result

from export.build import variants
from export.build.variants import HeldOut, add_variants
from export.errors import ConversionError, ExportError, SlotError, TamperedError
from export.model.image_files import labelled_inputs
from export.model.manifest import Manifest, Variant, read_manifest, required, signer_of
from export.model.runtime import Model, load_all, load_image
from export.model.versions import ModelVersions
from fedcg.imaging import Pixels
from fedcg.wire.messages.envelopes import SigningKey
from tests.support.commands import data_of, run_fedcg
from tests.support.learning import export_models
from tests.support.learning.export_models import CLASSES, TestImages, install_model, labels_by
from tests.support.raising import raising

FORM = export_models.image_form()
Clock = Callable[..., None]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return install_model(tmp_path / "models")


@pytest.fixture
def held_out(directory: Path, folder: Path) -> HeldOut:
    """Labelled by the model itself, so that float32 gets all of them right."""
    pictures, _ = labelled_inputs(folder, CLASSES, FORM)
    return HeldOut(pictures, labels_by(directory, pictures), pictures[:8])


@pytest.fixture
def any_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "BUDGET", 1.0)


def _by_name(manifest: Manifest) -> Mapping[str, Variant]:
    return {one.name: one for one in manifest.variants}


def test_each_variant_is_measured_and_the_decision_recorded(
    directory: Path, held_out: HeldOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "TIMING_S", 0.02)
    manifest = add_variants(directory, held_out, threads=1)
    assert manifest == read_manifest(directory)
    tried = _by_name(manifest)
    assert list(tried) == ["fp32", "fp16", "int8"]
    assert tried["fp32"].file == manifest.model
    for name in ("fp32", "fp16", "int8"):
        one = tried[name]
        assert (one.latency_ms or 0) > 0
        assert (one.top1_agreement or 0) > 0.9
        assert (one.images, bool(one.reason)) == (len(held_out.images), True)
        assert one.file is None or (directory / one.file.name).stat().st_size == one.file.size
    assert tried[manifest.serves].file is not None


@pytest.mark.usefixtures("any_loss")
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
    manifest = add_variants(directory, held_out, threads=1)
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
    monkeypatch.setitem(variants._CONVERSIONS, "int8", lambda content, _: _spoilt(content))
    manifest = add_variants(directory, held_out, threads=1)
    assert manifest.serves == "fp16"
    refused = _by_name(manifest)["int8"]
    assert refused.file is None
    assert "of accuracy; at most 0.5% is allowed" in refused.reason
    assert not (directory / "model-int8.onnx").exists()


def test_a_conversion_that_fails_is_recorded_and_harms_nothing(
    directory: Path, held_out: HeldOut, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(variants._CONVERSIONS, "fp16", raising(ConversionError("can't be created: no such operator")))
    monkeypatch.setitem(variants._CONVERSIONS, "int8", lambda *_: b"no model")
    clock()
    manifest = add_variants(directory, held_out, threads=1)
    assert manifest.serves == "fp32"
    assert _by_name(manifest)["fp16"].reason == "can't be created: no such operator"
    assert "onnxruntime cannot load it" in _by_name(manifest)["int8"].reason
    assert Model.load(directory, threads=1).predict(held_out.images).shape == (len(held_out.images), len(CLASSES))


@pytest.mark.usefixtures("any_loss")
def test_variants_convert_the_network_and_keep_the_preprocessing_and_what_the_model_says_of_itself(
    directory: Path, held_out: HeldOut, clock: Clock
) -> None:
    clock(fp32=3.0, fp16=2.0, int8=1.0)
    manifest = add_variants(directory, held_out, threads=1)
    image = np.asarray(export_models.picture(5, 61, 50))
    fitted = load_image(export_models.encoded(export_models.picture(5, 61, 50), "PNG"), FORM)
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


@pytest.mark.usefixtures("any_loss")
def test_an_altered_variant_is_found_although_it_is_not_the_one_in_use(
    directory: Path, held_out: HeldOut, tmp_path: Path, clock: Clock
) -> None:
    clock(fp32=3.0, fp16=2.0, int8=1.0)
    add_variants(directory, held_out, threads=1)
    export_models.flip_bit(directory / "model-fp16.onnx", 1000)
    with pytest.raises(TamperedError, match=r"model-fp16\.onnx"):
        ModelVersions(directory.parent).verify(directory.name)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "TIMING_S", 0.02)
    monkeypatch.setattr(variants, "_latencies", lambda forms, _: [10.0 - number for number, _ in enumerate(forms)])


def test_without_images_there_is_nothing_to_judge_by() -> None:
    with pytest.raises(ExportError, match="some are missing"):
        HeldOut([], [], [])


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda images: (images / "dog").mkdir(), "the model has no such class"),
        (lambda images: (images / CLASSES[0] / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n"), r"broken\.png"),
        (shutil.rmtree, "no such folder"),
        (lambda images: list(map(shutil.rmtree, images.iterdir())), r"CLASS/\*\.png"),
    ],
    ids=["a class too many", "a broken file", "no folder", "no images"],
)
def test_images_that_cannot_be_judged_by_are_named(tmp_path: Path, spoil: Callable[[Path], object], told: str) -> None:
    images = export_models.write_images(tmp_path / "images").files[0].parent.parent
    spoil(images)
    with pytest.raises(ExportError, match=told):
        labelled_inputs(images, CLASSES, FORM)


def _spoilt(content: bytes) -> bytes:
    """The same model with the weights of its largest layer gone."""
    proto = onnx.load_model_from_string(content)
    largest = max(proto.graph.initializer, key=lambda tensor: int(np.prod(tensor.dims)))
    largest.CopyFrom(onnx.numpy_helper.from_array(np.zeros_like(onnx.numpy_helper.to_array(largest)), largest.name))
    done: bytes = proto.SerializeToString()
    return done


def _install(root: Path, images: TestImages) -> Path:
    """Labelled by the model itself, so that it gets every file right; what chooses the variants is other images."""
    plain = install_model(root.with_name("plain"))
    noise: list[Pixels] = [np.full(export_models.image_form().shape, shade, dtype=np.uint8) for shade in (0, 90, 255)]
    chosen_by = HeldOut(noise, labels_by(plain, noise), noise)
    return install_model(root, images=TestImages(images.files, labels_by(plain, images.files)), variants=chosen_by)


@pytest.mark.usefixtures("quick")
def test_each_form_that_is_kept_says_what_it_gets_right_of_the_test_files(tmp_path: Path, images: TestImages) -> None:
    root = tmp_path / "models"
    directory = _install(root, images)
    manifest = read_manifest(directory)
    assert (manifest.verification.accuracy_torch, manifest.verification.accuracy_onnx) == (1.0, 1.0)
    checks = {one.name: one for one in manifest.verification.variants}
    assert {"fp16", "int8"} >= set(checks) >= {"fp16"}
    for name, check in checks.items():
        assert (check.images, check.accuracy_fp32) == (len(images.files), 1.0)
        assert check.accuracy == check.top1_agreement  # fp32 gets all right, so what differs from it is wrong
        assert check.max_abs_difference > 1e-4, name
    served = Model.load(directory, threads=1)
    pictures = load_all(images.files, manifest.input)
    plain = Model.load(tmp_path / "plain", threads=1)
    agreement = (served.predict(pictures).argmax(axis=1) == plain.predict(pictures).argmax(axis=1)).mean()
    assert checks[manifest.serves].top1_agreement == agreement
    [row] = data_of(run_fedcg("model", "list", str(root), "--json").stdout)
    assert row["verification"] == manifest.verification.model_dump(mode="json")


@pytest.mark.usefixtures("quick")
def test_a_form_that_only_did_well_where_it_was_chosen_is_not_served(
    tmp_path: Path, images: TestImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(variants._CONVERSIONS, "int8", lambda content, _: _spoilt(content))
    monkeypatch.setattr(variants, "_objection", lambda *_: "")
    directory = _install(tmp_path / "models", images)
    manifest = read_manifest(directory)
    spoilt = next(one for one in manifest.variants if one.name == "int8")
    assert spoilt.file is None
    assert "held-out files that were not used to choose it" in spoilt.reason
    assert not (directory / "model-int8.onnx").exists()
    assert manifest.serves == "fp16"
    assert ModelVersions(tmp_path / "models").verify(directory.name)[0] == manifest
    [check] = [one for one in manifest.verification.variants if one.name == "int8"]
    assert check.accuracy < 0.99


@pytest.fixture
def key(tmp_path: Path) -> Path:
    SigningKey.generate().save(tmp_path / "signing.key")
    return tmp_path / "signing.key"


def _optimise(root: Path, folder: Path, *more: str) -> Result:
    return run_fedcg("model", "optimise", root, "--images", folder, "--threads", "1", *more)


def test_nothing_is_installed_or_pruned_when_no_form_is_faster(tmp_path: Path, folder: Path, clock: Clock) -> None:
    for _ in range(3):
        root = install_model(tmp_path).parent
    before = ModelVersions(root).versions()
    clock()
    told = _optimise(root, folder)
    assert told.exit_code == 0, told.output
    assert ModelVersions(root).versions() == before
    assert f"no variant is faster on this device: {root / '0003'} stays in use" in told.stdout
    assert "at least 1.05 is required" in told.stdout


@pytest.mark.usefixtures("any_loss")
def test_the_form_in_use_is_not_installed_a_second_time(tmp_path: Path, folder: Path, clock: Clock) -> None:
    root = install_model(tmp_path).parent
    clock(fp16=10.0)
    first = data_of(_optimise(root, folder, "--json").stdout)
    assert (first["model"], first["installed"], first["serves"]) == (str(root / "0002"), True, "fp16")
    assert first["serves"] == read_manifest(root / "0002").serves
    assert [one["name"] for one in first["variants"]] == ["fp32", "fp16", "int8"]
    assert (first["providers"], first["variants"][0]["images"]) == (["CPUExecutionProvider"], 18)  # 6 of 24 calibrate
    again = data_of(_optimise(root, folder, "--json").stdout)
    assert (again["model"], again["installed"], again["serves"]) == (str(root / "0002"), False, "fp16")
    clock()  # on another machine it does not pay any more
    slower = data_of(_optimise(root, folder, "--json").stdout)
    assert (slower["model"], slower["installed"], slower["serves"]) == (str(root / "0003"), True, "fp32")
    clock(int8=10.0)
    people = _optimise(root, folder)
    assert f"in use: {root / '0004'}" in people.stdout
    assert "* " in people.stdout


@pytest.mark.usefixtures("any_loss")
def test_an_unsigned_version_never_replaces_a_signed_one(tmp_path: Path, folder: Path, key: Path, clock: Clock) -> None:
    root = install_model(tmp_path, key=key).parent
    clock(fp16=10.0)
    told = _optimise(root, folder)
    assert told.exit_code == 2
    assert "--sign" in told.stderr
    assert "signing.key" in told.stderr
    assert [one.name for one in ModelVersions(root).versions()] == ["0001"]
    done = _optimise(root, folder, "--sign", str(key))
    assert done.exit_code == 0, done.output
    assert read_manifest(root / "0002", required(str(key))).serves == "fp16"


def test_no_other_writer_puts_an_unsigned_version_over_a_signed_one(tmp_path: Path, key: Path) -> None:
    root = install_model(tmp_path, key=key).parent
    with pytest.raises(SlotError, match="--sign"):
        install_model(root)
    assert [one.name for one in ModelVersions(root).versions()] == ["0001"]
    assert signer_of(ModelVersions(root).current()) is not None
