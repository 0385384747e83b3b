"""The round engine: a pure state machine without clock, database or network.

Phases: waiting (for enough clients) -> collecting (updates) -> distilling -> the next round, or finished.
After a failed attempt, the engine waits for the next attempt. After `max_attempts` failures, the federation stalls. Two kinds of failure
don't count: a timeout because clients had not answered or were offline, and a quorum raised above the invited clients. A client whose
owner has not approved the spec keeps its place. The attempt waits for the approval only if it can't close without it. `Opening` decides
when the next attempt opens and which clients it invites. Time is unix time and passed in.
Laws (property-tested): an update counts once, a round closes once, and commands never name a client that was not invited.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, replace
from enum import Enum
from typing import Any

from coordinator.rounds import signals
from fedcg.learning.spec import RoundPolicy
from fedcg.values import Value
from fedcg.wire.messages.schemas import RoundAttempt

RETRY_MAX_S = 600.0
"""Longest pause between attempts."""
LEAST_SHARE = 0.25
"""Least share of the spec's local steps for slow devices; an update with fewer is worth little."""
MAX_DOUBLINGS = 16  # doublings of `retry_s`, against overflow; the bound above is reached long before


def wanted_updates(policy: RoundPolicy, invited: int) -> int:
    """Number of updates that close an attempt with `invited` clients."""
    if policy.over_selection == 0.0:
        return invited
    return min(invited, max(policy.quorum, math.floor(invited / (1.0 + policy.over_selection) + 1e-9)))


def shares_of(policy: RoundPolicy, round_s: Mapping[str, float]) -> dict[str, float]:
    """The share of the spec's local steps for each client, at most 1.

    With `equal-time`, every client finishes with the median one (of two, the faster), down to `LEAST_SHARE` of the steps.

    Args:
        policy: the federation's policy.
        round_s: seconds that each client needs for all steps.
    """
    if policy.pace == "equal-steps" or not round_s:
        return {}
    median_s = statistics.median_low(round_s.values())
    return {
        client: round(max(LEAST_SHARE, median_s / seconds), 4)
        for client, seconds in round_s.items()
        if seconds > median_s
    }


class Opening(Value):
    """Decides, together with the policy, when the next attempt opens and which clients it invites.

    Attributes:
        gather_s: how long a round waits for more devices after the last one came online; no wait if all devices are online.
        retry_s: pause after a failed attempt; doubles with each failed attempt of the round, up to `RETRY_MAX_S`.
        selection_key: the coordinator's secret that determines the choice of clients.
        expected: devices that may participate.
        most: largest number of clients online at the same time; a client that reconnects does not restart the wait.
        grown_at: when that number was first reached.
        failed_at: when the last attempt failed.
        down_since: when the link to the broker was lost; None while it is up.
    """

    gather_s: float = 0.0
    retry_s: float = 0.0
    selection_key: bytes = field(default=b"", repr=False)
    expected: frozenset[str] = frozenset()
    most: int = 0
    grown_at: float = 0.0
    failed_at: float = 0.0
    down_since: float | None = None

    def counting(self, online: int, now: float) -> Opening:
        """Update the number of clients online."""
        return replace(self, most=online, grown_at=now) if online > self.most else self

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after `failures` failed attempts in a row."""
        return min(RETRY_MAX_S, self.retry_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS)) if failures > 0 else 0.0

    def is_due(self, online: frozenset[str], failures: int, now: float) -> bool:
        """Whether an attempt may open with the clients online, after `failures` failed ones."""
        is_gathered = self.expected <= online or _is_over(self.grown_at, self.gather_s, now)
        return self.down_since is None and is_gathered and _is_over(self.failed_at, self.pause_s(failures), now)

    def invited(self, policy: RoundPolicy, candidates: Collection[str], at: RoundAttempt) -> frozenset[str]:
        """The clients to invite: all candidates, or a subset that changes with every attempt.

        Args:
            policy: the federation's policy.
            candidates: clients that could participate; at least the quorum.
            at: the attempt.
        """
        wanted = max(policy.quorum, math.ceil(policy.fraction * len(candidates) - 1e-9))
        if policy.max_clients is not None:
            wanted = min(wanted, max(policy.quorum, policy.max_clients))
        invited = math.ceil(wanted * (1.0 + policy.over_selection) - 1e-9)

        def lot(client: str) -> bytes:
            text = f"{at.round}|{at.attempt}|{client}".encode()
            return hashlib.blake2b(text, key=self.selection_key[:64]).digest()

        return frozenset(sorted(candidates, key=lot)[:invited])


def _is_over(since: float, seconds: float, now: float) -> bool:
    """Whether a wait is over; setting the clock back ends it."""
    return not 0.0 <= now - since < seconds


WAITS_FOR_OWNERS = "waits_for_owners"
"""The label of a federation whose open attempt can't close until device owners approve its spec."""
NAMED_CLIENTS = 5
"""Most clients named in a failed attempt's reason; the API and the event log list all."""
RESTART_GRACE_S = 120.0
"""Extension of a deadline that passed while the coordinator was down and devices could not deliver."""


