"""TensorRT, CUDA and the CPU: asked in this order, TensorRT with engines that are kept per model and go with its version.

There is no card here: onnxruntime's list of providers is replaced, and its session by one that notes what it was asked for and
computes on the CPU.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from export.model import versions
from export.model.runtime import Model, available_providers
from export.model.versions import ModelVersions
from export.serving.live_model import ServedModel
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


def test_each_model_has_engines_of_its_own_that_go_with_its_version(
    root: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for version in ("0001", "0002"):
        ModelVersions(root).use(version)
        assert Model.load(root, threads=1).predictor.providers == available_providers()
        options = card.tensorrt
        assert options["trt_engine_cache_enable"] == options["trt_timing_cache_enable"] == "True"
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
