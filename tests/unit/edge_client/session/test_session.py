"""The agent's state machine: single rules by hand."""

import pytest

from edge_client.session.signals import (
    AnnounceSum,
    AnswerSum,
    ArtifactStored,
    CheckSpec,
    ChooseModel,
    Chosen,
    ConsentChanged,
    CoordinatorSeen,
    Done,
    Invited,
    LinkChanged,
    Note,
    ObstacleChanged,
    RecordDelivery,
    RecordReason,
    ReleaseTrainer,
    RoundCommitted,
    Send,
    SendChunks,
    SendHello,
    SessionLost,
    SpecChecked,
    StartTrainer,
    Stopping,
    SumReady,
    SumStepped,
    Tick,
    TrainerDied,
    TrainerReady,
    TrainRound,
    Want,
    Weighed,
    WeighRound,
    Welcomed,
)
from edge_client.session.state import SUM_EVERY_S, TRAINER_DEATHS, SessionState, next_deadline
from edge_client.session.state_machine import step
from fedcg.wire.messages.schemas import Accept, DeclineReason, Outcome, RoundAttempt, SumOff
from tests.support.edge.session_events import (
    OTHER_SPEC,
    SPEC,
    aggregate,
    drive,
    ended,
    need,
    offer,
    reasons,
    receipt,
    sent,
    update,
)


def test_hello_is_repeated_every_two_seconds_until_the_welcome() -> None:
    state, commands = drive(SessionState(federation="shapes", device="site-1"), LinkChanged(up=True))
    assert SendHello() in commands
    assert next_deadline(state) == 2.0
    state, early = drive(state, Tick(), now=1.9)
    state, due = drive(state, Tick(), now=2.0)
    assert SendHello() not in early
    assert due == [SendHello()]
    state, after = drive(state, Welcomed(epoch=1), Tick(), now=10.0)
    assert after == []


def test_a_welcome_that_was_queued_when_the_link_broke_opens_no_session(ready: SessionState) -> None:
    down, _ = step(ready, LinkChanged(up=False), 10.0)
    down, _ = step(down, Invited(RoundAttempt(1, 1)), 10.0)
    still, commands = step(down, Welcomed(1), 10.0)
    assert not still.welcomed
    assert not any(isinstance(command, Send) for command in commands)


def test_the_spec_is_judged_before_accepting_and_the_aggregate_fetched_meanwhile(ready: SessionState) -> None:
    state, commands = drive(ready, offer(1), Invited(RoundAttempt(1, 1)))
    wants = [command for command in commands if isinstance(command, Want)]
    assert [download.ref for download in wants[-1].downloads] == [SPEC, aggregate(1)]
    assert [download.ask_after_s for download in wants[-1].downloads] == [0.0, 0.0]
    assert sent(commands) == []
    state, commands = drive(state, ArtifactStored(SPEC.id))
    assert CheckSpec(SPEC.id) in commands
    state, commands = drive(state, SpecChecked(SPEC.id, None))
    assert sent(commands) == ["accept"]


def test_an_invite_before_its_offer_is_remembered(ready: SessionState) -> None:
    state, _ = drive(ready, Invited(RoundAttempt(1, 1)), ArtifactStored(SPEC.id), ArtifactStored(aggregate(1).id))
    _, commands = drive(state, offer(1), SpecChecked(SPEC.id, None))
    assert TrainRound(RoundAttempt(1, 1), SPEC.id, aggregate(1).id) in commands


def test_an_offer_with_another_spec_than_the_private_state_has_is_declined(training: SessionState) -> None:
    state, _ = drive(training, RoundCommitted(RoundAttempt(1, 1), SPEC.id, update(1)), receipt(update(1).id))
    _, commands = drive(state, offer(2, spec=OTHER_SPEC), Invited(RoundAttempt(2, 1)))
    assert reasons(commands) == [DeclineReason.SPEC_REFUSED]


def test_the_manifest_backs_off_and_any_grant_resets_it(training: SessionState) -> None:
    state, commands = drive(training, RoundCommitted(RoundAttempt(1, 1), SPEC.id, update(1)))
    assert sent(commands) == ["manifest"]
    times = []
    for tenth in range(1, 50):
        state, commands = drive(state, Tick(), now=tenth / 10)
        times += [tenth / 10] * sent(commands).count("manifest")
    assert times == [1.0, 3.0]  # after 1 s, then 2 s
    state, commands = drive(state, need(update(1).id), now=4.0)
    assert commands == [SendChunks(update(1), ((0, 4),))]
    assert next_deadline(state) == 6.0


