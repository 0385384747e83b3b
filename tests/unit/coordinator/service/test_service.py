"""The service over a broker in memory, with scripted devices and a worker without torch: the protocol from end to end."""

from typing import Any

from coordinator.rounds.engine import Phase
from coordinator.rounds.records import AttemptState, UpdateRecord
from fedcg.wire.messages.envelopes import seal
from fedcg.wire.messages.schemas import (
    SPOKEN,
    CoordinatorStatus,
    Finished,
    Hello,
    Need,
    Offer,
    Outcome,
    Receipt,
    RoundAttempt,
    Welcome,
)
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.world import MakeWorld, RunningService, World
from tests.support.waiting import wait_until


def end_of(device: FakeDevice, round_number: int, attempt: int, data: bytes) -> Receipt:
    """Deliver an update and return its receipt."""
    wanted = device.send_update(round_number, attempt, data).artifact.id
    wait_until(lambda: any(receipt.artifact == wanted for receipt in device.receipts()), "a receipt")
    return next(receipt for receipt in device.receipts() if receipt.artifact == wanted)


def test_two_rounds_run_from_hello_to_the_final_aggregate(make_world: MakeWorld) -> None:
    world = make_world()
    with RunningService(world) as running:
        world.start_devices()
        world.wait_finished()
        assert running.service.state.phase is Phase.FINISHED
        assert running.service.refusals == {"dropped": 0}
    final = world.store.aggregate("tiny", 2)
    assert final is not None
    for device in world.devices.values():
        assert [receipt.outcome for receipt in device.receipts()] == [Outcome.ACCEPTED] * 2
        assert device.of(Finished)[-1].aggregate.id == final.artifact
        assert [(offer.round, offer.attempt) for offer in device.of(Offer)] == [(1, 1), (2, 1)]
    assert [record.state for record in world.store.attempts("tiny")] == [AttemptState.CLOSED] * 2


def test_every_update_is_on_disk_and_in_the_database_before_its_receipt(make_world: MakeWorld) -> None:
    world = make_world()
    seen: list[bool] = []
    device = world.devices["a"]
    original = device.in_session

    def look(message: Any) -> None:
        if message.kind == "receipt":
            record = world.store.update("tiny", RoundAttempt(message.round, message.attempt), "a")
            seen.append(record is not None and world.artifacts.has(record.artifact))
        original(message)

    device.in_session = look  # type: ignore[method-assign]
    with RunningService(world):
        world.start_devices()
        world.wait_finished()
    assert seen == [True, True]


def test_the_worker_gets_each_teacher_pass_on_arrival_and_the_merge_of_all(make_world: MakeWorld) -> None:
    world = make_world(rounds=1)
    world.devices["b"].silent = True
    with RunningService(world):
        world.start_devices()
        world.wait_event("teacher_done")
        wait_until(lambda: bool(world.devices["a"].receipts()), "a's receipt")
        update = world.devices["a"].receipts()[0].artifact
        assert world.workers[0].asked == [("open", 1, 1), ("add", "a", update)]
        world.devices["b"].silent = False
        wait_until(lambda: world.base_id in world.devices["b"].artifacts, "b has the aggregate")
        world.devices["b"].act()
        world.wait_finished()
    other = world.devices["b"].receipts()[0].artifact
    assert world.workers[0].asked[2:4] == [("add", "b", other), ("finish", (("a", update, 11), ("b", other, 11)))]


def test_a_late_update_a_failed_attempt_and_an_unknown_one_have_receipts_of_their_own(make_world: MakeWorld) -> None:
    world = make_world(min_clients=1, clients=("a",))
    a = world.devices["a"]
    a.silent = True
    world.store.open_attempt("tiny", RoundAttempt(1, 1), world.base_id, frozenset({"a"}), 1.0, 2.0)
    world.store.fail_attempt("tiny", RoundAttempt(1, 1), "nobody", 3.0)
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: [offer.attempt for offer in a.of(Offer)] == [2], "the second attempt is offered")
        assert end_of(a, 1, 1, a.make_update(1, 1, world.base_id)).outcome is Outcome.CLOSED
        assert end_of(a, 2, 7, a.make_update(2, 7, world.base_id)).outcome is Outcome.REJECTED


