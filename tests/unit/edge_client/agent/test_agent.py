"""Agent, state machine and store together, over the in-process broker, against a coordinator scripted step by step."""

import subprocess
import sys

import pytest

from edge_client.agent.owner import StatusRequest, ask_agent
from edge_client.config import PolicySection
from edge_client.session.signals import Noted, RoundFailed, TrainRound
from edge_client.store.private_store import PrivateStore, open_store
from fedcg.errors import NOT_CONNECTED
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.messages.schemas import (
    COORDINATOR,
    Accept,
    Decline,
    DeclineReason,
    DeviceStatus,
    Heartbeat,
    Hello,
    Manifest,
    Need,
    Outcome,
    Receipt,
    Revoked,
    RoundAttempt,
)
from fedcg.wire.parts import Part, ReportField
from fedcg.worker_process import Exited
from tests.support.broker.memory import MemoryBroker
from tests.support.edge.world import (
    DEVICE,
    FakeTrainer,
    MakeWorld,
    in_round,
    in_training,
    make_config,
    toy_spec,
    update_of,
)
from tests.support.waiting import wait_until


def test_a_whole_federation_of_two_rounds_ends_with_a_chosen_model(make_world: MakeWorld) -> None:
    world = make_world()
    coordinator = world.coordinator
    coordinator.come_online()
    world.start_agent(until_finished=True)
    coordinator.wait(Hello)
    for round_number in (1, 2):
        world.open_round(round_number)
        accept = coordinator.wait(Accept)
        assert (accept.round, accept.attempt) == (round_number, 1)
        manifest = coordinator.wait(Manifest)
        assert coordinator.collect(manifest) == update_of(world.spec, RoundAttempt(round_number, 1))
        coordinator.receipt(manifest)
        wait_until(lambda: len(world.events("receipt")) == round_number, "the receipt is recorded")  # noqa: B023
    coordinator.finish(world.spec, world.aggregate(2), 2)
    while world.exit_code is None:
        coordinator.step()
    assert world.exit_code == 0
    assert world.trainer.rounds() == [RoundAttempt(1, 1), RoundAttempt(2, 1)]
    assert world.store.finalised()["aggregate"] == coordinator.serve(world.aggregate(2)).id


