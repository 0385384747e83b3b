"""Partitions: every image in one place, the asked skew, the same proportions for train and test, the same for one seed."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.data.deal import DealOptions, Partition, cut, limit
from experiments.data.open import folder_source, open_source
from experiments.data.partition_folders import Prepared, load_prepared, prepare
from experiments.data.source import Source
from experiments.errors import SourceError


def fake_tree(root: Path, per_class: int, classes: int = 4, mode: str = "L") -> Path:
    generator = np.random.default_rng(0)
    for label in range(classes):
        (root / f"k{label}").mkdir(parents=True)
        for index in range(per_class):
            pixels = generator.integers(0, 255, (5, 5) if mode == "L" else (5, 5, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / f"k{label}" / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def digits() -> Source:
    return open_source("digits")


def names(root: Path) -> set[str]:
    return {f"{path.parent.name}/{path.name}" for path in root.rglob("*.png")}


def split(digits: Source, out: Path, seed: int = 0, kind: str = "dirichlet:0.5", most: int | None = None) -> Prepared:
    return prepare(digits, out, DealOptions(4, Partition.parse(kind), seed, most))


@pytest.mark.parametrize(("clients", "sizes"), [(2, (1, 1)), (3, (2, 1))])
def test_groups_of_classes_go_to_groups_of_clients_evenly(clients: int, sizes: tuple[int, int]) -> None:
    shares = Partition.parse("classes:2").shares(clients, 10, np.random.default_rng(0))
    first, second = sizes
    assert np.array_equal(shares[:first], [[1 / first] * 5 + [0.0] * 5] * first)
    assert np.array_equal(shares[first:], [[0.0] * 5 + [1 / second] * 5] * second)


def test_more_groups_than_clients_are_refused(digits: Source, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="classes:5: 4 clients and 10 classes can't be put into 5 groups; at most 4"):
        split(digits, tmp_path, kind="classes:5")


def test_a_client_of_a_group_trains_and_is_tested_on_its_classes_alone(digits: Source, tmp_path: Path) -> None:
    prepared = split(digits, tmp_path, kind="classes:2")
    trained = [{path.split("/")[0] for path in names(client.root / "train")} for client in prepared.clients]
    assert trained == [set("01234"), set("01234"), set("56789"), set("56789")]
    assert [{path.split("/")[0] for path in names(client.root / "test")} for client in prepared.clients] == trained


def test_the_digits_are_all_1797_real_images_and_grey(digits: Source) -> None:
    assert sum(map(len, digits.train)) == 1797
    assert digits.classes == tuple("0123456789")
    assert digits.image_form(32).mode == "L"
    with Image.open(io.BytesIO(digits.train[3][0].content())) as image:
        assert (image.size, image.mode) == ((8, 8), "L")
    brightest = []
    for picture in digits.train[3][:10]:
        with Image.open(io.BytesIO(picture.content())) as image:
            brightest.append(int(np.asarray(image).max()))
    assert max(brightest) == 255


def test_every_image_is_in_exactly_one_place(digits: Source, tmp_path: Path) -> None:
    prepared = split(digits, tmp_path)
    places = [names(client.root / part) for client in prepared.clients for part in ("train", "test")]
    places.append(names(prepared.common))
    assert sum(map(len, places)) == 1797
    assert len(set().union(*places)) == 1797


def test_the_common_test_set_is_balanced(digits: Source, tmp_path: Path) -> None:
    prepared = split(digits, tmp_path)
    counts = {folder.name: len(list(folder.iterdir())) for folder in prepared.common.iterdir()}
    assert counts == dict.fromkeys(digits.classes, prepared.common_per_class)
    assert prepared.common_per_class == 174 // 6  # the rarest digit, 8, has 174 images


def test_train_and_test_follow_the_same_class_proportions(digits: Source, tmp_path: Path) -> None:
    for client in split(digits, tmp_path).clients:
        train, test = np.array(client.train), np.array(client.test)
        assert np.abs(train / train.sum() - test / test.sum()).max() < 0.05


def test_dirichlet_skews_and_iid_does_not(digits: Source, tmp_path: Path) -> None:
    skewed = np.array([client.train for client in split(digits, tmp_path / "a").clients])
    even = np.array([client.train for client in split(digits, tmp_path / "b", kind="iid").clients])
    assert (even.max(axis=0) - even.min(axis=0)).max() <= 1
    assert np.median(skewed.max(axis=0) / skewed.sum(axis=0)) > 0.4


def test_the_same_seed_gives_the_same_folders_and_another_seed_others(digits: Source, tmp_path: Path) -> None:
    one, again, other = (split(digits, tmp_path / name, seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    for left, right in zip(one.clients, again.clients, strict=True):
        assert names(left.root / "train") == names(right.root / "train")
    assert one.clients[0].train != other.clients[0].train


def test_every_client_gets_a_minimum_of_images_and_every_class_folder(digits: Source, tmp_path: Path) -> None:
    for seed in range(5):
        prepared = split(digits, tmp_path / str(seed), seed, "dirichlet:0.1")
        for client in prepared.clients:
            assert sum(client.train) >= 40
            assert {path.name for path in (client.root / "train").iterdir()} == set(digits.classes)


def test_images_per_client_bounds_training_images_and_keeps_proportions(digits: Source, tmp_path: Path) -> None:
    free, bound = split(digits, tmp_path / "a"), split(digits, tmp_path / "b", most=100)
    for before, after in zip(free.clients, bound.clients, strict=True):
        assert sum(after.train) == min(100, sum(before.train))
        share = np.array(before.train) / sum(before.train)
        assert np.abs(np.array(after.train) - share * sum(after.train)).max() < 1
        assert after.test == before.test


def test_what_was_written_is_read_back(digits: Source, tmp_path: Path) -> None:
    prepared = split(digits, tmp_path)
    assert load_prepared(tmp_path) == prepared
    with pytest.raises(SourceError):
        load_prepared(tmp_path / "nothing")


def test_a_source_with_a_test_part_keeps_it_apart(tmp_path: Path) -> None:
    fake_tree(tmp_path / "s" / "train", 40, mode="RGB")
    fake_tree(tmp_path / "s" / "test", 20, mode="RGB")
    source = folder_source(tmp_path / "s")
    assert source.image_form(32).mode == "RGB"
    prepared = prepare(source, tmp_path / "out", DealOptions(2, Partition.parse("iid"), 0))
    assert [sum(client.train) for client in prepared.clients] == [80, 80]
    assert prepared.common_per_class == 4
    assert [sum(client.test) for client in prepared.clients] == [32, 32]


def test_cut_and_limit_by_hand() -> None:
    # Shares .5 .3 .2 of 7: running sums 3.5 -> 4 (half to even), 5.6 -> 6, 7: so 4, 2, 1.
    assert cut(7, np.array([0.5, 0.3, 0.2])).tolist() == [4, 2, 1]
    # 5 of (6, 3, 1): 3, 1.5, 0.5 -> floors 3, 1, 0; the one left goes to the first largest remainder.
    assert limit(np.array([6, 3, 1]), 5).tolist() == [3, 2, 0]
    assert limit(np.array([6, 3, 1]), 10).tolist() == [6, 3, 1]


@pytest.mark.parametrize(
    "text",
    [
        *("dirichlet", "dirichlet:0", "dirichlet:-1", "dirichlet:nan", "domain", "domains:", "domains:a,a", "iid:3"),
        *("classes", "classes:1", "classes:0", "classes:half", "classes:99999"),
    ],
)
def test_an_unknown_partition_is_refused_by_name(text: str) -> None:
    with pytest.raises(SourceError, match=text):
        Partition.parse(text)


def test_too_few_images_and_odd_folders_are_refused(tmp_path: Path) -> None:
    source = folder_source(fake_tree(tmp_path / "few", 10))
    with pytest.raises(SourceError, match="fewer clients"):
        prepare(source, tmp_path / "out", DealOptions(4, Partition.parse("iid"), 0))
    with pytest.raises(SourceError, match="not a folder"):
        folder_source(tmp_path / "missing")
    (tmp_path / "few" / "empty").mkdir()
    with pytest.raises(SourceError, match="empty"):
        folder_source(tmp_path / "few")
