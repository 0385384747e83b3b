"""The coordinator over links that are none: it stays up, says why nothing moves, and goes on when the broker is mended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config import RoundSettings
from coordinator.rounds.round_engine import Phase
from coordinator.service.service_context import ServiceContext
from fedcg.wire.messages.messages import DeclineReason
from fedcg.wire.transport import mqtt
from fedcg.wire.transport.mqtt import MqttTransport
from tests.support.broker.broker_packets import SUBSCRIBE, scripted_broker, suback
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.coordinator.world import RunningService, World
from tests.support.waiting import wait_until


@pytest.fixture
def make(tmp_path: Path) -> Iterator[type[World]]:
    made: list[World] = []

    class Made(World):
        def __post_init__(self) -> None:
            super().__post_init__()
            made.append(self)

    yield Made
    for world in made:
        world.close()


def world_of(make: type[World], root: Path, **options: object) -> World:
    spec = tiny_spec(rounds=1)
    return make(root / "home", spec, aggregate_bytes(spec, 0, 0, seed=1), **options)  # type: ignore[arg-type]


def test_a_broker_with_too_small_packets_does_not_end_the_coordinator_which_connects_when_it_is_mended(
    make: type[World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mqtt, "BACKOFF_FIRST_S", 0.01)
    world = world_of(make, tmp_path, clients=())
    with scripted_broker() as broker:

        def service_context() -> ServiceContext:
            given = World.service_context(world)
            return replace(given, connect=lambda will: MqttTransport(replace(broker.config(), keepalive_s=60), will))

        monkeypatch.setattr(world, "service_context", service_context)
        with RunningService(world) as running:
            for _ in range(3):
                assert broker.welcome(properties=b"\x27" + (600).to_bytes(4, "big")).next() is None
            wait_until(lambda: "packets of at most 600 bytes" in caplog.text, "it says why")
            peer = broker.welcome()
            peer.send(suback("5", int.from_bytes(peer.expect(SUBSCRIBE)[:2], "big"), b"\x01\x01\x01"))
            wait_until(lambda: running.service.is_connected, "it has a link")
            assert running.service.state.phase is Phase.WAITING
            broker.close()


def test_a_round_that_gathers_takes_the_third_box_along_and_opens_without_a_fourth(
    make: type[World], tmp_path: Path
) -> None:
    world = world_of(make, tmp_path, clients=("a", "b", "c", "d"), pacing=RoundSettings(gather_s=1.0, retry_s=0.0))
    with RunningService(world):
        for name in ("a", "b"):
            world.devices[name].start()
        world.wait_event("online", 2)
        assert world.events("attempt_opened") == []
        world.devices["c"].start()
        assert world.wait_event("attempt_opened")["participants"] == ["a", "b", "c"]


def test_a_box_that_declines_does_not_burn_the_attempts_before_the_operator_can_help(
    make: type[World], tmp_path: Path
) -> None:
    world = world_of(make, tmp_path, clients=("a", "b"), pacing=RoundSettings(gather_s=0.0, retry_s=0.5))
    world.devices["b"].decline = DeclineReason.NO_DATA
    with RunningService(world):
        world.start_devices()
        world.wait_event("attempt_failed", 2)
        world.devices["b"].decline = None  # its folder is readable again
        world.wait_event("finished")
    assert world.events("paused") == []


def test_time_without_a_broker_is_not_blamed_on_the_devices(make: type[World], tmp_path: Path) -> None:
    world = world_of(make, tmp_path, deadline_s=4.0)  # most of it is left when the link is back
    world.devices["b"].silent = True
    with RunningService(world) as running:
        world.start_devices()
        wait_until(lambda: len(running.service.state.accepted) == 2, "both have accepted")
        for name in ("coordinator", "a", "b"):
            world.broker.drop(name)
        wait_until(lambda: not running.service.is_connected, "the link is lost")
        deadline_at = running.service.state.deadline_at
        wait_until(lambda: time.time() > deadline_at + 0.5, "the deadline has passed")
        for name in ("coordinator", "a", "b"):
            world.broker.restore(name)
        world.devices["b"].silent = False
        wait_until(lambda: running.service.is_connected, "the link is back")

        def is_finished() -> bool:
            world.devices["b"].act()  # with its new session
            return bool(world.events("finished"))

        wait_until(is_finished, "the round completes")
    assert world.events("attempt_failed") == []
    assert "no link to the broker" in world.events("deadline_moved")[0]["reason"]
