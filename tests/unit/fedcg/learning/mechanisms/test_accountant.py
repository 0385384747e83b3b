"""What is spent: Opacus' own figure, kept as JSON, and asked before a round."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant

from fedcg.learning.errors import PrivacyError
from fedcg.learning.mechanisms.dp_sgd import Spent, after_round
from fedcg.learning.method import TrainingParams
from fedcg.learning.privacy import DpSgdSettings
from fedcg.learning.registry import get_method

SETTINGS = DpSgdSettings(noise_multiplier=1.1)


def test_epsilon_is_the_figure_that_opacus_counts_step_by_step() -> None:
    theirs = RDPAccountant()
    for _ in range(40):
        theirs.step(noise_multiplier=1.1, sample_rate=0.05)
    for _ in range(20):
        theirs.step(noise_multiplier=0.8, sample_rate=0.1)
    other = DpSgdSettings(noise_multiplier=0.8)
    spent = Spent().with_round(SETTINGS, 0.05, 30).with_round(other, 0.1, 20).with_round(SETTINGS, 0.05, 10)
    assert spent.entries == ((1.1, 0.05, 40), (0.8, 0.1, 20))
    assert spent.epsilon(1e-5) == pytest.approx(theirs.get_epsilon(delta=1e-5), rel=1e-12)
    assert spent.epsilon(1e-5) > spent.epsilon(1e-3) > 0.0
    assert Spent().epsilon(1e-5) == 0.0


def test_a_round_counts_the_steps_of_every_stage() -> None:
    # 20 images in batches of 8 expected: rate 0.4, ceil(20 / 8) = 3 steps an epoch, 2 epochs; FedCG trains its discriminator as long.
    params = TrainingParams(epochs=2, batch_size=8)
    spent = after_round(Spent(), SETTINGS, get_method("fedavg"), params, 20)
    assert spent.entries == ((1.1, 0.4, 6),)
    assert after_round(spent, SETTINGS, get_method("fedcg"), params, 20).entries == ((1.1, 0.4, 18),)
    few = after_round(Spent(), SETTINGS, get_method("fedavg"), params.model_copy(update={"steps": 5}), 3)
    assert few.entries == ((1.1, 1.0, 5),)
    assert after_round(Spent(), SETTINGS, get_method("fedavg"), params, 0) == Spent()


def test_a_budget_is_exceeded_by_what_would_be_spent() -> None:
    spent = Spent().with_round(SETTINGS, 0.1, 100)
    epsilon = spent.epsilon(SETTINGS.delta)
    assert not spent.exceeds(SETTINGS)
    assert not spent.exceeds(SETTINGS.model_copy(update={"budget_epsilon": epsilon}))
    assert spent.exceeds(SETTINGS.model_copy(update={"budget_epsilon": 0.999 * epsilon}))


entries = st.lists(st.tuples(st.floats(0.01, 100), st.floats(1e-6, 1.0), st.integers(1, 10**6)), max_size=5)


@given(entries)
def test_what_is_spent_is_read_back_as_it_was_written(some: list[tuple[float, float, int]]) -> None:
    spent = Spent(tuple(some))
    assert Spent.from_json(spent.to_json()) == spent


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 2, "spent": []}',
        '{"format": 1}',
        json.dumps({"format": 1, "spent": [{"noise_multiplier": 1.0, "sample_rate": 1.5, "steps": 1}]}),
        json.dumps({"format": 1, "spent": [{"noise_multiplier": 0.0, "sample_rate": 0.5, "steps": 1}]}),
        json.dumps({"format": 1, "spent": [{"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": -1}]}),
        json.dumps({"format": 1, "spent": [{"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 1, "x": 0}]}),
    ],
)
def test_what_is_no_record_of_spending_is_never_read_as_nothing_spent(text: str) -> None:
    with pytest.raises(PrivacyError, match="not a record of spent privacy"):
        Spent.from_json(text)
