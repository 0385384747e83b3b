"""A model whose input is a tensor: exported with its normalisation, and asked over HTTP, by commands and from Python, also with hostile bodies."""

import io
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from export import load
from export.build.install_model import pass_gate
from export.build.to_onnx import as_used
from export.errors import GateError
from export.model.manifest import read_manifest
from export.model.versions import ModelVersions
from fedcg.errors import NOT_FOUND
from fedcg.input_form import TensorForm
from tests.support.commands import data_of, fails, succeeds
from tests.support.learning.export_models import CLASSES, TestImages, install_model, make_parts, make_spec
from tests.support.serving import JSON, PNG, Server, serving
from tests.support.stack import wait_for

FORM = TensorForm(kind="tensor", shape=(2, 20, 24), mean=(3.0, -2.0), std=(2.0, 0.5))
SPEC = make_spec(FORM)
TENSORS = np.random.default_rng(1).normal(1.0, 2.0, (12, *FORM.shape)).astype(np.float32)
NPY = {"Content-Type": "application/x-npy"}
BYTES = {"Content-Type": "application/octet-stream"}
TAKES = "the model takes tensors [2, 20, 24] of float32"


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def header(shape: str, kind: str = "<f4") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text


with torch.no_grad():
    BY_TORCH = as_used(SPEC, make_parts(SPEC)).eval()(torch.from_numpy(TENSORS)).softmax(1).numpy()
