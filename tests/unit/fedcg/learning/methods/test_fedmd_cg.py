"""FedMD-CG's local half, stage by stage."""

import math
from typing import cast

import pytest
import torch
from torch import nn

from fedcg.learning.method import Aggregate
from fedcg.learning.methods import fedcg, fedmd_cg
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.spec import ParameterValue
from fedcg.learning.training.batches import FeatureSource
from fedcg.learning.training.stage import run_stage
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import (
    bright_images,
    context,
    local_round_of,
    quick_spec,
    same,
)
from tests.support.learning.stub_networks import PATTERN, Answer, GivenFeatures, Scale, on_labels


def test_fedmd_cg_replays_the_label_distribution_that_came_down() -> None:
    initial = initial_parts(quick_spec("fedmd_cg"), b"cohort")
    down = {part: initial[part] for part in (Part.GENERATOR, Part.CLASSIFIER)}
    for replay, expected in ((0.0, True), (1.0, False)):
        spec = quick_spec("fedmd_cg", lambda1=replay)
        first, second = (
            local_round_of(spec, bright_images(24, 0), Aggregate(down, published)).private.parts[Part.CLASSIFIER]
            for published in ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0))
        )
        assert same(first, second) == expected


class Echo(nn.Module):
    """A generator whose three features all are the label it was asked for."""

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return labels.to(torch.float32).unsqueeze(1).expand(-1, 3)


def test_each_image_is_compared_with_a_generated_feature_of_its_own_label() -> None:
    labels = [2, 0, 1, 2, 2]
    features = Echo()(torch.zeros(5, 1), torch.tensor(labels))
    of_fedcg = fedcg.feature_penalty(Echo(), 1.0, context(quick_spec("fedcg")))
    params = fedmd_cg.FedmdCgParams(lambda1=0.0, lambda3=0.0)
    ctx, only_class_1 = context(quick_spec("fedmd_cg"), 3), torch.tensor([0.0, 1.0, 0.0])
    of_fedmd_cg = fedmd_cg.global_penalty(Echo(), only_class_1, params, ctx)
    for penalty in (on_labels(one, labels, classifier=Scale()) for one in (of_fedcg, of_fedmd_cg)):
        for rows in (slice(0, 3), slice(3, 5)):
            assert penalty(rows, features[rows], torch.zeros(rows.stop - rows.start, 3)).item() == 0.0


def test_the_ramp_of_fedmd_cg_is_a_power_of_the_rounds_behind() -> None:
    assert fedmd_cg.ramp(1, 4, 1.0) == 0.0
    assert fedmd_cg.ramp(3, 4, 1.0) == 0.5
    assert fedmd_cg.ramp(3, 4, 2.0) == 0.25


LN3 = math.log(3.0)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        # replay: generated logits (0, 0) of a class drawn from p(y): ln 2
        ((1.0, 0.0, 0.0), math.log(2.0)),
        # feature mean square of (ln 3, 0) from (0, 0): ln(3)^2 / 2
        ((0.0, 1.0, 0.0), LN3**2 / 2),
        # KL(real || generated) of (3/4, 1/4) from (1/2, 1/2) = 0.130812; the other direction would be 0.143841
        ((0.0, 0.0, 1.0), 0.130812),
    ],
)
def test_each_global_penalty_of_fedmd_cg_has_its_hand_worked_value(
    weights: tuple[float, float, float], expected: float
) -> None:
    # round 3 of 4: the ramp is 1/2
    spec = quick_spec("fedmd_cg")
    params = fedmd_cg.FedmdCgParams(lambda1=weights[0], lambda2=weights[1], lambda3=weights[2])
    term = fedmd_cg.global_penalty(Answer(0.0, 0.0), torch.tensor([0.5, 0.5]), params, context(spec, 3))
    penalty = on_labels(term, [0, 1], classifier=Scale())
    real = torch.tensor([[LN3, 0.0], [LN3, 0.0]])
    assert penalty(slice(0, 2), real, real).item() == pytest.approx(0.5 * expected, abs=1e-6)


