"""The service over a broker in memory, with scripted devices and a worker without torch: the protocol from end to end, several federations, an operator's changes."""

from functools import partial
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from coordinator.errors import SteeringError
from coordinator.rounds.engine import Phase
from coordinator.rounds.records import AttemptState, UpdateRecord
from coordinator.storage.view_store import Presence
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import seal
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.federations import Federations
from tests.support.coordinator.world import MakeWorld, RunningService
from tests.support.present import present
from tests.support.waiting import wait_until
from tests.support.wire.artifact_chunks import frames_for


def end_of(device: FakeDevice, round_number: int, attempt: int, data: bytes) -> schemas.Receipt:
    """Deliver an update and return its receipt."""
    wanted = device.send_update(round_number, attempt, data).artifact.id
    wait_until(lambda: any(receipt.artifact == wanted for receipt in device.receipts()), "a receipt")
    return next(receipt for receipt in device.receipts() if receipt.artifact == wanted)


def test_every_update_is_on_disk_and_in_the_database_before_its_receipt(make_world: MakeWorld) -> None:
    world = make_world()
    seen: list[bool] = []
    device = world.devices["a"]
    original = device.in_session

    def look(message: Any) -> None:
        if message.kind == "receipt":
            record = world.store.update("tiny", schemas.RoundAttempt(message.round, message.attempt), "a")
            seen.append(record is not None and world.artifacts.has(record.artifact))
        original(message)

    device.in_session = look  # type: ignore[method-assign]
    with RunningService(world):
        world.start_devices()
        world.wait_finished()
    assert seen == [True, True]


def test_a_late_update_a_failed_attempt_and_an_unknown_one_have_receipts_of_their_own(make_world: MakeWorld) -> None:
    world = make_world(min_clients=1, clients=("a",))
    a = world.devices["a"]
    a.silent = True
    world.store.open_attempt("tiny", schemas.RoundAttempt(1, 1), world.base_id, frozenset({"a"}), 1.0, 2.0)
    world.store.fail_attempt("tiny", schemas.RoundAttempt(1, 1), "nobody", 3.0)
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: [offer.attempt for offer in a.of(schemas.Offer)] == [2], "the second attempt is offered")
        assert end_of(a, 1, 1, a.make_update(1, 1, world.base_id)).outcome is schemas.Outcome.CLOSED
        assert end_of(a, 2, 7, a.make_update(2, 7, world.base_id)).outcome is schemas.Outcome.REJECTED


def test_a_service_that_ends_on_a_full_disk_says_so_in_one_line(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    with RunningService(make_world()):
        monkeypatch.setattr(Presence, "note", full)
    assert "could not store everything at the coordinator's shutdown: " in caplog.text
    assert "Traceback" not in caplog.text


def test_a_repeated_hello_keeps_the_session_and_a_new_one_replaces_it(make_world: MakeWorld) -> None:
    world = make_world(clients=("a",))
    a = world.devices["a"]
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: len(a.of(schemas.Welcome)) == 1, "a welcome")
        repeated = schemas.Hello(**a.addressed(), nonce=a.nonce, versions=schemas.SPOKEN, agent="fake-1")
        a.transport.publish(a.topics.up_control("a"), seal(repeated, a.key))
        wait_until(lambda: len(a.of(schemas.Welcome)) == 2, "the same welcome")
        a.hello()
        wait_until(lambda: len(a.of(schemas.Welcome)) == 3, "another welcome")
    first, second, third = a.of(schemas.Welcome)
    assert first.nonce == second.nonce != third.nonce


def test_a_coordinator_that_comes_back_after_the_end_still_serves_the_final_aggregate(make_world: MakeWorld) -> None:
    world = make_world(rounds=1)
    with RunningService(world):
        world.start_devices()
        world.wait_finished()
    late = FakeDevice("a", world.broker, world.spec, world.key, key=world.devices["a"].key)
    world.devices["a"].stop()
    with RunningService(world):
        late.start()
        wait_until(lambda: bool(late.of(schemas.Welcome)), "a welcome")
        final = present(world.store.aggregate("tiny", 1))

        wait_until(lambda: final.artifact in late.artifacts, "the final aggregate is fetched")
        late.stop()


def test_a_device_may_fetch_the_spec_and_aggregates_and_nothing_else(make_world: MakeWorld) -> None:
    world = make_world(clients=("a", "b"))
    a, b = world.devices["a"], world.devices["b"]
    b.silent = True
    sent: list[str] = []
    world.broker.record = lambda identity, topic, payload: sent.append(topic)
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: bool(a.receipts()), "an update is stored")
        update, spec = a.receipts()[0].artifact, world.spec.digest
        wait_until(lambda: b.session is not None and world.base_id in b.artifacts, "nothing else is on its way to b")
        sent.clear()
        b.tell(schemas.Need(**b.addressed(), artifact=update, ranges=((0, 5),)))
        b.tell(schemas.Need(**b.addressed(), artifact=spec, ranges=((0, 5),)))
        wait_until(lambda: b.topics.down_chunk("b") in sent, "the spec is sent")
        assert sent.count(b.topics.down_chunk("b")) == 1


