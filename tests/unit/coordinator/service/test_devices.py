"""Who is online, how far each device is, and what becomes of a round whose device stops or can't take part."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.config import RoundSettings
from coordinator.facts.devices import device_facts, device_history
from coordinator.facts.federations import ClientPhase, current_round
from coordinator.rounds.engine import Phase, RoundState
from coordinator.rounds.records import DeviceState, ParticipantState, PresenceRecord
from coordinator.rounds.signals import WentOffline
from coordinator.service.devices import MISSED, PRUNE_EVERY, Liveness, PresenceLog
from coordinator.service.reports import ProgressBoard
from coordinator.storage.store import Store
from fedcg.event_log import EventLog
from fedcg.wire.errors import MalformedError
from fedcg.wire.messages.schemas import (
    COORDINATOR,
    Decline,
    DeclineReason,
    Heartbeat,
    Invite,
    RoundAttempt,
    Welcome,
    decode,
)
from tests.support.coordinator.engine import policy_of
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


def test_a_dead_link_of_the_coordinator_is_no_silence(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_of_a_device_that_is_revoked_online_the_time_of_its_last_message_is_kept(make_world: MakeWorld) -> None:
    world = make_world()
    device = world.devices["a"]
    device.heartbeat_s = 60
    with RunningService(world) as running:
        device.start()
        wait_until(lambda: running.service.state.online == {"a"}, "it is online")
        came = world.store.devices()[0].last_seen_at
        assert came is not None
        wait_until(lambda: time.time() - came > 0.5, "some time passes")
        device.tell(Heartbeat(**device.addressed()))
        sent = time.time()
        world.store.register.end_membership("a", DeviceState.REVOKED, "stolen", time.time())
        wait_until(lambda: running.service.state.online == set(), "the register is read again")
        known = world.known(running.service)
        (facts,) = (each for each in device_facts(known) if each.id == "a")
        history = device_history(known, "a")
    assert facts.standing == "revoked"
    assert facts.seen_at == pytest.approx(sent, abs=0.4)
    assert history.presence["tiny"][-1].state == "offline"


def test_a_device_that_comes_and_goes_fills_no_database(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
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


ABOUT: dict[str, Any] = {"federation": "tiny", "sender": "a", "recipient": "coordinator", "round": 1, "attempt": 1}


def beat(step: int, phase: Any = "classify", steps: int = 100) -> Heartbeat:
    return Heartbeat(**ABOUT, phase=phase, step=step, steps=steps)


def test_the_end_of_a_phase_is_predicted_from_the_rate_since_its_first_report() -> None:
    board, times = ProgressBoard(), []
    open_attempt = RoundState(policy_of(1, 1), Phase.COLLECTING, online=frozenset("a"), participants=frozenset("a"))
    for message, now in ((beat(10), 1000.0), (beat(30), 1005.0), (beat(0, "evaluate"), 1030.0)):
        board.note("a", message, now)
        shown = board.of(open_attempt)["a"]
        times.append((shown.since, shown.ends_at))
    # 70 steps are left, at 20 in 5 seconds
    assert times == [(1000.0, None), (1000.0, 1005.0 + 70 / 4.0), (1030.0, None)]
    board.note("a", Heartbeat(**ABOUT), 1031.0)
    assert board.of(open_attempt) == {}


@pytest.mark.parametrize(
    "wrong", [{"phase": "my secret"}, {"step": -1}, {"steps": (1 << 31) + 1}, {"step": 1.5}, {"pace": 1}]
)
def test_a_heartbeat_holds_nothing_but_a_known_phase_and_bounded_numbers(wrong: dict[str, object]) -> None:
    fields = beat(1).model_dump()
    assert decode(json.dumps(fields).encode()) == beat(1)
    with pytest.raises(MalformedError):
        decode(json.dumps({**fields, **wrong}).encode())


def test_the_api_shows_how_far_a_device_is_until_it_delivers(make_world: MakeWorld) -> None:
    world = make_world()
    with RunningService(world) as running:
        for device in world.devices.values():
            device.silent = True
            device.start()
        a = world.devices["a"]
        wait_until(lambda: bool(a.of(Invite)), "a is invited")
        a.tell(beat(10))
        wait_until(lambda: "a" in running.service.progress, "its progress is known")
        known = world.known(running.service)
        facts = {each.id: each for each in device_facts(known)}
        shown = asdict(facts["a"].progress["tiny"])
        assert (shown["phase"], shown["step"], shown["steps"], shown["round"]) == ("classify", 10, 100, 1)
        assert facts["b"].progress == {}
        a.tell(Heartbeat(**{**ABOUT, "round": 2}, phase="classify", step=99, steps=100))  # of no open attempt
        a.silent = False
        a.act()
        wait_until(lambda: "a" not in running.service.progress, "a delivers")


def test_a_stopped_device_is_left_out_where_the_others_are_enough(make_world: MakeWorld) -> None:
    world = make_world(rounds=1, clients=("a", "b", "c"), min_clients=2, pacing=RoundSettings(gather_s=20.0))
    with RunningService(world) as running:
        world.devices["a"].decline = DeclineReason.INTERRUPTED
        world.start_devices()
        wait_until(lambda: running.service.state.phase is Phase.FINISHED, "the round ends without it")
    kept = {one.client: (one.state, one.reason) for one in world.store.participants("tiny", RoundAttempt(1, 1))}
    assert kept["a"] == (ParticipantState.DECLINED, "interrupted")


def test_a_round_that_needs_a_stopped_device_waits_and_loses_nothing_of_the_others(make_world: MakeWorld) -> None:
    world = make_world(rounds=1)
    a, b = world.devices["a"], world.devices["b"]
    with RunningService(world) as running:
        a.silent = True
        world.start_devices()
        world.wait_event("accepted", 2)
        world.wait_event("update_stored")
        a.tell(Decline(**ABOUT, reason=DeclineReason.INTERRUPTED))
        assert "waits until it is back" in world.wait_event("declined")["detail"]
        world.broker.drop("a")
        a.silent = False
        world.broker.restore("a")
        wait_until(lambda: running.service.state.phase is Phase.FINISHED, "the round ends with both")
    assert world.events("attempt_failed") == []
    assert len(b.trained) == 1


def test_a_round_that_needs_a_device_waits_until_it_can_take_part_and_says_why(make_world: MakeWorld) -> None:
    world = make_world(rounds=1)
    a = world.devices["a"]
    with RunningService(world) as running:
        a.silent = True
        world.start_devices()
        wait_until(lambda: bool(a.of(Invite)), "a is invited")
        a.tell(Decline(**ABOUT, reason=DeclineReason.HOT))
        assert "waits until it can take part" in world.wait_event("declined")["detail"]
        assert running.service.invitations.waits == {"a": "hot"}
        known = world.known(running.service)
        current = current_round(known, "tiny")
        assert {one.client: one.reason for one in current.clients}["a"] == "hot"
        (problem,) = [one for one in world.problems(running.service).values() if one.device == "a"]
        assert ("hot" in problem.what, "cool" in problem.remedy) == (True, True)
        a.tell(Decline(**ABOUT, reason=DeclineReason.HOT))  # the answer to a reminder
        a.silent = False
        a.act()
        wait_until(lambda: running.service.state.phase is Phase.FINISHED, "the round ends with it")
        assert running.service.invitations.waits == {}
    assert world.events("attempt_failed") == []
    assert len(world.events("declined")) == 1


def test_a_federation_without_approvals_waits_loses_no_attempt_and_goes_on(make_world: MakeWorld) -> None:
    world = make_world(rounds=1, clients=("a", "b", "c"), min_clients=2, pacing=RoundSettings(gather_s=20.0))
    for device in world.devices.values():
        device.decline = DeclineReason.NEEDS_APPROVAL
    with RunningService(world) as running:
        world.start_devices()
        wait_until(lambda: len(running.service.state.unapproved) == 3, "all have declined")
        known = world.known(running.service)
        current = current_round(known, "tiny")
        assert (current.phase, current.unapproved, current.attempt) == ("waits_for_owners", ["a", "b", "c"], 1)
        assert "the owners of a, b, c" in current.reason
        assert {one.phase for one in current.clients} == {ClientPhase.UNAPPROVED}
        assert "a, b, c" in world.problems(running.service)["waits for owners"].what
        assert world.store.round_state("tiny").label == "waits_for_owners", "a restart forgets no missing approval"
        for name in ("a", "b"):
            world.devices[name].decline = None
            world.devices[name].act()
        wait_until(lambda: running.service.state.phase is Phase.FINISHED, "two are enough")
    assert world.events("attempt_failed") == []
    assert len(world.events("declined")) == 3
    kept = {one.client: (one.state, one.reason) for one in world.store.participants("tiny", RoundAttempt(1, 1))}
    assert kept["c"] == (ParticipantState.INVITED, "needs_approval")


def test_a_device_without_time_for_the_round_is_not_waited_for(make_world: MakeWorld) -> None:
    world = make_world(rounds=1, clients=("a", "b", "c"), min_clients=3, pacing=RoundSettings(retry_s=600.0))
    with RunningService(world):
        world.devices["a"].decline = DeclineReason.NO_TIME
        world.start_devices()
        assert "declined" in world.wait_event("attempt_failed")["reason"]