def test_the_generated_branch_of_equation_2_is_a_detached_teacher() -> None:
    params = fedmd_cg.FedmdCgParams(lambda1=0.0, lambda2=0.0)
    classifier = Scale()
    spec = quick_spec("fedmd_cg")
    term = fedmd_cg.global_penalty(Answer(1.0, 0.0), torch.tensor([0.5, 0.5]), params, context(spec, 3))
    penalty = on_labels(term, [0, 1], classifier=classifier)
    penalty(slice(0, 2), torch.zeros(2, 2), torch.zeros(2, 2, requires_grad=True)).backward()
    # The replayed rows share its pass, so there may be a gradient, but of zero.
    assert classifier.weight.grad is None or classifier.weight.grad.item() == 0.0


def train(generator: nn.Module, source: GivenFeatures, **params: ParameterValue) -> None:
    """Train a generator on eq. 9, whose weights are 0 where they are not given."""
    values = {"weight_decay": 0.0, "lambda4": 0.0, "lambda5": 0.0, "lambda6": 0.0, **params}
    chosen, ctx = fedmd_cg.FedmdCgParams.model_validate(values), context(quick_spec("fedmd_cg"))
    run_stage(fedmd_cg.imitation(generator, Scale(), cast("FeatureSource", source), chosen, ctx), ctx)


def test_equation_5_trains_the_generator_by_the_divergence_from_generated_to_real() -> None:
    # Three rows of (0.9, 0.05, 0.05) and one of (0.1, 0.45, 0.45), one answer for all: KL(generated || real) settles at the
    # geometric mean (0.75, 0.125, 0.125); the reversed direction at the arithmetic mean (0.7, 0.15, 0.15).
    generator = Answer(0.0, 0.0, 0.0)
    train(generator, GivenFeatures(PATTERN), steps=600, batch_size=4, generator_lr=0.02)
    assert generator.value.softmax(0).tolist() == pytest.approx([0.75, 0.125, 0.125], abs=0.02)


def settled_answer(**weights: float) -> list[float]:
    """What a generator with one answer learns from real features (2, 0) and (0, 0) of class 0, under eq. 9 with these λ."""
    generator = Answer(5.0, 5.0)
    real = GivenFeatures(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    train(generator, real, steps=400, batch_size=2, generator_lr=0.05, **weights)
    made: list[float] = generator.value.detach().tolist()
    return made


def test_equation_5_pulls_generated_features_to_the_mean_of_the_real_ones() -> None:
    # The divergence alone fixes only the difference of the two logits; with the mean square the answer itself becomes (1, 0).
    assert settled_answer(lambda4=100.0) == pytest.approx([1.0, 0.0], abs=0.05)


def test_equation_6_raises_the_asked_class_above_what_the_divergence_asks_for() -> None:
    alone, asked = settled_answer(), settled_answer(lambda5=1.0)
    assert alone[0] - alone[1] == pytest.approx(1.0, abs=0.1)
    assert asked[0] - asked[1] > alone[0] - alone[1] + 0.5


def test_the_replayed_classes_follow_the_published_label_distribution() -> None:
    # Only class 1 is left in the federation: replay asks for it alone, whatever the batch holds. Logits (0, ln 3) give class 1
    # a probability of 3/4: ln(4/3), where class 0 would cost ln 4.
    params = fedmd_cg.FedmdCgParams(lambda2=0.0, lambda3=0.0)
    spec = quick_spec("fedmd_cg")
    term = fedmd_cg.global_penalty(Answer(0.0, LN3), torch.tensor([0.0, 1.0]), params, context(spec, 3))
    penalty = on_labels(term, [0, 0], classifier=Scale())
    logits = torch.zeros(2, 2)
    assert penalty(slice(0, 2), logits, logits).item() == pytest.approx(0.5 * math.log(4 / 3), abs=1e-6)


def test_the_class_scale_is_the_distance_of_two_real_features() -> None:
    # class 0: dimensions (0, 2) and (0, 4): variances 2 and 8: sqrt(2 * 10); class 1: one image, the floor
    features = torch.tensor([[0.0, 0.0], [2.0, 4.0], [1.0, 1.0]])
    scale = fedmd_cg.class_scale(features, torch.tensor([0, 0, 1]), 3)
    assert scale.tolist() == pytest.approx([math.sqrt(20.0), 1e-3, 1e-3])
