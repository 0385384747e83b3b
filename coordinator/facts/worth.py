"""Is it worth it? What devices reported of their models' accuracy, against their own local-only baseline where they report it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.facts.known import Known
from coordinator.storage.view_store import Delivery
from fedcg.wire.messages.schemas import Outcome


@dataclass(frozen=True)
class ClientWorth:
    """A client's last reported accuracies, in [0, 1]; None where it reports none.

    Attributes:
        round: of the report.
        personal: of its personal model on its own held-out images.
        alone: of the shadow, the same model trained on the same images without the federation.
        downloaded: of the downloaded model as it is.
        gain: personal - alone.
        examples: training images that it reported.
    """

    client: str
    round: int
    personal: float | None
    alone: float | None
    downloaded: float | None
    gain: float | None
    examples: int | None


@dataclass(frozen=True)
class ClassWorth:
    """Accuracies in one class: of one client, or means over the clients that reported each; None where none did.

    Attributes:
        gain: personal - alone, over the clients that reported both.
        worst: the client that loses most in this class; None when none loses.
    """

    name: str
    personal: float | None
    alone: float | None
    downloaded: float | None
    gain: float | None
    worst: str | None = None


@dataclass(frozen=True)
class Worth:
    """What the federation brings its clients.

    Attributes:
        clients: worst gain first; those without a baseline last.
        mean: (round, mean personal accuracy, mean accuracy alone) over the clients that reported in the round.
        compared: clients that reported both.
        negative: those of them that are worse off than alone.
        rate: share of the compared clients that are worse off; None when none is compared.
        magnitude: mean loss of accuracy of the clients that are worse off.
        worst: the client that loses most.
        classes: in the order of the spec; empty when no client reports accuracies by class.
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
    overview = known.store.overview
    last = overview.last_deliveries(known.federation(federation).id, outcome=Outcome.ACCEPTED)
    found = sorted(map(_client, last.values()), key=lambda each: (each.gain is None, each.gain or 0.0, each.client))
    compared = [each for each in found if each.gain is not None]
    losing = [each for each in compared if each.gain is not None and each.gain < 0]
    return Worth(
        clients=found,
        mean=overview.means(federation),
        compared=len(compared),
        negative=len(losing),
        rate=len(losing) / len(compared) if compared else None,
        magnitude=statistics.fmean(-(each.gain or 0.0) for each in losing) if losing else None,
        worst=losing[0] if losing else None,
        classes=by_class(known, federation, last),
    )


def by_class(known: Known, federation: str, last: Mapping[str, Delivery]) -> list[ClassWorth]:
    """The accuracies by class in the last updates of some clients."""
    reports = {client: each.report["per_class"] for client, each in last.items() if each.report.get("per_class")}
    if not reports:
        return []
    classes = known.spec(known.federation(federation)).classes
    return [
        _of_class(name, {client: _in_class(each, at) for client, each in reports.items()})
        for at, name in enumerate(classes)
    ]


def _in_class(report: Mapping[str, Sequence[float | None] | None], number: int) -> dict[str, float]:
    """The accuracies that one client reported of a class, by field."""
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


def _client(last: Delivery) -> ClientWorth:
    personal, alone = last.accuracy, last.alone
    return ClientWorth(
        last.client,
        last.round,
        personal,
        alone,
        last.report.get("downloaded"),
        None if personal is None or alone is None else personal - alone,
        last.report.get("examples"),
    )
