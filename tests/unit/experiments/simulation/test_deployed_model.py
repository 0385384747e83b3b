"""Which of its models a client of a simulation would use: that of the least calibrated validation loss, as its agent chooses."""

from dataclasses import replace

import pytest

from experiments.simulation.simulation_record import client_record
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulate
from fedcg.learning.training.evaluation import calibrated_loss, logits_of
from tests.support.learning.learning_cases import party_of

PARTY = party_of("fedsplit", ("a", "b"), ema=0.9)


@pytest.fixture(scope="module")
def ended() -> Simulation:
    return simulate(PARTY, Schedule(rounds=2, shadow=True))


def test_losses_are_of_the_validation_images_of_each_model(ended: Simulation) -> None:
    last, val = ended.curves["a"][-1], PARTY.datasets["a"].val
    own = ended.states["a"].parts
    assert set(last.losses) == {"own", "ema", "downloaded", "local"}
    assert last.losses["own"] == calibrated_loss(logits_of(PARTY.spec, own, val), val.labels)
    downloaded = {**own, **ended.aggregate.parts}
    assert last.losses["downloaded"] == calibrated_loss(logits_of(PARTY.spec, downloaded, val), val.labels)
    assert last.common_after is not None


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("own", ("accuracy_personal", "accuracy_common_personal")),
        ("ema", ("accuracy_ema", "accuracy_common_ema")),
        ("downloaded", ("accuracy_after", "accuracy_common_after")),
        ("local", ("accuracy_local", "accuracy_common_local")),
    ],
)
def test_the_model_of_the_least_loss_is_the_deployed_one(
    ended: Simulation, name: str, figures: tuple[str, str]
) -> None:
    losses = dict.fromkeys(("own", "ema", "downloaded", "local"), 1.0) | {name: 0.5}
    last = replace(ended.curves["a"][-1], losses=losses)
    found = client_record(PARTY, replace(ended, curves={**ended.curves, "a": (last,)}), "a")
    assert found["deployed"] == name
    assert (found["accuracy_deployed"], found["accuracy_common_deployed"]) == (found[figures[0]], found[figures[1]])
    assert found["accuracy_deployed"] is not None
    assert found["accuracy_common_deployed"] is not None
