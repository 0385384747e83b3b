"""Who is online, told to the round engine: a device comes with a hello, goes with its status or will, or falls silent."""

from __future__ import annotations

from coordinator.rounds.round_engine import CameOnline, WentOffline
from coordinator.service.presence import Presence
from coordinator.service.round_driver import Conductor
from coordinator.updates.receiver import Intake
from fedcg.event_log import EventLog


class Attendance:
    """Keeps the round engine's list of who is there.

    Args:
        conductor: holds the list.
        intake: hears chunks, which say as much as heartbeats.
        events: the diary.
    """

    def __init__(self, conductor: Conductor, intake: Intake, events: EventLog) -> None:
        self._conductor = conductor
        self._intake = intake
        self._events = events
        self.presence = Presence()

    def is_online(self, device: str) -> bool:
        """Whether a device counts as there."""
        return device in self._conductor.state.online

    async def came(self, device: str) -> None:
        """A device is there, and may be invited."""
        if not self.is_online(device):
            self._events.write("online", client=device)
        await self._conductor.apply(CameOnline(device))

    async def went(self, device: str, reason: str) -> None:
        """A device is gone, if it was there."""
        if self.is_online(device):
            self._events.write("offline", client=device, reason=reason)
            await self._conductor.apply(WentOffline(device))

    async def miss_silent(self, now: float) -> None:
        """Count devices as offline that died without a will: together with their broker, for example."""
        for device in self._conductor.state.online:
            self.presence.heard(device, self._intake.heard_at(device))
        for device in self.presence.silent(now):
            await self.went(device, "it missed its heartbeats")
