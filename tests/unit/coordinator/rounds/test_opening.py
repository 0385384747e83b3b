"""When attempts open, how long they last, and which failed ones count; by the round engine's own events."""

from dataclasses import replace

import pytest

from coordinator.rounds.engine import (
    LEAST_SHARE,
    RETRY_MAX_S,
    WAITS_FOR_OWNERS,
    Opening,
    Phase,
    RoundState,
    shares_of,
    standing_reason,
)
from coordinator.rounds.signals import (
    Accepted,
    AggregationFailed,
    Approval,
    CameOnline,
    Distil,
    Expected,
    FailAttempt,
    LinkChanged,
    MoveDeadline,
    OpenAttempt,
    Restarted,
    Stall,
    Tick,
    UpdateRefused,
    UpdateStored,
    WentOffline,
)
from fedcg.learning.spec import RoundPolicy
from tests.support.coordinator.engine import play

POLICY = RoundPolicy(rounds=2, min_cohort=1, min_clients=2, max_attempts=2, deadline_s=100.0)
PATIENT, HASTY = RoundState(POLICY, opening=Opening(gather_s=5.0, retry_s=10.0)), RoundState(POLICY)


def opened(state: RoundState = HASTY) -> RoundState:
    """The first attempt, of a and b, opened at 1000."""
    return play(state, CameOnline("a"), CameOnline("b"), now=1000.0)[0]


def opens(state: RoundState, now: float) -> bool:
    return any(isinstance(command, OpenAttempt) for command in play(state, Tick(), now=now)[1])


# ------------------------------------------------------------------ gathering


def test_a_round_waits_for_further_devices_until_none_has_come_for_a_while() -> None:
    expected = Expected(frozenset("abcd"))
    state, commands = play(PATIENT, expected, CameOnline("a"), CameOnline("b"), now=1000.0)
    assert commands == []
    state, commands = play(state, CameOnline("c"), now=1004.9)
    assert commands == []
    assert not opens(state, 1009.8)
    _, commands = play(state, Tick(), now=1009.9)
    assert commands[0] == OpenAttempt(1, 1, frozenset("abc"), 1109.9)


def test_a_round_opens_at_once_when_every_enrolled_device_is_online() -> None:
    state, commands = play(PATIENT, Expected(frozenset("abc")), CameOnline("a"), CameOnline("b"), now=1000.0)
    assert commands == []
    assert isinstance(play(state, CameOnline("c"), now=1000.1)[1][0], OpenAttempt)
    assert isinstance(play(state, Expected(frozenset("ab")), now=1000.1)[1][0], OpenAttempt)  # the third was revoked


def test_a_device_that_comes_and_goes_does_not_hold_up_a_round() -> None:
    state, _ = play(PATIENT, Expected(frozenset("abcd")), CameOnline("a"), CameOnline("b"), now=1000.0)
    state, _ = play(state, CameOnline("c"), WentOffline("c"), now=1002.0)
    state, _ = play(state, CameOnline("c"), WentOffline("c"), now=1006.0)
    assert opens(state, 1007.0)


def test_the_next_round_does_not_gather_again() -> None:
    state, _ = play(PATIENT, Expected(frozenset("abc")), CameOnline("a"), CameOnline("b"), now=1000.0)
    state, _ = play(state, Tick(), now=1005.0)
    assert state.phase is Phase.COLLECTING
    following = replace(state, phase=Phase.WAITING, round=2, participants=frozenset())
    assert opens(following, 1006.0)


# ------------------------------------------------------------------ failed attempts


def test_the_pause_after_failed_attempts_grows_up_to_its_bound() -> None:
    assert [PATIENT.opening.pause_s(failures) for failures in (0, 1, 2, 3)] == [0.0, 10.0, 20.0, 40.0]
    assert PATIENT.opening.pause_s(100_000) == RETRY_MAX_S


def test_the_next_attempt_opens_after_a_pause_with_whoever_is_online_then() -> None:
    state, commands = play(opened(PATIENT), UpdateRefused(1, 1, "a"), CameOnline("c"), now=1001.0)
    assert [type(command) for command in commands] == [FailAttempt]
    assert not opens(state, 1010.9)
    assert play(state, Tick(), now=1011.0)[1][0] == OpenAttempt(1, 2, frozenset("abc"), 1111.0)
    assert opens(state, 990.0)  # the clock was set back: no pause of years


