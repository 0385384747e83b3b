"""A federation with one flooding device: broker and coordinator in separate processes, three honest devices, the flooder.

Nothing is trained. The broker is Mosquitto as `fedcg broker run` configures it, the coordinator the real service over a real
home, with a worker that merges nothing.
"""

import itertools
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coordinator.cli.run import _contexts, _opened
from coordinator.paths import Home
from coordinator.service.service import Service
from fedcg.event_log import read_events
from fedcg.wire.errors import TransportError
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import SigningKey, seal
from fedcg.wire.transfer.chunks import chunk_frame
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig
from fedcg.wire.transport.transport import Will
from tests.support.broker.broker_plant import Plant, open_plant
from tests.support.coordinator.engine import policy_of
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.homes import bundle
from tests.support.coordinator.toy_artifacts import FEDERATION, tiny_spec
from tests.support.coordinator.world import PlainWorker
from tests.support.waiting import wait_until
from tests.support.wire.artifact_chunks import make_ref

HONEST = ("a", "b", "c")
FLOODER = "flooder"
KINDS = ("heartbeats", "hellos", "manifests", "bad signatures", "chunks")
CHUNK = 2 * 1024
READY = 200
DECLINE_S = 0.2
PACE_S = 0.01  # duration of a burst of the flood
TRAINING_S = 0.5
DEADLINE_S = 3.0  # a device that constantly sends hellos has no session for declining
BLOCK = 3  # undisturbed rounds, then the same number in a flood, in turns, since the machine may have other work
HARD_FROM = 4 * BLOCK  # from this round on the flooder sends as much as it can, and answers nothing
ROUNDS = HARD_FROM + 2


