"""The round engine: a pure state machine. It knows no clock, no database and no network.

Phases: waiting (for enough clients) -> collecting (updates) -> distilling -> the next round, or finished.
A failed attempt goes back to waiting as the next attempt, up to `max_attempts`, then the federation stalls. An attempt that
ran out of time because clients had not answered or were offline does not count. A client whose owner has not approved the spec
keeps its place: the attempt is not held up by it, and waits for the approval only where it can't close without. `opening` decides
when an attempt may open.
Laws (property-tested): an update counts once, a round closes once, and commands never name a client that was not invited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from coordinator.rounds import commands, events
from coordinator.rounds.opening import Opening, wanted_updates
from fedcg.learning.spec import RoundPolicy
from fedcg.wire.messages.schemas import RoundAttempt

WAITS_FOR_OWNERS = "waits_for_owners"
"""The label of a federation whose open attempt can't close before owners of devices approve its spec."""
NAMED_CLIENTS = 5
"""So many clients a failed attempt's reason names; the API and the event log have all of them."""
RESTART_GRACE_S = 120.0
"""A deadline that passed while the coordinator was down is moved by this much: devices could not deliver meanwhile."""


class Phase(str, Enum):
    """The state of the federation: an operator paused it; it stalled after failed attempts."""

    WAITING = "waiting"
    COLLECTING = "collecting"
    DISTILLING = "distilling"
    PAUSED = "paused"
    STALLED = "stalled"
    FINISHED = "finished"


@dataclass(frozen=True)
class RoundState:
    """The state of one federation; `round` and `attempt` are those that are open, or open next.

    Attributes:
        online: clients with a session.
        participants: the clients invited to the open attempt; fixed when it opens.
        updates: participants whose update is stored.
        declined: participants that will not deliver one.
        deadline_at: unix time at which collecting ends.
        reason: why it is paused or stalled, or the last attempt failed.
        left_out: clients that are not invited while enough others are online, and why.
        barred: clients that are not invited at all, and why.
        paused: why an operator paused the federation, or ""; an open attempt ends before.
        first_attempt: the attempt that `max_attempts` is counted from; moves when an operator resumes, and over attempts that do
            not count.
        accepted: participants that have announced that they work on it.
        unapproved: participants that may take part as soon as their owners approve the spec.
        opening: when the next attempt may open.
    """

    policy: RoundPolicy
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
    barred: Mapping[str, str] = field(default_factory=dict)
    paused: str = ""
    first_attempt: int = 1
    accepted: frozenset[str] = frozenset()
    unapproved: frozenset[str] = frozenset()
    opening: Opening = field(default_factory=Opening)

    @property
    def answered(self) -> frozenset[str]:
        """Participants that work on an update, or have delivered it."""
        return (self.accepted | self.updates) - self.declined

    @property
    def candidates(self) -> frozenset[str]:
        """Clients that an attempt opened now could invite: those left out as well when the quorum needs them."""
        allowed = self.online.difference(self.barred)
        others = allowed.difference(self.left_out)
        return others if len(others) >= self.policy.quorum else allowed

    @property
    def outstanding(self) -> frozenset[str]:
        """Participants that have neither delivered nor declined."""
        return self.participants - self.updates - self.declined

    @property
    def awaited(self) -> frozenset[str]:
        """Those of them that the attempt is not closed without before its deadline."""
        return self.outstanding - self.unapproved

    def can_spare(self, *clients: str) -> bool:
        """Whether the quorum can be reached without these participants and without those whose owners have not approved."""
        return len(self.participants - self.declined - self.unapproved - set(clients)) >= self.policy.quorum

    @property
    def label(self) -> str:
        """Its phase as people see it: a phase, or `WAITS_FOR_OWNERS`."""
        needs_owners = self.phase is Phase.COLLECTING and bool(self.unapproved) and not self.can_spare()
        return WAITS_FOR_OWNERS if needs_owners else self.phase.value

    @property
    def at(self) -> RoundAttempt:
        """The round attempt that is open, or open next."""
        return RoundAttempt(self.round, self.attempt)

    def is_open(self, attempt: RoundAttempt) -> bool:
        """Whether this attempt takes updates now."""
        return self.phase is Phase.COLLECTING and self.at == attempt


Step = tuple[RoundState, tuple[commands.Command, ...]]


