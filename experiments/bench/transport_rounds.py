"""Rounds without training, of the real coordinator with many sessions: what a round costs beside learning.

The throughput of transfers is that of such rounds, from the first manifest of a round to the last update that is checked and
durable.
"""

import asyncio
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from coordinator.aggregation import jobs
from coordinator.errors import BrokerError
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, credential_of
from coordinator.pki.signing_keys import load_signing_identity
from coordinator.rounds.engine import Phase
from coordinator.rounds.records import AggregateRecord, FederationRecord
from coordinator.service.service import Service
from coordinator.service.service_context import ServiceContext
from coordinator.storage.store import Store
from coordinator.updates.robustness import Distances, Figures
from experiments.bench.sessions import (
    FEDERATION,
    SECONDS_MAX,
    device_name,
    device_processes,
    enrol,
    expect,
    new_home,
    process_of,
    running_broker,
)
from fedcg.event_log import EventLog, read_events
from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice, RoundPolicy
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import ArtifactHeader, pack
from fedcg.wire.messages.schemas import COORDINATOR, MAX_CHUNK_BYTES
from fedcg.wire.parts import Part, Report, ReportField, TensorLayout
from fedcg.wire.transfer.chunks import chunk_bytes_for
from fedcg.wire.transfer.windows import LinkLimits, limits_for
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles

SMALL, LARGE = 250_000, 57_000_000


@dataclass(frozen=True)
class Case:
    """What is measured: `count` artifacts of `size` bytes by each of `sessions`, one after the other.

    Each session has at most `window` chunks under way. Artifacts smaller than a window come from as many sessions as fill it.
    """

    size: int
    window: int
    count: int
    sessions: int = 1


@dataclass(frozen=True)
class Measured:
    """Seconds of each run of a case."""

    case: Case
    seconds: tuple[float, ...]

    @property
    def mb_per_s(self) -> float:
        """10^6 bytes of artifacts in a second, in the median run."""
        return self.case.size * self.case.count * self.case.sessions / statistics.median(self.seconds) / 1e6

    def as_json(self) -> dict[str, Any]:
        """The case and its figures."""
        seconds = [round(one, 4) for one in self.seconds]
        return {**asdict(self.case), "seconds": seconds, "mb_per_s": round(self.mb_per_s, 1)}


@dataclass(frozen=True)
class Round:
    """Rounds without training.

    Attributes:
        seconds: from the opened attempt to its stored aggregate, of each round.
        transfer_s: from the first manifest to the last update in the database, of each round.
    """

    seconds: tuple[float, ...]
    transfer_s: tuple[float, ...]


@dataclass
class NoWorker:
    """An aggregation worker that learns nothing: the aggregate of every round is the one it started from."""

    settings: jobs.WorkerSettings
    notify: Callable[[jobs.WorkerReady | jobs.Assessed | jobs.JobDone], None]
    job: jobs.Job | None = None

    def start(self) -> None:
        """Ready at once."""
        self.notify(jobs.WorkerReady(0, 1, "cpu"))

    def open(self, job: jobs.Job) -> None:
        """Remember the attempt."""
        self.job = job

    def add(self, client: str, artifact: str) -> None:
        """No teacher pass."""

    def assess(self, updates: Mapping[str, str]) -> None:
        """Nothing is measured."""
        assert self.job is not None
        self.notify(jobs.Assessed(self.job.round, self.job.attempt, dict.fromkeys(updates, Figures())))

    def finish(self, updates: jobs.Updates, limits: Distances, opened: jobs.OpenedSum = jobs.OpenedSum()) -> None:
        """Hand the base back."""
        assert self.job is not None
        size = ArtifactStore(self.settings.artifacts).path(self.job.base).stat().st_size
        self.notify(jobs.JobDone(self.job.round, self.job.attempt, self.job.base, size, self.job.server_state))

    def follow(self, reply: Any) -> tuple[jobs.WorkerEvent, ...]:
        """What it notified of."""
        return (reply,)

    def tick(self) -> None:
        """Nothing is to be started again."""

    def stop(self) -> None:
        """Nothing runs."""


