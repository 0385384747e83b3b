"""Who is online, told to the round engine: a device comes with a hello, goes with its status or will, or falls silent."""

from __future__ import annotations

from coordinator.rounds.round_engine import CameOnline, WentOffline
from coordinator.service.presence import Presence
from coordinator.service.round_driver import RoundDriver
from coordinator.updates.receiver import Intake
from fedcg.event_log import EventLog


class Attendance:
    """Keeps the round engine's list of who is there.

    Args:
        conductor: holds the list.
        intake: hears chunks, which say as much as heartbeats.
        events: the event log.
    """

    def __init__(self, round_driver: RoundDriver, intake: Intake, events: EventLog) -> None:
        self._round_driver = round_driver
        self._intake = intake
        self._events = events
        self.presence = Presence()

    def is_online(self, device: str) -> bool:
        """Whether a device counts as there."""
        return device in self._round_driver.state.online

    async def came(self, device: str) -> None:
        """A device is there, and may be invited."""
        if not self.is_online(device):
            self._events.write("online", client=device)
        await self._round_driver.apply(CameOnline(device))

    async def went(self, device: str, reason: str) -> None:
        """A device is gone, if it was there."""
        if self.is_online(device):
            self._events.write("offline", client=device, reason=reason)
            await self._round_driver.apply(WentOffline(device))

    async def miss_silent(self, now: float) -> None:
        """Count devices as offline that died without a will: together with their broker, for example."""
        for device in self._round_driver.state.online:
            self.presence.heard(device, self._intake.heard_at(device))
        for device in self.presence.silent(now):
            await self.went(device, "it missed its heartbeats")
