"""Updates that come when their round has closed: dropped, or a teacher of the next round."""

from typing import Any

import pytest

from coordinator.config import RoundSettings
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.world import MakeWorld, RunningService, World
from tests.support.waiting import wait_until

COLLECTS_S = 2.0
ALL_FIRST = RoundSettings(gather_s=600.0, retry_s=0.0)  # a round opens when all devices are online


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
    asked = [item for worker in world.workers for item in worker.asked if item[0] == "finish"]
    return [{client: (artifact, weight) for client, artifact, weight in updates} for _, updates in asked]


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
            with device.lock:
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