def test_a_repeated_hello_keeps_the_session_and_a_new_one_replaces_it(make_world: MakeWorld) -> None:
    world = make_world(clients=("a",))
    a = world.devices["a"]
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: len(a.of(Welcome)) == 1, "a welcome")
        repeated = Hello(**a.addressed(), nonce=a.nonce, versions=SPOKEN, agent="fake-1")
        a.transport.publish(a.topics.up_control("a"), seal(repeated, a.key))
        wait_until(lambda: len(a.of(Welcome)) == 2, "the same welcome")
        a.hello()
        wait_until(lambda: len(a.of(Welcome)) == 3, "another welcome")
    first, second, third = a.of(Welcome)
    assert first.nonce == second.nonce != third.nonce


def test_a_coordinator_that_comes_back_resumes_the_same_attempt_with_its_stored_updates(make_world: MakeWorld) -> None:
    world = make_world(rounds=1)
    a, b = world.devices["a"], world.devices["b"]
    b.silent = True
    first = RunningService(world)
    with first:
        world.start_devices()
        wait_until(lambda: bool(a.receipts()), "a's update is stored")
        first.vanish()
    with RunningService(world) as running:
        wait_until(lambda: a.of(CoordinatorStatus)[-1].epoch == 2, "the new epoch")
        assert running.service.state.updates == {"a"}
        b.silent = False
        for device in (a, b):
            device.hello()
        world.wait_finished()
    assert [(record.round, record.attempt) for record in world.store.attempts("tiny")] == [(1, 1)]
    assert len(a.receipts()) == 1
    update_a, update_b = a.receipts()[0].artifact, b.receipts()[0].artifact
    assert world.workers[1].asked[:2] == [("open", 1, 1), ("add", "a", update_a)]
    assert ("finish", (("a", update_a, 11), ("b", update_b, 11))) in world.workers[1].asked
    assert [event["epoch"] for event in world.events("started")] == [1, 2]


def test_a_coordinator_killed_after_a_rejection_merges_nothing_below_the_quorum(make_world: MakeWorld) -> None:
    world = make_world(rounds=1)
    key, store = ("tiny", RoundAttempt(1, 1)), world.store
    store.open_attempt(*key, world.base_id, frozenset("ab"), 0.0, 600.0)
    for name in "ab":
        store_update(world, name)
    store.start_distilling(*key, 3.0)
    store.reject_update(*key, "b", "its teacher pass failed")  # and then it is killed
    with RunningService(world):
        world.start_devices()
        world.wait_finished()
    assert [(record.attempt, record.state) for record in store.attempts("tiny")] == [
        (1, AttemptState.FAILED),
        (2, AttemptState.CLOSED),
    ]
    assert [event["clients"] for event in world.events("distilling")] == [["a", "b"]]


def test_a_coordinator_that_comes_back_after_the_end_still_serves_the_final_aggregate(make_world: MakeWorld) -> None:
    world = make_world(rounds=1)
    with RunningService(world):
        world.start_devices()
        world.wait_finished()
    late = FakeDevice("a", world.broker, world.spec, world.key, key=world.devices["a"].key)
    world.devices["a"].stop()
    with RunningService(world):
        late.start()
        wait_until(lambda: bool(late.of(Welcome)), "a welcome")
        final = world.store.aggregate("tiny", 1)
        assert final is not None

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
        b.tell(Need(**b.addressed(), artifact=update, ranges=((0, 5),)))
        b.tell(Need(**b.addressed(), artifact=spec, ranges=((0, 5),)))
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
    wait_until(lambda: bool(late.of(CoordinatorStatus)) and bool(late.of(Offer)), "both were kept")
    late.stop()
    status, offer = late.of(CoordinatorStatus)[-1], late.of(Offer)[-1]
    assert status.online is False
    assert (offer.epoch, offer.round, offer.attempt, offer.spec.id) == (1, 1, 1, world.spec.digest)
    assert "stop" in world.workers[0].asked


def store_update(world: World, name: str) -> None:
    """The update of a device to the first attempt is accepted and stored."""
    data = world.devices[name].make_update(1, 1, world.base_id)
    artifact = world.artifacts.put(data)
    world.store.end_update(UpdateRecord("tiny", 1, 1, name, artifact, len(data), Outcome.ACCEPTED, "", None, 1.0, 2.0))