LABELS = BY_TORCH.argmax(1).tolist()
HELD_OUT = TestImages(list(TENSORS), LABELS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_model(tmp_path_factory.mktemp("tensors"), spec=SPEC, images=HELD_OUT).parent


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    """It has 256 MiB beside those of its start."""
    with serving(models, "--max-batch", 12, "--max-bytes", 2_000_000) as running:
        pages = int(Path(f"/proc/{running.process.pid}/statm").read_text().split()[0])
        bound = pages * resource.getpagesize() + (256 << 20)
        resource.prlimit(running.process.pid, resource.RLIMIT_AS, (bound, bound))
        yield running
        assert running.stop()[0] == 0


def told(server: Server, body: bytes, headers: dict[str, str]) -> list[float]:
    answer = server.ask("/predict", body, headers)
    assert answer.status == 200, answer.text
    return [one["probability"] for one in answer.document["results"]]


def test_arrays_and_json_are_answered_as_the_trained_network_does(server: Server, models: Path) -> None:
    rows = BY_TORCH.max(1)
    wanted = pytest.approx(rows, abs=1e-5)
    assert told(server, npy(TENSORS), NPY) == wanted
    assert told(server, npy(np.asfortranarray(TENSORS)), BYTES) == wanted
    assert told(server, json.dumps({"inputs": TENSORS.tolist()}).encode(), JSON) == wanted
    one = json.dumps({"inputs": TENSORS[0].tolist()}, indent=4).encode()
    assert told(server, one, JSON) == pytest.approx(rows[:1], abs=1e-5)
    assert told(server, npy(TENSORS[1].astype(np.float16)), NPY) == pytest.approx(rows[1:2], abs=1e-2)
    shown = server.ask("/model").document
    assert (shown["takes"], shown["manifest"]["takes"]) == (TAKES.removeprefix("the model takes "), "tensors")
    assert shown["manifest"]["verification"]["accuracy_onnx"] == 1.0
    assert "npy" in server.ask("/openapi.json").text
    assert load(models).classify(TENSORS[2])[0].label == CLASSES[LABELS[2]]


def nested(value: object) -> bytes:
    rows: Any = TENSORS[0].tolist()
    rows[1][2][3] = value
    return json.dumps({"inputs": rows}).encode()


HOSTILE: dict[str, tuple[bytes, dict[str, str], int, str, str]] = {
    "claims 10^12": (header("(1000000000000, 2, 20, 24)"), NPY, 413, "too_many_images", "12 inputs"),
    "claims 12": (header("(12, 2, 20, 24)"), NPY, 422, "bad_npy", "declares [12, 2, 20, 24] of float32"),
    "objects": (header("(2, 20, 24)", "|O") + b"\x80\x04N.", BYTES, 422, "bad_npy", "holds objects"),
    "deep header": (header("(" * 9000), NPY, 422, "bad_npy", "names no type, order and shape"),
    "doubles": (npy(TENSORS.astype(np.float64)), NPY, 422, "bad_npy", "numbers of type float64"),
    "other shape": (npy(TENSORS[:, :1]), NPY, 422, "bad_npy", f"shape [12, 1, 20, 24]; {TAKES}"),
    "not a number": (npy(np.where(np.arange(12).reshape(12, 1, 1, 1) == 4, np.nan, TENSORS)), NPY, 422, "bad_npy", "in tensor 4"),
    "an image": (b"\x89PNG", PNG, 415, "unknown_type", TAKES),
    "images": (b'{"images": [[1]]}', JSON, 422, "bad_json", TAKES),
    "JSON's NaN": (nested(float("nan")), JSON, 422, "bad_values", "inputs[1][2][3]"),
    "beyond float32": (nested(1e300), JSON, 422, "bad_values", "finite"),
    "a longer number": (nested(10**400), JSON, 422, "bad_values", "out of range"),
    "one long text": (nested("x" * 300_000), JSON, 422, "bad_values", "some values are not numbers"),  # of every number, 1 GB
    "deep": (b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", JSON, 422, "bad_json", "not valid JSON"),
    "many tensors": (json.dumps({"inputs": [[[[0] * 24] * 20] * 2] * 13}).encode(), JSON, 413, "too_many_images", "12 inputs"),
    "huge JSON": (b'{"inputs": [' + b"0," * 900_000 + b"0]}", JSON, 413, "body_too_large", "bytes"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_body_that_is_no_tensor_is_refused_in_little_memory_with_what_is_taken(server: Server, what: str) -> None:
    body, headers, status, code, named = HOSTILE[what]
    answer = server.ask("/predict", body, headers)
    assert (answer.status, answer.code) == (status, code), answer.text
    assert named in f"{answer.document['error']['message']} {answer.document['error']['field']}"


def test_a_new_version_is_compared_and_one_of_other_tensors_is_taken_back(tmp_path: Path) -> None:
    install_model(tmp_path, spec=SPEC, images=HELD_OUT)
    with serving(tmp_path, "--shadow", 20, "--shadow-share", 1) as server:
        install_model(tmp_path, spec=SPEC, images=HELD_OUT, round_number=2)
        wait_for(lambda: server.ask("/predict", npy(TENSORS), NPY).document["version"] == "0002", "it was compared")
        install_model(tmp_path, spec=make_spec(FORM.model_copy(update={"shape": (2, 20, 28)})))
        server.wait_for_metric('fedcg_serve_rollbacks_total{reason="incomparable"}', 1)
        assert server.ask("/readyz").document["version"] == "0002"


def test_the_gate_and_the_forms_of_a_model_are_judged_by_tensors(models: Path, tmp_path: Path) -> None:
    worse = install_model(tmp_path / "worse", spec=SPEC, seed=5)
    with pytest.raises(GateError, match=r"on 12 held-out images is .*; version 0001 in service has 100\.0%"):
        pass_gate(worse, ModelVersions(models), list(TENSORS), LABELS)
    other = install_model(tmp_path / "other", spec=make_spec(FORM.model_copy(update={"shape": (2, 20, 28)})))
    assert pass_gate(other, ModelVersions(models), [np.zeros((2, 20, 28), np.float32)], [0]) is None
    grey = TensorForm(kind="tensor", shape=(3, 20, 24), dtype="uint8")
    np.savez(tmp_path / "bytes.npz", inputs=np.abs(TENSORS[:, [0, 1, 1]] * 9).astype(np.uint8), labels=np.array(LABELS))
    install_model(tmp_path / "uint8", spec=make_spec(grey))
    shown = data_of(succeeds("model", "optimise", tmp_path / "uint8", "--images", tmp_path / "bytes.npz", "--json"))
    assert {one["name"] for one in shown["variants"] if one["images"]} == {"fp32", "fp16", "int8"}


def test_commands_take_npy_and_npz_files(models: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", TENSORS[0])
    np.savez(tmp_path / "all.npz", inputs=TENSORS, labels=np.array(LABELS))
    shown = data_of(succeeds("infer", "--model", models, "--json", "--top", 1, tmp_path))["results"]
    assert [one["class"] for one in shown] == [CLASSES[label] for label in (*LABELS, LABELS[0])]
    assert [shown[0]["file"], shown[-1]["file"]] == [f"{tmp_path}/all.npz#0", f"{tmp_path}/one.npy"]
    assert f"{Path(__file__).name}: is not a numpy array" in fails(2, "infer", "--model", models, __file__)
    os.mkfifo(tmp_path / "fifo.npz")
    assert "fifo.npz: not a regular file" in fails(2, "infer", "--model", models, tmp_path / "fifo.npz")
    assert "nix.npz: no such file" in fails(NOT_FOUND, "infer", "--model", models, tmp_path / "nix.npz")
    (tmp_path / "spec.json").write_bytes(SPEC.canonical())
    weights = {f"{part.value}/{name}": one for part, held in make_parts(SPEC).items() for name, one in held.items()}
    save_file(weights, tmp_path / "weights.safetensors")
    words = f"export --spec {tmp_path}/spec.json --weights {tmp_path}/weights.safetensors --out {tmp_path}".split()
    succeeds(*words, "--images", tmp_path / "all.npz")
    checked = read_manifest(tmp_path / "0001").verification
    assert (checked.images, checked.source, checked.accuracy_onnx) == (12, "files", 1.0)
    np.savez(tmp_path / "all.npz", inputs=TENSORS, labels=np.full(12, 3))
    assert "label 3; the model's labels are 0 to 2" in fails(2, *words, "--images", tmp_path / "all.npz")
