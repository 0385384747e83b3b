"""The devices of a running federation, for the round engine: members, online devices, and answers to invitations.

A hello puts a device online. A status, a will or missed heartbeats put it offline; the will is lost if the device and a broker without persistence fail together.
Invites are repeated, since one may be lost with the link. Devices that left the register or send too much are dropped. Decides nothing about rounds.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from coordinator.broker.access_lists import NOT_APPLIED
from coordinator.errors import BrokerError
from coordinator.messaging.incoming import FLOOD, SILENCE_S, Cohorts, MessageChecks
from coordinator.messaging.publisher import Publisher
from coordinator.rounds import signals
from coordinator.rounds.engine import Phase
from coordinator.rounds.records import DeviceState, ParticipantState, PresenceRecord
from coordinator.service.round_driver import RoundDriver
from coordinator.service.service_context import ServiceContext
from coordinator.storage.store import Store
from coordinator.storage.view_store import KEEP_S
from coordinator.updates.receiver import Receiver
from fedcg.event_log import EventLog
from fedcg.values import Value
from fedcg.wire.messages.schemas import Accept, Decline, DeclineReason, RoundAttempt

MISSED = 3.0  # heartbeat intervals without a message before a device is offline: chunks, which also count, delay heartbeats on slow links


@dataclass
class _Promise:
    every_s: float
    last_seen_at: float


PRUNE_EVERY_S = 86_400.0


class PresenceLog(Value):
    """Stores the presence changes of one federation's devices.

    Args:
        store: the database.
        federation: its id.
        clock: unix time.
    """

    store: Store
    federation: str
    clock: Callable[[], float] = time.time

    def note(self, device: str, reason: str = "", *, online: bool, unseen_s: float = 0.0) -> None:
        """Store that a device came online or went offline now, last seen `unseen_s` seconds ago; ignores devices that were never enrolled.

        Its earlier changes are pruned, so that a device that reconnects constantly does not fill the database.
        """
        if self.store.device(device) is None:
            return
        now = self.clock()
        self.store.presence.note(PresenceRecord(self.federation, device, now, online, reason))
        self.store.saw_device(device, now - unseen_s)
        self.store.presence.prune(self.federation, now - KEEP_S, device)

    def prune(self) -> None:
        """Delete old changes. Those of a device without new changes are only deleted here."""
        self.store.presence.prune(self.federation, self.clock() - KEEP_S)

    def lose_sight(self, reason: str) -> None:
        """At the coordinator's start or stop: devices that were online then are not observed until they connect again."""
        now, latest = self.clock(), self.store.presence.latest(self.federation)
        online = [device for device, last in latest.items() if last.online]
        self.store.presence.note(
            *(PresenceRecord(self.federation, device, now, online=False, reason=reason) for device in online)
        )


