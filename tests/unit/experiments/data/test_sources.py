"""Every form in which an experiment's images may come, and what is said of those that can't be used."""

import io
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from experiments.data.client_datasets import Cohort, build_cohort
from experiments.data.deal import DealOptions, Partition
from experiments.data.open import open_source
from experiments.data.source import RowPicture, Source, read_digits
from experiments.demo.run_folder import prepare
from experiments.errors import SourceError
from fedcg.learning.data.image_folder import read_images
from tests.support.present import present
from tests.support.raising import raising
from tests.support.simulations import image_tree


def cohort_of(source: Source, partition: str = "iid", clients: int = 2, **options: Any) -> Cohort:
    deal = DealOptions(clients, Partition.parse(partition), 0, **{"validation": "test-half", **options})
    return build_cohort(source, source.input_form(8), deal)


def per_class(source: Source) -> list[int]:
    return [len(of_class) for of_class in source.train]


# Folders


@pytest.mark.parametrize("names", [("train", "test", "val"), ("train_images", "test_images", "val_images")])
def test_a_folder_may_bring_its_own_test_and_validation_images(tmp_path: Path, names: tuple[str, ...]) -> None:
    for count, name in zip((60, 20, 10), names, strict=True):
        image_tree(tmp_path / name, count, seed=count)
    source = open_source(str(tmp_path))
    assert (per_class(source), len(present(source.test)[0]), len(present(source.val)[0])) == ([60, 60], 20, 10)
    cohort = cohort_of(source, validation="share")
    sizes = [(len(one.train), len(one.val), one.test.label_counts()) for one in cohort.clients.values()]
    assert sizes == [(60, 10, (8, 8)), (60, 10, (8, 8))]
    assert cohort.common.label_counts() == (4, 4)  # a fifth of the test images


@pytest.fixture
def domains(tmp_path: Path) -> Source:
    """Office's layout in two domains, Digit5's in the third, whose classes are fewer."""
    root = tmp_path / "in"
    image_tree(root / "amazon", 40, seed=1)
    image_tree(root / "dslr", 40, seed=2)
    image_tree(root / "webcam" / "train_images", 30, ("dog",), seed=3)
    image_tree(root / "webcam" / "test_images", 12, ("dog",), seed=4)
    return open_source(str(root))


def test_a_folder_of_domains_is_one_client_per_domain_halved_unless_it_brings_test_images(domains: Source) -> None:
    assert [domain.name for domain in domains.domains] == ["amazon", "dslr", "webcam"]
    cohort = cohort_of(domains, "domains", 3)
    assert cohort.domains == {"client-1": "amazon", "client-2": "dslr", "client-3": "webcam"}
    assert [client.train.label_counts() for client in cohort.clients.values()] == [(20, 20), (20, 20), (0, 30)]
    # Office: of 40 test images a fifth is at most held out in common; the published split halves the rest
    sizes = [(len(client.val), len(client.test)) for client in cohort.clients.values()]
    held = cohort.common.label_counts()
    assert held == (4, 6)  # 2 of each class and domain: a fifth of the smallest, webcam's 12 dogs
    assert [sum(pair) for pair in sizes] == [36, 36, 10]


def test_domains_that_are_no_clients_give_the_public_images(domains: Source) -> None:
    cohort = cohort_of(domains, "domains:dslr,amazon", public_images=32_000)
    assert cohort.domains == {"client-1": "dslr", "client-2": "amazon"}
    assert len(present(cohort.public)) == 30
    with pytest.raises(SourceError, match="every domain is a client"):
        cohort_of(domains, "domains", 3, public_images=5)


def test_domains_may_be_mixed_and_dealt_without_losing_a_file_to_a_namesake(domains: Source, tmp_path: Path) -> None:
    assert per_class(domains) == [80, 80 + 30 + 12]
    prepare(domains, tmp_path / "out", DealOptions(2, Partition.parse("iid"), 0))
    assert len(list((tmp_path / "out").rglob("*.png"))) == 202


def test_domains_that_do_not_fit_or_are_not_there_are_named(domains: Source) -> None:
    with pytest.raises(SourceError, match=r"3 domains .* and 2 clients"):
        cohort_of(domains, "domains", 2)
    with pytest.raises(SourceError, match="'real': its domains are amazon, dslr, webcam"):
        cohort_of(domains, "domains:amazon,real", 2)
    with pytest.raises(SourceError, match="has no domains"):
        cohort_of(open_source("digits"), "domains", 2)


def test_folders_that_cannot_be_understood_are_named(tmp_path: Path) -> None:
    image_tree(tmp_path / "mixed" / "amazon", 3)
    image_tree(tmp_path / "mixed", 3, ("cat",))
    image_tree(tmp_path / "other" / "train", 3)
    image_tree(tmp_path / "other" / "test", 3, ("cat", "cow"))
    image_tree(tmp_path / "one", 3, ("cat",))
    image_tree(tmp_path / "empty", 3, ("cat",))
    (tmp_path / "empty" / "dog").mkdir()
    (tmp_path / "nothing" / "amazon" / "cat").mkdir(parents=True)
    image_tree(tmp_path / "nothing" / "dslr", 3)
    messages = {
        "mixed": "domains or classes",
        "other": "must hold the same class folders",
        "one": "at least 2 are needed",
        "empty": "dog holds no image",
        "nothing": "amazon holds no image",
        "missing": "not a folder",
    }
    for name, message in messages.items():
        with pytest.raises(SourceError, match=message) as caught:
            open_source(str(tmp_path / name))
        assert str(tmp_path / name) in str(caught.value)