def test_status_and_offer_are_retained_and_the_end_is_told_by_a_goodbye(make_world: MakeWorld) -> None:
    world = make_world()
    world.devices["b"].silent = True
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: bool(world.devices["a"].receipts()), "an update is stored")
    world.devices["a"].stop()
    late = FakeDevice("a", world.broker, world.spec, world.key)  # the broker sends it what is retained
    late.start()
    wait_until(lambda: bool(late.of(schemas.CoordinatorStatus)) and bool(late.of(schemas.Offer)), "both were kept")
    late.stop()
    status, offer = late.of(schemas.CoordinatorStatus)[-1], late.of(schemas.Offer)[-1]
    assert status.online is False
    assert (offer.epoch, offer.round, offer.attempt, offer.spec.id) == (status.epoch, 1, 1, world.spec.digest)
    assert "stop" in world.workers[0].asked


@pytest.fixture
def made(make_world: MakeWorld) -> Federations:
    return Federations(make_world(clients=("a", "b", "c")), "second")


def phase(made: Federations, federation: str) -> Phase:
    return made.coordinator.services[federation].state.phase


def until_over(made: Federations, federation: str) -> None:
    wait_until(lambda: phase(made, federation) is Phase.FINISHED, f"{federation} is over")
    final = made.world.store.aggregates(federation)[-1].artifact
    for device in made.devices[federation]:
        wait_until(partial(device.artifacts.__contains__, final), f"{device.name} has the end of {federation}")


def test_two_federations_of_the_same_devices_run_side_by_side(made: Federations) -> None:
    with made.running():
        for federation in ("tiny", "second"):
            made.start(federation)
        for federation in ("tiny", "second"):
            until_over(made, federation)
    for federation in ("tiny", "second"):
        assert [record.state for record in made.world.store.attempts(federation)] == [AttemptState.CLOSED] * 2
    closed = sorted((event["federation"], event["round"]) for event in made.world.events("aggregate_stored"))
    assert closed == [(federation, number) for federation in ("second", "tiny") for number in (1, 2)]


