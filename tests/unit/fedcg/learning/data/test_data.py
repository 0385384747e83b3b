"""Folders, arrays, hashes and batches: what becomes of an image before it reaches a network."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedcg.learning.data.image_folder import load_folder, normalise, split_by_hash, usable_rows
from fedcg.learning.data.sources import list_files
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import FileEntry
from fedcg.learning.spec import ImageForm
from fedcg.learning.training.batches import index_blocks

GREY = ImageForm(mode="L", height=16, width=16, mean=(0.5,), std=(0.25,))
COLOUR = ImageForm(mode="RGB", height=16, width=12, mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))
CLASSES = ("cat", "dog")


def picture(seed: int, size: tuple[int, int] = (20, 30)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def folder(root: Path, names: dict[str, int]) -> Path:
    for name, seed in names.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(seed).save(path)
    return root


def test_rows_come_sorted_by_path_with_the_label_of_their_folder(tmp_path: Path) -> None:
    root = folder(tmp_path, {"dog/b.jpg": 1, "cat/z.png": 2, "dog/a.png": 3})
    images, entries = load_folder(root, CLASSES, GREY)
    assert [entry.path for entry in entries] == ["cat/z.png", "dog/a.png", "dog/b.jpg"]
    assert images.labels.tolist() == [0, 1, 1]
    assert images.label_counts() == (1, 2)


def test_a_tree_of_train_and_test_is_loaded_whole_and_told_apart_by_path(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train/cat/a.png": 1, "test/dog/b.png": 2})
    assert list_files(root, CLASSES) == [("test/dog/b.png", 1), ("train/cat/a.png", 0)]


def test_a_snapshot_is_loaded_in_its_own_order_and_misses_a_removed_file_by_name(tmp_path: Path) -> None:
    root = folder(tmp_path, {"dog/b.png": 1, "cat/a.png": 2})
    images, _ = load_folder(root, CLASSES, GREY, subset=["dog/b.png", "cat/a.png"])
    assert images.labels.tolist() == [1, 0]
    with pytest.raises(DataError, match=r"cat/gone\.png.*not there"):
        load_folder(root, CLASSES, GREY, subset=["cat/gone.png"])


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "broken.png").write_bytes(b"no picture at all")
    with pytest.raises(DataError, match=r"cat/broken\.png: not an image"):
        load_folder(tmp_path, CLASSES, GREY)


def test_a_class_that_the_spec_does_not_name_and_an_empty_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images"):
        load_folder(tmp_path, CLASSES, GREY)
    folder(tmp_path, {"cow/a.png": 1})
    with pytest.raises(DataError, match="no class 'cow'"):
        load_folder(tmp_path, CLASSES, GREY)
    with pytest.raises(DataError, match="no such folder"):
        load_folder(tmp_path / "nowhere", CLASSES, GREY)


def test_an_npz_is_the_same_data_as_files_of_the_same_pixels(tmp_path: Path) -> None:
    pixels = np.stack([np.asarray(picture(seed)) for seed in (1, 2)])
    np.savez(tmp_path / "data.npz", images=pixels, labels=np.array([1, 0]))
    images, entries = load_folder(tmp_path / "data.npz", CLASSES, COLOUR)
    from_files, _ = load_folder(folder(tmp_path / "f", {"cat/b.png": 2, "dog/a.png": 1}), CLASSES, COLOUR)
    assert torch.equal(images.rows([1, 0]).images, from_files.images)
    assert images.labels.tolist() == [1, 0]
    again, _ = load_folder(tmp_path / "data.npz", CLASSES, COLOUR, subset=[entries[1].path])
    assert torch.equal(again.images[0], images.images[1])


def test_an_npz_with_other_arrays_or_labels_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", pictures=np.zeros((1, 16, 16), np.uint8))
    np.savez(tmp_path / "b.npz", images=np.zeros((1, 16, 16), np.uint8), labels=np.array([2]))
    np.savez(tmp_path / "c.npz", images=np.zeros((1, 16, 16), np.float32), labels=np.array([0]))
    for name, message in (("a", "arrays `images` and `labels`"), ("b", "labels must lie in 0..1"), ("c", "uint8")):
        with pytest.raises(DataError, match=message):
            load_folder(tmp_path / f"{name}.npz", CLASSES, GREY)


def entry(number: int) -> FileEntry:
    import hashlib

    return FileEntry(f"cat/{number}.png", hashlib.sha256(str(number).encode()).hexdigest(), 0)


def test_growing_data_never_moves_an_image_to_another_split() -> None:
    shares = {"train": 0.8, "val": 0.1, "test": 0.1}
    few, many = (split_by_hash([entry(number) for number in range(count)], shares) for count in (200, 2000))
    for name in shares:
        assert set(few[name]) <= set(many[name])
    assert len(many["train"]) == pytest.approx(1600, abs=60)
    assert len(many["val"]) == pytest.approx(200, abs=45)


def test_two_copies_of_one_image_end_on_the_same_side() -> None:
    copies = [FileEntry(f"cat/{name}.png", entry(7).sha256, 0) for name in "ab"]
    sides = [name for name, entries in split_by_hash(copies, {"train": 0.5, "test": 0.5}).items() if entries]
    assert len(sides) == 1


def test_shares_that_do_not_sum_to_one_are_refused() -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        split_by_hash([], {"train": 0.8, "test": 0.1})


def test_a_pixel_is_scaled_then_normalised_per_channel() -> None:
    raw = torch.tensor([255, 0, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    # 255 / 255 = 1 is 0.5 above its mean of 0.5; 0 is 0.4 below; 51 / 255 = 0.2 is 0.1 below: over 0.5, 0.25 and 0.2
    assert normalise(raw, COLOUR).flatten().tolist() == pytest.approx([1.0, -1.6, -0.5])


@pytest.mark.parametrize(("count", "used"), [(32, 32), (33, 32), (34, 34), (5, 5)])
def test_an_epoch_uses_every_image_once_but_never_a_last_batch_of_one(count: int, used: int) -> None:
    seen = torch.cat(list(index_blocks(count, 16, -(-used // 16), torch.Generator().manual_seed(0))))
    assert len(seen) == used
    assert len(set(seen.tolist())) == used


def test_one_image_cannot_be_trained_on() -> None:
    with pytest.raises(DataError, match="at least 2"):
        usable_rows(1, 16)
