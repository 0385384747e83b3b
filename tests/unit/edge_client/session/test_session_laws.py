"""The laws of the agent's state machine under random orders of events."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.session.signals import (
    ArtifactLost,
    ArtifactStored,
    ChooseModel,
    Chosen,
    Command,
    ConsentChanged,
    CoordinatorSeen,
    Event,
    Invited,
    LinkChanged,
    LoadUpdate,
    ObstacleChanged,
    OutboxFound,
    Receipted,
    RecordDelivery,
    ReleaseTrainer,
    RoundCommitted,
    RoundFailed,
    Send,
    SendChunks,
    SessionLost,
    SpecChecked,
    StartTrainer,
    Stopping,
    Tick,
    TrainerDied,
    TrainerReady,
    TrainingAbandoned,
    TrainRound,
    Welcomed,
)
from edge_client.session.state import SessionState
from edge_client.session.state_machine import step
from fedcg.wire.messages.schemas import Accept, ArtifactRef, DeclineReason, Manifest, Outcome, RoundAttempt
from tests.support.edge.session_events import SPEC, aggregate, drive, ended, need, offer, receipt, update

ATTEMPTS = [RoundAttempt(round_number, attempt) for round_number in (1, 2, 3) for attempt in (1, 2)]
attempts = st.sampled_from(ATTEMPTS)
network_events: st.SearchStrategy[Event] = st.one_of(
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

    def __init__(self, events: list[Event | str]) -> None:
        self.state = SessionState(federation="shapes", device="site-1")
        self.running: RoundAttempt | str | None = None
        self.committed: list[RoundAttempt] = []
        self.outbox: ArtifactRef | None = None
        self.loads = 0  # of the outbox; every other one fails
        self.now = 0.0
        for event in events:
            self.trainer(event) if isinstance(event, str) else self.feed(event)

    def feed(self, event: Event) -> None:
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

    def _obey(self, command: Command, event: Event) -> None:
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
            assert isinstance(event, Receipted)
            assert event.receipt.artifact == self.outbox.id == command.artifact
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
def test_the_laws_hold_under_every_order_of_events(events: list[Event | str]) -> None:
    shell = Shell(events)
    assert (shell.state.delivery is not None) == (shell.outbox is not None)
    assert len(set(shell.committed)) == len(shell.committed)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(network_events, trainer_events), max_size=40))
def test_whatever_happened_before_a_quiet_coordinator_brings_the_device_to_the_end(events: list[Event | str]) -> None:
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


def test_the_laws_would_notice_a_machine_that_forgets_its_commits(training: SessionState) -> None:
    """The checks above bite: the same machine with its memory of commits taken away trains twice."""
    state, _ = drive(training, RoundCommitted(RoundAttempt(1, 1), SPEC.id, update(1)), receipt(update(1).id))
    amnesic = replace(state, committed=None)
    _, commands = drive(amnesic, Invited(RoundAttempt(1, 1)))
    assert any(isinstance(command, TrainRound) for command in commands)