def test_an_update_survives_attempts_that_end_elsewhere(made: Federations, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other, _ = made.devices["second"]
    slow.silent = other.silent = True
    granted: list[schemas.Need] = []
    take = slow.in_session
    with made.running():
        slow.start()
        other.start()
        wait_until(lambda: bool(slow.of(schemas.Invite)), "it is invited")
        base = made.world.store.aggregates("second")[0].artifact
        wait_until(partial(slow.artifacts.__contains__, base), "it has the base")
        monkeypatch.setattr(
            slow,
            "in_session",
            lambda message: granted.append(message) if isinstance(message, schemas.Need) else take(message),
        )
        data = slow.make_update(1, 1, base)
        manifest = slow.send_update(1, 1, data)
        wait_until(lambda: bool(granted), "chunks are granted")
        first, *rest = frames_for(data, manifest.artifact)
        assert rest
        slow.transport.publish(slow.topics.up_chunk("a"), first)
        parts = made.world.root / "artifacts" / ".partial"
        wait_until(lambda: bool(list(parts.rglob("a@*.part"))), "a part of it is stored")
        made.start("tiny")
        until_over(made, "tiny")
        monkeypatch.setattr(slow, "in_session", take)  # its repeated manifest is answered with what is missing
        wait_until(lambda: bool(slow.receipts()), "the whole update is answered")
        assert slow.receipts()[0].outcome is schemas.Outcome.ACCEPTED


def test_a_federation_that_ran_out_of_attempts_is_resumed_while_the_coordinator_runs(made: Federations) -> None:
    made.operations.change_policy("tiny", {"max_attempts": 1})
    for device in made.devices["tiny"]:
        device.decline = schemas.DeclineReason.NO_DATA
    with made.running():
        made.start("tiny")
        wait_until(lambda: phase(made, "tiny") is Phase.STALLED, "no attempt is left")
        made.operations.disable("c")
        assert phase(made, "tiny") is Phase.STALLED
        for device in made.devices["tiny"]:
            device.decline = None
        made.operations.resume("tiny")
        until_over(made, "tiny")


def test_stop_ends_the_devices_with_the_last_aggregate_and_extend_goes_on_in_a_new_epoch(made: Federations) -> None:
    devices = made.devices["tiny"]
    with made.running():
        made.start("tiny")
        made.world.wait_event("aggregate_stored")
        devices[0].silent = devices[1].silent = devices[2].silent = True
        made.operations.stop("tiny", "enough")
        closed = len(made.world.store.aggregates("tiny")) - 1
        wait_until(lambda: all(device.of(schemas.Finished) for device in devices), "all have the end")
        final = made.world.store.aggregates("tiny")[-1].artifact
        assert {device.of(schemas.Finished)[-1].aggregate.id for device in devices} == {final}
        with pytest.raises(SteeringError, match=r"was stopped \(enough\).*extend"):
            made.operations.resume("tiny")
        for device in devices:
            device.silent = False
        epoch = made.coordinator.services["tiny"].epoch
        assert made.operations.extend("tiny", 3).policy.rounds == closed + 3
        wait_until(lambda: len(made.world.store.aggregates("tiny")) == closed + 4, "three more rounds")
        until_over(made, "tiny")
        assert made.coordinator.services["tiny"].epoch > epoch
        offers = [(offer.round, offer.attempt) for offer in devices[0].of(schemas.Offer)]
        assert offers == sorted(offers)


def test_a_disabled_device_is_not_invited_and_an_enabled_one_is_again(made: Federations) -> None:
    made.operations.disable("c", "dust on the lens")
    made.operations.disable("c", "another reason")
    with made.running():
        made.start("tiny")
        made.world.wait_event("aggregate_stored")
        assert made.coordinator.services["tiny"].state.barred == {"c": "disabled by an operator: another reason"}
        made.operations.enable("c")
        wait_until(lambda: not made.coordinator.services["tiny"].state.barred, "nobody is barred")
        made.operations.extend("tiny", 1)
        made.world.wait_event("aggregate_stored", 3)
    opened = made.world.events("attempt_opened")
    assert opened[0]["participants"] == ["a", "b"]
    assert opened[-1]["participants"] == ["a", "b", "c"]


def test_accuracy_that_rises_no_more_ends_a_federation(made: Federations) -> None:
    made.operations.change_policy("tiny", {"rounds": 9, "stop_patience": 2})
    with made.running():
        made.start("tiny")
        until_over(made, "tiny")
    record = made.world.store.federation("tiny")
    assert record.status.value == "stopped"
    assert "of 3 clients have not risen by more than 0.1 points in 2 rounds" in record.status_reason
    assert len(made.world.store.aggregates("tiny")) == 1 + 3


def test_rounds_that_are_under_way_cannot_be_taken_back(made: Federations) -> None:
    with made.running():
        made.start("tiny")
        until_over(made, "tiny")
        with pytest.raises(SteeringError, match="rounds = 1: tiny is already in round 2; stop it"):
            made.operations.change_policy("tiny", {"rounds": 1})
        with pytest.raises(SteeringError) as refused:  # beside what is wrong by itself
            made.operations.change_policy("tiny", {"rounds": 1, "min_clients": 0, "pace": "never"})
        for part in ("tiny: 3 problems", "min_clients: must be", "pace: must be", "rounds = 1: tiny is already in"):
            assert part in str(refused.value)


def test_what_another_federation_needs_is_not_pruned(made: Federations) -> None:
    made.world.keep_rounds = 1
    made.operations.change_policy("tiny", {"rounds": 4})
    made.operations.pause("second")
    with made.running():
        made.start("tiny")
        until_over(made, "tiny")
        assert made.world.events("pruned")
        made.operations.resume("second")  # its server state is equal to the first one of the other
        made.start("second")
        until_over(made, "second")


def test_a_coordinator_killed_after_a_rejection_merges_nothing_below_the_quorum(make_world: MakeWorld) -> None:
    world = make_world(rounds=1)
    key, store = ("tiny", schemas.RoundAttempt(1, 1)), world.store
    store.open_attempt(*key, world.base_id, frozenset("ab"), 0.0, 600.0)
    for name in "ab":
        data = world.devices[name].make_update(1, 1, world.base_id)
        artifact = world.artifacts.put(data)
        record = UpdateRecord("tiny", 1, 1, name, artifact, len(data), schemas.Outcome.ACCEPTED, "", None, 1.0, 2.0)
        store.end_update(record)
    store.start_distilling(*key, 3.0)
    store.reject_update(*key, "b", "its teacher pass failed")  # and then it is killed
    with RunningService(world):
        world.start_devices()
        world.wait_finished()
    assert [record.state for record in store.attempts("tiny")] == [AttemptState.FAILED, AttemptState.CLOSED]
    assert [event["clients"] for event in world.events("distilling")] == [["a", "b"]]
