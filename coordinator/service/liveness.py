"""Which devices are online, for the round engine: one comes with a hello, goes with its status or will, or falls silent."""

from __future__ import annotations

from coordinator.rounds.round_engine import CameOnline, WentOffline
from coordinator.service.presence import Presence
from coordinator.service.round_driver import RoundDriver
from coordinator.updates.receiver import Receiver
from fedcg.event_log import EventLog


class Attendance:
    """Keeps the round engine's list of who is there.

    Args:
        round_driver: holds the list.
        receiver: knows when chunks came, which count as heartbeats.
        events: the event log.
    """

    def __init__(self, round_driver: RoundDriver, receiver: Receiver, events: EventLog) -> None:
        self._round_driver = round_driver
        self._receiver = receiver
        self._events = events
        self.presence = Presence()

    def is_online(self, device: str) -> bool:
        """Whether a device counts as there."""
        return device in self._round_driver.state.online

    def came(self, device: str) -> None:
        """A device is there, and may be invited."""
        if not self.is_online(device):
            self._events.write("online", client=device)
        self._round_driver.apply(CameOnline(device))

    def went(self, device: str, reason: str) -> None:
        """A device is gone, if it was there."""
        if self.is_online(device):
            self._events.write("offline", client=device, reason=reason)
            self._round_driver.apply(WentOffline(device))

    def miss_silent(self, now: float) -> None:
        """Count devices as offline that died without a will: together with their broker, for example."""
        for device in self._round_driver.state.online:
            self.presence.heard(device, self._receiver.heard_at(device))
        for device in self.presence.silent(now):
            self.went(device, "it missed its heartbeats")