@dataclass(eq=False)
class Liveness:
    """Keeps the round engine's list of online devices. Times are monotonic seconds.

    Args:
        round_driver: holds the list.
        receiver: provides the times of the last chunks, which count as heartbeats.
        events: the event log.
        presence: stores every change.
    """

    round_driver: RoundDriver
    receiver: Receiver
    events: EventLog
    presence: PresenceLog
    _promises: dict[str, _Promise] = field(default_factory=dict, init=False)
    _pruned_at: float = field(default_factory=time.monotonic, init=False)

    def is_online(self, device: str) -> bool:
        """Whether a device counts as online."""
        return device in self.round_driver.state.online

    def mark_online(self, device: str) -> None:
        """Mark a device as online, so that it may be invited."""
        if not self.is_online(device):
            self.events.write("online", client=device)
            self.presence.note(device, online=True)
        self.round_driver.apply(signals.CameOnline(device))

    def mark_offline(self, device: str, reason: str, now: float) -> None:
        """Mark a device as offline, if it was online."""
        if self.is_online(device):
            self.events.write("offline", client=device, reason=reason)
            self.note_gone(device, reason, now)
            self.round_driver.apply(signals.WentOffline(device))

    def note_gone(self, device: str, reason: str, now: float) -> None:
        """Store that a device went offline, if it was online, and when its last message or chunk arrived."""
        if self.is_online(device):
            self.mark_seen(device, self.receiver.last_seen_at(device))
            promise = self._promises.get(device)
            unseen_s = 0.0 if promise is None else now - promise.last_seen_at
            self.presence.note(device, reason, online=False, unseen_s=unseen_s)

    def expect(self, device: str, every_s: float | None, now: float) -> None:
        """Expect a heartbeat of a device every `every_s` seconds; None for a device that sends none."""
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
        """Restart all devices' intervals, since the coordinator's own link was down and nothing could be received."""
        for known in self._promises.values():
            known.last_seen_at = now

    def miss_silent(self, now: float) -> None:
        """Mark devices offline that failed without a will, for example together with their broker. Prune once a day."""
        if now - self._pruned_at >= PRUNE_EVERY_S:
            self._pruned_at = now
            self.presence.prune()
        for device in sorted(self.round_driver.state.online & self._promises.keys()):
            self.mark_seen(device, self.receiver.last_seen_at(device))
            promise = self._promises[device]
            if now - promise.last_seen_at > MISSED * promise.every_s:
                self.mark_offline(device, "it missed its heartbeats", now)


REMIND_S = 5.0


@dataclass(eq=False)
class Invitations:
    """Keeps the answers of devices to their invitations.

    Args:
        context: the dependencies of the service.
        round_driver: drives the rounds.
        publisher: publishes.
        receiver: holds the updates in transfer.
    """

    context: ServiceContext
    round_driver: RoundDriver
    publisher: Publisher
    receiver: Receiver
    _accepted: dict[str, RoundAttempt] = field(default_factory=dict, init=False)
    """The last attempt that each device has accepted in its session."""
    _waits: dict[str, tuple[RoundAttempt, DeclineReason]] = field(default_factory=dict, init=False)
    _reminded_at: float = field(default=0.0, init=False)

    def forget(self, device: str) -> None:
        """Drop the accepted attempt of a device: it starts a new session and is invited again."""
        self._accepted.pop(device, None)

    def answered(self, device: str, answer: Accept | Decline) -> None:
        """Handle a device's answer, once."""
        state = self.round_driver.state
        if not state.is_open(answer.at) or device not in state.outstanding:
            return
        if self._accepted.get(device) == answer.at and isinstance(answer, Accept):
            return
        if isinstance(answer, Decline) and self._may_come(device, answer.reason):
            self._wait_for(device, answer)
            return
        declined = isinstance(answer, Decline)
        participant = ParticipantState.DECLINED if declined else ParticipantState.ACCEPTED
        reason = answer.reason.value if isinstance(answer, Decline) else ""
        about = (self.context.federation.id, answer.at, device)
        predicted_s = answer.predicted_s if isinstance(answer, Accept) else None
        now = self.context.clock()
        self.context.store.answer(*about, participant, reason, answered_at=now, predicted_s=predicted_s)
        self.context.events.write(
            participant.value, client=device, **vars(answer.at), reason=reason, predicted_s=predicted_s
        )
        if declined:
            self.round_driver.apply(signals.UpdateRefused(answer.round, answer.attempt, device))
        else:
            self._accepted[device] = answer.at
            self._waits.pop(device, None)
            self.round_driver.apply(signals.Accepted(answer.round, answer.attempt, device))

    def _may_come(self, device: str, reason: DeclineReason) -> bool:
        """Whether a device that declines keeps its place; if it has accepted before, its owner had approved."""
        state = self.round_driver.state
        if reason.needs_owner:
            return device not in state.accepted
        return reason.passes and not state.can_spare(device)

    def _wait_for(self, device: str, answer: Decline) -> None:
        """Keep the place of a device that can't participate yet: without it, the attempt and the other devices' work would be lost."""
        self._accepted.pop(device, None)
        needs_owner = answer.reason.needs_owner
        if needs_owner:
            about = (self.context.federation.id, answer.at, device)
            self.context.store.answer(*about, ParticipantState.INVITED, answer.reason.value)
        self.round_driver.apply(signals.Approval(answer.round, answer.attempt, device, given=not needs_owner))
        before, self._waits[device] = self._waits.get(device), (answer.at, answer.reason)
        if before == self._waits[device] and answer.reason is not DeclineReason.INTERRUPTED:
            return  # the response to a reminder
        what = "it is back" if answer.reason is DeclineReason.INTERRUPTED else "it can participate"
        detail = f"the round waits until {what}, since too few others are left"
        if needs_owner:
            detail = "it participates once its owner approves the spec; this doesn't count as a failed attempt"
        why = {**vars(answer.at), "reason": answer.reason.value, "detail": detail}
        self.context.events.write("declined", client=device, **why)

    @property
    def waits(self) -> dict[str, str]:
        """Devices that the open attempt waits for, and why they can't participate yet; thread-safe."""
        state, waits = self.round_driver.state, dict(self._waits)
        return {
            device: reason.value
            for device, (at, reason) in waits.items()
            if at == state.at and device in state.outstanding
        }

    @property
    def unanswered(self) -> list[str]:
        """Online devices that have not answered their invitation to the open attempt."""
        state = self.round_driver.state
        return [
            device
            for device in sorted(state.outstanding & state.online)
            if self._accepted.get(device) != state.at and not self.receiver.is_busy(device)
        ]

    def remind(self, every_s: float = 0.0) -> None:
        """Invite devices without an answer again, unless done less than `every_s` ago."""
        now, state = time.monotonic(), self.round_driver.state
        if now - self._reminded_at < every_s:
            return
        self._reminded_at = now
        if state.phase is not Phase.COLLECTING:
            return
        for device in self.unanswered:
            self.round_driver.invite(device)


