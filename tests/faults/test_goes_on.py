"""Whatever fails while a command is carried out, the agent's state goes on without a restart, and what waits is bounded in bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_client.agent.loop import INBOX_BYTES, Agent
from edge_client.session import signals
from fedcg.wire.messages.schemas import Accept, Decline, DeclineReason, Manifest
from fedcg.wire.transport.transport import Delivery as Incoming
from tests.support.edge.world import FakeTrainer, World
from tests.support.raising import raising
from tests.support.waiting import wait_until

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
