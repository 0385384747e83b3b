"""The model in service follows the version that is chosen, and a bad version changes nothing."""

import logging
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from export.model.manifest import read_manifest, write_manifest
from export.model.runtime import Floats, Model
from export.model.versions import Slots
from export.serving.live_model import ServedModel
from fedcg.imaging import Pixels


@pytest.fixture
def root(installed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(installed, tmp_path / "models"))


class Watched:
    """A served model and what it told of."""

    def __init__(self, directory: Path) -> None:
        self.outcomes: Counter[str] = Counter()
        self.models = ServedModel(directory, threads=1, warm_up=(1, 3), observe=lambda one: self.outcomes.update([one]))

    def refresh(self) -> str:
        """The version in service after a look; "" without one."""
        self.models.refresh()
        return self.models.current.version if self.models.current else ""


def test_the_version_in_use_is_served_and_followed_and_loaded_once_each(root: Path) -> None:
    watched = Watched(root)
    assert (watched.refresh(), watched.models.refused) == ("0002", "")
    first = watched.models.current
    assert first is not None
    assert first.identity() == {"federation": "garden", "round": 2, "version": "0002"}
    watched.refresh()
    assert watched.models.current is first
    Slots(root).use("0001")
    assert watched.refresh() == "0001"
    second = watched.models.current
    assert second is not None
    assert watched.outcomes == {"loaded": 2}
    image = [np.full((20, 24, 3), 77, dtype=np.uint8)]
    np.testing.assert_array_equal(first.predict(image), Model.load(root / "0002", threads=1).predict(image))
    np.testing.assert_array_equal(second.predict(image), Model.load(root / "0001", threads=1).predict(image))
    assert not np.array_equal(first.predict(image), second.predict(image))


def test_a_damaged_version_is_refused_once_with_its_reason_and_the_old_one_stays(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Slots(root).use("0001")
    watched = Watched(root)
    assert watched.refresh() == "0001"
    path = root / "0002" / "model.onnx"
    sound = path.read_bytes()
    Slots(root).use("0002")
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with caplog.at_level(logging.ERROR):
        assert [watched.refresh(), watched.refresh()] == ["0001", "0001"]
    [line] = caplog.messages
    assert str(path) in line
    assert "version 0001 stays in service" in line
    assert str(path) in watched.models.refused
    assert watched.outcomes == {"loaded": 1, "refused": 1}
    path.write_bytes(sound)
    assert (watched.refresh(), watched.models.refused) == ("0002", "")


def test_a_version_that_gives_no_numbers_or_does_not_run_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Model, images: Sequence[Pixels]) -> Floats:
        raise RuntimeError(f"no memory for {len(images)}")

    for predict, told in (
        (lambda _, images: np.full((len(images), 3), np.nan, dtype=np.float32), "not numbers"),
        (fail, "cannot run it .no memory for 1."),
    ):
        watched = Watched(root)
        monkeypatch.setattr(Model, "predict", predict)
        assert watched.refresh() == ""
        assert re.search(told, watched.models.refused)


def test_a_model_of_another_federation_is_refused(root: Path) -> None:
    watched = Watched(root)
    watched.refresh()
    manifest = read_manifest(root / "0001")
    write_manifest(root / "0001", manifest.model_copy(update={"federation": "meadow"}))
    Slots(root).use("0001")
    assert watched.refresh() == "0002"
    assert "federation meadow, and this server serves garden" in watched.models.refused


@pytest.mark.parametrize("missing", ["folder", "versions", "chosen version", "sound bytes"])
def test_a_model_that_comes_later_is_served_then(root: Path, missing: str) -> None:
    aside, path = root.with_name("aside"), root / "0002" / "model.onnx"
    sound = path.read_bytes()
    if missing == "sound bytes":
        path.write_bytes(sound[:-1])
    else:
        (root / "0002" if missing == "chosen version" else root).rename(aside)
    if missing == "versions":
        root.mkdir()
    watched = Watched(root)
    assert [watched.refresh(), watched.refresh()] == ["", ""]
    assert str(root) in watched.models.refused
    assert watched.outcomes == {"refused": 1}
    if missing == "sound bytes":
        path.write_bytes(sound)
    else:
        aside.rename(root / "0002" if missing == "chosen version" else root)
    assert (watched.refresh(), watched.models.refused) == ("0002", "")


def test_one_model_without_versions_is_served_under_its_folders_name(root: Path) -> None:
    assert Watched(root / "0001").refresh() == "0001"
