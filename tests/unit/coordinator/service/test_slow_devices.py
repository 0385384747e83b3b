"""Slow devices: updates that come when their round has closed, and policy `pace`, by which a device takes a share of the local steps."""

import time
from typing import Any

import pytest

from coordinator.facts.federations import ClientNow, ClientPhase, current_round
from fedcg.wire.messages.schemas import Invite, Outcome, RoundAttempt
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.world import ALL_FIRST, DEADLINE_S, MakeWorld, RunningService, World
from tests.support.waiting import wait_until

COLLECTS_S = 2.0


def late_world(make_world: MakeWorld, late: str, rounds: int = 2) -> World:
    """Three devices, of which c is slow: a round closes without it."""
    world = make_world(rounds, clients=("a", "b", "c"), deadline_s=COLLECTS_S, pacing=ALL_FIRST)
    world.devices["c"].silent = True
    world.change_policy(late=late, late_decay=0.25)
    return world


def deliver_late(world: World) -> str:
    """c sends its update to the first round when the second collects; returns the artifact when its receipt is there."""
    slow: FakeDevice = world.devices["c"]
    world.wait_event("attempt_opened", 2)
    slow.send_update(1, 1, slow.make_update(1, 1, world.base_id))
    wait_until(lambda: bool(slow.receipts()), "the receipt of the late update")
    return slow.receipts()[0].artifact


def merged(world: World) -> list[dict[str, Any]]:
    return [{client: (artifact, weight) for client, artifact, weight in updates} for updates in world.merges()]


def test_a_late_update_teaches_the_next_round_with_decayed_weight(make_world: MakeWorld) -> None:
    world = late_world(make_world, "next")
    with RunningService(world):
        world.start_devices()
        artifact = deliver_late(world)
        world.wait_event("finished")
    first, second = merged(world)
    assert set(first) == {"a", "b"}
    assert set(second) == {"a", "b", "c"}
    assert second["c"] == (artifact, 3)  # a quarter of 11 examples
    assert second["a"][1] == 11
    receipt = world.devices["c"].receipts()[0]
    assert receipt.outcome is Outcome.LATE
    assert "kept for the next one" in receipt.reason
    assert [(event["client"], event["weight"], event["of_round"]) for event in world.events("late_merged")] == [
        ("c", 3, 1)
    ]


@pytest.mark.slow
def test_a_kept_update_is_there_after_a_restart_and_counts_once(make_world: MakeWorld) -> None:
    world = late_world(make_world, "next")
    with RunningService(world) as running:
        world.start_devices()
        artifact = deliver_late(world)
        running.vanish()
    with RunningService(world):
        slow = world.devices["c"]
        for device in world.devices.values():
            device.hello()
        wait_until(lambda: slow.session is not None, "a session")
        slow.send_update(1, 1, world.artifacts.get(artifact))  # its outbox repeats
        wait_until(lambda: len(slow.receipts()) == 2, "the same receipt again")
        world.wait_event("finished")
    assert [receipt.outcome for receipt in slow.receipts()] == [Outcome.LATE] * 2
    assert merged(world)[-1]["c"] == (artifact, 3)


def test_a_device_that_delivers_in_time_teaches_with_its_new_update_alone(make_world: MakeWorld) -> None:
    world = late_world(make_world, "next")
    with RunningService(world):
        world.start_devices()
        artifact = deliver_late(world)
        world.devices["c"].silent = False
        world.devices["c"].act()
        world.wait_event("finished")
    assert merged(world)[-1]["c"][0] != artifact
    assert merged(world)[-1]["c"][1] == 11
    assert not world.events("late_merged")


