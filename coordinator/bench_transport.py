"""How fast artifacts cross a broker, over what paho alone does in the same run; and a round of many sessions.

Mosquitto runs with the configuration that we generate, mutual TLS included. Sender and receiver are processes of their own,
in both halves of a ratio.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.aggregation_messages import WorkerSettings
from coordinator.bench_parties import NoWorker, Party, run_devices, run_receiver, run_senders
from coordinator.config import BrokerSettings, CoordinatorConfig
from coordinator.errors import BrokerError
from coordinator.home import Home, create_home
from coordinator.message_keys import Voice
from coordinator.provision.mosquitto import ACL_NAME, CONFIG_NAME, mosquitto_config
from coordinator.provision.pki import CA_NAME, credential_of, issue
from coordinator.records import AggregateRecord, FederationRecord
from coordinator.service import Service, start_service
from coordinator.setup import Setup
from coordinator.store import Store
from fedcg.broker_path import find_mosquitto
from fedcg.event_log import EventLog, read_events
from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice
from fedcg.wire.artifacts import ArtifactHeader, ArtifactStore, pack
from fedcg.wire.bench_plain import PlainParty, run_plain_receiver, run_plain_senders
from fedcg.wire.messages import COORDINATOR, MAX_CHUNK_BYTES
from fedcg.wire.mqtt import MqttTransport
from fedcg.wire.mqtt_config import MqttConfig, TlsFiles
from fedcg.wire.parts import Part, Report, ReportField, TensorLayout
from fedcg.wire.presets import LinkLimits, limits_for
from fedcg.wire.signing import SigningKey
from fedcg.wire.topics import Topics
from fedcg.wire.transfer import chunk_bytes_for

FEDERATION = "bench"
SMALL, LARGE = 250_000, 57_000_000
SECONDS_MAX = 300.0
START_S = 20.0


@dataclass(frozen=True)
class Case:
    """What is measured: `count` artifacts of `size` bytes by each of `sessions`, one after the other.

    Each session has at most `window` chunks under way. Artifacts smaller than a window come from as many sessions as fill it.
    """

    size: int
    window: int
    count: int
    sessions: int = 1


def filled(size: int, window: int, total: int) -> Case:
    """The case of a size and a window, with the sessions that fill the window, repeated up to `total` bytes."""
    chunks = -(-size // chunk_bytes_for(MAX_CHUNK_BYTES))
    sessions = max(1, window // chunks)
    return Case(size, window, max(1, total // (size * sessions)), sessions)


@dataclass(frozen=True)
class Measured:
    """Seconds of each run, ours and those of paho alone, in turns."""

    case: Case
    ours_s: tuple[float, ...]
    paho_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Our throughput over paho's: medians of runs that took turns."""
        return statistics.median(self.paho_s) / statistics.median(self.ours_s)


@dataclass(frozen=True)
class Round:
    """A round in which nobody trains.

    Attributes:
        seconds: from the opened attempt to its stored aggregate, of each round.
    """

    sessions: int
    size: int
    seconds: tuple[float, ...]


class Bench:
    """A broker and a folder for one run."""

    def __init__(self, home: Home, root: Path, devices: Sequence[str]) -> None:
        self.home = home
        self.root = root
        self.topics = Topics(FEDERATION)
        self.devices = tuple(devices)
        for name in devices:
            issue(home.pki, name)
            SigningKey.generate().save(root / f"{name}.key")

    def public(self, name: str) -> str:
        """The public key of a device."""
        return SigningKey.load(self.root / f"{name}.key").public.hex

    def mqtt(self, identity: str, limits: LinkLimits) -> MqttConfig:
        """How an identity reaches the broker."""
        own = credential_of(self.home.pki, identity)
        tls = TlsFiles(credential_of(self.home.pki, CA_NAME).certificate, own.certificate, own.key)
        broker = self.home.config().broker
        return MqttConfig(broker.host, broker.port, identity, tls=tls, protocol="5", in_flight=limits.in_flight)

    def party(self, identity: str, limits: LinkLimits) -> Party:
        """A bench process of an identity."""
        key = self.home.signing_key if identity == COORDINATOR else self.root / f"{identity}.key"
        return Party(self.mqtt(identity, limits), FEDERATION, key, self.root / f"of-{identity}", limits)

    @property
    def coordinator_key(self) -> str:
        """The coordinator's public key."""
        return SigningKey.load(self.home.signing_key).public.hex


