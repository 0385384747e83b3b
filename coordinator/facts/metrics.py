"""The metrics at `/metrics`, in the Prometheus text format. docs/reference/metrics.md lists them, and a test compares both."""

from collections.abc import Iterator
from typing import get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.facts.devices import Standing, device_facts
from coordinator.facts.federations import current_round
from coordinator.facts.known import Known
from coordinator.facts.models import worth
from coordinator.facts.problems import open_problems
from coordinator.rounds.engine import WAITS_FOR_OWNERS, Phase

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Samples = Iterator[tuple[str, tuple[str, ...], float | None]]
"""Name of a metric, values of its labels, value; None if it has no value now."""

METRICS: dict[str, tuple[str, list[str]]] = {
    "fedcg_devices": ("Devices in the register", ["standing"]),
    "fedcg_problems_open": ("Open problems", ["kind"]),
    "fedcg_round": ("Number of the open or next round", ["federation"]),
    "fedcg_rounds_planned": ("Total number of planned rounds", ["federation"]),
    "fedcg_devices_online": ("Devices with a session", ["federation"]),
    "fedcg_quorum": ("Minimum number of updates to close a round", ["federation"]),
    "fedcg_updates_delivered": ("Stored updates of the open attempt", ["federation"]),
    "fedcg_broker_connected": ("1 while connected to the broker", ["federation"]),
    "fedcg_round_seconds": ("Median duration of the last closed rounds in seconds", ["federation"]),
    "fedcg_phase": ("1 for the present phase of the federation", ["federation", "phase"]),
    "fedcg_accuracy_mean": ("Mean personal accuracy reported in the last closed round", ["federation"]),
    "fedcg_negative_transfer": (
        "Share of enrolled devices with a local-only model that do worse than it",
        ["federation"],
    ),
    "fedcg_updates_total": ("Updates of ended attempts, by outcome", ["federation", "outcome"]),
    "fedcg_update_bytes_total": ("Bytes of these updates", ["federation"]),
    "fedcg_attempts_total": ("Ended attempts, closed or failed", ["federation", "state"]),
    "fedcg_messages_refused_total": ("Messages refused since the coordinator started", ["federation", "reason"]),
}
"""Description and labels of each metric; names that end in `_total` are counters."""


def metrics_text(known: Known) -> bytes:
    """All present metrics, collected for every call, so that no value outlives its source."""
    return generate_latest(_Collector(known))


class _Collector(Collector):
    def __init__(self, known: Known) -> None:
        self._known = known

    def collect(self) -> Iterator[Metric]:
        families = {
            name: (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(name, text, labels=labels)
            for name, (text, labels) in METRICS.items()
        }
        for name, labels, value in _samples(self._known):
            if value is not None:
                families[name].add_metric(labels, float(value))
        return iter(families.values())


def _samples(known: Known) -> Samples:
    devices, kinds = device_facts(known), [problem.kind for problem in open_problems(known)]
    for standing in get_args(Standing):
        yield "fedcg_devices", (standing,), sum(device.standing == standing for device in devices)
    for kind in sorted(set(kinds)):
        yield "fedcg_problems_open", (kind,), kinds.count(kind)
    for record in known.store.shown_federations():
        yield from _of_federation(known, record.id)


def _of_federation(known: Known, federation: str) -> Samples:
    now, found, of = current_round(known, federation), worth(known, federation), (federation,)
    yield "fedcg_round", of, now.round
    yield "fedcg_rounds_planned", of, now.rounds
    yield "fedcg_devices_online", of, now.online
    yield "fedcg_quorum", of, now.quorum
    yield "fedcg_updates_delivered", of, now.delivered
    yield "fedcg_broker_connected", of, now.is_connected
    yield "fedcg_round_seconds", of, now.round_s
    for phase in (*(each.value for each in Phase), WAITS_FOR_OWNERS):
        yield "fedcg_phase", (federation, phase), now.phase == phase
    yield "fedcg_accuracy_mean", of, found.mean[-1][1] if found.mean else None
    yield "fedcg_negative_transfer", of, found.rate
    outcomes, states = known.store.overview.counts(federation)
    yield "fedcg_update_bytes_total", of, sum(size for _, size in outcomes.values())
    service = known.services.get(federation)
    counts = {
        "fedcg_updates_total": {outcome: count for outcome, (count, _) in outcomes.items()},
        "fedcg_attempts_total": states,
        "fedcg_messages_refused_total": {} if service is None else service.refusals,
    }
    for name, by_label in counts.items():
        for label, count in sorted(by_label.items()):
            yield name, (federation, label), count