@pytest.mark.parametrize("late", ["drop", pytest.param("next", marks=pytest.mark.slow)])
def test_an_update_that_is_two_rounds_late_or_dropped_by_policy_is_not_kept(make_world: MakeWorld, late: str) -> None:
    world = late_world(make_world, late, rounds=4)
    slow = world.devices["c"]
    with RunningService(world):
        world.start_devices()
        world.wait_event("attempt_opened", 2 if late == "drop" else 3)
        slow.send_update(1, 1, slow.make_update(1, 1, world.base_id))
        wait_until(lambda: bool(slow.receipts()), "the receipt")
    assert slow.receipts()[0].outcome is Outcome.LATE
    assert slow.receipts()[0].reason == "the round was closed without this update"
    assert world.store.update("tiny", RoundAttempt(1, 1), "c") is None


ROUND_S = {"a": 10.0, "b": 10.0, "c": 40.0}


def paced_world(make_world: MakeWorld, rounds: int, pace: str = "equal-time") -> World:
    world = make_world(rounds, clients=tuple(ROUND_S), pacing=ALL_FIRST)
    for name, device in world.devices.items():
        device.full_round_s = ROUND_S[name]
    world.change_policy(pace=pace)
    return world


def shares_asked(world: World) -> dict[str, list[float]]:
    return {name: [invite.share for invite in device.of(Invite)] for name, device in world.devices.items()}


def weights(world: World) -> list[dict[str, int]]:
    return [{client: weight for client, _, weight in updates} for updates in world.merges()]


def test_a_slow_device_is_asked_for_fewer_steps_once_its_time_is_known(make_world: MakeWorld) -> None:
    world = paced_world(make_world, 3)
    with RunningService(world):
        world.start_devices()
        world.wait_event("finished")
    # 40 s against a median of 10 s: a quarter; what it then expects (10 s) is a quarter of 40 s again.
    assert shares_asked(world) == {"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0], "c": [1.0, 0.25, 0.25]}
    # 11 examples each: of c as of four times as many, cut to the bound of 3 medians like any large claim.
    assert weights(world) == [{"a": 11, "b": 11, "c": 11}] + 2 * [{"a": 11, "b": 11, "c": 33}]
    people = {one.client: one for one in world.store.participants("tiny", RoundAttempt(2, 1))}
    assert {name: (one.share, one.predicted_s) for name, one in people.items()} == {
        "a": (1.0, 10.0),
        "b": (1.0, 10.0),
        "c": (0.25, 10.0),
    }


def test_with_equal_steps_every_device_is_asked_for_all_of_them(make_world: MakeWorld) -> None:
    world = paced_world(make_world, 2, "equal-steps")
    with RunningService(world):
        world.start_devices()
        world.wait_event("finished")
    assert shares_asked(world) == {name: [1.0, 1.0] for name in ROUND_S}
    assert weights(world) == 2 * [{"a": 11, "b": 11, "c": 11}]


def test_a_coordinator_that_starts_again_in_a_round_asks_for_the_same_share(make_world: MakeWorld) -> None:
    world = paced_world(make_world, 3)
    slow = world.devices["c"]
    slow.trained.add((2, 1))  # it accepts the second round, and never delivers
    with RunningService(world):
        world.start_devices()
        world.wait_event("attempt_opened", 2)
        wait_until(lambda: slow.of(Invite)[-1].round == 2, "the invitation to the second round")
    slow.full_round_s = 4000.0  # what it says from now on must not change the open round
    asked = len(slow.of(Invite))
    with RunningService(world) as running:
        slow.hello()  # as every device does that sees a new coordinator
        wait_until(lambda: len(slow.of(Invite)) > asked, "the invitation of the second coordinator")
        assert (slow.of(Invite)[-1].round, slow.of(Invite)[-1].share) == (2, 0.25)

        def of_slow() -> ClientNow:
            clients = current_round(world.known(running.service), "tiny").clients
            return next(each for each in clients if each.client == "c")

        wait_until(lambda: (of_slow().expected_at or 0.0) > time.time() + 500.0, "its second answer")
        assert (of_slow().phase, of_slow().share) == (ClientPhase.TRAINING, 0.25)
        assert of_slow().expected_at == pytest.approx(time.time() + 1000.0, abs=DEADLINE_S)
