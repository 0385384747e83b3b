"""Which devices are online, for the round engine: online by a hello, offline by a status, a will or silence.

A will usually comes first; it is lost when the device dies together with a broker that keeps nothing. Every change is stored.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.rounds.events import CameOnline, WentOffline
from coordinator.rounds.records import PresenceRecord
from coordinator.service.round_driver import RoundDriver
from coordinator.storage.presence_store import KEEP_S
from coordinator.storage.store import Store
from coordinator.updates.receiver import Receiver
from fedcg.event_log import EventLog

PRUNE_EVERY_S = 86_400.0
PRUNE_EVERY = 100  # changes of one device: one that comes and goes all the time must not fill the database
MISSED = 3.0  # so many heartbeats may be late: a slow link delays them behind chunks, which count as well


@dataclass
class _Promise:
    every_s: float
    last_seen_at: float


@dataclass(frozen=True)
class PresenceLog:
    """Stores the changes of one federation.

    Args:
        store: the database.
        federation: its id.
        clock: unix time.
    """

    store: Store
    federation: str
    clock: Callable[[], float] = time.time
    noted: Counter[str] = field(default_factory=Counter)
    """Changes of each device since the start."""

    def note(self, device: str, reason: str = "", *, online: bool, unseen_s: float = 0.0) -> None:
        """Store that a device came or went now, and that it was last seen so many seconds ago; nothing of one that was never enrolled."""
        if self.store.device(device) is None:
            return
        now = self.clock()
        self.store.presence.note(PresenceRecord(self.federation, device, now, online, reason))
        self.store.saw_device(device, now - unseen_s)
        self.noted[device] += 1
        if self.noted[device] % PRUNE_EVERY == 0:
            self.store.presence.prune(self.federation, self.clock() - KEEP_S, device)

    def begin(self) -> None:
        """The coordinator starts: devices that counted as online when it was killed are not observed until they come again."""
        self.prune()
        self._lose_sight("the coordinator was started again")

    def end(self) -> None:
        """The coordinator stops: no device is observed until it is started again."""
        self._lose_sight("the coordinator was stopped")

    def _lose_sight(self, reason: str) -> None:
        now, latest = self.clock(), self.store.presence.latest(self.federation)
        online = [device for device, last in latest.items() if last.online]
        self.store.presence.note(
            *(PresenceRecord(self.federation, device, now, online=False, reason=reason) for device in online)
        )

    def prune(self) -> None:
        """Delete what is older than `KEEP_S`, or more than is kept of one device."""
        self.store.presence.prune(self.federation, self.clock() - KEEP_S)


class Liveness:
    """Keeps the round engine's list of devices that are online. Times are monotonic seconds.

    Args:
        round_driver: holds the list.
        receiver: has the times of the last chunks, which count as heartbeats.
        events: the event log.
        presence: stores every change.
    """

    def __init__(self, round_driver: RoundDriver, receiver: Receiver, events: EventLog, presence: PresenceLog) -> None:
        self._round_driver = round_driver
        self._receiver = receiver
        self._events = events
        self._presence = presence
        self._pruned_at = time.monotonic()
        self._promises: dict[str, _Promise] = {}

    def is_online(self, device: str) -> bool:
        """Whether a device counts as online."""
        return device in self._round_driver.state.online

    def mark_online(self, device: str) -> None:
        """A device is online, and may be invited."""
        if not self.is_online(device):
            self._events.write("online", client=device)
            self._presence.note(device, online=True)
        self._round_driver.apply(CameOnline(device))

    def mark_offline(self, device: str, reason: str, now: float) -> None:
        """A device is offline, if it was online."""
        if self.is_online(device):
            self._events.write("offline", client=device, reason=reason)
            self.note_gone(device, reason, now)
            self._round_driver.apply(WentOffline(device))

    def note_gone(self, device: str, reason: str, now: float) -> None:
        """Store that a device goes, if it was online, and when its last message or chunk came."""
        if self.is_online(device):
            self.mark_seen(device, self._receiver.last_seen_at(device))
            promise = self._promises.get(device)
            unseen_s = 0.0 if promise is None else now - promise.last_seen_at
            self._presence.note(device, reason, online=False, unseen_s=unseen_s)

    def expect(self, device: str, every_s: float | None, now: float) -> None:
        """Expect a heartbeat of a device every `every_s` seconds; None for a device that promised none."""
        if every_s is None:
            self._promises.pop(device, None)
        else:
            self._promises[device] = _Promise(every_s, now)

    def mark_seen(self, device: str, now: float) -> None:
        """Record the time of a valid message of a device."""
        known = self._promises.get(device)
        if known is not None:
            known.last_seen_at = max(known.last_seen_at, now)

    def pardon(self, now: float) -> None:
        """Restart every device's interval: the coordinator's own link was down and nothing could be received."""
        for known in self._promises.values():
            known.last_seen_at = now

    def miss_silent(self, now: float) -> None:
        """Count devices as offline that died without a will: together with their broker, for example."""
        if now - self._pruned_at >= PRUNE_EVERY_S:
            self._pruned_at = now
            self._presence.prune()
        for device in sorted(self._round_driver.state.online & self._promises.keys()):
            self.mark_seen(device, self._receiver.last_seen_at(device))
            promise = self._promises[device]
            if now - promise.last_seen_at > MISSED * promise.every_s:
                self.mark_offline(device, "it missed its heartbeats", now)