def test_a_coordinators_status_opens_a_new_session_unless_a_hello_is_on_its_way() -> None:
    state, commands = drive(SessionState("casting", "site-1"), LinkChanged(up=True))
    assert SendHello() in commands
    state, commands = drive(state, CoordinatorSeen(epoch=4, online=True), now=0.1)
    assert SendHello() not in commands
    assert SendHello() in drive(state, Tick(), now=2.0)[1]
    state, _ = drive(state, Welcomed(epoch=4), now=0.2)
    for seen in (CoordinatorSeen(epoch=4, online=True), CoordinatorSeen(epoch=5, online=False)):
        assert drive(state, seen, now=0.3)[1] == []
    assert SendHello() in drive(state, CoordinatorSeen(epoch=5, online=True), now=0.3)[1]


def test_a_manifest_that_nobody_answers_for_six_seconds_opens_a_new_session(training: SessionState) -> None:
    state, _ = drive(training, RoundCommitted(RoundAttempt(1, 1), SPEC.id, update(1)))
    for tenth in range(1, 60):
        state, commands = drive(state, Tick(), now=tenth / 10)
        assert SendHello() not in commands
    state, commands = drive(state, Tick(), now=6.0)
    assert commands == [SendHello()]
    _, commands = drive(state, Welcomed(epoch=1), now=6.5)
    assert sent(commands) == ["manifest"]


def test_silence_while_downloading_opens_a_new_session(ready: SessionState) -> None:
    assert drive(ready, SessionLost())[1] == [SendHello()]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_of_a_receipt_ends_the_outbox_entry(training: SessionState, outcome: Outcome) -> None:
    state, _ = drive(training, RoundCommitted(RoundAttempt(1, 1), SPEC.id, update(1)))
    state, commands = drive(state, receipt(update(1).id, outcome))
    assert commands == [RecordDelivery(RoundAttempt(1, 1), update(1).id, outcome, "")]
    assert state.delivery is None


def test_a_later_receipt_only_says_what_became_of_the_update(training: SessionState) -> None:
    state, _ = drive(training, RoundCommitted(RoundAttempt(1, 1), SPEC.id, update(1)))
    state, commands = drive(state, receipt(update(1).id, reason="late"), receipt(update(1).id))
    assert [command for command in commands if isinstance(command, RecordReason)] == []
    after, commands = drive(state, receipt(update(1).id, reason="not merged (quarantine): too long"))
    assert commands == [RecordReason(update(1).id, "not merged (quarantine): too long")]
    assert after == state


def test_a_training_process_that_keeps_dying_is_given_ever_more_time_and_then_up(training: SessionState) -> None:
    state, now, pauses = training, 0.0, []
    for death in range(TRAINER_DEATHS):
        state, commands = drive(state, TrainerDied(), now=now)
        if death < TRAINER_DEATHS - 1:
            due = next_deadline(state) if StartTrainer() not in commands else now
            assert due is not None
            pauses.append(due - now)
            now = due
            state, _ = drive(state, Tick(), TrainerReady(), now=now)
    assert pauses == [0.0, 0.5, 1.0, 2.0]
    assert reasons(commands) == [DeclineReason.TRAINING_FAILED]


def test_a_training_process_that_never_comes_up_is_reported_as_a_failed_training_not_left_to_the_deadline() -> None:
    fresh = SessionState(federation="shapes", device="site-1")
    asked = (offer(1), Invited(RoundAttempt(1, 1)), ArtifactStored(SPEC.id), SpecChecked(SPEC.id, None))
    state, commands = drive(fresh, Tick(), LinkChanged(up=True), Welcomed(epoch=1), *asked)
    assert sent(commands) == ["accept"]
    for death in range(TRAINER_DEATHS):
        assert reasons(commands) == [], death
        state, commands = drive(state, TrainerDied(), now=100.0 * death)
        state, _ = drive(state, Tick(), now=100.0 * death + 50.0)
    assert reasons(commands) == [DeclineReason.TRAINING_FAILED]


