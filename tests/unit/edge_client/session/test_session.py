"""The agent's state machine: single rules by hand, and its laws under random orders of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.session.signals import (
    AnnounceSum,
    AnswerSum,
    ArtifactLost,
    ArtifactStored,
    CheckSpec,
    ChooseModel,
    Chosen,
    Command,
    ConsentChanged,
    CoordinatorSeen,
    Done,
    Input,
    Invited,
    LinkChanged,
    LoadUpdate,
    Note,
    ObstacleChanged,
    Offered,
    OutboxFound,
    RecordDelivery,
    ReleaseTrainer,
    RoundCommitted,
    RoundFailed,
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
    TrainingAbandoned,
    TrainRound,
    Want,
    Weighed,
    WeighRound,
    Welcomed,
)
from edge_client.session.state import SUM_EVERY_S, TRAINER_DEATHS, SessionState, next_deadline
from edge_client.session.state_machine import step
from fedcg.wire.messages.schemas import (
    Accept,
    ArtifactRef,
    Decline,
    DeclineReason,
    Finished,
    Manifest,
    Need,
    Offer,
    Outcome,
    Receipt,
    RoundAttempt,
    SumOff,
)

DIRECT = {"federation": "shapes", "sender": "coordinator", "recipient": "site-1"}
BROADCAST = {**DIRECT, "recipient": "*"}
SPEC = ArtifactRef(id="a" * 64, size=1000, chunk_bytes=500)
OTHER_SPEC = ArtifactRef(id="b" * 64, size=1000, chunk_bytes=500)


def aggregate(round_number: int) -> ArtifactRef:
    return ArtifactRef(id=f"{round_number:064x}", size=5000, chunk_bytes=500)


def update(round_number: int, attempt: int = 1) -> ArtifactRef:
    return ArtifactRef(id=f"{round_number * 16 + attempt:064x}".replace("0", "f", 1), size=4000, chunk_bytes=500)


AT_HAND = (ArtifactStored(SPEC.id), SpecChecked(SPEC.id, None), ArtifactStored(aggregate(1).id))
"""All that training of round 1 needs."""


def offer(round_number: int, attempt: int = 1, *, spec: ArtifactRef = SPEC) -> Offered:
    at = {"epoch": 1, "round": round_number, "attempt": attempt}
    message = Offer(**BROADCAST, **at, spec=spec, aggregate=aggregate(round_number), rounds=3, deadline_at=0.0)
    return Offered(message, live=False)


def ended() -> Finished:
    return Finished(**BROADCAST, epoch=1, round=3, attempt=1, spec=SPEC, aggregate=aggregate(9))


def receipt(artifact: str, outcome: Outcome = Outcome.ACCEPTED, reason: str = "") -> Receipt:
    return Receipt(**DIRECT, artifact=artifact, outcome=outcome, reason=reason)


def need(artifact: str) -> Need:
    return Need(**DIRECT, artifact=artifact, ranges=((0, 4),))


def drive(state: SessionState, *events: Input, now: float = 0.0) -> tuple[SessionState, list[Command]]:
    """Feed events; returns the last state and all commands."""
    commands: list[Command] = []
    for event in events:
        state, given_now = step(state, event, now)
        commands += given_now
    return state, commands


def sent(commands: list[Command]) -> list[str]:
    return [command.message.kind for command in commands if isinstance(command, Send)]


def reasons(commands: list[Command]) -> list[DeclineReason]:
    messages = [command.message for command in commands if isinstance(command, Send)]
    return [message.reason for message in messages if isinstance(message, Decline)]


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


def test_a_manifest_that_nobody_answers_for_six_seconds_opens_a_new_session(delivering: SessionState) -> None:
    state = delivering
    for tenth in range(1, 60):
        state, commands = drive(state, Tick(), now=tenth / 10)
        assert SendHello() not in commands
    state, commands = drive(state, Tick(), now=6.0)
    assert commands == [SendHello()]
    _, commands = drive(state, Welcomed(epoch=1), now=6.5)
    assert sent(commands) == ["manifest"]


def test_silence_while_downloading_opens_a_new_session(ready: SessionState) -> None:
    assert drive(ready, SessionLost())[1] == [SendHello()]


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


def test_an_agent_that_is_stopped_declines_the_round_that_it_has_promised_and_has_not_trained(
    ready: SessionState, training: SessionState, delivering: SessionState
) -> None:
    assert reasons(drive(training, Stopping())[1]) == [DeclineReason.INTERRUPTED]
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
    state, commands = drive(ready, offer(1), *AT_HAND, ObstacleChanged(DeclineReason.HOT), Invited(RoundAttempt(1, 1)))
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
    _, commands = drive(ready, offer(1), asked, *AT_HAND)
    told = [command.message for command in commands if isinstance(command, Send)]
    assert [message.predicted_s for message in told if isinstance(message, Accept)] == [12.5]
    assert TrainRound(at, SPEC.id, aggregate(1).id, share=0.25) in commands


def sealed(ready: SessionState) -> SessionState:
    """Round 1 of a federation with sealed parts is accepted and at hand."""
    known = (ArtifactStored(SPEC.id), SpecChecked(SPEC.id, None, is_sealed=True), ArtifactStored(aggregate(1).id))
    state, commands = drive(ready, offer(1), Invited(RoundAttempt(1, 1)), *known)
    assert WeighRound(RoundAttempt(1, 1), SPEC.id, aggregate(1).id) in commands
    return state


def test_a_sealed_round_counts_its_images_announces_keys_until_answered_and_trains_once_its_masks_are_agreed_on(
    ready: SessionState,
) -> None:
    at = RoundAttempt(1, 1)
    announce, train = AnnounceSum(at, 40, vote=1), TrainRound(at, SPEC.id, aggregate(1).id)
    state, commands = drive(sealed(ready), Weighed(at, 40, vote=1))
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
    state, _ = drive(sealed(ready), Weighed(at, 40), offer(1, 2), Invited(again))
    state, commands = drive(state, SumReady(at))
    assert not any(isinstance(command, TrainRound) for command in commands)
    _, commands = drive(state, Weighed(again, 41))
    assert AnnounceSum(again, 41) in commands


def test_a_training_process_that_dies_while_it_counts_counts_again(ready: SessionState) -> None:
    state, _ = drive(sealed(ready), TrainerDied())
    _, commands = drive(state, Tick(), TrainerReady())
    assert WeighRound(RoundAttempt(1, 1), SPEC.id, aggregate(1).id) in commands


ATTEMPTS = [RoundAttempt(round_number, attempt) for round_number in (1, 2, 3) for attempt in (1, 2)]
attempts = st.sampled_from(ATTEMPTS)
network_events: st.SearchStrategy[Input] = st.one_of(
    st.just(Tick()),
    st.builds(LinkChanged, st.booleans()),
    st.builds(CoordinatorSeen, st.integers(1, 3), st.booleans()),
    st.builds(Welcomed, st.integers(1, 3)),
    attempts.map(lambda round_attempt: offer(round_attempt.round, round_attempt.attempt)),
    st.just(ended()),
    st.builds(Invited, attempts),
    st.builds(ObstacleChanged, st.sampled_from([None, DeclineReason.HOT, DeclineReason.RESERVED])),
    st.just(ArtifactStored(SPEC.id)),
    st.integers(1, 3).map(lambda number: ArtifactStored(aggregate(number).id)),
    st.just(ArtifactStored(aggregate(9).id)),
    st.just(SpecChecked(SPEC.id, None)),
    st.just(SessionLost()),
    st.just(Stopping()),
    st.just(ConsentChanged()),
    st.sampled_from([DeclineReason.PAUSED, DeclineReason.DAILY_LIMIT, None]).map(ObstacleChanged),
    st.just(TrainerReady()),
    attempts.map(lambda round_attempt: need(update(round_attempt.round, round_attempt.attempt).id)),
    st.builds(
        lambda round_attempt, outcome: receipt(update(round_attempt.round, round_attempt.attempt).id, outcome),
        attempts,
        st.sampled_from(Outcome),
    ),
)
trainer_events = st.sampled_from(["commit", "fail", "die", "die after commit", "lose", "abandon"])


class Shell:
    """Carries out commands against a model of store and training process, and checks the laws at every step."""

    def __init__(self, events: list[Input | str]) -> None:
        self.state = SessionState(federation="shapes", device="site-1")
        self.running: RoundAttempt | str | None = None
        self.committed: list[RoundAttempt] = []
        self.outbox: ArtifactRef | None = None
        self.loads = 0  # of the outbox; every other one fails
        self.now = 0.0
        for event in events:
            self.trainer(event) if isinstance(event, str) else self.feed(event)

    def feed(self, event: Input) -> None:
        self.now += 0.7
        self.state, commands = step(self.state, event, self.now)
        for command in commands:
            self._obey(command, event)
        if LoadUpdate() in commands:
            self.loads += 1
            if self.loads % 2 == 0:
                self.feed(OutboxFound(self.committed[-1], self.outbox))

    def trainer(self, what: str) -> None:
        job, self.running = self.running, None
        if job is None:
            return
        if what == "abandon":
            self.feed(TrainingAbandoned())
        elif what == "lose":
            self.feed(ArtifactLost(job if isinstance(job, str) else aggregate(job.round).id))
        elif isinstance(job, str):
            self.feed(TrainerDied() if what.startswith("die") else Chosen(job, succeeded=True))
        elif what == "fail":
            self.feed(RoundFailed(job, DeclineReason.DIVERGED))
        elif what == "die":
            self.feed(TrainerDied())
        else:
            assert self.outbox is None, "an update that had no receipt would be overwritten"
            self.committed.append(job)
            self.outbox = update(job.round, job.attempt)
            self.feed(RoundCommitted(job))
            if what == "die after commit":
                self.feed(TrainerDied())

    def _obey(self, command: Command, event: Input) -> None:
        if isinstance(command, TrainRound):
            assert (self.running, self.outbox) == (None, None)
            assert not self.committed or command.round_attempt > self.committed[-1], "trained twice"
            self.running = command.round_attempt
        elif isinstance(command, ChooseModel):
            assert self.running is None
            self.running = command.aggregate
        elif isinstance(command, StartTrainer):
            self.running = None
        elif isinstance(command, ReleaseTrainer):
            assert self.running is None, "its work would be lost"
        elif isinstance(command, RecordDelivery):
            assert self.outbox is not None
            assert isinstance(event, Receipt)
            assert event.artifact == self.outbox.id == command.artifact
            self.outbox = None
        elif isinstance(command, Send):
            assert self.state.up
            if isinstance(command.message, Manifest):
                assert command.message.artifact == self.outbox
            elif isinstance(command.message, Accept):
                assert command.message.at == self.state.invited
        elif isinstance(command, SendChunks):
            assert command.update == self.outbox


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(network_events, trainer_events), max_size=80))
def test_the_laws_hold_under_every_order_of_events(events: list[Input | str]) -> None:
    shell = Shell(events)
    assert (shell.state.delivery is not None) == (shell.outbox is not None)
    assert len(set(shell.committed)) == len(shell.committed)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(network_events, trainer_events), max_size=40))
def test_whatever_happened_before_a_quiet_coordinator_brings_the_device_to_the_end(events: list[Input | str]) -> None:
    shell = Shell(
        [*events, ObstacleChanged(None), LinkChanged(up=True), Welcomed(epoch=9), ended(), ArtifactStored(SPEC.id)]
    )
    for _ in range(60):
        shell.feed(ArtifactStored(aggregate(9).id))
        shell.feed(TrainerReady())
        if shell.outbox is not None:
            shell.feed(Welcomed(epoch=9))
            shell.feed(receipt(shell.outbox.id))
        shell.trainer("commit")
    assert shell.state.done


@pytest.fixture
def ready() -> SessionState:
    """Connected, welcomed, trainer idle, nothing known of any round."""
    fresh = SessionState(federation="shapes", device="site-1")
    state, _ = drive(fresh, Tick(), TrainerReady(), LinkChanged(up=True), Welcomed(epoch=1))
    return state


@pytest.fixture
def training(ready: SessionState) -> SessionState:
    """Round 1 is being trained."""
    state, commands = drive(ready, offer(1), Invited(RoundAttempt(1, 1)), *AT_HAND)
    assert TrainRound(RoundAttempt(1, 1), SPEC.id, aggregate(1).id) in commands
    return state


@pytest.fixture
def delivering(training: SessionState) -> SessionState:
    """Round 1 is trained, and its update waits for a receipt."""
    return drive(training, RoundCommitted(RoundAttempt(1, 1), SPEC.id, update(1)))[0]
