"""The agent's state machine: single rules by hand, and its laws under random orders of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.session import signals
from edge_client.session.state import Delivery, SessionState, TrainerState
from edge_client.session.state_machine import MANIFEST_MAX_S, SUM_EVERY_S, TRAINER_DEATHS, step
from fedcg.wire.messages import schemas
from fedcg.wire.messages.schemas import ArtifactRef, DeclineReason, Outcome, Receipt, RoundAttempt

DIRECT = {"federation": "shapes", "sender": "coordinator", "recipient": "site-1"}
BROADCAST = {**DIRECT, "recipient": "*"}
SPEC = ArtifactRef(id="a" * 64, size=1000, chunk_bytes=500)
OTHER_SPEC = ArtifactRef(id="b" * 64, size=1000, chunk_bytes=500)


def aggregate(round_number: int) -> ArtifactRef:
    return ArtifactRef(id=f"{round_number:064x}", size=5000, chunk_bytes=500)


def update(round_number: int, attempt: int = 1) -> ArtifactRef:
    return ArtifactRef(id=f"{round_number * 16 + attempt:064x}".replace("0", "f", 1), size=4000, chunk_bytes=500)


AT_HAND = (signals.ArtifactStored(SPEC.id), signals.SpecChecked(SPEC.id, None), signals.ArtifactStored(aggregate(1).id))
"""All that training of round 1 needs."""


def offer(round_number: int, attempt: int = 1, *, spec: ArtifactRef = SPEC) -> signals.Offered:
    at = {"epoch": 1, "round": round_number, "attempt": attempt}
    message = schemas.Offer(**BROADCAST, **at, spec=spec, aggregate=aggregate(round_number), rounds=3, deadline_at=0.0)
    return signals.Offered(message, live=False)


def ended() -> schemas.Finished:
    return schemas.Finished(**BROADCAST, epoch=1, round=3, attempt=1, spec=SPEC, aggregate=aggregate(9))


def receipt(artifact: str, outcome: Outcome = Outcome.ACCEPTED, reason: str = "") -> Receipt:
    return Receipt(**DIRECT, artifact=artifact, outcome=outcome, reason=reason)


def need(artifact: str) -> schemas.Need:
    return schemas.Need(**DIRECT, artifact=artifact, ranges=((0, 4),))


def drive(state: SessionState, *events: signals.Input, now: float = 0.0) -> tuple[SessionState, list[signals.Command]]:
    """Feed events; returns the last state and all commands."""
    commands: list[signals.Command] = []
    for event in events:
        state, given_now = step(state, event, now)
        commands += given_now
    return state, commands


def sent(commands: list[signals.Command]) -> list[str]:
    return [command.message.kind for command in commands if isinstance(command, signals.Send)]


def reasons(commands: list[signals.Command]) -> list[DeclineReason]:
    messages = [command.message for command in commands if isinstance(command, signals.Send)]
    return [message.reason for message in messages if isinstance(message, schemas.Decline)]


def test_hello_is_repeated_every_two_seconds_until_the_welcome() -> None:
    state, commands = drive(SessionState(federation="shapes", device="site-1"), signals.LinkChanged(up=True))
    assert signals.SendHello() in commands
    state, early = drive(state, signals.Tick(), now=1.9)
    state, due = drive(state, signals.Tick(), now=2.0)
    assert signals.SendHello() not in early
    assert due == [signals.SendHello()]
    state, after = drive(state, signals.Welcomed(epoch=1), signals.Tick(), now=10.0)
    assert after == []


def test_a_welcome_that_was_queued_when_the_link_broke_opens_no_session(ready: SessionState) -> None:
    down, _ = step(ready, signals.LinkChanged(up=False), 10.0)
    down, _ = step(down, signals.Invited(RoundAttempt(1, 1)), 10.0)
    still, commands = step(down, signals.Welcomed(1), 10.0)
    assert not still.welcomed
    assert not any(isinstance(command, signals.Send) for command in commands)


def test_the_spec_is_judged_before_accepting_and_the_aggregate_fetched_meanwhile(ready: SessionState) -> None:
    state, commands = drive(ready, offer(1), signals.Invited(RoundAttempt(1, 1)))
    wants = [command for command in commands if isinstance(command, signals.Want)]
    assert [download.ref for download in wants[-1].downloads] == [SPEC, aggregate(1)]
    assert [download.ask_after_s for download in wants[-1].downloads] == [0.0, 0.0]
    assert sent(commands) == []
    state, commands = drive(state, signals.ArtifactStored(SPEC.id))
    assert signals.CheckSpec(SPEC.id) in commands
    state, commands = drive(state, signals.SpecChecked(SPEC.id, None))
    assert sent(commands) == ["accept"]


def test_an_invite_before_its_offer_is_remembered(ready: SessionState) -> None:
    state, _ = drive(
        ready,
        signals.Invited(RoundAttempt(1, 1)),
        signals.ArtifactStored(SPEC.id),
        signals.ArtifactStored(aggregate(1).id),
    )
    _, commands = drive(state, offer(1), signals.SpecChecked(SPEC.id, None))
    assert signals.TrainRound(RoundAttempt(1, 1), SPEC.id, aggregate(1).id) in commands


def test_an_offer_with_another_spec_than_the_private_state_has_is_declined(training: SessionState) -> None:
    state, _ = drive(training, signals.RoundCommitted(RoundAttempt(1, 1), SPEC.id, update(1)), receipt(update(1).id))
    _, commands = drive(state, offer(2, spec=OTHER_SPEC), signals.Invited(RoundAttempt(2, 1)))
    assert reasons(commands) == [DeclineReason.SPEC_REFUSED]


def test_the_manifest_backs_off_and_any_grant_resets_it(training: SessionState) -> None:
    state, commands = drive(training, signals.RoundCommitted(RoundAttempt(1, 1), SPEC.id, update(1)))
    assert sent(commands) == ["manifest"]
    times = []
    for tenth in range(1, 50):
        state, commands = drive(state, signals.Tick(), now=tenth / 10)
        times += [tenth / 10] * sent(commands).count("manifest")
    assert times == [1.0, 3.0]  # after 1 s, then 2 s
    state, commands = drive(state, need(update(1).id), now=4.0)
    assert commands == [signals.SendChunks(update(1), ((0, 4),))]
    assert state.delivery is not None
    assert state.delivery.manifest_at == 6.0


def test_a_coordinators_status_opens_a_new_session_unless_a_hello_is_on_its_way() -> None:
    state, commands = drive(SessionState("casting", "site-1"), signals.LinkChanged(up=True))
    assert signals.SendHello() in commands
    state, commands = drive(state, signals.CoordinatorSeen(epoch=4, online=True), now=0.1)
    assert signals.SendHello() not in commands
    assert signals.SendHello() in drive(state, signals.Tick(), now=2.0)[1]
    state, _ = drive(state, signals.Welcomed(epoch=4), now=0.2)
    for seen in (signals.CoordinatorSeen(epoch=4, online=True), signals.CoordinatorSeen(epoch=5, online=False)):
        assert drive(state, seen, now=0.3)[1] == []
    assert signals.SendHello() in drive(state, signals.CoordinatorSeen(epoch=5, online=True), now=0.3)[1]


def test_a_manifest_that_nobody_answers_for_six_seconds_opens_a_new_session(delivering: SessionState) -> None:
    state = delivering
    for tenth in range(1, 60):
        state, commands = drive(state, signals.Tick(), now=tenth / 10)
        assert signals.SendHello() not in commands
    state, commands = drive(state, signals.Tick(), now=6.0)
    assert commands == [signals.SendHello()]
    _, commands = drive(state, signals.Welcomed(epoch=1), now=6.5)
    assert sent(commands) == ["manifest"]


def test_silence_while_downloading_opens_a_new_session(ready: SessionState) -> None:
    assert drive(ready, signals.SessionLost())[1] == [signals.SendHello()]


def test_a_training_process_that_keeps_dying_is_given_ever_more_time_and_then_up(training: SessionState) -> None:
    state, now, pauses = training, 0.0, []
    for death in range(TRAINER_DEATHS):
        state, commands = drive(state, signals.TrainerDied(), now=now)
        if death < TRAINER_DEATHS - 1:
            pauses.append(state.trainer_at - now)
            now = state.trainer_at
            state, _ = drive(state, signals.Tick(), signals.TrainerReady(), now=now)
    assert pauses == [0.0, 0.5, 1.0, 2.0]
    assert reasons(commands) == [DeclineReason.TRAINING_FAILED]


def test_a_training_process_that_never_comes_up_is_reported_as_a_failed_training_not_left_to_the_deadline() -> None:
    fresh = SessionState(federation="shapes", device="site-1")
    asked = (
        offer(1),
        signals.Invited(RoundAttempt(1, 1)),
        signals.ArtifactStored(SPEC.id),
        signals.SpecChecked(SPEC.id, None),
    )
    state, commands = drive(fresh, signals.Tick(), signals.LinkChanged(up=True), signals.Welcomed(epoch=1), *asked)
    assert sent(commands) == ["accept"]
    for death in range(TRAINER_DEATHS):
        assert reasons(commands) == [], death
        state, commands = drive(state, signals.TrainerDied(), now=100.0 * death)
        state, _ = drive(state, signals.Tick(), now=100.0 * death + 50.0)
    assert reasons(commands) == [DeclineReason.TRAINING_FAILED]


def test_an_agent_that_is_stopped_declines_the_round_that_it_has_promised_and_has_not_trained(
    ready: SessionState, training: SessionState, delivering: SessionState
) -> None:
    assert reasons(drive(training, signals.Stopping())[1]) == [DeclineReason.INTERRUPTED]
    for state in (ready, delivering):
        assert sent(drive(state, signals.Stopping())[1]) == []


def test_the_end_is_finalised_once_and_done_only_when_the_outbox_is_empty(training: SessionState) -> None:
    state, _ = drive(training, signals.RoundCommitted(RoundAttempt(1, 1), SPEC.id, update(1)), ended())
    state, commands = drive(state, signals.ArtifactStored(aggregate(9).id))
    assert signals.ChooseModel(SPEC.id, aggregate(9).id) in commands
    state, commands = drive(state, signals.Chosen(aggregate(9).id, succeeded=True))
    assert not any(isinstance(command, signals.Done | signals.ChooseModel) for command in commands)
    state, commands = drive(state, receipt(update(1).id, Outcome.CLOSED))
    assert signals.Done(succeeded=True) in commands
    state, commands = drive(state, ended(), signals.Tick())
    assert commands == [signals.ReleaseTrainer("the federation has ended")]
    assert drive(state, signals.Tick())[1] == []


def test_an_obstacle_declines_before_accepting_and_a_repeated_invite_is_reconsidered(ready: SessionState) -> None:
    state, commands = drive(
        ready, offer(1), *AT_HAND, signals.ObstacleChanged(DeclineReason.HOT), signals.Invited(RoundAttempt(1, 1))
    )
    assert reasons(commands) == [DeclineReason.HOT]
    assert signals.Note("declined", RoundAttempt(1, 1), "hot") in commands
    assert not any(isinstance(command, signals.TrainRound) for command in commands)
    state, commands = drive(state, signals.ObstacleChanged(DeclineReason.HOT), signals.Invited(RoundAttempt(1, 1)))
    assert reasons(commands) == [DeclineReason.HOT]
    assert not any(isinstance(command, signals.Note) for command in commands), (
        "a reminder is answered, and not noted again"
    )
    state, commands = drive(state, signals.ObstacleChanged(DeclineReason.RESERVED), signals.Invited(RoundAttempt(1, 1)))
    assert reasons(commands) == [DeclineReason.RESERVED]
    state, commands = drive(state, signals.ObstacleChanged(None), signals.Tick())
    assert sent(commands) == [], "the coordinator asks again if it still wants the device"
    state, commands = drive(state, signals.Invited(RoundAttempt(1, 1)))
    assert sent(commands) == ["accept"]
    assert signals.TrainRound(RoundAttempt(1, 1), SPEC.id, aggregate(1).id) in commands


def test_an_obstacle_takes_back_no_round_that_is_trained_or_was_declined_for_good(
    training: SessionState, ready: SessionState
) -> None:
    again = (
        signals.LinkChanged(up=False),
        signals.LinkChanged(up=True),
        signals.Welcomed(epoch=1),
        signals.ObstacleChanged(DeclineReason.HOT),
    )
    _, commands = drive(training, *again, signals.Invited(RoundAttempt(1, 1)))
    assert reasons(commands) == []
    assert "accept" in sent(commands)
    refused = (signals.ArtifactStored(SPEC.id), signals.SpecChecked(SPEC.id, DeclineReason.UPLOAD_NOT_ALLOWED))
    state, _ = drive(ready, offer(1), signals.Invited(RoundAttempt(1, 1)), *refused)
    _, commands = drive(state, signals.ObstacleChanged(None), signals.Invited(RoundAttempt(1, 1)))
    assert reasons(commands) == [DeclineReason.UPLOAD_NOT_ALLOWED]


def test_a_commit_counts_before_its_update_is_read_which_is_tried_until_it_works() -> None:
    busy = SessionState("shapes", "a", trainer=TrainerState.BUSY, job=RoundAttempt(1, 1), job_spec="5" * 64)
    state, commands = drive(busy, signals.RoundCommitted(RoundAttempt(1, 1)))
    assert commands == [signals.LoadUpdate()]
    assert (state.trainer, state.committed, state.bound_spec) == (TrainerState.IDLE, RoundAttempt(1, 1), "5" * 64)
    times: list[float] = []
    while len(times) < 7:
        assert state.delivery is not None
        due = state.delivery.manifest_at
        state, commands = drive(state, signals.Tick(), now=due)
        assert commands == [signals.LoadUpdate()]
        times.append(due)
    assert times == [1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0]
    assert MANIFEST_MAX_S == 30.0
    state, _ = drive(state, signals.OutboxFound(RoundAttempt(1, 1), update(1)), now=95.0)
    assert state.delivery == Delivery(RoundAttempt(1, 1), update(1), manifest_at=95.0)


def test_an_update_that_was_announced_stays_announced_while_it_is_cut_for_a_new_link() -> None:
    known = Delivery(RoundAttempt(1, 1), update(1), manifest_at=50.0)
    state = SessionState("shapes", "a", delivery=known, trainer=TrainerState.IDLE)
    state, commands = drive(state, signals.OutboxFound(RoundAttempt(1, 1)), signals.LinkChanged(up=True))
    assert commands[0] == signals.LoadUpdate()
    state, _ = drive(state, signals.OutboxFound(RoundAttempt(1, 1), update(1)))
    assert state.delivery == known
    smaller = update(1).model_copy(update={"chunk_bytes": 300})
    state, _ = drive(state, signals.OutboxFound(RoundAttempt(1, 1), smaller))
    assert state.delivery == Delivery(RoundAttempt(1, 1), smaller)


def test_no_training_process_runs_while_paused_and_a_deadline_that_passed_keeps_no_loop_busy() -> None:
    idle, _ = drive(SessionState(federation="shapes", device="site-1"), signals.Tick(), signals.TrainerReady())
    paused, commands = drive(idle, signals.ObstacleChanged(DeclineReason.PAUSED), signals.Tick())
    assert commands == [signals.ReleaseTrainer("paused")]
    _, commands = drive(idle, signals.ObstacleChanged(DeclineReason.DAILY_LIMIT))
    assert commands == []
    assert signals.StartTrainer() in drive(paused, signals.ObstacleChanged(None))[1]


def test_a_share_of_the_steps_is_trained_as_asked_and_the_accept_says_how_long_it_takes(ready: SessionState) -> None:
    at = RoundAttempt(1, 1)
    asked = signals.Invited(at, share=0.25, predicted_s=12.5)
    _, commands = drive(ready, offer(1), asked, *AT_HAND)
    told = [command.message for command in commands if isinstance(command, signals.Send)]
    assert [message.predicted_s for message in told if isinstance(message, schemas.Accept)] == [12.5]
    assert signals.TrainRound(at, SPEC.id, aggregate(1).id, share=0.25) in commands


def sealed(ready: SessionState) -> SessionState:
    """Round 1 of a federation with sealed parts is accepted and at hand."""
    known = (
        signals.ArtifactStored(SPEC.id),
        signals.SpecChecked(SPEC.id, None, is_sealed=True),
        signals.ArtifactStored(aggregate(1).id),
    )
    state, commands = drive(ready, offer(1), signals.Invited(RoundAttempt(1, 1)), *known)
    assert signals.WeighRound(RoundAttempt(1, 1), SPEC.id, aggregate(1).id) in commands
    return state


def test_a_sealed_round_counts_its_images_announces_keys_until_answered_and_trains_once_its_masks_are_agreed_on(
    ready: SessionState,
) -> None:
    at = RoundAttempt(1, 1)
    announce, train = signals.AnnounceSum(at, 40, vote=1), signals.TrainRound(at, SPEC.id, aggregate(1).id)
    state, commands = drive(sealed(ready), signals.Weighed(at, 40, vote=1))
    assert commands == [announce]
    state, early = drive(state, signals.Tick(), now=SUM_EVERY_S - 0.1)
    state, due = drive(state, signals.Tick(), now=SUM_EVERY_S)
    assert (early, due) == ([], [announce])
    state, commands = drive(state, signals.SumStepped(at, schemas.SumOff()), now=SUM_EVERY_S)
    assert commands == [signals.SumStepped(at, schemas.SumOff())]
    state, commands = drive(state, signals.SumReady(at), now=SUM_EVERY_S)
    assert commands == [train]
    _, later = drive(state, signals.Tick(), signals.SumReady(at), now=10 * SUM_EVERY_S)
    assert later == []


def test_masks_of_an_earlier_attempt_do_not_let_the_next_one_be_trained(ready: SessionState) -> None:
    at, again = RoundAttempt(1, 1), RoundAttempt(1, 2)
    state, _ = drive(sealed(ready), signals.Weighed(at, 40), offer(1, 2), signals.Invited(again))
    state, commands = drive(state, signals.SumReady(at))
    assert not any(isinstance(command, signals.TrainRound) for command in commands)
    _, commands = drive(state, signals.Weighed(again, 41))
    assert signals.AnnounceSum(again, 41) in commands


def test_a_training_process_that_dies_while_it_counts_counts_again(ready: SessionState) -> None:
    state, _ = drive(sealed(ready), signals.TrainerDied())
    _, commands = drive(state, signals.Tick(), signals.TrainerReady())
    assert signals.WeighRound(RoundAttempt(1, 1), SPEC.id, aggregate(1).id) in commands


ATTEMPTS = [RoundAttempt(round_number, attempt) for round_number in (1, 2, 3) for attempt in (1, 2)]
attempts = st.sampled_from(ATTEMPTS)
network_events: st.SearchStrategy[signals.Input] = st.one_of(
    st.just(signals.Tick()),
    st.builds(signals.LinkChanged, st.booleans()),
    st.builds(signals.CoordinatorSeen, st.integers(1, 3), st.booleans()),
    st.builds(signals.Welcomed, st.integers(1, 3)),
    attempts.map(lambda round_attempt: offer(round_attempt.round, round_attempt.attempt)),
    st.just(ended()),
    st.builds(signals.Invited, attempts),
    st.builds(signals.ObstacleChanged, st.sampled_from([None, DeclineReason.HOT, DeclineReason.RESERVED])),
    st.just(signals.ArtifactStored(SPEC.id)),
    st.integers(1, 3).map(lambda number: signals.ArtifactStored(aggregate(number).id)),
    st.just(signals.ArtifactStored(aggregate(9).id)),
    st.just(signals.SpecChecked(SPEC.id, None)),
    st.just(signals.SessionLost()),
    st.just(signals.Stopping()),
    st.just(signals.ConsentChanged()),
    st.sampled_from([DeclineReason.PAUSED, DeclineReason.DAILY_LIMIT, None]).map(signals.ObstacleChanged),
    st.just(signals.TrainerReady()),
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

    def __init__(self, events: list[signals.Input | str]) -> None:
        self.state = SessionState(federation="shapes", device="site-1")
        self.running: RoundAttempt | str | None = None
        self.committed: list[RoundAttempt] = []
        self.outbox: ArtifactRef | None = None
        self.loads = 0  # of the outbox; every other one fails
        self.now = 0.0
        for event in events:
            self.trainer(event) if isinstance(event, str) else self.feed(event)

    def feed(self, event: signals.Input) -> None:
        self.now += 0.7
        self.state, commands = step(self.state, event, self.now)
        for command in commands:
            self._obey(command, event)
        if signals.LoadUpdate() in commands:
            self.loads += 1
            if self.loads % 2 == 0:
                self.feed(signals.OutboxFound(self.committed[-1], self.outbox))

    def trainer(self, what: str) -> None:
        job, self.running = self.running, None
        if job is None:
            return
        if what == "abandon":
            self.feed(signals.TrainingAbandoned())
        elif what == "lose":
            self.feed(signals.ArtifactLost(job if isinstance(job, str) else aggregate(job.round).id))
        elif isinstance(job, str):
            self.feed(signals.TrainerDied() if what.startswith("die") else signals.Chosen(job, succeeded=True))
        elif what == "fail":
            self.feed(signals.RoundFailed(job, DeclineReason.DIVERGED))
        elif what == "die":
            self.feed(signals.TrainerDied())
        else:
            assert self.outbox is None, "an update that had no receipt would be overwritten"
            self.committed.append(job)
            self.outbox = update(job.round, job.attempt)
            self.feed(signals.RoundCommitted(job))
            if what == "die after commit":
                self.feed(signals.TrainerDied())

    def _obey(self, command: signals.Command, event: signals.Input) -> None:
        if isinstance(command, signals.TrainRound):
            assert (self.running, self.outbox) == (None, None)
            assert not self.committed or command.round_attempt > self.committed[-1], "trained twice"
            self.running = command.round_attempt
        elif isinstance(command, signals.ChooseModel):
            assert self.running is None
            self.running = command.aggregate
        elif isinstance(command, signals.StartTrainer):
            self.running = None
        elif isinstance(command, signals.ReleaseTrainer):
            assert self.running is None, "its work would be lost"
        elif isinstance(command, signals.RecordDelivery):
            assert self.outbox is not None
            assert isinstance(event, Receipt)
            assert event.artifact == self.outbox.id == command.artifact
            self.outbox = None
        elif isinstance(command, signals.Send):
            assert self.state.up
            if isinstance(command.message, schemas.Manifest):
                assert command.message.artifact == self.outbox
            elif isinstance(command.message, schemas.Accept):
                assert command.message.at == self.state.invited
        elif isinstance(command, signals.SendChunks):
            assert command.update == self.outbox


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(network_events, trainer_events), max_size=80))
def test_the_laws_hold_under_every_order_of_events(events: list[signals.Input | str]) -> None:
    shell = Shell(events)
    assert (shell.state.delivery is not None) == (shell.outbox is not None)
    assert len(set(shell.committed)) == len(shell.committed)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(network_events, trainer_events), max_size=40))
def test_whatever_happened_a_quiet_coordinator_brings_the_device_to_the_end(events: list[signals.Input | str]) -> None:
    shell = Shell(
        [
            *events,
            signals.ObstacleChanged(None),
            signals.LinkChanged(up=True),
            signals.Welcomed(epoch=9),
            ended(),
            signals.ArtifactStored(SPEC.id),
        ]
    )
    for _ in range(60):
        shell.feed(signals.ArtifactStored(aggregate(9).id))
        shell.feed(signals.TrainerReady())
        if shell.outbox is not None:
            shell.feed(signals.Welcomed(epoch=9))
            shell.feed(receipt(shell.outbox.id))
        shell.trainer("commit")
    assert shell.state.done


@pytest.fixture
def ready() -> SessionState:
    """Connected, welcomed, trainer idle, nothing known of any round."""
    fresh = SessionState(federation="shapes", device="site-1")
    state, _ = drive(
        fresh, signals.Tick(), signals.TrainerReady(), signals.LinkChanged(up=True), signals.Welcomed(epoch=1)
    )
    return state


@pytest.fixture
def training(ready: SessionState) -> SessionState:
    """Round 1 is being trained."""
    state, commands = drive(ready, offer(1), signals.Invited(RoundAttempt(1, 1)), *AT_HAND)
    assert signals.TrainRound(RoundAttempt(1, 1), SPEC.id, aggregate(1).id) in commands
    return state


@pytest.fixture
def delivering(training: SessionState) -> SessionState:
    """Round 1 is trained, and its update waits for a receipt."""
    return drive(training, signals.RoundCommitted(RoundAttempt(1, 1), SPEC.id, update(1)))[0]
