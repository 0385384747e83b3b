"""Facts about models: versions of the shared model, exported models in use, and reported accuracies compared with local-only models."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from coordinator.facts.known import Known
from coordinator.rounds.records import UpdateRecord
from fedcg.values import Value
from fedcg.wire.messages.schemas import DeviceCondition, Outcome, ServedModel

RECENT_ROUNDS = 10
"""The rounds over which a client's gain is averaged."""
_T95 = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t with 2 to 9 degrees of freedom."""
Verdict = Literal["loses", "undecided", "gains", "unknown"]


class ModelVersion(Value):
    """An aggregate.

    Attributes:
        round: the round that created it; 0 is the initial one.
        stored_at: unix time.
        merged: number of clients whose updates it contains.
        accuracy: mean personal accuracy that clients reported after training from it (with their updates to the next round).
        gain: difference to the accuracy of the previous version.
        devices: devices whose last accepted update started from it.
        pinned: label of a version that an operator keeps.
    """

    round: int
    artifact: str
    size: int
    stored_at: float
    merged: int
    accuracy: float | None
    gain: float | None
    devices: list[str]
    pinned: str | None


class ServedAt(Value):
    """The exported model that a device uses. `at` is the unix time of the report, `gain` the difference in accuracy to its previous model."""

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
                aggregate.pinned,
            )
        )
    return found[::-1]


def served_models(known: Known, federation: str) -> list[ServedAt]:
    """The exported models in use on member devices that report them.

    Raises:
        NotFoundError: there is no such federation.
    """
    members, found = {device.id for device in known.members}, []
    for record in known.store.presence.conditions(known.federation(federation).id):
        model = DeviceCondition.model_validate_json(record.content).model
        if model is not None and record.device in members:
            both = model.accuracy, model.before
            gain = None if both[0] is None or both[1] is None else both[0] - both[1]
            found.append(ServedAt(record.device, record.at, model, gain))
    return found


class ClassWorth(Value):
    """Accuracies in one class: of one client, or means over the clients that reported them; None if none did.

    Attributes:
        gain: personal - alone, over the clients that reported both.
        worst: the client that loses most in this class; None if none loses.
    """

    name: str
    personal: float | None
    alone: float | None
    downloaded: float | None
    gain: float | None
    worst: str | None = None


class ClientWorth(Value):
    """The benefit of the federation for one client.

    Attributes:
        round: of its last accepted update, which reported `accuracy`, `alone` (of its local-only model), `downloaded` and `examples`.
        gain: accuracy - alone, of this update.
        mean: mean gain of its last rounds, at most `RECENT_ROUNDS`; `rounds` is the number of those with both accuracies.
        low, high: 95 % interval of the mean (Student's t over these rounds); None below 3 rounds. It covers the randomness of training
            and of rounding in reports, but not the choice of the test images, which are the same in every round.
        verdict: `loses` if the interval is below 0, `gains` if it is above.
        size: uploaded bytes of all closed rounds; `seconds` and `joules` as reported, None if they are not.
    """

    client: str
    round: int
    accuracy: float | None
    alone: float | None
    downloaded: float | None
    examples: int | None
    gain: float | None
    mean: float | None
    rounds: int
    low: float | None
    high: float | None
    verdict: Verdict
    size: int
    seconds: float | None
    joules: float | None


class Worth(Value):
    """The benefit of the federation for its clients.

    Attributes:
        clients: enrolled devices with an accepted update, worst gain first; those without a baseline last.
        mean: (round, mean personal accuracy, mean local-only accuracy) of closed rounds, over the accepted updates of each.
        compared: number of clients that reported both accuracies.
        negative: number of these that do worse than their local-only model.
        rate: share of the compared clients that do worse; None if none is compared.
        magnitude: mean loss of accuracy of the clients that do worse.
        worst: the client that loses most.
        classes: in the order of the spec; empty if no client reports accuracies by class.
    """

    clients: list[ClientWorth]
    mean: list[tuple[int, float | None, float | None]]
    compared: int
    negative: int
    rate: float | None
    magnitude: float | None
    worst: ClientWorth | None
    classes: list[ClassWorth]


def worth(known: Known, federation: str) -> Worth:
    """The accuracies that the clients of a federation reported.

    Raises:
        NotFoundError: there is no such federation.
    """
    overview, members = known.store.overview, {device.id for device in known.members}
    every = overview.last_deliveries(known.federation(federation).id, outcome=Outcome.ACCEPTED)
    last, mean = {client: each for client, each in every.items() if client in members}, overview.means(federation)
    gains = overview.gains(federation, mean[-1][0] - RECENT_ROUNDS + 1 if mean else 0)
    clients = (_of_client(each, *gains.get(client, (0, None, None, 0, None, None))) for client, each in last.items())
    found = sorted(clients, key=lambda each: (each.gain is None, each.gain or 0.0, each.client))
    compared = [each for each in found if each.gain is not None]
    losing = [each for each in compared if each.gain is not None and each.gain < 0]
    return Worth(
        clients=found,
        mean=mean,
        compared=len(compared),
        negative=len(losing),
        rate=len(losing) / len(compared) if compared else None,
        magnitude=statistics.fmean(-(each.gain or 0.0) for each in losing) if losing else None,
        worst=losing[0] if losing else None,
        classes=by_class(known, federation, last),
    )


def _of_client(
    last: UpdateRecord,
    rounds: int,
    mean: float | None,
    square: float | None,
    size: int,
    seconds: float | None,
    joules: float | None,
) -> ClientWorth:
    low = high = None
    if mean is not None and square is not None and rounds > 2:
        deviation = math.sqrt(max(0.0, square - mean * mean) * rounds / (rounds - 1))
        half = _T95[rounds - 3] * deviation / math.sqrt(rounds)
        low, high = mean - half, mean + half
    verdict: Verdict = "unknown" if mean is None else "undecided"
    if low is not None and high is not None:
        verdict = "loses" if high < 0 else "gains" if low > 0 else "undecided"
    of_update = {name: getattr(last, name) for name in ("client", "round", "accuracy", "alone", "gain")}
    reported: dict[str, Any] = {name: last.reported.get(name) for name in ("downloaded", "examples")}
    over_rounds: dict[str, Any] = {"mean": mean, "rounds": rounds, "low": low, "high": high, "verdict": verdict}
    return ClientWorth(**of_update, **reported, **over_rounds, size=int(size), seconds=seconds, joules=joules)


def by_class(known: Known, federation: str, last: Mapping[str, UpdateRecord]) -> list[ClassWorth]:
    """The accuracies by class in the last updates of some clients."""
    reports = {client: each.reported["per_class"] for client, each in last.items() if each.reported.get("per_class")}
    if not reports:
        return []
    classes = known.spec(known.federation(federation)).classes
    return [
        _of_class(name, {client: _in_class(each, at) for client, each in reports.items()})
        for at, name in enumerate(classes)
    ]


def _in_class(report: Mapping[str, Sequence[float | None] | None], number: int) -> dict[str, float]:
    """The accuracies that one client reported for a class, by field."""
    found = {field: (values or ())[number : number + 1] for field, values in report.items()}
    return {field: values[0] for field, values in found.items() if values and values[0] is not None}


def _of_class(name: str, reported: Mapping[str, Mapping[str, float]]) -> ClassWorth:
    def mean(field: str) -> float | None:
        values = [each[field] for each in reported.values() if field in each]
        return statistics.fmean(values) if values else None

    gains = {
        client: each["accuracy"] - each["shadow"]
        for client, each in reported.items()
        if {"accuracy", "shadow"} <= each.keys()
    }
    worst = min(gains, key=lambda client: gains[client], default=None)
    return ClassWorth(
        name,
        mean("accuracy"),
        mean("shadow"),
        mean("downloaded"),
        statistics.fmean(gains.values()) if gains else None,
        worst if worst is not None and gains[worst] < 0 else None,
    )