def test_an_agent_that_is_stopped_declines_the_round_that_it_has_promised(training: SessionState) -> None:
    _, commands = drive(training, Stopping())
    assert reasons(commands) == [DeclineReason.INTERRUPTED]


def test_an_agent_that_is_stopped_declines_nothing_that_it_has_trained_or_never_accepted(
    ready: SessionState, training: SessionState
) -> None:
    delivering, _ = drive(training, RoundCommitted(RoundAttempt(1, 1), SPEC.id, update(1)))
    for state in (ready, delivering):
        assert sent(drive(state, Stopping())[1]) == []


def test_the_end_is_finalised_once_and_done_only_when_the_outbox_is_empty(training: SessionState) -> None:
    state, _ = drive(training, RoundCommitted(RoundAttempt(1, 1), SPEC.id, update(1)), ended())
    state, commands = drive(state, ArtifactStored(aggregate(9).id))
    assert ChooseModel(SPEC.id, aggregate(9).id) in commands
    state, commands = drive(state, Chosen(aggregate(9).id, succeeded=True))
    assert not any(isinstance(command, Done | ChooseModel) for command in commands)
    state, commands = drive(state, receipt(update(1).id, Outcome.CLOSED))
    assert Done(succeeded=True) in commands
    state, commands = drive(state, ended(), Tick())
    assert commands == [ReleaseTrainer("the federation has ended")]
    assert drive(state, Tick())[1] == []


def test_an_obstacle_declines_before_accepting_and_a_repeated_invite_is_reconsidered(ready: SessionState) -> None:
    known = (offer(1), ArtifactStored(SPEC.id), SpecChecked(SPEC.id, None), ArtifactStored(aggregate(1).id))
    state, commands = drive(ready, *known, ObstacleChanged(DeclineReason.HOT), Invited(RoundAttempt(1, 1)))
    assert reasons(commands) == [DeclineReason.HOT]
    assert Note("declined", RoundAttempt(1, 1), "hot") in commands
    assert not any(isinstance(command, TrainRound) for command in commands)
    state, commands = drive(state, ObstacleChanged(DeclineReason.HOT), Invited(RoundAttempt(1, 1)))
    assert reasons(commands) == [DeclineReason.HOT]
    assert not any(isinstance(command, Note) for command in commands), "a reminder is answered, and not noted again"
    state, commands = drive(state, ObstacleChanged(DeclineReason.RESERVED), Invited(RoundAttempt(1, 1)))
    assert reasons(commands) == [DeclineReason.RESERVED]
    state, commands = drive(state, ObstacleChanged(None), Tick())
    assert sent(commands) == [], "the coordinator asks again if it still wants the device"
    state, commands = drive(state, Invited(RoundAttempt(1, 1)))
    assert sent(commands) == ["accept"]
    assert TrainRound(RoundAttempt(1, 1), SPEC.id, aggregate(1).id) in commands


def test_an_obstacle_takes_back_no_round_that_is_trained_or_was_declined_for_good(
    training: SessionState, ready: SessionState
) -> None:
    again = (LinkChanged(up=False), LinkChanged(up=True), Welcomed(epoch=1), ObstacleChanged(DeclineReason.HOT))
    _, commands = drive(training, *again, Invited(RoundAttempt(1, 1)))
    assert reasons(commands) == []
    assert "accept" in sent(commands)
    refused = (ArtifactStored(SPEC.id), SpecChecked(SPEC.id, DeclineReason.UPLOAD_NOT_ALLOWED))
    state, _ = drive(ready, offer(1), Invited(RoundAttempt(1, 1)), *refused)
    _, commands = drive(state, ObstacleChanged(None), Invited(RoundAttempt(1, 1)))
    assert reasons(commands) == [DeclineReason.UPLOAD_NOT_ALLOWED]