def is_flooded(round_number: int) -> bool:
    """Whether the flooder floods in this round."""
    return round_number >= HARD_FROM or (round_number // BLOCK) % 2 == 1


class _AnyBroker:
    """The interface of the in-memory broker for a FakeDevice; the real broker is behind its transport."""

    def is_attached(self, _transport: object) -> bool:
        return True


@dataclass
class Box(FakeDevice):
    """A scripted device on a real broker."""

    home: Home = field(kw_only=True)

    def make_transport(self, will: Will) -> Any:
        tls = Plant(self.home.root.parent, self.home).tls(self.name)
        return MqttTransport(MqttConfig("127.0.0.1", self.home.config().broker.port, self.name, tls=tls), will)

    def send_update(self, round_number: int, attempt: int, data: bytes) -> Any:
        """Answer after a delay, as if it had trained."""

        def send() -> None:
            with self.lock, suppress(TransportError, AssertionError):  # the link or the session ended in the meantime
                FakeDevice.send_update(self, round_number, attempt, data)

        timer = threading.Timer(TRAINING_S, send)
        timer.daemon = True
        timer.start()

    def in_session(self, message: schemas.Invite | schemas.Need | schemas.Receipt) -> None:
        is_old = (
            isinstance(message, schemas.Receipt)
            and self.pending is not None
            and message.artifact != self.pending[0].artifact.id
        )
        if not is_old:
            super().in_session(message)


class Flooder:
    """An enrolled device that floods in every other block of rounds, and finally without end.

    Args:
        box: its keys and its link.
        kind: one of `KINDS`.
        rate: messages per second in the blocks, in which it declines all invitations.
        hard_rate: messages per second at the end, when it does not answer invitations.
    """

    def __init__(self, box: Box, kind: str, rate: int, hard_rate: int) -> None:
        self.box, self.rate, self.hard_rate = box, rate, hard_rate
        self.make = getattr(self, "_" + kind.replace(" ", "_"))
        self.numbers = itertools.count(1)
        self.garbage = random.Random(1).randbytes(CHUNK)

    @property
    def round(self) -> int:
        return int(getattr(self.box.offer, "round", 0))

    def run(self) -> None:
        """Flood until the process ends."""
        self.box.decline = schemas.DeclineReason.NOT_ELIGIBLE
        self.box.start()
        due, last, declined_at = 0.0, time.monotonic(), 0.0
        ready: list[tuple[str, bytes]] = []  # creating and signing them takes longer than sending them
        pause = threading.Event()
        while not pause.wait(PACE_S):
            is_hard = self.round >= HARD_FROM
            now = time.monotonic()
            due, last = due + (self.hard_rate if is_hard else self.rate) * (now - last) * is_flooded(self.round), now
            if is_hard and not ready:
                ready = [self.make() for _ in range(READY)]
            for number in range(int(due)):
                self._send(*(ready[number % READY] if ready else self.make()))
            due -= int(due)
            with self.box.lock:
                self.box.silent, self.box.decline = is_hard, None if is_hard else schemas.DeclineReason.NOT_ELIGIBLE
            if not is_hard and now >= declined_at + DECLINE_S:
                declined_at = now
                self._decline()

    def _send(self, topic: str, payload: bytes) -> None:
        with suppress(TransportError):
            self.box.transport.publish(topic, payload, qos=0)

    def _decline(self) -> None:
        """Repeatedly, since some get lost in the device's own flood."""
        with self.box.lock, suppress(TransportError):
            if self.box.session is not None and self.round:
                self.box.tell(
                    schemas.Decline(**self.box.addressed(self.round, 1), reason=schemas.DeclineReason.NOT_ELIGIBLE)
                )

    def _signed(self, message: Any, *, stamped: bool = True) -> tuple[str, bytes]:
        box = self.box
        with box.lock:
            assert box.session is not None
            message = box.session.stamp(message) if stamped else message
        return box.topics.up_control(box.name), seal(message, box.key)

    def _heartbeats(self) -> tuple[str, bytes]:
        return self._signed(schemas.Heartbeat(**self.box.addressed()))

    def _hellos(self) -> tuple[str, bytes]:
        nonce = f"{next(self.numbers) + (1 << 64):032x}"
        hello = schemas.Hello(**self.box.addressed(), nonce=nonce, versions=schemas.SPOKEN, agent="flood-1")
        return self._signed(hello, stamped=False)

    def _manifests(self) -> tuple[str, bytes]:
        where = self.box.addressed(1_000_000 + next(self.numbers), 1)
        return self._signed(schemas.Manifest(**where, artifact=make_ref(self.garbage, 1024)))

    def _bad_signatures(self) -> tuple[str, bytes]:
        topic, payload = self._signed(schemas.Heartbeat(**self.box.addressed()))
        return topic, payload[:10] + bytes([payload[10] ^ 1]) + payload[11:]

    def _chunks(self) -> tuple[str, bytes]:
        return self.box.topics.up_chunk(self.box.name), chunk_frame(
            "5" * 64, next(self.numbers), self.garbage, b"12345678"
        )


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Attributes:
        calm_s: mean time from the opening of an undisturbed round to the last honest update.
        flooded_s: the same during the flood.
        silenced_s: from the opening of the first round in the hard flood to the silencing; None if never or earlier.
        log_bytes: size of the coordinator's event log.
    """

    calm_s: float
    flooded_s: float
    silenced_s: float | None
    log_bytes: int
    events: list[dict[str, Any]] = field(repr=False)


def box(root: Path, name: str) -> Box:
    """Make a device of the plant in a folder."""
    home = Home(root / "home")
    key = SigningKey.load(bundle(home, name) / "signing.key")
    coordinator = SigningKey.load(home.signing_key)
    any_broker: Any = _AnyBroker()
    return Box(name, any_broker, tiny_spec(ROUNDS), coordinator, key, home=home)


@contextmanager
def plant(root: Path) -> Iterator[Plant]:
    """Run a broker and coordinator, without devices."""
    policy = policy_of(ROUNDS, len(HONEST), 10, DEADLINE_S)
    devices = (*HONEST, FLOODER)
    with open_plant(root, "run", devices, FEDERATION, spec=tiny_spec(ROUNDS), policy=policy) as made:
        made.start_python("coordinator", "tests.support.broker.floods", "coordinator", str(root))
        wait_until(lambda: any(event["up"] for event in events(made, "link")), "the coordinator is connected")
        yield made


def events(made: Plant, name: str = "") -> list[dict[str, Any]]:
    return [dict(event) for event in read_events(made.home.events_file) if name in ("", event["event"])]


def flooded(root: Path, kind: str, rate: int, hard_rate: int, deadline_s: float = 120.0) -> Outcome:
    """Run a federation to its end while its device `FLOODER` floods."""
    root.mkdir(exist_ok=True)
    with plant(root) as made:
        made.start_python("flooder", "tests.support.broker.floods", "flood", str(root), kind, str(rate), str(hard_rate))
        wait_until(lambda: bool(events(made, "online")), f"the flooder is online {made.log('flooder')}")
        boxes = [box(root, name).start() for name in HONEST]
        try:
            wait_until(lambda: bool(events(made, "finished")), f"the end {made.log('flooder')}", deadline_s)
        finally:
            for one in boxes:
                one.stop()
        return _outcome(events(made), made.home.events_file.stat().st_size)


def _outcome(events: list[dict[str, Any]], log_bytes: int) -> Outcome:
    attempts = [event for event in events if event["event"] == "attempt_opened"]
    opened = {event["round"]: event["t"] for event in reversed(attempts)}  # the first attempt of each
    stored = [event for event in events if event["event"] == "update_stored"]
    settled = {
        number: max(event["t"] for event in stored if event["round"] == number) - opened[number]
        for number in range(2, HARD_FROM)
    }
    calm = [seconds for number, seconds in settled.items() if not is_flooded(number)]
    wild = [seconds for number, seconds in settled.items() if is_flooded(number)]
    silenced = next((event["t"] - opened[HARD_FROM] for event in events if event["event"] == "silenced"), None)
    return Outcome(statistics.mean(calm), statistics.mean(wild), silenced, log_bytes, events)


def _coordinate(root: Path) -> None:
    home = Home(root / "home")
    with home.locked(), _opened(home, home.config()) as (store, events):
        context = _contexts(home, home.config(), store, events)(store.federations()[0])
        service = Service(replace(context, make_worker=PlainWorker))
        service.start()
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=service.stop).start())
        try:
            service.run()
        finally:
            service.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["coordinator"]:
        _coordinate(Path(sys.argv[2]))
    else:
        Flooder(box(Path(sys.argv[2]), FLOODER), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])).run()
