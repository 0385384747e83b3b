"""Updates in and artifacts out: queues that fill, requests that ask for too much, updates that race each other, bytes that are read once."""

import errno
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy import insert
from sqlalchemy.exc import OperationalError

from coordinator.http.app import _failed
from coordinator.rounds.signals import UpdateStored
from coordinator.storage import schema
from coordinator.storage.database import make_engine, recovered_epoch, unusable
from coordinator.storage.store import Store
from coordinator.updates import receiver as receiver_module
from coordinator.updates.published_artifacts import OPEN_FILES, ArtifactRequests, PublishedArtifacts
from coordinator.updates.receiver import Broken
from coordinator.updates.upload_windows import Grant, Received, Uploads
from fedcg.sentences import sentence_of
from fedcg.wire.artifacts import artifacts
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import unpack
from fedcg.wire.errors import IntegrityError, TransportError
from fedcg.wire.messages.schemas import COORDINATOR, MAX_CHUNK_BYTES, Carrier, Manifest, Need, Outcome, RoundAttempt
from fedcg.wire.transfer.chunk_sender import ChunkFile
from fedcg.wire.transfer.chunks import parse_chunk
from fedcg.wire.transfer.partial_files import Partials
from fedcg.wire.transfer.windows import Ranges, Window
from tests.support.broker.memory import MemoryTransport
from tests.support.coordinator.published import Published, receiver_of
from tests.support.coordinator.world import MakeWorld, RunningService, World
from tests.support.raising import raising
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
    assert artifacts.source(artifact).ref == make_ref(data, 300)
    assert artifacts.known(artifact) is artifacts.source(artifact)
    artifacts.change_chunk_bytes(400)
    assert artifacts.source(artifact).ref == make_ref(data, 400)
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


class Receiving:
    """A receiver at work on the first attempt, what it sent and notified, and an update of `a` to that attempt."""

    def __init__(self, world: World) -> None:
        self.world, self.published, self.events = world, Published(), list[Any]()
        world.store.open_attempt("tiny", RoundAttempt(1, 1), world.base_id, frozenset(world.clients), 0.0, 600.0)
        self.receiver = receiver_of(world, self.published, self.events.append)
        self.data = world.devices["a"].make_update(1, 1, world.base_id)
        self.manifest = manifest_of(world, self.data)
        self.frame = next(frames_for(self.data, self.manifest.artifact))

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for _, outcome in self.published.receipts]

    def grant(self) -> None:
        """Announce the update, and wait until chunks are granted."""
        self.receiver.announce("a", self.manifest)
        wait_until(lambda: bool(self.published.needs), "chunks are granted")

    def put(self, manifest: Manifest, data: bytes) -> None:
        """Put the chunks of an announced update, as over HTTPS."""
        for frame in frames_for(data, manifest.artifact):
            self.receiver.chunk("a", parse_chunk(frame)).result(30)

    def deliver(self, data: bytes) -> None:
        """Announce an update of `a`, put its chunks where they are wanted, and wait for its receipt or failure."""
        known, manifest = len(self.published.receipts), manifest_of(self.world, data)
        self.receiver.announce("a", manifest)
        if self.receiver.announced("a").result(30) is not None:
            self.put(manifest, data)
        wait_until(lambda: len(self.published.receipts) > known, "a receipt")

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """The receiver's thread is at a receipt of c's; what comes meanwhile waits."""
        self.published.held.clear()
        self.published.release.clear()
        self.receiver.announce("c", manifest_of(self.world, b"never invited"))
        assert self.published.held.wait(30)
        yield
        self.published.release.set()
        wait_until(lambda: bool(self.published.receipts), "c is answered")
        self.published.receipts.pop(0)


@pytest.fixture
def receiving(world: World) -> Iterator[Receiving]:
    made = Receiving(world)
    made.receiver.start()
    yield made
    made.receiver.close()


