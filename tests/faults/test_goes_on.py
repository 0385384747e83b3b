"""Whatever fails while a command is carried out, the agent's state goes on without a restart, and what waits is bounded in bytes; so does a coordinator without a usable link."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.rounds.engine import Phase
from edge_client.agent.loop import INBOX_BYTES, Agent
from edge_client.session import signals
from edge_client.session.state import Delivery, SessionState, TrainerState, next_deadline
from edge_client.session.state_machine import MANIFEST_MAX_S, step
from fedcg.wire.messages.schemas import Accept, ArtifactRef, Decline, DeclineReason, Manifest, RoundAttempt
from fedcg.wire.transport import mqtt
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.transport import Delivery as Incoming
from tests.support.broker.broker_packets import SUBSCRIBE, scripted_broker, suback
from tests.support.coordinator.world import RunningService
from tests.support.coordinator.world import World as ServiceWorld
from tests.support.edge.world import FakeTrainer, World
from tests.support.raising import raising
from tests.support.waiting import wait_until

UPDATE = ArtifactRef(id="e" * 64, size=4000, chunk_bytes=500)
NOWHERE = 88  # what a link with packets of 600 bytes takes


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, is_automatic=False)
    yield made
    made.close()


def invited(world: World, attempt: int = 1) -> None:
    """The agent has accepted an attempt of the first round."""
    if attempt == 1:
        world.connect()
    world.open_round(1, attempt)
    world.coordinator.wait(Accept)


def training(world: World, attempt: int = 1) -> signals.TrainRound:
    world.coordinator.work_until(lambda: len(world.trainer.commands) == attempt, "it trains")
    command = world.trainer.commands[-1]
    assert isinstance(command, signals.TrainRound)
    return command


def errors(world: World) -> list[str]:
    return [str(event["detail"]) for event in world.events("agent_error")]


def test_a_link_that_shrinks_while_a_box_trains_delays_its_update_and_loses_nothing(world: World) -> None:
    invited(world)
    command = training(world)
    usual, world.broker.max_payload = world.broker.max_payload, NOWHERE
    world.trainer.commit(command)
    world.trainer.deliver(signals.RoundCommitted(command.round_attempt))
    wait_until(lambda: bool(errors(world)), "the update can't be cut")
    assert "the link takes payloads of 88 bytes" in errors(world)[0]
    world.broker.max_payload = usual
    assert world.coordinator.wait(Manifest).round == 1
    assert len(world.trainer.commands) == 1


def test_a_round_that_the_trainer_can_not_be_given_is_declined_and_the_next_attempt_trains(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(FakeTrainer, "send", raising(RuntimeError("nobody foresaw this")))
        invited(world)
        assert world.coordinator.wait(Decline).reason is DeclineReason.TRAINING_FAILED
    assert "RuntimeError: nobody foresaw this" in errors(world)[0]
    invited(world, attempt=2)
    world.coordinator.work_until(lambda: len(world.trainer.commands) == 1, "the next attempt trains")


def test_a_training_process_that_can_not_be_started_for_whatever_reason_is_started_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[Callable[..., int]] = []
    start = FakeTrainer.start

    def breaks_twice(trainer: FakeTrainer) -> int:
        starts.append(start)
        if len(starts) < 3:
            raise ValueError("a bad descriptor")
        return start(trainer)

    monkeypatch.setattr(FakeTrainer, "start", breaks_twice)
    invited(world)
    training(world)
    assert len(starts) == 3


# ------------------------------------------------------------------ the state machine


def drive(state: SessionState, *events: signals.Event, now: float = 0.0) -> tuple[SessionState, list[Any]]:
    commands: list[Any] = []
    for event in events:
        state, more = step(state, event, now)
        commands += more
    return state, commands


def test_a_commit_counts_before_its_update_is_read_which_is_tried_until_it_works() -> None:
    busy = SessionState("shapes", "a", trainer=TrainerState.BUSY, job=RoundAttempt(1, 1), job_spec="5" * 64)
    state, commands = drive(busy, signals.RoundCommitted(RoundAttempt(1, 1)))
    assert commands == [signals.LoadUpdate()]
    assert (state.trainer, state.committed, state.bound_spec) == (TrainerState.IDLE, RoundAttempt(1, 1), "5" * 64)
    times: list[float] = []
    while len(times) < 7:
        due = next_deadline(state)
        assert due is not None
        state, commands = drive(state, signals.Tick(), now=due)
        assert commands == [signals.LoadUpdate()]
        times.append(due)
    assert times == [1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0]
    assert MANIFEST_MAX_S == 30.0
    state, _ = drive(state, signals.OutboxFound(RoundAttempt(1, 1), UPDATE), now=95.0)
    assert state.delivery == Delivery(RoundAttempt(1, 1), UPDATE, manifest_at=95.0)


def test_an_update_that_was_announced_stays_announced_while_it_is_cut_for_a_new_link() -> None:
    known = Delivery(RoundAttempt(1, 1), UPDATE, manifest_at=50.0)
    state = SessionState("shapes", "a", delivery=known, trainer=TrainerState.IDLE)
    state, commands = drive(state, signals.OutboxFound(RoundAttempt(1, 1)), signals.LinkChanged(up=True))
    assert commands[0] == signals.LoadUpdate()
    state, _ = drive(state, signals.OutboxFound(RoundAttempt(1, 1), UPDATE))
    assert state.delivery == known
    smaller = UPDATE.model_copy(update={"chunk_bytes": 300})
    state, _ = drive(state, signals.OutboxFound(RoundAttempt(1, 1), smaller))
    assert state.delivery == Delivery(RoundAttempt(1, 1), smaller)


# ------------------------------------------------------------------ bounded in bytes


@pytest.mark.parametrize("size", [0, 100_000, 2_000_000])
def test_what_a_broker_pours_into_an_agent_that_does_not_read_is_bounded_in_bytes(world: World, size: int) -> None:
    payload = bytes(size)
    world.start_agent()
    world.stop_agent()
    agent: Agent = world.agent
    for _ in range(INBOX_BYTES // 1000):
        agent._on_delivery(Incoming("t", payload, retained=False))
        if agent._dropped:
            break
    assert agent._dropped == 1
    kept = 0
    while not agent._inbox.empty():
        kept += isinstance(agent._inbox.get_nowait(), Incoming)
    assert kept * size <= INBOX_BYTES + size


def test_a_broker_with_too_small_packets_does_not_end_the_coordinator_which_connects_when_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mqtt, "BACKOFF_FIRST_S", 0.01)
    with scripted_broker() as broker, closing(ServiceWorld(tmp_path, clients=())) as world:
        config = replace(broker.config(), keepalive_s=60)
        context = replace(world.service_context(), connect=lambda will: MqttTransport(config, will))
        monkeypatch.setattr(world, "service_context", lambda: context)
        with RunningService(world) as running:
            for _ in range(3):
                assert broker.welcome(properties=b"\x27" + (600).to_bytes(4, "big")).next() is None
            wait_until(lambda: "packets of at most 600 bytes" in caplog.text, "the cause is logged")
            peer = broker.welcome()
            peer.send(suback("5", int.from_bytes(peer.expect(SUBSCRIBE)[:2], "big"), b"\x01\x01\x01"))
            wait_until(lambda: running.service.is_connected, "it has a link")
            assert running.service.state.phase is Phase.WAITING
            broker.close()
