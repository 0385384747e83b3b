"""The local halves of FedCG and FedMD-CG, stage by stage."""

import math
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import nn

from fedcg.learning.errors import NetworkError, PrivacyError
from fedcg.learning.method import Aggregate
from fedcg.learning.methods import fedcg, fedmd_cg
from fedcg.learning.networks import load_part
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.privacy import DpSgdSettings, PrivacySettings
from fedcg.learning.registry import get_method
from fedcg.learning.spec import FederationSpec, NetworkChoice, ParameterValue
from fedcg.learning.training.batches import FeatureSource, extract_features
from fedcg.learning.training.losses import paired_labels
from fedcg.learning.training.stage import run_stage
from fedcg.wire.parts import Part
from tests.support.learning import learning_cases as cases
from tests.support.learning.networks import PATTERN, Answer, GivenFeatures, Scale, on_labels


def test_gamma_rises_from_zero_on_a_logistic_ramp() -> None:
    params = fedcg.FedcgParams()
    assert fedcg.gamma(1, params) == 0.0
    assert fedcg.gamma(26, params) == pytest.approx(2 / (1 + math.exp(-5)) - 1)  # 0.986614
    assert fedcg.gamma(51, params) == pytest.approx(0.999909, abs=1e-6)
    assert fedcg.gamma(500, params) == fedcg.gamma(51, params)
    assert fedcg.gamma(3, params.model_copy(update={"ramp_rounds": 2, "gamma_max": 0.5})) == pytest.approx(
        0.499955, abs=1e-6
    )


def test_generated_rows_come_in_pairs_of_one_label() -> None:
    assert paired_labels(torch.tensor([3, 1, 2, 0])).tolist() == [3, 1, 3, 1]
    assert paired_labels(torch.tensor([3, 1, 2, 0, 4])).tolist() == [3, 1, 3, 1, 2]


def test_the_feature_penalty_of_fedcg_is_gamma_times_the_mean_square() -> None:
    penalty = on_labels(fedcg.feature_penalty(Answer(0.0, 2.0), 0.5, cases.context(cases.quick_spec("fedcg"))), [0, 1])
    features = torch.tensor([[1.0, 2.0], [3.0, 2.0]], requires_grad=True)
    value = penalty(slice(0, 2), features, torch.zeros(2, 3))
    assert value.item() == pytest.approx(0.5 * (1 + 9) / 4)
    value.backward()
    assert features.grad is not None


def moments_spec() -> FederationSpec:
    network = NetworkChoice(split="lenet5_relu", generator="gaussians", noise_dim=16)
    return complete_spec(cases.plan("fedcg", network, generator_training="moments"))


def test_a_generator_of_moments_has_those_of_the_clients_own_features_and_no_discriminator_is_trained() -> None:
    spec, data = moments_spec(), cases.bright_images(24, 0)
    initial = initial_parts(spec, b"cohort")
    incoming = get_method("fedcg").init_server(spec, initial).aggregate
    result = cases.local_round_of(spec, data, incoming, cases.context(spec))
    extractor = load_part(spec, Part.EXTRACTOR, result.private.parts[Part.EXTRACTOR])
    features = extract_features(extractor, data.images, spec).flatten(1)
    made = result.shared.parts[Part.GENERATOR]
    for label in range(3):
        of_class = features[data.labels == label]
        assert torch.allclose(made["mean.weight"][label], of_class.mean(0), atol=1e-5)
        assert torch.allclose(made["deviation.weight"][label], of_class.std(0, unbiased=False), atol=1e-5)
    judge = result.private.parts[Part.DISCRIMINATOR]
    assert all(torch.equal(tensor, initial[Part.DISCRIMINATOR][name]) for name, tensor in judge.items())


