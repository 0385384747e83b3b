"""Versions appear whole or not at all, there is a way back, and a new one must be as good as the one in service."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime, timezone
from pathlib import Path

import pytest

from export.build.install_model import pass_gate
from export.errors import GateError, ManifestError, SlotError, TamperedError
from export.model import versions
from export.model.manifest import Manifest, ModelFile, Verification, digest, read_manifest, read_model, write_manifest
from export.model.versions import POINTER_NAME, ModelVersions, resolve
from fedcg.input_form import ImageForm
from tests.support.learning.export_models import TestImages, flip_bit, install_model, labels_by
from tests.support.present import present


def _manifest(content: bytes, round_number: int = 1) -> Manifest:
    return Manifest(
        federation="garden",
        round=round_number,
        spec="0" * 64,
        classes=("ant", "bee"),
        input=ImageForm(mode="L", height=8, width=8, mean=(0.5,), std=(0.5,)),
        takes="pixels",
        model=ModelFile(sha256=digest(content), size=len(content), opset=18),
        metrics={"accuracy": 0.5},
        verification=Verification(images=4, source="noise", max_abs_difference=0.0, top1_agreement=1.0),
        created=datetime(2026, 1, 2, tzinfo=timezone.utc),
    )


def _filler(content: bytes) -> Callable[[Path], None]:
    def fill(directory: Path) -> None:
        (directory / "model.onnx").write_bytes(content)
        write_manifest(directory, _manifest(content))

    return fill


def _names(installed: ModelVersions) -> list[str]:
    return [version.name for version in installed.versions()]


@pytest.fixture
def installed(tmp_path: Path) -> ModelVersions:
    return ModelVersions(tmp_path / "models")


@pytest.fixture
def three(installed: ModelVersions) -> ModelVersions:
    """With three versions, of which the last is in use."""
    for content in (b"one", b"two", b"three"):
        installed.install(_filler(content))
    return installed


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"format": 2', '"format": 1', "format"),
        ('"takes": "pixels"', '"takes": "anything"', "takes"),
        ('"round": 1', '"round": 1, "surprise": 0', "surprise"),
        ('"round": 1', '"round": -1', "round"),
        ('"name": "model.onnx"', '"name": "../../etc/model.onnx"', "model.name"),
        ('"opset": 18', '"opset": 0', "opset"),
        ('"serves": "fp32"', '"serves": "int8"', "serves int8, which was not kept"),
        ('"mode": "L"', '"mode": "RGB"', "input.mean: must have one number for each channel"),
        ("{", "", "not valid JSON"),
    ],
)
def test_an_invalid_manifest_is_refused_and_the_field_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    write_manifest(tmp_path, _manifest(b"model"))
    path = tmp_path / "manifest.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ManifestError, match=named):
        read_manifest(tmp_path)


def test_a_folder_without_manifest_or_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="exported model"):
        read_manifest(tmp_path)
    with pytest.raises(ManifestError, match=r"model\.onnx"):
        read_model(tmp_path, _manifest(b"model"))
    with pytest.raises(ManifestError, match="neither"):
        resolve(tmp_path)
    with pytest.raises(ManifestError, match="no such folder"):
        resolve(tmp_path / "gone")
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ManifestError, match="a file, not the folder of a model"):
        resolve(tmp_path / "model.onnx")


def test_a_fill_whose_model_is_not_the_manifests_is_not_installed(installed: ModelVersions) -> None:
    def mismatch(directory: Path) -> None:
        (directory / "model.onnx").write_bytes(b"other")
        write_manifest(directory, _manifest(b"model"))

    with pytest.raises(TamperedError):
        installed.install(mismatch)
    assert _names(installed) == []
    with pytest.raises(SlotError, match="no model is installed"):
        installed.current()


def test_rolling_back_returns_step_by_step_to_what_was_in_use(three: ModelVersions) -> None:
    assert three.rollback().name == "0002"
    assert three.rollback().name == "0001"
    with pytest.raises(SlotError, match="no earlier version"):
        three.rollback()
    assert three.current().name == "0001"


def test_rolling_back_skips_a_damaged_version(three: ModelVersions) -> None:
    flip_bit(three.root / "0002" / "model.onnx", 0)
    assert three.rollback().name == "0001"


def test_a_version_can_be_chosen_and_a_damaged_or_unknown_one_cannot(three: ModelVersions) -> None:
    assert three.use("0001").name == "0001"
    assert three.rollback().name == "0003"
    flip_bit(three.root / "0002" / "model.onnx", 0)
    with pytest.raises(TamperedError, match="0002"):
        three.use("0002")
    with pytest.raises(SlotError, match="0001, 0002, 0003"):
        three.use("0009")
    with pytest.raises(SlotError, match="no version"):
        three.use("../models/0001")
    assert three.current().name == "0003"


def test_old_versions_go_but_never_the_one_in_use_or_way_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "KEEP", 2)
    installed = ModelVersions(tmp_path)
    for content in (b"one", b"two", b"three"):
        installed.install(_filler(content))
    assert _names(installed) == ["0002", "0003"]
    installed.use("0002")
    installed.install(_filler(b"four"))
    assert _names(installed) == ["0002", "0003", "0004"]  # 0002 is where a rollback leads
    assert installed.rollback().name == "0002"
    installed.install(_filler(b"five"))
    assert installed.current().name == "0005"
    assert _names(installed) == ["0002", "0004", "0005"]


def test_numbers_count_on_beyond_four_digits(installed: ModelVersions) -> None:
    installed.install(_filler(b"one"))
    (installed.root / "0001").rename(installed.root / "9999")
    assert installed.install(_filler(b"two")).name == "10000"
    assert installed.install(_filler(b"three")).name == "10001"


def test_a_damaged_pointer_is_explained_and_can_be_replaced(installed: ModelVersions) -> None:
    installed.install(_filler(b"one"))
    (installed.root / POINTER_NAME).write_text("{")
    with pytest.raises(SlotError, match="fedcg model use"):
        installed.current()
    assert installed.use("0001") == installed.current()


def test_a_pointer_to_a_version_that_is_gone_is_explained(installed: ModelVersions) -> None:
    installed.install(_filler(b"one"))
    (installed.root / "0001").rename(installed.root / "0007")
    with pytest.raises(SlotError, match="0001 is missing"):
        installed.current()


def test_writers_at_the_same_time_each_get_a_version_and_readers_always_see_a_sound_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "KEEP", 100)
    installed = ModelVersions(tmp_path)
    installed.install(_filler(b"start"))
    done = threading.Event()
    reads = 0

    def read_until_done() -> None:
        nonlocal reads
        while not done.is_set() or reads == 0:
            current = installed.current()
            read_model(current, read_manifest(current))
            reads += 1

    def write(writer: int) -> None:
        for number in range(5):
            installed.install(_filler(f"{writer} {number}".encode()))

    with ThreadPoolExecutor(max_workers=5) as pool:
        reader = pool.submit(read_until_done)
        writers = [pool.submit(write, number) for number in range(4)]
        wait(writers)
        done.set()
        for one in (reader, *writers):
            one.result()
    assert reads > 0
    assert _names(installed) == [f"{number:04d}" for number in range(1, 22)]


_INSTALL_AND_HANG = """
import sys, time
from pathlib import Path
from export.model.versions import ModelVersions
def fill(directory):
    (directory / "model.onnx").write_bytes(b"half")
    print("filling", flush=True)
    time.sleep(600)
