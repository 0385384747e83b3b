"""Bounds and corners: queues that fill, requests that ask for too much, updates that race each other, the end of it all."""

import errno
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert
from sqlalchemy.exc import OperationalError

from coordinator.http.app import _failed
from coordinator.rounds.signals import UpdateStored
from coordinator.storage import schema
from coordinator.storage.database import make_engine, recovered_epoch
from coordinator.storage.store import Store
from coordinator.updates import receiver as receiver_module
from coordinator.updates.published_artifacts import OPEN_FILES, PublishedArtifacts
from coordinator.updates.receiver import Broken, Receiver
from coordinator.updates.upload_windows import Grant, Received, Uploads
from fedcg.sentences import sentence_of
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import artifact_id
from fedcg.wire.errors import IntegrityError, TransportError
from fedcg.wire.messages.schemas import MAX_CHUNK_BYTES, Carrier, Manifest, Outcome, RoundAttempt
from fedcg.wire.transfer.chunks import parse_chunk
from fedcg.wire.transfer.partial_files import Partials
from fedcg.wire.transfer.windows import Window
from tests.support.broker.memory import MemoryTransport
from tests.support.coordinator.published import Published, receiver_of
from tests.support.coordinator.world import MakeWorld, RunningService, World
from tests.support.waiting import wait_until
from tests.support.wire.artifact_chunks import frames_for, make_ref


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world(rounds=1)


def test_published_artifacts_are_those_on_disk_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    data = bytes(300 * 1000)
    artifact = store.put(data)
    artifacts = PublishedArtifacts(store, 300)
    assert artifacts.known(artifact) is None
    assert artifacts.ref(artifact) == make_ref(data, 300)
    assert artifacts.known(artifact) is artifacts.source(artifact)
    artifacts.change_chunk_bytes(400)
    assert artifacts.ref(artifact) == make_ref(data, 400)
    store.path(artifact).write_bytes(b"rotten")
    artifacts.change_chunk_bytes(300)
    with pytest.raises(IntegrityError, match="damaged"):
        artifacts.source(artifact)


def manifest_of(world: World, data: bytes) -> Manifest:
    return Manifest(**world.devices["a"].addressed(1, 1), artifact=make_ref(data, 1024))


def test_all_devices_together_stay_under_the_shared_window_and_take_turns(world: World) -> None:
    shared = Window(chunks=5, bytes=1 << 30)
    uploads = Uploads(Partials(world.root / "artifacts" / ".partial", 16, 1 << 30), Window(chunks=4), shared)
    data = {name: random.Random(name).randbytes(20 * 1024) for name in ("a", "b", "c")}
    manifests = {name: manifest_of(world, content) for name, content in data.items()}
    frames = {name: [*frames_for(data[name], manifests[name].artifact)] for name in data}
    queue: list[tuple[str, int]] = []
    ended: list[str] = []

    def granted(grant: object) -> None:
        if isinstance(grant, Received):
            ended.append(grant.device)
            uploads.end(grant.device)
        elif isinstance(grant, Grant):
            queue.extend(
                (grant.device, index) for first, count in grant.ranges for index in range(first, first + count)
            )
        assert len(queue) <= shared.chunks

    for name in data:
        granted(uploads.begin(name, manifests[name], 0.0, 100.0, Carrier.MQTT))
    while queue:
        name, index = queue.pop(0)
        granted(uploads.feed(name, parse_chunk(frames[name][index]), 0.0))
        for grant in uploads.held_back(0.0):
            granted(grant)
    assert sorted(ended) == ["a", "b", "c"]


def test_chunks_that_were_lost_under_a_full_shared_window_are_granted_again(world: World) -> None:
    shared = Window(chunks=8, bytes=1 << 30)
    uploads = Uploads(Partials(world.root / "artifacts" / ".partial", 16, 1 << 30), Window(chunks=4), shared)
    data = {name: random.Random(name).randbytes(20 * 1024) for name in ("a", "b", "c")}
    grants = {
        name: uploads.begin(name, manifest_of(world, content), 0.0, 100.0, Carrier.MQTT)
        for name, content in data.items()
    }
    assert [name for name, grant in grants.items() if grant is not None] == ["a", "b"]
    granted: set[str] = set()
    for tick in range(1, 100):  # whatever is granted is lost
        now = 0.25 * tick
        granted |= {grant.device for grant in uploads.stalled(now)}
        granted |= {grant.device for grant in uploads.held_back(now)}
    assert granted == {"a", "b", "c"}


@pytest.fixture
def published() -> Published:
    return Published()


@pytest.fixture
def events() -> list[Any]:
    return []


@pytest.fixture
def receiver(world: World, published: Published, events: list[Any]) -> Iterator[Receiver]:
    world.store.open_attempt("tiny", RoundAttempt(1, 1), world.base_id, frozenset(world.clients), 0.0, 600.0)
    made = receiver_of(world, published, events.append)
    made.start()
    yield made
    made.close()


