"""What a person at the box reads, in the agent's log and in `fedcg agent status`, when something went wrong and when it went well."""

import errno
import logging
import os
from pathlib import Path

import pytest

from edge_client.agent import reports
from edge_client.agent.reports import LinkProblems
from edge_client.cli.status import Status, read_status
from edge_client.errors import StoreLockedError
from edge_client.session.signals import ChooseModel, RoundFailed, TrainerCommand
from edge_client.store.private_store import PrivateStore
from fedcg.event_log import EventLog, read_events
from fedcg.wire.messages.schemas import Accept, Decline, DeclineReason, Hello, Manifest, RoundAttempt
from fedcg.worker_process import Exited
from tests.support.edge.world import DEVICE, FakeTrainer, MakeWorld, World, in_round, in_training

NO_DOG = "/srv/images/dog: the spec has no class 'dog'; its classes are bar, dot"


@pytest.fixture(autouse=True)
def log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def status(world: World) -> Status:
    return read_status(world.config)


def test_why_a_round_is_declined_is_in_the_log_and_in_the_status(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = in_training(make_world)
    world.trainer.deliver(RoundFailed(RoundAttempt(1, 1), DeclineReason.NO_DATA, NO_DOG))
    assert world.coordinator.wait(Decline).reason is DeclineReason.NO_DATA
    world.coordinator.work_until(lambda: "declined (no_data)" in caplog.text, "the decline is logged")
    assert f"round 1 of 2: declined (no_data): {NO_DOG}. What to do: put images where [data] root" in caplog.text
    world.coordinator.work_until(lambda: "last_declined" in status(world), "the decline is written down")
    assert status(world)["last_declined"] == f"round 1, attempt 1: no_data: {NO_DOG}"


def test_the_death_of_the_training_process_is_told(make_world: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    world = in_training(make_world)
    world.trainer.deliver(Exited(1001, -9))
    world.coordinator.work_until(lambda: "last_trainer_death" in status(world), "the death is written down")
    assert "the training process ended with code -9 (code -9 is mostly a lack of memory)" in caplog.text
    assert status(world)["last_trainer_death"] == "exit code -9"


def test_a_lost_link_and_its_return_are_told(make_world: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    world = in_round(make_world)
    world.broker.drop(DEVICE)
    world.coordinator.work_until(lambda: "is lost" in caplog.text, "the loss is told")
    world.broker.restore(DEVICE)
    world.coordinator.wait(Hello)
    log = [record.getMessage() for record in caplog.records if "broker" in record.getMessage()]
    assert [line.partition(" after")[0].partition(";")[0] for line in log] == [
        "connected to the broker",
        "the link to the broker is lost",
        "the link to the broker is back",
    ]


def test_a_coordinator_that_does_not_answer_is_told_once_with_the_likely_causes(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(clock_speed=20.0)
    world.coordinator.answers_hello = False
    world.coordinator.come_online()
    world.start_agent()
    for _ in range(reports.UNANSWERED_HELLOS + 2):
        world.coordinator.wait(Hello)
    assert caplog.text.count("the coordinator does not answer: it does not run, this federation is not started") == 1
    assert "fedcg doctor" in str(status(world)["link_problem"])
    world.coordinator.answers_hello = True
    world.coordinator.work_until(lambda: status(world)["link_problem"] is None, "the answer ends the problem")


def test_what_the_transport_warns_of_is_in_the_status_until_the_link_is_back(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl", lambda: 0.0)
    handler, log = LinkProblems(events), logging.getLogger("fedcg.wire.test")
    log.addHandler(handler)
    try:
        for seconds in (0.2, 0.4):
            log.warning("%s; trying again in %.1f s", "certificate revoked", seconds)
        log.info("nothing")
    finally:
        log.removeHandler(handler)
    told = [event["detail"] for event in read_events(tmp_path / "events.jsonl")]
    assert told == ["certificate revoked; trying again in 0.2 s"]


def test_what_became_of_an_accepted_update_is_in_the_log_and_in_the_status(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    why = "not merged (quarantine): its step is 4 times as long as the median (at most 3)"
    world = in_round(make_world)
    manifest = world.coordinator.wait(Manifest)
    world.coordinator.receipt(manifest)
    world.coordinator.work_until(lambda: bool(world.events("receipt")), "the receipt is recorded")
    assert status(world)["odd_updates"] is None
    for _ in range(2):  # the coordinator sends it again with each session
        world.coordinator.receipt(manifest, reason=why)
    world.coordinator.invite(1)
    world.coordinator.wait(Decline)  # of an update that was delivered: the receipts before it are handled
    assert status(world)["odd_updates"] == f"1 of the last 1; round 1.1: {why}"
    assert status(world)["last_receipt"] == f"round 1.1: accepted {why}"
    assert [event["reason"] for event in world.events("receipt")] == ["", why]
    assert f"round 1: the update is {why}" in caplog.text


class _Chooser(FakeTrainer):
    outcome: dict[str, object]

    def work(self, command: TrainerCommand) -> None:
        super().work(command)
        if isinstance(command, ChooseModel):
            self.store.save_finalised({"aggregate": command.aggregate, **self.outcome})


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (
            {"model_dir": "/srv/models/0003", "accuracy_personal": 0.674, "accuracy_onnx": 0.912},  # the gate kept 0003
            "finished; model 0003, accuracy 91.2%",
        ),
        ({"model_dir": "/srv/models/0003", "accuracy_personal": 0.674, "accuracy_onnx": None}, "finished; model 0003"),
        ({"accuracy_personal": 0.5}, "finished; no exported model, accuracy 50.0%"),
    ],
)
def test_the_end_is_told_with_the_model_and_its_accuracy(
    make_world: MakeWorld,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    outcome: dict[str, object],
    told: str,
) -> None:
    monkeypatch.setattr(_Chooser, "outcome", outcome, raising=False)
    monkeypatch.setattr("tests.support.edge.world.FakeTrainer", _Chooser)
    world = in_round(make_world)
    world.coordinator.wait(Accept)
    manifest = world.coordinator.wait(Manifest)
    world.coordinator.collect(manifest)
    world.coordinator.receipt(manifest)
    world.coordinator.finish(world.spec, world.aggregate(1), 1)
    world.coordinator.work_until(lambda: bool(world.events("finished")), "the end")
    assert told in caplog.text
    assert "round 1: the update is being sent (" in caplog.text
    assert "round 1: the update is accepted" in caplog.text
    assert status(world)["finished"] == told


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "Free space on, or repair, "), (errno.EACCES, "read and write /srv/store/x (chown, chmod)")],
)
def test_a_refusal_of_the_disk_has_the_advice_that_helps_and_no_traceback(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "refused", "/srv/store/x")

    world = in_training(make_world)
    world.trainer.work(world.trainer.commands[-1])
    manifest = world.coordinator.wait(Manifest)
    monkeypatch.setattr(PrivateStore, "save_delivery", refuse)
    world.coordinator.receipt(manifest)
    world.coordinator.work_until(lambda: "last_agent_error" in status(world), "the refusal is written down")
    assert advice in str(status(world)["last_agent_error"])
    assert advice in caplog.text
    assert "Traceback" not in caplog.text


def test_a_lock_names_the_process_that_holds_it(tmp_path: Path) -> None:
    store = PrivateStore.open(tmp_path, "shapes", "a")
    (tmp_path / "lock").write_text("99999999\n")  # of a process that is gone
    with store.locked(), pytest.raises(StoreLockedError, match=f"is held by process {os.getpid()},"), store.locked():
        raise AssertionError("the lock was given twice")
