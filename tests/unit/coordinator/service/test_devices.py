"""Devices of a running federation: who is online, how far each is, and what becomes of a round whose device is slow, stops or can't take part."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.config import RoundSettings
from coordinator.facts.federations import ClientNow, ClientPhase, current_round
from coordinator.rounds.engine import Phase, RoundState
from coordinator.rounds.records import ParticipantState, PresenceRecord
from coordinator.service.devices import MISSED, Liveness, PresenceLog
from coordinator.service.reports import ProgressBoard
from coordinator.storage.store import Store
from fedcg.event_log import EventLog
from fedcg.wire.errors import MalformedError
from fedcg.wire.messages import schemas
from tests.support.coordinator.engine import policy_of
from tests.support.coordinator.world import ALL_FIRST, DEADLINE_S, MakeWorld, RunningService, World
from tests.support.waiting import wait_until


def test_silence_is_counted_from_the_last_message_in_units_of_the_promise(tmp_path: Path) -> None:
    state = SimpleNamespace(online={"a", "b", "old", "of chunks"})
    rounds: Any = SimpleNamespace(state=state, apply=lambda event: state.online.discard(event.client))
    chunks: Any = SimpleNamespace(last_seen_at=lambda device: 900.0 if device == "of chunks" else -math.inf)
    store, events = Store(tmp_path / "database.sqlite"), EventLog(tmp_path / "events.jsonl", time.time)
    store.add_device("a", "aa" * 32, 1.0)
    liveness = Liveness(rounds, chunks, events, PresenceLog(store, "f", lambda: 5000.0))
    for device, every_s in (("a", 10), ("b", 30), ("old", None), ("of chunks", 100)):
        liveness.expect(device, every_s, 0.0)
    for device, at in (("a", 5.0), ("a", 2.0), ("stranger", 2.0)):
        liveness.mark_seen(device, at)
    liveness.miss_silent(5.0 + MISSED * 10)
    assert state.online == {"a", "b", "old", "of chunks"}
    liveness.miss_silent(5.0 + MISSED * 10 + 0.1)
    assert state.online == {"b", "old", "of chunks"}
    assert store.devices()[0].last_seen_at == pytest.approx(5000.0 - MISSED * 10 - 0.1)
    liveness.pardon(1000.0)
    liveness.miss_silent(1001.0)
    assert state.online == {"b", "old", "of chunks"}
    liveness.miss_silent(1100.0)
    assert state.online == {"old", "of chunks"}
    store.close()


def test_a_dead_link_of_the_coordinator_is_no_silence(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.service.devices.MISSED", 1.0)
    world = make_world()
    device = world.devices["a"]
    device.heartbeat_s = 1
    with RunningService(world) as running:
        device.start()
        wait_until(lambda: bool(device.of(schemas.Welcome)), "a welcome")
        world.broker.drop(schemas.COORDINATOR)
        device.stopped.wait(1.2)
        world.broker.restore(schemas.COORDINATOR)
        wait_until(lambda: running.service.is_connected, "the link is back")
        assert running.service.state.online == {"a"}
        assert world.wait_event("offline")["reason"] == "it missed its heartbeats"
    assert world.events("offline")[0]["t"] - world.events("link")[-1]["t"] > 0.9


def test_a_device_that_comes_and_goes_fills_no_database(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.storage.view_store.KEEP_CHANGES", 50)
    world, now = make_world(), iter(range(10_000))
    log = PresenceLog(world.store, "tiny", lambda: float(next(now)))
    for _ in range(400):
        for online in (True, False):
            log.note("a", online=online)
            log.note("nobody", online=online)
    changes = world.store.presence.changes("a", 0.0, 10_000)
    assert len(changes) == 50
    assert (changes[-2].online, changes[-1].online) == (True, False)
    assert world.store.presence.changes("nobody", 0.0) == []


def test_what_is_kept_no_longer_goes_once_a_day_though_its_device_neither_comes_nor_goes(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    with RunningService(world):
        for days in (200, 100):
            at = time.time() - days * 86_400
            world.store.presence.note(PresenceRecord("tiny", "a", at, online=False, reason="gone"))
        assert len(world.store.presence.changes("a", 0.0)) == 2
        monkeypatch.setattr("coordinator.service.devices.PRUNE_EVERY_S", 0.0)
        wait_until(lambda: len(world.store.presence.changes("a", 0.0)) == 1, "the older change is deleted")


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
    assert changes == [*stopped, *stopped, (True, ""), (False, "the coordinator was restarted")]


ABOUT: dict[str, Any] = {"federation": "tiny", "sender": "a", "recipient": "coordinator", "round": 1, "attempt": 1}


def beat(step: int, phase: Any = "classify", steps: int = 100) -> schemas.Heartbeat:
    return schemas.Heartbeat(**ABOUT, phase=phase, step=step, steps=steps)


def test_the_end_of_a_phase_is_predicted_from_the_rate_since_its_first_report() -> None:
    board, times = ProgressBoard(), []
    open_attempt = RoundState(policy_of(1, 1), Phase.COLLECTING, online=frozenset("a"), participants=frozenset("a"))
    for message, now in ((beat(10), 1000.0), (beat(30), 1005.0), (beat(0, "evaluate"), 1030.0)):
        board.note("a", message, now)
        shown = board.of(open_attempt)["a"]
        times.append((shown.since, shown.ends_at))
    # 70 steps are left, at 20 in 5 seconds
    assert times == [(1000.0, None), (1000.0, 1005.0 + 70 / 4.0), (1030.0, None)]
    board.note("a", schemas.Heartbeat(**ABOUT), 1031.0)
    assert board.of(open_attempt) == {}


@pytest.mark.parametrize(
    "wrong", [{"phase": "my secret"}, {"step": -1}, {"steps": (1 << 31) + 1}, {"step": 1.5}, {"pace": 1}]
)
def test_a_heartbeat_holds_nothing_but_a_known_phase_and_bounded_numbers(wrong: dict[str, object]) -> None:
    fields = beat(1).model_dump()
    assert schemas.decode(json.dumps(fields).encode()) == beat(1)
    with pytest.raises(MalformedError):
        schemas.decode(json.dumps({**fields, **wrong}).encode())


def test_a_stopped_device_is_left_out_where_the_others_are_enough(make_world: MakeWorld) -> None:
    world = make_world(rounds=1, clients=("a", "b", "c"), min_clients=2, pacing=RoundSettings(gather_s=20.0))
    with RunningService(world) as running:
        world.devices["a"].decline = schemas.DeclineReason.INTERRUPTED
        world.start_devices()
        wait_until(lambda: running.service.state.phase is Phase.FINISHED, "the round ends without it")
    kept = {one.client: (one.state, one.reason) for one in world.store.participants("tiny", schemas.RoundAttempt(1, 1))}
    assert kept["a"] == (ParticipantState.DECLINED, "interrupted")


def test_a_round_that_needs_a_stopped_device_waits_and_loses_nothing_of_the_others(make_world: MakeWorld) -> None:
    world = make_world(rounds=1)
    a, b = world.devices["a"], world.devices["b"]
    with RunningService(world) as running:
        a.silent = True
        world.start_devices()
        world.wait_event("accepted", 2)
        world.wait_event("update_stored")
        a.tell(schemas.Decline(**ABOUT, reason=schemas.DeclineReason.INTERRUPTED))
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
        wait_until(lambda: bool(a.of(schemas.Invite)), "a is invited")
        a.tell(schemas.Decline(**ABOUT, reason=schemas.DeclineReason.HOT))
        assert "waits until it can participate" in world.wait_event("declined")["detail"]
        assert running.service.invitations.waits == {"a": "hot"}
        known = world.known(running.service)
        assert {one.client: one.reason for one in current_round(known, "tiny").clients}["a"] == "hot"
        (problem,) = [one for one in world.problems(running.service).values() if one.device == "a"]
        assert ("hot" in problem.what, "cool" in problem.remedy) == (True, True)
        a.tell(schemas.Decline(**ABOUT, reason=schemas.DeclineReason.HOT))  # the answer to a reminder
        a.silent = False
        a.act()
        wait_until(lambda: running.service.state.phase is Phase.FINISHED, "the round ends with it")
        assert running.service.invitations.waits == {}
    assert world.events("attempt_failed") == []
    assert len(world.events("declined")) == 1


def test_a_device_without_time_for_the_round_is_not_waited_for(make_world: MakeWorld) -> None:
    world = make_world(rounds=1, clients=("a", "b", "c"), min_clients=3, pacing=RoundSettings(retry_s=600.0))
    with RunningService(world):
        world.devices["a"].decline = schemas.DeclineReason.NO_TIME
        world.start_devices()
        assert "declined" in world.wait_event("attempt_failed")["reason"]


def test_an_update_that_comes_after_its_round_closed_is_not_kept(make_world: MakeWorld) -> None:
    world = make_world(2, clients=("a", "b", "c"), deadline_s=2.0, pacing=ALL_FIRST)
    slow = world.devices["c"]
    slow.silent = True
    with RunningService(world):
        world.start_devices()
        world.wait_event("attempt_opened", 2)
        slow.send_update(1, 1, slow.make_update(1, 1, world.base_id))
        wait_until(lambda: bool(slow.receipts()), "the receipt")
    assert slow.receipts()[0].outcome is schemas.Outcome.LATE
    assert slow.receipts()[0].reason == "the round was closed without this update"
    assert world.store.update("tiny", schemas.RoundAttempt(1, 1), "c") is None


ROUND_S = {"a": 10.0, "b": 10.0, "c": 40.0}


def paced_world(make_world: MakeWorld, rounds: int) -> World:
    world = make_world(rounds, clients=tuple(ROUND_S), pacing=ALL_FIRST)
    for name, device in world.devices.items():
        device.full_round_s = ROUND_S[name]
    world.change_policy(pace="equal-time")
    return world


def test_a_slow_device_is_asked_for_fewer_steps_once_its_time_is_known(make_world: MakeWorld) -> None:
    world = paced_world(make_world, 3)
    world.run()
    # 40 s against a median of 10 s: a quarter; what it then expects (10 s) is a quarter of 40 s again.
    shares = {name: [invite.share for invite in device.of(schemas.Invite)] for name, device in world.devices.items()}
    assert shares == {"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0], "c": [1.0, 0.25, 0.25]}
    # 11 examples each: of c as of four times as many, cut to the bound of 3 medians like any large claim.
    weights = [{client: weight for client, _, weight in updates} for updates in world.merges()]
    assert weights == [{"a": 11, "b": 11, "c": 11}] + 2 * [{"a": 11, "b": 11, "c": 33}]
    people = {one.client: one for one in world.store.participants("tiny", schemas.RoundAttempt(2, 1))}
    asked = {name: (one.share, one.predicted_s) for name, one in people.items()}
    assert asked == {"a": (1.0, 10.0), "b": (1.0, 10.0), "c": (0.25, 10.0)}


def test_a_coordinator_that_starts_again_in_a_round_asks_for_the_same_share(make_world: MakeWorld) -> None:
    world = paced_world(make_world, 3)
    slow = world.devices["c"]
    slow.trained.add((2, 1))  # it accepts the second round, and never delivers
    with RunningService(world):
        world.start_devices()
        world.wait_event("attempt_opened", 2)
        wait_until(lambda: slow.of(schemas.Invite)[-1].round == 2, "the invitation to the second round")
    slow.full_round_s = 4000.0  # what it says from now on must not change the open round
    asked = len(slow.of(schemas.Invite))
    with RunningService(world) as running:
        slow.hello()  # as every device does that sees a new coordinator
        wait_until(lambda: len(slow.of(schemas.Invite)) > asked, "the invitation of the second coordinator")
        assert (slow.of(schemas.Invite)[-1].round, slow.of(schemas.Invite)[-1].share) == (2, 0.25)

        def of_slow() -> ClientNow:
            clients = current_round(world.known(running.service), "tiny").clients
            return next(each for each in clients if each.client == "c")

        wait_until(lambda: (of_slow().expected_at or 0.0) > time.time() + 500.0, "its second answer")
        assert (of_slow().phase, of_slow().share) == (ClientPhase.TRAINING, 0.25)
        assert of_slow().expected_at == pytest.approx(time.time() + 1000.0, abs=DEADLINE_S)