@contextmanager
def occupied(receiver: Receiver, world: World, published: Published) -> Iterator[None]:
    """The receiver's thread is at a receipt of c's; what comes meanwhile waits."""
    published.held.clear()
    published.release.clear()
    receiver.announce("c", manifest_of(world, b"never invited"))
    assert published.held.wait(30)
    yield
    published.release.set()
    wait_until(lambda: bool(published.receipts), "c is answered")
    published.receipts.pop(0)


def test_what_does_not_fit_into_the_queue_is_dropped(
    receiver: Receiver, world: World, published: Published, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(world, data)
    frame = next(frames_for(data, manifest.artifact))
    receiver.announce("a", manifest)
    wait_until(lambda: bool(published.needs), "chunks are granted")
    monkeypatch.setattr(receiver_module, "MAX_BYTES", len(frame) + 1)
    with occupied(receiver, world, published):
        assert [receiver.frame("a", frame) for _ in range(3)] == [True] * 3
    assert receiver.dropped == 2


@pytest.fixture
def data(world: World) -> bytes:
    """An update of `a` to the open attempt."""
    return world.devices["a"].make_update(1, 1, world.base_id)


def test_a_frame_that_was_not_granted_never_reaches_the_receivers_thread(
    receiver: Receiver, world: World, published: Published, data: bytes
) -> None:
    frame = next(frames_for(data, manifest_of(world, data).artifact))
    assert not receiver.frame("a", frame)
    receiver.announce("a", manifest_of(world, data))
    wait_until(lambda: bool(published.needs), "chunks are granted")
    assert not receiver.frame("a", bytes(MAX_CHUNK_BYTES + 1000))
    taken = sum(receiver.frame("a", frame) for _ in range(1000))
    granted = sum(count for ranges in published.needs for _, count in ranges)
    assert receiver_module.SPARE_FRAMES < taken <= receiver_module.SPARE_FRAMES + granted
    assert not receiver.frame("b", frame)
    receiver.forget("a")
    assert receiver.announced("a").result(30) is None
    assert not receiver.frame("a", frame)


def test_a_device_that_was_granted_chunks_over_https_may_send_no_frames(
    receiver: Receiver, world: World, published: Published, data: bytes
) -> None:
    published.used_carrier = Carrier.HTTPS
    receiver.announce("a", manifest_of(world, data))
    wait_until(lambda: bool(published.needs), "chunks are granted")
    assert not receiver.frame("a", next(frames_for(data, manifest_of(world, data).artifact)))


def test_a_device_has_one_manifest_in_the_queue_however_many_it_sends(
    receiver: Receiver, world: World, published: Published, data: bytes
) -> None:
    with occupied(receiver, world, published):
        for _ in range(1000):
            receiver.announce("a", manifest_of(world, data).model_copy(update={"round": 9}))
        receiver.announce("a", manifest_of(world, data))
    wait_until(lambda: bool(published.needs), "the newest one is answered")
    assert published.receipts == []


def test_the_end_of_an_attempt_ends_no_upload_of_the_next_one(
    receiver: Receiver, world: World, published: Published
) -> None:
    old, new = (world.devices["a"].make_update(1, attempt, world.base_id) for attempt in (1, 2))
    other = manifest_of(world, world.devices["b"].make_update(1, 1, world.base_id))
    receiver.announce("b", other)
    assert receiver.announced("b").result(30) == other.artifact
    manifest = manifest_of(world, new).model_copy(update={"attempt": 2})
    with occupied(receiver, world, published):
        receiver.announce("a", manifest_of(world, old))  # waits, and the next one takes its turn
        world.store.fail_attempt("tiny", RoundAttempt(1, 1), "x", 1.0)
        receiver.end_attempt(RoundAttempt(1, 1), Outcome.CLOSED, "the attempt ended without an aggregate")
        world.store.open_attempt("tiny", RoundAttempt(1, 2), world.base_id, frozenset(world.clients), 2.0, 600.0)
        receiver.announce("a", manifest)
    for frame in frames_for(new, manifest.artifact):
        receiver.chunk("a", parse_chunk(frame)).result(30)
    wait_until(lambda: len(published.receipts) == 2, "two receipts")
    assert published.receipts == [(other.artifact.id, Outcome.CLOSED), (manifest.artifact.id, Outcome.ACCEPTED)]


def deliver(receiver: Receiver, manifest: Manifest, data: bytes) -> None:
    """Announce an update of `a` and put its chunks, as over HTTPS."""
    receiver.announce("a", manifest)
    if receiver.announced("a").result(30) is not None:
        for frame in frames_for(data, manifest.artifact):
            receiver.chunk("a", parse_chunk(frame)).result(30)


def test_of_two_updates_of_one_device_only_the_first_counts_and_a_repeated_one_has_the_same_receipt(
    receiver: Receiver, world: World, published: Published, events: list[Any], data: bytes
) -> None:
    for each in (data, world.devices["b"].make_update(1, 1, world.base_id), data):
        deliver(receiver, manifest_of(world, each), each)
    wait_until(lambda: len(published.receipts) == 3, "three receipts")
    assert [outcome for _, outcome in published.receipts] == [Outcome.ACCEPTED, Outcome.CONFLICT, Outcome.ACCEPTED]
    assert events == [UpdateStored(1, 1, "a", artifact_id(data))]


def test_a_second_update_that_a_restored_coordinator_itself_explains_is_late_and_no_conflict(
    receiver: Receiver, world: World, published: Published, data: bytes
) -> None:
    deliver(receiver, manifest_of(world, data), data)
    wait_until(lambda: len(published.receipts) == 1, "a receipt")
    engine = make_engine(world.root / "database.sqlite")
    with engine.begin() as connection:  # what `restore` and `--accept-loss` do
        connection.execute(insert(schema.leases).values(id=1, epoch=recovered_epoch(0)))
    engine.dispose()
    other = world.devices["b"].make_update(1, 1, world.base_id)
    deliver(receiver, manifest_of(world, other), other)
    wait_until(lambda: len(published.receipts) == 2, "two receipts")
    assert [outcome for _, outcome in published.receipts] == [Outcome.ACCEPTED, Outcome.LATE]
    (refused,) = world.events("update_refused")
    told = sentence_of(refused)
    assert told is not None
    assert told.text.endswith("is late: another one of this device, from before this coordinator was restored, counts")


def test_an_update_whose_attempt_closed_while_it_came_is_late_although_the_round_loop_has_not_said_so(
    receiver: Receiver, world: World, published: Published, events: list[Any], data: bytes
) -> None:
    manifest = manifest_of(world, data)
    receiver.announce("a", manifest)
    assert receiver.announced("a").result(30) == manifest.artifact
    assert world.store.start_distilling("tiny", RoundAttempt(1, 1), 1.0) == []
    for frame in frames_for(data, manifest.artifact):
        receiver.chunk("a", parse_chunk(frame)).result(30)
    assert published.receipts == [(manifest.artifact.id, Outcome.LATE)]
    assert not world.artifacts.has(manifest.artifact.id)
    assert (world.store.updates("tiny", RoundAttempt(1, 1)), events) == ([], [])


def test_a_late_manifest_that_names_a_file_of_the_coordinator_does_not_delete_it(
    receiver: Receiver, world: World, published: Published
) -> None:
    assert world.store.start_distilling("tiny", RoundAttempt(1, 1), 1.0) == []
    receiver.announce("a", manifest_of(world, world.base))
    wait_until(lambda: bool(published.receipts), "a receipt")
    assert world.artifacts.has(world.base_id)


@pytest.mark.parametrize(
    ("subject", "method", "error"),
    [
        (ArtifactStore, "get", OSError("the disk is gone")),
        (Store, "end_update", OperationalError("insert", {}, Exception("the database is locked"))),
    ],
)
def test_a_failing_disk_or_database_ends_the_service_and_costs_no_update(
    receiver: Receiver,
    world: World,
    published: Published,
    events: list[Any],
    data: bytes,
    monkeypatch: pytest.MonkeyPatch,
    subject: type,
    method: str,
    error: Exception,
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(subject, method, broken)
    with pytest.raises(type(error)):
        deliver(receiver, manifest_of(world, data), data)
    wait_until(lambda: bool(events), "the service is notified")
    assert events == [Broken(error)]
    assert published.receipts == []
    monkeypatch.undo()
    assert world.store.updates("tiny", RoundAttempt(1, 1)) == []


def test_a_damaged_base_on_the_coordinators_disk_ends_the_service_and_blames_no_device(
    receiver: Receiver, world: World, published: Published, events: list[Any], data: bytes
) -> None:
    base = world.artifacts.path(world.base_id)
    damaged = bytearray(base.read_bytes())
    damaged[-1] ^= 1
    base.write_bytes(damaged)
    with pytest.raises(OSError, match=r"damaged.*" + world.base_id):
        deliver(receiver, manifest_of(world, data), data)
    wait_until(lambda: bool(events), "the service is notified")
    [broken] = events
    assert isinstance(broken.error, OSError)
    assert broken.error.filename == str(base)
    assert (world.events("refused"), published.receipts) == ([], [])


def test_a_finished_coordinator_may_leave_when_its_devices_have_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.service.service.LEAVE_AFTER_S", 0.0)
    with RunningService(world) as running:
        world.start_devices()
        world.wait_finished()
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


def test_a_service_that_a_full_disk_ended_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    codes: list[int] = []

    _failed(codes.append, Path("/srv/home/artifacts"), OSError(errno.ENOSPC, "no space left on device"))
    assert codes == [1]
    assert "goes on with the same attempt. Free space on, or repair, /srv/home/artifacts first: " in caplog.text
    assert "no space left on device" in caplog.text
    assert "Traceback" not in caplog.text


def test_the_artifact_that_was_not_used_for_the_longest_time_is_closed_first(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    ids = [store.put(bytes([number])) for number in range(OPEN_FILES + 1)]
    artifacts = PublishedArtifacts(store, 300)
    opened = [artifacts.source(artifact) for artifact in ids[:-1]]
    assert artifacts.known(ids[0]) is opened[0]
    artifacts.source(ids[-1])
    assert [artifacts.known(artifact) is None for artifact in ids] == [False, True] + [False] * (OPEN_FILES - 1)
