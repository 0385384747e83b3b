"""Averages of weights, worked by hand."""

from functools import partial
from itertools import permutations

import pytest
import torch

from fedcg.learning.aggregation.averaging import AverageAggregator, weighted_average
from fedcg.learning.method import DivergedError, Update
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.wire.parts import Part


def test_a_client_counts_by_its_number_of_examples() -> None:
    # (1 * 0 + 3 * 4) / 4 = 3, and buffers like running means as well
    merged = weighted_average([(1, {"w": torch.tensor([0.0])}), (3, {"w": torch.tensor([4.0])})])
    assert merged["w"].tolist() == [3.0]
    assert merged["w"].dtype == torch.float32


def test_the_largest_of_an_integer_counter_is_kept() -> None:
    merged = weighted_average([(1, {"n": torch.tensor(7)}), (9, {"n": torch.tensor(5)})])
    assert merged["n"].item() == 7
    assert merged["n"].dtype == torch.int64


def test_averaging_changes_no_clients_own_tensors() -> None:
    mine = {"w": torch.tensor([2.0]), "n": torch.tensor(1)}
    weighted_average([(1, mine), (1, {"w": torch.tensor([4.0]), "n": torch.tensor(3)})])
    assert mine["w"].item() == 2.0
    assert mine["n"].item() == 1


def test_no_client_and_a_client_without_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="no client"):
        weighted_average([])
    with pytest.raises(ValueError, match="positive"):
        weighted_average([(0, {"w": torch.zeros(1)})])


UPDATES = {
    name: Update(name, {Part.CLASSIFIER: {"w": torch.tensor([value]), "n": torch.tensor(count)}}, examples)
    for name, value, count, examples in (("a", 1e8, 4, 3), ("b", 0.1, 9, 5), ("c", -1e8, 2, 3))
}


def averaged(added: tuple[str, ...], present: str) -> tuple[float, int]:
    merge = AverageAggregator(frozenset({Part.CLASSIFIER}), MemorySpill())
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


def test_who_is_not_in_the_round_does_not_count_in_its_average() -> None:
    assert averaged(("a", "b", "c"), "ac") == (0.0, 4)


def test_an_update_that_is_not_finite_is_refused() -> None:
    with pytest.raises(DivergedError, match="not finite"):
        weighted_average([(1, {"w": torch.tensor([float("nan")])})])


def test_a_method_without_shared_parts_averages_nothing() -> None:
    merge = AverageAggregator(frozenset(), MemorySpill())
    assert merge.finish({"a": lambda: UPDATES["a"]})[0].parts == {}
