"""The versions of the shared model: the aggregate of each round, who has it and what it brought; and the exported models in use."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from coordinator.facts.known import Known
from fedcg.wire.messages.schemas import DeviceCondition, Outcome, ServedModel


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


@dataclass(frozen=True)
class ServedAt:
    """The exported model that a device uses; `at` is when the report came, unix time, `gain` the accuracy less that of the model before it."""

    device: str
    at: float
    model: ServedModel
    gain: float | None


def model_versions(known: Known, federation: str) -> list[ModelVersion]:
    """All versions, newest first.

    Raises:
        NotFoundError: there is no such federation.
    """
    record = known.federation(federation)
    overview = known.store.overview
    merged, users = overview.merged(record.id), defaultdict(list)
    for client, last in overview.last_deliveries(record.id, outcome=Outcome.ACCEPTED).items():
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


def served_models(known: Known, federation: str) -> list[ServedAt]:
    """The exported models in use, by device, of the members that report them.

    Raises:
        NotFoundError: there is no such federation.
    """
    members, found = {device.id for device in known.store.members()}, []
    for record in known.store.presence.conditions(known.federation(federation).id):
        model = DeviceCondition.model_validate_json(record.content).model
        if model is not None and record.device in members:
            both = model.accuracy, model.before
            gain = None if both[0] is None or both[1] is None else both[0] - both[1]
            found.append(ServedAt(record.device, record.at, model, gain))
    return found
