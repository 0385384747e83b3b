"""A box's own images: how they are split, what damaged and odd ones do, and that a snapshot is held to."""

import itertools
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_client.cli.status import read_status
from edge_client.config import PolicySection
from edge_client.errors import RoundError
from edge_client.firewall import check_spec
from edge_client.session.signals import RoundCommitted
from edge_client.store.private_store import PrivateStore
from edge_client.training.local_data import LocalData
from edge_client.training.trainer_child import Trainer
from fedcg.imaging import MAX_FILE_BYTES
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.spec import FederationSpec, plan_from_mapping
from fedcg.wire.messages.schemas import DeclineReason, RoundAttempt
from fedcg.wire.parts import DEFAULT_ALLOW_REPORT, ReportField
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import CLASSES
from tests.support.simulations import image_tree

PETS = ("cat", "dog")


@pytest.fixture(scope="module")
def spec() -> FederationSpec:
    image = {"mode": "L", "height": 16, "width": 16, "mean": [0.5], "std": [0.5]}
    plan = {"federation": "pets", "classes": PETS, "input": image, "method": "local", "rounds": 1}
    return complete_spec(plan_from_mapping(plan))


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> PrivateStore:
    return PrivateStore.open(tmp_path_factory.mktemp("store"), "pets", "a")


def test_a_damaged_image_of_the_common_set_is_in_no_list_of_files(
    spec: FederationSpec, store: PrivateStore, tmp_path: Path
) -> None:
    common = image_tree(tmp_path / "common", 5, PETS, "L", seed=1)
    (common / "dog" / "002.png").write_bytes(b"gone")
    local = LocalData(image_tree(tmp_path / "d", 20, PETS, "L"), common, store)
    images = local.common_test(spec)
    assert images is not None
    files, labels = local.common_samples(spec)
    assert len(images) == len(files) == 9
    assert common / "dog" / "002.png" not in files
    assert labels == images.labels.tolist()


def test_a_folder_of_damaged_images_is_no_data(spec: FederationSpec, store: PrivateStore, tmp_path: Path) -> None:
    for path in image_tree(tmp_path / "d", 3, PETS, "L").rglob("*.png"):
        path.write_bytes(b"gone")
    with pytest.raises(RoundError, match=r"cat/000\.png: not an image.*none of the 6 images"):
        LocalData(tmp_path / "d", None, store).for_round(spec, 1)


def test_folders_train_val_and_test_are_the_splits(spec: FederationSpec, store: PrivateStore, tmp_path: Path) -> None:
    for seed, (part, count) in enumerate({"train": 9, "val": 4, "test": 5}.items()):
        image_tree(tmp_path / part, count, PETS, "L", seed)
    data = LocalData(tmp_path, None, store).for_round(spec, 1)
    assert (len(data.train), len(data.val), len(data.test)) == (18, 8, 10)
    assert all(file.path.startswith(f"{file.split}/") for file in data.snapshot.files)


def test_arrays_are_a_boxes_data_and_their_test_part_is_held_out(
    spec: FederationSpec, store: PrivateStore, tmp_path: Path
) -> None:
    pixels, labels = np.random.default_rng(0).integers(0, 256, (42, 16, 16), dtype=np.uint8), np.arange(42) % 2
    np.savez(tmp_path / "own.npz", x_train=pixels[:30], y_train=labels[:30], x_test=pixels[30:], y_test=labels[30:])
    local = LocalData(tmp_path / "own.npz", None, store)
    data = local.for_round(spec, 1)
    assert len(data.test) == 12
    assert len(data.train) + len(data.val) == 30
    assert local.samples(spec, data.snapshot, "test") == ([], [])
    # A second look at unchanged files decodes nothing anew.
    assert local.for_round(spec, 1) is data


FEWER = CLASSES[0]


def trained(site: Site, trainer: Trainer, number: int) -> Counter[str]:
    assert trainer.do(site.round(number)) == RoundCommitted(RoundAttempt(number, 1))
    return Counter(CLASSES[file.label] for file in site.store.generations.snapshot(site.state().generation).files)


def test_damaged_images_are_left_out_and_listed_with_their_reasons_until_they_are_mended(site: Site) -> None:
    damaged = sorted((site.root / "data" / "train" / FEWER).iterdir())[:2]
    whole = [path.read_bytes() for path in damaged]
    damaged[0].write_bytes(b"a letter")
    damaged[1].write_bytes(whole[1][:60])
    trainer = site.trainer()  # one process, which reads changed images anew
    assert trained(site, trainer, 1)[FEWER] == 15
    told = str(read_status(site.config)["images_left_out"])
    assert told.startswith("2: ")
    for path in damaged:
        assert path.relative_to(site.root / "data").as_posix() in told
    assert "not an image" in told
    assert "damaged image" in told
    found = site.finding("data")
    assert found.state == "warning"
    assert "2 can't be used: " in found.detail
    assert all(str(path) in found.detail for path in damaged)
    assert all(path.name not in site.events_path.read_text() for path in damaged), "names stay out of the event log"
    for path, content in zip(damaged, whole, strict=True):
        path.write_bytes(content)
    assert trained(site, trainer, 2)[FEWER] == 17
    assert read_status(site.config)["images_left_out"] is None


