"""Data sets in folders and array files: read as published, refused by the file's name, hashed, split, and cut into batches."""

import io
import struct
import zipfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedcg.learning.data.array_files import MAX_BYTES
from fedcg.learning.data.image_folder import normalise, read_images, split_by_hash
from fedcg.learning.data.sources import list_files, read_arrays
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import FileEntry
from fedcg.learning.spec import ImageForm, TensorForm
from fedcg.learning.training.batches import index_blocks
from tests.support.present import present

SMALL_GREY = ImageForm(mode="L", height=4, width=4, mean=(0.5,), std=(0.5,))
SMALL_COLOUR = ImageForm(mode="RGB", height=4, width=4, mean=(0.5,) * 3, std=(0.5,) * 3)
TEN = tuple("0123456789")


def pixels(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def mnist(root: Path, train: np.ndarray, test: np.ndarray) -> Path:
    labels = [np.arange(len(images)) % 10 for images in (train, test)]
    np.savez(root / "m.npz", x_train=train, y_train=labels[0], x_test=test, y_test=labels[1])
    return root / "m.npz"


@pytest.mark.parametrize("names", [("train_images", "train_labels", "test_images", "test_labels"),
                                   ("x_train", "y_train", "x_test", "y_test")])  # fmt: skip
def test_an_npz_may_come_in_parts_by_either_naming(tmp_path: Path, names: tuple[str, ...]) -> None:
    arrays = (pixels(3, 4, 4, 1), np.array([[0], [1], [2]]), pixels(2, 4, 4, 1, seed=1), np.array([[2], [0]]))
    np.savez_compressed(tmp_path / "d.npz", **dict(zip(names, arrays, strict=True)))  # type: ignore[arg-type]
    data = read_arrays(tmp_path / "d.npz")
    assert data.train.images.shape == (3, 4, 4)
    assert present(data.test).labels.tolist() == [2, 0]


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def header(shape: tuple[int, ...], kind: str = "|u1") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": kind, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


LABELS = npy(np.zeros(2, dtype=np.int64))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (header((2, 60_000, 60_000)), "over the limit"),  # 7 GB declared in 128 bytes
        (header((2, 100, 100)), "of uint8, 20000 bytes, and has 0"),
        (header((2, 4, 4), "|O") + b"\x80\x04N.", "objects"),
        (b"not numpy at all", "not a numpy array"),
        (npy(np.zeros((2, 4, 4), dtype=np.float32)), "must be uint8"),
        (npy(np.zeros((2, 4, 4, 2), dtype=np.uint8)), "1 or 3"),
        (npy(np.zeros((3, 4, 4), dtype=np.uint8)), "labels for the 3 images"),
    ],
)
def test_an_npz_that_is_not_what_it_declares_is_refused_before_memory_is_taken(
    tmp_path: Path, images: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_arrays(npz(tmp_path / "d.npz", images=images, labels=LABELS), SMALL_GREY)
    assert "d.npz" in str(caught.value)


SIGNALS = TensorForm(kind="tensor", shape=(2, 3), mean=(1.0, 0.0), std=(2.0, 1.0))


def test_tensors_of_an_npz_are_read_as_they_are_and_normalised_along_their_first_dimension(tmp_path: Path) -> None:
    signals = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    np.savez(tmp_path / "d.npz", inputs=signals, labels=np.array([0, 1, 0, 1]))
    found = read_images(tmp_path / "d.npz", ("a", "b"), SIGNALS)
    assert np.array_equal(found.images.images.numpy(), signals)
    normalised = normalise(found.images.images, SIGNALS)
    assert normalised[1].tolist() == [[2.5, 3.0, 3.5], [9.0, 10.0, 11.0]]  # (6 - 1) / 2, ...; (9 - 0) / 1, ...
    counts = TensorForm(kind="tensor", shape=(3,), dtype="uint8")
    assert normalise(torch.tensor([[0, 255, 51]]).byte(), counts)[0].tolist() == pytest.approx([0, 1, 0.2])
    with pytest.raises(DataError, match=r"tensors must be in an \.npz"):
        read_images(tmp_path, ("a", "b"), SIGNALS)


def test_tensors_that_are_of_another_form_or_infinite_are_refused(tmp_path: Path) -> None:
    for inputs, message in (
        (header((2, 60_000, 60_000), "<f8"), r"must be float32 \[N, 2, 3\], not float64 \[2, 60000"),
        (header((10**9, 2, 3), "<f4"), "the limit is 4000000 rows"),
        (npy(np.array([[[0] * 3] * 2, [[np.inf] * 3] * 2], dtype=np.float32)), "d.npz#1: numbers that are not fin"),
    ):
        with pytest.raises(DataError, match=message):
            read_images(npz(tmp_path / "d.npz", inputs=inputs, labels=LABELS), ("a", "b"), SIGNALS)


def test_a_member_that_unpacks_to_more_than_the_limit_is_refused_by_its_declared_size(tmp_path: Path) -> None:
    path = npz(tmp_path / "bomb.npz", images=header((2, 4, 4)) + bytes(32), labels=LABELS)
    content = bytearray(path.read_bytes())
    at = content.rfind(b"PK\x01\x02", 0, content.rfind(b"PK\x01\x02"))  # the directory's entry of `images`
    content[at + 24 : at + 28] = struct.pack("<I", MAX_BYTES + 1)
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"unpacks to {MAX_BYTES + 1} bytes"):
        read_arrays(path)


