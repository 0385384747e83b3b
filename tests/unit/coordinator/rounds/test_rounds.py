"""The round engine: what opens, closes, fails and pauses a round; and that no order of events breaks its laws."""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds.engine import RESTART_GRACE_S, Opening, Phase, RoundState, transition
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
    Finish,
    Invite,
    LinkChanged,
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
from tests.support.coordinator.engine import play

CLIENTS = ("a", "b", "c", "d")
POLICY = RoundPolicy(rounds=2, min_cohort=1, min_clients=2, max_attempts=2, deadline_s=100.0)


def opened(*clients: str, policy: RoundPolicy = POLICY) -> RoundState:
    return play(RoundState(policy), *[CameOnline(client) for client in clients])[0]


def test_a_round_opens_with_everybody_online_as_soon_as_the_quorum_is() -> None:
    state, commands = play(RoundState(POLICY), CameOnline("b"))
    assert (state.phase, commands) == (Phase.WAITING, [])
    state, commands = play(state, CameOnline("a"), now=5.0)
    assert commands == [OpenAttempt(1, 1, frozenset("ab"), 105.0), Invite(1, 1, "a"), Invite(1, 1, "b")]
    assert state.phase is Phase.COLLECTING


def test_who_comes_later_does_not_join_an_open_attempt_but_a_participant_is_invited_again() -> None:
    state, commands = play(opened("a", "b"), CameOnline("c"), CameOnline("b"))
    assert state.participants == {"a", "b"}
    assert commands == [Invite(1, 1, "b")]


def test_a_participant_whose_update_is_stored_is_not_invited_again() -> None:
    assert play(opened("a", "b"), UpdateStored(1, 1, "b"), CameOnline("b"))[1] == []


def test_the_student_is_distilled_when_all_participants_have_answered() -> None:
    state, commands = play(opened("c", "a"), UpdateStored(1, 1, "c"))
    assert commands == []
    state, commands = play(state, UpdateStored(1, 1, "a"))
    assert commands == [Distil(1, 1, ("a", "c"))]
    assert state.phase is Phase.DISTILLING


def test_who_is_no_member_any_more_is_not_waited_for_and_not_invited_again() -> None:
    state = replace(opened("a", "b", "c"), participants=frozenset("abc"), online=frozenset("abc"))
    state, commands = play(state, UpdateStored(1, 1, "a"), UpdateStored(1, 1, "b"))
    assert commands == []
    state, commands = play(state, Departed("c"))
    assert commands == [Distil(1, 1, ("a", "b"))]
    assert "c" not in state.online


def test_an_update_that_came_before_its_device_departed_still_counts() -> None:
    _, commands = play(opened("a", "b"), UpdateStored(1, 1, "a"), Departed("a"), UpdateStored(1, 1, "b"))
    assert commands == [Distil(1, 1, ("a", "b"))]


def test_too_few_members_left_end_the_attempt() -> None:
    state, commands = play(opened("a", "b"), Departed("b"))
    assert isinstance(commands[0], FailAttempt)
    assert "are gone" in commands[0].reason
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
    assert "only 1 of 2 needed updates" in commands[0].reason
    assert "b (still at work), c (offline)" in commands[0].reason


def test_a_failed_attempt_is_followed_by_the_next_one_and_the_last_one_by_a_pause() -> None:
    state, commands = play(opened("a", "b"), UpdateRefused(1, 1, "a"))
    assert [type(command) for command in commands] == [FailAttempt, OpenAttempt, Invite, Invite]
    assert (state.phase, state.attempt, state.declined, state.updates) == (
        Phase.COLLECTING,
        2,
        frozenset(),
        frozenset(),
    )
    state, commands = play(state, UpdateRefused(1, 2, "a"))
    assert [type(command) for command in commands] == [FailAttempt, Stall]
    assert state.phase is Phase.STALLED
    assert play(state, Tick(), CameOnline("c"), Restarted())[1] == []


def test_updates_that_cannot_be_merged_fail_the_attempt_even_while_others_still_come() -> None:
    state, commands = play(opened("a", "b"), AggregationFailed(1, 1, "diverged"))
    assert commands[0] == FailAttempt(1, 1, "diverged")
    assert state.attempt == 2
    assert play(state, AggregationFailed(1, 1, "diverged"))[1] == []


def test_events_of_another_attempt_and_of_strangers_change_nothing() -> None:
    state = opened("a", "b")
    for event in (UpdateStored(1, 2, "a"), UpdateStored(2, 1, "a"), UpdateStored(1, 1, "z"), AggregateStored(1, 1)):
        assert play(state, event) == (state, [])


def test_after_the_last_round_the_federation_is_finished() -> None:
    state = opened("a", "b")
    state, _ = play(state, UpdateStored(1, 1, "a"), UpdateStored(1, 1, "b"))
    state, commands = play(state, AggregateStored(1, 1))
    assert commands[0] == OpenAttempt(2, 1, frozenset("ab"), 100.0)
    state, _ = play(state, UpdateStored(2, 1, "a"), UpdateStored(2, 1, "b"))
    state, commands = play(state, AggregateStored(2, 1))
    assert (state.phase, commands) == (Phase.FINISHED, [Finish()])
    assert play(state, AggregateStored(2, 1), Tick())[1] == []


def test_the_next_round_waits_for_the_quorum_when_clients_have_left() -> None:
    state = opened("a", "b")
    state, _ = play(state, UpdateStored(1, 1, "a"), UpdateStored(1, 1, "b"), WentOffline("b"))
    state, commands = play(state, AggregateStored(1, 1))
    assert (state.phase, state.round, commands) == (Phase.WAITING, 2, [])
    assert isinstance(play(state, CameOnline("b"))[1][0], OpenAttempt)


def test_a_restart_goes_on_with_the_same_attempt_and_gives_it_time() -> None:
    state = replace(opened("a", "b"), online=frozenset())
    state, commands = play(state, Restarted(), now=5000.0)
    grace = min(RESTART_GRACE_S, POLICY.deadline_s)
    assert commands == [ResumeAttempt(1, 1, 5000.0 + grace)]
    assert play(state, CameOnline("a"), now=5001.0)[1] == [Invite(1, 1, "a")]


def test_a_restart_while_distilling_distils_the_same_updates_again() -> None:
    state, _ = play(opened("a", "b"), UpdateStored(1, 1, "a"), UpdateStored(1, 1, "b"))
    state, commands = play(replace(state, online=frozenset()), Restarted())
    assert commands == [ResumeAttempt(1, 1, 100.0), Distil(1, 1, ("a", "b"))]


def test_a_restart_while_distilling_fails_an_attempt_that_a_rejection_left_below_the_quorum() -> None:
    state, _ = play(opened("a", "b"), UpdateStored(1, 1, "a"), UpdateStored(1, 1, "b"))
    rejected = replace(state, online=frozenset(), updates=frozenset("a"), declined=frozenset("b"))
    state, commands = play(rejected, Restarted())
    reason = "updates were rejected before a restart; 1 updates are left, and 2 are needed"
    assert commands == [ResumeAttempt(1, 1, 100.0), FailAttempt(1, 1, reason, 1)]
    assert (state.phase, state.attempt) == (Phase.WAITING, 2)


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
def test_no_order_of_events_counts_twice_closes_twice_or_goes_back(
    script: list[tuple[Event, float]], selection_key: bytes
) -> None:
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
