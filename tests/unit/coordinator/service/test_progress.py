"""How far devices are, by their heartbeats, and what becomes of a round whose device is stopped."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from coordinator.config import RoundSettings
from coordinator.facts.devices import device_facts
from coordinator.facts.federations import ClientPhase, current_round
from coordinator.facts.known import Known
from coordinator.facts.problems import open_problems
from coordinator.rounds.engine import Phase, RoundState
from coordinator.rounds.records import ParticipantState
from coordinator.service.reports import ProgressBoard
from fedcg.wire.errors import MalformedError
from fedcg.wire.messages.schemas import Decline, DeclineReason, Heartbeat, Invite, RoundAttempt, decode
from tests.support.coordinator.engine import policy_of
from tests.support.coordinator.world import MakeWorld, RunningService
from tests.support.waiting import wait_until

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
        known = Known(world.store, lambda _: world.spec, world.root, {"tiny": running.service})
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


def test_a_round_that_needs_a_stopped_device_waits_for_it_and_loses_nothing_of_the_others(
    make_world: MakeWorld,
) -> None:
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
        known = Known(world.store, lambda _: world.spec, world.root, {"tiny": running.service})
        current = current_round(known, "tiny")
        assert {one.client: one.reason for one in current.clients}["a"] == "hot"
        (problem,) = [one for one in open_problems(known) if one.device == "a"]
        assert ("hot" in problem.what, "cool" in problem.remedy) == (True, True)
        a.tell(Decline(**ABOUT, reason=DeclineReason.HOT))  # the answer to a reminder
        a.silent = False
        a.act()
        wait_until(lambda: running.service.state.phase is Phase.FINISHED, "the round ends with it")
        assert running.service.invitations.waits == {}
    assert world.events("attempt_failed") == []
    assert len(world.events("declined")) == 1


def test_a_federation_whose_owners_have_not_approved_waits_without_an_attempt_lost_and_goes_on_by_itself(
    make_world: MakeWorld,
) -> None:
    world = make_world(rounds=1, clients=("a", "b", "c"), min_clients=2, pacing=RoundSettings(gather_s=20.0))
    for device in world.devices.values():
        device.decline = DeclineReason.NEEDS_APPROVAL
    with RunningService(world) as running:
        world.start_devices()
        wait_until(lambda: len(running.service.state.unapproved) == 3, "all have declined")
        known = Known(world.store, lambda _: world.spec, world.root, {"tiny": running.service})
        current = current_round(known, "tiny")
        assert (current.phase, current.unapproved, current.attempt) == ("waits_for_owners", ["a", "b", "c"], 1)
        assert "the owners of a, b, c" in current.reason
        assert {one.phase for one in current.clients} == {ClientPhase.UNAPPROVED}
        found = {each.kind: each for each in open_problems(known)}
        assert "a, b, c" in found["waits for owners"].what
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
