"""A federation with one device that floods: broker and coordinator in processes of their own, three honest devices, the flooder.

Nothing is trained. The broker is Mosquitto as `fedcg broker run` configures it, the coordinator the real service over a real
home, with a worker that merges nothing. Run `python -m tests.floods` for the table of all kinds and rates.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coordinator.brokers import publish_access
from coordinator.config import BrokerSettings, CoordinatorConfig
from coordinator.enrolment import enrol
from coordinator.home import Home, create_home
from coordinator.provision.pki import CA_NAME, credential_of
from coordinator.records import AggregateRecord, FederationRecord
from coordinator.server import _setup
from coordinator.service import start_service
from coordinator.store import Store
from fedcg.event_log import read_events
from fedcg.wire.artifacts import ArtifactStore
from fedcg.wire.errors import TransportError
from fedcg.wire.messages import DeclineReason, DeviceStatus, Heartbeat, Hello, Manifest, Need
from fedcg.wire.mqtt import MqttTransport
from fedcg.wire.mqtt_config import MqttConfig, TlsFiles
from fedcg.wire.signing import SigningKey, seal
from fedcg.wire.transfer import chunk_frame, make_ref
from fedcg.wire.transport import Will
from tests.brokers import free_port
from tests.unit.coordinator_support import FEDERATION, FakeDevice, PlainWorker, aggregate_bytes, tiny_spec, wait_until

HONEST = ("a", "b", "c")
FLOODER = "flooder"
KINDS = ("heartbeats", "hellos", "manifests", "bad signatures", "chunks", "statuses", "needs")
CHUNK = 8 * 1024
PACE_S = 0.01  # a flood leaves in bursts of so long
ROUNDS = 40


class _AnyBroker:
    """What a FakeDevice asks of the broker in memory; the real one is behind its transport."""

    def is_attached(self, _transport: object) -> bool:
        return True


@dataclass
class Box(FakeDevice):
    """A scripted device on a real broker."""

    home: Path = Path()
    port: int = 0

    def start(self) -> Box:
        folder = self.home.parent / "bundles" / self.name
        tls = TlsFiles(folder / "tls" / "ca.pem", folder / "tls" / "device.pem", folder / "tls" / "device.key")
        will = Will(self.topics.status(self.name), seal(self._status(online=False), self.key))
        self.transport: Any = MqttTransport(MqttConfig("127.0.0.1", self.port, self.name, tls=tls), will)
        topics = self.topics
        for topic in (topics.offer, topics.coordinator, topics.aggregate):
            self.transport.subscribe(topic)
        for topic in (topics.down_control(self.name), topics.down_chunk(self.name)):
            self.transport.subscribe(topic)
        self.transport.start(self._delivered, self._link)
        threading.Thread(target=self._repeat, daemon=True).start()
        return self


class Flooder:
    """An enrolled device: honest in the first round, from the second one on it sends so many messages of one kind a second.

    Args:
        box: its keys and its link.
        kind: one of `KINDS`.
        rate: messages a second; with 0 it only declines.
        declines: whether it answers invitations meanwhile; else rounds have to do without an answer.
    """

    def __init__(self, box: Box, kind: str, rate: int, *, declines: bool) -> None:
        self.box, self.rate, self.declines = box, rate, declines
        self.make = getattr(self, "_" + kind.replace(" ", "_"))
        self.numbers = itertools.count(1)
        self.garbage = random.Random(1).randbytes(CHUNK)
        self.sent = 0

    def run(self) -> None:
        """Flood until the process ends."""
        box = self.box.start()
        wait_until(lambda: getattr(box.offer, "round", 0) >= 2, "the second round")
        with box.lock:
            box.silent = True
            box.decline = DeclineReason.NOT_ELIGIBLE if self.declines else None
        due, last = 0.0, time.monotonic()
        pause = threading.Event()
        while not pause.wait(PACE_S):
            now = time.monotonic()
            due, last = due + self.rate * (now - last), now
            for _ in range(int(due)):
                self._send()
            due -= int(due)
            self._decline()

    def _send(self) -> None:
        topic, payload = self.make()
        with suppress(TransportError):
            self.box.transport.publish(topic, payload, qos=0)
        self.sent += 1

    def _decline(self) -> None:
        """Again and again: in a flood of its own some get lost."""
        offer = self.box.offer
        if self.declines and offer is not None and self.box.session is not None:
            with self.box.lock:
                from fedcg.wire.messages import Decline

                where = self.box._addressed(offer.round, offer.attempt)
                with suppress(TransportError):
                    self.box.tell(Decline(**where, reason=DeclineReason.NOT_ELIGIBLE))

    def _signed(self, message: Any, *, stamped: bool = True) -> tuple[str, bytes]:
        box = self.box
        with box.lock:
            assert box.session is not None
            message = box.session.stamp(message) if stamped else message
        return box.topics.up_control(box.name), seal(message, box.key)

    def _heartbeats(self) -> tuple[str, bytes]:
        return self._signed(Heartbeat(**self.box._addressed()))

    def _hellos(self) -> tuple[str, bytes]:
        nonce = f"{next(self.numbers) + (1 << 64):032x}"
        hello = Hello(**self.box._addressed(), nonce=nonce, versions=(1,), agent="flood-1")
        return self._signed(hello, stamped=False)

    def _manifests(self) -> tuple[str, bytes]:
        where = self.box._addressed(1_000_000 + next(self.numbers), 1)
        return self._signed(Manifest(**where, artifact=make_ref(self.garbage, 1024)))

    def _bad_signatures(self) -> tuple[str, bytes]:
        topic, payload = self._signed(Heartbeat(**self.box._addressed()))
        return topic, payload[:10] + bytes([payload[10] ^ 1]) + payload[11:]

    def _chunks(self) -> tuple[str, bytes]:
        return self.box.topics.up_chunk(self.box.name), chunk_frame("5" * 64, next(self.numbers), self.garbage, b"12345678")

    def _statuses(self) -> tuple[str, bytes]:
        status = DeviceStatus(**self.box._addressed(), online=next(self.numbers) % 2 == 0)
        return self.box.topics.status(self.box.name), seal(status, self.box.key)

    def _needs(self) -> tuple[str, bytes]:
        offer = self.box.offer
        assert offer is not None
        need = Need(**self.box._addressed(), artifact=offer.aggregate.id, ranges=((0, 256),))
        return self._signed(need)


@dataclass(frozen=True)
class Outcome:
    """What a run showed.

    Attributes:
        seconds: from the opening of the second round to the end.
        log_bytes: of the coordinator's event log.
        silenced_s: how long after the flood began its device was silenced; None when it was not.
    """

    seconds: float
    log_bytes: int
    silenced_s: float | None
    events: list[dict[str, Any]] = field(default_factory=list, repr=False)


@dataclass
class Site:
    """Home, broker and coordinator."""

    root: Path
    rounds: int = ROUNDS
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def home(self) -> Home:
        return Home(self.root / "home")

    def prepare(self) -> None:
        spec = tiny_spec(rounds=self.rounds)
        home = create_home(self.root / "home", CoordinatorConfig(broker=BrokerSettings(port=free_port())))
        artifacts, store = ArtifactStore(home.artifacts), Store(home.database)
        base = aggregate_bytes(spec, 0, 0, seed=1)
        record = FederationRecord(
            FEDERATION, spec.method, artifacts.put(spec.canonical()), spec.rounds, len(HONEST), 3, 60.0, 1, 1.0
        )
        initial = AggregateRecord(FEDERATION, 0, 0, artifacts.put(base), len(base), artifacts.put(b"state"), 1.0)
        store.add_federation(record, initial)
        enrol(home, store, [*HONEST, FLOODER], self.root / "bundles", time.time())
        store.close()

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def events(self, name: str = "") -> list[dict[str, Any]]:
        return [dict(event) for event in read_events(self.home.events_file) if name in ("", event["event"])]

    def box(self, name: str) -> Box:
        key = SigningKey.load(self.root / "bundles" / name / "signing.key")
        coordinator = SigningKey.load(self.home.signing_key)
        any_broker: Any = _AnyBroker()
        port = self.home.config().broker.port
        return Box(name, any_broker, tiny_spec(rounds=self.rounds), coordinator, key, home=self.home.root, port=port)

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=20)


@contextmanager
def site(root: Path, rounds: int = ROUNDS) -> Iterator[Site]:
    """A running broker and coordinator, no device yet."""
    made = Site(root, rounds)
    made.prepare()
    try:
        made.start("broker", "fedcg", "broker", "run", "--dir", str(made.home.root))
        wait_until(lambda: "ready" in made.log("broker"), "the broker is ready")
        made.start("coordinator", "tests.floods", "coordinator", str(root))
        wait_until(lambda: any(event["up"] for event in made.events("link")), "the coordinator is connected")
        yield made
    finally:
        made.stop()


def flooded(root: Path, kind: str, rate: int, *, declines: bool = True, deadline_s: float = 40.0) -> Outcome:
    """Run a federation to its end while its device `FLOODER` floods."""
    with site(root) as running:
        running.start("flooder", "tests.floods", "flood", str(root), kind, str(rate), str(int(declines)))
        wait_until(lambda: bool(running.events("online")), f"the flooder is online {running.log('flooder')}")
        boxes = [running.box(name).start() for name in HONEST]
        try:
            wait_until(lambda: bool(running.events("finished")), f"the end {running.log('flooder')}", deadline_s)
        finally:
            for box in boxes:
                box.stop()
        events = running.events()
        begun = next(e["t"] for e in events if e["event"] == "attempt_opened" and e["round"] == 2)
        ended = next(e["t"] for e in events if e["event"] == "finished")
        silenced = next((e["t"] - begun for e in events if e["event"] == "silenced"), None)
        return Outcome(ended - begun, running.home.events_file.stat().st_size, silenced, events)


async def _coordinate(root: Path) -> None:
    home = Home(root / "home")
    with home.locked(), _setup(home, home.config()) as setup:
        service = await start_service(replace(setup, make_worker=PlainWorker))
        asyncio.get_running_loop().add_signal_handler(15, service.stop)
        try:
            await service.run()
        finally:
            await service.close()


def _table(kinds: tuple[str, ...], rates: tuple[int, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        numbers = itertools.count()

        def show(kind: str, rate: int) -> None:
            try:
                seen = flooded(Path(folder) / str(next(numbers)), kind, rate, declines=rate <= 500)
            except AssertionError as error:
                print(f"{kind:15} {rate:6} not finished: {str(error)[:60]}", flush=True)
                return
            told = "-" if seen.silenced_s is None else f"{seen.silenced_s:.1f}"
            print(f"{kind:15} {rate:6} {seen.seconds:6.2f} s {seen.log_bytes:9} bytes  silenced {told}", flush=True)

        show("heartbeats", 0)
        for kind in kinds:
            for rate in rates:
                show(kind, rate)
        show("heartbeats", 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["coordinator"]:
        asyncio.run(_coordinate(Path(sys.argv[2])))
    elif sys.argv[1:2] == ["flood"]:
        place = Site(Path(sys.argv[2]))
        Flooder(place.box(FLOODER), sys.argv[3], int(sys.argv[4]), declines=sys.argv[5] == "1").run()
    else:
        chosen = tuple(sys.argv[1].split(",")) if len(sys.argv) > 1 else KINDS
        _table(chosen, tuple(map(int, sys.argv[2].split(","))) if len(sys.argv) > 2 else (500, 4000))
