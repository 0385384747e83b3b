"""The protocol versions that this program supports, and how two sides agree on one.

A hello lists the device's versions, a welcome picks the highest that both support. Hello, welcome and refusal keep their form
for ever (`v` stays 1); only the messages of a session depend on its version. A coordinator of version N serves N and N-1, from
version 2 on: no program with version 1 was ever deployed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

FIRST_SERVED = 2
PROTOCOL_VERSION = 2
SPOKEN: tuple[int, ...] = tuple(range(max(FIRST_SERVED, PROTOCOL_VERSION - 1), PROTOCOL_VERSION + 1))
Side = Literal["device", "coordinator"]


def agree(device: Sequence[int]) -> int | None:
    """The highest version that a device and this program support, or None."""
    return max(set(device) & set(SPOKEN), default=None)


def outdated(device: Sequence[int], coordinator: Sequence[int]) -> Side:
    """The side to update when both have no version in common: the one whose newest version is the older."""
    return "device" if max(device) < max(coordinator) else "coordinator"


def explain_versions(device: Sequence[int], coordinator: Sequence[int]) -> str:
    """The reason why two sides have no version in common, and what to do, for people."""
    ours, theirs = (", ".join(map(str, sorted(side))) for side in (device, coordinator))
    what = "agent on this device" if outdated(device, coordinator) == "device" else "coordinator"
    return f"the device supports protocol version {ours}, the coordinator {theirs}: update the {what}"
