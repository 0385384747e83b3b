"""Who gets which images: every image in one place, the asked skew, the same for one seed, in memory as in the demo's folders."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.data.client_datasets import Cohort, build_cohort
from experiments.data.deal import Deal, DealOptions, Partition, Validation, cut, deal_out, limit
from experiments.data.open import folder_source, open_source
from experiments.data.source import PicturesPerClass, Source
from experiments.demo.run_folder import prepare
from experiments.errors import SourceError
from experiments.simulation.batch import RunSetting
from experiments.simulation.party_builder import party_of
from fedcg.learning.data.image_folder import read_images, split_by_hash
from fedcg.learning.data.public_images import read_public
from fedcg.learning.image_set import ImageSet
from fedcg.learning.spec import image_form
from tests.support.learning.learning_cases import quick_spec
from tests.support.present import present
from tests.support.simulations import image_tree


@pytest.fixture(scope="module")
def digits() -> Source:
    return open_source("digits")


def split(source: Source, seed: int = 0, kind: str = "dirichlet:0.5", most: int | None = None) -> Deal:
    return deal_out(source, DealOptions(4, Partition.parse(kind), seed, most))


def counts(pictures: PicturesPerClass) -> np.ndarray:
    """The numbers of images per class."""
    return np.array([len(of_class) for of_class in pictures])


def trained(deal: Deal) -> np.ndarray:
    """The numbers of training images, [clients, classes]."""
    return np.array([counts(client.train) for client in deal.clients.values()])


def names(*parts: PicturesPerClass) -> list[tuple[int, str]]:
    """Class and name of every image."""
    return [(label, one.name) for part in parts for label, of_class in enumerate(part) for one in of_class]


# Shares


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 1)])
def test_groups_of_classes_go_to_groups_of_clients_evenly(first: int, second: int) -> None:
    shares = Partition.parse("classes:2").shares(first + second, 10, np.random.default_rng(0))
    assert np.array_equal(shares[:first], [[1 / first] * 5 + [0.0] * 5] * first)
    assert np.array_equal(shares[first:], [[0.0] * 5 + [1 / second] * 5] * second)


def test_a_client_of_a_group_trains_and_is_tested_on_its_classes_alone(digits: Source) -> None:
    for number, client in enumerate(split(digits, kind="classes:2").clients.values()):
        own = np.arange(10) // 5 == number // 2
        assert np.array_equal(counts(client.train) > 0, own)
        assert np.array_equal(counts(client.test) > 0, own)


def test_cut_and_limit_by_hand() -> None:
    # Shares .5 .3 .2 of 7: running sums 3.5 -> 4 (half to even), 5.6 -> 6, 7: so 4, 2, 1.
    assert cut(7, np.array([0.5, 0.3, 0.2])).tolist() == [4, 2, 1]
    # 5 of (6, 3, 1): 3, 1.5, 0.5 -> floors 3, 1, 0; the one left goes to the first largest remainder.
    assert limit(np.array([6, 3, 1]), 5).tolist() == [3, 2, 0]
    assert limit(np.array([6, 3, 1]), 10).tolist() == [6, 3, 1]


UNKNOWN = (
    "dirichlet dirichlet:0 dirichlet:-1 dirichlet:nan domain domains: domains:a,a iid:3 "
    "classes classes:1 classes:0 classes:half classes:99999"
)


@pytest.mark.parametrize("text", UNKNOWN.split())
def test_an_unknown_partition_is_refused_by_name(text: str) -> None:
    with pytest.raises(SourceError, match=text):
        Partition.parse(text)


# Deals


def test_every_image_is_in_one_place_the_common_set_is_balanced_and_train_and_test_are_alike(digits: Source) -> None:
    deal = split(digits)
    places = names(deal.common, *(part for client in deal.clients.values() for part in (client.train, client.test)))
    assert sorted(places) == sorted(names(digits.train))
    assert len(set(places)) == 1797
    assert set(counts(deal.common)) == {174 // 6}  # the rarest digit, 8, has 174 images
    for client in deal.clients.values():
        train, test = counts(client.train), counts(client.test)
        assert np.abs(train / train.sum() - test / test.sum()).max() < 0.05


def test_dirichlet_skews_and_iid_does_not_and_every_client_gets_a_minimum_of_images(digits: Source) -> None:
    skewed, even = trained(split(digits)), trained(split(digits, kind="iid"))
    assert (even.max(axis=0) - even.min(axis=0)).max() <= 1
    assert np.median(skewed.max(axis=0) / skewed.sum(axis=0)) > 0.4
    assert all(trained(split(digits, seed, "dirichlet:0.1")).sum(axis=1).min() >= 40 for seed in range(5))


def test_the_same_seed_gives_the_same_deal_and_another_seed_another(digits: Source) -> None:
    one, again, other = (split(digits, seed) for seed in (3, 3, 4))
    for left, right in zip(one.clients.values(), again.clients.values(), strict=True):
        assert names(left.train) == names(right.train)
    assert not np.array_equal(trained(one), trained(other))


def test_images_per_client_bounds_training_images_and_keeps_proportions(digits: Source) -> None:
    free, bound = split(digits), split(digits, most=100)
    for before, after in zip(free.clients.values(), bound.clients.values(), strict=True):
        whole, kept = counts(before.train), counts(after.train)
        assert kept.sum() == min(100, whole.sum())
        assert np.abs(kept - whole / whole.sum() * kept.sum()).max() < 1
        assert names(after.test) == names(before.test)


def test_more_groups_than_clients_too_few_images_and_odd_folders_are_refused(digits: Source, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="classes:5: 4 clients and 10 classes can't form 5 groups; at most 4"):
        split(digits, kind="classes:5")
    with pytest.raises(SourceError, match="fewer clients"):
        split(folder_source(image_tree(tmp_path / "few", 10, "abcd", "L")), kind="iid")
    with pytest.raises(SourceError, match="not a folder"):
        folder_source(tmp_path / "missing")
    (tmp_path / "few" / "empty").mkdir()
    with pytest.raises(SourceError, match="empty"):
        folder_source(tmp_path / "few")


# In memory, and in the demo's folders


def cohort_of(source: Source, partition: str = "dirichlet:0.5", **options: Any) -> Cohort:
    return build_cohort(source, source.input_form(8), DealOptions(4, Partition.parse(partition), 0, **options))


def same(left: ImageSet, right: ImageSet) -> bool:
    return torch.equal(left.images, right.images) and torch.equal(left.labels, right.labels)


def rows(*sets: ImageSet | torch.Tensor) -> list[bytes]:
    stacks = [one.images if isinstance(one, ImageSet) else one for one in sets]
    return [image.numpy().tobytes() for stack in stacks for image in stack]


@pytest.mark.parametrize("validation", ["share", "test-half"])
def test_a_cohort_in_memory_is_what_an_agent_reads_from_the_demos_folders(
    digits: Source, tmp_path: Path, validation: Validation
) -> None:
    options = DealOptions(4, Partition.parse("dirichlet:0.5"), 0, 100, validation, public_images=12)
    cohort = build_cohort(digits, digits.input_form(8), options)
    form, written = image_form(digits.input_form(8)), prepare(digits, tmp_path, options)
    for name, mine in cohort.clients.items():
        assert {path.name for path in (tmp_path / name / "train").iterdir()} == set(digits.classes)
        test = read_images(tmp_path / name / "test", digits.classes, form).images
        read = read_images(tmp_path / name / "train", digits.classes, form)
        train, entries = read.images, read.entries
        if validation == "share":
            assert written[name] == {"train_images": len(train), "test_images": len(test)}
            chosen = {entry.path for entry in split_by_hash(entries, {"train": 0.9, "val": 0.1})["train"]}
            train = train.rows([row for row, entry in enumerate(entries) if entry.path in chosen])
        else:
            assert same(mine.val, read_images(tmp_path / name / "val", digits.classes, form).images)
        assert same(mine.train, train)
        assert same(mine.test, test)
    assert same(cohort.common, read_images(tmp_path / "common", digits.classes, form).images)
    assert torch.equal(read_public(tmp_path / "public", form, 100).images, present(cohort.public))
    assert {path.stem for path in (tmp_path / "public").iterdir()} == {f"{row:06d}" for row in range(12)}


def test_half_of_the_test_images_validate_and_all_training_images_train(digits: Source) -> None:
    shares, halves = cohort_of(digits), cohort_of(digits, validation="test-half")
    for name, client in halves.clients.items():
        usual = shares.clients[name]
        assert len(client.train) == len(usual.train) + len(usual.val)
        assert abs(len(client.val) - len(client.test)) <= 1
        assert sorted(rows(client.val, client.test)) == sorted(rows(usual.test))


def test_the_test_set_dealt_out_evenly_is_all_of_it_and_so_is_the_common_set(digits: Source) -> None:
    cohort = cohort_of(digits, test="even")
    sizes = [len(client.test) for client in cohort.clients.values()]
    assert max(sizes) - min(sizes) <= 1
    assert sorted(rows(*(client.test for client in cohort.clients.values()))) == sorted(rows(cohort.common))
    # at random: a client's test images know nothing of its training images' classes
    assert min(min(client.test.label_counts()) for client in cohort.clients.values()) >= 5
    whole = cohort_of(digits, test="all")
    assert all(client.test is whole.common for client in whole.clients.values())  # decoded once
    assert len(whole.common) == sum(sizes)


def test_public_images_are_nobodys_and_leave_everybody_elses_as_they_were(digits: Source) -> None:
    without = cohort_of(digits, "iid", images_per_client=100)
    cohort = cohort_of(digits, "iid", images_per_client=100, public_images=300)
    public = present(cohort.public)
    assert public.shape == (300, 1, 8, 8)
    assert all(same(cohort.clients[name].train, client.train) for name, client in without.clients.items())
    taken = rows(cohort.common, *(part for one in cohort.clients.values() for part in (one.train, one.val, one.test)))
    assert len(set(rows(public)) & set(taken)) <= 1  # two of the 1,797 scans are alike


def test_without_a_bound_public_images_are_held_out_before_the_others_are_dealt(digits: Source) -> None:
    cohort = cohort_of(digits, "iid", public_images=200)
    total = sum(len(one.train) + len(one.val) + len(one.test) for one in cohort.clients.values())
    assert total + len(cohort.common) + len(present(cohort.public)) == 1797


def test_public_images_are_refused_where_none_are_left_and_demanded_where_the_method_needs_some(digits: Source) -> None:
    with pytest.raises(SourceError, match="public images"):
        cohort_of(digits, images_per_client=5000, public_images=10)
    cohort = cohort_of(digits)
    with pytest.raises(SourceError, match="--public-images"):
        party_of(RunSetting(method="feddf"), quick_spec("feddf"), cohort)
    assert party_of(RunSetting(method="fedavg"), quick_spec("fedavg"), cohort).public is None
