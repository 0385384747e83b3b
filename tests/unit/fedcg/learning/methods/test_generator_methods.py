"""The local halves of FedCG and FedMD-CG, stage by stage."""

import math
from dataclasses import replace

import pytest
import torch

from fedcg.learning.errors import NetworkError, PrivacyError
from fedcg.learning.method import Aggregate
from fedcg.learning.methods import fedcg, fedmd_cg
from fedcg.learning.networks import load_part
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.privacy import DpSgdSettings, PrivacySettings
from fedcg.learning.registry import get_method
from fedcg.learning.spec import FederationSpec, NetworkChoice
from fedcg.learning.training.batches import extract_features
from fedcg.learning.training.losses import paired_labels
from fedcg.wire.parts import Part
from tests.support.learning import learning_cases as cases


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


def test_the_class_scale_is_the_distance_of_two_real_features() -> None:
    # class 0: dimensions (0, 2) and (0, 4): variances 2 and 8: sqrt(2 * 10); class 1: one image, the floor
    features = torch.tensor([[0.0, 0.0], [2.0, 4.0], [1.0, 1.0]])
    scale = fedmd_cg.class_scale(features, torch.tensor([0, 0, 1]), 3)
    assert scale.tolist() == pytest.approx([math.sqrt(20.0), 1e-3, 1e-3])
