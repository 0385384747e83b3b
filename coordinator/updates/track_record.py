"""The devices' updates in past rounds: their typical distances, and the devices to leave out of the next round."""

from __future__ import annotations

from collections import defaultdict

from coordinator.rounds.records import UpdateRecord
from coordinator.storage.store import Store
from coordinator.updates.robustness import Distances, medians_of
from fedcg.wire.messages.messages import Outcome

REJECTED_IN_A_ROW = 2
"""A device whose updates were rejected in this many consecutive attempts is left out of the next ones."""
LEFT_OUT_ROUNDS = 5
"""Number of rounds that it is left out; rejected again after them, it is left out again at once."""


def typical_distances(store: Store, federation: str, round_number: int) -> Distances:
    """Per part, the median distance from the base that the updates merged in a closed round had; empty for a few."""
    aggregate = store.aggregate(federation, round_number)
    ended = [] if aggregate is None else store.updates((federation, round_number, aggregate.attempt))
    return medians_of([each.distance_of for each in ended if each.weight and each.distances])


def left_out(store: Store, federation: str, round_number: int) -> dict[str, str]:
    """The clients that are left out of a round, and why: their last `REJECTED_IN_A_ROW` updates were rejected, not long ago."""
    ended: dict[str, list[UpdateRecord]] = defaultdict(list)
    for attempt in store.attempts(federation):
        if attempt.round >= round_number - 2 * LEFT_OUT_ROUNDS:
            for each in store.updates((federation, attempt.round, attempt.attempt)):
                ended[each.client].append(each)
    return {
        client: updates[-1].reason
        for client, updates in ended.items()
        if len(updates) >= REJECTED_IN_A_ROW
        and updates[-1].round >= round_number - LEFT_OUT_ROUNDS
        and all(each.outcome is Outcome.REJECTED for each in updates[-REJECTED_IN_A_ROW:])
    }
