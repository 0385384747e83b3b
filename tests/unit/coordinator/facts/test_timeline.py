"""The stages of clients in a round attempt, from times that are worked out by hand."""

from dataclasses import replace

import pytest

from coordinator.errors import NotFoundError
from coordinator.facts.timeline import NO_HEALTH, ClientTimeline, Stage, round_timeline
from coordinator.rounds.records import AggregateRecord, ParticipantState, UpdateRecord
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from tests.support.coordinator.world import MakeWorld, World

AT, CLIENTS = RoundAttempt(1, 1), "abcdefgh"


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """Round 1: opened at 100, and open."""
    made = make_world(rounds=9, clients=tuple(CLIENTS))
    made.store.open_attempt("tiny", AT, "0" * 64, frozenset(CLIENTS), 100.0, 300.0)
    return made


def fill(world: World) -> None:
    """Answers until 140, updates until 170, merge from 200 to 220."""
    store = world.store
    for client in "abcefg":  # f reconnects during its training, and accepts again
        at = 140.0 if client == "f" else 102.0
        store.answer("tiny", AT, client, ParticipantState.ACCEPTED, answered_at=at)
    for client in "aefg":
        store.started_training("tiny", AT, client, 110.0)
        store.started_training("tiny", AT, client, 120.0)
    store.answer("tiny", AT, "d", ParticipantState.DECLINED, "no_data", answered_at=130.0)
    for client in "abc":
        store.end_update(UpdateRecord("tiny", 1, 1, client, "1" * 64, 1, Outcome.ACCEPTED, "", None, 150.0, 160.0))
    store.end_update(UpdateRecord("tiny", 1, 1, "e", "1" * 64, 1, Outcome.REJECTED, "NaN", None, 155.0, 170.0))
    store.end_update(UpdateRecord("tiny", 1, 1, "g", "1" * 64, 1, Outcome.ACCEPTED, "", None, 150.0, 160.0))
    store.start_distilling("tiny", AT, 200.0)
    store.weigh("tiny", AT, {"a": 9, "b": 9, "c": 9, "g": 0}, reasons={"g": "too long"})
    store.close_attempt(AggregateRecord("tiny", 1, 1, "2" * 64, 1, "e" * 64, 220.0))


def course(found: ClientTimeline) -> list[tuple[str, float, float]]:
    return [(each.stage.value, each.start, each.end) for each in found.stages]


def test_each_client_of_a_closed_attempt_has_its_stages_and_what_is_unknown_about_them(world: World) -> None:
    fill(world)
    found = round_timeline(world.known(), "tiny")
    assert found is not None
    assert (found.round, found.attempt, found.attempts, found.state) == (1, 1, 1, "closed")
    assert (found.opened_at, found.ends_at) == (100.0, 220.0)
    clients = {each.client: each for each in found.clients}
    accepted, delivered = ("invited", 100.0, 102.0), [("upload", 150.0, 160.0), ("waiting", 160.0, 200.0)]
    merge, split = ("merge", 200.0, 220.0), [("download", 102.0, 110.0)]
    expected = {
        "a": [accepted, *split, ("training", 110.0, 150.0), *delivered, merge],
        "b": [accepted, ("download and training", 102.0, 150.0), *delivered, merge],
        "c": [accepted, ("download and training", 102.0, 150.0), *delivered, merge],
        "d": [("invited", 100.0, 130.0)],
        "e": [accepted, *split, ("training", 110.0, 155.0), ("upload", 155.0, 170.0)],
        "f": [("invited", 100.0, 110.0), ("training", 110.0, 200.0)],
        "g": [accepted, *split, ("training", 110.0, 150.0), delivered[0], ("waiting", 160.0, 220.0)],  # quarantine
        "h": [("invited", 100.0, 200.0)],
    }
    assert {client: course(each) for client, each in clients.items()} == expected
    assert {client: each.unknown for client, each in clients.items() if each.unknown} == dict.fromkeys("bc", NO_HEALTH)
    assert (clients["d"].outcome, clients["d"].reason) == ("declined", "no data")
    assert [clients[client].outcome for client in "aefh"] == ["accepted", "rejected", "no update", "no update"]
    assert clients["a"].seconds["training"] == 40.0
    assert [each.client for each in found.clients] == ["f", "h", "e", "a", "b", "c", "g", "d"], "slowest first"


def test_an_open_attempt_lasts_until_now_and_others_are_chosen_by_number(world: World) -> None:
    known = replace(world.known(), now=125.0)
    world.store.answer("tiny", AT, "a", ParticipantState.ACCEPTED, answered_at=105.0)
    world.store.started_training("tiny", AT, "a", 115.0)
    found = round_timeline(known, "tiny")
    assert found is not None
    assert (found.state, found.ends_at) == ("collecting", 125.0)
    (first,) = (each for each in found.clients if each.client == "a")
    assert course(first)[-1] == (Stage.TRAINING.value, 115.0, 125.0)
    assert first.outcome == "no update yet"
    world.store.fail_attempt("tiny", AT, "the line was closed", 130.0)
    world.store.open_attempt("tiny", RoundAttempt(1, 2), "0" * 64, frozenset("a"), 131.0, 300.0)
    later, earlier = round_timeline(known, "tiny"), round_timeline(known, "tiny", 1, 1)
    assert later is not None
    assert earlier is not None
    assert (later.attempt, later.attempts, earlier.reason) == (2, 2, "the line was closed")
    for place, what in (((2, None), "round 2 of tiny"), ((1, 3), "attempt 3 of round 1 of tiny")):
        with pytest.raises(NotFoundError, match=f"{what} has not been opened yet"):
            round_timeline(known, "tiny", *place)


def test_a_federation_without_an_attempt_has_no_timeline(make_world: MakeWorld) -> None:
    assert round_timeline(make_world().known(), "tiny") is None
