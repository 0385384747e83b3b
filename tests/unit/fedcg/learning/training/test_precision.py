"""bfloat16: what runs in it, what stays in float32, and that it trains to nearly the same weights."""

import math
from dataclasses import replace

import pytest

from fedcg.learning.method import Machine, Precision, Weights
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.spec import NetworkChoice
from tests.support.learning.learning_cases import GREY, context, plan_of, round_of_one_client, same


def round_in(method: str, precision: Precision) -> tuple[float, dict[str, Weights]]:
    choice = NetworkChoice(noise_dim=8, generator="mlp", discriminator="mlp")
    spec = complete_spec(plan_of(method, choice, GREY, {"epochs": 5, "lr": 0.003}))
    result, aggregate = round_of_one_client(replace(context(spec, 3), machine=Machine(precision=precision)), 44)
    assert result.report.loss is not None
    return result.report.loss, {
        **{f"client {part}": weights for part, weights in result.private.parts.items()},
        **{f"server {part}": weights for part, weights in aggregate.parts.items()},
    }


@pytest.mark.parametrize("method", ["fedavg", "fedcg", "fedmd_cg"])
def test_a_round_in_bfloat16_learns_as_in_float32_and_keeps_weights_in_float32(method: str) -> None:
    (loss, exact), (rough_loss, rough) = round_in(method, "f32"), round_in(method, "bf16")
    assert loss < 0.8 * math.log(3.0)  # it has learnt
    assert rough_loss == pytest.approx(loss, abs=0.05)
    for key, weights in exact.items():
        assert not same(weights, rough[key])
        for name, tensor in weights.items():
            assert rough[key][name].dtype == tensor.dtype