ModelVersions(Path(sys.argv[1])).install(fill)
"""


def test_a_writer_killed_in_the_middle_leaves_the_old_version_in_use_and_no_rubbish(installed: ModelVersions) -> None:
    first = installed.install(_filler(b"one"))
    command = [sys.executable, "-c", _INSTALL_AND_HANG, str(installed.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert present(process.stdout).readline() == "filling\n"
        assert len(list(installed.root.glob(".staging-*"))) == 1
        process.send_signal(signal.SIGKILL)
    assert installed.current() == first
    assert _names(installed) == ["0001"]
    assert installed.install(_filler(b"two")).name == "0002"
    assert list(installed.root.glob(".staging-*")) == []


@pytest.fixture
def first(tmp_path: Path, images: TestImages) -> Path:
    """A version in use."""
    return install_model(tmp_path, seed=1, images=images)


@pytest.fixture
def right(first: Path, images: TestImages) -> TestImages:
    """Images that the version in use gets right."""
    return TestImages(images.files, labels_by(first, images.files))


def test_the_first_version_has_nothing_to_be_compared_with(tmp_path: Path, images: TestImages) -> None:
    assert read_manifest(install_model(tmp_path, seed=1, images=images, gate=0.0)).gate is None


def test_a_worse_model_is_refused_and_the_one_in_service_stays(tmp_path: Path, first: Path, right: TestImages) -> None:
    with pytest.raises(GateError, match=r"version 0001 in service has 100\.0%"):
        install_model(tmp_path, seed=2, images=right, gate=0.01)
    assert ModelVersions(tmp_path).current() == first
    assert [version.name for version in ModelVersions(tmp_path).versions()] == ["0001"]


def test_a_model_that_is_good_enough_says_against_what(tmp_path: Path, first: Path, right: TestImages) -> None:
    second = install_model(tmp_path, seed=2, images=right, gate=1.0)
    gate = present(read_manifest(second).gate)
    assert (gate.against, gate.images, gate.before, gate.allowed) == ("0001", 24, 1.0, 1.0)
    assert gate.accuracy == read_manifest(second).verification.accuracy_onnx
    assert ModelVersions(tmp_path).current() == second


def test_a_damaged_model_in_service_keeps_no_better_one_out(tmp_path: Path, first: Path, images: TestImages) -> None:
    (first / "model.onnx").write_bytes(b"damaged")
    assert ModelVersions(tmp_path).current() == first
    assert install_model(tmp_path, seed=2, images=images, gate=0.0) == ModelVersions(tmp_path).current()


def test_a_model_with_the_same_classes_in_another_order_is_compared_by_their_names(
    tmp_path: Path, first: Path, right: TestImages
) -> None:
    manifest = read_manifest(first)
    write_manifest(first, manifest.model_copy(update={"classes": (*manifest.classes[1:], manifest.classes[0])}))
    gate = present(read_manifest(install_model(tmp_path, seed=1, images=right, gate=1.0)).gate)
    assert (gate.before, gate.accuracy) == (0.0, 1.0)  # the one in service names each image wrongly


def test_models_of_other_classes_are_not_compared(tmp_path: Path, first: Path, images: TestImages) -> None:
    path = first / "manifest.json"
    path.write_text(path.read_text().replace('"ant"', '"owl"'))
    assert pass_gate(first, ModelVersions(tmp_path), images.files, images.labels) is not None
    other = tmp_path / "other"
    assert (
        pass_gate(install_model(other, seed=2, images=images), ModelVersions(tmp_path), images.files, images.labels)
        is None
    )
