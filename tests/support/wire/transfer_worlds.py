"""One device, a coordinator, a real broker, and a slow link that carries the artifacts, over MQTT or over HTTPS."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedcg.wire.messages.schemas import COORDINATOR, Carrier
from fedcg.wire.transfer.chunks import FRAME_OVERHEAD_BYTES
from tests.conftest import StartMosquitto
from tests.support.broker.brokers import RunningMosquitto, acl_for
from tests.support.broker.throttle import Throttle, Weather
from tests.support.waiting import free_port
from tests.support.wire.transfer_parties import FEDERATION, Parties, Plan

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
        """Wait for the end; returns how the update came. Nothing was counted twice."""
        self.parties.wait_finished(deadline_s)
        assert len(self.parties.events(COORDINATOR, "update_stored")) == self.parties.plan.rounds
        assert len(self.parties.events(COORDINATOR, "attempt_opened")) == self.parties.plan.rounds
        assert [event["outcome"] for event in self.parties.events("a", "receipt")] == (
            ["accepted"] * self.parties.plan.rounds
        )
        return self.parties.events(COORDINATOR, "update_stored")[0]

    def download(self) -> dict[str, Any]:
        return next(event for event in self.parties.events("a", "artifact_stored") if event["what"] == "aggregate")


MakeWorld = Callable[..., World]


def chunks_of(came: dict[str, Any]) -> int:
    return -(-int(came["size" if "size" in came else "bytes"]) // CHUNK)


@contextmanager
def worlds(root: Path, mosquitto: StartMosquitto, carrier: Carrier = Carrier.MQTT) -> Iterator[MakeWorld]:
    """`make(weather, extra, **plan)`: a world whose broker has further lines of configuration."""
    made: list[World] = []

    def make(weather: Weather = SLOW, extra: tuple[str, ...] = (), **plan: Any) -> World:
        folder = root / "broker"
        folder.mkdir()
        if extra:
            extra = (*extra, f"persistence_location {folder}/")
        broker = mosquitto(acl_for(FEDERATION, ("a", "b", "c")), folder=folder, extra=extra)
        made.append(World(root, broker, weather, carrier, **plan))
        return made[-1]

    yield make
    for world in made:
        world.close()