class Phase(str, Enum):
    """The phase of a federation. Paused: by an operator. Stalled: after failed attempts."""

    WAITING = "waiting"
    COLLECTING = "collecting"
    DISTILLING = "distilling"
    PAUSED = "paused"
    STALLED = "stalled"
    FINISHED = "finished"


class RoundState(Value):
    """The state of one federation; `round` and `attempt` are the open ones, or the next ones.

    Attributes:
        online: clients with a session.
        participants: the clients invited to the open attempt; fixed when it opens.
        updates: participants whose update is stored.
        declined: participants that will not deliver one.
        deadline_at: unix time at which collecting ends.
        reason: why it is paused or stalled, or why the last attempt failed.
        left_out: clients not invited while enough others are online, and why.
        barred: clients never invited, and why.
        paused: why an operator paused the federation, or ""; an open attempt ends first.
        first_attempt: the attempt from which `max_attempts` is counted; moves when an operator resumes, and past attempts that don't
            count.
        accepted: participants that have accepted the invitation.
        unapproved: participants whose owners have not approved the spec yet.
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
        """Participants that are working on an update or have delivered it."""
        return (self.accepted | self.updates) - self.declined

    @property
    def candidates(self) -> frozenset[str]:
        """Clients that a new attempt could invite, including those left out if the quorum needs them."""
        allowed = self.online.difference(self.barred)
        others = allowed.difference(self.left_out)
        return others if len(others) >= self.policy.quorum else allowed

    @property
    def outstanding(self) -> frozenset[str]:
        """Participants that have neither delivered nor declined."""
        return self.participants - self.updates - self.declined

    @property
    def awaited(self) -> frozenset[str]:
        """Outstanding participants that the attempt waits for until its deadline."""
        return self.outstanding - self.unapproved - self.barred.keys()

    def can_spare(self, *clients: str) -> bool:
        """Whether the quorum is possible without these participants and without those whose owners have not approved."""
        return len(self.participants - self.declined - self.unapproved - set(clients)) >= self.policy.quorum

    @property
    def label(self) -> str:
        """The phase to display: a phase, or `WAITS_FOR_OWNERS`."""
        needs_owners = self.phase is Phase.COLLECTING and bool(self.unapproved) and not self.can_spare()
        return WAITS_FOR_OWNERS if needs_owners else self.phase.value

    @property
    def at(self) -> RoundAttempt:
        """The open round attempt, or the next one."""
        return RoundAttempt(self.round, self.attempt)

    def is_open(self, attempt: RoundAttempt) -> bool:
        """Whether this attempt currently accepts updates."""
        return self.phase is Phase.COLLECTING and self.at == attempt


Step = tuple[RoundState, tuple[signals.Command, ...]]


def transition(state: RoundState, event: signals.Event, now: float) -> Step:
    """Compute the state and the commands after an event.

    Args:
        state: the federation's state before the event.
        event: what happened.
        now: unix time.

    Returns:
        The next state and the commands to execute in order.
    """
    handle: Callable[[RoundState, Any, float], Step] = _HANDLERS[type(event)]
    return handle(state, event, now)


def standing_reason(state: RoundState) -> str:
    """Why a federation is not advancing, and the next step; empty if it is."""
    if state.label != WAITS_FOR_OWNERS:
        return state.reason
    return (
        f"the owners of {', '.join(sorted(state.unapproved))} have not approved the spec: run `fedcg agent approve` on each of "
        "these devices. This doesn't count as a failed attempt, and the round then continues"
    )


def stalled_reason(state: RoundState, attempts: int) -> str:
    """Why a federation stalls after `attempts` failed attempts, and the next step."""
    times = "once" if attempts == 1 else f"{attempts} times"
    return (
        f"round {state.round} failed {times} (last: {state.reason}); "
        "check the devices, then run `fedcg federation resume`"
    )


def _came_online(state: RoundState, event: signals.CameOnline, now: float) -> Step:
    online = state.online | {event.client}
    state = replace(state, online=online, opening=state.opening.counting(len(online), now))
    if state.phase is Phase.COLLECTING and event.client in state.outstanding:
        return state, (signals.Invite(state.round, state.attempt, event.client),)
    return _open_if_enough(state, now)


def _departed(state: RoundState, event: signals.Departed, now: float) -> Step:
    state = replace(state, online=state.online - {event.client})
    if state.phase is not Phase.COLLECTING or event.client not in state.outstanding:
        return state, ()
    return _judge(replace(state, declined=state.declined | {event.client}), now)


def _policy_changed(state: RoundState, event: signals.PolicyChanged, now: float) -> Step:
    later, state = event.policy.deadline_s - state.policy.deadline_s, replace(state, policy=event.policy)
    if state.phase is Phase.COLLECTING:
        deadline_at = state.deadline_at + later if later >= 0 else min(state.deadline_at, now + event.policy.deadline_s)
        moved, first = _move_deadline(state, deadline_at)
        judged, more = _judge(moved, now)
        return judged, first + more
    return _open_if_enough(state, now)


def _barred(state: RoundState, event: signals.Barred, now: float) -> Step:
    state = replace(state, barred=dict(event.clients))
    return _judge(state, now) if state.phase is Phase.COLLECTING else _open_if_enough(state, now)


def _paused(state: RoundState, event: signals.Paused, now: float) -> Step:
    state = replace(state, paused=event.reason)
    rests = state.phase in (Phase.WAITING, Phase.PAUSED)
    return (replace(state, phase=Phase.PAUSED, reason=event.reason) if rests else state), ()


def _resumed(state: RoundState, event: signals.Resumed, now: float) -> Step:
    state = replace(state, paused="")
    if state.phase not in (Phase.PAUSED, Phase.STALLED, Phase.WAITING):
        return state, ()
    ready = replace(state, phase=Phase.WAITING, reason="", first_attempt=state.attempt)
    return _open_if_enough(ready, now)


def _stopped(state: RoundState, event: signals.Stopped, now: float) -> Step:
    if state.phase is Phase.FINISHED:
        return state, ()
    under_way = state.phase in (Phase.COLLECTING, Phase.DISTILLING)
    failed = signals.FailAttempt(state.round, state.attempt, event.reason, state.attempt + 1)
    ended = replace(state, phase=Phase.FINISHED, reason=event.reason, paused="")
    return ended, (failed, signals.Finish()) if under_way else (signals.Finish(),)


def _link_changed(state: RoundState, event: signals.LinkChanged, now: float) -> Step:
    since = state.opening.down_since
    if event.up == (since is None):
        return state, ()
    state = replace(state, opening=replace(state.opening, down_since=None if event.up else now))
    if since is None or state.phase is not Phase.COLLECTING:
        return _open_if_enough(state, now)
    down_s = max(0.0, now - since)
    reason = f"no {event.what} for {down_s:.0f} s" if down_s >= 1.0 else ""
    return _move_deadline(state, state.deadline_at + down_s, reason)


def _accepted(state: RoundState, event: signals.Accepted, now: float) -> Step:
    is_known = event.client in state.accepted or event.client not in state.outstanding
    if not state.is_open(event.at) or is_known:
        return state, ()
    state = replace(state, accepted=state.accepted | {event.client}, unapproved=state.unapproved - {event.client})
    if len(state.answered) != state.policy.quorum:
        return state, ()
    return _move_deadline(state, now + state.policy.deadline_s)


def _approval(state: RoundState, event: signals.Approval, now: float) -> Step:
    if not state.is_open(event.at) or event.client not in state.outstanding:
        return state, ()
    others = state.unapproved - {event.client}
    return _judge(replace(state, unapproved=others if event.given else others | {event.client}), now)


def _update_stored(state: RoundState, event: signals.UpdateStored, now: float) -> Step:
    if not state.is_open(event.at) or event.client not in state.outstanding:
        return state, ()
    updates, unapproved = state.updates | {event.client}, state.unapproved - {event.client}
    return _judge(replace(state, updates=updates, unapproved=unapproved), now)


def _update_refused(state: RoundState, event: signals.UpdateRefused, now: float) -> Step:
    is_open = state.is_open(event.at)
    is_merging = state.phase is Phase.DISTILLING and event.at == state.at
    if event.client not in (state.updates if is_merging else state.updates | state.outstanding if is_open else ()):
        return state, ()
    state = replace(state, updates=state.updates - {event.client}, declined=state.declined | {event.client})
    if is_open:
        return _judge(state, now)
    return _distil_again(state, f"the update of {event.client} was rejected ({event.reason})", now)


def _restarted(state: RoundState, event: signals.Restarted, now: float) -> Step:
    state = replace(state, opening=replace(state.opening, down_since=now))
    if state.phase is Phase.COLLECTING:
        grace = min(RESTART_GRACE_S, state.policy.deadline_s)
        state = replace(state, deadline_at=max(state.deadline_at, now + grace))
        following, more = _judge(state, now)
    elif state.phase is Phase.DISTILLING:
        following, more = _distil_again(state, "updates were rejected before a restart", now)
    else:
        return state, (signals.Finish(),) if state.phase is Phase.FINISHED else ()
    return following, (signals.ResumeAttempt(state.round, state.attempt, state.deadline_at), *more)


def _aggregate_stored(state: RoundState, event: signals.AggregateStored, now: float) -> Step:
    if state.phase is not Phase.DISTILLING or event.at != state.at:
        return state, ()
    if state.round >= state.policy.rounds:
        return replace(state, phase=Phase.FINISHED), (signals.Finish(),)
    return _open_if_enough(_waiting(state, state.round + 1, 1, first_attempt=1), now)


def _aggregation_failed(state: RoundState, event: signals.AggregationFailed, now: float) -> Step:
    is_under_way = state.phase in (Phase.COLLECTING, Phase.DISTILLING)  # teacher passes run while updates still arrive
    if not is_under_way or event.at != state.at:
        return state, ()
    return _fail(state, event.reason, now)


_HANDLERS: dict[type[Any], Callable[[RoundState, Any, float], Step]] = {
    signals.CameOnline: _came_online,
    signals.WentOffline: lambda state, event, _now: (replace(state, online=state.online - {event.client}), ()),
    signals.Departed: _departed,
    signals.Expected: lambda state, event, now: _open_if_enough(
        replace(state, opening=replace(state.opening, expected=event.clients)), now
    ),
    signals.Barred: _barred,
    signals.PolicyChanged: _policy_changed,
    signals.Paused: _paused,
    signals.Resumed: _resumed,
    signals.Stopped: _stopped,
    signals.LinkChanged: _link_changed,
    signals.Accepted: _accepted,
    signals.Approval: _approval,
    signals.UpdateStored: _update_stored,
    signals.UpdateRefused: _update_refused,
    signals.Tick: lambda state, _event, now: (
        _judge(state, now) if state.phase is Phase.COLLECTING else _open_if_enough(state, now)
    ),
    signals.Restarted: _restarted,
    signals.AggregateStored: _aggregate_stored,
    signals.AggregationFailed: _aggregation_failed,
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
    return moved, (signals.MoveDeadline(state.round, state.attempt, deadline_at, reason),)


def _open_if_enough(state: RoundState, now: float) -> Step:
    failures = state.attempt - state.first_attempt
    candidates = state.candidates
    is_enough = state.phase is Phase.WAITING and len(candidates) >= state.policy.quorum
    if not is_enough or not state.opening.is_due(state.online, failures, now):
        return state, ()
    deadline_at = now + state.policy.deadline_s
    invited = state.opening.invited(state.policy, candidates, state.at)
    opened = replace(state, phase=Phase.COLLECTING, participants=invited, deadline_at=deadline_at, reason="")
    invites = [signals.Invite(state.round, state.attempt, client) for client in sorted(invited)]
    return opened, (signals.OpenAttempt(state.round, state.attempt, invited, deadline_at), *invites)


def _judge(state: RoundState, now: float) -> Step:
    possible, invited = len(state.participants - state.declined), len(state.participants)
    if invited < state.policy.quorum:
        needed = f"{state.policy.quorum} clients required since min_clients or min_cohort was raised"
        return _fail(state, f"it invited only {invited} of the {needed}", now, counts=False)
    if possible < state.policy.quorum:
        names = ", ".join(sorted(state.declined)[:NAMED_CLIENTS])
        ended = f"{len(state.declined)} of {invited} clients declined, were rejected or left"
        return _fail(state, f"{ended} ({names}); {state.policy.quorum} updates are required", now)
    enough = len(state.updates) >= state.policy.quorum
    is_late = now >= state.deadline_at and state.opening.down_since is None
    is_complete = (enough and not state.awaited) or len(state.updates) >= wanted_updates(
        state.policy, len(state.participants)
    )
    if is_complete or (is_late and enough):
        distilling = replace(state, phase=Phase.DISTILLING)
        return distilling, (signals.Distil(state.round, state.attempt, tuple(sorted(state.updates))),)
    return _run_out(state, now) if is_late else (state, ())


def _distil_again(state: RoundState, why_fewer: str, now: float) -> Step:
    """Merge the remaining updates; with fewer than the quorum, the attempt fails."""
    if len(state.updates) >= state.policy.quorum:
        return state, (signals.Distil(state.round, state.attempt, tuple(sorted(state.updates))),)
    left = f"{len(state.updates)} updates are left, but {state.policy.quorum} are required"
    return _fail(state, f"{why_fewer}; {left}", now)


def _run_out(state: RoundState, now: float) -> Step:
    """At the deadline with too few updates: keep waiting if the quorum has not accepted but still can; otherwise the attempt fails."""
    needed, there = state.policy.quorum, state.updates | state.online
    missing = ", ".join(
        f"{client} ({_why_missing(state, client)})" for client in sorted(state.outstanding)[:NAMED_CLIENTS]
    )
    could = len((state.participants - state.declined) & there) >= needed and state.candidates <= state.participants
    if len(state.answered) < needed and could:
        reason = f"only {len(state.answered)} of {needed} required clients have answered; missing: {missing}"
        return _move_deadline(state, now + state.policy.deadline_s, reason)
    got = f"only {len(state.updates)} of {needed} required updates arrived before the deadline; missing: {missing}"
    return _fail(state, got, now, counts=len(state.answered & there) >= needed)


def _why_missing(state: RoundState, client: str) -> str:
    if client not in state.online:
        return "offline"
    if client in state.unapproved:
        return "its owner has not approved the spec"
    return "still working" if client in state.accepted else "no answer"


def _fail(state: RoundState, reason: str, now: float, *, counts: bool = True) -> Step:
    first = state.first_attempt if counts else state.first_attempt + 1
    failed = signals.FailAttempt(state.round, state.attempt, reason, first)
    state = replace(state, reason=reason, opening=replace(state.opening, failed_at=now))
    following = _waiting(state, state.round, state.attempt + 1, first_attempt=first)
    attempts = following.attempt - first
    if attempts >= state.policy.max_attempts:
        why = stalled_reason(following, attempts)
        return replace(following, phase=Phase.STALLED, reason=why), (failed, signals.Stall(why))
    opened, more = _open_if_enough(following, now)
    return opened, (failed, *more)
