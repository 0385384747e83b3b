"""What an operator changes while a federation runs: hold, release, stop, extend, and which clients are invited."""

import pytest

from coordinator.rounds.engine import Opening, Phase, RoundState
from coordinator.rounds.signals import (
    AggregateStored,
    AggregationFailed,
    Barred,
    CameOnline,
    Command,
    Distil,
    FailAttempt,
    Finish,
    MoveDeadline,
    OpenAttempt,
    Paused,
    PolicyChanged,
    Resumed,
    Stall,
    Stopped,
    UpdateRefused,
    UpdateStored,
)
from fedcg.learning.spec import RoundPolicy
from fedcg.wire.messages.schemas import RoundAttempt
from tests.support.coordinator.engine import play

POLICY = RoundPolicy(rounds=2, min_cohort=1, min_clients=2, max_attempts=1, deadline_s=100.0)


def opened(clients: str = "ab", policy: RoundPolicy = POLICY) -> RoundState:
    return play(RoundState(policy), Paused("set-up"), *map(CameOnline, clients), Resumed())[0]


def closed(state: RoundState) -> tuple[RoundState, list[Command]]:
    stored = [UpdateStored(state.round, state.attempt, client) for client in sorted(state.participants)]
    return play(state, *stored, AggregateStored(state.round, state.attempt))


def test_a_paused_federation_ends_its_attempt_and_opens_no_other_one() -> None:
    state, commands = play(opened(), Paused("maintenance"))
    assert (state.phase, commands) == (Phase.COLLECTING, [])
    state, commands = closed(state)
    assert commands == [Distil(1, 1, ("a", "b"))]
    assert (state.phase, state.round, state.reason) == (Phase.PAUSED, 2, "maintenance")
    assert play(state, Paused("a better reason"))[0].reason == "a better reason"
    state, commands = play(state, Resumed())
    assert commands[0] == OpenAttempt(2, 1, frozenset("ab"), 100.0)


def test_a_stalled_federation_is_resumed_without_a_restart_and_counts_failures_anew() -> None:
    state, commands = play(opened(), AggregationFailed(1, 1, "no memory"))
    assert isinstance(commands[-1], Stall)
    state, commands = play(state, Resumed())
    assert commands[0] == OpenAttempt(1, 2, frozenset("ab"), 100.0)
    assert state.first_attempt == 2


def test_a_stopped_federation_fails_its_attempt_and_ends_with_the_last_aggregate() -> None:
    state, commands = play(opened(), Stopped("enough"))
    assert commands == [FailAttempt(1, 1, "enough", 2), Finish()]
    assert (state.phase, state.reason) == (Phase.FINISHED, "enough")
    assert play(state, Stopped("again"), CameOnline("c"))[1] == []


def test_a_shorter_deadline_counts_from_the_change_and_a_longer_one_from_the_next_attempt() -> None:
    for deadline_s, expected in ((20.0, 70.0), (1000.0, 100.0)):
        state, commands = play(opened(), PolicyChanged(POLICY.model_copy(update={"deadline_s": deadline_s})), now=50.0)
        assert commands == [MoveDeadline(1, 1, expected)]
        assert state.deadline_at == expected


def test_a_lower_quorum_can_close_the_open_attempt() -> None:
    state, _ = play(
        opened("abc", POLICY.model_copy(update={"min_clients": 3})), UpdateStored(1, 1, "a"), UpdateStored(1, 1, "b")
    )
    _, commands = play(state, PolicyChanged(POLICY), UpdateRefused(1, 1, "c"))
    assert commands[-1] == Distil(1, 1, ("a", "b"))


def test_barred_clients_are_not_invited_even_when_the_quorum_needs_them() -> None:
    state, commands = play(RoundState(POLICY), Barred({"b": "disabled"}), CameOnline("a"), CameOnline("b"))
    assert commands == []
    state, commands = play(state, CameOnline("c"))
    assert commands[0] == OpenAttempt(1, 1, frozenset("ac"), 100.0)


@pytest.mark.parametrize(
    ("fraction", "most", "over", "invited", "wanted"),
    [
        (1.0, None, 0.0, 10, 10),
        (0.5, None, 0.0, 5, 5),
        (0.1, None, 0.0, 2, 2),
        (1.0, 4, 0.0, 4, 4),
        (0.5, None, 0.4, 7, 5),
    ],
)
def test_how_many_are_invited_and_how_many_updates_close_the_attempt(
    fraction: float, most: int | None, over: float, invited: int, wanted: int
) -> None:
    policy = POLICY.model_copy(update={"fraction": fraction, "max_clients": most, "over_selection": over})
    state = opened("abcdefghij", policy)
    assert len(state.participants) == invited
    clients = sorted(state.participants)
    state, commands = play(state, *(UpdateStored(1, 1, client) for client in clients[: wanted - 1]))
    assert commands == []
    _, commands = play(state, UpdateStored(1, 1, clients[wanted - 1]))
    assert commands == [Distil(1, 1, tuple(clients[:wanted]))]


def test_the_choice_of_clients_changes_with_the_attempt_and_with_the_secret_and_is_repeatable() -> None:
    policy, one, two = (
        POLICY.model_copy(update={"fraction": 0.3}),
        Opening(selection_key=b"one"),
        Opening(selection_key=b"two"),
    )
    clients = [f"client-{number}" for number in range(20)]
    choices = [one.invited(policy, clients, RoundAttempt(number, 1)) for number in range(1, 40)]
    assert choices == [one.invited(policy, clients[::-1], RoundAttempt(number, 1)) for number in range(1, 40)]
    assert {len(choice) for choice in choices} == {6}
    assert set().union(*choices) == set(clients)
    assert choices[0] != two.invited(policy, clients, RoundAttempt(1, 1))


def test_nothing_is_merged_from_fewer_than_the_cohort() -> None:
    policy = POLICY.model_copy(update={"min_clients": 1, "min_cohort": 3})
    state, commands = play(RoundState(policy), CameOnline("a"), CameOnline("b"))
    assert commands == []
    state, _ = play(state, CameOnline("c"), UpdateStored(1, 1, "a"), UpdateStored(1, 1, "b"))
    _, commands = play(state, UpdateRefused(1, 1, "c"))
    assert commands[0] == FailAttempt(
        1, 1, "1 of 3 clients declined, were rejected or are gone (c); 3 updates are needed"
    )
