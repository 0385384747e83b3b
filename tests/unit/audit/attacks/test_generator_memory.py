"""A generator that has memorised is found by its distances and by its decoded samples; one that has not gives no gain."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from audit.attacks import generator_memory
from audit.evidence.case import Case, Knowledge, Truth
from audit.measures import Outcome, Values
from fedcg.learning.image_set import ImageSet
from tests.support.audit.cases import WITH_GENERATOR, carried_out, outcome_of, simulated_case


def generator_case() -> Case:
    return simulated_case(**WITH_GENERATOR)


def attacked(case: Case) -> Outcome:
    return carried_out("memorisation", case)


@pytest.mark.slow
def test_a_planted_generator_that_returns_training_features_is_found() -> None:
    distances, decoded = outcome_of("memorisation", **WITH_GENERATOR).controls
    assert distances.passed
    assert distances.value > 0.9
    assert decoded.passed
    assert decoded.value > 1.0  # dB


def test_the_attackers_figures_stand_beside_those_with_the_true_extractor() -> None:
    outcome = outcome_of("memorisation", **WITH_GENERATOR)
    mine = [one for one in outcome.figures if Knowledge.PRIVATE not in one.knowledge]
    ceilings = [one for one in outcome.figures if Knowledge.PRIVATE in one.knowledge]
    names = ["memory_auc", "inverter_psnr", "inverter_ssim"]
    assert [one.name for one in mine] == [one.name for one in ceilings] == names
    assert [one.ceiling for one in mine] == [one.value.value for one in ceilings]
    assert all(one.ceiling is None for one in ceilings)
    assert len(outcome.pictures) == 2
    assert len(outcome.pictures[0].rows[0][1]) == 10


@pytest.mark.slow
def test_shuffling_which_images_were_trained_on_leaves_no_gain() -> None:
    case = generator_case()
    images = torch.cat([case.truth.train.images, case.truth.held_out.images])
    labels = torch.cat([case.truth.train.labels, case.truth.held_out.labels])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))
    parts = [ImageSet(images[some], labels[some], case.truth.train.classes) for some in order.chunk(2)]
    mixed = replace(case, truth=replace(case.truth, train=parts[0], held_out=parts[1]))
    assert all(one.gain.low < 0.0 for one in attacked(mixed).figures)


def test_the_controls_fail_when_the_distances_and_the_decoder_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cdist", lambda some, others: torch.ones(len(some), len(others)))
    monkeypatch.setattr("audit.techniques.image_decoder.ImageGenerator", BlankDecoder)
    assert [one.passed for one in attacked(generator_case()).controls] == [False, False]


class BlankDecoder(torch.nn.Module):
    """Pictures that show nothing."""

    def __init__(self, inputs: int, known: ImageSet, stream: torch.Generator) -> None:
        super().__init__()
        self.grey = torch.nn.Parameter(torch.full(known.images.shape[1:], 0.5))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.grey.expand(len(vectors), *self.grey.shape)


def test_without_auxiliary_images_the_device_still_learns_its_generators_distances() -> None:
    case = generator_case()
    alone = replace(case, view=replace(case.view, auxiliary=None))
    found = attacked(alone)
    assert [(one.name, one.setting) for one in found.figures] == [("memory_auc", "extractor: true")]
    assert [one.passed for one in found.controls] == [True]


def test_matched_images_are_equally_many_of_each_class_from_both() -> None:
    def labelled(*labels: int) -> ImageSet:
        return ImageSet(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), torch.tensor(labels), ("a", "b", "c"))

    truth = Truth(labelled(0, 0, 0, 1, 2), labelled(0, 0, 1, 1))
    train, held_out = truth.matched(torch.Generator().manual_seed(0))
    assert train.labels.tolist() == held_out.labels.tolist() == [0, 0, 1]
    assert truth.matched(torch.Generator().manual_seed(0), 1)[0].labels.tolist() == [0, 1]


def test_distances_and_their_auc_by_hand() -> None:
    # One class, samples at 0 and 10. Trained on: 1 and 10, nearest at 1 and 0; held out: 3 and 9, nearest at 3 and 1.
    train, held_out = torch.tensor([[1.0], [10.0]]), torch.tensor([[3.0], [9.0]])
    found = generator_memory.nearness(
        train, held_out, torch.zeros(2, dtype=torch.int64), lambda label, count: torch.tensor([[0.0], [10.0]]), 2
    )
    assert found.train.tolist() == [-1.0, 0.0]
    assert found.held_out.tolist() == [-3.0, -1.0]
    # Of four pairs one is a tie (1 and 1) and three are won by the image that was trained on.
    assert generator_memory.wins(found).mean() == (3 + 0.5) / 4
    # Sample 0 is nearer to 1 than to 3, sample 10 nearer to 10 than to 9.
    assert found.nearer == 1.0


def test_the_nearest_gain_by_hand_and_its_interval_by_chance() -> None:
    # Two pictures; trained on: columns 1 and 2. Nearest trained on 9 and 5, held out 4 and 6: means 7 and 5, gain 2.
    table: Values = np.array([[9.0, 1.0, 4.0, 3.0], [2.0, 5.0, 6.0, 1.0]])
    value, floor, gain = generator_memory.nearest_gain([table], 0)
    assert (value.value, floor, gain.value) == (7.0, 5.0, 2.0)
    assert gain.low < 0 < gain.high  # four images are too few to show anything
    clear: Values = np.tile(np.concatenate([np.full(20, 9.0), np.full(20, 1.0)]), (3, 1))
    assert generator_memory.nearest_gain([clear] * 3, 0)[2].low > 0
