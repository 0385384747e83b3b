"""TensorRT, CUDA and the CPU: asked in this order, TensorRT with engines that are kept per model and go with its version.

There is no card here: onnxruntime's list of providers is replaced, and its session by one that notes what it was asked for and
computes on the CPU.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from export.build.variants import HeldOut, add_variants
from export.model import runtime, versions
from export.model.manifest import read_manifest
from export.model.runtime import Model, available_providers
from export.model.versions import ModelVersions
from export.serving.live_model import ServedModel
from tests.support.learning.export_models import labels_by
from tests.support.serving import install_versions

ALL = ["CPUExecutionProvider", "AzureExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"]
_Session = onnxruntime.InferenceSession


class Card:
    """A card as onnxruntime shows it: its list of providers, and the sessions that were made."""

    def __init__(self) -> None:
        self.present = ALL
        self.asked: list[list[Any]] = []

    def session(self, content: bytes, options: onnxruntime.SessionOptions, providers: Sequence[Any]) -> Any:
        self.asked.append(list(providers))
        names = [one if isinstance(one, str) else one[0] for one in providers]
        made = _Session(content, options, providers=["CPUExecutionProvider"])
        made.get_providers = lambda: names
        for one in providers:
            if not isinstance(one, str) and "trt_engine_cache_path" in one[1]:
                (Path(one[1]["trt_engine_cache_path"]) / "built.engine").write_bytes(content[:16])
        return made

    @property
    def tensorrt(self) -> dict[str, str]:
        """TensorRT's options of the last session."""
        (name, options), *rest = self.asked[-1]
        assert (name, rest) == ("TensorrtExecutionProvider", ["CUDAExecutionProvider", "CPUExecutionProvider"])
        found: dict[str, str] = options
        return found


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: made.present)
    monkeypatch.setattr(onnxruntime, "InferenceSession", made.session)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    install_versions(tmp_path / "models", 2)
    return tmp_path / "models"


def _held_out(root: Path) -> HeldOut:
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (20, 24, 3), dtype=np.uint8) for _ in range(8)]
    return HeldOut(images, labels_by(root, images), images[:4])


def test_each_model_has_engines_of_its_own_that_go_with_its_version(
    root: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for version in ("0001", "0002"):
        ModelVersions(root).use(version)
        assert Model.load(root, threads=1).predictor.providers == available_providers()
        options = card.tensorrt
        assert options["trt_engine_cache_enable"] == options["trt_timing_cache_enable"] == "True"
        assert options["trt_fp16_enable"] == "False"
        assert options["trt_engine_cache_path"] == options["trt_timing_cache_path"]
        path = Path(options["trt_engine_cache_path"])
        assert path.parent == root / f"{version}.engines"
        assert (path / "built.engine").is_file()
        seen.append(path.name)
    assert len(set(seen)) == 2
    assert Model.load(root / "0001", threads=1).served.name == "fp32"
    assert Path(card.tensorrt["trt_engine_cache_path"]) == root / "0001.engines" / seen[0]
    assert sorted(path.name for path in root.glob("*.engines")) == ["0001.engines", "0002.engines"]
    (root / "0099.engines").mkdir()  # of a version that somebody deleted
    monkeypatch.setattr(versions, "KEEP", 1)
    installed = ModelVersions(root)
    source = root / "0002"

    def again(directory: Path) -> None:
        for path in source.iterdir():
            (directory / path.name).write_bytes(path.read_bytes())
        Model.load(directory, threads=1)  # as the gate does it

    installed.install(again)
    assert [version.name for version in installed.versions()] == ["0002", "0003"]
    assert [path.name for path in root.glob("*.engines")] == ["0002.engines"]
    assert list(root.glob(".staging*")) == []


def test_engines_that_are_built_are_no_new_version_to_the_server(root: Path, card: Card) -> None:
    models = ServedModel(root, threads=1, warm_up=(1,))
    models.refresh()
    loaded = len(card.asked)
    models.refresh()
    assert len(card.asked) == loaded


def test_a_folder_that_cannot_be_written_costs_the_cache_and_not_the_model(
    root: Path, card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "0002.engines").write_bytes(b"in the way")
    assert Model.load(root, threads=1).predictor.providers == available_providers()
    assert "trt_engine_cache_enable" not in card.tensorrt
    assert "each start rebuilds them" in caplog.text


def test_without_a_card_no_engines_are_kept(root: Path) -> None:
    Model.load(root, threads=1)
    assert list(root.glob("*.engines")) == []


@pytest.mark.parametrize(("half_ms", "flag"), [(1.0, "True"), (3.0, "False")])
def test_float16_in_the_engines_is_switched_on_where_it_was_measured_to_pay(
    root: Path, card: Card, clock: Callable[..., None], half_ms: float, flag: str
) -> None:
    clock(fp32=2.0, trt_fp16=half_ms)
    manifest = add_variants(root / "0002", _held_out(root), threads=1)
    half = next(one for one in manifest.variants if one.name == "trt_fp16")
    assert half.machine == runtime.machine()
    assert manifest.files == (manifest.model,)
    assert any(asked[0][1] == {"trt_fp16_enable": "True"} for asked in card.asked)  # measured with it, nothing kept yet
    assert (Model.load(root / "0002", threads=1).served.name == "trt_fp16") == (flag == "True")
    assert card.tensorrt["trt_fp16_enable"] == flag


def test_what_was_chosen_for_one_machine_is_not_used_on_another(
    root: Path,
    card: Card,
    clock: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock(trt_fp16=1.0)
    directory = root / "0002"
    assert add_variants(directory, _held_out(root), threads=1).serves == "trt_fp16"
    assert Model.load(directory, threads=1).served.name == "trt_fp16"
    assert card.tensorrt["trt_fp16_enable"] == "True"
    assert caplog.text == ""
    monkeypatch.setattr("devices.files.cpuinfo_field", lambda _root, name: {"flags": "fpu sse"}.get(name))
    there = Model.load(directory, threads=1)
    assert (there.served.name, there.served.file) == ("fp32", read_manifest(directory).model)
    assert card.tensorrt["trt_fp16_enable"] == "False"
    assert "`fedcg model optimise` to try the variants on this machine" in caplog.text
