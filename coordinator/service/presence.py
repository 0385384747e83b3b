"""Who is still there: a device that promised heartbeats and has said nothing for some of them is gone.

A will usually says so first; it is lost when the device dies together with a broker that keeps nothing. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

MISSED = 3.0  # so many heartbeats may be late: a slow link delays them behind chunks, which count as well


@dataclass
class _Device:
    every_s: float
    heard_at: float


class Presence:
    """When each device was heard last."""

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}

    def expect(self, device: str, every_s: float | None, now: float) -> None:
        """A device said hello and promised a heartbeat so often; None for one that does not know of heartbeats."""
        if every_s is None:
            self._devices.pop(device, None)
        else:
            self._devices[device] = _Device(every_s, now)

    def heard(self, device: str, now: float) -> None:
        """Anything valid came from a device."""
        known = self._devices.get(device)
        if known is not None:
            known.heard_at = max(known.heard_at, now)

    def pardon(self, now: float) -> None:
        """Our own link was down: nobody could be heard, and the silence of nobody counts."""
        for known in self._devices.values():
            known.heard_at = now

    def silent(self, now: float) -> list[str]:
        """The devices that have been silent for too long."""
        return sorted(name for name, known in self._devices.items() if now - known.heard_at > MISSED * known.every_s)
