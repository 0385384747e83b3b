"""A federation of real processes without learning: the real agent and the real coordinator over a real broker.

`python -m tests.support.wire.transfer_parties coordinator|agent ROOT [DEVICE]` runs one; `Parties` controls them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from coordinator.aggregation.jobs import JobDone, OpenedSum, Updates, WorkerSettings
from coordinator.pki.signing_keys import SigningIdentity
from coordinator.rounds.records import AggregateRecord, FederationRecord
from coordinator.service.service import Service
from coordinator.service.service_context import ServiceContext
from coordinator.storage.store import Store
from coordinator.updates.robustness import Distances
from edge_client.agent.loop import Agent
from edge_client.config import AgentConfig, BrokerSection, DataSection, ExportSection, TlsSection
from edge_client.identity.credentials import AgentKeys, mqtt_config
from edge_client.link.coordinator_link import offline_will
from edge_client.session.signals import TrainRound
from edge_client.store.private_store import PrivateStore
from fedcg.event_log import EventLog
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.messages.enrolment_messages import PresetName
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.messages.schemas import COORDINATOR, Carrier
from fedcg.wire.parts import Report
from fedcg.wire.transfer.chunks import FRAME_OVERHEAD_BYTES
from fedcg.wire.transfer.partial_files import HEAD_BYTES, RECORD_BYTES
from fedcg.wire.transfer.windows import limits_for
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig
from tests.conftest import StartMosquitto
from tests.support.broker.brokers import HOST, Pki, RunningMosquitto, acl_for
from tests.support.broker.throttle import Throttle, Weather
from tests.support.coordinator.carriers import carrying
from tests.support.coordinator.engine import policy_of
from tests.support.coordinator.no_worker import NoWorker, classifier_spec, packed
from tests.support.edge.world import FakeTrainer, toy_generation
from tests.support.waiting import await_ends, free_port, wait_until

FEDERATION = "transfers"


@dataclass(frozen=True)
class Plan:
    """The settings of all processes."""

    pki: str
    broker_port: int
    agent_ports: dict[str, int]
    size: int
    rounds: int = 1
    preset: PresetName = "mosquitto"
    chunk_bytes: int | None = 16 * 1024
    keepalive_s: int = 5
    carrier_port: int = 0  # the coordinator's HTTPS port, if any
    carrier_ports: dict[str, int] = field(default_factory=dict)  # its address for devices with `carrier = "https"`
    min_clients: int | None = None  # all devices when None
    deadline_s: float = 600.0
    coordinator_ahead_s: float = 0.0  # of the clocks of the agents

    @staticmethod
    def load(root: Path) -> Plan:
        return Plan(**json.loads((root / "plan.json").read_text()))

    def spec(self) -> FederationSpec:
        return classifier_spec(FEDERATION, self.size, self.rounds)


async def run_coordinator(root: Path, started: Callable[[Service], None] = lambda service: None) -> None:
    """Run the real service, with a worker without learning."""
    plan, home = Plan.load(root), root / COORDINATOR
    spec, limits = plan.spec(), limits_for(plan.preset, plan.chunk_bytes)
    artifacts = ArtifactStore(home / "artifacts")
    store = Store(home / "database.sqlite")
    if not store.federations():
        base = packed(spec, "base", kind="aggregate", round=0, attempt=0, client=COORDINATOR)
        record = FederationRecord(
            FEDERATION,
            spec.method,
            artifacts.put(spec.canonical()),
            policy_of(spec.rounds, plan.min_clients or len(plan.agent_ports), 3, plan.deadline_s),
            1.0,
        )
        initial = AggregateRecord(FEDERATION, 0, 0, artifacts.put(base), len(base), artifacts.put(b"state"), 1.0)
        store.add_federation(record, initial)
        for name in plan.agent_ports:
            store.add_device(name, SigningKey.load(root / name / "signing.key").public.hex, 1.0)
    mqtt = MqttConfig(
        HOST, plan.broker_port, COORDINATOR, tls=Pki(Path(plan.pki)).tls(COORDINATOR), keepalive_s=plan.keepalive_s,
        max_packet=limits.max_packet, in_flight=limits.in_flight,
    )  # fmt: skip
    context = ServiceContext(
        federation=store.federation(FEDERATION),
        spec=spec,
        store=store,
        artifacts=artifacts,
        connect=lambda will: MqttTransport(mqtt, will),
        signing_identity=lambda: SigningIdentity(SigningKey.load(home / "signing.key")),
        worker=WorkerSettings(1, "cpu", b"s" * 32, home / "artifacts", home / "spill"),
        events=EventLog(home / "events.jsonl", time.time),
        limits=limits,
        clock=lambda: time.time() + plan.coordinator_ahead_s,
        make_worker=DigestWorker,
    )
    service, (loop, thread) = Service(context), (asyncio.get_running_loop(), ThreadPoolExecutor(1))
    await loop.run_in_executor(thread, service.start)
    started(service)
    try:
        async with carrying(Path(plan.pki), plan.carrier_port, service) if plan.carrier_port else nullcontext():
            await loop.run_in_executor(thread, service.run)
    finally:
        service.close()
        store.close()


class DigestWorker(NoWorker):
    """Makes an aggregate that depends on every bit of every update, independent of sender and carrier."""

    def finish(self, updates: Updates, limits: Distances, opened: OpenedSum = OpenedSum()) -> None:
        assert self.job is not None
        artifacts, job = ArtifactStore(self.settings.artifacts), self.job
        spec = FederationSpec.parse(artifacts.get(job.spec))
        where = {"kind": "aggregate", "round": job.round, "attempt": job.attempt, "client": COORDINATOR}
        contents = [artifacts.get(artifact) for _, artifact, _ in sorted(updates)]
        merged = packed(spec, hashlib.sha256(b"".join(contents)).hexdigest(), **where)
        self.notify(JobDone(job.round, job.attempt, artifacts.put(merged), len(merged), job.server_state))


class UntaughtTrainer(FakeTrainer):
    """Commits an update of the planned size immediately."""

    def commit(self, command: TrainRound) -> None:
        round_attempt = command.round_attempt
        device = str(json.loads((self.store.root / "format.json").read_text())["device"])
        where = {"round": round_attempt.round, "attempt": round_attempt.attempt, "client": device}
        about = {"kind": "update", "base": command.aggregate, "report": Report(examples=5)}
        update = packed(self.spec, f"{device} {round_attempt}", **where, **about)
        self.store.generations.commit(toy_generation(self.spec, round_attempt, update))


def agent_config(root: Path, device: str) -> AgentConfig:
    plan = Plan.load(root)
    tls = Pki(Path(plan.pki)).tls(device)
    return AgentConfig(
        federation=FEDERATION,
        device=device,
        store=root / device / "store",
        carrier=Carrier.HTTPS if device in plan.carrier_ports else Carrier.MQTT,
        carrier_url=f"https://{HOST}:{plan.carrier_ports[device]}" if device in plan.carrier_ports else None,
        broker=BrokerSection(
            host=HOST,
            port=plan.agent_ports[device],
            keepalive_s=plan.keepalive_s,
            preset=plan.preset,
            chunk_bytes=plan.chunk_bytes,
        ),
        tls=TlsSection(ca=tls.ca, cert=tls.cert, key=tls.key),
        data=DataSection(root=root),
        export=ExportSection(enabled=False),
    )


def run_agent(root: Path, device: str) -> int:
    """Run the real agent, with a trainer without learning."""
    config = agent_config(root, device)
    own, coordinator = (SigningKey.load(root / name / "signing.key") for name in (device, COORDINATOR))
    keys = AgentKeys(own, coordinator.public)
    store = PrivateStore.open(config.store, FEDERATION, device)
    spec = Plan.load(root).spec()
    with store.locked("lock", wait_s=5.0):
        transport = MqttTransport(mqtt_config(config, keys), offline_will(FEDERATION, device, keys.signing))
        events = EventLog(config.store / "events.jsonl", time.time)
        agent = Agent(config, store, keys, transport, lambda deliver: UntaughtTrainer(store, spec, deliver), events)
        return agent.run(until_finished=True)


@dataclass
class Parties:
    """The processes of one federation under `root`."""

    root: Path
    plan: Plan
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def prepare(self) -> None:
        for name in (COORDINATOR, *self.plan.agent_ports):
            (self.root / name).mkdir(parents=True)
            SigningKey.generate().save(self.root / name / "signing.key")
        (self.root / "plan.json").write_text(json.dumps(asdict(self.plan)))

    def start(self, name: str) -> None:
        what = ["coordinator", str(self.root)] if name == COORDINATOR else ["agent", str(self.root), name]
        with (self.root / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.support.wire.transfer_parties", *what], stdout=log, stderr=log
            )

    def change_carrier(self, device: str, port: int | None) -> None:
        """From its next start, send a device's artifacts over HTTPS to this port, or over MQTT."""
        ports = {name: old for name, old in self.plan.carrier_ports.items() if name != device}
        if port is not None:
            ports[device] = port
        self.plan = replace(self.plan, carrier_ports=ports)
        (self.root / "plan.json").write_text(json.dumps(asdict(self.plan)))

    def start_all(self) -> None:
        for name in (COORDINATOR, *self.plan.agent_ports):
            self.start(name)

    def kill(self, name: str) -> None:
        """Send SIGKILL, at any point of its work."""
        process = self.running.pop(name)
        assert process.poll() is None, self.tail(name)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)

    def limit_files(self, name: str, size: int = resource.RLIM_INFINITY) -> None:
        """Limit a process's files to this many bytes, as if its disk were full."""
        resource.prlimit(self.running[name].pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def stop(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait(timeout=10)

    def wait_finished(self, deadline_s: float = 120.0) -> None:
        """Check that every agent ends with exit code 0."""
        await_ends({device: self.running[device] for device in self.plan.agent_ports}, self.tail, deadline_s)

    def events(self, of: str, name: str) -> list[dict[str, Any]]:
        path = self.root / of / ("events.jsonl" if of == COORDINATOR else "store/events.jsonl")
        lines = path.read_text().split("\n") if path.exists() else []
        found = [json.loads(line) for line in lines[:-1] if line.endswith("}")]
        return [event for event in found if event["event"] == name]

    def event(self, of: str, name: str, what: str = "", deadline_s: float = 60.0) -> dict[str, Any]:
        wait_until(lambda: bool(self.events(of, name)), f"{of}: {name} {what} {self.tail(of)}", deadline_s)
        return self.events(of, name)[-1]

    def tail(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return f"\n{name}: {path.read_text()[-2000:]}" if path.exists() else ""

    def uploaded(self, device: str) -> int:
        """Return the chunks of a device's unfinished update on the coordinator's disk."""
        update = list((self.root / device / "store" / "generations").glob("[0-9]*/update.bin"))
        folder = self.root / COORDINATOR / "artifacts" / ".partial"
        return 0 if not update else _recorded(folder, update[0].stat().st_size)

    def downloaded(self, device: str) -> int:
        """Return the chunks of the unfinished aggregate on a device's disk."""
        opened = self.events(COORDINATOR, "attempt_opened")
        if not opened:
            return 0
        aggregate = self.root / COORDINATOR / "artifacts" / opened[0]["aggregate"]
        return _recorded(self.root / device / "store" / "artifacts" / ".partial", aggregate.stat().st_size)

    def await_chunks(self, count: Callable[[], int], at_least: int, what: str) -> int:
        seen = 0

        def enough() -> bool:
            nonlocal seen
            seen = count()
            return seen >= at_least

        everybody = "".join(self.tail(name) for name in self.running)
        wait_until(enough, f"{what}: {seen} {everybody}", 60.0)
        return seen


@contextmanager
def prepared(root: Path, broker: RunningMosquitto, ports: dict[str, int], **plan: Any) -> Iterator[Parties]:
    """Yield parties that can be started, and are stopped at the end."""
    made = Parties(root, Plan(str(broker.pki.directory), broker.port, ports, **plan))
    made.prepare()
    try:
        yield made
    finally:
        made.stop()


def _recorded(folder: Path, size: int) -> int:
    counts = [(path.stat().st_size - size - HEAD_BYTES) // RECORD_BYTES for path in folder.rglob("*.part")]
    return max([0, *counts])


SIZE = 1_000_000
CHUNK = 16 * 1024 - FRAME_OVERHEAD_BYTES
SOME = 18  # chunks, a third of them
SLOW = Weather(bytes_per_s=400_000)


class World:
    """A broker, a slow link for the device, and the processes."""

    def __init__(
        self, root: Path, broker: RunningMosquitto, weather: Weather, carrier: Carrier = Carrier.MQTT, **plan: Any
    ) -> None:
        self.broker = broker
        self.carrier = carrier
        plan["carrier_port"] = free_port()
        if carrier is Carrier.HTTPS:
            self.link = Throttle(plan["carrier_port"], weather)
            plan |= {"agent_ports": {"a": broker.port}, "carrier_ports": {"a": self.link.port}}
        else:
            self.link = Throttle(broker.port, weather)
            plan["agent_ports"] = {"a": self.link.port}
        options = {"size": SIZE, **plan}
        self.parties = Parties(root, Plan(str(broker.pki.directory), broker.port, **options))
        self.parties.prepare()
        self.parties.start_all()

    def close(self) -> None:
        self.parties.stop()
        self.link.close()
        self.broker.stop()

    def finish(self, deadline_s: float = 120.0) -> dict[str, Any]:
        """Wait for the end; return how the update arrived. Checks that nothing was counted twice."""
        self.parties.wait_finished(deadline_s)
        rounds, stored = self.parties.plan.rounds, self.parties.events(COORDINATOR, "update_stored")
        assert len(stored) == len(self.parties.events(COORDINATOR, "attempt_opened")) == rounds
        assert [event["outcome"] for event in self.parties.events("a", "receipt")] == ["accepted"] * rounds
        return stored[0]

    def download(self) -> dict[str, Any]:
        return next(event for event in self.parties.events("a", "artifact_stored") if event["what"] == "aggregate")


MakeWorld = Callable[..., World]


def chunks_of(came: dict[str, Any]) -> int:
    return -(-int(came["size" if "size" in came else "bytes"]) // CHUNK)


@contextmanager
def worlds(root: Path, mosquitto: StartMosquitto, carrier: Carrier = Carrier.MQTT) -> Iterator[MakeWorld]:
    """`make(weather, **plan)`: a world with a broker."""
    stack = ExitStack()

    def make(weather: Weather = SLOW, **plan: Any) -> World:
        broker = mosquitto(acl_for(FEDERATION))
        return stack.enter_context(closing(World(root, broker, weather, carrier, **plan)))

    with stack:
        yield make


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    threading.current_thread().name = sys.argv[1]
    if sys.argv[1] == "coordinator":
        asyncio.run(run_coordinator(Path(sys.argv[2])))
    else:
        sys.exit(run_agent(Path(sys.argv[2]), sys.argv[3]))
