"""Decides from the database, the operator's settings and the worker's figures which updates are merged and how, which devices are left out of the next round, and whether accuracy still rises.

A function of stored data: after a kill, a coordinator makes the same decision again.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coordinator.config import RobustnessSettings
from coordinator.rounds.records import AttemptRecord, ParticipantState, UpdateRecord
from coordinator.storage.store import Store
from coordinator.updates import robustness
from fedcg.event_log import EventLog
from fedcg.learning.spec import RoundPolicy
from fedcg.values import Value
from fedcg.wire.messages.schemas import DeclineReason, Outcome, RoundAttempt

FAILED_IN_A_ROW = 2
"""Consecutive failed attempts after which a device is left out of the next ones."""
LEFT_OUT_ROUNDS = 5
"""Number of rounds that it is left out; if it then fails again, it is left out again at once."""
FAILURES = {
    DeclineReason.TRAINING_FAILED.value: "its training failed",
    DeclineReason.DIVERGED.value: "its training diverged",
}
"""Declines that count as failures."""
MIN_VOTES = 2
"""Least clients without rising accuracy to end a federation."""
MISSED = "it accepted but did not deliver before the deadline"


def typical_distances(store: Store, federation: str, round_number: int) -> robustness.Distances:
    """Per part, the median distance from the base of the updates merged in a closed round; empty for too few."""
    aggregate = store.aggregate(federation, round_number)
    ended = [] if aggregate is None else store.updates(federation, RoundAttempt(round_number, aggregate.attempt))
    return robustness.medians_of([each.distance_of for each in ended if each.weight and each.distances])


def left_out(store: Store, federation: str, round_number: int) -> dict[str, str]:
    """The clients left out of a round, and why: they recently failed in `FAILED_IN_A_ROW` consecutive attempts.

    A failure is a rejected update, a failed training, or an accepted invitation without an update in time. Those before an operator
    readmitted the device don't count.
    """
    readmitted = {device.id: device.readmitted_at or 0.0 for device in store.devices()}
    history: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for attempt in store.attempts(federation):
        if attempt.round >= round_number - 2 * LEFT_OUT_ROUNDS:
            for client, failure in _failures(store, attempt).items():
                if attempt.opened_at >= readmitted.get(client, 0.0):
                    history[client].append((attempt.round, failure))
    return {
        client: tried[-1][1]
        for client, tried in history.items()
        if len(tried) >= FAILED_IN_A_ROW
        and tried[-1][0] >= round_number - LEFT_OUT_ROUNDS
        and all(failure for _, failure in tried[-FAILED_IN_A_ROW:])
    }


def _failures(store: Store, attempt: AttemptRecord) -> dict[str, str]:
    """Why each client of an attempt failed, or "" if it delivered; without clients that did neither."""
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
    """By client, its last evaluated update since a round, if it was unlike the others; `reason` has the action."""
    judged: dict[str, UpdateRecord] = {}
    for attempt in store.attempts(federation):
        if attempt.round >= since_round:
            updates = store.updates(federation, attempt.at)
            judged |= {each.client: each for each in updates if each.weight is not None}
    return {client: each for client, each in judged.items() if each.reason}


def plateau_reason(store: Store, federation: str, policy: RoundPolicy, trains_in: Callable[[int], bool]) -> str:
    """Why the federation ends before its last round, or "": the accuracies of more than half of its clients no longer rise.

    Each client is compared with itself, so that a device's report affects only its own vote; a single vote is not enough. Rounds without
    training (`trains_in`) don't count.
    """
    if policy.stop_patience is None:
        return ""
    closed = [
        RoundAttempt(each.round, each.attempt)
        for each in store.aggregates(federation)
        if each.round and trains_in(each.round)
    ]
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
    """By client, the best accuracy that it reported in these rounds, if any."""
    best: dict[str, float] = {}
    for update in (each for updates in rounds for each in updates if "accuracy" in each.reported):
        best[update.client] = max(best.get(update.client, 0.0), update.reported["accuracy"])
    return best


class Choice(Value):
    """The updates to merge.

    Attributes:
        updates: (client, artifact, weight) of each.
        limits: distances from the base to which updates are clipped.
        odd: the updates that are unlike the others: action and reason for each.
        quarantined: the odd ones that are not merged.
    """

    updates: tuple[tuple[str, str, int], ...]
    limits: robustness.Distances
    odd: Mapping[str, str]
    quarantined: frozenset[str]

    def too_few(self, left: int, needed: int) -> str:
        """Why the attempt fails with `left` updates, or ""."""
        if left >= needed:
            return ""
        odd = ", ".join(f"{client} ({self.odd[client]})" for client in sorted(self.quarantined))
        return f"{odd or 'no update is odd'}; {left} updates are left, but {needed} are required"


@dataclass(eq=False)
class Screening:
    """Chooses the updates to merge for one federation.

    Args:
        store: the database.
        federation: its id.
        settings: the coordinator's settings.
        events: the event log.
    """

    store: Store
    federation: str
    settings: RobustnessSettings
    events: EventLog

    def limits(self, round_number: int) -> robustness.Distances:
        """The distances from the base to which a round's updates are clipped; empty if the previous round has no median."""
        typical = typical_distances(self.store, self.federation, round_number - 1)
        return robustness.limits_of(typical, self.settings.clip_medians)

    def artifacts(self, at: RoundAttempt) -> dict[str, str]:
        """The artifacts of the updates that may be merged, by client."""
        return {client: update.artifact for client, update in self.store.accepted(self.federation, at).items()}

    def choose(self, at: RoundAttempt, figures: Mapping[str, robustness.Figures], quorum: int) -> Choice:
        """Evaluate the accepted updates by their figures, store figures and weights, and write odd updates to the event log."""
        updates = self.store.accepted(self.federation, at)
        verdicts = robustness.verdicts_of(figures, self.settings, quorum)
        where = vars(at)
        weights = self._weights(where, self._examples(at, updates), verdicts)
        stored = {client: _stored(figures[client], verdicts[client]) for client in updates}
        sentences = {client: verdicts[client].sentence for client in updates}
        given = {client: weights.get(client, 0) for client in updates}
        self.store.weigh(self.federation, at, given, stored, sentences)
        limits = self._limits_among(where, {client: updates[client] for client in weights})
        return Choice(
            tuple((client, updates[client].artifact, weight) for client, weight in sorted(weights.items())),
            limits,
            {client: text for client, text in sorted(sentences.items()) if text},
            frozenset(updates.keys() - weights.keys()),
        )

    def _examples(self, at: RoundAttempt, updates: Mapping[str, UpdateRecord]) -> dict[str, int]:
        """The examples of each client, as if each had taken all local steps.

        A client that took the share s of them gets the weight examples / s. Its step from the base is about s times as long, so the mean
        is still weighted by examples (FedNova's normalised averaging, Wang et al. 2020, with weights normalised to sum to 1).
        """
        shares = {person.client: person.share for person in self.store.participants(self.federation, at)}
        return {client: round(each.examples / shares.get(client, 1.0)) for client, each in updates.items()}

    def _weights(
        self, where: dict[str, int], reported: Mapping[str, int], verdicts: Mapping[str, robustness.Verdict]
    ) -> dict[str, int]:
        weights = robustness.merge_weights(reported, verdicts, self.settings)
        for client, verdict in sorted(verdicts.items()):
            if verdict.action is not None:
                reason = "; ".join(verdict.reasons)
                self.events.write("update_odd", **where, client=client, action=verdict.action, reason=reason)
        for client, weight in sorted(weights.items()):
            if weight != reported[client]:
                self.events.write("weight_capped", **where, client=client, reported=reported[client], given=weight)
        return weights

    def _limits_among(self, where: dict[str, int], updates: Mapping[str, UpdateRecord]) -> robustness.Distances:
        known = self.limits(where["round"])
        distances = {client: update.distance_of for client, update in updates.items()}
        limits = known or robustness.limits_of(
            robustness.medians_of(list(distances.values())), self.settings.clip_medians
        )
        shares = {client: robustness.over(row, limits) for client, row in distances.items()}
        for client, part, share in ((client, *item) for client, kept in shares.items() for item in kept.items()):
            self.events.write("update_clipped", **where, client=client, part=part.value, kept=round(share, 4))
        return limits if any(shares.values()) else known


def _stored(figures: robustness.Figures, verdict: robustness.Verdict) -> str:
    judged = {} if verdict.action is None else {"action": verdict.action, "reasons": list(verdict.reasons)}
    return json.dumps({**figures.as_json(), **judged})
