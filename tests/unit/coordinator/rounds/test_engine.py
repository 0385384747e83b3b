"""The round engine: what opens, closes, fails and pauses a round, what an operator changes; and that no order of events breaks its laws."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds.engine import (
    LEAST_SHARE,
    RESTART_GRACE_S,
    RETRY_MAX_S,
    WAITS_FOR_OWNERS,
    Opening,
    Phase,
    RoundState,
    shares_of,
    standing_reason,
    transition,
)
from coordinator.rounds.signals import (
    Accepted,
    AggregateStored,
    AggregationFailed,
    Approval,
    Barred,
    CameOnline,
    Departed,
    Distil,
    Event,
    Expected,
    FailAttempt,
    Invite,
    LinkChanged,
    MoveDeadline,
    OpenAttempt,
    Paused,
    PolicyChanged,
    Restarted,
    ResumeAttempt,
    Resumed,
    Stall,
    Stopped,
    Tick,
    UpdateRefused,
    UpdateStored,
    WentOffline,
)
from fedcg.learning.spec import RoundPolicy
from fedcg.wire.messages.schemas import RoundAttempt
from tests.support.coordinator.engine import play

CLIENTS = ("a", "b", "c", "d")
POLICY = RoundPolicy(rounds=2, min_cohort=1, min_clients=2, max_attempts=2, deadline_s=100.0)


def opened(*clients: str, policy: RoundPolicy = POLICY) -> RoundState:
    return play(RoundState(policy), *[CameOnline(client) for client in clients])[0]


def test_who_comes_later_joins_no_open_attempt_and_a_participant_is_invited_again_until_its_update_is_stored() -> None:
    state, commands = play(opened("a", "b"), CameOnline("c"), CameOnline("b"))
    assert state.participants == {"a", "b"}
    assert commands == [Invite(1, 1, "b")]
    assert play(state, UpdateStored(1, 1, "b"), CameOnline("b"))[1] == []


def test_an_update_that_came_before_its_device_departed_still_counts() -> None:
    _, commands = play(opened("a", "b"), UpdateStored(1, 1, "a"), Departed("a"), UpdateStored(1, 1, "b"))
    assert commands == [Distil(1, 1, ("a", "b"))]


def test_too_few_members_left_end_the_attempt() -> None:
    state, commands = play(opened("a", "b"), Departed("b"))
    assert isinstance(commands[0], FailAttempt)
    assert "or left" in commands[0].reason
    assert state.phase is Phase.WAITING


def test_a_decline_shrinks_what_is_waited_for() -> None:
    state = replace(opened("a", "b"), participants=frozenset("abc"))
    state, commands = play(state, UpdateStored(1, 1, "a"), UpdateRefused(1, 1, "b"), UpdateStored(1, 1, "c"))
    assert commands == [Distil(1, 1, ("a", "c"))]


def test_the_deadline_closes_the_attempt_with_the_quorum_and_fails_it_without() -> None:
    state = replace(opened("a", "b"), participants=frozenset("abc"))
    state, commands = play(state, UpdateStored(1, 1, "a"), Tick(), now=99.0)
    assert commands == []
    with_quorum, commands = play(state, UpdateStored(1, 1, "b"), now=99.5)
    assert commands == []
    assert play(with_quorum, Tick(), now=100.0)[1] == [Distil(1, 1, ("a", "b"))]
    working, _ = play(state, Accepted(1, 1, "b"))
    _, commands = play(working, Tick(), now=100.0)
    assert isinstance(commands[0], FailAttempt)
    assert "only 1 of 2 required updates" in commands[0].reason
    assert "b (still working), c (offline)" in commands[0].reason


def test_a_failed_attempt_is_followed_by_the_next_one_and_the_last_one_by_a_pause() -> None:
    state, commands = play(opened("a", "b"), UpdateRefused(1, 1, "a"))
    assert [type(command) for command in commands] == [FailAttempt, OpenAttempt, Invite, Invite]
    assert (state.phase, state.attempt) == (Phase.COLLECTING, 2)
    assert state.declined == state.updates == frozenset()
    state, commands = play(state, UpdateRefused(1, 2, "a"))
    assert [type(command) for command in commands] == [FailAttempt, Stall]
    assert state.phase is Phase.STALLED
    link = (LinkChanged(up=False), LinkChanged(up=True))
    assert play(state, Tick(), CameOnline("c"), *link, Restarted(), now=9999.0)[1] == []


def test_updates_that_cannot_be_merged_fail_the_attempt_even_while_others_still_come() -> None:
    state, commands = play(opened("a", "b"), AggregationFailed(1, 1, "diverged"))
    assert commands[0] == FailAttempt(1, 1, "diverged")
    assert state.attempt == 2
    assert play(state, AggregationFailed(1, 1, "diverged"))[1] == []


def test_events_of_another_attempt_and_of_strangers_change_nothing() -> None:
    state = opened("a", "b")
    for event in (UpdateStored(1, 2, "a"), UpdateStored(2, 1, "a"), UpdateStored(1, 1, "z"), AggregateStored(1, 1)):
        assert play(state, event) == (state, [])


def test_a_restart_goes_on_with_the_same_attempt_and_gives_it_time() -> None:
    state = replace(opened("a", "b"), online=frozenset())
    state, commands = play(state, Restarted(), now=5000.0)
    assert commands == [ResumeAttempt(1, 1, 5000.0 + min(RESTART_GRACE_S, POLICY.deadline_s))]
    assert play(state, CameOnline("a"), now=5001.0)[1] == [Invite(1, 1, "a")]


def test_a_restart_while_distilling_distils_the_same_updates_again() -> None:
    state, _ = play(opened("a", "b"), UpdateStored(1, 1, "a"), UpdateStored(1, 1, "b"))
    state, commands = play(replace(state, online=frozenset()), Restarted())
    assert commands == [ResumeAttempt(1, 1, 100.0), Distil(1, 1, ("a", "b"))]


events = st.one_of(
    st.builds(CameOnline, st.sampled_from(CLIENTS)),
    st.builds(WentOffline, st.sampled_from(CLIENTS)),
    st.builds(Departed, st.sampled_from(CLIENTS)),
    st.builds(UpdateStored, st.integers(1, 2), st.integers(1, 3), st.sampled_from(CLIENTS)),
    st.builds(UpdateRefused, st.integers(1, 2), st.integers(1, 3), st.sampled_from(CLIENTS)),
    st.just(Tick()),
    st.builds(Accepted, st.integers(1, 2), st.integers(1, 3), st.sampled_from(CLIENTS)),
    st.builds(Approval, st.integers(1, 2), st.integers(1, 3), st.sampled_from(CLIENTS), given=st.booleans()),
    st.builds(LinkChanged, st.booleans()),
    st.builds(Expected, st.frozensets(st.sampled_from(CLIENTS))),
    st.builds(AggregateStored, st.integers(1, 2), st.integers(1, 3)),
    st.builds(AggregationFailed, st.integers(1, 2), st.integers(1, 3), st.just("x")),
)
policies = st.builds(
    RoundPolicy.model_construct,  # also what no validator lets through
    rounds=st.integers(2, 3),
    min_clients=st.integers(1, 3),
    max_attempts=st.integers(1, 3),
    deadline_s=st.sampled_from([50.0, 100.0]),
    min_cohort=st.integers(1, 2),
    fraction=st.sampled_from([0.3, 0.5, 1.0]),
    max_clients=st.sampled_from([None, 2, 3]),
    over_selection=st.sampled_from([0.0, 0.5]),
)
steered = events | st.one_of(
    st.builds(PolicyChanged, policies),
    st.builds(Paused, st.just("the line is rebuilt")),
    st.just(Resumed()),
    st.builds(Stopped, st.just("the operator ended it")),
    st.builds(Barred, st.dictionaries(st.sampled_from(CLIENTS), st.just("disabled"))),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(steered, st.floats(0, 60)), max_size=60), st.binary(max_size=2))
def test_no_order_of_events_counts_twice_or_goes_back(script: list[tuple[Event, float]], selection_key: bytes) -> None:
    state, now = RoundState(POLICY, opening=Opening(selection_key=selection_key)), 0.0
    opened_attempts: list[tuple[int, int]] = []
    distilled: Counter[tuple[int, int]] = Counter()
    invited: dict[tuple[int, int], frozenset[str]] = {}
    stored: dict[tuple[int, int], set[str]] = {}
    for event, passed in script:
        now += passed
        before = state
        state, commands = transition(state, event, now)
        if isinstance(event, UpdateStored) and before.is_open(event.at):
            stored.setdefault((event.round, event.attempt), set()).add(event.client)
        assert not state.updates & state.declined
        quorum = state.policy.quorum
        assert state.updates | state.declined <= state.participants
        for command in commands:
            if isinstance(command, OpenAttempt):
                opened_attempts.append((command.round, command.attempt))
                invited[command.round, command.attempt] = command.participants
                assert len(command.participants) >= quorum
                assert not command.participants & state.barred.keys()
                assert not state.paused
            elif isinstance(command, Distil):
                key = (command.round, command.attempt)
                distilled[key] += 1
                assert len(command.clients) == len(set(command.clients)) >= quorum
                assert set(command.clients) <= invited[key] & stored[key]
            elif isinstance(command, Invite):
                assert command.client in invited[command.round, command.attempt]
    assert opened_attempts == sorted(set(opened_attempts))
    assert all(count == 1 for count in distilled.values())


@settings(max_examples=60, deadline=None)
@given(st.lists(steered, max_size=40))
def test_whatever_happened_devices_that_answer_bring_it_to_an_end(script: list[Event]) -> None:
    state = RoundState(POLICY)
    for event in script:
        state, _ = transition(state, event, 0.0)
    for event in (LinkChanged(up=True), Barred({}), Resumed()):
        state, _ = transition(state, event, 0.0)
    for _ in range(20):
        for client in CLIENTS:
            state, _ = transition(state, CameOnline(client), 0.0)
        for client in sorted(state.outstanding):
            state, _ = transition(state, UpdateStored(state.round, state.attempt, client), 0.0)
        state, _ = transition(state, AggregateStored(state.round, state.attempt), 0.0)
    assert state.phase in (Phase.FINISHED, Phase.STALLED)


PATIENT, HASTY = RoundState(POLICY, opening=Opening(gather_s=5.0, retry_s=10.0)), RoundState(POLICY)


def opened_late(state: RoundState = HASTY) -> RoundState:
    """The first attempt, of a and b, opened at 1000."""
    return play(state, CameOnline("a"), CameOnline("b"), now=1000.0)[0]


def opens(state: RoundState, now: float) -> bool:
    return any(isinstance(command, OpenAttempt) for command in play(state, Tick(), now=now)[1])


# ------------------------------------------------------------------ gathering


def test_a_round_waits_for_further_devices_until_none_has_come_for_a_while() -> None:
    state, commands = play(PATIENT, Expected(frozenset("abcd")), CameOnline("a"), CameOnline("b"), now=1000.0)
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
    assert opens(replace(state, phase=Phase.WAITING, round=2, participants=frozenset()), 1006.0)


# ------------------------------------------------------------------ failed attempts


def test_the_pause_after_failed_attempts_grows_up_to_its_bound() -> None:
    assert [PATIENT.opening.pause_s(failures) for failures in (0, 1, 2, 3)] == [0.0, 10.0, 20.0, 40.0]
    assert PATIENT.opening.pause_s(100_000) == RETRY_MAX_S


def test_the_next_attempt_opens_after_a_pause_with_whoever_is_online_then() -> None:
    state, commands = play(opened_late(PATIENT), UpdateRefused(1, 1, "a"), CameOnline("c"), now=1001.0)
    assert [type(command) for command in commands] == [FailAttempt]
    assert not opens(state, 1010.9)
    assert play(state, Tick(), now=1011.0)[1][0] == OpenAttempt(1, 2, frozenset("abc"), 1111.0)
    assert opens(state, 990.0)  # the clock was set back: no pause of years


# ------------------------------------------------------------------ answers, and the deadline


def test_an_attempt_that_the_quorum_has_not_accepted_waits_on_and_names_who_is_missing() -> None:
    state, commands = play(opened_late(), Accepted(1, 1, "b"), Tick(), now=1100.0)
    told = "only 1 of 2 required clients have answered; missing: a (no answer), b (still working)"
    assert commands == [MoveDeadline(1, 1, 1200.0, told)]
    state, _ = play(state, Tick(), now=1200.0)
    assert (state.phase, state.attempt, state.deadline_at) == (Phase.COLLECTING, 1, 1300.0)


def test_the_deadline_counts_from_when_the_quorum_has_accepted() -> None:
    state, commands = play(opened_late(), Accepted(1, 1, "a"), now=1050.0)
    assert commands == []
    state, commands = play(state, Accepted(1, 1, "b"), now=1090.0)
    assert commands == [MoveDeadline(1, 1, 1190.0)]
    assert play(state, Accepted(1, 1, "b"), Accepted(1, 1, "z"), Accepted(1, 2, "a"), now=1095.0) == (state, [])
    assert play(state, Tick(), now=1189.0)[1] == []


def test_clients_that_are_too_slow_cost_attempts_that_count() -> None:
    state = opened_late()
    for attempt in (1, 2):
        state, _ = play(state, Accepted(1, attempt, "a"), Accepted(1, attempt, "b"), now=1000.0)
        state, commands = play(state, Tick(), now=2000.0)
    assert isinstance(commands[-1], Stall)
    assert "a (still working)" in commands[-1].reason


@pytest.mark.parametrize("accepts", [True, False])
def test_an_attempt_whose_clients_are_offline_at_the_deadline_fails_and_does_not_count(*, accepts: bool) -> None:
    state = opened_late()
    for number in range(1, 6):
        accepted = [Accepted(1, number, client) for client in "ab" if accepts]
        state, _ = play(state, *accepted, WentOffline("b"), now=1000.0 * number)
        state, commands = play(state, Tick(), now=1000.0 * number + 100.0)
        assert commands == [FailAttempt(1, number, state.reason, number + 1)]
        assert "b (offline)" in state.reason
        state, commands = play(state, CameOnline("b"), now=1000.0 * (number + 1))
        assert isinstance(commands[0], OpenAttempt)


def test_an_attempt_without_answers_makes_way_for_one_with_the_devices_that_came_meanwhile() -> None:
    state, _ = play(opened_late(), CameOnline("c"), now=1050.0)
    state, commands = play(state, Tick(), now=1100.0)
    assert isinstance(commands[0], FailAttempt)
    assert commands[1] == OpenAttempt(1, 2, frozenset("abc"), 1200.0)
    assert state.first_attempt == 2  # it did not count


# ------------------------------------------------------------------ approval by the owners of devices


def test_missing_approvals_cost_no_attempt_however_late_they_come_and_the_state_names_all_who_owe_one() -> None:
    asked = (Approval(1, 1, "a", given=False), Approval(1, 1, "b", given=False))
    state, commands = play(opened_late(), *asked, now=1001.0)
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
    state, _ = play(opened_late(), Accepted(1, 1, "a"), Accepted(1, 1, "b"), LinkChanged(up=False), now=1040.0)
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
    state = replace(opened_late(), online=frozenset())
    state, _ = play(state, Restarted(), now=5000.0)
    assert play(state, Tick(), now=9000.0)[1] == []
    _, commands = play(state, LinkChanged(up=True), UpdateStored(1, 1, "a"), now=9000.0)
    assert commands == [MoveDeadline(1, 1, 9100.0, "no link to the broker for 4000 s")]


EQUAL_TIME = POLICY.model_copy(update={"pace": "equal-time"})


def test_with_equal_time_slow_clients_take_so_few_steps_that_they_end_with_the_median_one() -> None:
    # 10, 20, 40 and 100 s: the lower median is 20 s; 40 s take half of the steps, 100 s would take a fifth and take the least share.
    assert shares_of(EQUAL_TIME, {"a": 10.0, "b": 20.0, "c": 40.0, "d": 100.0}) == {"c": 0.5, "d": LEAST_SHARE}


def test_nobody_takes_fewer_steps_where_nobody_is_slower_or_with_equal_steps() -> None:
    for times in ({}, {"a": 30.0}, {"a": 30.0, "b": 30.0}):
        assert shares_of(EQUAL_TIME, times) == {}
    assert shares_of(POLICY, {"a": 1.0, "b": 1000.0}) == {}


ONE_TRY = RoundPolicy(rounds=2, min_cohort=1, min_clients=2, max_attempts=1, deadline_s=100.0)


def started(clients: str = "ab", policy: RoundPolicy = ONE_TRY) -> RoundState:
    return play(RoundState(policy), Paused("set-up"), *map(CameOnline, clients), Resumed())[0]


def test_a_paused_federation_ends_its_attempt_and_opens_no_other_one() -> None:
    state, commands = play(started(), Paused("maintenance"))
    assert (state.phase, commands) == (Phase.COLLECTING, [])
    stored = [UpdateStored(state.round, state.attempt, client) for client in sorted(state.participants)]
    state, commands = play(state, *stored, AggregateStored(state.round, state.attempt))
    assert commands == [Distil(1, 1, ("a", "b"))]
    assert (state.phase, state.round, state.reason) == (Phase.PAUSED, 2, "maintenance")
    assert play(state, Paused("a better reason"))[0].reason == "a better reason"
    state, commands = play(state, Resumed())
    assert commands[0] == OpenAttempt(2, 1, frozenset("ab"), 100.0)


def test_resuming_after_a_failed_attempt_opens_the_next_one_without_its_delay_and_forgets_the_failures() -> None:
    slow = RoundState(POLICY, opening=Opening(retry_s=600.0))
    state, _ = play(slow, CameOnline("a"), CameOnline("b"), AggregationFailed(1, 1, "no space"), now=1000.0)
    assert (state.phase, state.attempt, opens(state, 1001.0)) == (Phase.WAITING, 2, False)
    state, commands = play(state, Resumed(), now=1001.0)
    assert commands[0] == OpenAttempt(1, 2, frozenset("ab"), state.deadline_at)
    assert (state.first_attempt, state.reason) == (2, "")


def test_a_shorter_deadline_counts_from_the_change_and_a_longer_one_moves_it_by_the_difference() -> None:
    for after_s, expected in ((20.0, 70.0), (1000.0, 1000.0)):
        state, commands = play(started(), PolicyChanged(ONE_TRY.model_copy(update={"deadline_s": after_s})), now=50.0)
        assert commands == [MoveDeadline(1, 1, expected)]
        assert state.deadline_at == expected


def test_a_lower_quorum_can_close_the_open_attempt() -> None:
    state, _ = play(
        started("abc", ONE_TRY.model_copy(update={"min_clients": 3})), UpdateStored(1, 1, "a"), UpdateStored(1, 1, "b")
    )
    _, commands = play(state, PolicyChanged(ONE_TRY), UpdateRefused(1, 1, "c"))
    assert commands[-1] == Distil(1, 1, ("a", "b"))


def test_an_attempt_does_not_wait_for_devices_that_were_disabled() -> None:
    _, commands = play(started("abc"), UpdateStored(1, 1, "a"), UpdateStored(1, 1, "b"), Barred({"c": "disabled"}))
    assert commands[-1] == Distil(1, 1, ("a", "b"))
    assert play(started("abc"), UpdateStored(1, 1, "a"), Barred({"b": "", "c": ""}))[0].phase is Phase.COLLECTING


def test_a_quorum_above_the_invited_clients_ends_the_attempt_with_the_reason_and_without_counting() -> None:
    state, commands = play(started("abc"), PolicyChanged(ONE_TRY.model_copy(update={"min_clients": 4})), now=50.0)
    reason = "it invited only 3 of the 4 clients required since min_clients or min_cohort was raised"
    assert commands[-1] == FailAttempt(1, 1, reason, 2)
    assert (state.phase, state.attempt, state.first_attempt) == (Phase.WAITING, 2, 2)
    _, commands = play(state, CameOnline("d"), now=50.0)
    assert commands[0] == OpenAttempt(1, 2, frozenset("abcd"), 150.0)


@pytest.mark.parametrize(
    ("fraction", "most", "over", "invited", "wanted"),
    [(1, None, 0, 10, 10), (0.5, None, 0, 5, 5), (0.1, None, 0, 2, 2), (1, 4, 0, 4, 4), (0.5, None, 0.4, 7, 5)],
)
def test_how_many_are_invited_and_wanted(
    fraction: float, most: int | None, over: float, invited: int, wanted: int
) -> None:
    policy = ONE_TRY.model_copy(update={"fraction": fraction, "max_clients": most, "over_selection": over})
    state = started("abcdefghij", policy)
    assert len(state.participants) == invited
    clients = sorted(state.participants)
    state, commands = play(state, *(UpdateStored(1, 1, client) for client in clients[: wanted - 1]))
    assert commands == []
    _, commands = play(state, UpdateStored(1, 1, clients[wanted - 1]))
    assert commands == [Distil(1, 1, tuple(clients[:wanted]))]


def test_the_choice_of_clients_changes_with_the_attempt_and_with_the_secret_and_is_repeatable() -> None:
    policy = ONE_TRY.model_copy(update={"fraction": 0.3})
    one, two = Opening(selection_key=b"one"), Opening(selection_key=b"two")
    clients = [f"client-{number}" for number in range(20)]
    choices = [one.invited(policy, clients, RoundAttempt(number, 1)) for number in range(1, 40)]
    assert choices == [one.invited(policy, clients[::-1], RoundAttempt(number, 1)) for number in range(1, 40)]
    assert {len(choice) for choice in choices} == {6}
    assert set().union(*choices) == set(clients)
    assert choices[0] != two.invited(policy, clients, RoundAttempt(1, 1))


def test_nothing_is_merged_from_fewer_than_the_cohort() -> None:
    policy = ONE_TRY.model_copy(update={"min_clients": 1, "min_cohort": 3})
    state, commands = play(RoundState(policy), CameOnline("a"), CameOnline("b"))
    assert commands == []
    state, _ = play(state, CameOnline("c"), UpdateStored(1, 1, "a"), UpdateStored(1, 1, "b"))
    _, commands = play(state, UpdateRefused(1, 1, "c"))
    reason = "1 of 3 clients declined, were rejected or left (c); 3 updates are required"
    assert commands[0] == FailAttempt(1, 1, reason)