REFRESH_S = 2.0
FAREWELL_S = 3.0
"""Delay until a device that left loses its access at the broker, so that its confirmation can arrive."""
RunInBackground = Callable[[Callable[[], object]], None]

log = logging.getLogger(__name__)


@dataclass(eq=False)
class MemberRefresh:
    """Keeps the service's view of its devices.

    Args:
        context: the dependencies of the service.
        message_checks: holds the valid keys.
        receiver: holds the updates in transfer.
        round_driver: drives the rounds.
        publisher: publishes.
        cohorts: the marks of cohort secrets.
        liveness: stores when devices went offline.
        run_in_background: runs work that waits for the members' lock or the broker, in order.
    """

    context: ServiceContext
    message_checks: MessageChecks
    receiver: Receiver
    round_driver: RoundDriver
    publisher: Publisher
    cohorts: Cohorts
    liveness: Liveness
    run_in_background: RunInBackground
    _silenced: frozenset[str] = field(default=frozenset(), init=False)
    _read_at: float = field(default=0.0, init=False)
    _shut_out_at: float | None = field(default=None, init=False)

    def is_older_than(self, age_s: float) -> bool:
        """Whether the register was read more than `age_s` ago."""
        return time.monotonic() - self._read_at >= age_s

    def refresh(self) -> None:
        """Read the current members; rounds stop waiting for devices that are no longer members."""
        self._read_at = time.monotonic()
        members = self.context.store.members()
        self.round_driver.apply(signals.Expected(frozenset(member.id for member in members)))
        barred = {
            member.id: f"disabled by an operator: {member.disabled_because}".removesuffix(": ")
            for member in members
            if member.disabled_at is not None
        }
        forgotten = self.context.store.federation(self.context.federation.id).forgotten.split()
        barred |= {member.id: "forgotten in this federation" for member in members if member.id in forgotten}
        if self.round_driver.requires_cohort_secret:
            barred |= self.cohorts.outsiders()
        if barred != self.round_driver.state.barred:
            self.context.events.write("barred", clients=[f"{name}: {why}" for name, why in sorted(barred.items())])
            self.round_driver.apply(signals.Barred(barred))
        departed = self.message_checks.learn_keys((member.id, member.public_key) for member in members)
        for device in sorted(departed):
            self.context.events.write("departed", client=device)
            self.cohorts.forget(device)
            self._departed(device)
        if departed:
            self.tell_revoked()

    def tell_revoked(self) -> None:
        """Notify revoked devices; otherwise a device whose broker session outlives its membership would keep sending requests forever."""
        for device, key in self.context.store.register.revoked_devices(self.context.clock()).items():
            self.publisher.revoked(device, key)

    def drop_strangers(self) -> None:
        """After a restart: drop devices that left while the coordinator was down, so that no round waits for them."""
        for device in sorted(self.round_driver.state.outstanding):
            if not self.message_checks.knows(device):
                self._departed(device)

    def leaves(self, device: str) -> None:
        """End the membership of a device that leaves: store it durably, then confirm. Its access at the broker ends shortly after."""
        ended = partial(self.context.store.register.end_membership, device, DeviceState.LEFT, "it left")
        if ended(self.context.clock()):
            self.context.events.write("left", client=device)
            self._shut_out_at = time.monotonic() + FAREWELL_S
        self.publisher.left(device)

    def tick(self, silenced: frozenset[str]) -> None:
        """Read the register every `REFRESH_S`, and end the access of devices that left or send too much."""
        if self.is_older_than(REFRESH_S):
            self.refresh()
            if self.context.are_lists_pending():
                self.publish_lists()
        if self._shut_out_at is not None and time.monotonic() >= self._shut_out_at:
            self._shut_out_at = None
            self.publish_lists()
        if silenced != self._silenced:
            self._follow_floods(silenced)

    def publish_lists(self) -> None:
        """Publish the lists of devices to the broker in the background, since it may have missed some without a link."""
        self.run_in_background(self._publish)

    def _follow_floods(self, silenced: frozenset[str]) -> None:
        """Stop waiting for devices that sent too much, and readmit those whose silencing has ended."""
        before, self._silenced = self._silenced, silenced
        reason = f"it sent more than {FLOOD.per_s:.0f} messages per second for several seconds"
        for device in sorted(before - silenced):
            self.context.events.write("silence_ended", client=device)
        for device in sorted(silenced - before):
            self.context.events.write("silenced", client=device, seconds=SILENCE_S, reason=reason)
            self._departed(device, "the device is silenced: " + reason)
        self.run_in_background(partial(self._apply_silence, before ^ silenced))

    def _apply_silence(self, changed: frozenset[str]) -> None:
        """Update the broker's access list, and discard a new flood's messages waiting at the broker."""
        names = ", ".join(sorted(changed))
        try:
            is_applied = self._publish()
        except (BrokerError, OSError) as error:
            log.warning("the broker's access list could not be changed for %s: %s", names, error)
        else:
            if not is_applied:
                log.warning("%s: %s", names, NOT_APPLIED)
        if changed & self._silenced:
            self.publisher.connect_anew()

    def _publish(self) -> bool:
        """Make the broker apply the current access list; waits for the members' lock."""
        return self.context.publish_access(self._silenced)

    def _departed(self, device: str, reason: str = "") -> None:
        is_replaced = self.message_checks.knows(device)
        reason = reason or ("another machine replaced it" if is_replaced else "the device is no longer a member")
        state = self.round_driver.state
        self.receiver.forget(device)
        self.liveness.note_gone(device, reason, time.monotonic())
        if state.phase is Phase.COLLECTING and device in state.outstanding:
            about = (self.context.federation.id, state.at, device)
            now = self.context.clock()
            self.context.store.answer(*about, ParticipantState.DECLINED, reason, answered_at=now)
        self.round_driver.apply(signals.Departed(device))