# What is wrong with single images and clients


def test_a_damaged_image_is_left_out_named_and_counted_and_in_the_demo_by_the_agent(tmp_path: Path) -> None:
    image_tree(tmp_path / "in", 60)
    damaged = ("cat/000.png", "cat/003.png", "dog/040.png")
    for name in damaged[1:]:
        (tmp_path / "in" / name).write_bytes(b"not a picture")
    (tmp_path / "in" / "cat" / "000.png").unlink()
    os.mkfifo(tmp_path / "in" / "cat" / "000.png")  # whoever opens it waits for ever
    source = open_source(str(tmp_path / "in"))
    assert source.input_form(8).channels == 3
    cohort = cohort_of(source, validation="share")
    assert sorted(image.file for image in cohort.skipped) == [str(tmp_path / "in" / name) for name in damaged]
    assert all(("not an image" in one.reason) or ("not a regular file" in one.reason) for one in cohort.skipped)
    sets = [part for one in cohort.clients.values() for part in (one.train, one.val, one.test)]
    assert sum(map(len, sets)) + len(cohort.common) == 117
    prepare(source, tmp_path / "out", DealOptions(2, Partition.parse("iid"), 0))
    for name, mine in cohort.clients.items():
        read = read_images(tmp_path / "out" / name, source.classes, source.input_form(8)).images
        assert len(read) == len(mine.train) + len(mine.val) + len(mine.test)


def test_grey_and_colour_files_together_are_read_as_colour(tmp_path: Path) -> None:
    image_tree(tmp_path, 60)
    Image.new("L", (6, 6), 200).save(tmp_path / "cat" / "000.png")
    source = open_source(str(tmp_path))
    assert source.input_form(8).channels == 3
    assert next(iter(cohort_of(source).clients.values())).train.images.shape[1] == 3


def test_a_source_of_which_no_client_has_two_training_images_is_refused(tmp_path: Path) -> None:
    image_tree(tmp_path / "red", 2, ("cat",))
    image_tree(tmp_path / "blue", 2, ("dog",))
    with pytest.raises(SourceError, match="no client has 2 training images"):
        cohort_of(open_source(str(tmp_path)), "domains", 2)


# Arrays


def arrays(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    images = np.random.default_rng(seed).integers(0, 256, (count, 8, 8), dtype=np.uint8)
    return images, np.arange(count) % 3 * 5  # the labels 0, 5 and 10


def test_an_npz_is_a_source_whose_occurring_labels_are_the_classes(tmp_path: Path) -> None:
    images, labels = arrays(150)
    np.savez(tmp_path / "d.npz", images=images, labels=labels)
    source = open_source(str(tmp_path / "d.npz"))
    assert (source.name, source.classes, per_class(source)) == ("d", ("00", "05", "10"), [50, 50, 50])
    assert source.input_form(8).channels == 1
    picture = source.train[1][0]
    assert isinstance(picture, RowPicture)
    assert picture.where == "d.npz#1"


def test_arrays_with_labels_that_do_not_fit_or_damage_are_named(tmp_path: Path) -> None:
    images, labels = arrays(30)
    np.savez(tmp_path / "a.npz", images=images, labels=np.zeros(30, dtype=np.int64))
    np.savez(tmp_path / "b.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels + 1)
    (tmp_path / "c.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:99])
    for name, message in {"a": "same label", "b": "label 1, which no training", "c": "damaged"}.items():
        with pytest.raises(SourceError, match=message) as caught:
            open_source(str(tmp_path / f"{name}.npz"))
        assert f"{name}.npz" in str(caught.value)


def test_a_public_set_by_name_is_what_its_files_are(tmp_path: Path) -> None:
    (root := tmp_path / "FashionMNIST" / "raw").mkdir(parents=True)
    for part, count in (("train", 60), ("t10k", 20)):
        images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        head = b"\x00\x00\x08\x03" + struct.pack(">3I", *images.shape)
        (root / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        labels = bytes(row % 10 for row in range(count))
        (root / f"{part}-labels-idx1-ubyte").write_bytes(b"\x00\x00\x08\x01" + struct.pack(">I", count) + labels)
    by_name = open_source(f"torchvision:FashionMNIST:{tmp_path}")
    assert by_name.classes[0] == "T-shirt-top"  # its name has a slash, which no folder's may
    shown = np.random.default_rng(60).integers(0, 256, (60, 28, 28), dtype=np.uint8)[3::10]
    for picture, pixels in zip(by_name.train[3], shown, strict=True):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(picture.content()))), pixels)
    assert sum(map(len, present(by_name.test))) == 20


def test_a_public_set_that_is_neither_there_nor_to_be_had_says_where_its_files_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchvision.datasets.usps.download_url", raising(OSError("no network")))
    with pytest.raises(SourceError, match=r"can't be downloaded \(no network\): put usps\.bz2 and usps\.t\.bz2 there"):
        open_source(f"torchvision:USPS:{tmp_path}")
    with pytest.raises(SourceError, match="choose MNIST"):
        open_source("torchvision:ImageNet")


# The digits


def test_the_digits_are_scikit_learns_and_come_without_importing_it() -> None:
    from sklearn.datasets import load_digits

    levels, labels = load_digits(return_X_y=True)
    scans, ours = read_digits()
    assert np.array_equal(scans, np.rint(levels.reshape(-1, 8, 8) * (255 / 16)))
    assert np.array_equal(ours, labels)
    code = "import sys; from experiments.data.open import open_source; open_source('digits'), open_source('digits-domains')"
    command = [sys.executable, "-c", f"{code}; print('sklearn' in sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