def test_a_revoked_device_believes_the_coordinator_alone_says_so_once_and_ends_when_it_runs_until_the_end(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    coordinator = world.coordinator
    coordinator.come_online()
    world.start_agent(until_finished=True)
    coordinator.wait(Hello)
    topic, about = coordinator.topics.down_control(DEVICE), coordinator.address(DEVICE)
    own = Revoked(**about, key=coordinator.device_key.public.hex)
    coordinator.publish(topic, Revoked(**about, key="0" * 64))  # the device that had this name before
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


def test_a_revoked_device_that_is_restarted_remembers_it_until_the_coordinator_welcomes_it(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    store, key = open_store(world.config, make=True), world.coordinator.device_key.public.hex
    store.save_revoked(key, revoked=True)
    world.connect()
    wait_until(lambda: not store.is_revoked(key), "the welcome counts")
    assert len(world.events("revoked")) == 1


def test_a_live_offer_is_received_from_the_broadcast_without_asking(make_world: MakeWorld) -> None:
    world = in_round(make_world)
    world.coordinator.broadcast(world.aggregate())
    world.coordinator.wait(Manifest)
    spec_id, aggregate_id = world.spec.digest, world.coordinator.serve(world.aggregate()).id
    asked = {message.artifact for message in world.coordinator.heard if isinstance(message, Need)}
    assert asked == {spec_id}
    assert {event["artifact"] for event in world.events("artifact_stored")} == {spec_id, aggregate_id}


def test_chunks_that_the_broadcast_lost_are_asked_for(make_world: MakeWorld) -> None:
    world = in_round(make_world)  # nothing is broadcast at all
    needs: list[str] = []
    while world.coordinator.serve(world.aggregate()).id not in needs:
        needs.append(world.coordinator.wait(Need).artifact)
    world.coordinator.wait(Manifest)


def test_a_device_that_is_not_invited_trains_nothing_and_asks_for_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    world.connect()
    world.coordinator.offer(world.spec, world.aggregate(), 1)
    wait_until(lambda: len(world.events("offer")) == 1, "the offer arrives")
    world.coordinator.invite(7)  # of another round than the open one
    wait_until(lambda: len(world.events("invited")) == 1, "the invite arrives")
    world.coordinator.broadcast(world.aggregate())
    wait_until(lambda: len(world.events("artifact_stored")) == 1, "the broadcast is kept all the same")
    assert world.trainer.rounds() == []
    world.coordinator.invite(1)
    world.coordinator.wait(Manifest)


def test_an_agent_told_to_upload_its_extractor_refuses_says_why_and_stays_up(make_world: MakeWorld) -> None:
    greedy = toy_spec(upload=(Part.CLASSIFIER, Part.EXTRACTOR, Part.GENERATOR))
    world = in_round(make_world, spec=greedy)
    decline = world.coordinator.wait(Decline)
    assert decline.reason is DeclineReason.UPLOAD_NOT_ALLOWED
    assert "extractor" in str(world.events("refused")[0]["detail"])
    assert world.trainer.rounds() == []
    world.coordinator.invite(1)
    assert world.coordinator.wait(Decline).reason is DeclineReason.UPLOAD_NOT_ALLOWED


def test_the_extractor_goes_only_where_the_owner_of_the_device_allows_it(make_world: MakeWorld) -> None:
    greedy = toy_spec(upload=(Part.CLASSIFIER, Part.EXTRACTOR, Part.GENERATOR))
    world = in_round(make_world, spec=greedy, policy=PolicySection(allow_upload=frozenset(Part)))
    world.coordinator.wait(Accept)


def test_a_manifest_is_repeated_until_a_receipt_comes_and_then_never_again(make_world: MakeWorld) -> None:
    world = in_round(make_world)
    first, second = world.coordinator.wait(Manifest), world.coordinator.wait(Manifest)
    assert first.artifact == second.artifact
    assert first.counter < second.counter
    world.coordinator.receipt(first, Outcome.LATE)
    wait_until(lambda: len(world.events("receipt")) == 1, "the receipt is recorded")
    assert world.events("receipt")[0]["outcome"] == "late"
    assert world.store.outbox(world.store.generations.current()[0]) is None
    while world.coordinator.step() is not None:
        pass  # manifests from before the receipt
    world.coordinator.heard.clear()
    world.coordinator.invite(1)  # trained and receipted: nothing is left to deliver
    assert world.coordinator.wait(Decline).reason is DeclineReason.NOT_ELIGIBLE
    assert not any(isinstance(message, Manifest) for message in world.coordinator.heard)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_device_follows_a_coordinator_that_went_back_and_names_the_round_that_it_remembers(
    make_world: MakeWorld, *, is_restarted: bool
) -> None:
    """As after a restore: the rounds since the backup are trained again, each of them once."""
    world = make_world()
    world.connect()
    coordinator = world.coordinator
    for number in (1, 2):
        world.open_round(number)
        manifest = coordinator.wait(Manifest)
        coordinator.receipt(manifest)
        wait_until(lambda: len(world.events("receipt")) == number, "the receipt is recorded")  # noqa: B023
    coordinator.epoch += 1_000_000
    coordinator.session = None
    if is_restarted:
        world.stop_agent()
        coordinator.come_online()
        world.start_agent()
    else:
        coordinator.come_online()
    assert coordinator.wait(Hello).at == RoundAttempt(2, 1)
    world.open_round(1)
    again = coordinator.wait(Manifest)
    assert again.at == RoundAttempt(1, 1)
    coordinator.receipt(again)
    wait_until(lambda: len(world.events("receipt")) == 3, "the receipt is recorded")
    coordinator.invite(1)  # trained and receipted: not a second time
    assert coordinator.wait(Decline).reason is DeclineReason.NOT_ELIGIBLE
    world.open_round(2)
    assert coordinator.wait(Manifest).at == RoundAttempt(2, 1)
    assert world.events("refused") == [], "an aggregate that was deleted as one of an earlier round is fetched again"


def test_a_device_that_the_broker_lets_publish_nothing_more_is_in_no_session_until_it_is_answered_again(
    make_world: MakeWorld,
) -> None:
    listed = {DEVICE, COORDINATOR}
    broker = MemoryBroker(lambda identity, _action, _topic: identity in listed)
    world = make_world(broker=broker, clock_speed=20.0)  # a heartbeat is due after 1.5 s
    world.connect()
    world.coordinator.work_until(lambda: bool(world.events("welcomed")), "a session")

    def is_in_session() -> object:
        return ask_agent(world.store.root, StatusRequest())["in_session"]

    assert is_in_session()
    listed.remove(DEVICE)  # as by a coordinator that was restored from a backup without it
    wait_until(lambda: not is_in_session(), "the next heartbeat is refused")
    listed.add(DEVICE)
    world.coordinator.work_until(lambda: len(world.events("welcomed")) == 2, "the next hello is answered")
    assert is_in_session()


def test_a_restarted_agent_delivers_its_outbox_and_does_not_train_again(make_world: MakeWorld) -> None:
    world = in_round(make_world)
    before = world.coordinator.wait(Manifest)
    world.stop_agent()
    world.coordinator.session = None
    world.start_agent()
    again = world.coordinator.wait(Manifest)
    assert again.artifact == before.artifact
    world.coordinator.invite(1)  # the real one invites whoever has not delivered
    assert world.coordinator.collect(world.coordinator.wait(Manifest)) == update_of(world.spec, RoundAttempt(1, 1))
    world.coordinator.receipt(again)
    wait_until(lambda: len(world.events("receipt")) == 1, "the receipt is recorded")
    assert world.trainer.rounds() == []


def test_a_trainer_that_dies_after_its_commit_is_not_asked_to_train_again(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    command = world.trainer.commands[0]
    assert isinstance(command, TrainRound)
    world.trainer.commit(command)
    world.trainer.deliver(Exited(1001, -9))
    manifest = world.coordinator.wait(Manifest)
    assert world.coordinator.collect(manifest) == update_of(world.spec, RoundAttempt(1, 1))
    wait_until(lambda: world.trainer.starts == 2, "the training process is replaced")
    assert world.trainer.rounds() == [RoundAttempt(1, 1)]


def test_a_trainer_that_dies_before_its_commit_repeats_the_round(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    world.trainer.deliver(Exited(1001, -9))
    wait_until(lambda: world.trainer.rounds() == [RoundAttempt(1, 1)] * 2, "the same round is trained again")
    world.trainer.work(world.trainer.commands[-1])
    world.coordinator.wait(Manifest)


def test_the_network_is_served_while_training_runs(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    world.coordinator.invite(1)
    assert world.coordinator.wait(Accept).round == 1
    world.coordinator.restart()
    assert world.coordinator.wait(Hello).epoch == 2
    world.coordinator.invite(1)
    assert world.coordinator.wait(Accept).epoch == 2
    assert world.trainer.rounds() == [RoundAttempt(1, 1)]


def test_a_round_that_diverges_is_declined_and_the_next_attempt_is_trained(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    world.trainer.deliver(RoundFailed(RoundAttempt(1, 1), DeclineReason.DIVERGED, "mean loss nan"))
    assert world.coordinator.wait(Decline).reason is DeclineReason.DIVERGED
    world.open_round(1, attempt=2)
    world.coordinator.work_until(lambda: len(world.trainer.rounds()) == 2, "it is trained again")
    assert world.trainer.rounds()[-1] == RoundAttempt(1, 2)


def test_an_agent_that_is_stopped_while_it_trains_declines_before_it_goes_offline(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    world.agent.stop()
    assert world.coordinator.wait(Decline).reason is DeclineReason.INTERRUPTED
    assert not world.coordinator.wait(DeviceStatus).online
    world.join()
    (declined,) = world.events("declined")
    assert declined["reason"] == "interrupted"


def test_how_far_training_is_goes_to_the_coordinator_with_the_heartbeats(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    where = {"round": 1, "attempt": 1, "pid": 7}
    world.trainer.deliver(Noted({"event": "phase_started", "phase": "classify", **where}))
    beat = world.coordinator.wait(Heartbeat)
    while beat.phase is None:  # one that was on its way
        beat = world.coordinator.wait(Heartbeat)
    assert (beat.at, beat.phase, beat.step, beat.steps) == (RoundAttempt(1, 1), "classify", 0, 0)
    strange = "the patient's name"
    world.trainer.deliver(Noted({"event": "progress", "phase": strange, "step": 3, "steps": 9, **where}))
    beat = world.coordinator.wait(Heartbeat)
    assert (beat.phase, beat.step, beat.steps) == ("train", 3, 9)
    world.trainer.work(world.trainer.commands[-1])
    assert world.coordinator.wait(Heartbeat).phase is None


def test_a_device_whose_owner_allows_no_health_report_says_nothing_of_its_training(make_world: MakeWorld) -> None:
    world = make_world(policy=PolicySection(allow_report=frozenset({ReportField.EXAMPLES})), is_automatic=False)
    world.spec = toy_spec(report=(ReportField.EXAMPLES,))
    world.connect()
    world.start_training()
    where = {"round": 1, "attempt": 1, "pid": 7}
    world.trainer.deliver(Noted({"event": "progress", "phase": "classify", "step": 3, "steps": 9, **where}))
    world.trainer.work(world.trainer.commands[-1])
    world.coordinator.wait(Manifest)
    assert all(message.phase is None for message in world.coordinator.heard if isinstance(message, Heartbeat))


def test_a_lost_link_is_found_again_with_a_new_session_and_the_will_told_of_it(make_world: MakeWorld) -> None:
    world = make_world()
    world.connect()
    first = world.coordinator.session
    world.broker.drop(DEVICE)
    while True:
        status = world.coordinator.wait(DeviceStatus)
        if not status.online:
            break
    world.broker.restore(DEVICE)
    world.coordinator.wait(Hello)
    assert world.coordinator.session is not None
    assert world.coordinator.session != first
    world.open_round()
    world.coordinator.wait(Manifest)


def test_a_session_that_the_coordinator_forgot_is_opened_anew_after_silence(make_world: MakeWorld) -> None:
    world = in_round(make_world, clock_speed=8.0)
    world.coordinator.wait(Manifest)
    world.coordinator.session = None  # it forgets without a new epoch
    world.coordinator.wait(Hello, "after 6 s of silence")
    assert world.coordinator.wait(Manifest).artifact.size > 0


def test_what_the_coordinators_key_did_not_sign_changes_nothing(make_world: MakeWorld) -> None:
    world, forger = in_round(make_world), SigningKey.generate()
    coordinator = world.coordinator
    assert coordinator.session is not None
    manifest = coordinator.wait(Manifest)
    address = coordinator.address(DEVICE, 1, 1)
    forged = Receipt(**address, artifact=manifest.artifact.id, outcome=Outcome.ACCEPTED)
    coordinator.publish(coordinator.topics.down_control(DEVICE), coordinator.session.stamp(forged), key=forger)
    wait_until(lambda: len(world.events("refused")) == 1, "the forgery is refused")
    assert "not signed" in str(world.events("refused")[0]["detail"])
    assert coordinator.wait(Manifest).artifact == manifest.artifact
    assert world.events("receipt") == []


def test_an_older_offer_and_a_repeated_receipt_are_refused(make_world: MakeWorld) -> None:
    world = make_world()
    world.connect()
    coordinator = world.coordinator
    world.open_round(2)
    manifest = coordinator.wait(Manifest)
    assert coordinator.session is not None
    coordinator.session.next_out -= 1  # the counter of the invite, again
    coordinator.receipt(manifest)
    coordinator.offer(world.spec, world.aggregate(), 1)
    wait_until(lambda: len(world.events("refused")) == 2, "both are refused")
    assert world.store.seen() == (1, 2, 1)
    assert world.events("receipt") == []
    world.stop_agent()
    world.start_agent()
    wait_until(lambda: len(world.events("refused")) == 3, "a restarted agent remembers what it has seen")


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


@pytest.mark.parametrize(
    ("stricter", "told"),
    [
        (PolicySection(allow_upload=frozenset({Part.CLASSIFIER})), "generator"),
        (PolicySection(allow_report=frozenset({ReportField.EXAMPLES})), "accuracy"),
    ],
)
def test_an_update_that_its_owner_forbade_after_it_was_made_never_leaves(
    make_world: MakeWorld, stricter: PolicySection, told: str
) -> None:
    world = in_round(make_world)
    world.coordinator.wait(Manifest)
    world.stop_agent()
    world.coordinator.session = None
    while world.coordinator.step() is not None:
        pass  # what the first agent said
    world.coordinator.heard.clear()
    world.config = make_config(world.root, policy=stricter)
    world.start_agent()
    world.coordinator.wait(Hello)
    world.coordinator.invite(1)
    assert world.coordinator.wait(Decline).reason is DeclineReason.NOT_ELIGIBLE
    assert not any(isinstance(message, Manifest) for message in world.coordinator.heard)
    assert told in str(world.events("refused")[-1]["detail"])
    assert world.store.deliveries()[-1].outcome == "withheld"


def test_a_disk_that_is_full_when_the_receipt_comes_does_not_lose_the_next_round(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = in_training(make_world)
    world.trainer.work(world.trainer.commands[-1])
    manifest = world.coordinator.wait(Manifest)
    world.open_round(2)
    world.coordinator.wait(Accept)
    monkeypatch.setattr(PrivateStore, "save_delivery", full_disk)
    world.coordinator.receipt(manifest)
    world.coordinator.work_until(lambda: len(world.trainer.rounds()) == 2, "round 2 is trained")
    assert "No space left" in str(world.events("agent_error")[0]["detail"])


def test_a_disk_that_is_full_when_the_offer_comes_does_not_lose_the_round(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    world.connect()
    monkeypatch.setattr(PrivateStore, "save_seen", full_disk)
    world.open_round()
    assert world.coordinator.wait(Accept).round == 1


def test_a_training_process_that_cannot_be_started_is_tried_again(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = FakeTrainer.start, iter([OSError(11, "Resource temporarily unavailable")] * 2)

    def scarce(trainer: FakeTrainer) -> int:
        for failure in failures:
            raise failure
        return start(trainer)

    monkeypatch.setattr(FakeTrainer, "start", scarce)
    world = in_round(make_world, clock_speed=8.0)
    world.coordinator.wait(Manifest)


def full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_the_agent_and_everything_it_needs_import_no_torch() -> None:
    code = (
        "import sys; import edge_client.cli.agent_commands, edge_client.agent.run, edge_client.cli.doctor.checks, edge_client.cli.status; "
        "sys.exit(3 if 'torch' in sys.modules else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_file_that_is_damaged_while_the_agent_runs_is_named_with_its_cure_and_without_a_traceback(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = in_training(make_world)
    world.trainer.work(world.trainer.commands[-1])
    manifest = world.coordinator.wait(Manifest)
    (world.config.store / "delivered.json").write_text("{")
    world.coordinator.receipt(manifest)
    wait_until(lambda: bool(world.events("agent_error")), "the damage is reported")
    assert "delivered.json is damaged. It holds the receipts of updates and nothing else: delete it" in str(
        world.events("agent_error")[0]["detail"]
    )
    assert [record for record in caplog.records if record.exc_info] == []
