"""The round engine: a pure state machine. It knows no clock, no database and no network; all three are told or commanded.

Phases: waiting (for enough clients) -> collecting (updates) -> distilling -> the next round, or finished.
A failed attempt goes back to waiting as the next attempt, up to `max_attempts`, then the federation is paused.
Laws (property-tested): an update counts once, a round closes once, and commands never name a client that was not invited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

NAMED_CLIENTS = 5
"""So many clients a failed attempt's reason names; the API and the event log have all of them."""
RESTART_GRACE_S = 120.0
"""A deadline that passed while the coordinator was down is moved by this much: devices could not deliver meanwhile."""


class Phase(str, Enum):
    """Where the federation stands."""

    WAITING = "waiting"
    COLLECTING = "collecting"
    DISTILLING = "distilling"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(frozen=True)
class Policy:
    """What the operator decided about rounds.

    Attributes:
        rounds: how many rounds the federation has.
        min_clients: quorum; a round opens with at least so many and closes with at least so many updates.
        max_attempts: failed attempts of one round before the federation is paused.
        deadline_s: how long an attempt collects.
    """

    rounds: int
    min_clients: int
    max_attempts: int
    deadline_s: float


@dataclass(frozen=True)
class RoundState:
    """The state of one federation; `round` and `attempt` are those that are open, or open next.

    Attributes:
        online: clients with a session.
        participants: who was invited to the open attempt; fixed when it opens.
        updates: participants whose update is stored.
        declined: participants that will not deliver one.
        deadline_at: unix time at which collecting ends.
        reason: why it is paused.
        left_out: clients that are not invited while enough others are online, and why.
        first_attempt: the attempt that `max_attempts` is counted from; moves when an operator resumes.
    """

    policy: Policy
    phase: Phase = Phase.WAITING
    round: int = 1
    attempt: int = 1
    online: frozenset[str] = frozenset()
    participants: frozenset[str] = frozenset()
    updates: frozenset[str] = frozenset()
    declined: frozenset[str] = frozenset()
    deadline_at: float = 0.0
    reason: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    first_attempt: int = 1

    @property
    def candidates(self) -> frozenset[str]:
        """Clients that an attempt opened now would invite: those left out as well when the quorum needs them."""
        others = self.online.difference(self.left_out)
        return others if len(others) >= self.policy.min_clients else self.online

    @property
    def outstanding(self) -> frozenset[str]:
        """Participants that have neither delivered nor declined."""
        return self.participants - self.updates - self.declined

    def is_open(self, round_number: int, attempt: int) -> bool:
        """Whether this attempt takes updates now."""
        return self.phase is Phase.COLLECTING and (self.round, self.attempt) == (round_number, attempt)


@dataclass(frozen=True)
class CameOnline:
    """A client opened a session."""

    client: str


@dataclass(frozen=True)
class WentOffline:
    """A client's link is gone."""

    client: str


@dataclass(frozen=True)
class Departed:
    """A client is no member any more (revoked, replaced by another box, or it left); what it delivered before still counts."""

    client: str


@dataclass(frozen=True)
class UpdateStored:
    """A valid update of a participant is durable."""

    round: int
    attempt: int
    client: str


@dataclass(frozen=True)
class UpdateRefused:
    """A participant delivers nothing usable: it declined, or its update was rejected (`reason`), also after it was stored."""

    round: int
    attempt: int
    client: str
    reason: str = ""


@dataclass(frozen=True)
class Tick:
    """Time went on."""


@dataclass(frozen=True)
class Restarted:
    """The coordinator came back; `state` was rebuilt from the database and nobody is online yet."""


@dataclass(frozen=True)
class AggregateStored:
    """The attempt's aggregate is durable and the attempt is closed in the database."""

    round: int
    attempt: int


@dataclass(frozen=True)
class AggregationFailed:
    """The attempt's updates could not be merged."""

    round: int
    attempt: int
    reason: str


Event = (
    CameOnline
    | WentOffline
    | Departed
    | UpdateStored
    | UpdateRefused
    | Tick
    | Restarted
    | AggregateStored
    | AggregationFailed
)


