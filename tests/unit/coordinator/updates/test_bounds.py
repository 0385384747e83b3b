"""Bounds and corners: queues that fill, requests that ask for too much, updates that race each other, the end of it all."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.http.app import _ended
from coordinator.rounds.round_engine import CameOnline, RoundState, UpdateStored, transition
from coordinator.updates import receiver as intake_module
from coordinator.updates.published_artifacts import Library
from coordinator.updates.receipts import Checked, Uplink
from coordinator.updates.receiver import Broken, Intake
from coordinator.updates.upload_windows import Arrival, Grant, Received, Uploads
from fedcg.event_log import EventLog
from fedcg.refusal_counter import Refusals
from fedcg.wire.artifacts.artifacts import ArtifactStore
from fedcg.wire.errors import IntegrityError, TransportError
from fedcg.wire.messages.messages import MAX_CHUNK_BYTES, Manifest, Outcome
from fedcg.wire.transfer.chunk_window import Window
from fedcg.wire.transfer.chunks import frames_for, make_ref, parse_chunk
from fedcg.wire.transfer.partial_files import Partials
from fedcg.wire.transport.memory import MemoryTransport
from tests.support.coordinator_support import RunningService, World, aggregate_bytes, tiny_spec, wait_until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    spec = tiny_spec(rounds=1)
    made = World(tmp_path / "home", spec, aggregate_bytes(spec, 0, 0, seed=1))
    yield made
    made.close()


def test_the_library_announces_what_is_on_disk_and_refuses_what_is_damaged(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    data = bytes(300 * 1000)
    artifact = store.put(data)
    library = Library(store, 300)
    assert library.known(artifact) is None
    assert library.ref(artifact) == make_ref(data, 300)
    assert library.known(artifact) is library.source(artifact)
    library.change_chunk_bytes(400)
    assert library.ref(artifact) == make_ref(data, 400)
    store.path(artifact).write_bytes(b"rotten")
    library.change_chunk_bytes(300)
    with pytest.raises(IntegrityError, match="damaged"):
        library.source(artifact)


def partials(world: World) -> Partials:
    return Partials(world.root / "artifacts" / ".partial", 16, 1 << 30)


def manifest_of(world: World, data: bytes) -> Manifest:
    return Manifest(**world.devices["a"]._addressed(1, 1), artifact=make_ref(data, 1024))


def test_an_upload_is_handed_over_once_and_a_repeated_manifest_does_not_start_it_again(world: World) -> None:
    data = world.devices["a"].make_update(1, 1, world.base_id)
    manifest, uploads = manifest_of(world, data), Uploads(partials(world))
    grant = uploads.begin("a", manifest, 0.0, 100.0)
    assert isinstance(grant, Grant)
    frames = [parse_chunk(frame) for frame in frames_for(data, manifest.artifact)]
    assert uploads.begin("a", manifest, 0.1, 101.0) is None
    handed = [uploads.feed("a", chunk, 0.2) for chunk in (*frames, *frames)]
    complete = [item for item in handed if isinstance(item, Received)]
    assert [(item.file.read_bytes(), item.manifest_at) for item in complete] == [(data, 100.0)]
    assert complete[0].arrival == Arrival(resumed=0, fresh=len(frames), repeated=0)
    assert uploads.begin("a", manifest, 9.0, 109.0) is None
    assert list(uploads.stalled(99.0)) == []


def test_a_restarted_coordinator_asks_for_the_rest_only(world: World) -> None:
    data = world.devices["a"].make_update(1, 1, world.base_id)
    manifest, first = manifest_of(world, data), Uploads(partials(world))
    frames = [parse_chunk(frame) for frame in frames_for(data, manifest.artifact)]
    first.begin("a", manifest, 0.0, 100.0)
    for chunk in frames[1:-2]:
        first.feed("a", chunk, 0.1)  # and then it is killed: nothing is closed
    second = Uploads(partials(world))
    grant = second.begin("a", manifest, 0.0, 200.0)
    assert isinstance(grant, Grant)
    assert grant.ranges == ((0, 1), (len(frames) - 2, 2))
    ended = [second.feed("a", chunk, 0.1) for chunk in (frames[0], *frames[-2:])][-1]
    assert isinstance(ended, Received)
    assert ended.file.read_bytes() == data
    assert ended.arrival == Arrival(resumed=len(frames) - 3, fresh=3, repeated=0)
    third = Uploads(partials(world))
    whole = third.begin("a", manifest, 0.0, 300.0)
    assert isinstance(whole, Received)
    third.end("a")
    assert not list((world.root / "artifacts" / ".partial").iterdir())


def test_all_devices_together_stay_under_the_shared_window_and_take_turns(world: World) -> None:
    shared = Window(chunks=5, bytes=1 << 30)
    uploads = Uploads(partials(world), Window(chunks=4), shared)
    data = {name: random.Random(name).randbytes(20 * 1024) for name in ("a", "b", "c")}
    manifests = {name: manifest_of(world, content) for name, content in data.items()}
    frames = {name: [*frames_for(data[name], manifests[name].artifact)] for name in data}
    queue: list[tuple[str, int]] = []
    ended: list[str] = []

    def granted(grant: object) -> None:
        if isinstance(grant, Received):
            ended.append(grant.device)
        elif isinstance(grant, Grant):
            queue.extend(
                (grant.device, index) for first, count in grant.ranges for index in range(first, first + count)
            )
        assert len(queue) <= shared.chunks

    for name in data:
        granted(uploads.begin(name, manifests[name], 0.0, 0.0))
    while queue:
        name, index = queue.pop(0)
        granted(uploads.feed(name, parse_chunk(frames[name][index]), 0.0))
        for grant in uploads.held_back(0.0):
            granted(grant)
    assert sorted(ended) == ["a", "b", "c"]


def test_chunks_that_come_before_their_manifest_was_looked_at_are_kept_within_the_grant(world: World) -> None:
    data = random.Random(1).randbytes(10 * 1024)
    manifest, uploads = manifest_of(world, data), Uploads(partials(world))
    frames = [*frames_for(data, manifest.artifact)]
    assert not uploads.keep_early("a", frames[0])  # nobody granted it
    uploads.expect("a")
    assert not uploads.keep_early("a", bytes(MAX_CHUNK_BYTES + 1000))
    assert [uploads.keep_early("a", frame) for frame in frames[:5]] == [True] * 4 + [False]
    assert uploads.early("a") == frames[:4]
    assert uploads.early("a") == []
    for forget in (partial(uploads.end, "a"), uploads.clear):
        uploads.expect("a")
        forget()
        assert not uploads.keep_early("a", frames[0])


def test_what_the_invite_granted_is_not_granted_again_until_it_stalls(world: World) -> None:
    data = random.Random(1).randbytes(10 * 1024)
    manifest = manifest_of(world, data)
    uploads = Uploads(partials(world))
    assert uploads.begin("a", manifest.model_copy(update={"following": 4}), 0.0, 0.0) is None
    assert list(uploads.stalled(1.0)) == []
    [again] = uploads.stalled(3.0)  # a device that said so and did not do it delays itself
    assert again.ranges[0][0] == 0
    told = uploads.begin("b", manifest.model_copy(update={"following": 2}), 0.0, 0.0)
    assert isinstance(told, Grant)
    assert told.ranges == ((0, 4),)


def test_first_chunks_are_granted_while_half_of_the_shared_window_holds_those_of_all_devices(world: World) -> None:
    uploads = Uploads(partials(world), Window(), Window(chunks=80, bytes=1 << 30))
    assert [uploads.first_chunks(devices) for devices in (1, 10, 11)] == [4, 4, 0]
    assert Uploads(partials(world), Window(chunks=2), Window(80, 1 << 30)).first_chunks(1) == 2
    assert Uploads(partials(world), Window(), Window(80, 7 * MAX_CHUNK_BYTES)).first_chunks(1) == 0


def test_the_intake_takes_early_chunks_when_the_manifest_comes(world: World) -> None:
    data = random.Random(1).randbytes(3 * 1024)
    manifest = manifest_of(world, data)
    told: list[object] = []
    intake = Intake(
        Uploads(partials(world)),
        lambda: None,
        told.append,
        Refusals(EventLog(world.root / "events.jsonl", lambda: 0.0)),
    )
    assert intake.expect("a", 1) == 4
    for frame in frames_for(data, manifest.artifact):
        intake.frame("a", frame)
    intake.begin("a", manifest.model_copy(update={"following": 3}), 0.0)
    intake.start()
    wait_until(lambda: bool(told), "the update is complete")
    intake.close()
    [received] = told
    assert isinstance(received, Received)
    assert (received.file.read_bytes(), intake.dropped) == (data, 0)


def intake_of(world: World, notify: Any) -> Intake:
    refusals = Refusals(EventLog(world.root / "events.jsonl", lambda: 0.0))
    return Intake(Uploads(partials(world)), lambda: None, notify, refusals)


def test_the_intake_drops_what_does_not_fit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.updates.receiver.MAX_BYTES", 100)
    intake = intake_of(world, lambda event: None)
    intake.expect("a", 1)
    assert [intake.frame("a", bytes(60)) for _ in range(3)] == [True] * 3
    assert intake.dropped == 2


def test_a_frame_that_was_not_granted_never_reaches_the_intakes_thread(world: World) -> None:
    data = random.Random(1).randbytes(60 * 1024)
    manifest = manifest_of(world, data)
    told: list[object] = []
    intake = intake_of(world, told.append)
    frame = next(frames_for(data, manifest.artifact))
    assert not intake.frame("a", frame)
    intake.expect("a", 1)
    assert not intake.frame("a", bytes(MAX_CHUNK_BYTES + 1000))
    taken = sum(intake.frame("a", frame) for _ in range(1000))
    assert taken == 4 + intake_module.SPARE_FRAMES
    assert not intake.frame("b", frame)
    assert intake.dropped == 1003 - taken
    intake.start()
    intake.begin("a", manifest, 0.0)
    wait_until(lambda: bool(told), "chunks are granted")
    [grant] = told
    assert isinstance(grant, Grant)
    assert sum(intake.frame("a", frame) for _ in range(1000)) == sum(count for _, count in grant.ranges)
    intake.end("a")
    assert not intake.frame("a", frame)
    intake.close()


class Silent:
    """A publisher that only remembers the receipts."""

    def __init__(self) -> None:
        self.receipts: list[tuple[str, Outcome]] = []

    def receipt(self, device: str, manifest: Manifest, outcome: Outcome, reason: str) -> bool:
        self.receipts.append((manifest.artifact.id, outcome))
        return True


def opened(world: World) -> RoundState:
    """Everybody is there, and the first attempt is open."""
    state = RoundState(world.store.federation("tiny").policy)
    for client in world.clients:
        state, _ = transition(state, CameOnline(client), 0.0)
    world.store.open_attempt(("tiny", 1, 1), world.base_id, frozenset(world.clients), 0.0, 600.0)
    return state


def test_of_two_updates_of_one_device_that_race_each_other_only_the_first_counts(world: World) -> None:
    state = opened(world)
    publisher: Any = Silent()
    setup = world.setup()
    uplink = Uplink(setup, publisher, lambda: state, lambda: "", lambda event: None, Refusals(setup.events))
    first = world.devices["a"].make_update(1, 1, world.base_id)
    second = world.devices["b"].make_update(1, 1, world.base_id)
    nowhere = world.root / "nowhere"
    checked = [
        Checked(Received("a", manifest_of(world, data), 1.0, nowhere), None, "") for data in (first, second, first)
    ]

    async def scenario() -> list[object]:
        return [await uplink.ended(item) for item in checked]

    assert asyncio.run(scenario()) == [UpdateStored(1, 1, "a"), None, None]
    assert [outcome for _, outcome in publisher.receipts] == [Outcome.ACCEPTED, Outcome.CONFLICT, Outcome.DUPLICATE]


def test_an_update_that_ended_while_it_was_checked_gets_no_verdict_for_its_vanished_file(world: World) -> None:
    state = opened(world)
    publisher: Any = Silent()
    setup = world.setup()
    told: list[object] = []
    uplink = Uplink(setup, publisher, lambda: state, lambda: world.base_id, told.append, Refusals(setup.events))
    update = manifest_of(world, world.devices["a"].make_update(1, 1, world.base_id))
    uplink._heard(Received("a", update, 1.0, world.root / "gone"))
    wait_until(lambda: len(told) == 1, "it was checked")
    [checked] = told
    assert isinstance(checked, Checked)
    assert "ended while it was checked" in checked.reason
    assert asyncio.run(uplink.ended(checked)) is None
    assert publisher.receipts == []
    assert world.store.update(("tiny", 1, 1), "a") is None


def test_a_check_that_fails_by_itself_is_told_to_the_service(world: World) -> None:
    def broken() -> str:
        raise OSError("the disk is gone")

    publisher: Any = Silent()
    setup = world.setup()
    state = RoundState(world.store.federation("tiny").policy)
    told: list[object] = []
    uplink = Uplink(setup, publisher, lambda: state, broken, told.append, Refusals(setup.events))
    update = manifest_of(world, world.devices["a"].make_update(1, 1, world.base_id))
    uplink._heard(Received("a", update, 1.0, world.root / "gone"))
    wait_until(lambda: len(told) == 1, "it was told")
    [failed] = told
    assert isinstance(failed, Broken)  # with which the service ends
    assert str(failed.error) == "the disk is gone"


def test_a_finished_coordinator_may_leave_when_its_devices_have_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.service.service.LEAVE_AFTER_S", 0.0)
    with RunningService(world) as running:
        world.start_devices()
        final = world.wait_event("finished")["aggregate"]
        for device in world.devices.values():
            wait_until(lambda device=device: final in device.artifacts, "the final aggregate is fetched")  # type: ignore[misc]
        assert not running.service.finished_and_left.is_set()
        for name in world.clients:
            world.broker.drop(name)
        wait_until(running.service.finished_and_left.is_set, "nobody is left")


def test_an_offer_that_finds_the_queue_full_is_published_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = MemoryTransport.publish
    offers: list[bytes] = []

    def full_at_first(self: MemoryTransport, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        if topic.endswith("/offer"):
            offers.append(payload)
            if len(offers) == 1:
                raise TransportError("the outgoing queue is full")
        publish(self, topic, payload, qos=qos, retain=retain)

    monkeypatch.setattr(MemoryTransport, "publish", full_at_first)
    with RunningService(world):
        world.start_devices()
        world.wait_event("finished")
    assert len(offers) >= 3  # refused, repeated, and the end of the federation


def test_a_service_that_fails_says_so_instead_of_going_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(ArtifactStore, "adopt", broken)
    running = RunningService(world).__enter__()
    world.start_devices()
    wait_until(lambda: not running._thread.is_alive(), "the service ends")
    with pytest.raises(AssertionError, match="the service failed") as failed:
        running.__exit__()
    assert isinstance(failed.value.__cause__, OSError)
    assert world.store.updates(("tiny", 1, 1)) == []
    assert all(device.receipts() == [] for device in world.devices.values())


def test_a_service_that_a_full_disk_ended_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    codes: list[int] = []

    async def full() -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    async def scenario() -> None:
        work = asyncio.create_task(full())
        await asyncio.wait([work])
        _ended(codes.append, Path("/srv/home/artifacts"), work)

    asyncio.run(scenario())
    assert codes == [1]
    assert "goes on with the same attempt. Free space on, or repair, /srv/home/artifacts first: " in caplog.text
    assert "no space left on device" in caplog.text
    assert "Traceback" not in caplog.text
