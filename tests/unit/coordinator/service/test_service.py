"""The service over a broker in memory, with scripted devices and a worker without torch: the protocol from end to end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.records import AttemptState, ParticipantState, UpdateRecord
from coordinator.rounds.round_engine import Phase
from fedcg.wire.artifacts.artifacts import artifact_id, pack
from fedcg.wire.messages.messages import (
    COORDINATOR,
    CoordinatorStatus,
    DeclineReason,
    DeviceStatus,
    Finished,
    Hello,
    Invite,
    Manifest,
    Need,
    Offer,
    Outcome,
    Receipt,
    Welcome,
)
from fedcg.wire.messages.signing import SigningKey, open_envelope, seal
from fedcg.wire.parts import Part, Report
from fedcg.wire.transport.transport import Publication
from fedcg.wire.versions import SPOKEN
from tests.support.coordinator.world import (
    FakeDevice,
    RunningService,
    World,
    aggregate_bytes,
    random_parts,
    shared_layouts,
    tiny_spec,
    update_header,
)
from tests.support.waiting import wait_until
from tests.support.wire.artifact_chunks import make_ref

MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def make(rounds: int = 2, **options: Any) -> World:
        spec = tiny_spec(rounds)
        base = aggregate_bytes(spec, 0, 0, seed=1)
        worlds.append(World(tmp_path / f"home{len(worlds)}", spec, base, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def until_finished(world: World) -> None:
    """All devices have heard of the end and hold the final aggregate."""
    final = world.wait_event("finished")["aggregate"]
    for device in world.devices.values():
        wait_until(partial(device.artifacts.__contains__, final), f"{device.name} has the final aggregate")


def end_of(device: FakeDevice, round_number: int, attempt: int, data: bytes) -> Receipt:
    """Deliver an update and return its receipt."""
    wanted = device.send_update(round_number, attempt, data).artifact.id
    wait_until(lambda: any(receipt.artifact == wanted for receipt in device.receipts()), "a receipt")
    return next(receipt for receipt in device.receipts() if receipt.artifact == wanted)


def test_two_rounds_run_from_hello_to_the_final_aggregate(make_world: MakeWorld) -> None:
    world = make_world()
    with RunningService(world) as running:
        world.start_devices()
        until_finished(world)
        assert running.service.state.phase is Phase.FINISHED
        assert running.service.refusals == {"dropped": 0}
    final = world.store.aggregate("tiny", 2)
    assert final is not None
    for device in world.devices.values():
        assert [receipt.outcome for receipt in device.receipts()] == [Outcome.ACCEPTED] * 2
        assert device.of(Finished)[-1].aggregate.id == final.artifact
        assert [(offer.round, offer.attempt) for offer in device.of(Offer)] == [(1, 1), (2, 1)]
    assert [record.state for record in world.store.attempts("tiny")] == [AttemptState.CLOSED] * 2


def test_what_devices_accepted_in_earlier_rounds_is_not_kept(make_world: MakeWorld) -> None:
    world = make_world(rounds=4)
    with RunningService(world) as running:
        world.start_devices()
        until_finished(world)
        assert len(world.events("accepted")) == 8
        assert len(running.service._invitations._accepted) == 2


def test_every_update_is_on_disk_and_in_the_database_before_its_receipt(make_world: MakeWorld) -> None:
    world = make_world()
    seen: list[bool] = []
    device = world.devices["a"]
    original = device._in_session

    def look(message: Any) -> None:
        if message.kind == "receipt":
            record = world.store.update(("tiny", message.round, message.attempt), "a")
            seen.append(record is not None and world.artifacts.has(record.artifact))
        original(message)

    device._in_session = look  # type: ignore[method-assign]
    with RunningService(world):
        world.start_devices()
        until_finished(world)
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
        until_finished(world)
    other = world.devices["b"].receipts()[0].artifact
    assert world.workers[0].asked[2:4] == [("add", "b", other), ("finish", (("a", update, 11), ("b", other, 11)))]


def test_a_repeated_manifest_gets_the_same_receipt_and_another_update_a_conflict(make_world: MakeWorld) -> None:
    world = make_world()
    a = world.devices["a"]
    world.devices["b"].silent = True
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: len(a.receipts()) == 1, "the first receipt")
        first = a.receipts()[0]
        a.send_update(1, 1, a.make_update(1, 1, world.base_id))
        wait_until(lambda: len(a.receipts()) >= 2, "the same receipt again")
        again = a.receipts()[1]
        assert (again.artifact, again.outcome) == (first.artifact, Outcome.ACCEPTED)
        other = a.make_update(1, 1, world.base_id, report=Report(examples=99))
        assert end_of(a, 1, 1, other).outcome is Outcome.CONFLICT
        stored = world.store.update(("tiny", 1, 1), "a")
        assert stored is not None
        assert stored.artifact == first.artifact


def test_a_late_update_a_failed_attempt_and_an_unknown_one_have_receipts_of_their_own(make_world: MakeWorld) -> None:
    world = make_world(min_clients=1, clients=("a",))
    a = world.devices["a"]
    a.silent = True
    world.store.open_attempt(("tiny", 1, 1), world.base_id, frozenset({"a"}), 1.0, 2.0)
    world.store.fail_attempt(("tiny", 1, 1), "nobody", 3.0)
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: [offer.attempt for offer in a.of(Offer)] == [2], "the second attempt is offered")
        assert end_of(a, 1, 1, a.make_update(1, 1, world.base_id)).outcome is Outcome.CLOSED
        assert end_of(a, 2, 7, a.make_update(2, 7, world.base_id)).outcome is Outcome.REJECTED


def test_an_update_after_the_round_was_closed_without_it_is_late(make_world: MakeWorld) -> None:
    world = make_world(min_clients=1, deadline_s=600.0, rounds=2)
    a, b = world.devices["a"], world.devices["b"]
    b.silent = True
    world.store.open_attempt(("tiny", 1, 1), world.base_id, frozenset("ab"), 1.0, 2.0)
    store_update(world, "a")
    world.store.start_distilling(("tiny", 1, 1), 3.0)
    with RunningService(world):
        a.start()
        b.start()
        wait_until(lambda: b.session is not None, "a session")
        assert end_of(b, 1, 1, b.make_update(1, 1, world.base_id)).outcome is Outcome.LATE


def store_update(world: World, name: str) -> None:
    """The update of a device to the first attempt is accepted and stored."""
    data = world.devices[name].make_update(1, 1, world.base_id)
    artifact = world.artifacts.put(data)
    world.store.end_update(UpdateRecord("tiny", 1, 1, name, artifact, len(data), Outcome.ACCEPTED, "", None, 1.0, 2.0))


def spoilt(world: World, spoil: str) -> bytes:
    device, spec = world.devices["a"], world.spec
    parts = random_parts(shared_layouts(spec), seed=5)
    header = update_header(spec, 1, 1, "a", world.base_id)
    if spoil == "nan":
        parts[Part.CLASSIFIER]["weight"][0, 0] = np.nan
    elif spoil == "huge":
        parts[Part.GENERATOR]["weight"] = parts[Part.GENERATOR]["weight"] * np.float32(1e7)
    elif spoil == "extractor":
        parts[Part.EXTRACTOR] = random_parts({Part.EXTRACTOR: spec.layouts[Part.EXTRACTOR]}, 6)[Part.EXTRACTOR]
    elif spoil == "shape":
        parts[Part.CLASSIFIER]["weight"] = parts[Part.CLASSIFIER]["weight"][:, :7].copy()
    elif spoil == "base":
        return device.make_update(1, 1, "0" * 64)
    elif spoil == "client":
        header = update_header(spec, 1, 1, "b", world.base_id)
    elif spoil == "round":
        header = update_header(spec, 2, 1, "a", world.base_id)
    elif spoil == "report":
        header = update_header(spec, 1, 1, "a", world.base_id, report=Report(examples=3, loss=1.0))
    elif spoil == "examples":
        header = update_header(spec, 1, 1, "a", world.base_id, report=Report(accuracy=0.5))
    elif spoil == "garbage":
        return b"FCGA" + bytes(2000)
    return pack(header, parts)


SPOILT = {
    "nan": "NaN",
    "huge": "away from the round's base",
    "extractor": "layouts",
    "shape": "layouts",
    "base": "base",
    "client": "client",
    "round": "round",
    "report": "loss",
    "examples": "examples",
    "garbage": "header",
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_an_update_that_must_not_be_merged_is_rejected_with_its_reason(make_world: MakeWorld, spoil: str) -> None:
    world = make_world(clients=("a", "b"), max_attempts=1)
    a = world.devices["a"]
    a.silent = world.devices["b"].silent = True
    with RunningService(world) as running:
        world.start_devices()
        wait_until(lambda: bool(a.of(Invite)), "an invite")
        data = spoilt(world, spoil)
        a.send_update(1, 1, data)
        wait_until(lambda: bool(a.receipts()), "a receipt")
        assert a.receipts()[0].outcome is Outcome.REJECTED
        assert SPOILT[spoil] in a.receipts()[0].reason
        assert not world.artifacts.has(artifact_id(data))
        wait_until(lambda: running.service.state.phase is Phase.PAUSED, "one of two is not enough")
    people = {person.client: person.state for person in world.store.participants(("tiny", 1, 1))}
    assert people["a"] is ParticipantState.DECLINED


def test_an_announced_update_over_its_bound_is_rejected_before_a_byte_is_asked_for(make_world: MakeWorld) -> None:
    world = make_world()
    a = world.devices["a"]
    a.silent = True
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: bool(a.of(Invite)), "an invite")
        manifest = Manifest(**a._addressed(1, 1), artifact=make_ref(bytes(20_000_000), 1024))
        a.tell(manifest)
        wait_until(lambda: bool(a.receipts()), "a receipt")
    assert a.receipts()[0].outcome is Outcome.REJECTED
    assert a.of(Need) == []


def test_a_device_that_declines_is_not_waited_for(make_world: MakeWorld) -> None:
    world = make_world(rounds=1, clients=("a", "b", "c"), min_clients=3)
    world.devices["c"].decline = DeclineReason.NO_DATA
    with RunningService(world) as running:
        world.start_devices()
        wait_until(lambda: running.service.state.phase is Phase.PAUSED, "three are needed and one declines, thrice")
    people = {person.client: person for person in world.store.participants(("tiny", 1, 1))}
    assert (people["c"].state, people["c"].reason) == (ParticipantState.DECLINED, "no_data")
    assert len(world.events("attempt_failed")) == 3


def test_an_update_survives_lost_chunks(make_world: MakeWorld) -> None:
    world = make_world(rounds=1)
    a = world.devices["a"]
    publish: Callable[..., Publication] | None = None
    lost: list[bytes] = []

    def lossy(topic: str, payload: bytes, **options: Any) -> Publication:
        assert publish is not None
        if topic == a.topics.up_chunk("a") and payload not in lost and len(lost) < 3:
            lost.append(payload)
            return publish(a.topics.status("nobody"), payload)  # refused by the broker's rules
        return publish(topic, payload, **options)

    with RunningService(world):
        a.start()
        publish, a.transport.publish = a.transport.publish, lossy  # type: ignore[method-assign]
        world.devices["b"].start()
        until_finished(world)
    assert len(lost) == 3
    assert a.receipts()[0].outcome is Outcome.ACCEPTED


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        ("signature", "forged"),
        ("stranger", "forged"),
        ("topic", "other_device"),
        ("session", "other_session"),
        ("replay", "replayed"),
        ("federation", "other_federation"),
        ("kind", "malformed"),
    ],
)
def test_what_is_not_authentic_or_not_in_order_is_refused_and_counted(
    make_world: MakeWorld, forged: str, reason: str
) -> None:
    world = make_world(clients=("a", "b"))
    a = world.devices["a"]
    a.silent = world.devices["b"].silent = True
    with RunningService(world) as running:
        world.start_devices()
        wait_until(lambda: bool(a.of(Invite)), "an invite")
        assert a.session is not None
        good = Manifest(**a._addressed(1, 1), artifact=make_ref(a.make_update(1, 1, world.base_id), 1024))
        stamped = a.session.stamp(good)
        changes: dict[str, tuple[Any, SigningKey]] = {
            "signature": (stamped, SigningKey.generate()),
            "stranger": (stamped.model_copy(update={"sender": "z"}), a.key),
            "topic": (stamped.model_copy(update={"sender": "b"}), world.devices["b"].key),
            "session": (stamped.model_copy(update={"session": "0" * 64}), a.key),
            "replay": (stamped.model_copy(update={"counter": 1}), a.key),
            "federation": (stamped.model_copy(update={"federation": "other"}), a.key),
            "kind": (DeviceStatus(**a._addressed(), online=False), a.key),
        }
        message, key = changes[forged]
        a.transport.publish(a.topics.up_control("a"), seal(message, key))
        wait_until(lambda: running.service.refusals.get(reason) == 1, "the refusal is counted")
        assert [event["reason"] for event in world.events("refused")] == [reason]
        assert a.of(Need) == []
        assert a.receipts() == []
        a.transport.publish(a.topics.up_control("a"), seal(stamped, a.key))
        wait_until(lambda: bool(a.of(Need)), "the authentic one is answered")


def test_a_device_enrolled_while_the_coordinator_runs_is_welcome(make_world: MakeWorld) -> None:
    world = make_world()
    with RunningService(world):
        late = FakeDevice("late", world.broker, world.spec, world.key)
        world.store.add_device("late", late.key.public.hex, 1.0)
        late.start()

        def welcomed() -> bool:
            if not late.of(Welcome):
                late.hello()
                threading.Event().wait(0.3)
            return bool(late.of(Welcome))

        wait_until(welcomed, "the late device is welcomed")
        late.stop()


def test_a_repeated_hello_keeps_the_session_and_a_new_one_replaces_it(make_world: MakeWorld) -> None:
    world = make_world(clients=("a",))
    a = world.devices["a"]
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: len(a.of(Welcome)) == 1, "a welcome")
        repeated = Hello(**a._addressed(), nonce=a.nonce, versions=SPOKEN, agent="fake-1")
        a.transport.publish(a.topics.up_control("a"), seal(repeated, a.key))
        wait_until(lambda: len(a.of(Welcome)) == 2, "the same welcome")
        a.hello()
        wait_until(lambda: len(a.of(Welcome)) == 3, "another welcome")
    first, second, third = a.of(Welcome)
    assert first.nonce == second.nonce != third.nonce


def test_a_lost_link_is_followed_by_status_offer_and_invite_again(make_world: MakeWorld) -> None:
    world = make_world()
    a = world.devices["a"]
    a.silent = True
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: bool(a.of(Invite)), "an invite")
        invites = len(a.of(Invite))
        world.broker.drop(COORDINATOR)
        wait_until(lambda: a.of(CoordinatorStatus)[-1].online is False, "the will is heard")
        world.broker.restore(COORDINATOR)
        wait_until(lambda: a.of(CoordinatorStatus)[-1].online is True, "it is back")
        wait_until(lambda: len(a.of(Offer)) == 2, "the offer is repeated")
        a.silent = False
        a.act()
        until_finished(world)
        assert len(a.of(Invite)) >= invites


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
        until_finished(world)
    assert [(record.round, record.attempt) for record in world.store.attempts("tiny")] == [(1, 1)]
    assert len(a.receipts()) == 1
    update_a, update_b = a.receipts()[0].artifact, b.receipts()[0].artifact
    assert world.workers[1].asked[:2] == [("open", 1, 1), ("add", "a", update_a)]
    assert ("finish", (("a", update_a, 11), ("b", update_b, 11))) in world.workers[1].asked
    assert [event["epoch"] for event in world.events("started")] == [1, 2]


def test_a_coordinator_killed_after_a_rejection_merges_nothing_below_the_quorum(make_world: MakeWorld) -> None:
    world = make_world(rounds=1)
    key, store = ("tiny", 1, 1), world.store
    store.open_attempt(key, world.base_id, frozenset("ab"), 0.0, 600.0)
    for name in "ab":
        store_update(world, name)
    store.start_distilling(key, 3.0)
    store.reject_update(key, "b", "its teacher pass failed")  # and then it is killed
    with RunningService(world):
        world.start_devices()
        until_finished(world)
    assert [(record.attempt, record.state) for record in store.attempts("tiny")] == [
        (1, AttemptState.FAILED),
        (2, AttemptState.CLOSED),
    ]
    assert [event["clients"] for event in world.events("distilling")] == [["a", "b"]]


def test_a_coordinator_that_comes_back_after_the_end_still_serves_the_final_aggregate(make_world: MakeWorld) -> None:
    world = make_world(rounds=1)
    with RunningService(world):
        world.start_devices()
        until_finished(world)
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
        b.tell(Need(**b._addressed(), artifact=update, ranges=((0, 5),)))
        b.tell(Need(**b._addressed(), artifact=spec, ranges=((0, 5),)))
        wait_until(lambda: b.topics.down_chunk("b") in sent, "the spec is sent")
        assert sent.count(b.topics.down_chunk("b")) == 1


def test_status_and_offer_are_retained_and_the_end_is_told_by_a_goodbye(make_world: MakeWorld) -> None:
    world = make_world()
    world.devices["b"].silent = True
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: bool(world.devices["a"].receipts()), "an update is stored")
    topics = world.devices["a"].topics
    kept = [world.broker._retained[topic] for topic in (topics.coordinator, topics.offer)]
    status, offer = (open_envelope(payload, lambda _: world.key.public) for payload in kept)
    assert isinstance(status, CoordinatorStatus)
    assert status.online is False
    assert isinstance(offer, Offer)
    assert (offer.epoch, offer.round, offer.attempt, offer.spec.id) == (1, 1, 1, world.spec.digest)
    assert "stop" in world.workers[0].asked
