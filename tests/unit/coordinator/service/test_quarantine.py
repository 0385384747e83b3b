"""Updates that behave unlike the others: what the operator sees, what is merged, and what a restart makes of it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from pydantic import TypeAdapter

from coordinator.aggregation.jobs import JobDone, JobEased
from coordinator.config import Action, FigureRule, RobustnessSettings
from coordinator.facts.devices import device_facts
from coordinator.facts.federations import RoundFacts, attempts_by_round, round_facts
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.world import (
    ALL_FIRST,
    FINE,
    REASON,
    TOO_LONG,
    MakeWorld,
    OddC,
    PlainWorker,
    RunningService,
    World,
)
from tests.support.waiting import wait_until


class Unmeasured(PlainWorker):
    """Dies before it has measured."""

    def assess(self, updates: Mapping[str, str]) -> None:
        self.asked.append(("assess", tuple(updates)))


def first_attempt(world: World) -> dict[str, Any]:
    """The first attempt of the first round as the API shows it."""
    known = world.known()
    found = round_facts(known, attempts_by_round(known, "tiny")[1][:1])
    attempt: dict[str, Any] = TypeAdapter(RoundFacts).dump_python(found, mode="json")["attempts"][0]
    return attempt


def shown_updates(world: World) -> dict[str, Any]:
    return {update["client"]: update for update in first_attempt(world)["updates"]}


def merged(world: World) -> list[list[str]]:
    return [[client for client, *_ in updates] for updates in world.merges()]


def test_an_odd_update_is_receipted_and_shown_with_its_figures_and_not_merged(make_world: MakeWorld) -> None:
    world = make_world(2, clients=("a", "b", "c", "d"), make_worker=OddC, pacing=ALL_FIRST)
    with RunningService(world):
        world.start_devices()
        world.wait_event("finished")
        shown = shown_updates(world)
    assert merged(world) == [["a", "b", "d"]] * 2
    why = f"not merged (quarantine): {TOO_LONG}; {REASON}"
    receipts = world.devices["c"].receipts()
    assert [receipt.outcome for receipt in receipts] == [Outcome.ACCEPTED] * 4
    assert [(receipt.round, receipt.reason) for receipt in receipts] == [(1, ""), (1, why), (2, ""), (2, why)]
    assert {receipt.reason for receipt in world.devices["a"].receipts()} == {""}
    assert (shown["c"]["outcome"], shown["c"]["weight"]) == ("accepted", 0)
    assert shown["c"]["figures"]["direction"] == -0.5
    assert shown["c"]["figures"]["action"] == "quarantine"
    assert shown["c"]["figures"]["reasons"] == [TOO_LONG, REASON]
    assert shown["c"]["reason"] == why
    assert shown["a"]["weight"] == 11
    assert shown["a"]["figures"] == FINE.as_json()
    events = [(event["client"], event["action"], event["round"]) for event in world.events("update_odd")]
    assert events == [("c", "quarantine", 1), ("c", "quarantine", 2)]


def test_a_round_that_needs_the_odd_update_weighs_it_down_and_goes_on(make_world: MakeWorld) -> None:
    world = make_world(1, clients=("a", "b", "c"), make_worker=OddC, min_clients=3, max_attempts=1)
    with RunningService(world):
        world.start_devices()
        world.wait_event("finished")
        shown = shown_updates(world)
    assert merged(world) == [["a", "b", "c"]]
    assert [shown[client]["weight"] for client in "abc"] == [11, 11, 1]
    assert shown["c"]["figures"]["action"] == "down-weight"
    assert shown["c"]["reason"] == f"weighed down: {TOO_LONG}; {REASON}; left in because the round needs it"
    assert not world.events("attempt_failed")


def test_an_operator_may_have_such_a_round_fail_by_the_devices_name(make_world: MakeWorld) -> None:
    strict = RobustnessSettings(below_quorum="fail")
    world = make_world(1, clients=("a", "b", "c"), make_worker=OddC, min_clients=3, max_attempts=1, robustness=strict)
    with RunningService(world):
        world.start_devices()
        stalled = world.wait_event("stalled")
    assert f"c (not merged (quarantine): {TOO_LONG}" in str(stalled["reason"])
    assert "2 updates are left, and 3 are needed" in str(stalled["reason"])
    assert merged(world) == []


def test_a_coordinator_that_was_killed_before_the_figures_came_decides_the_same(make_world: MakeWorld) -> None:
    world = make_world(1, clients=("a", "b", "c", "d"), make_worker=Unmeasured, pacing=ALL_FIRST)
    with RunningService(world) as running:
        world.start_devices()
        world.wait_event("distilling")
        running.vanish()
    world.make_worker = OddC
    with RunningService(world):
        world.wait_event("finished")
    assert merged(world) == [["a", "b", "d"]]
    odd = world.store.update("tiny", RoundAttempt(1, 1), "c")
    assert odd is not None
    assert odd.weight == 0


def test_a_device_that_was_away_learns_it_with_its_next_session(make_world: MakeWorld) -> None:
    world = make_world(1, clients=("a", "b", "c", "d"), make_worker=OddC, pacing=ALL_FIRST)
    device = world.devices["c"]
    with RunningService(world):
        world.start_devices()
        world.wait_event("finished")
    known = len(device.receipts())
    with RunningService(world):
        device.hello()
        wait_until(lambda: len(device.receipts()) > known, "the receipt comes again")
    assert device.receipts()[-1].reason.startswith("not merged (quarantine): its step is")


def deliver(device: FakeDevice, round_number: int) -> None:
    """Let a silent device train one round."""

    def is_done() -> bool:
        with device.lock:
            device.silent = False
            device.act()
            device.silent = True
            return (round_number, 1) in device.trained

    wait_until(is_done, f"{device.name} delivers round {round_number}")


@pytest.mark.parametrize("action", ["warn", "down-weight", "quarantine"])
def test_an_odd_update_is_a_problem_until_the_next_normal_one(make_world: MakeWorld, action: Action) -> None:
    settings = RobustnessSettings(
        norm=FigureRule(bound=3.0, action=action), direction=FigureRule(bound=0.3, action=action)
    )
    first_only = partial(OddC, rounds=(1,))
    world = make_world(3, clients=("a", "b", "c"), make_worker=first_only, pacing=ALL_FIRST, robustness=settings)
    world.devices["a"].silent = True
    with RunningService(world) as running:
        world.start_devices()
        deliver(world.devices["a"], 1)
        world.wait_event("aggregate_stored")
        remarks = {each.id: each.remarks for each in device_facts(world.known(running.service))}
        assert len(remarks["c"]) == 1, "whatever the action is, the device's page names it"
        assert ("odd update" in world.problems(running.service)) == (action != "warn")
        deliver(world.devices["a"], 2)
        world.wait_event("aggregate_stored", 2)
        assert "odd update" not in world.problems(running.service)


def test_an_update_that_is_merged_as_it_is_only_because_the_round_needs_it_is_a_problem(make_world: MakeWorld) -> None:
    settings = RobustnessSettings(below_quorum="warn")
    world = make_world(2, clients=("a", "b", "c"), make_worker=OddC, min_clients=3, robustness=settings)
    world.devices["a"].silent = True
    with RunningService(world) as running:
        world.start_devices()
        deliver(world.devices["a"], 1)
        world.wait_event("aggregate_stored")
        what = world.problems(running.service)["odd update"].what
    assert "merged all the same" in what
    assert what.endswith("left in because the round needs it")


class Eased(PlainWorker):
    """Merges by averaging, since it ran out of memory."""

    def finish(self, updates: Any, limits: Any, opened: Any = None) -> None:
        assert self.job is not None
        self._reply(JobEased(self.job.round, self.job.attempt, 2, "MemoryError: 3 GiB"))
        store, base = self.settings.artifacts, self.job
        size = (store / base.base[:2] / base.base).stat().st_size if (store / base.base[:2]).is_dir() else 1
        self._reply(JobDone(base.round, base.attempt, base.base, size, base.server_state, ease=2))


def test_a_merge_without_enough_memory_is_named_in_events_and_round(make_world: MakeWorld) -> None:
    world = make_world(1, make_worker=Eased)
    with RunningService(world):
        world.start_devices()
        world.wait_event("finished")
        attempt = first_attempt(world)
    assert attempt["state"] == "closed"
    assert attempt["reason"].startswith("merged by weighted averaging alone")
    eased = world.events("merge_eased")
    assert [(event["ease"], event["reason"]) for event in eased] == [(2, "MemoryError: 3 GiB")]
