"""A device that promised heartbeats and is silent counts as offline; nothing else does."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.rounds.round_engine import Phase, WentOffline
from coordinator.service.liveness import MISSED, Liveness
from fedcg.event_log import EventLog
from fedcg.wire.messages.messages import COORDINATOR, Heartbeat, Hello, Invite, Welcome
from fedcg.wire.messages.signing import seal
from fedcg.wire.versions import SPOKEN
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.coordinator.world import RunningService, World
from tests.support.waiting import wait_until


class Rounds:
    """The online devices of a round driver that does nothing else."""

    def __init__(self, *online: str) -> None:
        self.online = set(online)

    @property
    def state(self) -> Rounds:
        return self

    def apply(self, event: WentOffline) -> None:
        self.online.discard(event.client)


def test_silence_is_counted_from_the_last_message_in_units_of_the_promise(tmp_path: Path) -> None:
    rounds: Any = Rounds("a", "b", "old", "of chunks")
    chunks: Any = SimpleNamespace(last_seen_at=lambda device: 900.0 if device == "of chunks" else -math.inf)
    liveness = Liveness(rounds, chunks, EventLog(tmp_path / "events.jsonl", time.time))
    for device, every_s in (("a", 10), ("b", 30), ("old", None), ("of chunks", 100)):
        liveness.expect(device, every_s, 0.0)
    for device, at in (("a", 5.0), ("a", 2.0), ("stranger", 2.0)):
        liveness.mark_seen(device, at)
    liveness.miss_silent(5.0 + MISSED * 10)
    assert rounds.online == {"a", "b", "old", "of chunks"}
    liveness.miss_silent(5.0 + MISSED * 10 + 0.1)
    assert rounds.online == {"b", "old", "of chunks"}
    liveness.pardon(1000.0)
    liveness.miss_silent(1001.0)
    assert rounds.online == {"b", "old", "of chunks"}
    liveness.miss_silent(1100.0)
    assert rounds.online == {"old", "of chunks"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    spec = tiny_spec(rounds=1)
    made = World(tmp_path / "home", spec, aggregate_bytes(spec, 0, 0, seed=1), clients=("a", "b", "c"), min_clients=2)
    yield made
    made.close()


def promise(device: FakeDevice) -> None:
    """Say hello with the promise of a heartbeat every second."""
    device.nonces += 1
    device.nonce, device.session = f"{device.nonces:032x}", None
    hello = Hello(**device._addressed(), nonce=device.nonce, versions=SPOKEN, agent="fake-1", heartbeat_s=1)
    device.transport.publish(device.topics.up_control(device.name), seal(hello, device.key))


def test_a_device_that_dies_without_a_will_is_not_invited_to_the_next_round(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.service.liveness.MISSED", 1.0)
    ghost = world.devices["a"]
    with RunningService(world) as running:
        ghost.start()
        wait_until(lambda: bool(ghost.of(Welcome)), "a welcome")
        promise(ghost)
        wait_until(lambda: len(ghost.of(Welcome)) == 2, "another welcome")
        assert running.service.state.online == {"a"}
        ghost.transport.will = None
        ghost.stop()  # and the broker says nothing of it
        assert world.wait_event("offline")["reason"] == "it missed its heartbeats"
        wait_until(lambda: running.service.state.online == frozenset(), "the state follows the event")
        for name in ("b", "c"):
            world.devices[name].start()
        world.wait_event("finished")
        assert running.service.state.phase is Phase.FINISHED
    assert world.wait_event("attempt_opened")["participants"] == ["b", "c"]


def test_heartbeats_keep_a_device_online_and_a_dead_link_of_the_coordinator_is_not_held_against_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.service.liveness.MISSED", 3.0)  # seconds, with the promise of one
    device = world.devices["a"]
    with RunningService(world) as running:
        device.start()
        wait_until(lambda: bool(device.of(Welcome)), "a welcome")
        promise(device)
        wait_until(lambda: device.session is not None and len(device.of(Welcome)) == 2, "another welcome")
        for _ in range(35):
            with device.lock:
                device.tell(Heartbeat(**device._addressed()))
            device.stopped.wait(0.1)
        assert running.service.state.online == {"a"}
        world.broker.drop(COORDINATOR)
        device.stopped.wait(3.2)
        world.broker.restore(COORDINATOR)
        wait_until(lambda: running.service.is_connected, "the link is back")
        with device.lock:
            device.tell(Heartbeat(**device._addressed()))
        device.stopped.wait(0.4)
        assert world.events("offline") == []
        assert running.service.state.online == {"a"}
    assert device.of(Invite) == []
