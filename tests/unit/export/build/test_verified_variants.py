"""What was chosen is verified on image files that did not choose it; what fails is not served, and what serves stays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from export.build import install_model as package
from export.build import variants
from export.build.install_model import package_personal
from export.build.to_onnx import Exported, export_personal
from export.build.variants import HeldOut
from export.errors import VerificationError
from export.model.manifest import Takes, digest, read_manifest
from export.model.preprocess import load_image
from export.model.runtime import Model
from export.model.versions import Slots
from fedcg.imaging import Pixels
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part
from tests.support.commands import run_fedcg
from tests.support.export_models import TestImages, make_parts, make_spec, write_images


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(variants, "TIMING_S", 0.02)
    monkeypatch.setattr(variants, "_latencies", lambda forms, _: [10.0 - number for number, _ in enumerate(forms)])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> TestImages:
    return write_images(tmp_path_factory.mktemp("images"), 24)


def _spoilt(content: bytes) -> bytes:
    """The same model with the weights of its largest layer gone."""
    proto = onnx.load_model_from_string(content)
    largest = max(proto.graph.initializer, key=lambda tensor: int(np.prod(tensor.dims)))
    zeros = np.zeros_like(onnx.numpy_helper.to_array(largest))
    largest.CopyFrom(onnx.numpy_helper.from_array(zeros, largest.name))
    done: bytes = proto.SerializeToString()
    return done


def _install(root: Path, spec: FederationSpec, images: TestImages, *, tries: bool, round_number: int = 1) -> Path:
    """Labelled by the model itself, so that it gets every file right; what chooses the variants is other images."""
    parts, form = make_parts(spec), spec.image
    plain = package_personal(
        spec, parts, root.with_name("plain"), test_files=[], test_labels=[], metrics={}, round_number=1
    )
    model = Model.load(plain.model_dir, threads=1)
    labels = [int(one) for one in model.predict([load_image(file, form) for file in images.files]).argmax(axis=1)]
    noise: list[Pixels] = [np.full((form.height, form.width, 3), shade, dtype=np.uint8) for shade in (0, 90, 255)]
    chosen_by = HeldOut(noise, [int(one) for one in model.predict(noise).argmax(axis=1)], noise)
    return package_personal(
        spec,
        parts,
        root,
        test_files=images.files,
        test_labels=labels,
        metrics={},
        round_number=round_number,
        variants=chosen_by if tries else None,
    ).model_dir


def test_each_form_that_is_kept_says_what_it_gets_right_of_the_test_files(tmp_path: Path, images: TestImages) -> None:
    root = tmp_path / "models"
    directory = _install(root, make_spec(), images, tries=True)
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
    [row] = json.loads(run_fedcg("model", "list", str(root), "--json").stdout)
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
    directory = _install(tmp_path / "models", make_spec(), images, tries=True)
    manifest = read_manifest(directory)
    spoilt = next(one for one in manifest.variants if one.name == "int8")
    assert spoilt.file is None
    assert "held-out files that had no part in choosing it" in spoilt.reason
    assert not (directory / "model-int8.onnx").exists()
    assert manifest.serves == "fp16"
    assert Slots(tmp_path / "models").verify(directory.name) == manifest
    [check] = [one for one in manifest.verification.variants if one.name == "int8"]
    assert check.accuracy < 0.99


def test_an_onnx_file_that_is_not_the_trained_model_blocks_its_release_and_the_last_good_one_stays(
    tmp_path: Path, images: TestImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "models"
    _install(root, make_spec(), images, tries=False)

    def broken(
        spec: FederationSpec,
        parts: Mapping[Part, Mapping[str, torch.Tensor]],
        out_path: Path,
        *,
        round_number: int,
        takes: Takes,
    ) -> Exported:
        made = export_personal(spec, parts, out_path, round_number=round_number, takes=takes)
        content = _spoilt(made.content)
        out_path.write_bytes(content)
        return Exported(content, made.opset, made.exporter)

    with monkeypatch.context() as patched:
        patched.setattr(package, "export_personal", broken)
        spec = make_spec()
        with pytest.raises(VerificationError, match="not the trained model"):
            package_personal(
                spec,
                make_parts(spec),
                root,
                test_files=images.files,
                test_labels=images.labels,
                metrics={},
                round_number=2,
            )
    assert [(one.name, one.is_current) for one in Slots(root).versions()] == [("0001", True)]
    assert Model.load(root, threads=1).manifest.round == 1
    assert _install(root, make_spec(), images, tries=False, round_number=3).name == "0002"
    assert digest((root / "0002" / "model.onnx").read_bytes()) == read_manifest(root / "0002").model.sha256
