"""Tensors as whole numbers of a sealed sum: the weighted mean within its bound, and nothing where the sum is none."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcg.wire.artifacts.payload import Array
from fedcg.wire.errors import CodecError, SumError
from fedcg.wire.messages.schemas import SealedSum
from fedcg.wire.parts import MAX_SUM_DEVICES, MIN_SUM_DEVICES, TAGS, Part, TensorLayout
from fedcg.wire.sealed_numbers import MOST_SHARE, STEPS, Numbers, added, clipped, from_numbers, number_count, to_numbers
from fedcg.wire.sums import SumRound, cohort_mask, opened, tagged

RANGE = 8.0
LAYOUTS = (
    TensorLayout(name="count", dtype="int64", shape=()),
    TensorLayout(name="held", dtype="float32", shape=(2, 3), low=0.0, high=1.0),
    TensorLayout(name="weight", dtype="float32", shape=(40,)),
)
SECRET = bytes(range(32))


def drawn(seed: int) -> dict[str, Array]:
    """Tensors within their bounds, and some numbers at them."""
    random = np.random.default_rng(seed)
    weight = np.clip(random.normal(0, 0.8 * RANGE, 40), -RANGE, RANGE).astype(np.float32)
    held = np.rint(random.random((2, 3)) * 4).astype(np.float32) / 4
    return {"count": np.array(3), "held": held, "weight": weight}


def shares_of(weights: Sequence[int]) -> list[float]:
    return [clipped(weight, sum(weights)) / sum(weights) for weight in weights]


many_weights = st.lists(st.integers(1, 1 << 24), min_size=MIN_SUM_DEVICES, max_size=MAX_SUM_DEVICES)


@settings(max_examples=60, deadline=None)
@given(many_weights, st.integers(0, 1 << 32))
def test_the_mean_of_any_shares_and_numbers_within_bounds_is_the_weighted_one(weights: list[int], seed: int) -> None:
    """Law: n devices round their share S_i and their number, each by at most half a step of 2^-27.

    With S the sum of the shares and h half of a tensor's range, the mean is off by at most h n / (2^27 S - n / 2), and float32 adds
    2^-24 of a number: 2.4e-6 for 32 devices whose shares are 1 together, with numbers up to 8.
    """
    tensors = [drawn(seed + number) for number in range(len(weights))]
    shares = shares_of(weights)
    total = added([to_numbers(one, LAYOUTS, RANGE, share) for one, share in zip(tensors, shares, strict=True)])
    assert len(total) == number_count(LAYOUTS) == 47 + TAGS
    found = from_numbers(total, LAYOUTS, RANGE)
    assert not found["count"].any()
    steps = STEPS * sum(shares) - len(weights) / 2
    for name, half in (("held", 0.5), ("weight", RANGE)):
        wanted = np.average(np.stack([one[name].astype(np.float64) for one in tensors]), axis=0, weights=shares)
        error = np.abs(found[name] - wanted).max()
        assert error <= half * len(weights) / steps + 2.0**-24 * np.abs(wanted).max()
        assert error < 7e-6 or sum(shares) < 0.3


@given(many_weights)
def test_a_device_that_dominates_counts_for_two_fifths_of_a_mean_and_no_other_for_more_than_three_fifths(
    weights: list[int],
) -> None:
    shares, most = np.array(shares_of(weights)), MOST_SHARE * sum(weights)
    dominating = [weight > most for weight in weights]
    counted = shares / shares.sum()
    assert shares.max() <= MOST_SHARE + 1e-12, "or modulo 2^32 a sum can't be told"
    assert counted.max() <= 0.6 + 1e-12
    assert sum(dominating) != 1 or counted[dominating] == pytest.approx([MOST_SHARE])
    kept = [share * sum(weights) for share, is_clipped in zip(shares, dominating, strict=True) if not is_clipped]
    assert kept == pytest.approx([weight for weight in weights if weight <= most])


def published(numbers: Mapping[str, Numbers], of: SealedSum) -> Numbers:
    """The sum as the coordinator has it of these devices, of whom every one has the same mask."""
    at = SumRound("shapes", of.round, of.attempt)
    return added([*numbers.values(), *(cohort_mask(at, SECRET, of.digest, name, 47 + TAGS) for name in numbers)])


def test_sums_of_groups_are_opened_together_and_with_another_secret_or_list_not_at_all() -> None:
    names, share = [f"box-{number}" for number in range(8)], 1 / 8
    numbers = {name: to_numbers(drawn(number), LAYOUTS, RANGE, share) for number, name in enumerate(names)}
    groups = [
        SealedSum(round=3, attempt=1, parts=(Part.EXTRACTOR,), digest=digest * 64, names=tuple(of))
        for digest, of in (("a", names[:4]), ("b", names[4:]))
    ]
    at = SumRound("shapes", 3, 1)
    numbers = {name: tagged(at, SECRET, one) for name, one in numbers.items()}
    total = added([published({name: numbers[name] for name in one.names}, one) for one in groups])
    sealed = {Part.EXTRACTOR.value: total}
    assert np.array_equal(opened(sealed, groups, "shapes", SECRET)[Part.EXTRACTOR], added(list(numbers.values())))
    fewer = groups[1].model_copy(update={"names": tuple(names[4:7])})
    added_to = total.copy()
    added_to[-1] += 1 << 31  # half of all factors don't see it
    nobodys = [one.model_copy(update={"names": ()}) for one in groups]
    wrong: list[tuple[Numbers, list[SealedSum], str, bytes]] = [
        *((total, groups, "shapes", bytes([number]) * 32) for number in range(50)),
        (total, groups, "other", SECRET),
        (total, groups[:1], "shapes", SECRET),
        (total, [groups[0], fewer], "shapes", SECRET),
        (added_to, groups, "shapes", SECRET),
        (added(list(numbers.values())) + 1, nobodys, "shapes", SECRET),
    ]
    for sent, of, federation, secret in wrong:
        with pytest.raises(SumError, match="is of another secret, or was altered in transit"):
            opened({Part.EXTRACTOR.value: sent}, of, federation, secret)


def test_a_device_that_sends_a_number_beyond_its_share_leaves_no_mean() -> None:
    honest = added([to_numbers(drawn(number), LAYOUTS, RANGE, 0.25) for number in range(4)])
    for place, sign in ((1 + TAGS, 1), (46 + TAGS, -1)):
        lie = honest.copy()
        lie[place] = np.int32(sign * 1.001 * STEPS).astype(np.uint32)
        with pytest.raises(SumError, match="an opened sum is not a mean of numbers in their bounds"):
            from_numbers(lie, LAYOUTS, RANGE)
    honest[0] = np.uint32(1.001 * STEPS)
    with pytest.raises(SumError, match="the shares in a sum don't add up"):
        from_numbers(honest, LAYOUTS, RANGE)


@pytest.mark.parametrize(
    ("name", "number", "problem"),
    [
        ("weight", 8.5, "tensor weight holds numbers outside -8 to 8, which a sealed sum can't hold"),
        ("weight", -9.0, "tensor weight holds numbers outside -8 to 8"),
        ("held", 1.25, "tensor held holds numbers outside 0 to 1"),
    ],
)
def test_a_number_beyond_its_bounds_names_its_tensor(name: str, number: float, problem: str) -> None:
    tensors = drawn(1)
    tensors[name].reshape(-1)[0] = number
    with pytest.raises(CodecError, match=problem):
        to_numbers(tensors, LAYOUTS, RANGE, 0.25)
