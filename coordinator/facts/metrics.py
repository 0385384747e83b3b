"""The metrics at `/metrics`, in the text format of Prometheus; docs/operations.md lists them, and a test compares both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from coordinator.facts.current_round import current_round
from coordinator.facts.known import Known
from coordinator.facts.problems import open_problems
from coordinator.facts.worth import worth
from coordinator.rounds.records import DeviceState
from coordinator.rounds.round_engine import Phase

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OF_FEDERATION = ["federation"]


def metrics_text(known: Known) -> bytes:
    """All metrics now; collected anew for every call, so no figure outlives its source."""
    registry = CollectorRegistry()
    registry.register(_Collector(known))
    return generate_latest(registry)


class _Collector:
    def __init__(self, known: Known) -> None:
        self._known = known

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not collect

    def collect(self) -> Iterator[Metric]:
        yield from self._devices_and_problems()
        yield from self._rounds()
        yield from self._traffic()
        yield from self._accuracy()

    def _devices_and_problems(self) -> Iterator[Metric]:
        devices = GaugeMetricFamily("fedcg_devices", "Devices in the register", labels=["state"])
        records = self._known.store.devices()
        for state in DeviceState:
            devices.add_metric([state.value], sum(record.state is state for record in records))
        yield devices
        problems = GaugeMetricFamily("fedcg_problems_open", "Open problems", labels=["kind"])
        kinds = [problem.kind for problem in open_problems(self._known)]
        for kind in sorted(set(kinds)):
            problems.add_metric([kind], kinds.count(kind))
        yield problems

    def _rounds(self) -> Iterator[Metric]:
        gauges = {
            name: GaugeMetricFamily(name, text, labels=OF_FEDERATION)
            for name, text in (
                ("fedcg_round", "Number of the round that is open, or opens next"),
                ("fedcg_rounds_planned", "Rounds until the federation is over"),
                ("fedcg_devices_online", "Devices with a session"),
                ("fedcg_quorum", "Updates without which a round can't close"),
                ("fedcg_updates_delivered", "Updates of the open attempt that are stored"),
                ("fedcg_broker_connected", "1 while the link to the broker stands"),
                ("fedcg_round_seconds", "Median duration of the last closed rounds in seconds"),
            )
        }
        phases = GaugeMetricFamily("fedcg_phase", "1 for the phase of the federation", labels=["federation", "phase"])
        for record in self._known.store.federations():
            now = current_round(self._known, record.id)
            values = (now.round, now.rounds, now.online, now.quorum, now.delivered, now.is_connected, now.round_s)
            for gauge, value in zip(gauges.values(), values, strict=True):
                if value is not None:
                    gauge.add_metric([record.id], float(value))
            for phase in Phase:
                phases.add_metric([record.id, phase.value], float(now.phase == phase.value))
        yield from gauges.values()
        yield phases

    def _traffic(self) -> Iterator[Metric]:
        updates = CounterMetricFamily("fedcg_updates", "Updates by outcome", labels=["federation", "outcome"])
        size = CounterMetricFamily("fedcg_update_bytes", "Bytes of all updates", labels=OF_FEDERATION)
        attempts = CounterMetricFamily("fedcg_attempts", "Attempts by state", labels=["federation", "state"])
        refused = CounterMetricFamily(
            "fedcg_messages_refused", "Messages refused since the start", labels=["federation", "reason"]
        )
        for record in self._known.store.federations():
            outcomes, states = self._known.store.overview.counts(record.id)
            for outcome, (count, _) in sorted(outcomes.items()):
                updates.add_metric([record.id, outcome], count)
            size.add_metric([record.id], sum(bytes_ for _, bytes_ in outcomes.values()))
            for state, count in sorted(states.items()):
                attempts.add_metric([record.id, state], count)
            service = self._known.services.get(record.id)
            for reason, count in sorted(({} if service is None else service.refusals).items()):
                refused.add_metric([record.id, reason], count)
        yield from (updates, size, attempts, refused)

    def _accuracy(self) -> Iterator[Metric]:
        mean = GaugeMetricFamily(
            "fedcg_accuracy_mean", "Mean personal accuracy reported in the last round", labels=OF_FEDERATION
        )
        negative = GaugeMetricFamily(
            "fedcg_negative_transfer", "Share of the clients that are worse off than alone", labels=OF_FEDERATION
        )
        for record in self._known.store.federations():
            found = worth(self._known, record.id)
            if found.mean and found.mean[-1][1] is not None:
                mean.add_metric([record.id], found.mean[-1][1])
            if found.rate is not None:
                negative.add_metric([record.id], found.rate)
        yield from (mean, negative)