def test_whatever_bytes_of_an_npz_are_damaged_the_answer_is_data_or_an_error_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez_compressed(path, images=pixels(2, 4, 4), labels=np.array([0, 1]))
    whole, generator = path.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        content = bytearray(whole)
        for at in generator.integers(0, min(len(content), 400), 3):
            content[at] = generator.integers(256)
        path.write_bytes(content)
        try:
            read_arrays(path)
        except DataError as error:
            assert path.name in str(error)  # noqa: PT017 - some damage leaves a readable file


def test_an_agent_reads_arrays_as_files_of_the_same_pixels_part_by_part(tmp_path: Path) -> None:
    train, test = pixels(12, 4, 4), pixels(5, 4, 4, seed=1)
    found = read_images(mnist(tmp_path, train, test), TEN, SMALL_GREY)
    assert np.array_equal(found.images.images[:12, 0].numpy(), train)
    paths = [entry.path for entry in found.entries[11:13]]
    assert paths == ["train/m.npz#11", "test/m.npz#0"]
    chosen = read_images(tmp_path / "m.npz", TEN, SMALL_GREY, subset=["test/m.npz#4"]).images
    assert np.array_equal(chosen.images[0, 0].numpy(), test[4])
    with pytest.raises(DataError, match=r"label 9; labels must lie in 0\.\.4"):
        read_images(tmp_path / "m.npz", TEN[:5], SMALL_GREY)


def test_grey_arrays_become_colour_where_the_spec_asks_for_it(tmp_path: Path) -> None:
    train = pixels(2, 4, 4)
    found = read_images(mnist(tmp_path, train, train), TEN, SMALL_COLOUR)
    assert found.images.images.shape == (4, 3, 4, 4)
    assert all(np.array_equal(plane.numpy(), train[0]) for plane in found.images.images[0])


GREY = ImageForm(mode="L", height=16, width=16, mean=(0.5,), std=(0.25,))
COLOUR = ImageForm(mode="RGB", height=16, width=12, mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))
CLASSES = ("cat", "dog")


def folder(root: Path, names: dict[str, int]) -> Path:
    for name, seed in names.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(1, 30, 20, 3, seed=seed)[0]).save(path)
    return root


def test_rows_come_sorted_by_path_with_the_label_of_their_folder(tmp_path: Path) -> None:
    read = read_images(folder(tmp_path, {"dog/b.jpg": 1, "cat/z.png": 2, "dog/a.png": 3}), CLASSES, GREY)
    images, entries = read.images, read.entries
    assert [entry.path for entry in entries] == ["cat/z.png", "dog/a.png", "dog/b.jpg"]
    assert images.labels.tolist() == [0, 1, 1]
    assert images.label_counts() == (1, 2)


def test_a_tree_of_train_and_test_is_loaded_whole_and_told_apart_by_path(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train/cat/a.png": 1, "test/dog/b.png": 2})
    assert list_files(root, CLASSES) == [("test/dog/b.png", 1), ("train/cat/a.png", 0)]


def test_a_snapshot_is_loaded_in_its_own_order_and_misses_a_removed_file_by_name(tmp_path: Path) -> None:
    root = folder(tmp_path, {"dog/b.png": 1, "cat/a.png": 2})
    images = read_images(root, CLASSES, GREY, subset=["dog/b.png", "cat/a.png"]).images
    assert images.labels.tolist() == [1, 0]
    with pytest.raises(DataError, match=r"cat/gone\.png.*is gone"):
        read_images(root, CLASSES, GREY, subset=["cat/gone.png"])


def test_an_empty_folder_a_file_that_is_no_image_and_a_class_the_spec_does_not_name_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images"):
        read_images(tmp_path, CLASSES, GREY)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "broken.png").write_bytes(b"no picture at all")
    with pytest.raises(DataError, match=r"cat/broken\.png: not an image"):
        read_images(tmp_path, CLASSES, GREY)
    folder(tmp_path, {"cow/a.png": 1})
    with pytest.raises(DataError, match="no class 'cow'"):
        read_images(tmp_path, CLASSES, GREY)
    with pytest.raises(DataError, match="no such folder"):
        read_images(tmp_path / "nowhere", CLASSES, GREY)


def entry(number: int, name: str = "") -> FileEntry:
    return FileEntry(f"cat/{name or number}.png", sha256(str(number).encode()).hexdigest(), 0)


def test_growing_data_never_moves_an_image_to_another_split_and_copies_of_one_end_on_the_same_side() -> None:
    shares = {"train": 0.8, "val": 0.1, "test": 0.1}
    few, many = (split_by_hash([entry(number) for number in range(count)], shares) for count in (200, 2000))
    for name in shares:
        assert set(few[name]) <= set(many[name])
    assert len(many["train"]) == pytest.approx(1600, abs=60)
    assert len(many["val"]) == pytest.approx(200, abs=45)
    sides = split_by_hash([entry(7, "a"), entry(7, "b")], {"train": 0.5, "test": 0.5})
    assert sorted(map(len, sides.values())) == [0, 2]


def test_a_pixel_is_scaled_then_normalised_per_channel() -> None:
    raw = torch.tensor([255, 0, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    # 255 / 255 = 1 is 0.5 above its mean of 0.5; 0 is 0.4 below; 51 / 255 = 0.2 is 0.1 below: over 0.5, 0.25 and 0.2
    assert normalise(raw, COLOUR).flatten().tolist() == pytest.approx([1.0, -1.6, -0.5])


@pytest.mark.parametrize(("count", "used"), [(32, 32), (33, 32), (34, 34), (5, 5)])
def test_an_epoch_uses_every_image_once_but_never_a_last_batch_of_one(count: int, used: int) -> None:
    seen = torch.cat(list(index_blocks(count, 16, -(-used // 16), torch.Generator().manual_seed(0))))
    assert len(seen) == used
    assert len(set(seen.tolist())) == used