def transition(state: RoundState, event: events.Event, now: float) -> Step:
    """The state and the commands after an event.

    Args:
        state: of the federation before the event.
        event: what happened.
        now: unix time.

    Returns:
        The next state and what has to be done, in this order.
    """
    handle: Callable[[RoundState, Any, float], Step] = _HANDLERS[type(event)]
    return handle(state, event, now)


def standing_reason(state: RoundState) -> str:
    """Why a federation stands still, with what to do about it; empty where it does not."""
    if state.label != WAITS_FOR_OWNERS:
        return state.reason
    return (
        f"the owners of {', '.join(sorted(state.unapproved))} have not approved the spec: `fedcg agent approve` on each of "
        "these devices; this costs no attempt, and the round goes on by itself"
    )


def stalled_reason(state: RoundState, attempts: int) -> str:
    """Why a federation stalls after `attempts` failed attempts, with what to do about it."""
    times = "once" if attempts == 1 else f"{attempts} times"
    return (
        f"round {state.round} failed {times} (last: {state.reason}); "
        "look at the devices, then run `fedcg federation resume`"
    )


def _came_online(state: RoundState, event: events.CameOnline, now: float) -> Step:
    online = state.online | {event.client}
    state = replace(state, online=online, opening=state.opening.counting(len(online), now))
    if state.phase is Phase.COLLECTING and event.client in state.outstanding:
        return state, (commands.Invite(state.round, state.attempt, event.client),)
    return _open_if_enough(state, now)


def _went_offline(state: RoundState, event: events.WentOffline, now: float) -> Step:
    return replace(state, online=state.online - {event.client}), ()


def _departed(state: RoundState, event: events.Departed, now: float) -> Step:
    state = replace(state, online=state.online - {event.client})
    if state.phase is not Phase.COLLECTING or event.client not in state.outstanding:
        return state, ()
    return _judge(replace(state, declined=state.declined | {event.client}), now)


def _expected(state: RoundState, event: events.Expected, now: float) -> Step:
    return _open_if_enough(replace(state, opening=replace(state.opening, expected=event.clients)), now)


def _barred(state: RoundState, event: events.Barred, now: float) -> Step:
    return _open_if_enough(replace(state, barred=dict(event.clients)), now)


def _policy_changed(state: RoundState, event: events.PolicyChanged, now: float) -> Step:
    state = replace(state, policy=event.policy)
    if state.phase is Phase.COLLECTING:
        moved, first = _move_deadline(state, min(state.deadline_at, now + event.policy.deadline_s))
        judged, more = _judge(moved, now)
        return judged, first + more
    return _open_if_enough(state, now)


def _paused(state: RoundState, event: events.Paused, now: float) -> Step:
    state = replace(state, paused=event.reason)
    rests = state.phase in (Phase.WAITING, Phase.PAUSED)
    return (replace(state, phase=Phase.PAUSED, reason=event.reason) if rests else state), ()


def _resumed(state: RoundState, event: events.Resumed, now: float) -> Step:
    state = replace(state, paused="")
    if state.phase not in (Phase.PAUSED, Phase.STALLED):
        return state, ()
    ready = replace(state, phase=Phase.WAITING, reason="", first_attempt=state.attempt)
    return _open_if_enough(ready, now)


def _stopped(state: RoundState, event: events.Stopped, now: float) -> Step:
    if state.phase is Phase.FINISHED:
        return state, ()
    under_way = state.phase in (Phase.COLLECTING, Phase.DISTILLING)
    failed = commands.FailAttempt(state.round, state.attempt, event.reason, state.attempt + 1)
    ended = replace(state, phase=Phase.FINISHED, reason=event.reason, paused="")
    return ended, (failed, commands.Finish()) if under_way else (commands.Finish(),)


def _link_changed(state: RoundState, event: events.LinkChanged, now: float) -> Step:
    since = state.opening.down_since
    if event.up == (since is None):
        return state, ()
    state = replace(state, opening=replace(state.opening, down_since=None if event.up else now))
    if since is None or state.phase is not Phase.COLLECTING:
        return _open_if_enough(state, now)
    down_s = max(0.0, now - since)
    reason = f"no {event.what} for {down_s:.0f} s" if down_s >= 1.0 else ""
    return _move_deadline(state, state.deadline_at + down_s, reason)


