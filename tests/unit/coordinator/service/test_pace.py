"""Policy `pace`: a slow device takes a share of the local steps, and its update counts as if it had taken all."""

import time
from dataclasses import replace

import pytest

from coordinator.config import RoundSettings
from coordinator.facts.federations import ClientNow, ClientPhase, current_round
from coordinator.facts.known import Known
from fedcg.wire.messages.schemas import Invite, RoundAttempt
from tests.support.coordinator.world import DEADLINE_S, MakeWorld, RunningService, World
from tests.support.waiting import wait_until

ALL_FIRST = RoundSettings(gather_s=600.0, retry_s=0.0)
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
    asked = [item for worker in world.workers for item in worker.asked if item[0] == "finish"]
    return [{client: weight for client, _, weight in updates} for _, updates in asked]


def test_a_slow_device_is_asked_for_fewer_steps_from_the_round_after_it_said_how_long_one_takes(
    make_world: MakeWorld,
) -> None:
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


def test_a_coordinator_that_starts_again_in_a_round_asks_for_the_same_share_again_and_shows_it(
    make_world: MakeWorld,
) -> None:
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
        known = Known(world.store, lambda _: world.spec, world.root, {"tiny": running.service})

        def of_slow() -> ClientNow:
            return next(
                each for each in current_round(replace(known, now=time.time()), "tiny").clients if each.client == "c"
            )

        wait_until(lambda: of_slow().phase is ClientPhase.TRAINING, "its answer")
        assert of_slow().share == 0.25
        assert of_slow().expected_at == pytest.approx(time.time() + 1000.0, abs=DEADLINE_S)