def test_what_does_not_fit_into_the_queue_is_dropped(receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    receiving.grant()
    monkeypatch.setattr(receiver_module, "MAX_BYTES", len(receiving.frame) + 1)
    with receiving.occupied():
        assert [receiving.receiver.frame("a", receiving.frame) for _ in range(3)] == [True] * 3
    assert receiving.receiver.dropped == 2


def test_a_frame_that_was_not_granted_never_reaches_the_receivers_thread(receiving: Receiving) -> None:
    receiver, frame = receiving.receiver, receiving.frame
    assert not receiver.frame("a", frame)
    receiving.grant()
    assert not receiver.frame("a", bytes(MAX_CHUNK_BYTES + 1000))
    taken = sum(receiver.frame("a", frame) for _ in range(1000))
    granted = sum(count for ranges in receiving.published.needs for _, count in ranges)
    assert receiver_module.SPARE_FRAMES < taken <= receiver_module.SPARE_FRAMES + granted
    assert not receiver.frame("b", frame)
    receiver.forget("a")
    assert receiver.announced("a").result(30) is None
    assert not receiver.frame("a", frame)


def test_a_device_that_was_granted_chunks_over_https_may_send_no_frames(receiving: Receiving) -> None:
    receiving.published.used_carrier = Carrier.HTTPS
    receiving.grant()
    assert not receiving.receiver.frame("a", receiving.frame)


def test_a_device_has_one_manifest_in_the_queue_however_many_it_sends(receiving: Receiving) -> None:
    with receiving.occupied():
        for _ in range(1000):
            receiving.receiver.announce("a", receiving.manifest.model_copy(update={"round": 9}))
        receiving.receiver.announce("a", receiving.manifest)
    wait_until(lambda: bool(receiving.published.needs), "the newest one is answered")
    assert receiving.published.receipts == []


def test_the_end_of_an_attempt_ends_no_upload_of_the_next_one(receiving: Receiving) -> None:
    world, receiver, published = receiving.world, receiving.receiver, receiving.published
    new = world.devices["a"].make_update(1, 2, world.base_id)
    other = manifest_of(world, world.devices["b"].make_update(1, 1, world.base_id))
    receiver.announce("b", other)
    assert receiver.announced("b").result(30) == other.artifact
    manifest = manifest_of(world, new).model_copy(update={"attempt": 2})
    with receiving.occupied():
        receiver.announce("a", receiving.manifest)  # waits, and the next one takes its turn
        world.store.fail_attempt("tiny", RoundAttempt(1, 1), "x", 1.0)
        receiver.end_attempt(RoundAttempt(1, 1), Outcome.CLOSED, "the attempt ended without an aggregate")
        world.store.open_attempt("tiny", RoundAttempt(1, 2), world.base_id, frozenset(world.clients), 2.0, 600.0)
        receiver.announce("a", manifest)
    receiving.put(manifest, new)
    wait_until(lambda: len(published.receipts) == 2, "two receipts")
    assert published.receipts == [(other.artifact.id, Outcome.CLOSED), (manifest.artifact.id, Outcome.ACCEPTED)]


def test_of_two_updates_only_the_first_counts_and_a_repeated_one_has_the_same_receipt(receiving: Receiving) -> None:
    other = receiving.world.devices["b"].make_update(1, 1, receiving.world.base_id)
    for each in (receiving.data, other, receiving.data):
        receiving.deliver(each)
    assert receiving.outcomes == [Outcome.ACCEPTED, Outcome.CONFLICT, Outcome.ACCEPTED]
    assert receiving.events == [UpdateStored(1, 1, "a", receiving.manifest.artifact.id)]


def test_a_second_update_that_a_restored_coordinator_explains_is_late_and_no_conflict(receiving: Receiving) -> None:
    world = receiving.world
    receiving.deliver(receiving.data)
    engine = make_engine(world.root / "database.sqlite")
    with engine.begin() as connection:  # what `restore` and `--accept-loss` do
        connection.execute(insert(schema.leases).values(id=1, epoch=recovered_epoch(0)))
    engine.dispose()
    receiving.deliver(world.devices["b"].make_update(1, 1, world.base_id))
    assert receiving.outcomes == [Outcome.ACCEPTED, Outcome.LATE]
    (refused,) = world.events("update_refused")
    told = sentence_of(refused)
    assert told is not None
    assert told.text.endswith("is late: another one counts, from before this coordinator was restored")


def test_an_update_whose_attempt_closed_while_it_came_is_late_before_the_round_loop_knows(receiving: Receiving) -> None:
    world, manifest = receiving.world, receiving.manifest
    receiving.grant()
    assert world.store.start_distilling("tiny", RoundAttempt(1, 1), 1.0) == []
    receiving.put(manifest, receiving.data)
    assert receiving.published.receipts == [(manifest.artifact.id, Outcome.LATE)]
    assert not world.artifacts.has(manifest.artifact.id)
    assert (world.store.updates("tiny", RoundAttempt(1, 1)), receiving.events) == ([], [])


def test_a_late_manifest_that_names_a_file_of_the_coordinator_does_not_delete_it(receiving: Receiving) -> None:
    world = receiving.world
    assert world.store.start_distilling("tiny", RoundAttempt(1, 1), 1.0) == []
    receiving.deliver(world.base)
    assert world.artifacts.has(world.base_id)


@pytest.mark.parametrize(
    ("subject", "method", "error"),
    [
        (ArtifactStore, "get", OSError("the disk is gone")),
        (Store, "end_update", OperationalError("insert", {}, Exception("the database is locked"))),
    ],
)
def test_a_failing_disk_or_database_ends_the_service_and_costs_no_update(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch, subject: type, method: str, error: Exception
) -> None:
    monkeypatch.setattr(subject, method, raising(error))
    with pytest.raises(type(error)):
        receiving.deliver(receiving.data)
    wait_until(lambda: bool(receiving.events), "the service is notified")
    assert receiving.events == [Broken(error)]
    assert receiving.published.receipts == []
    monkeypatch.undo()
    assert receiving.world.store.updates("tiny", RoundAttempt(1, 1)) == []


def test_a_damaged_base_on_the_coordinators_disk_ends_the_service_and_blames_no_device(receiving: Receiving) -> None:
    world = receiving.world
    base = world.artifacts.path(world.base_id)
    damaged = bytearray(base.read_bytes())
    damaged[-1] ^= 1
    base.write_bytes(damaged)
    with pytest.raises(OSError, match=r"damaged.*" + world.base_id):
        receiving.deliver(receiving.data)
    wait_until(lambda: bool(receiving.events), "the service is notified")
    [broken] = receiving.events
    assert isinstance(broken.error, OSError)
    assert broken.error.filename == str(base)
    assert (world.events("refused"), receiving.published.receipts) == ([], [])


def test_a_finished_coordinator_may_leave_after_its_devices(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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
    world.run()
    assert len(offers) >= 3  # refused, repeated, and the end of the federation


def test_a_service_that_a_full_disk_ended_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    codes: list[int] = []

    _failed(codes.append, Path("/srv/home/artifacts"), OSError(errno.ENOSPC, "no space left on device"))
    assert codes == [1]
    assert "resumes the same attempt. Free space on, or repair, /srv/home/artifacts first: " in caplog.text
    assert "no space left on device" in caplog.text
    error = OperationalError("INSERT", {}, Exception("database or disk is full"))
    _failed(codes.append, Path("/srv/home/artifacts"), unusable(Path("/srv/home/database.sqlite"), error))
    assert "attempt. /srv/home/database.sqlite can't be used: database or disk is full. Free space on" in caplog.text
    assert "Traceback" not in caplog.text


def test_the_artifact_that_was_not_used_for_the_longest_time_is_closed_first(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    ids = [store.put(bytes([number])) for number in range(OPEN_FILES + 1)]
    artifacts = PublishedArtifacts(store, 300)
    opened = [artifacts.source(artifact) for artifact in ids[:-1]]
    assert artifacts.known(ids[0]) is opened[0]
    artifacts.source(ids[-1])
    assert [artifacts.known(artifact) is None for artifact in ids] == [False, True] + [False] * (OPEN_FILES - 1)


class Requested:
    """Requests for three artifacts whose reads wait in `work`, and what was sent."""

    def __init__(self, root: Path) -> None:
        self.store = ArtifactStore(root)
        self.ids = [self.store.put(bytes([number]) * 600) for number in range(3)]
        self.published = PublishedArtifacts(self.store, 300)
        for artifact in self.ids:
            self.published.allow(artifact)
        self.work: list[Callable[[], object]] = []
        self.sent: list[tuple[str, str, Ranges]] = []
        self.requests = ArtifactRequests(self.published, self._send, self.work.append)

    def _send(self, device: str, source: ChunkFile, ranges: Ranges) -> None:
        self.sent.append((device, source.ref.id, ranges))

    def ask(self, device: str, artifact: str, first: int = 0) -> None:
        at = {"federation": "tiny", "sender": device, "recipient": COORDINATOR, "round": 1, "attempt": 1}
        self.requests.serve(device, Need(**at, artifact=artifact, ranges=((first, 1),)))

    def read(self) -> None:
        while self.work:
            self.work.pop(0)()


@pytest.fixture
def requested(tmp_path: Path) -> Requested:
    return Requested(tmp_path)


def test_an_artifact_is_read_once_for_all_that_wait_and_then_sent_at_once(requested: Requested) -> None:
    first = requested.ids[0]
    for _ in range(1000):
        requested.ask("a", first)
    requested.ask("b", first, 1)
    assert len(requested.work) == 2
    requested.read()
    assert requested.sent == [("a", first, ((0, 1),)), ("b", first, ((1, 1),))]
    requested.ask("a", first, 1)
    assert (len(requested.work), requested.sent[-1]) == (0, ("a", first, ((1, 1),)))


def test_of_a_devices_requests_the_newest_is_served(requested: Requested, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Mock(side_effect=requested.published.source)
    monkeypatch.setattr(requested.published, "source", source)
    for _ in range(1000):
        for artifact in requested.ids:
            requested.ask("a", artifact)
    assert len(requested.work) == 1
    requested.read()
    source.assert_called_once_with(requested.ids[-1])
    assert requested.sent == [("a", requested.ids[-1], ((0, 1),))]


def test_what_is_not_published_is_never_read_and_what_can_not_be_read_is_not_sent(requested: Requested) -> None:
    requested.published.forget(requested.ids[0])
    requested.ask("a", requested.ids[0])
    assert requested.work == []
    requested.store.path(requested.ids[1]).write_bytes(b"damaged")
    requested.ask("a", requested.ids[1])
    requested.read()
    assert requested.sent == []


SHA256 = hashlib.sha256
HEAD_BYTES = 100  # of a chunk: its artifact and its place, and what else its check may cover


class CountingSha256:
    """sha256 that counts its bytes."""

    hashed = 0

    def __init__(self, data: bytes = b"") -> None:
        self._digest = SHA256()
        self.update(data)

    def update(self, data: bytes) -> None:
        CountingSha256.hashed += len(data)
        self._digest.update(data)

    def digest(self) -> bytes:
        return self._digest.digest()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


@pytest.mark.parametrize(("carrier", "passes"), [(Carrier.MQTT, 1), (Carrier.HTTPS, 2)])
def test_an_update_is_decoded_and_hashed_once_and_over_https_each_chunk_too(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch, carrier: Carrier, passes: int
) -> None:
    world, receiver, decoded = receiving.world, receiving.receiver, list[int]()
    receiving.published.used_carrier = carrier

    def counted_unpack(data: bytes, *args: Any, **options: Any) -> Any:
        decoded.append(len(data))
        return unpack(data, *args, **options)

    monkeypatch.setattr(artifacts, "unpack", counted_unpack)
    monkeypatch.setattr(hashlib, "sha256", CountingSha256)
    for count, name in enumerate("ba", 1):  # the base is read and decoded with the first one
        data = world.devices[name].make_update(1, 1, world.base_id)
        manifest = Manifest(**world.devices[name].addressed(1, 1), artifact=make_ref(data, 1024))
        receiver.announce(name, manifest)
        assert receiver.announced(name).result(30) == manifest.artifact
        frames = list(frames_for(data, manifest.artifact))
        chunks = [replace(parse_chunk(frame), check=b"") for frame in frames]
        CountingSha256.hashed = 0
        decoded.clear()
        for frame, chunk in zip(frames, chunks, strict=True):
            if carrier is Carrier.MQTT:
                assert receiver.frame(name, frame)
            else:
                receiver.chunk(name, chunk).result(30)
        wait_until(lambda: receiving.outcomes == [Outcome.ACCEPTED] * count, "a receipt")  # noqa: B023
    assert 0 <= CountingSha256.hashed - passes * len(data) <= HEAD_BYTES * len(frames)
    assert decoded == [len(data)]
