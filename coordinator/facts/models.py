"""The versions of the shared model: the aggregate of each round, who has it as far as their updates show, and what it brought."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.facts.known import Known
from coordinator.facts.worth import worth
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
    deliveries = known.store.overview.deliveries(record.id)
    accepted = [each for each in deliveries if each.outcome == Outcome.ACCEPTED.value]
    started_from = {each.client: each.round - 1 for each in accepted}
    means = {number - 1: mean for number, mean, _ in worth(known, federation).mean}
    found = []
    for aggregate in known.store.aggregates(record.id):
        accuracy, before = means.get(aggregate.round), means.get(aggregate.round - 1)
        merged = sum(
            each.round == aggregate.round and each.attempt == aggregate.attempt and bool(each.weight)
            for each in accepted
        )
        found.append(
            ModelVersion(
                aggregate.round,
                aggregate.artifact,
                aggregate.size,
                aggregate.stored_at,
                merged,
                accuracy,
                None if accuracy is None or before is None else accuracy - before,
                sorted(client for client, number in started_from.items() if number == aggregate.round),
            )
        )
    return found[::-1]