def filled(size: int, window: int, total: int) -> Case:
    """The case of a size and a window, with the sessions that fill the window, repeated up to `total` bytes."""
    chunks = -(-size // chunk_bytes_for(MAX_CHUNK_BYTES))
    sessions = max(1, window // chunks)
    return Case(size, window, max(1, total // (size * sessions)), sessions)


def measure(case: Case, repeats: int, announce: Callable[[str], None]) -> Measured:
    """Run a case several times.

    Raises:
        BrokerError: no Mosquitto here.
    """
    limits = limits_for(window_chunks=case.window, window_bytes=case.window * 128 * 1024)
    runs = [round_of(case.sessions, case.size, case.count, limits, announce) for _ in range(repeats)]
    return Measured(case, tuple(sum(run.transfer_s) for run in runs))


def round_of(sessions: int, size: int, rounds: int, limits: LinkLimits, announce: Callable[[str], None]) -> Round:
    """Rounds of the real coordinator with sessions that do not train, in one or two other processes.

    Raises:
        BrokerError: no Mosquitto here, or the rounds do not end.
        ProcessError: it does not start.
    """
    announce(f"{sessions} sessions x {size} bytes, {rounds} rounds ...")
    names = tuple(map(device_name, range(sessions)))
    with TemporaryDirectory(prefix="fedcg-bench-") as folder:
        home = new_home(Path(folder))
        return asyncio.run(_rounds(home, classifier_spec(FEDERATION, size, rounds), names, limits))


async def _rounds(home: Home, spec: FederationSpec, names: tuple[str, ...], limits: LinkLimits) -> Round:
    async with running_broker(home):
        await asyncio.to_thread(_set_up, home, spec, names)
        serving = process_of(partial(_run_service, home, spec, limits))
        with serving as service, device_processes(home, names, limits, partial(_update, spec)) as devices:
            found: Round = await asyncio.to_thread(expect, service)
            for pipe in (*devices, service):
                pipe.send("end")
    return found


def _set_up(home: Home, spec: FederationSpec, names: tuple[str, ...]) -> None:
    """Open the federation and enrol the devices, while the broker runs."""
    artifacts = ArtifactStore(home.artifacts)
    base = packed(spec, "base", kind="aggregate", round=0, attempt=0, client=COORDINATOR)
    policy = RoundPolicy(
        rounds=spec.rounds, min_clients=len(names), min_cohort=1, max_attempts=1, deadline_s=SECONDS_MAX
    )
    record = FederationRecord(FEDERATION, spec.method, artifacts.put(spec.canonical()), policy, 1.0)
    initial = AggregateRecord(FEDERATION, 0, 0, artifacts.put(base), len(base), artifacts.put(b"state"), 1.0)
    enrol(home, names, lambda store: store.add_federation(record, initial))


def classifier_spec(federation: str, size: int, rounds: int) -> FederationSpec:
    """A federation that shares one tensor of `size` bytes."""
    return FederationSpec(
        federation=federation,
        classes=("x", "y"),
        image=ImageForm(mode="L", height=8, width=8, mean=(0.5,), std=(0.5,)),
        network=NetworkChoice(),
        method="fedcg",
        params={},
        rounds=rounds,
        seed=1,
        upload=(Part.CLASSIFIER,),
        report=(ReportField.EXAMPLES,),
        layouts={Part.CLASSIFIER: (TensorLayout(name="weight", dtype="float32", shape=(size // 4,)),)},
    )


def _update(spec: FederationSpec, device: str, round_number: int, attempt: int, base: Path) -> bytes:
    where = {"round": round_number, "attempt": attempt, "base": base.name}
    return packed(spec, f"{device} {round_number}", kind="update", client=device, report=Report(examples=10), **where)


def packed(spec: FederationSpec, seed: str, **header: Any) -> bytes:
    """An artifact of a federation of `classifier_spec` that zstd can't make smaller."""
    count = spec.layouts[Part.CLASSIFIER][0].shape[0]
    # Random bytes as weights, with moderate exponents, so that the norm stays in its bound.
    words = np.frombuffer(random.Random(seed).randbytes(count * 4), dtype="<u4")
    weights = ((words & 0x807FFFFF) | 0x3A000000).view("<f4").astype(np.float32)
    head = ArtifactHeader(method=spec.method, federation=spec.federation, **header)
    return pack(head, {Part.CLASSIFIER: {"weight": weights}})


def _run_service(home: Home, spec: FederationSpec, limits: LinkLimits, pipe: Any) -> None:
    """The coordinator's process: serve until all rounds are over, and send how long each took."""
    store, broker = Store.of(home), home.config().broker
    own = credential_of(home.pki, COORDINATOR)
    tls = TlsFiles(credential_of(home.pki, CA_NAME).certificate, own.certificate, own.key)
    mqtt = MqttConfig(broker.host, broker.port, COORDINATOR, tls=tls, protocol="5", in_flight=limits.in_flight)
    context = ServiceContext(
        federation=store.federation(FEDERATION),
        spec=spec,
        store=store,
        artifacts=ArtifactStore(home.artifacts),
        connect=lambda will: MqttTransport(mqtt, will),
        signing_identity=lambda: load_signing_identity(home, store),
        worker=jobs.WorkerSettings(1, "cpu", home.secret(), home.artifacts, home.spill),
        events=EventLog(home.events_file, time.time),
        limits=limits,
        make_worker=NoWorker,
    )
    service = Service(context)
    service.start()
    work = threading.Thread(target=service.run, daemon=True)
    work.start()
    try:
        pipe.send(_rounds_over(service, work, home.events_file))
        pipe.recv()
    finally:
        service.stop()
        work.join()
        service.close()
        store.close()


def _rounds_over(service: Service, work: threading.Thread, events: Path) -> Round:
    end = time.monotonic() + SECONDS_MAX
    while service.state.phase is not Phase.FINISHED:
        if not work.is_alive() or time.monotonic() > end:
            raise BrokerError("the rounds of the bench do not end")
        time.sleep(0.05)
    began: dict[object, float] = {}
    rounds: list[float] = []
    transfers: dict[object, tuple[float, float]] = {}
    for event in read_events(events):
        at, number = float(str(event["t"])), event.get("round")
        if event["event"] == "attempt_opened":
            began[number] = at
        elif event["event"] == "update_stored":
            first, _ = transfers.get(number, (math.inf, 0.0))
            transfers[number] = (min(first, at - float(str(event["seconds"]))), at)
        elif event["event"] == "aggregate_stored":
            rounds.append(round(at - began[number], 3))
    return Round(tuple(rounds), tuple(round(last - first, 4) for first, last in transfers.values()))