def _accepted(state: RoundState, event: events.Accepted, now: float) -> Step:
    is_known = event.client in state.accepted or event.client not in state.outstanding
    if not state.is_open(event.at) or is_known:
        return state, ()
    state = replace(state, accepted=state.accepted | {event.client}, unapproved=state.unapproved - {event.client})
    if len(state.answered) != state.policy.quorum:
        return state, ()
    return _move_deadline(state, now + state.policy.deadline_s)


def _approval(state: RoundState, event: events.Approval, now: float) -> Step:
    if not state.is_open(event.at) or event.client not in state.outstanding:
        return state, ()
    others = state.unapproved - {event.client}
    return _judge(replace(state, unapproved=others if event.given else others | {event.client}), now)


def _update_stored(state: RoundState, event: events.UpdateStored, now: float) -> Step:
    if not state.is_open(event.at) or event.client not in state.outstanding:
        return state, ()
    updates, unapproved = state.updates | {event.client}, state.unapproved - {event.client}
    return _judge(replace(state, updates=updates, unapproved=unapproved), now)


def _update_refused(state: RoundState, event: events.UpdateRefused, now: float) -> Step:
    is_open = state.is_open(event.at)
    is_merging = state.phase is Phase.DISTILLING and event.at == state.at
    if event.client not in (state.updates if is_merging else state.updates | state.outstanding if is_open else ()):
        return state, ()
    state = replace(state, updates=state.updates - {event.client}, declined=state.declined | {event.client})
    if is_open:
        return _judge(state, now)
    return _distil_again(state, f"the update of {event.client} was rejected ({event.reason})", now)


def _tick(state: RoundState, event: events.Tick, now: float) -> Step:
    return _judge(state, now) if state.phase is Phase.COLLECTING else _open_if_enough(state, now)


def _restarted(state: RoundState, event: events.Restarted, now: float) -> Step:
    state = replace(state, opening=replace(state.opening, down_since=now))
    if state.phase is Phase.COLLECTING:
        grace = min(RESTART_GRACE_S, state.policy.deadline_s)
        state = replace(state, deadline_at=max(state.deadline_at, now + grace))
        following, more = _judge(state, now)
    elif state.phase is Phase.DISTILLING:
        following, more = _distil_again(state, "updates were rejected before a restart", now)
    else:
        return state, (commands.Finish(),) if state.phase is Phase.FINISHED else ()
    return following, (commands.ResumeAttempt(state.round, state.attempt, state.deadline_at), *more)


def _aggregate_stored(state: RoundState, event: events.AggregateStored, now: float) -> Step:
    if state.phase is not Phase.DISTILLING or event.at != state.at:
        return state, ()
    if state.round >= state.policy.rounds:
        return replace(state, phase=Phase.FINISHED), (commands.Finish(),)
    return _open_if_enough(_waiting(state, state.round + 1, 1, first_attempt=1), now)


def _aggregation_failed(state: RoundState, event: events.AggregationFailed, now: float) -> Step:
    is_under_way = state.phase in (Phase.COLLECTING, Phase.DISTILLING)  # teacher passes run while updates still come
    if not is_under_way or event.at != state.at:
        return state, ()
    return _fail(state, event.reason, now)


_HANDLERS: dict[type[Any], Callable[[RoundState, Any, float], Step]] = {
    events.CameOnline: _came_online,
    events.WentOffline: _went_offline,
    events.Departed: _departed,
    events.Expected: _expected,
    events.Barred: _barred,
    events.PolicyChanged: _policy_changed,
    events.Paused: _paused,
    events.Resumed: _resumed,
    events.Stopped: _stopped,
    events.LinkChanged: _link_changed,
    events.Accepted: _accepted,
    events.Approval: _approval,
    events.UpdateStored: _update_stored,
    events.UpdateRefused: _update_refused,
    events.Tick: _tick,
    events.Restarted: _restarted,
    events.AggregateStored: _aggregate_stored,
    events.AggregationFailed: _aggregation_failed,
}


def _waiting(state: RoundState, round_number: int, attempt: int, *, first_attempt: int) -> RoundState:
    return RoundState(
        policy=state.policy,
        phase=Phase.PAUSED if state.paused else Phase.WAITING,
        round=round_number,
        attempt=attempt,
        online=state.online,
        reason=state.paused or state.reason,
        left_out=state.left_out,
        barred=state.barred,
        paused=state.paused,
        first_attempt=first_attempt,
        opening=state.opening,
    )


