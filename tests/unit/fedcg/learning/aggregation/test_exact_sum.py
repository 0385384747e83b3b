"""Sums that don't know the order of their terms."""

import math
from fractions import Fraction
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcg.learning.aggregation import averaging
from fedcg.learning.aggregation.averaging import ExactSum
from fedcg.learning.method import DivergedError

TERMS = st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(1, 1 << 20)), min_size=2, max_size=5)


def summed(terms: list[tuple[float, int]]) -> torch.Tensor:
    total = ExactSum()
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
    total = ExactSum()
    total.add(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2.0], [0.0]]))
    total.add(torch.tensor([[1.0, 1.0], [1.0, 1.0]]), torch.tensor([[1.0], [5.0]]))
    assert total.value().tolist() == [[3.0, 5.0], [5.0, 5.0]]


def test_what_is_not_finite_is_refused_and_what_is_enormous_saturates() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(DivergedError, match="not finite"):
            ExactSum().add(torch.tensor([bad]))
    assert summed([(1e30, 1), (-1e30, 1), (1.0, 1)]).item() == 1.0
    assert summed([(1e30, 1)]).item() == 2.0**52


def test_no_number_of_terms_overflows_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    # the largest terms there are, as many as there may be, stay within 64 bits: 2^20 times (2^42 and 2^41)
    assert averaging.MOST_TERMS * 2**42 < 2**63
    total = ExactSum()
    monkeypatch.setattr(averaging, "MOST_TERMS", 2)
    total.add(torch.tensor([1e30]))
    total.add(torch.tensor([1e30]))
    with pytest.raises(OverflowError, match="room for 2"):
        total.add(torch.tensor([1.0]))


def test_an_empty_sum_has_no_value() -> None:
    with pytest.raises(ValueError, match="nothing"):
        ExactSum().value()
