"""What operators change: what is refused, in which words, what repeating it does, and devices that stop being members while the service runs."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from coordinator.errors import NotFoundError, SteeringError
from coordinator.operations.create_federation import too_few_for_sums
from coordinator.operations.operations import Operations
from coordinator.paths import Home
from coordinator.rounds.engine import Phase
from coordinator.rounds.records import DeviceState, FederationStatus, ParticipantState
from coordinator.storage.event_store import coordinator_log
from coordinator.storage.store import Store
from fedcg.event_log import read_events
from fedcg.learning.spec import FederationSpec
from fedcg.wire.messages.schemas import Invite, RoundAttempt
from fedcg.wire.parts import Part
from tests.support.coordinator.engine import policy_of
from tests.support.coordinator.homes import add_federation
from tests.support.coordinator.toy_artifacts import FEDERATION, tiny_spec
from tests.support.coordinator.world import MakeWorld, RunningService, World
from tests.support.waiting import wait_until

WHOLE = "must be a whole number"


@pytest.fixture
def doing(home: Home) -> Iterator[Operations]:
    with closing(Store.of(home)) as store:
        yield Operations(home, store, coordinator_log(home.events_file, store.events))


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        (
            {"rounds": 0, "fractoin": 0.5, "min_clients": "two", "classes": "x", "deadline_s": "inf"},
            (
                "classes: can't change after creation; `fedcg federation continue` creates a new one",
                "deadline_s: must be a number (1 to 31622400; ",
                "fractoin: there is no such setting (did you mean `fraction`?)",
                f"min_clients: {WHOLE}",
                "rounds: must be greater than or equal to 1 (1 to 100000; total number of rounds)",
            ),
        ),
        (
            {"max_clients": [1], "nonsense": 3, "pace": "fast", "rounds": 1e24},
            (
                f"max_clients: {WHOLE}",
                "nonsense: there is no such setting (known: rounds, min_clients, ",
                "pace: must be 'equal-steps' or 'equal-time' (",
                f"rounds: {WHOLE} (1 to 100000; ",
            ),
        ),
        ({"min_cohort": True, "deadline_s": True}, ("deadline_s: must be a number", f"min_cohort: {WHOLE}")),
        ({"min_cohort": "3", "rounds": 5.5}, (f"min_cohort: {WHOLE}", f"rounds: {WHOLE}")),
        ({"require_cohort": "1"}, ("require_cohort: must be true or false",)),
        ({"min_clients": 2, "min_cohort": 3}, ("min_clients: min_clients = 2 is below min_cohort = 3",)),
    ],
)
def test_everything_that_is_wrong_with_a_changed_policy_is_named_at_once_and_nothing_is_changed(
    doing: Operations, changes: dict[str, Any], problems: tuple[str, ...]
) -> None:
    before = doing.store.federation("casting")
    with pytest.raises(SteeringError) as refused:
        doing.change_policy("casting", changes)
    first, *found = str(refused.value).split("\n  ")
    assert first == f"policy of casting: {len(problems)} problem{'s' if len(problems) > 1 else ''}"
    for line, start in zip(sorted(found), problems, strict=True):
        assert line.startswith(start)
    assert doing.store.federation("casting") == before


def test_a_policy_of_fewer_clients_than_sealed_sums_take_is_refused_with_the_reason_that_a_plan_gets(
    home: Home, doing: Operations
) -> None:
    sealed = tiny_spec().model_copy(update={"federation": "blind", "method": "fedavg", "sealed": (Part.EXTRACTOR,)})
    add_federation(home, "blind", spec=sealed, method="fedavg", policy=policy_of(3, 5))
    with pytest.raises(SteeringError) as refused:
        doing.change_policy("blind", {"min_clients": 3})
    assert str(refused.value).endswith(f": 1 problem\n  min_clients: {too_few_for_sums(sealed, 3)}")
    assert "a sum of fewer than 4 devices reveals too much of each one: set min_clients to 4 or more" in str(
        refused.value
    )
    for federation, least in (("blind", 4), ("casting", 3)):
        assert doing.change_policy(federation, {"min_clients": least}).policy.min_clients == least


def test_a_change_that_is_made_already_is_repeated_without_harm_and_a_new_reason_takes_over(doing: Operations) -> None:
    doing.store.add_device("casting", "cc" * 32, 1.0)
    doing.store.set_status("casting", FederationStatus.CREATED, "")
    with pytest.raises(SteeringError, match="has not been started; start it with `fedcg federation start casting"):
        doing.pause("casting")
    assert [doing.start("casting").status for _ in range(2)] == [FederationStatus.RUNNING] * 2
    changes: tuple[Callable[..., Any], ...] = (doing.pause, doing.stop)
    for change in changes:
        reasons = [change("casting", reason).status_reason for reason in ("first", "", "second")]
        assert reasons == ["first", "first", "second"]
    doing.store.add_device("a", "aa" * 32, 1.0)
    disabled = [doing.disable("a", reason) for reason in ("first", "", "second")]
    assert [each.disabled_because for each in disabled] == ["first", "first", "second"]
    assert len({each.disabled_at for each in disabled}) == 1
    assert [doing.archive("casting").status for _ in range(2)] == [FederationStatus.ARCHIVED] * 2
    with pytest.raises(SteeringError, match="was already started; it is archived"):
        doing.start("casting")
    with pytest.raises(SteeringError, match=r"casting was archived \(second\); `fedcg"):
        doing.resume("casting")
    with pytest.raises(SteeringError, match="casting ended; `fedcg federation extend casting --rounds N` adds rounds"):
        doing.change_policy("casting", {"rounds": 80})
    assert doing.extend("casting", 1).status is FederationStatus.RUNNING
    for refused in (doing.disable, doing.pause, doing.stop):
        with pytest.raises(SteeringError, match="the reason has 5000 characters; write at most 300"):
            refused("casting", "x" * 5000)


def test_a_federation_that_is_finished_is_changed_by_more_rounds_alone(home: Home, doing: Operations) -> None:
    add_federation(home, "over", spec=tiny_spec(), policy=policy_of(1, 2))
    first = doing.store.aggregates("over")[0]
    doing.store.add_device("a", "aa" * 32, 1.0)
    doing.store.open_attempt("over", RoundAttempt(1, 1), first.artifact, frozenset({"a"}), 1.0, 2.0)
    doing.store.close_attempt(replace(first, round=1, attempt=1))
    refused: tuple[Callable[[str], Any], ...] = (doing.stop, doing.pause, doing.resume)
    for change in refused:
        with pytest.raises(SteeringError, match=r"over is finished: .*`fedcg federation extend over --rounds N`"):
            change("over")
    with pytest.raises(SteeringError, match="over ended; `fedcg federation extend over --rounds N` adds rounds"):
        doing.change_policy("over", {"rounds": 9})
    assert doing.change_policy("over", {"rounds": 1, "deadline_s": 90}).policy.rounds == 1
    assert doing.extend("over", 2).policy.rounds == 3
    doing.stop("over")
    doing.store.open_attempt("over", RoundAttempt(2, 2), first.artifact, frozenset({"a"}), 1.0, 2.0)
    doing.store.fail_attempt("over", RoundAttempt(2, 2), "too few", 3.0)
    assert doing.extend("over", 2).policy.rounds == 3
    assert doing.store.federation("over").first_attempt == 3, "its failed attempts count anew: it doesn't stall at once"


def test_devices_are_forgotten_where_sums_are_exact_and_with_one_more_round_where_none_would_follow(
    home: Home, doing: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_federation(home, "exact", policy=policy_of(2, 2))
    for device in "abc":
        doing.store.add_device(device, 2 * device * 32, 1.0)
    with pytest.raises(SteeringError, match=r"trains weights \(fedcg\), .* can't be removed.*`fedcg device disable`"):
        doing.forget("exact", ["a"])
    monkeypatch.setattr(FederationSpec, "is_exact", True)
    with pytest.raises(NotFoundError, match="no device 'nobody'"):
        doing.forget("exact", ["a", "nobody"])
    first = doing.store.aggregates("exact")[0]

    def close(number: int) -> None:
        at = RoundAttempt(number, number)
        doing.store.open_attempt("exact", at, first.artifact, frozenset({"a"}), 1.0, 2.0)
        doing.store.close_attempt(replace(first, round=at.round, attempt=at.attempt))

    def forgotten(*devices: str) -> tuple[str, int]:
        record = doing.forget("exact", devices)
        assert record.status is FederationStatus.RUNNING
        return record.forgotten, record.policy.rounds

    close(1)
    assert forgotten("b") == ("b", 2), "another round follows anyway"
    close(2)
    assert forgotten("a", "b") == ("a b", 3), "it was over"
    assert forgotten("a") == ("a b", 3), "repeated"
    doing.stop("exact")
    assert forgotten("c") == ("a b c", 3), "it was stopped"
    events = [json.loads(line) for line in home.events_file.read_text().splitlines()]
    assert [event["clients"] for event in events if event["event"] == "forgotten"] == [["b"], ["a"], ["c"]]


def test_labels_site_and_note_of_a_device_change_only_as_far_as_they_are_named_and_valid(doing: Operations) -> None:
    doing.store.add_device("a", "aa" * 32, 1.0)
    doing.describe("a", {"add_labels": ["north", "pilot"], "site": "hall 3", "note": "two\nlines"})
    found = doing.describe("a", {"remove_labels": ["pilot", "none"], "add_labels": ["b"]})
    assert (found.site, found.note, doing.store.register.labels()) == ("hall 3", "two\\nlines", {"a": ["b", "north"]})
    doing.describe("a", {"labels": [str(number) for number in range(16)], "site": ""})
    wrong = {"add_labels": ["North"], "site": "x" * 65, "note": "x" * 501, "lable": "x"}
    with pytest.raises(SteeringError, match=r"description of a: 4 problems(.|\n)*lable: there is no such setting"):
        doing.describe("a", wrong)
    with pytest.raises(SteeringError, match="a would have 17 labels; remove some, at most 16 remain"):
        doing.describe("a", {"add_labels": ["more"], "site": "hall 4"})
    with pytest.raises(NotFoundError):
        doing.describe("b", {"site": "hall 4"})
    assert doing.describe("a", {}).site == ""
    assert len(doing.store.register.labels("a")["a"]) == 16
    told = [each for each in read_events(doing.home.events_file) if each["event"] == "device_described"]
    assert [each["changed"] for each in told] == [["labels", "site", "note"], ["labels"], ["labels", "site"]]


def test_a_device_that_is_no_member_or_never_was_is_neither_disabled_nor_enabled_nor_readmitted(
    doing: Operations,
) -> None:
    doing.store.add_device("b", "bb" * 32, 1.0)
    doing.revoke_device("b", "stolen")
    changes: tuple[Callable[[str], Any], ...] = (doing.disable, doing.enable, doing.readmit)
    for change in changes:
        with pytest.raises(SteeringError, match="b is not enrolled; it is revoked"):
            change("b")
        with pytest.raises(NotFoundError, match="no device 'nobody'"):
            change("nobody")


KEY = (FEDERATION, RoundAttempt(2, 1))


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    made = make_world(clients=("a", "b", "c"))
    for device in made.devices.values():
        device.silent = True
    return made


def waiting_for_c(world: World, running: RunningService) -> None:
    """Round 2 is open with all three, and only c has not delivered."""
    for name in ("a", "b"):
        world.devices[name].start()
    wait_until(lambda: running.service.state.phase is Phase.COLLECTING, "round 1 is open")
    world.devices["c"].start()
    wait_until(lambda: len(running.service.state.online) == 3, "all are online")
    for name in ("a", "b"):
        world.devices[name].silent = False
        world.devices[name].act()
    wait_until(lambda: running.service.state.round == 2 and running.service.state.outstanding == {"c"}, "c is missing")


def revoke(world: World, device: str) -> None:
    assert world.store.register.end_membership(device, DeviceState.REVOKED, "stolen", time.time())


def test_a_round_waits_for_no_revoked_device_whose_messages_are_refused_and_which_is_not_invited(world: World) -> None:
    with RunningService(world) as running:
        waiting_for_c(world, running)
        revoke(world, "c")
        assert world.wait_event("departed")["client"] == "c"
        wait_until(lambda: "c" not in running.service.state.online, "it is gone")
        invites, refused = len(world.devices["c"].of(Invite)), running.service.refusals.get("forged", 0)
        world.devices["c"].hello()
        wait_until(lambda: running.service.refusals.get("forged", 0) > refused, "its hello is refused")
        assert "c" not in running.service.state.online
        assert len(world.devices["c"].of(Invite)) == invites
        world.wait_event("finished")
        assert world.events("distilling")[-1]["clients"] == ["a", "b"]
    stored = {person.client: person.state for person in world.store.participants(*KEY)}
    assert stored["c"] is ParticipantState.DECLINED


def test_who_departed_while_no_coordinator_ran_holds_up_no_round_afterwards(world: World) -> None:
    with RunningService(world) as running:
        waiting_for_c(world, running)
        running.stop()
    revoke(world, "c")
    with RunningService(world):
        world.wait_event("finished")
        assert world.events("distilling")[-1]["clients"] == ["a", "b"]