def test_what_its_owner_approves_is_accepted_at_once_in_the_attempt_that_was_declined(ready: SessionState) -> None:
    refused = (ArtifactStored(SPEC.id), SpecChecked(SPEC.id, DeclineReason.NEEDS_APPROVAL))
    state, commands = drive(ready, offer(1), Invited(RoundAttempt(1, 1)), *refused)
    assert Note("declined", RoundAttempt(1, 1), "needs_approval") in commands
    state, commands = drive(state, Invited(RoundAttempt(1, 1)))
    assert reasons(commands) == [DeclineReason.NEEDS_APPROVAL]
    assert not any(isinstance(command, Note) for command in commands), "a reminder is answered, and not noted again"
    state, commands = drive(state, ConsentChanged())
    assert CheckSpec(SPEC.id) in commands
    _, commands = drive(state, SpecChecked(SPEC.id, None))
    assert sent(commands) == ["accept"]


def test_no_training_process_runs_while_paused_and_a_deadline_that_passed_keeps_no_loop_busy() -> None:
    idle, _ = drive(SessionState(federation="shapes", device="site-1"), Tick(), TrainerReady())
    paused, commands = drive(idle, ObstacleChanged(DeclineReason.PAUSED), Tick())
    assert commands == [ReleaseTrainer("paused")]
    assert next_deadline(paused) is None
    _, commands = drive(idle, ObstacleChanged(DeclineReason.DAILY_LIMIT))
    assert commands == []
    assert StartTrainer() in drive(paused, ObstacleChanged(None))[1]


def test_a_share_of_the_steps_is_trained_as_asked_and_the_accept_says_how_long_it_will_take(
    ready: SessionState,
) -> None:
    at = RoundAttempt(1, 1)
    asked = Invited(at, share=0.25, predicted_s=12.5)
    _, commands = drive(
        ready, offer(1), asked, ArtifactStored(SPEC.id), SpecChecked(SPEC.id, None), ArtifactStored(aggregate(1).id)
    )
    told = [command.message for command in commands if isinstance(command, Send)]
    assert [message.predicted_s for message in told if isinstance(message, Accept)] == [12.5]
    assert TrainRound(at, SPEC.id, aggregate(1).id, share=0.25) in commands


def summed(ready: SessionState) -> SessionState:
    """Round 1 of a method with masked sums is accepted and at hand."""
    known = (ArtifactStored(SPEC.id), SpecChecked(SPEC.id, None, is_summed=True), ArtifactStored(aggregate(1).id))
    state, commands = drive(ready, offer(1), Invited(RoundAttempt(1, 1)), *known)
    assert WeighRound(RoundAttempt(1, 1), SPEC.id) in commands
    return state


def test_a_masked_round_counts_its_images_announces_keys_until_answered_and_trains_once_its_masks_are_agreed_on(
    ready: SessionState,
) -> None:
    at = RoundAttempt(1, 1)
    announce, train = AnnounceSum(at, SPEC.id, 40), TrainRound(at, SPEC.id, aggregate(1).id)
    state, commands = drive(summed(ready), Weighed(at, 40))
    assert commands == [announce]
    assert next_deadline(state) == SUM_EVERY_S
    state, early = drive(state, Tick(), now=SUM_EVERY_S - 0.1)
    state, due = drive(state, Tick(), now=SUM_EVERY_S)
    assert (early, due) == ([], [announce])
    state, commands = drive(state, SumStepped(at, SumOff()), now=SUM_EVERY_S)
    assert commands == [AnswerSum(at, SumOff())]
    state, commands = drive(state, SumReady(at), now=SUM_EVERY_S)
    assert commands == [train]
    _, later = drive(state, Tick(), SumReady(at), now=10 * SUM_EVERY_S)
    assert later == []


def test_masks_of_an_earlier_attempt_do_not_let_the_next_one_be_trained(ready: SessionState) -> None:
    at, again = RoundAttempt(1, 1), RoundAttempt(1, 2)
    state, _ = drive(summed(ready), Weighed(at, 40), offer(1, 2), Invited(again))
    state, commands = drive(state, SumReady(at))
    assert not any(isinstance(command, TrainRound) for command in commands)
    _, commands = drive(state, Weighed(again, 41))
    assert AnnounceSum(again, SPEC.id, 41) in commands


def test_a_training_process_that_dies_while_it_counts_counts_again(ready: SessionState) -> None:
    state, _ = drive(summed(ready), TrainerDied())
    _, commands = drive(state, Tick(), TrainerReady())
    assert WeighRound(RoundAttempt(1, 1), SPEC.id) in commands
