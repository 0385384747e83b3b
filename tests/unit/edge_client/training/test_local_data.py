"""A box's own images: how they are split, what a damaged one does, and that a snapshot is held to."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_client.errors import RoundError
from edge_client.store.private_store import PrivateStore
from edge_client.training.local_data import LocalData, RoundData
from fedcg.learning.image_set import SkippedImage
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.spec import FederationSpec, plan_from_mapping

CLASSES = ("cat", "dog")


@pytest.fixture(scope="module")
def spec() -> FederationSpec:
    image = {"mode": "L", "height": 16, "width": 16, "mean": [0.5], "std": [0.5]}
    plan = {"federation": "pets", "classes": CLASSES, "image": image, "method": "local", "rounds": 1}
    return complete_spec(plan_from_mapping(plan))


def tree(root: Path, count: int, classes: tuple[str, ...] = CLASSES, first: int = 0) -> Path:
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + count):
            pixels = np.random.default_rng([label, number]).integers(0, 256, (16, 16), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> PrivateStore:
    return PrivateStore.open(tmp_path_factory.mktemp("store"), "pets", "a")


def sizes(data: RoundData) -> tuple[int, int, int]:
    return len(data.train), len(data.val), len(data.test)


def test_a_damaged_image_is_in_no_split_and_no_snapshot_and_is_told(
    spec: FederationSpec, store: PrivateStore, tmp_path: Path
) -> None:
    root = tree(tmp_path / "d", 20)
    (root / "cat" / "7.png").write_bytes((root / "cat" / "7.png").read_bytes()[:150])
    (root / "dog" / "no.jpg").write_bytes(b"a letter")
    told: list[SkippedImage] = []
    data = LocalData(root, None, store, told.extend).for_round(spec, 1)
    assert sum(sizes(data)) == 39
    assert {"cat/7.png", "dog/no.jpg"}.isdisjoint(file.path for file in data.snapshot.files)
    assert [image.file for image in told] == ["cat/7.png", "dog/no.jpg"]
    assert "damaged image" in told[0].reason
    assert "not an image" in told[1].reason


def test_a_damaged_image_of_the_common_set_is_in_no_list_of_files(
    spec: FederationSpec, store: PrivateStore, tmp_path: Path
) -> None:
    common = tree(tmp_path / "common", 5)
    (common / "dog" / "2.png").write_bytes(b"gone")
    local = LocalData(tree(tmp_path / "d", 20), common, store)
    images = local.common_test(spec)
    assert images is not None
    files, labels = local.common_files(spec)
    assert len(images) == len(files) == 9
    assert common / "dog" / "2.png" not in files
    assert labels == images.labels.tolist()


def test_a_folder_in_which_every_image_is_damaged_is_no_data(
    spec: FederationSpec, store: PrivateStore, tmp_path: Path
) -> None:
    for path in tree(tmp_path / "d", 3).rglob("*.png"):
        path.write_bytes(b"gone")
    with pytest.raises(RoundError, match=r"cat/0\.png: not an image.*none of the 6 images"):
        LocalData(tmp_path / "d", None, store).for_round(spec, 1)


def test_folders_named_train_val_and_test_are_the_splits(
    spec: FederationSpec, store: PrivateStore, tmp_path: Path
) -> None:
    for first, (part, count) in enumerate({"train": 9, "val": 4, "test": 5}.items()):
        tree(tmp_path / part, count, first=100 * first)
    data = LocalData(tmp_path, None, store).for_round(spec, 1)
    assert sizes(data) == (18, 8, 10)
    assert all(file.path.startswith(f"{file.split}/") for file in data.snapshot.files)


def test_idx_files_are_a_boxes_data_and_their_test_part_is_held_out(
    spec: FederationSpec, store: PrivateStore, tmp_path: Path
) -> None:
    for part, count in (("train", 30), ("t10k", 12)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 16, 16), dtype=np.uint8)
        head = b"\x00\x00\x08\x03" + struct.pack(">3I", count, 16, 16)
        labels = b"\x00\x00\x08\x01" + struct.pack(">I", count) + bytes(row % 2 for row in range(count))
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    local = LocalData(tmp_path, None, store)
    data = local.for_round(spec, 1)
    assert len(data.test) == 12
    assert len(data.train) + len(data.val) == 30
    assert local.files(data.snapshot, "test") == ([], [])
    # A second look at unchanged files decodes nothing anew.
    assert local.for_round(spec, 1) is data
