"""How many refusals a listener takes: per address, from all, and with a bounded memory."""

import pytest

from coordinator.http.refusals import FailureLimits, Rate
from coordinator.token_buckets import MAX_KEYS


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_address_waits_after_its_burst_and_may_ask_again_when_refilled() -> None:
    clock = Clock()
    limits = FailureLimits(clock, Rate(2, 0.1), Rate(100, 1.0))
    for _ in range(2):
        assert limits.wait_s("10.0.0.1") == 0
        limits.refused("10.0.0.1")
    assert limits.wait_s("10.0.0.1") == pytest.approx(10.0)
    assert limits.wait_s("10.0.0.2") == 0
    clock.now += 10.0
    assert limits.wait_s("10.0.0.1") == 0


def test_success_costs_nothing() -> None:
    limits = FailureLimits(Clock(), Rate(1, 0.1), Rate(1, 0.1))
    assert [limits.wait_s("10.0.0.1") for _ in range(1000)] == [0.0] * 1000


def test_refusals_of_many_addresses_slow_everybody() -> None:
    clock = Clock()
    limits = FailureLimits(clock, Rate(10, 1.0), Rate(3, 0.5))
    for number in range(3):
        limits.refused(f"10.0.0.{number}")
    assert limits.wait_s("10.9.9.9") == pytest.approx(2.0)


def test_an_ipv6_network_of_64_bits_is_one_address() -> None:
    limits = FailureLimits(Clock(), Rate(1, 0.1), Rate(100, 1.0))
    limits.refused("2001:db8::1")
    assert limits.wait_s("2001:db8::ffff") > 0
    assert limits.wait_s("2001:db8:0:1::1") == 0


def test_memory_is_bounded_however_many_addresses_come() -> None:
    limits = FailureLimits(Clock(), Rate(1, 0.1), Rate(10**6, 1.0))
    for number in range(MAX_KEYS + 100):
        limits.refused(f"10.{number >> 16}.{(number >> 8) & 255}.{number & 255}")
    assert len(limits._addresses._levels) == MAX_KEYS