@contextmanager
def bench(devices: Sequence[str]) -> Iterator[Bench]:
    """A bench with a running Mosquitto.

    Raises:
        BrokerError: there is none on this machine, or it does not start.
    """
    mosquitto = find_mosquitto()
    if mosquitto is None:
        raise BrokerError("the bench needs a Mosquitto on this machine: run `make setup-broker`")
    with tempfile.TemporaryDirectory(prefix="fedcg-bench-") as name:
        root = Path(name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        home = create_home(root / "home", CoordinatorConfig(broker=BrokerSettings(port=port)))
        made = Bench(home, root, devices)
        acl = home.broker / ACL_NAME
        acl.write_text(made.topics.mosquitto_acl(devices, []), encoding="utf-8")
        acl.chmod(0o600)
        data = home.broker / "data"
        data.mkdir()
        text = mosquitto_config(home, acl=acl, persistence=data, as_root=os.geteuid() == 0)
        (home.broker / CONFIG_NAME).write_text(text, encoding="utf-8")
        command = [str(mosquitto.binary), "-c", str(home.broker / CONFIG_NAME)]
        with (root / "mosquitto.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=mosquitto.environment())
        try:
            _wait_listening(process, port, root / "mosquitto.log")
            yield made
        finally:
            process.kill()
            process.wait()


def measure(cases: Sequence[Case], repeats: int, tell: Callable[[str], None]) -> list[Measured]:
    """Run every case, ours and paho's in turns.

    Raises:
        BrokerError: no Mosquitto here.
    """
    measured: list[Measured] = []
    with bench([_name(number) for number in range(max(case.sessions for case in cases))]) as made:
        for case in cases:
            tell(f"{case.sessions} sessions, {case.count} x {case.size} bytes each, window {case.window} ...")
            ours, plain = [], []
            for turn in range(repeats):
                ours.append(_ours(made, case, turn))
                plain.append(_plain(made, case, turn))
            measured.append(Measured(case, tuple(ours), tuple(plain)))
    return measured


def _ours(made: Bench, case: Case, turn: int) -> float:
    limits = _limits(case.window)
    folder = made.root / f"files-{case.size}-{case.window}-{turn}"
    folder.mkdir()
    names = [_name(number) for number in range(case.sessions)]
    files = [tuple(folder / f"{name}-{number}" for number in range(case.count)) for name in names]
    for path in (path for own in files for path in own):
        path.write_bytes(random.Random(path.name).randbytes(case.size))
    os.sync()  # what is measured must not wait for what was prepared
    parties = tuple(made.party(name, limits) for name in names)
    receiver = partial(run_receiver, made.party(COORDINATOR, limits), {name: made.public(name) for name in names})
    seconds = _pair(receiver, partial(run_senders, parties, made.coordinator_key, tuple(files)))
    shutil.rmtree(folder)
    shutil.rmtree(made.party(COORDINATOR, limits).folder)
    return seconds


def _plain(made: Bench, case: Case, turn: int) -> float:
    limits = _limits(case.window)
    chunk = chunk_bytes_for(limits.max_packet)
    parties = tuple(
        PlainParty(made.mqtt(name, limits), made.topics.up_chunk(name), made.topics.down_control(name))
        for name in (_name(number) for number in range(case.sessions))
    )
    acks = {party.chunks_on: party.acks_on for party in parties}
    payloads = tuple(random.Random(f"{turn} {number}").randbytes(case.size) for number in range(case.count))
    chunks, all_chunks = -(-case.size // chunk), made.topics.all_up_chunk()
    receiver = partial(run_plain_receiver, made.mqtt(COORDINATOR, limits), all_chunks, acks, chunks, case.window)
    return _pair(receiver, partial(run_plain_senders, parties, payloads, chunk, case.window))


def _name(number: int) -> str:
    return f"device-{number:04}"


def _limits(window: int) -> LinkLimits:
    return limits_for(window_chunks=window, window_bytes=window * 128 * 1024)


def _pair(receiver: Callable[..., None], sender: Callable[..., None]) -> float:
    """Run both ends in processes; the seconds that the sender told."""
    with _process(receiver) as receiving, _process(sender) as sending:
        _expect(receiving)
        _expect(sending)
        sending.send("go")
        first = wait([sending, receiving], SECONDS_MAX)  # a receiver that ends says so, and nothing else
        seconds = _expect(receiving if receiving in first else sending)
        receiving.send("end")
        return float(seconds)


@contextmanager
def _process(run: Callable[..., None]) -> Iterator[Any]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()


def _expect(pipe: Any) -> Any:
    if not pipe.poll(SECONDS_MAX):
        raise BrokerError(f"a process of the bench said nothing for {SECONDS_MAX} s")
    try:
        return pipe.recv()
    except EOFError as error:
        raise BrokerError("a process of the bench ended; its traceback is above") from error


def round_of(sessions: int, size: int, rounds: int, tell: Callable[[str], None]) -> Round:
    """Rounds of the real coordinator with sessions that do not train, in two other processes.

    Raises:
        BrokerError: no Mosquitto here, or the rounds do not end.
    """
    names = [_name(number) for number in range(sessions)]
    with bench(names) as made:
        tell(f"{sessions} sessions x {size} bytes, {rounds} rounds ...")
        spec = _spec(size, rounds)
        limits = limits_for()
        halves = [names[0::2], names[1::2]]
        make = partial(_update, size, rounds)
        runs = [
            partial(run_devices, tuple(made.party(name, limits) for name in half), made.coordinator_key, make)
            for half in halves
        ]
        with _process(partial(_run_service, made, spec, limits)) as service:
            with _process(runs[0]) as first, _process(runs[1]) as second:
                seconds = _expect(service)
                first.send("end")
                second.send("end")
            service.send("end")
        return Round(sessions, size, tuple(seconds))


def _spec(size: int, rounds: int) -> FederationSpec:
    return FederationSpec(
        federation=FEDERATION,
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


def _update(size: int, rounds: int, device: str, round_number: int, attempt: int, base: str) -> bytes:
    spec = _spec(size, rounds)
    header = ArtifactHeader(
        kind="update",
        method=spec.method,
        federation=spec.federation,
        round=round_number,
        attempt=attempt,
        client=device,
        base=base,
        report=Report(examples=10),
    )
    return _packed(header, size, f"{device} {round_number}")


def _packed(header: ArtifactHeader, size: int, seed: str) -> bytes:
    # Random bytes as weights: zstd finds nothing in them. Exponents are kept moderate, so that the norm stays in its bound.
    words = np.frombuffer(random.Random(seed).randbytes(size // 4 * 4), dtype="<u4")
    weights = ((words & 0x807FFFFF) | 0x3A000000).view("<f4").astype(np.float32)
    return pack(header, {Part.CLASSIFIER: {"weight": weights}})


def _run_service(made: Bench, spec: FederationSpec, limits: LinkLimits, pipe: Any) -> None:
    """The coordinator's process: serve until all rounds are over, and tell how long each took."""
    asyncio.run(_serve(made, spec, limits, pipe))


async def _serve(made: Bench, spec: FederationSpec, limits: LinkLimits, pipe: Any) -> None:
    home = made.home
    store = Store(home.database)
    artifacts = ArtifactStore(home.artifacts)
    header = ArtifactHeader(
        kind="aggregate", method=spec.method, federation=FEDERATION, round=0, attempt=0, client=COORDINATOR
    )
    base = _packed(header, spec.layouts[Part.CLASSIFIER][0].shape[0] * 4, "base")
    clients = len(made.devices)
    record = FederationRecord(
        FEDERATION, spec.method, artifacts.put(spec.canonical()), spec.rounds, clients, 1, SECONDS_MAX, 1, 1.0
    )
    initial = AggregateRecord(FEDERATION, 0, 0, artifacts.put(base), len(base), artifacts.put(b"state"), 1.0)
    store.add_federation(record, initial)
    for name in made.devices:
        store.add_device(name, made.public(name), 1.0)
    setup = Setup(
        federation=store.federation(FEDERATION),
        spec=spec,
        store=store,
        artifacts=artifacts,
        connect=lambda will: MqttTransport(made.mqtt(COORDINATOR, limits), will),
        voice=lambda: Voice(SigningKey.load(home.signing_key)),
        worker=WorkerSettings(1, "cpu", home.secret(), home.artifacts, home.spill),
        events=EventLog(home.events_file, time.time),
        limits=limits,
        make_worker=NoWorker,
    )
    service = await start_service(setup)
    work = asyncio.create_task(service.run())
    try:
        pipe.send(await _rounds_over(service, work, home.events_file))
        await asyncio.to_thread(pipe.recv)
    finally:
        service.stop()
        await asyncio.wait([work])
        await service.close()
        store.close()


async def _rounds_over(service: Service, work: asyncio.Task[None], events: Path) -> list[float]:
    end = time.monotonic() + SECONDS_MAX
    while service.state.phase.value != "finished":
        if work.done():
            work.result()
        if time.monotonic() > end:
            raise BrokerError("the rounds of the bench do not end")
        await asyncio.sleep(0.05)
    told = list(read_events(events))
    opened = [float(str(event["t"])) for event in told if event["event"] == "attempt_opened"]
    stored = [float(str(event["t"])) for event in told if event["event"] == "aggregate_stored"]
    return [round(end - begin, 3) for begin, end in zip(opened, stored, strict=True)]


def as_json(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """The figures of all cases."""
    return [
        {
            **asdict(one.case),
            "ours_s": [round(seconds, 4) for seconds in one.ours_s],
            "paho_s": [round(seconds, 4) for seconds in one.paho_s],
            "ratio": round(one.ratio, 3),
        }
        for one in measured
    ]


def _wait_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    pause = threading.Event()
    while process.poll() is None and time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        pause.wait(0.01)
    raise BrokerError(f"mosquitto did not start: {log.read_text(errors='replace')[-500:]}")
