"""The moving average of a client's networks: by hand, over a checkpoint, and beside a round that it does not change."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.simulation.simulation import Schedule, simulate
from fedcg.learning.training.evaluation import evaluate
from fedcg.learning.training.stage import MovingAverage, averaged_parts
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import (
    NAMES,
    bright_images,
    context,
    local_round_of,
    party_of,
    quick_spec,
    same,
    same_parts,
)


class Counted(nn.Module):
    """One weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))


def drive(average: MovingAverage, net: Counted, values: tuple[float, ...]) -> None:
    for value in values:
        with torch.no_grad():
            net.weight.fill_(value)
            net.get_buffer("seen").fill_(10 * value)
        average()


def mean_of(average: MovingAverage) -> tuple[float, float]:
    parts = averaged_parts(average.extras())
    assert parts is not None
    return parts[Part.CLASSIFIER]["weight"].item(), parts[Part.CLASSIFIER]["seen"].item()


@pytest.mark.parametrize(
    ("decay", "expected"),
    # The first step keeps 2/11 of 0 and takes 9/11 of 1; the second keeps 3/12 of that, or the decay where it is less, and takes the rest of 2.
    [(0.998, 0.25 * 9 / 11 + 0.75 * 2), (0.2, 0.2 * 9 / 11 + 0.8 * 2)],
)
def test_the_average_keeps_more_of_itself_from_step_to_step_up_to_the_decay(decay: float, expected: float) -> None:
    net = Counted()
    average = MovingAverage({Part.CLASSIFIER: net}, decay)
    drive(average, net, (1.0, 2.0))
    weight, seen = mean_of(average)
    assert weight == pytest.approx(expected)
    assert seen == 20.0  # a buffer is as it is
    assert net.weight.item() == 2.0


@pytest.mark.parametrize("name", method_names())
def test_a_round_with_an_average_sends_and_keeps_the_same_and_has_the_averaged_model_beside_it(name: str) -> None:
    spec = quick_spec(name)
    data = bright_images(24, 0, form=spec.image)
    plain, averaged = (local_round_of(quick_spec(name, ema=ema), data) for ema in (0.0, 0.9))
    assert same_parts(plain.shared.parts, averaged.shared.parts)
    assert same_parts(plain.private.parts, averaged.private.parts)
    assert averaged_parts(plain.private.extras) is None
    found = averaged_parts(averaged.private.extras)
    assert found is not None
    assert found.keys() == get_method(name).personal.parts
    assert not any(same(weights, averaged.private.parts[part]) for part, weights in found.items())
    assert evaluate(spec, found, data).images == 24


def test_it_begins_anew_in_every_round() -> None:
    spec, method, data = quick_spec("fedsplit", ema=0.9), get_method("fedsplit"), bright_images(24, 0)
    state = method.init_client(spec, initial_parts(spec, b"cohort"))
    after = method.local_round(state, data, None, context(spec)).private
    again, fresh = (
        method.local_round(one, data, None, context(spec)).private for one in (after, replace(after, extras={}))
    )
    assert same(again.extras["ema_extractor"], fresh.extras["ema_extractor"])


def test_a_simulation_measures_the_average_where_there_is_one() -> None:
    party = party_of("fedsplit", NAMES)
    with_average = replace(party, spec=party.spec.model_copy(update={"params": {**party.spec.params, "ema": 0.9}}))
    plain, averaged = (simulate(one, Schedule(rounds=1)).curves["a"][0] for one in (party, with_average))
    assert plain.accuracy_ema is None
    assert averaged.accuracy_ema is not None
    assert averaged.accuracy == plain.accuracy
