"""Where a federation stands, in words that mean one thing each: an operator pauses it, failed attempts stall it."""

import time

import pytest

from coordinator.facts.federations import current_round
from coordinator.facts.known import Known
from coordinator.facts.problems import open_problems
from coordinator.rounds.records import FederationStatus, ParticipantState, UpdateRecord
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from tests.support.coordinator.federations import Federations
from tests.support.coordinator.world import MakeWorld, World
from tests.support.page.crowds import add_crowd
from tests.support.waiting import wait_until


def known_of(world: World) -> Known:
    return Known(world.store, lambda record: world.spec, world.root)


def test_a_paused_federation_is_paused_where_no_coordinator_runs_either(make_world: MakeWorld) -> None:
    world = make_world(rounds=9, clients=())
    world.store.set_status("tiny", FederationStatus.PAUSED, "cleaning")
    found = current_round(known_of(world), "tiny")
    assert (found.phase, found.reason, found.waits_for) == ("paused", "cleaning", "")


def test_a_pause_while_a_round_is_open_is_what_will_be_and_has_no_end(make_world: MakeWorld) -> None:
    world = make_world(rounds=9, clients=())
    add_crowd(world.store, "tiny", 4, 2, time.time())
    world.store.set_status("tiny", FederationStatus.PAUSED, "cleaning")
    found = current_round(known_of(world), "tiny")
    assert (found.phase, found.reason) == ("collecting", "it pauses when this round is over: cleaning")
    assert (found.round_s, found.ends_at) == (480.0, None)


def test_a_federation_that_is_only_created_waits_for_its_start(make_world: MakeWorld) -> None:
    world = make_world(clients=())
    world.store.set_status("tiny", FederationStatus.CREATED, "")
    assert current_round(known_of(world), "tiny").waits_for == "its start: `fedcg federation start tiny`"


def test_failed_attempts_stall_it_which_is_a_problem_that_a_resume_ends(make_world: MakeWorld) -> None:
    world = make_world(clients=("a",), max_attempts=1)
    world.store.open_attempt("tiny", RoundAttempt(1, 1), "0" * 64, frozenset({"a"}), 1.0, 2.0)
    world.store.fail_attempt("tiny", RoundAttempt(1, 1), "no update came", 3.0)
    found = current_round(known_of(world), "tiny")
    assert (found.status, found.phase, found.ends_at) == ("running", "stalled", None)
    (problem,) = (each for each in open_problems(known_of(world)) if each.subject == "tiny")
    assert (problem.kind, problem.is_severe) == ("stalled", True)
    assert "`fedcg federation resume tiny`" in problem.remedy


@pytest.mark.parametrize(("min_cohort", "lower"), [(1, "min_clients=N"), (2, "min_clients=N min_cohort=N")])
def test_too_few_devices_have_a_remedy_that_lowers_what_asks_for_more(
    make_world: MakeWorld, min_cohort: int, lower: str
) -> None:
    made = Federations(make_world(clients=("a", "b"), min_clients=2))
    made.operations.change_policy("tiny", {"min_cohort": min_cohort})
    with made.running():
        made.devices["tiny"][0].start()
        services = made.coordinator.services
        wait_until(lambda: "tiny" in services and len(services["tiny"].state.online) == 1, "one of two is online")
        known = Known(made.world.store, lambda record: made.world.spec, made.world.root, services)
        (problem,) = (each for each in open_problems(known) if each.kind == "too few devices")
        assert f"`fedcg federation set tiny {lower}`" in problem.remedy


def test_a_rejected_update_and_a_declined_round_are_different_problems_with_remedies_of_their_own(
    make_world: MakeWorld,
) -> None:
    store = (world := make_world(clients=("a", "b"))).store
    store.open_attempt("tiny", RoundAttempt(1, 1), "0" * 64, frozenset({"a", "b"}), 1.0, 2.0)
    store.answer("tiny", RoundAttempt(1, 1), "a", ParticipantState.ACCEPTED, "")
    store.answer("tiny", RoundAttempt(1, 1), "b", ParticipantState.DECLINED, "no_data")
    store.end_update(UpdateRecord("tiny", 1, 1, "a", "1" * 64, 1, Outcome.REJECTED, "it holds NaN", None, 1.0, 2.0))
    found = {each.device: each for each in open_problems(known_of(world)) if each.device}
    assert (found["a"].kind, found["a"].what) == (
        "update rejected",
        "update rejected in round 1 of tiny: it holds NaN",
    )
    assert "`fedcg device revoke`" in found["a"].remedy
    assert (found["b"].kind, found["b"].what) == ("no data", "declined round 1 of tiny: no data")