def _move_deadline(state: RoundState, deadline_at: float, reason: str = "") -> Step:
    moved = replace(state, deadline_at=deadline_at)
    return moved, (commands.MoveDeadline(state.round, state.attempt, deadline_at, reason),)


def _open_if_enough(state: RoundState, now: float) -> Step:
    failures = state.attempt - state.first_attempt
    candidates = state.candidates
    is_enough = state.phase is Phase.WAITING and len(candidates) >= state.policy.quorum
    if not is_enough or not state.opening.is_due(state.online, failures, now):
        return state, ()
    deadline_at = now + state.policy.deadline_s
    invited = state.opening.invited(state.policy, candidates, state.at)
    opened = replace(state, phase=Phase.COLLECTING, participants=invited, deadline_at=deadline_at, reason="")
    invites = [commands.Invite(state.round, state.attempt, client) for client in sorted(invited)]
    return opened, (commands.OpenAttempt(state.round, state.attempt, invited, deadline_at), *invites)


def _judge(state: RoundState, now: float) -> Step:
    possible = len(state.participants - state.declined)
    if possible < state.policy.quorum:
        names = ", ".join(sorted(state.declined)[:NAMED_CLIENTS])
        ended = f"{len(state.declined)} of {len(state.participants)} clients declined, were rejected or are gone"
        return _fail(state, f"{ended} ({names}); {state.policy.quorum} updates are needed", now)
    enough = len(state.updates) >= state.policy.quorum
    is_late = now >= state.deadline_at and state.opening.down_since is None
    is_complete = (enough and not state.awaited) or len(state.updates) >= wanted_updates(
        state.policy, len(state.participants)
    )
    if is_complete or (is_late and enough):
        distilling = replace(state, phase=Phase.DISTILLING)
        return distilling, (commands.Distil(state.round, state.attempt, tuple(sorted(state.updates))),)
    return _run_out(state, now) if is_late else (state, ())


def _distil_again(state: RoundState, why_fewer: str, now: float) -> Step:
    """Merge the updates that are left; with fewer than the quorum the attempt failed."""
    if len(state.updates) >= state.policy.quorum:
        return state, (commands.Distil(state.round, state.attempt, tuple(sorted(state.updates))),)
    left = f"{len(state.updates)} updates are left, and {state.policy.quorum} are needed"
    return _fail(state, f"{why_fewer}; {left}", now)


def _run_out(state: RoundState, now: float) -> Step:
    """At the deadline, with too few updates: keep waiting while the quorum has not accepted and still can; else the attempt failed."""
    needed, there = state.policy.quorum, state.updates | state.online
    missing = ", ".join(
        f"{client} ({_why_missing(state, client)})" for client in sorted(state.outstanding)[:NAMED_CLIENTS]
    )
    could = len((state.participants - state.declined) & there) >= needed and state.candidates <= state.participants
    if len(state.answered) < needed and could:
        reason = f"only {len(state.answered)} of {needed} needed clients have answered; missing: {missing}"
        return _move_deadline(state, now + state.policy.deadline_s, reason)
    got = f"only {len(state.updates)} of {needed} needed updates came before the deadline; missing: {missing}"
    return _fail(state, got, now, counts=len(state.answered & there) >= needed)


def _why_missing(state: RoundState, client: str) -> str:
    if client not in state.online:
        return "offline"
    if client in state.unapproved:
        return "its owner has not approved the spec"
    return "still at work" if client in state.accepted else "no answer"


def _fail(state: RoundState, reason: str, now: float, *, counts: bool = True) -> Step:
    first = state.first_attempt if counts else state.first_attempt + 1
    failed = commands.FailAttempt(state.round, state.attempt, reason, first)
    state = replace(state, reason=reason, opening=replace(state.opening, failed_at=now))
    following = _waiting(state, state.round, state.attempt + 1, first_attempt=first)
    attempts = following.attempt - first
    if attempts >= state.policy.max_attempts:
        why = stalled_reason(following, attempts)
        return replace(following, phase=Phase.STALLED, reason=why), (failed, commands.Stall(why))
    opened, more = _open_if_enough(following, now)
    return opened, (failed, *more)
