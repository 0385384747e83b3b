"""Invitations to the open attempt: the answers, and reminders, because an invite may be lost with the link."""

from __future__ import annotations

import time

from coordinator.messaging.publisher import Publisher
from coordinator.rounds.events import Accepted, Approval, UpdateRefused
from coordinator.rounds.records import ParticipantState
from coordinator.rounds.round_engine import Phase
from coordinator.service.round_driver import RoundDriver
from coordinator.service.service_context import ServiceContext
from coordinator.updates.receiver import Receiver
from fedcg.wire.messages.schemas import Accept, Decline, DeclineReason, RoundAttempt

REMIND_S = 5.0


class Invitations:
    """Keeps the answers of devices to their invitations.

    Args:
        context: the dependencies of the service.
        round_driver: drives the rounds.
        publisher: publishes.
        receiver: has the updates under way.
    """

    def __init__(
        self, context: ServiceContext, round_driver: RoundDriver, publisher: Publisher, receiver: Receiver
    ) -> None:
        self._context = context
        self._round_driver = round_driver
        self._publisher = publisher
        self._receiver = receiver
        self._accepted: dict[str, RoundAttempt] = {}  # the last attempt that each device accepted in its session
        self._waits: dict[str, tuple[RoundAttempt, DeclineReason]] = {}
        self._reminded_at = 0.0

    def forget(self, device: str) -> None:
        """Forget what a device accepted: it begins a new session and is invited again."""
        self._accepted.pop(device, None)

    def answered(self, device: str, answer: Accept | Decline) -> None:
        """Take a device's answer, once."""
        state = self._round_driver.state
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
        about = (self._context.federation.id, answer.at, device)
        predicted_s = answer.predicted_s if isinstance(answer, Accept) else None
        accepted_at = None if declined else self._context.clock()
        self._context.store.answer(*about, participant, reason, accepted_at=accepted_at, predicted_s=predicted_s)
        self._context.events.write(
            participant.value,
            client=device,
            round=answer.round,
            attempt=answer.attempt,
            reason=reason,
            predicted_s=predicted_s,
        )
        if declined:
            self._round_driver.apply(UpdateRefused(answer.round, answer.attempt, device))
        else:
            self._accepted[device] = answer.at
            self._waits.pop(device, None)
            self._round_driver.apply(Accepted(answer.round, answer.attempt, device))

    def _may_come(self, device: str, reason: DeclineReason) -> bool:
        """Whether a device that declines keeps its place; once it has accepted, its owner's approval was there."""
        state = self._round_driver.state
        if reason.needs_owner:
            return device not in state.accepted
        return reason.passes and not state.can_spare(device)

    def _wait_for(self, device: str, answer: Decline) -> None:
        """Keep the place of a device that can't take part yet: without it the attempt, and what the others did for it, would be lost."""
        self._accepted.pop(device, None)
        needs_owner = answer.reason.needs_owner
        if needs_owner:
            about = (self._context.federation.id, answer.at, device)
            self._context.store.answer(*about, ParticipantState.INVITED, answer.reason.value)
        self._round_driver.apply(Approval(answer.round, answer.attempt, device, given=not needs_owner))
        before, self._waits[device] = self._waits.get(device), (answer.at, answer.reason)
        if before == self._waits[device] and answer.reason is not DeclineReason.INTERRUPTED:
            return  # the answer to a reminder
        what = "it is back" if answer.reason is DeclineReason.INTERRUPTED else "it can take part"
        detail = f"the round waits until {what}, because too few others are left"
        if needs_owner:
            detail = "it takes part as soon as its owner approves the spec; this costs no attempt"
        where = {"round": answer.round, "attempt": answer.attempt}
        self._context.events.write("declined", client=device, **where, reason=answer.reason.value, detail=detail)

    @property
    def waits(self) -> dict[str, str]:
        """Why devices can't take part yet that the open attempt waits for; from any thread."""
        state, waits = self._round_driver.state, dict(self._waits)
        return {
            device: reason.value
            for device, (at, reason) in waits.items()
            if at == state.at and device in state.outstanding
        }

    @property
    def unanswered(self) -> list[str]:
        """Devices that are online and have not answered their invitation to the open attempt."""
        state = self._round_driver.state
        return [
            device
            for device in sorted(state.outstanding & state.online)
            if self._accepted.get(device) != state.at and not self._receiver.is_busy(device)
        ]

    def remind(self, every_s: float = 0.0) -> None:
        """Invite the devices again that have not answered, unless that was done less than `every_s` ago."""
        now, state = time.monotonic(), self._round_driver.state
        if now - self._reminded_at < every_s:
            return
        self._reminded_at = now
        if state.phase is not Phase.COLLECTING:
            return
        for device in self.unanswered:
            self._round_driver.invite(device)
