"""FedCG's local half, stage by stage."""

import math
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import nn

from fedcg.learning.errors import NetworkError, PrivacyError
from fedcg.learning.methods import fedcg
from fedcg.learning.networks import load_part
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.privacy import DpSgdSettings, PrivacySettings
from fedcg.learning.registry import get_method
from fedcg.learning.spec import FederationSpec, NetworkChoice
from fedcg.learning.training.batches import FeatureSource, extract_features
from fedcg.learning.training.losses import paired_labels
from fedcg.learning.training.stage import run_stage
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import (
    bright_images,
    context,
    local_round_of,
    plan,
    quick_spec,
)
from tests.support.learning.stub_networks import Answer, GivenFeatures, on_labels


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
    odd = paired_labels(torch.tensor([3, 1, 2, 0, 4]))
    assert odd.tolist() == [3, 1, 3, 1, 2]


def test_the_feature_penalty_of_fedcg_is_gamma_times_the_mean_square() -> None:
    penalty = on_labels(fedcg.feature_penalty(Answer(0.0, 2.0), 0.5, context(quick_spec("fedcg"))), [0, 1])
    features = torch.tensor([[1.0, 2.0], [3.0, 2.0]], requires_grad=True)
    value = penalty(slice(0, 2), features, torch.zeros(2, 3))
    assert value.item() == pytest.approx(0.5 * (1 + 9) / 4)
    value.backward()
    assert features.grad is not None


def test_the_two_gan_networks_pull_in_opposite_directions() -> None:
    spec = quick_spec("fedcg", epochs=30, gan_lr=2e-2, diversity=0.0)
    ctx = context(spec)

    class Judge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 1)

        def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.line(features).squeeze(1)
            return out

    real = torch.zeros(16, 2)
    generator, judge = Answer(1.0, 1.0), Judge()
    with torch.no_grad():
        judge.line.weight.zero_()
        judge.line.bias.zero_()
    params = fedcg.FedcgParams.model_validate({**spec.params, "epochs": 10, "weight_decay": 0.0})
    source = cast("FeatureSource", GivenFeatures(real))
    run_stage(fedcg.adversarial(generator, judge, source, params, ctx), ctx)
    made = generator.value.detach()
    zeros = torch.zeros(1, dtype=torch.int64)
    assert judge(real[:1], zeros).item() > judge(made.unsqueeze(0), zeros).item()
    assert made.max().item() < 0.9
    assert all(parameter.requires_grad for parameter in judge.parameters())


def moments_spec() -> FederationSpec:
    network = NetworkChoice(split="lenet5_relu", generator="gaussians", noise_dim=16)
    return complete_spec(plan("fedcg", network, generator_training="moments"))


def test_a_generator_of_moments_has_those_of_the_clients_own_features_and_no_discriminator_is_trained() -> None:
    spec, data = moments_spec(), bright_images(24, 0)
    initial = initial_parts(spec, b"cohort")
    incoming = get_method("fedcg").init_server(spec, initial).aggregate
    result = local_round_of(spec, data, incoming, context(spec))
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
    with pytest.raises(
        NetworkError, match="generator_training = moments has no effect on generator mlp: take generator gaussians"
    ):
        complete_spec(plan("fedcg", NetworkChoice(generator="mlp", noise_dim=8), generator_training="moments"))
    spec = moments_spec()
    private = replace(context(spec), privacy=PrivacySettings(dp_sgd=DpSgdSettings(noise_multiplier=1.0)))
    state = get_method("fedcg").init_client(spec, initial_parts(spec, b"cohort"))
    with pytest.raises(PrivacyError, match="can't be had with DP-SGD: set generator_training = gan"):
        get_method("fedcg").local_round(state, bright_images(24, 0), None, private)