def test_moments_need_the_generator_that_has_them_and_are_not_covered_by_dp_sgd() -> None:
    with pytest.raises(NetworkError, match=r"moments needs network\.generator = gaussians, not mlp"):
        complete_spec(cases.plan("fedcg", NetworkChoice(generator="mlp", noise_dim=8), generator_training="moments"))
    spec = moments_spec()
    private = replace(cases.context(spec), privacy=PrivacySettings(dp_sgd=DpSgdSettings(noise_multiplier=1.0)))
    state = get_method("fedcg").init_client(spec, initial_parts(spec, b"cohort"))
    with pytest.raises(PrivacyError, match="is not supported with DP-SGD: set generator_training = gan"):
        get_method("fedcg").local_round(state, cases.bright_images(24, 0), None, private)


def test_fedmd_cg_replays_the_label_distribution_that_came_down() -> None:
    initial = initial_parts(cases.quick_spec("fedmd_cg"), b"cohort")
    down = {part: initial[part] for part in (Part.GENERATOR, Part.CLASSIFIER)}
    for replay, expected in ((0.0, True), (1.0, False)):
        spec = cases.quick_spec("fedmd_cg", lambda1=replay)
        first, second = (
            cases.local_round_of(spec, cases.bright_images(24, 0), Aggregate(down, published)).private.parts[
                Part.CLASSIFIER
            ]
            for published in ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0))
        )
        assert cases.same(first, second) == expected


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
    spec = cases.quick_spec("fedmd_cg")
    params = fedmd_cg.FedmdCgParams(lambda1=weights[0], lambda2=weights[1], lambda3=weights[2])
    term = fedmd_cg.global_penalty(Answer(0.0, 0.0), torch.tensor([0.5, 0.5]), params, cases.context(spec, 3))
    penalty = on_labels(term, [0, 1], classifier=Scale())
    real = torch.tensor([[LN3, 0.0], [LN3, 0.0]])
    assert penalty(slice(0, 2), real, real).item() == pytest.approx(0.5 * expected, abs=1e-6)


def train(generator: nn.Module, source: GivenFeatures, **params: ParameterValue) -> None:
    """Train a generator on eq. 9, whose weights are 0 where they are not given."""
    values = {"weight_decay": 0.0, "lambda4": 0.0, "lambda5": 0.0, "lambda6": 0.0, **params}
    chosen, ctx = fedmd_cg.FedmdCgParams.model_validate(values), cases.context(cases.quick_spec("fedmd_cg"))
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


def test_the_class_scale_is_the_distance_of_two_real_features() -> None:
    # class 0: dimensions (0, 2) and (0, 4): variances 2 and 8: sqrt(2 * 10); class 1: one image, the floor
    features = torch.tensor([[0.0, 0.0], [2.0, 4.0], [1.0, 1.0]])
    scale = fedmd_cg.class_scale(features, torch.tensor([0, 0, 1]), 3)
    assert scale.tolist() == pytest.approx([math.sqrt(20.0), 1e-3, 1e-3])


def test_the_generated_branch_of_equation_2_is_a_detached_teacher() -> None:
    params = fedmd_cg.FedmdCgParams(lambda1=0.0, lambda2=0.0)
    classifier = Scale()
    spec = cases.quick_spec("fedmd_cg")
    term = fedmd_cg.global_penalty(Answer(1.0, 0.0), torch.tensor([0.5, 0.5]), params, cases.context(spec, 3))
    penalty = on_labels(term, [0, 1], classifier=classifier)
    penalty(slice(0, 2), torch.zeros(2, 2), torch.zeros(2, 2, requires_grad=True)).backward()
    # The replayed rows share its pass, so there may be a gradient, but of zero.
    assert classifier.weight.grad is None or classifier.weight.grad.item() == 0.0


def test_equation_6_raises_the_asked_class_above_what_the_divergence_asks_for() -> None:
    alone, asked = settled_answer(), settled_answer(lambda5=1.0)
    assert alone[0] - alone[1] == pytest.approx(1.0, abs=0.1)
    assert asked[0] - asked[1] > alone[0] - alone[1] + 0.5
