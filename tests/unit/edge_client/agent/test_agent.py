"""Agent, state machine and store together, over the in-process broker, against a coordinator scripted step by step; and what the log and the status say."""

import logging
import re
import time
from pathlib import Path

import pytest

from edge_client.agent import reports
from edge_client.agent.reports import LinkProblems
from edge_client.cli.status import Status, read_status, status_table
from edge_client.config import PolicySection
from edge_client.session.signals import Noted, RoundFailed, TrainRound
from edge_client.store.private_store import FINALISED_FILE, open_store
from fedcg.errors import NOT_CONNECTED
from fedcg.event_log import EventLog, read_events
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.parts import Part, ReportField
from fedcg.worker_process import Exited
from tests.support.edge.world import (
    DEVICE,
    MakeWorld,
    World,
    connected,
    in_round,
    in_training,
    make_config,
    toy_spec,
    update_of,
)
from tests.support.waiting import wait_until


def test_a_two_round_federation_ends_with_a_chosen_model(make_world: MakeWorld, log: pytest.LogCaptureFixture) -> None:
    world = make_world()
    coordinator = world.coordinator
    world.connect(until_finished=True)
    for round_number in (1, 2):
        world.open_round(round_number)
        accept = coordinator.wait(schemas.Accept)
        assert (accept.round, accept.attempt) == (round_number, 1)
        assert world.deliver() == update_of(world.spec, schemas.RoundAttempt(round_number, 1))
    coordinator.finish(world.spec, world.aggregate(2), 2)
    while world.exit_code is None:
        coordinator.step()
    assert (world.exit_code, world.trainer.rounds()) == (0, [schemas.RoundAttempt(1, 1), schemas.RoundAttempt(2, 1)])
    assert world.store.record(FINALISED_FILE)["aggregate"] == coordinator.serve(world.aggregate(2)).id
    for told in ("1: sending the update (", "1: update accepted", "2: update accepted"):
        assert f"round {told}" in log.text
    assert status(world)["finished"] == "finished; no exported model"
    assert re.search(r"last welcomed +20..-.* UTC\n", status_table(status(world)))
    # It is extended.
    EventLog(world.config.store / "events.jsonl", time.time).write("invited", round=3, attempt=1, rounds=3)
    assert status(world)["finished"] is None


