"""A device that promised heartbeats and is silent counts as offline; nothing else does."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.facts.devices import device_facts, device_history
from coordinator.facts.known import Known
from coordinator.rounds.records import DeviceState, PresenceRecord
from coordinator.rounds.signals import WentOffline
from coordinator.service.devices import MISSED, PRUNE_EVERY, Liveness, PresenceLog
from coordinator.storage.store import Store
from fedcg.event_log import EventLog
from fedcg.wire.messages.schemas import COORDINATOR, Heartbeat, Welcome
from tests.support.coordinator.world import MakeWorld, RunningService
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
    store, events = Store(tmp_path / "database.sqlite"), EventLog(tmp_path / "events.jsonl", time.time)
    store.add_device("a", "aa" * 32, 1.0)
    liveness = Liveness(rounds, chunks, events, PresenceLog(store, "f", lambda: 5000.0))
    for device, every_s in (("a", 10), ("b", 30), ("old", None), ("of chunks", 100)):
        liveness.expect(device, every_s, 0.0)
    for device, at in (("a", 5.0), ("a", 2.0), ("stranger", 2.0)):
        liveness.mark_seen(device, at)
    liveness.miss_silent(5.0 + MISSED * 10)
    assert rounds.online == {"a", "b", "old", "of chunks"}
    liveness.miss_silent(5.0 + MISSED * 10 + 0.1)
    assert rounds.online == {"b", "old", "of chunks"}
    assert store.devices()[0].last_seen_at == pytest.approx(5000.0 - MISSED * 10 - 0.1)
    liveness.pardon(1000.0)
    liveness.miss_silent(1001.0)
    assert rounds.online == {"b", "old", "of chunks"}
    liveness.miss_silent(1100.0)
    assert rounds.online == {"old", "of chunks"}
    store.close()


def test_a_dead_link_of_the_coordinator_is_not_held_against_a_device(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.service.devices.MISSED", 1.0)
    world = make_world()
    device = world.devices["a"]
    device.heartbeat_s = 1
    with RunningService(world) as running:
        device.start()
        wait_until(lambda: bool(device.of(Welcome)), "a welcome")
        world.broker.drop(COORDINATOR)
        device.stopped.wait(1.2)
        world.broker.restore(COORDINATOR)
        wait_until(lambda: running.service.is_connected, "the link is back")
        assert running.service.state.online == {"a"}
        assert world.wait_event("offline")["reason"] == "it missed its heartbeats"
    assert world.events("offline")[0]["t"] - world.events("link")[-1]["t"] > 0.9


def test_of_a_device_that_is_revoked_while_it_is_online_the_time_of_its_last_message_is_kept(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    device = world.devices["a"]
    device.heartbeat_s = 60
    with RunningService(world) as running:
        device.start()
        wait_until(lambda: running.service.state.online == {"a"}, "it is online")
        came = world.store.devices()[0].last_seen_at
        assert came is not None
        wait_until(lambda: time.time() - came > 0.5, "some time passes")
        with device.lock:
            device.tell(Heartbeat(**device.addressed()))
        sent = time.time()
        world.store.register.end_membership("a", DeviceState.REVOKED, "stolen", time.time())
        wait_until(lambda: running.service.state.online == set(), "the register is read again")
        known = Known(world.store, lambda _: world.spec, world.root, {"tiny": running.service})
        (facts,) = (each for each in device_facts(known) if each.id == "a")
        history = device_history(known, "a")
    assert facts.standing == "revoked"
    assert facts.seen_at == pytest.approx(sent, abs=0.4)
    assert history.presence["tiny"][-1].state == "offline"


def test_a_device_that_comes_and_goes_all_the_time_does_not_fill_the_database(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.storage.view_store.KEEP_CHANGES", 50)
    world, now = make_world(), iter(range(10_000))
    log = PresenceLog(world.store, "tiny", lambda: float(next(now)))
    for _ in range(400):
        for online in (True, False):
            log.note("a", online=online)
            log.note("nobody", online=online)
    changes = world.store.presence.changes("a", 0.0, 10_000)
    assert 50 <= len(changes) < 50 + PRUNE_EVERY
    assert (changes[-2].online, changes[-1].online) == (True, False)
    assert world.store.presence.changes("nobody", 0.0) == []


def test_while_the_coordinator_is_away_no_device_is_observed(make_world: MakeWorld) -> None:
    world = make_world(rounds=1000)
    for _ in range(2):
        with RunningService(world) as running:
            world.start_devices()
            wait_until(lambda: running.service.state.online == {"a", "b"}, "both are online")
        for device in world.devices.values():
            device.stop()
    world.store.presence.note(PresenceRecord("tiny", "a", time.time(), online=True))  # then it was killed
    with RunningService(world):
        pass
    changes = [(change.online, change.reason) for change in world.store.presence.changes("a", 0.0)]
    stopped = [(True, ""), (False, "the coordinator was stopped")]
    assert changes == [*stopped, *stopped, (True, ""), (False, "the coordinator was started again")]
