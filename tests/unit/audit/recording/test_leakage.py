"""The leakage check accuses what leaks, in every coding, and nothing else."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from audit.recording.leakage import PrivateTensor, WireTensor, compare, correlation, find_bytes

Array = NDArray[Any]
INITIAL = np.random.default_rng(1).normal(0, 0.1, (16, 6, 5, 5)).astype(np.float32)
# Channels learn at different speeds, so that one scale per channel matters.
_SPEED = np.geomspace(0.002, 0.3, 16).reshape(16, 1, 1, 1)
TRAINED = (INITIAL + _SPEED * np.random.default_rng(2).normal(0, 1, INITIAL.shape)).astype(np.float32)
PRIVATE = (PrivateTensor("client-1 round 1", "extractor/conv2.weight", TRAINED),)


def per_channel_int8(values: Array) -> Array:
    scales = np.abs(values).reshape(len(values), -1).max(axis=1) / 127
    coded: Array = np.rint(values / scales.reshape(-1, 1, 1, 1)).astype(np.int8)
    return coded


def seen(value: Array, **bases: Array) -> tuple[WireTensor]:
    return (WireTensor("ab" * 32, "generator/hidden", value, bases),)


@pytest.mark.parametrize(
    "value",
    [
        TRAINED,
        TRAINED.astype(np.float16),
        TRAINED.reshape(-1),
        TRAINED.reshape(96, 25) * -3.0 + 7.0,
        per_channel_int8(TRAINED),
    ],
    ids=["f32", "f16", "flattened", "scaled and sign-flipped", "i8 with a scale per channel"],
)
def test_a_planted_extractor_is_found_as_value(value: Array) -> None:
    (match,) = compare(seen(value), PRIVATE)
    assert (match.how, match.private, match.owner) == ("value", "extractor/conv2.weight", "client-1 round 1")
    assert match.correlation >= 0.99


@pytest.mark.parametrize(
    "value",
    [TRAINED - INITIAL, (TRAINED - INITIAL).astype(np.float16), per_channel_int8(TRAINED - INITIAL)],
    ids=["f32", "f16", "i8 with a scale per channel"],
)
def test_a_planted_delta_is_found_only_with_its_base(value: Array) -> None:
    assert compare(seen(value), PRIVATE) == []
    (match,) = compare(seen(value, initial=INITIAL), PRIVATE)
    assert (match.how, match.base) == ("delta", "initial")


def test_a_delta_to_a_known_mask_is_found_by_its_sum() -> None:
    mask = np.random.default_rng(3).normal(0, 1, TRAINED.shape).astype(np.float32)
    assert compare(seen(TRAINED - mask), PRIVATE) == []
    (match,) = compare(seen(TRAINED - mask, mask=mask), PRIVATE)
    assert match.how == "delta"


def test_unrelated_tensors_of_the_same_size_are_not_accused() -> None:
    generator = np.random.default_rng(4)
    others = tuple(
        WireTensor("cd" * 32, f"generator/{n}", generator.normal(0, 0.1, TRAINED.size), {"initial": INITIAL})
        for n in range(50)
    )
    assert compare(others, PRIVATE) == []


def test_a_value_near_its_own_base_is_not_accused_of_a_small_private_tensor() -> None:
    base = np.random.default_rng(5).normal(0, 1, TRAINED.shape)
    tiny = (PrivateTensor("client-1", "discriminator/weight", 0.001 * TRAINED),)
    assert compare(seen(base * 1.01, aggregate=base), tiny) == []


def test_a_zero_update_of_a_known_start_is_not_accused() -> None:
    near = (PrivateTensor("client-1", "extractor/conv2.weight", INITIAL * 1.0001),)
    assert compare(seen(np.zeros_like(INITIAL), initial=INITIAL), near) == []


def test_another_size_is_never_compared_and_constants_and_nans_do_no_harm() -> None:
    assert compare(seen(TRAINED[:8]), PRIVATE) == []
    assert correlation(np.ones(10), np.arange(10)) == 0.0
    assert compare(seen(np.full(TRAINED.shape, np.nan)), PRIVATE) == []


def test_correlation_is_pearsons_by_hand() -> None:
    # (1, 2, 3) and (1, 2, 4): centred (-1, 0, 1) and (-4/3, -1/3, 5/3); product 3; norms sqrt(2) and sqrt(42)/3.
    assert correlation(np.array([1.0, 2, 3]), np.array([1.0, 2, 4])) == pytest.approx(3 / (2**0.5 * 42**0.5 / 3))


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_raw_bytes_of_a_private_tensor_are_found_inside_a_payload(kind: type) -> None:
    noise = np.random.default_rng(6).bytes(4000)
    planted = noise + TRAINED.astype(kind).tobytes() + noise
    (match,) = find_bytes({"frame": planted, "clean": noise * 3}, PRIVATE)
    assert (match.artifact, match.how) == ("frame", "bytes")


def test_a_piece_of_a_private_tensor_is_found_too() -> None:
    piece = TRAINED.ravel()[: TRAINED.size // 3].tobytes()
    assert find_bytes({"frame": b"header" + piece}, PRIVATE)


def test_constant_tensors_give_no_needle() -> None:
    ones = (PrivateTensor("client-1", "discriminator/norm.weight", np.ones(400, dtype=np.float32)),)
    assert find_bytes({"frame": np.ones(1000, dtype=np.float32).tobytes()}, ones) == []
