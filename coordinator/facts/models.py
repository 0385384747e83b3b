"""The versions of the shared model: the aggregate of each round, who has it as far as their updates show, and what it brought."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from coordinator.facts.known import Known
from fedcg.wire.messages.messages import Outcome


@dataclass(frozen=True)
class ModelVersion:
    """An aggregate.

    Attributes:
        round: that made it; 0 is the initial one.
        stored_at: unix time.
        merged: clients whose updates are in it.
        accuracy: mean personal accuracy that clients reported after training from it (with their updates to the next round).
        gain: the same, less that of the version before.
        devices: devices whose last accepted update started from it.
    """

    round: int
    artifact: str
    size: int
    stored_at: float
    merged: int
    accuracy: float | None
    gain: float | None
    devices: list[str]


def model_versions(known: Known, federation: str) -> list[ModelVersion]:
    """All versions, newest first.

    Raises:
        NotFoundError: there is no such federation.
    """
    record = known.federation(federation)
    overview = known.store.overview
    merged, users = overview.merged(record.id), defaultdict(list)
    for client, last in overview.last_deliveries(record.id, Outcome.ACCEPTED).items():
        users[last.round - 1].append(client)
    means = {number - 1: mean for number, mean, _ in overview.means(record.id)}
    found = []
    for aggregate in known.store.aggregates(record.id):
        accuracy, before = means.get(aggregate.round), means.get(aggregate.round - 1)
        found.append(
            ModelVersion(
                aggregate.round,
                aggregate.artifact,
                aggregate.size,
                aggregate.stored_at,
                merged.get((aggregate.round, aggregate.attempt), 0),
                accuracy,
                None if accuracy is None or before is None else accuracy - before,
                sorted(users[aggregate.round]),
            )
        )
    return found[::-1]
