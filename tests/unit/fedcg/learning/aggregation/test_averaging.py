"""Averages, medians and trimmed means over clients, worked by hand, and the sums beneath that know no order."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcg.learning.aggregation import averaging
from fedcg.learning.aggregation.distillation import Distillation, TaughtAverage, distillation
from fedcg.learning.method import Aggregate, Callbacks, Combination, DivergedError, ServerState, Taught, Update
from fedcg.learning.registry import get_method
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.learning.training.stage import Nets, Tensors, run_stage
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import context, loaders, quick_spec


def test_no_client_is_refused() -> None:
    with pytest.raises(ValueError, match="no client"):
        averaging.weighted_average([])


UPDATES = {
    name: Update(name, {Part.CLASSIFIER: {"w": torch.tensor([value]), "n": torch.tensor(count)}}, examples)
    for name, value, count, examples in (("a", 1e8, 4, 3), ("b", 0.1, 9, 5), ("c", -1e8, 2, 3))
}


def averaged(added: tuple[str, ...], present: str) -> tuple[float, int]:
    merge = averaging.AverageAggregator(frozenset({Part.CLASSIFIER}), MemorySpill())
    for client in added:
        merge.add(UPDATES[client])
    asked: list[str] = []

    def load(client: str) -> Update:
        asked.append(client)
        return UPDATES[client]

    weights = merge.finish({client: partial(load, client) for client in present})[0].parts[Part.CLASSIFIER]
    assert asked == ([] if set(added) == set(present) else sorted(set(present) - set(added)) or sorted(present))
    return weights["w"].item(), int(weights["n"].item())


def test_an_average_is_kept_up_as_updates_arrive_and_knows_no_order() -> None:
    # (3e8 + 0.5 - 3e8) / 11; in float32 0.5 would be lost beside 3e8
    outcomes = {averaged(order, "abc") for length in range(4) for order in permutations("abc", length)}
    assert len(outcomes) == 1
    value, count = outcomes.pop()
    assert value == pytest.approx(0.5 / 11, rel=1e-6)
    assert count == 9


TERMS = st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(1, 1 << 20)), min_size=2, max_size=5)


def summed(terms: list[tuple[float, int]]) -> torch.Tensor:
    total = averaging.ExactSum()
    for value, weight in terms:
        total.add(torch.tensor([value]), weight)
    return total.value()


@given(TERMS)
def test_every_order_of_terms_gives_the_same_bits(terms: list[tuple[float, int]]) -> None:
    first = summed(terms)
    assert all(torch.equal(summed(list(other)), first) for other in permutations(terms))


@given(TERMS)
def test_a_mean_is_off_by_no_more_than_promised(terms: list[tuple[float, int]]) -> None:
    count = sum(weight for _, weight in terms)
    exact = sum((Fraction(value) * weight for value, weight in terms), Fraction(0)) / count
    error = abs(Fraction(float(summed(terms)) / count) - exact)
    # 2^-33 of the limbs, and roundings of float64: of each product, of the sum's value, of the quotient
    assert error <= Fraction(2) ** -33 + 4 * Fraction(2) ** -53 * Fraction(1_000_000)


def test_where_float_addition_forgets_the_sum_does_not() -> None:
    # in float64 2^53 + 1 - 2^53 is 0 in this order and 1 in another one
    assert 2.0**53 + 1.0 - 2.0**53 == 0.0
    assert summed([(2.0**51, 1), (2.0**-30, 1), (-(2.0**51), 1)]).item() == 2.0**-30


def test_a_weight_may_differ_by_row() -> None:
    total = averaging.ExactSum()
    total.add(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2.0], [0.0]]))
    total.add(torch.tensor([[1.0, 1.0], [1.0, 1.0]]), torch.tensor([[1.0], [5.0]]))
    assert total.value().tolist() == [[3.0, 5.0], [5.0, 5.0]]


def test_what_is_not_finite_is_refused_and_what_is_enormous_saturates() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(DivergedError, match="not finite"):
            averaging.ExactSum().add(torch.tensor([bad]))
    assert summed([(1e30, 1), (-1e30, 1), (1.0, 1)]).item() == 1.0
    assert summed([(1e30, 1)]).item() == 2.0**52


def test_no_number_of_terms_overflows_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    # the largest terms there are, as many as there may be, stay within 64 bits: 2^20 times (2^42 and 2^41)
    assert averaging.MOST_TERMS * 2**42 < 2**63
    total = averaging.ExactSum()
    monkeypatch.setattr(averaging, "MOST_TERMS", 2)
    total.add(torch.tensor([1e30]))
    total.add(torch.tensor([1e30]))
    with pytest.raises(OverflowError, match="at most 2"):
        total.add(torch.tensor([1.0]))


ONLY = frozenset({Part.CLASSIFIER})


def update(client: str, *numbers: float, examples: int = 1) -> Update:
    weights = {"w": torch.tensor(numbers), "count": torch.tensor(len(client))}
    return Update(client, {Part.CLASSIFIER: weights}, examples)


def average(how: Combination, *updates: Update) -> list[float]:
    merge = averaging.AverageAggregator(ONLY, MemorySpill(), how)
    for each in updates:
        merge.add(each)
    merged, _ = merge.finish(loaders({each.client: each for each in updates}))
    return list(merged.parts[Part.CLASSIFIER]["w"].tolist())


def test_the_median_of_four_is_the_mean_of_the_two_in_the_middle() -> None:
    values = torch.tensor([[1.0, 5.0], [2.0, -100.0], [4.0, 6.0], [1000.0, 7.0]])
    assert averaging.combine(values, "median").tolist() == [3.0, 5.5]


def test_a_trimmed_mean_of_five_leaves_out_the_least_and_the_largest() -> None:
    values = torch.tensor([[1.0], [2.0], [3.0], [4.0], [1e9]])
    assert averaging.combine(values, "trimmed").tolist() == [3.0]
    assert averaging.combine(values, "mean").tolist() == [pytest.approx(2e8 + 2)]


def test_numbers_that_are_not_finite_have_no_median() -> None:
    with pytest.raises(DivergedError):
        averaging.combine(torch.tensor([[1.0], [float("nan")]]), "median")


@given(st.permutations("abcdef"), st.sampled_from(["median", "trimmed"]))
def test_the_order_of_clients_never_shows(order: list[str], how: Combination) -> None:
    updates = {
        client: update(client, *torch.randn(7, generator=torch.manual_seed(ord(client))).tolist()) for client in order
    }
    assert average(how, *updates.values()) == average(how, *(updates[client] for client in sorted(order)))


def test_blocks_of_rows_give_what_all_rows_at_once_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    spill = averaging.DirectorySpill(tmp_path)
    for client in "abc":
        spill.put(client, {"logits": torch.randn(50, 4, generator=torch.manual_seed(ord(client)))})
    whole = averaging.combined(spill, "abc", "logits", "median", lambda rows: rows.log_softmax(1))
    monkeypatch.setattr(averaging, "BLOCK_NUMBERS", 100)
    assert torch.equal(averaging.combined(spill, "abc", "logits", "median", lambda rows: rows.log_softmax(1)), whole)


def test_a_median_of_weights_ignores_one_of_five_whatever_it_sends_and_claims() -> None:
    honest = [update(client, number, 2.0) for number, client in enumerate("abcd")]
    assert average("median", *honest, update("e", 1e30, -1e30, examples=10**9)) == [2.0, 2.0]
    assert average("mean", *honest, update("e", 1e6, -1e6, examples=10**9))[0] > 9e5


def taught(ensemble: Taught, logits: dict[str, list[list[float]]]) -> torch.Tensor:
    spill = MemorySpill()
    ensemble_of = TaughtAverage(
        ONLY, lambda each: torch.tensor(logits[each.client]), lambda *_: Aggregate({}), spill, ensemble=ensemble
    )
    return ensemble_of.settle(loaders({client: update(client, 1.0) for client in logits}))[1]


def test_a_loud_teacher_decides_a_sum_and_no_standardised_median_or_trimmed_ensemble() -> None:
    logits = {"a": [[2.0, 0.0]], "b": [[2.0, 0.0]], "c": [[0.0, 1000.0]]}
    assert taught("sum", logits).argmax(1).tolist() == [1]
    others: tuple[Taught, ...] = ("standardised", "median", "trimmed")
    for ensemble in others:
        assert taught(ensemble, logits).argmax(1).tolist() == [0], ensemble


def test_standardised_teachers_of_one_loudness_are_the_sum() -> None:
    logits = {"a": [[2.0, 0.0], [1.0, 3.0]], "b": [[3.0, 5.0], [4.0, 2.0]]}  # each deviates by 1 from its rows' means
    torch.testing.assert_close(taught("standardised", logits), taught("sum", logits))


def test_the_median_is_of_log_probabilities() -> None:
    logits = {"a": [[0.0, 0.0]], "b": [[1.0, 0.0]], "c": [[0.0, 9.0]]}  # log p of class 0: -0.693, -0.313, -9.0
    torch.testing.assert_close(taught("median", logits)[0, 0], torch.tensor(0.5).log())


def test_crossed_distillation_refuses_what_it_would_not_use() -> None:
    with pytest.raises(ValueError, match="have no effect with aggregation = crossed_kd"):
        get_method("fedcg").params_type.model_validate({"aggregation": "crossed_kd", "ensemble": "median"})


def test_the_average_in_a_methods_place_keeps_the_parts_that_no_update_holds() -> None:
    generator = {"g": torch.tensor([7.0])}
    state = ServerState(Aggregate({Part.CLASSIFIER: {}, Part.GENERATOR: generator}), {"extra": generator})
    merge = averaging.parts_average(ONLY, state, MemorySpill())
    updates = {client: update(client, number) for client, number in (("a", 1.0), ("b", 3.0))}
    aggregate, after = merge.finish(loaders(updates))
    assert aggregate.parts[Part.CLASSIFIER]["w"].tolist() == [2.0]
    assert aggregate.parts[Part.GENERATOR] is generator
    assert after.extras == {"extra": generator}


@pytest.mark.parametrize(("flat_steps", "steps"), [(0, 40), (10, 20)])
def test_a_distillation_whose_loss_is_flat_ends_early_where_that_is_asked_for(flat_steps: int, steps: int) -> None:
    taken, progress = [], list[tuple[int, int]]()

    def loss_of(nets: Nets, batch: Tensors) -> torch.Tensor:
        taken.append(batch)
        nothing: torch.Tensor = 0.0 * nets["student"](*batch).sum()
        return nothing + 1.0  # as flat as can be: the second ten steps bring nothing

    settings = Distillation(40, 2, 1e-3, 0.0, flat_steps)
    ctx = replace(
        context(quick_spec("fedcg")), callbacks=Callbacks(lambda phase, step, of: progress.append((step, of)))
    )
    student = {"student": torch.nn.Linear(1, 1)}
    run_stage(distillation(student, loss_of, lambda rows: (torch.ones(80, 1)[rows],), settings), ctx)
    assert len(taken) == steps
    assert progress[-1] == (steps, steps)
