"""Averages of weights, worked by hand."""

from __future__ import annotations

import pytest
import torch

from fedcg.learning.averaging import average_updates, weighted_average
from fedcg.learning.method import Update
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


def test_updates_are_streamed_in_client_id_order_whatever_order_they_came_in() -> None:
    asked: list[str] = []

    def loader(name: str, value: float) -> Update:
        asked.append(name)
        return Update(name, {Part.CLASSIFIER: {"w": torch.tensor([value])}}, 1, (1, 0))

    merged = average_updates(
        {"b": lambda: loader("b", 1.0), "a": lambda: loader("a", 3.0)}, frozenset({Part.CLASSIFIER})
    )
    assert asked == ["a", "b"]
    assert merged.parts[Part.CLASSIFIER]["w"].tolist() == [2.0]
    assert merged.label_counts == {"a": (1, 0), "b": (1, 0)}


def test_an_update_counts_by_the_examples_it_reports() -> None:
    # (1 * 8 + 3 * 4) / 4 = 5; unweighted it would be 6
    updates = {
        name: Update(name, {Part.CLASSIFIER: {"w": torch.tensor([value])}}, examples)
        for name, value, examples in (("a", 8.0, 1), ("b", 4.0, 3))
    }
    merged = average_updates({"a": lambda: updates["a"], "b": lambda: updates["b"]}, frozenset({Part.CLASSIFIER}))
    assert merged.parts[Part.CLASSIFIER]["w"].tolist() == [5.0]
    assert merged.examples == {"a": 1, "b": 3}