def test_declined_and_rejected_attempts_and_failed_merges_pause_the_federation() -> None:
    state, _ = play(opened(), UpdateRefused(1, 1, "a"), now=1001.0)
    state, commands = play(state, AggregationFailed(1, 2, "diverged"), now=1002.0)
    assert isinstance(commands[-1], Stall)
    assert play(state, CameOnline("c"), LinkChanged(up=False), LinkChanged(up=True), Tick(), now=9999.0)[1] == []


# ------------------------------------------------------------------ answers, and the deadline


def test_an_attempt_that_the_quorum_has_not_accepted_waits_on_and_names_who_is_missing() -> None:
    state, commands = play(opened(), Accepted(1, 1, "b"), Tick(), now=1100.0)
    told = "only 1 of 2 needed clients have answered; missing: a (no answer), b (still at work)"
    assert commands == [MoveDeadline(1, 1, 1200.0, told)]
    state, _ = play(state, Tick(), now=1200.0)
    assert (state.phase, state.attempt, state.deadline_at) == (Phase.COLLECTING, 1, 1300.0)


def test_the_deadline_counts_from_when_the_quorum_has_accepted() -> None:
    state, commands = play(opened(), Accepted(1, 1, "a"), now=1050.0)
    assert commands == []
    state, commands = play(state, Accepted(1, 1, "b"), now=1090.0)
    assert commands == [MoveDeadline(1, 1, 1190.0)]
    assert play(state, Accepted(1, 1, "b"), Accepted(1, 1, "z"), Accepted(1, 2, "a"), now=1095.0) == (state, [])
    assert play(state, Tick(), now=1189.0)[1] == []


def test_clients_that_are_too_slow_cost_attempts_that_count() -> None:
    state = opened()
    for attempt in (1, 2):
        state, _ = play(state, Accepted(1, attempt, "a"), Accepted(1, attempt, "b"), now=1000.0)
        state, commands = play(state, Tick(), now=2000.0)
    assert isinstance(commands[-1], Stall)
    assert "a (still at work)" in commands[-1].reason


@pytest.mark.parametrize("accepts", [True, False])
def test_an_attempt_whose_clients_are_offline_at_the_deadline_fails_and_does_not_count(*, accepts: bool) -> None:
    state = opened()
    for number in range(1, 6):
        accepted = [Accepted(1, number, client) for client in "ab" if accepts]
        state, _ = play(state, *accepted, WentOffline("b"), now=1000.0 * number)
        state, commands = play(state, Tick(), now=1000.0 * number + 100.0)
        assert commands == [FailAttempt(1, number, state.reason, number + 1)]
        assert "b (offline)" in state.reason
        state, commands = play(state, CameOnline("b"), now=1000.0 * (number + 1))
        assert isinstance(commands[0], OpenAttempt)


def test_an_attempt_without_answers_makes_way_for_one_with_the_devices_that_came_meanwhile() -> None:
    state, _ = play(opened(), CameOnline("c"), now=1050.0)
    state, commands = play(state, Tick(), now=1100.0)
    assert isinstance(commands[0], FailAttempt)
    assert commands[1] == OpenAttempt(1, 2, frozenset("abc"), 1200.0)
    assert state.first_attempt == 2  # it did not count


# ------------------------------------------------------------------ approval by the owners of devices