def test_a_class_may_be_missing_and_an_unknown_one_is_an_error_with_the_fix(site: Site) -> None:
    for path in sorted((site.root / "data").glob(f"*/{FEWER}")):
        path.rename(site.root / f"{path.parent.name}-{FEWER}")
    assert trained(site, site.trainer(), 1)[FEWER] == 0
    assert f"{FEWER} 0" in str(read_status(site.config)["images"])
    found = site.finding("data")
    assert found.state == "ok"
    assert f"{FEWER} 0" in found.detail
    (site.root / f"train-{FEWER}").rename(site.root / "data" / "train" / "cow")
    detail, found = site.declined(DeclineReason.NO_DATA, 2), site.finding("data")
    assert found.state == "failed"
    for text in (detail, f"{found.detail}; {found.advice}"):
        assert "class 'cow'" in text
        assert ", ".join(CLASSES) in text
        assert "ename the folder to one of them" in text
        assert "list the class" in text


@pytest.mark.parametrize(
    "method",
    ["fedmd_cg", *(pytest.param(one, marks=pytest.mark.slow) for one in ("fedcg", "fedsplit", "fedgen", "local"))],
)
def test_a_box_of_one_class_with_an_empty_one_a_broken_file_and_mixed_colours_trains_and_tells(
    method: str, tmp_path: Path
) -> None:
    site = Site(tmp_path, real_spec(method))
    site.configure(policy=PolicySection(allow_report=DEFAULT_ALLOW_REPORT | {ReportField.LABEL_COUNTS}))
    train = site.root / "data" / "train"
    for path in (train / CLASSES[0]).iterdir():
        path.unlink()  # an empty class
    shutil.rmtree(train / CLASSES[2])  # one that is not there
    own = sorted((train / CLASSES[1]).iterdir())
    own[0].write_bytes(b"\x89PNG and no more")
    Image.fromarray(np.full((32, 32, 3), 90, dtype=np.uint8)).save(own[1])
    site.train()
    (skipped,) = site.events("images_skipped")
    assert skipped["count"] == 1
    assert own[0].name not in site.events_path.read_text()
    snapshot = site.store.generations.snapshot(site.state().generation)
    trained = [file for file in snapshot.files if file.split in {"train", "val"}]
    assert {file.label for file in trained} == {1}
    assert len(trained) == len(own) - 1


def test_a_box_with_too_few_images_declines_and_names_what_is_wrong(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec())
    first, *others = (sorted((site.root / "data" / "train" / name).iterdir()) for name in CLASSES)
    for path in (*first[1:], *itertools.chain(*others)):
        path.unlink()
    detail = site.declined(DeclineReason.NO_DATA)
    assert "training images after the split; at least 2" in detail
    assert str(site.root / "data") in detail
    assert site.store.generations.current() == (None, ())


@pytest.mark.parametrize(
    ("method", "aggregation", "takes_part"),
    [("fedcg", "kd", True), ("fedcg", "crossed_kd", False), ("fedmd_cg", "average", False)],
)
def test_a_box_that_keeps_its_label_counts_declines_before_it_trains_what_can_not_do_without(
    method: str, aggregation: str, takes_part: bool
) -> None:
    spec = real_spec(method, aggregation=aggregation)
    refusal = check_spec(spec, PolicySection())
    assert (refusal is None) is takes_part
    if refusal is not None:
        assert refusal[0] is DeclineReason.REPORT_NOT_ALLOWED
        assert "label_counts" in refusal[1]
    assert check_spec(spec, PolicySection(allow_report=DEFAULT_ALLOW_REPORT | {ReportField.LABEL_COUNTS})) is None


@pytest.mark.timeout(60)
def test_what_is_named_like_an_image_and_is_no_file_is_left_out_and_named_by_agent_and_doctor(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec())
    folder = site.root / "data" / "train" / CLASSES[0]
    (folder / "gone.png").symlink_to("no-such-file")
    (folder / "self.png").symlink_to("self.png")
    os.mkfifo(folder / "fifo.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "folder.png").mkdir()
    with (folder / "huge.png").open("wb") as huge:
        huge.truncate(MAX_FILE_BYTES + 1)
    (folder / ".hidden.png").write_bytes(b"no image")  # as macOS leaves beside every file
    reasons = {
        "gone.png": "a link to a file that does not exist",
        "self.png": "a link to a file that does not exist",
        "fifo.png": "not a regular file",
        "zero.png": "not a regular file",
        "folder.png": "not a regular file",
        "huge.png": f"{MAX_FILE_BYTES + 1} bytes is over the limit of 256 MiB",
    }
    trainer = site.trainer()
    for number in (1, 2):
        assert trainer.do(site.round(number)) == RoundCommitted(RoundAttempt(number, 1))
    assert [event["count"] for event in site.events("images_skipped")] == [6]
    told = str(read_status(site.config)["images_left_out"])
    finding = site.finding("data")
    assert told.startswith("6: ")
    assert told.endswith("repair or remove them; training skips them")
    assert (finding.state, finding.advice) == ("warning", "repair or remove them; training skips them")
    assert "6 can't be used" in finding.detail
    for name, reason in reasons.items():
        assert f"{folder / name}: {reason}" in told
        assert f"{folder / name}: {reason}" in finding.detail
    images = len([*(site.root / "data").glob("*/*/*")])
    assert finding.detail.startswith(f"{images - 1} images in ")