def test_a_revoked_device_believes_the_coordinator_alone_says_so_once_and_ends_when_it_runs_until_the_end(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    coordinator = world.coordinator
    world.connect(until_finished=True)
    topic, about = coordinator.topics.down_control(DEVICE), coordinator.address(DEVICE)
    own = schemas.Revoked(**about, key=coordinator.device_key.public.hex)
    coordinator.publish(topic, schemas.Revoked(**about, key="0" * 64))  # the device that had this name before
    coordinator.publish(topic, own, key=SigningKey.generate())
    wait_until(lambda: bool(world.events("refused")), "the forged statement is refused")
    assert "not signed by it" in str(world.events("refused")[0]["detail"])
    assert world.events("revoked") == []
    coordinator.publish(topic, own)
    coordinator.publish(topic, own)
    wait_until(lambda: world.exit_code is not None, "the agent ends")
    assert world.exit_code == NOT_CONNECTED
    assert len(world.events("revoked")) == 1
    assert world.store.is_revoked(coordinator.device_key.public.hex)
    assert not world.store.is_revoked("0" * 64)  # enrolled anew


def test_a_restarted_revoked_device_remembers_it_until_the_coordinator_welcomes_it(make_world: MakeWorld) -> None:
    world = make_world()
    store, key = open_store(world.config, make=True), world.coordinator.device_key.public.hex
    store.save_revoked(key, revoked=True)
    world.connect()
    wait_until(lambda: not store.is_revoked(key), "the welcome counts")
    assert len(world.events("revoked")) == 1


def test_a_live_offer_is_received_from_the_broadcast_without_asking(make_world: MakeWorld) -> None:
    world = in_round(make_world)
    world.coordinator.broadcast(world.aggregate())
    world.coordinator.wait(schemas.Manifest)
    spec_id, aggregate_id = world.spec.digest, world.coordinator.serve(world.aggregate()).id
    assert {message.artifact for message in world.coordinator.heard if isinstance(message, schemas.Need)} == {spec_id}
    assert {event["artifact"] for event in world.events("artifact_stored")} == {spec_id, aggregate_id}


def test_a_device_that_is_not_invited_trains_nothing_and_asks_for_nothing(make_world: MakeWorld) -> None:
    world = connected(make_world)
    world.coordinator.offer(world.spec, world.aggregate(), 1)
    wait_until(lambda: len(world.events("offer")) == 1, "the offer arrives")
    world.coordinator.invite(7)  # of another round than the open one
    wait_until(lambda: len(world.events("invited")) == 1, "the invite arrives")
    world.coordinator.broadcast(world.aggregate())
    wait_until(lambda: len(world.events("artifact_stored")) == 1, "the broadcast is kept all the same")
    assert world.trainer.rounds() == []
    world.coordinator.invite(1)
    world.coordinator.wait(schemas.Manifest)


def test_a_manifest_is_repeated_until_a_receipt_comes_and_then_never_again(make_world: MakeWorld) -> None:
    world = in_round(make_world)
    first, second = world.coordinator.wait(schemas.Manifest), world.coordinator.wait(schemas.Manifest)
    assert first.artifact == second.artifact
    assert first.counter < second.counter
    world.coordinator.receipt(first, schemas.Outcome.LATE)
    wait_until(lambda: len(world.events("receipt")) == 1, "the receipt is recorded")
    assert world.events("receipt")[0]["outcome"] == "late"
    assert world.store.outbox(world.store.generations.current()[0]) is None
    while world.coordinator.step() is not None:
        pass  # manifests from before the receipt
    world.coordinator.heard.clear()
    world.coordinator.invite(1)  # trained and receipted: nothing is left to deliver
    assert world.coordinator.wait(schemas.Decline).reason is schemas.DeclineReason.NOT_ELIGIBLE
    assert not any(isinstance(message, schemas.Manifest) for message in world.coordinator.heard)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_device_follows_a_coordinator_that_went_back_and_names_the_round_that_it_remembers(
    make_world: MakeWorld, *, is_restarted: bool
) -> None:
    """As after a restore: the rounds since the backup are trained again, each of them once."""
    world = connected(make_world)
    coordinator = world.coordinator
    for number in (1, 2):
        world.open_round(number)
        world.deliver()
    coordinator.epoch += 1_000_000
    coordinator.session = None
    if is_restarted:
        world.stop_agent()
    coordinator.come_online()
    if is_restarted:
        world.start_agent()
    assert coordinator.wait(schemas.Hello).at == schemas.RoundAttempt(2, 1)
    world.open_round(1)
    assert world.deliver() == update_of(world.spec, schemas.RoundAttempt(1, 1))
    coordinator.invite(1)  # trained and receipted: not a second time
    assert coordinator.wait(schemas.Decline).reason is schemas.DeclineReason.NOT_ELIGIBLE
    world.open_round(2)
    assert coordinator.wait(schemas.Manifest).at == schemas.RoundAttempt(2, 1)
    assert world.events("refused") == [], "an aggregate that was deleted as one of an earlier round is fetched again"


def test_a_device_leaves_its_session_and_names_its_epoch_when_an_older_copy_of_the_coordinator_comes_online(
    make_world: MakeWorld,
) -> None:
    world = connected(make_world, clock_speed=20.0)  # hellos every 0.1 s
    coordinator = world.coordinator

    def come_online(epoch: int, *, answers: bool = True) -> None:
        coordinator.epoch, coordinator.session, coordinator.answers_hello = epoch, None, answers
        coordinator.come_online()

    come_online(7)
    coordinator.work_until(lambda: len(world.events("welcomed")) == 2, "a session of the later epoch")
    come_online(5)
    coordinator.heard.clear()
    assert coordinator.wait(schemas.Hello).epoch == 7
    coordinator.work_until(lambda: bool(world.events("link_problem")), "a person is told")
    seen = read_status(world.config)
    assert not seen["agent_in_session"]
    assert "is at epoch 5, behind epoch 7 that this device has seen" in str(seen["link_problem"])
    come_online(8)
    coordinator.work_until(lambda: len(world.events("welcomed")) == 3, "the later one is followed")
    assert read_status(world.config)["link_problem"] is None
    world.agent._older_at = float("inf")  # not yet a minute later
    refused = len(world.events("refused"))
    come_online(5)
    wait_until(lambda: len(world.events("refused")) > refused, "a replay of the older status")
    assert read_status(world.config)["agent_in_session"], "it ends one session in a minute"


def test_a_trainer_that_dies_after_its_commit_is_not_asked_to_train_again(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    command = world.trainer.commands[0]
    assert isinstance(command, TrainRound)
    world.trainer.commit(command)
    world.trainer.deliver(Exited(1001, -9))
    assert world.deliver() == update_of(world.spec, schemas.RoundAttempt(1, 1))
    wait_until(lambda: world.trainer.starts == 2, "the training process is replaced")
    assert world.trainer.rounds() == [schemas.RoundAttempt(1, 1)]


def test_an_agent_that_is_stopped_while_it_trains_declines_before_it_goes_offline(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    world.agent.stop()
    assert world.coordinator.wait(schemas.Decline).reason is schemas.DeclineReason.INTERRUPTED
    assert not world.coordinator.wait(schemas.DeviceStatus).online
    world.join()
    (declined,) = world.events("declined")
    assert declined["reason"] == "interrupted"


def test_how_far_training_is_goes_to_the_coordinator_with_the_heartbeats(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    where = {"round": 1, "attempt": 1, "pid": 7}
    world.trainer.deliver(Noted({"event": "phase_started", "phase": "classify", **where}))
    beat = world.coordinator.wait(schemas.Heartbeat)
    while beat.phase is None:  # one that was on its way
        beat = world.coordinator.wait(schemas.Heartbeat)
    assert (beat.at, beat.phase, beat.step, beat.steps) == (schemas.RoundAttempt(1, 1), "classify", 0, 0)
    world.trainer.deliver(Noted({"event": "progress", "phase": "the patient's name", "step": 3, "steps": 9, **where}))
    beat = world.coordinator.wait(schemas.Heartbeat)
    assert (beat.phase, beat.step, beat.steps) == ("train", 33, 100), "no number of steps, and so of images"
    world.trainer.work(world.trainer.commands[-1])
    assert world.coordinator.wait(schemas.Heartbeat).phase is None


def test_a_device_whose_owner_allows_no_health_report_says_nothing_of_its_training(make_world: MakeWorld) -> None:
    world = make_world(policy=PolicySection(allow_report=frozenset({ReportField.EXAMPLES})), is_automatic=False)
    world.spec = toy_spec(report=(ReportField.EXAMPLES,))
    world.connect()
    world.start_training()
    where = {"round": 1, "attempt": 1, "pid": 7}
    world.trainer.deliver(Noted({"event": "progress", "phase": "classify", "step": 3, "steps": 9, **where}))
    world.trainer.work(world.trainer.commands[-1])
    world.coordinator.wait(schemas.Manifest)
    assert all(message.phase is None for message in world.coordinator.heard if isinstance(message, schemas.Heartbeat))


def test_a_damaged_download_is_fetched_again(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    command = world.trainer.commands[0]
    assert isinstance(command, TrainRound)
    world.store.artifacts.path(command.aggregate).write_bytes(b"rotten")
    world.trainer.deliver(Exited(1001, -9))  # the round is started again, and its aggregate is read again
    wait_until(
        lambda: world.coordinator.step() is None and len(world.trainer.rounds()) == 2, "it is fetched and trained"
    )
    assert world.store.artifacts.get(command.aggregate) == world.aggregate()


def test_an_update_that_its_owner_forbade_after_it_was_made_never_leaves(make_world: MakeWorld) -> None:
    world = in_round(make_world)
    world.coordinator.wait(schemas.Manifest)
    world.stop_agent()
    world.coordinator.session = None
    while world.coordinator.step() is not None:
        pass  # what the first agent said
    world.coordinator.heard.clear()
    world.config = make_config(world.root, policy=PolicySection(allow_upload=frozenset({Part.CLASSIFIER})))
    world.start_agent()
    world.coordinator.wait(schemas.Hello)
    world.coordinator.invite(1)
    assert world.coordinator.wait(schemas.Decline).reason is schemas.DeclineReason.NOT_ELIGIBLE
    assert not any(isinstance(message, schemas.Manifest) for message in world.coordinator.heard)
    assert "generator" in str(world.events("refused")[-1]["detail"])
    assert world.store.deliveries()[-1].outcome == "withheld"


NO_DOG = "/srv/images/dog: the spec has no class 'dog'; its classes are bar, dot"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """All that the agent logs."""
    caplog.set_level(logging.INFO)
    return caplog


def status(world: World) -> Status:
    return read_status(world.config)


def test_why_a_round_is_declined_is_in_the_log_and_in_the_status_and_the_next_attempt_is_trained(
    make_world: MakeWorld, log: pytest.LogCaptureFixture
) -> None:
    world = in_training(make_world)
    world.trainer.deliver(RoundFailed(schemas.RoundAttempt(1, 1), schemas.DeclineReason.NO_DATA, NO_DOG))
    assert world.coordinator.wait(schemas.Decline).reason is schemas.DeclineReason.NO_DATA
    world.coordinator.work_until(lambda: "declined (no_data)" in log.text, "the decline is logged")
    assert f"round 1 of 2: declined (no_data): {NO_DOG}. What to do: put images where [data] root" in log.text
    world.coordinator.work_until(lambda: "last_declined" in status(world), "the decline is written down")
    assert status(world)["last_declined"] == f"round 1, attempt 1: no_data: {NO_DOG}"
    world.open_round(1, attempt=2)
    world.coordinator.work_until(lambda: world.trainer.rounds()[-1] == schemas.RoundAttempt(1, 2), "trained again")


def test_a_training_process_that_dies_before_its_commit_is_reported_and_repeats_the_round(
    make_world: MakeWorld, log: pytest.LogCaptureFixture
) -> None:
    world = in_training(make_world)
    world.trainer.deliver(Exited(1001, -9))
    world.coordinator.work_until(lambda: "last_trainer_death" in status(world), "the death is written down")
    assert "training process ended with code -9 (code -9 usually means out of memory)" in log.text
    assert status(world)["last_trainer_death"] == "exit code -9"
    wait_until(lambda: world.trainer.rounds() == [schemas.RoundAttempt(1, 1)] * 2, "the same round is trained again")


def test_a_lost_link_is_found_again_with_a_new_session_and_the_will_and_the_log_report_it(
    make_world: MakeWorld, log: pytest.LogCaptureFixture
) -> None:
    world = connected(make_world)
    first = world.coordinator.session
    world.broker.drop(DEVICE)
    while world.coordinator.wait(schemas.DeviceStatus).online:
        pass
    world.broker.restore(DEVICE)
    world.coordinator.wait(schemas.Hello)
    assert world.coordinator.session not in (None, first)
    world.open_round()
    world.coordinator.wait(schemas.Manifest)
    assert [
        line.partition(" after")[0].partition(";")[0]
        for line in map(logging.LogRecord.getMessage, log.records)
        if "broker" in line
    ] == ["connected to the broker", "connection to the broker lost", "reconnected to the broker"]


def test_a_coordinator_that_does_not_answer_is_told_once_with_the_likely_causes(
    make_world: MakeWorld, log: pytest.LogCaptureFixture
) -> None:
    world = make_world(clock_speed=20.0)
    world.coordinator.answers_hello = False
    world.coordinator.come_online()
    world.start_agent()
    for _ in range(reports.UNANSWERED_HELLOS + 2):
        world.coordinator.wait(schemas.Hello)
    assert log.text.count("the coordinator does not answer: it is not running, this federation is not started") == 1
    assert "fedcg doctor" in str(status(world)["link_problem"])
    world.coordinator.answers_hello = True
    world.coordinator.work_until(lambda: status(world)["link_problem"] is None, "the answer ends the problem")


def test_what_the_transport_warns_of_is_in_the_status_until_the_link_is_back(tmp_path: Path) -> None:
    handler, log = LinkProblems(EventLog(tmp_path / "events.jsonl", lambda: 0.0)), logging.getLogger("fedcg.wire.test")
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
    make_world: MakeWorld, log: pytest.LogCaptureFixture
) -> None:
    why = "not merged (quarantine): its step is 4 times as long as the median (at most 3)"
    world = in_round(make_world)
    manifest = world.coordinator.wait(schemas.Manifest)
    world.coordinator.receipt(manifest)
    world.coordinator.work_until(lambda: bool(world.events("receipt")), "the receipt is recorded")
    assert status(world)["odd_updates"] is None
    for _ in range(2):  # the coordinator sends it again with each session
        world.coordinator.receipt(manifest, reason=why)
    world.coordinator.invite(1)
    world.coordinator.wait(schemas.Decline)  # of an update that was delivered: the receipts before it are handled
    assert status(world)["odd_updates"] == f"1 of the last 1; round 1.1: {why}"
    assert status(world)["last_receipt"] == f"round 1.1: accepted {why}"
    assert [event["reason"] for event in world.events("receipt")] == ["", why]
    assert f"round 1: the update is {why}" in log.text


def test_a_receipt_that_cannot_be_stored_is_reported_with_its_cure_and_the_next_round_is_trained(
    make_world: MakeWorld, log: pytest.LogCaptureFixture
) -> None:
    world = in_training(make_world)
    world.trainer.work(world.trainer.commands[-1])
    manifest = world.coordinator.wait(schemas.Manifest)
    world.open_round(2)
    world.coordinator.wait(schemas.Accept)
    world.coordinator.work_until(lambda: len(world.events("artifact_stored")) == 3, "round 2 waits for the receipt")
    (world.config.store / "delivered.json").write_text("{")
    world.coordinator.receipt(manifest)
    world.coordinator.work_until(lambda: len(world.trainer.rounds()) == 2, "round 2 is trained")
    advice = "delivered.json is damaged. It holds only the receipts of updates: delete it"
    assert advice in str(world.events("agent_error")[0]["detail"])
    assert advice in log.text
    assert "Traceback" not in log.text
    assert [record for record in log.records if record.exc_info] == []