def test_missing_approvals_cost_no_attempt_however_late_they_come_and_the_state_names_all_who_owe_one() -> None:
    asked = (Approval(1, 1, "a", given=False), Approval(1, 1, "b", given=False))
    state, commands = play(opened(), *asked, now=1001.0)
    assert commands == []
    assert (state.label, state.phase, state.attempt) == (WAITS_FOR_OWNERS, Phase.COLLECTING, 1)
    assert "the owners of a, b have not approved" in standing_reason(state)
    for day in range(1, 40):
        state, commands = play(state, Tick(), now=1001.0 + 86400.0 * day)
        assert [type(command) for command in commands] == [MoveDeadline]
    for client in "ab":
        assert state.label == WAITS_FOR_OWNERS
        state, _ = play(state, Accepted(1, 1, client), now=5e6)
    assert (state.label, standing_reason(state), state.unapproved) == (Phase.COLLECTING.value, "", frozenset())
    state, commands = play(state, UpdateStored(1, 1, "b"), UpdateStored(1, 1, "a"), now=5e6)
    assert commands == [Distil(1, 1, ("a", "b"))]


def test_a_round_that_can_close_without_an_approval_does_and_one_that_comes_in_time_still_counts() -> None:
    online = (Expected(frozenset("abc")), CameOnline("a"), CameOnline("b"), CameOnline("c"))
    state, _ = play(PATIENT, *online, now=1000.0)
    asked, _ = play(state, Approval(1, 1, "c", given=False), UpdateStored(1, 1, "a"), now=1001.0)
    assert asked.label == Phase.COLLECTING.value
    assert play(asked, UpdateStored(1, 1, "b"))[1] == [Distil(1, 1, ("a", "b"))]
    approved, commands = play(asked, Accepted(1, 1, "c"), UpdateStored(1, 1, "b"))
    assert not any(isinstance(command, Distil) for command in commands), "c works on its update"
    assert play(approved, UpdateStored(1, 1, "c"))[1] == [Distil(1, 1, ("a", "b", "c"))]
    assert play(asked, Approval(1, 1, "c", given=True), UpdateStored(1, 1, "b"))[0].awaited == {"c"}


# ------------------------------------------------------------------ the link


def test_time_without_a_link_does_not_count_against_the_deadline() -> None:
    state, _ = play(opened(), Accepted(1, 1, "a"), Accepted(1, 1, "b"), LinkChanged(up=False), now=1040.0)
    state, commands = play(state, Tick(), now=1500.0)
    assert commands == []
    state, commands = play(state, LinkChanged(up=True), now=1500.0)
    assert commands == [MoveDeadline(1, 1, 1600.0, "no link to the broker for 460 s")]
    assert play(state, Tick(), now=1599.0)[1] == []
    assert isinstance(play(state, Tick(), now=1600.0)[1][0], FailAttempt)


def test_no_attempt_opens_without_a_link() -> None:
    state, commands = play(HASTY, LinkChanged(up=False), CameOnline("a"), CameOnline("b"), now=1000.0)
    assert commands == []
    assert isinstance(play(state, LinkChanged(up=True), now=1001.0)[1][0], OpenAttempt)


def test_after_a_restart_the_deadline_waits_for_the_link() -> None:
    state = replace(opened(), online=frozenset())
    state, _ = play(state, Restarted(), now=5000.0)
    assert play(state, Tick(), now=9000.0)[1] == []
    _, commands = play(state, LinkChanged(up=True), UpdateStored(1, 1, "a"), now=9000.0)
    assert commands == [MoveDeadline(1, 1, 9100.0, "no link to the broker for 4000 s")]


EQUAL_TIME = POLICY.model_copy(update={"pace": "equal-time"})


def test_with_equal_time_slow_clients_take_so_few_steps_that_they_end_with_the_median_one() -> None:
    # 10, 20, 40 and 100 s: the lower median is 20 s; 40 s take half of the steps, 100 s would take a fifth and take the least share.
    shares = shares_of(EQUAL_TIME, {"a": 10.0, "b": 20.0, "c": 40.0, "d": 100.0})
    assert shares == {"c": 0.5, "d": LEAST_SHARE}


@pytest.mark.parametrize("times", [{}, {"a": 30.0}, {"a": 30.0, "b": 30.0}], ids=["nothing known", "one", "alike"])
def test_nobody_takes_fewer_steps_where_nobody_is_slower(times: dict[str, float]) -> None:
    assert shares_of(EQUAL_TIME, times) == {}


def test_with_equal_steps_nobody_takes_fewer_however_slow() -> None:
    assert shares_of(POLICY, {"a": 1.0, "b": 1000.0}) == {}