@dataclass(frozen=True)
class OpenAttempt:
    """Store the attempt, publish its offer, broadcast the aggregate."""

    round: int
    attempt: int
    participants: frozenset[str]
    deadline_at: float


@dataclass(frozen=True)
class ResumeAttempt:
    """Publish the offer of an attempt that is stored already; its deadline may have moved."""

    round: int
    attempt: int
    deadline_at: float


@dataclass(frozen=True)
class Invite:
    """Ask a participant (again) for its update."""

    round: int
    attempt: int
    client: str


@dataclass(frozen=True)
class Distil:
    """Merge the updates of exactly these clients."""

    round: int
    attempt: int
    clients: tuple[str, ...]


@dataclass(frozen=True)
class FailAttempt:
    """Store that the attempt failed; the next one gets the next number."""

    round: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class Pause:
    """Nothing happens any more until an operator resumes."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """Publish the final aggregate."""


Command = OpenAttempt | ResumeAttempt | Invite | Distil | FailAttempt | Pause | Finish
Step = tuple[RoundState, tuple[Command, ...]]


def transition(state: RoundState, event: Event, now: float) -> Step:
    """What an event does.

    Args:
        state: where the federation stands.
        event: what happened.
        now: unix time.

    Returns:
        The next state and what has to be done, in this order.
    """
    handle: Callable[[RoundState, Any, float], Step] = _HANDLERS[type(event)]
    return handle(state, event, now)


def paused_reason(state: RoundState, attempts: int) -> str:
    """Why a federation pauses after `attempts` failed attempts, with what to do about it."""
    return (
        f"round {state.round} failed {attempts} times (last: {state.reason}); "
        "look at the devices, stop the coordinator, run `fedcg federation resume` and start it again"
    )


def _came_online(state: RoundState, event: CameOnline, now: float) -> Step:
    state = replace(state, online=state.online | {event.client})
    if state.phase is Phase.COLLECTING and event.client in state.outstanding:
        return state, (Invite(state.round, state.attempt, event.client),)
    return _open_if_enough(state, now)


def _went_offline(state: RoundState, event: WentOffline, now: float) -> Step:
    return replace(state, online=state.online - {event.client}), ()


def _departed(state: RoundState, event: Departed, now: float) -> Step:
    state = replace(state, online=state.online - {event.client})
    if state.phase is not Phase.COLLECTING or event.client not in state.outstanding:
        return state, ()
    return _judge(replace(state, declined=state.declined | {event.client}), now)


def _update_stored(state: RoundState, event: UpdateStored, now: float) -> Step:
    if not state.is_open(event.round, event.attempt) or event.client not in state.outstanding:
        return state, ()
    return _judge(replace(state, updates=state.updates | {event.client}), now)


def _update_refused(state: RoundState, event: UpdateRefused, now: float) -> Step:
    collecting, stored = state.phase is Phase.COLLECTING, event.client in state.updates
    is_current = collecting or state.phase is Phase.DISTILLING
    if not is_current or (event.round, event.attempt) != (state.round, state.attempt):
        return state, ()
    if not stored and not (collecting and event.client in state.outstanding):
        return state, ()
    state = replace(state, updates=state.updates - {event.client}, declined=state.declined | {event.client})
    if collecting:
        return _judge(state, now)
    if len(state.updates) >= state.policy.min_clients:
        return state, (Distil(state.round, state.attempt, tuple(sorted(state.updates))),)
    left = f"{len(state.updates)} updates are left, and {state.policy.min_clients} are needed"
    return _fail(state, f"the update of {event.client} was rejected ({event.reason}); {left}", now)


def _tick(state: RoundState, event: Tick, now: float) -> Step:
    return _judge(state, now) if state.phase is Phase.COLLECTING else _open_if_enough(state, now)


def _restarted(state: RoundState, event: Restarted, now: float) -> Step:
    if state.phase is Phase.COLLECTING:
        grace = min(RESTART_GRACE_S, state.policy.deadline_s)
        state = replace(state, deadline_at=max(state.deadline_at, now + grace))
        judged, commands = _judge(state, now)
        return judged, (ResumeAttempt(state.round, state.attempt, state.deadline_at), *commands)
    if state.phase is Phase.DISTILLING:
        again = Distil(state.round, state.attempt, tuple(sorted(state.updates)))
        return state, (ResumeAttempt(state.round, state.attempt, state.deadline_at), again)
    if state.phase is Phase.FINISHED:
        return state, (Finish(),)
    return state, ()


def _aggregate_stored(state: RoundState, event: AggregateStored, now: float) -> Step:
    if state.phase is not Phase.DISTILLING or (event.round, event.attempt) != (state.round, state.attempt):
        return state, ()
    if state.round >= state.policy.rounds:
        return replace(state, phase=Phase.FINISHED), (Finish(),)
    return _open_if_enough(_waiting(state, state.round + 1, 1, first_attempt=1), now)


def _aggregation_failed(state: RoundState, event: AggregationFailed, now: float) -> Step:
    is_under_way = state.phase in (Phase.COLLECTING, Phase.DISTILLING)  # teacher passes run while updates still come
    if not is_under_way or (event.round, event.attempt) != (state.round, state.attempt):
        return state, ()
    return _fail(state, event.reason, now)


_HANDLERS: dict[type[Any], Callable[[RoundState, Any, float], Step]] = {
    CameOnline: _came_online,
    WentOffline: _went_offline,
    Departed: _departed,
    UpdateStored: _update_stored,
    UpdateRefused: _update_refused,
    Tick: _tick,
    Restarted: _restarted,
    AggregateStored: _aggregate_stored,
    AggregationFailed: _aggregation_failed,
}


def _waiting(state: RoundState, round_number: int, attempt: int, *, first_attempt: int) -> RoundState:
    return RoundState(
        policy=state.policy,
        round=round_number,
        attempt=attempt,
        online=state.online,
        reason=state.reason,
        left_out=state.left_out,
        first_attempt=first_attempt,
    )


def _open_if_enough(state: RoundState, now: float) -> Step:
    if state.phase is not Phase.WAITING or len(state.online) < state.policy.min_clients:
        return state, ()
    deadline_at = now + state.policy.deadline_s
    invited = state.candidates
    opened = replace(state, phase=Phase.COLLECTING, participants=invited, deadline_at=deadline_at, reason="")
    invites = [Invite(state.round, state.attempt, client) for client in sorted(invited)]
    return opened, (OpenAttempt(state.round, state.attempt, invited, deadline_at), *invites)


def _judge(state: RoundState, now: float) -> Step:
    possible = len(state.participants - state.declined)
    if possible < state.policy.min_clients:
        names = ", ".join(sorted(state.declined)[:NAMED_CLIENTS])
        missing = (
            f"{len(state.declined)} of {len(state.participants)} clients declined, were rejected or are gone ({names})"
        )
        return _fail(state, f"{missing}; {state.policy.min_clients} updates are needed", now)
    enough = len(state.updates) >= state.policy.min_clients
    if not state.outstanding or (now >= state.deadline_at and enough):
        distilling = replace(state, phase=Phase.DISTILLING)
        return distilling, (Distil(state.round, state.attempt, tuple(sorted(state.updates))),)
    if now >= state.deadline_at:
        got = f"only {len(state.updates)} of {state.policy.min_clients} needed updates came before the deadline"
        return _fail(state, got, now)
    return state, ()


def _fail(state: RoundState, reason: str, now: float) -> Step:
    failed = FailAttempt(state.round, state.attempt, reason)
    attempts = state.attempt - state.first_attempt + 1
    following = _waiting(
        replace(state, reason=reason), state.round, state.attempt + 1, first_attempt=state.first_attempt
    )
    if attempts >= state.policy.max_attempts:
        why = paused_reason(following, attempts)
        return replace(following, phase=Phase.PAUSED, reason=why), (failed, Pause(why))
    opened, commands = _open_if_enough(following, now)
    return opened, (failed, *commands)
