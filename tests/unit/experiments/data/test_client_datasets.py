"""A cohort in memory is what the demo's folders hold; the published protocols of validation, test and public images."""

from pathlib import Path

import pytest
import torch

from experiments.data.client_datasets import Cohort, build_cohort
from experiments.data.deal import DealOptions, Partition, TestDeal, Validation
from experiments.data.open import open_source
from experiments.data.partition_folders import prepare
from experiments.data.source import Source
from experiments.errors import SourceError
from fedcg.learning.data.image_folder import load_folder, split_by_hash
from fedcg.learning.image_set import ImageSet


@pytest.fixture(scope="module")
def digits() -> Source:
    return open_source("digits")


def cohort_of(
    source: Source,
    partition: str = "dirichlet:0.5",
    seed: int = 0,
    most: int | None = None,
    validation: Validation = "share",
    test: TestDeal = "proportional",
    public: int = 0,
) -> Cohort:
    form = source.image_form(8)
    return build_cohort(source, form, DealOptions(4, Partition.parse(partition), seed, most, validation, test, public))


def same(left: ImageSet, right: ImageSet) -> bool:
    return torch.equal(left.images, right.images) and torch.equal(left.labels, right.labels)


def rows(*sets: ImageSet | torch.Tensor) -> list[bytes]:
    stacks = [one.images if isinstance(one, ImageSet) else one for one in sets]
    return [image.numpy().tobytes() for stack in stacks for image in stack]


@pytest.mark.parametrize("validation", ["share", "test-half"])
def test_a_cohort_in_memory_is_what_an_agent_reads_from_the_demos_folders(
    digits: Source, tmp_path: Path, validation: Validation
) -> None:
    cohort = cohort_of(digits, most=100, validation=validation)
    options = DealOptions(4, Partition.parse("dirichlet:0.5"), 0, images_per_client=100, validation=validation)
    prepared = prepare(digits, tmp_path, options)
    form = digits.image_form(8)
    for client in prepared.clients:
        mine = cohort.clients[client.id]
        assert same(mine.test, load_folder(client.root / "test", digits.classes, form)[0])
        train, entries = load_folder(client.root / "train", digits.classes, form)
        if validation == "share":
            chosen = {entry.path for entry in split_by_hash(entries, {"train": 0.9, "val": 0.1})["train"]}
            kept = [row for row, entry in enumerate(entries) if entry.path in chosen]
            assert same(mine.train, train.rows(kept))
        else:
            assert same(mine.train, train)
            assert same(mine.val, load_folder(client.root / "val", digits.classes, form)[0])
    assert same(cohort.common, load_folder(prepared.common, digits.classes, form)[0])


def test_half_of_the_test_images_validate_and_all_training_images_train(digits: Source) -> None:
    shares, halves = cohort_of(digits), cohort_of(digits, validation="test-half")
    for name, client in halves.clients.items():
        usual = shares.clients[name]
        assert len(client.train) == len(usual.train) + len(usual.val)
        assert len(client.val) + len(client.test) == len(usual.test)
        assert abs(len(client.val) - len(client.test)) <= 1
        assert sorted(rows(client.val, client.test)) == sorted(rows(usual.test))


def test_the_test_set_dealt_out_evenly_is_all_of_it_and_so_is_the_common_set(digits: Source) -> None:
    cohort = cohort_of(digits, test="even")
    sizes = [len(client.test) for client in cohort.clients.values()]
    assert max(sizes) - min(sizes) <= 1
    assert sorted(rows(*(client.test for client in cohort.clients.values()))) == sorted(rows(cohort.common))
    # at random: a client's test images know nothing of its training images' classes
    assert min(min(client.test.label_counts()) for client in cohort.clients.values()) >= 5


def test_every_client_may_be_measured_on_all_test_images(digits: Source) -> None:
    cohort = cohort_of(digits, test="all")
    assert all(rows(client.test) == rows(cohort.common) for client in cohort.clients.values())
    assert len(cohort.common) == sum(len(client.test) for client in cohort_of(digits, test="even").clients.values())


def test_public_images_are_nobodys_and_leave_everybody_elses_as_they_were(digits: Source) -> None:
    without = cohort_of(digits, "iid", most=100)
    cohort = cohort_of(digits, "iid", most=100, public=300)
    assert cohort.public is not None
    assert cohort.public.shape == (300, 1, 8, 8)
    assert all(same(cohort.clients[name].train, client.train) for name, client in without.clients.items())
    taken = rows(cohort.common, *(part for one in cohort.clients.values() for part in (one.train, one.val, one.test)))
    assert len(set(rows(cohort.public)) & set(taken)) <= 1  # two of the 1,797 scans are alike


def test_without_a_bound_public_images_are_held_out_before_the_others_are_dealt(digits: Source) -> None:
    cohort = cohort_of(digits, "iid", public=200)
    assert cohort.public is not None
    total = sum(len(one.train) + len(one.val) + len(one.test) for one in cohort.clients.values())
    assert total + len(cohort.common) + len(cohort.public) == 1797


def test_public_images_that_nobody_left_over_are_asked_for_in_vain(digits: Source) -> None:
    with pytest.raises(SourceError, match="public images"):
        cohort_of(digits, most=5000, public=10)
