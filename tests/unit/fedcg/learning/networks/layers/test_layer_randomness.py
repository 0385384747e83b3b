"""Layers that draw their own random numbers follow the round's streams, and the process's generators stay as they were."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fedcg.learning.method import TrainingParams
from fedcg.learning.networks import load_part, weights_of
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.networks.randomness import lent_generators, seeded_layers
from fedcg.learning.training.classification import train_classifier
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import bright_images, context, quick_spec, same

PARAMS = TrainingParams(epochs=2, batch_size=8)


@pytest.fixture(autouse=True)
def _global_state_is_left_alone() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def trained_with_dropout(root: bytes, drawn_before: int) -> dict[str, torch.Tensor]:
    """Weights of a classifier behind dropout after a stage; other code drew `drawn_before` numbers before it."""
    spec = quick_spec("local")
    weights = initial_parts(spec, b"cohort")
    extractor, linear = (load_part(spec, part, weights[part]) for part in (Part.EXTRACTOR, Part.CLASSIFIER))
    classifier = nn.Sequential(nn.Dropout(0.5), linear)
    with torch.random.fork_rng(devices=[]):
        torch.rand(drawn_before)
        train_classifier(extractor, classifier, bright_images(24, 0), PARAMS, context(spec, root=root))
    return weights_of(classifier)


def test_a_stage_with_dropout_repeats_bit_for_bit_whatever_was_drawn_before_it() -> None:
    first = trained_with_dropout(b"device", 0)
    assert same(first, trained_with_dropout(b"device", 1000))
    assert not same(first, trained_with_dropout(b"another", 0))


def test_stages_and_rounds_draw_different_numbers() -> None:
    spec = quick_spec("fedcg")

    def drawn(round_number: int, purpose: str) -> list[float]:
        with seeded_layers(context(spec, round_number), purpose):
            return torch.rand(3).tolist()

    assert drawn(1, "classify") == drawn(1, "classify")
    assert len({tuple(drawn(number, purpose)) for number in (1, 2) for purpose in ("classify", "distil")}) == 4


def test_generators_are_given_back_when_a_stage_fails() -> None:
    def fail() -> None:
        with lent_generators(7):
            torch.rand(5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
