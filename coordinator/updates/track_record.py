"""The devices' updates in past rounds: typical distances, devices to leave out of the next round, and whether accuracy still rises."""

from __future__ import annotations

from collections import defaultdict

from coordinator.rounds.records import AttemptRecord, ParticipantState, UpdateRecord
from coordinator.storage.store import Store
from coordinator.updates.robustness import Distances, medians_of
from fedcg.learning.spec import RoundPolicy
from fedcg.wire.messages.schemas import DeclineReason, Outcome, RoundAttempt

FAILED_IN_A_ROW = 2
"""A device that failed in this many consecutive attempts is left out of the next ones."""
LEFT_OUT_ROUNDS = 5
"""Number of rounds that it is left out; when it fails again after them, it is left out again at once."""
FAILURES = {
    DeclineReason.TRAINING_FAILED.value: "its training failed",
    DeclineReason.DIVERGED.value: "its training diverged",
}
"""Declines that count as failures."""
MIN_VOTES = 2
"""Clients whose accuracy rises no more; one alone ends no federation."""
MISSED = "it accepted and did not deliver before the deadline"


def typical_distances(store: Store, federation: str, round_number: int) -> Distances:
    """Per part, the median distance from the base that the updates merged in a closed round had; empty for a few."""
    aggregate = store.aggregate(federation, round_number)
    ended = [] if aggregate is None else store.updates(federation, RoundAttempt(round_number, aggregate.attempt))
    return medians_of([each.distance_of for each in ended if each.weight and each.distances])


def left_out(store: Store, federation: str, round_number: int) -> dict[str, str]:
    """The clients that are left out of a round, and why: they failed in their last `FAILED_IN_A_ROW` attempts, not long ago.

    A failure is an update that was rejected, a training that failed, or an update that was promised and did not come in time.
    """
    history: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for attempt in store.attempts(federation):
        if attempt.round >= round_number - 2 * LEFT_OUT_ROUNDS:
            for client, failure in _failures(store, attempt).items():
                history[client].append((attempt.round, failure))
    return {
        client: tried[-1][1]
        for client, tried in history.items()
        if len(tried) >= FAILED_IN_A_ROW
        and tried[-1][0] >= round_number - LEFT_OUT_ROUNDS
        and all(failure for _, failure in tried[-FAILED_IN_A_ROW:])
    }


def _failures(store: Store, attempt: AttemptRecord) -> dict[str, str]:
    """Why each client of an attempt failed, or "" for one that delivered; without those that neither failed nor delivered."""
    ended = {update.client: update for update in store.updates(attempt.federation, attempt.at)}
    collected_until = attempt.distilling_at or attempt.closed_at
    ran_out = collected_until is not None and collected_until >= attempt.deadline_at
    outcomes = {}
    for participant in store.participants(attempt.federation, attempt.at):
        update = ended.get(participant.client)
        if update is not None:
            outcomes[participant.client] = update.reason if update.outcome is Outcome.REJECTED else ""
        elif participant.state is ParticipantState.DECLINED and participant.reason in FAILURES:
            outcomes[participant.client] = FAILURES[participant.reason]
        elif participant.state is ParticipantState.ACCEPTED and ran_out:
            outcomes[participant.client] = MISSED
    return outcomes


def odd_updates(store: Store, federation: str, since_round: int) -> dict[str, UpdateRecord]:
    """By client, the last of its updates from a round on that was judged, where it was unlike the others; `reason` says what became of it."""
    judged: dict[str, UpdateRecord] = {}
    for attempt in store.attempts(federation):
        if attempt.round >= since_round:
            updates = store.updates(federation, attempt.at)
            judged |= {each.client: each for each in updates if each.weight is not None}
    return {client: each for client, each in judged.items() if each.reason}


def plateau_reason(store: Store, federation: str, policy: RoundPolicy) -> str:
    """Why the federation ends before its last round, or "": the accuracies of more than half of its clients rise no more.

    Each client is compared with itself, so that what one device reports moves its own vote alone; a single vote ends nothing.
    """
    if policy.stop_patience is None:
        return ""
    closed = [RoundAttempt(each.round, each.attempt) for each in store.aggregates(federation) if each.round]
    merged = [[each for each in store.updates(federation, at) if each.weight] for at in closed]
    recent, earlier = merged[-policy.stop_patience :], merged[: -policy.stop_patience]
    best, before = _best_accuracies(recent), _best_accuracies(earlier)
    level = [client for client in best.keys() & before if 100.0 * (best[client] - before[client]) <= policy.stop_gain]
    clients = {each.client for updates in recent for each in updates}
    if len(level) < MIN_VOTES or 2 * len(level) <= len(clients):
        return ""
    return (
        f"the accuracies of {len(level)} of {len(clients)} clients have not risen by more than {policy.stop_gain:g} points "
        f"in {len(recent)} rounds"
    )


def _best_accuracies(rounds: list[list[UpdateRecord]]) -> dict[str, float]:
    """By client that reported any, the best accuracy that it reported in these rounds."""
    best: dict[str, float] = {}
    for update in (each for updates in rounds for each in updates if "accuracy" in each.reported):
        best[update.client] = max(best.get(update.client, 0.0), update.reported["accuracy"])
    return best
