"""Receives updates on one thread: manifest, grants, chunks, check, artifact on disk, database, receipt.

Manifests and chunks are handled in order of arrival. Chunk frames come directly from the transport, and only granted ones are queued. The
queue is bounded in bytes: a frame that doesn't fit is dropped, counted and requested again. The database decides whether an attempt still
accepts an update, so responses to manifests don't wait for the loop that drives the rounds.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from coordinator.errors import StoreError
from coordinator.messaging.publisher import Publisher
from coordinator.rounds.records import UpdateRecord
from coordinator.rounds.signals import UpdateRefused, UpdateStored
from coordinator.updates.update_checks import UpdateChecks
from coordinator.updates.upload_windows import Grant, Received, Uploads
from fedcg.event_log import EventLog
from fedcg.values import Value
from fedcg.wire.errors import CapacityError, OrderError, Refusals, WireError
from fedcg.wire.messages import schemas
from fedcg.wire.transfer.chunks import FRAME_OVERHEAD_BYTES, Chunk, read_frame
from fedcg.wire.transfer.partial_files import Partials
from fedcg.wire.transfer.windows import LinkLimits

MAX_BYTES = 64 * 1024 * 1024
MAX_PARTIAL_FILES = 1024
MAX_PARTIAL_BYTES = 64 * schemas.MAX_ARTIFACT_BYTES
SPARE_FRAMES = 32  # frames allowed beyond an update's grants: unacknowledged frames arrive twice after a link broke
MAX_FRAMES = 512  # most frames granted to a device and not received; stalled grants count until received
COLLECT_S = 3600.0

log = logging.getLogger(__name__)
_Work = Callable[[], None]
ResultT = TypeVar("ResultT")


class Broken(Value):
    """A failure not caused by a device, such as a disk error: the coordinator must not ignore it."""

    error: BaseException


@dataclass(eq=False)
class Receiver:
    """Receives the updates of one federation; every call returns at once.

    Args:
        checks: decides about updates.
        folder: half-received updates, on the file system of the artifacts.
        limits: limits of the link to the broker.
        publisher: sends grants and receipts.
        events: the event log.
        refusals: counts refusals.
        notify: called with events for the round engine, on the receiver's thread; must only enqueue.

    Attributes:
        dropped: frames that did not fit or were not granted.
        without_room: by device, why its update must wait for space in the folder of half-received updates.
    """

    checks: UpdateChecks
    folder: Path
    limits: LinkLimits
    publisher: Publisher
    events: EventLog
    refusals: Refusals
    notify: Callable[[UpdateStored | UpdateRefused | Broken], None]
    dropped: int = field(default=0, init=False)
    without_room: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._partials = Partials(self.folder, MAX_PARTIAL_FILES, MAX_PARTIAL_BYTES)
        self._uploads = Uploads(self._partials, self.limits.window, self.limits.shared)
        self._work: deque[tuple[_Work, int]] = deque()
        self._bytes = 0
        self._filled = threading.Condition()
        self._closing = False
        self._manifests: dict[str, schemas.Manifest] = {}  # waiting for a response
        self._last_seen: dict[str, float] = {}
        self._frames: dict[str, int] = {}  # number that each device may send now
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)
        self._collected_at = float("-inf")

    # Thread-safe: only enqueue

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop shortly; received chunks stay on disk."""
        with self._filled:
            self._closing = True
            self._filled.notify()
        self._thread.join()

    def announce(self, device: str, manifest: schemas.Manifest) -> None:
        """Respond to a manifest: with the update's earlier receipt, a new one, or a grant.

        Only the newest manifest of each device waits, so a device that sends many delays only itself.
        """
        with self._filled:
            is_waiting = device in self._manifests
            self._manifests[device] = manifest
        if not is_waiting:
            self._put(lambda: self._answer(device))

    def frame(self, device: str, payload: bytes) -> bool:
        """Handle a chunk frame that the broker delivered on a device's topic.

        Returns:
            False if it was dropped because it was not granted.
        """
        with self._filled:
            left = self._frames.get(device, 0)
            if not left or len(payload) > schemas.MAX_CHUNK_BYTES + FRAME_OVERHEAD_BYTES:
                self.dropped += 1
                return False
            self._frames[device] = left - 1
        self._put(lambda: self._feed(device, payload), len(payload))
        return True

    def announced(self, device: str) -> Future[schemas.ArtifactRef | None]:
        """The update of a device in transfer."""
        return self._ask(lambda: self._announced_ref(device))

    def chunk(self, device: str, chunk: Chunk) -> Future[None]:
        """Handle a chunk received over HTTPS.

        Returns:
            Done when the chunk is on disk. Otherwise CapacityError if too much is waiting, OrderError if no such update is in transfer,
            MalformedError or IntegrityError.
        """
        return self._ask(lambda: self._feed_chunk(device, chunk), len(chunk.data))

    def forget(self, device: str) -> None:
        """Drop the upload of a device that is no longer a member."""
        self._put(lambda: self._end(device))

    def end_attempt(self, attempt: schemas.RoundAttempt, outcome: schemas.Outcome, reason: str) -> None:
        """End the uploads of an attempt that accepts no more updates, and delete files left by earlier processes."""
        self._put(lambda: self._end_all(attempt, outcome, reason))

    def tick(self) -> None:
        """Repeat grants of stalled uploads."""
        self._put(self._tick)

    def is_busy(self, device: str) -> bool:
        """Whether an update of a device is in transfer."""
        return self._uploads.manifest(device) is not None

    def last_seen_at(self, device: str) -> float:
        """When a device's last valid chunk arrived, in monotonic seconds."""
        return self._last_seen.get(device, float("-inf"))

    def _ask(self, work: Callable[[], ResultT], size: int = 0) -> Future[ResultT]:
        answer: Future[ResultT] = Future()

        def answered() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)
                if not isinstance(error, WireError):
                    raise

        if not self._put(answered, size):
            answer.set_exception(CapacityError("too many updates at the same time; try again later"))
        return answer

    def _put(self, work: _Work, size: int = 0) -> bool:
        with self._filled:
            if size and self._bytes + size > MAX_BYTES:
                self.dropped += 1
                return False
            self._work.append((work, size))
            self._bytes += size
            self._filled.notify()
            return True

    # On the receiver's thread

    def _run(self) -> None:
        try:
            while True:
                with self._filled:
                    self._filled.wait_for(lambda: self._work or self._closing)
                    if self._closing:
                        return
                    work, size = self._work.popleft()
                    self._bytes -= size
                work()
        except Exception as error:  # noqa: BLE001 - the run loop of a thread: the service ends with it
            self.notify(Broken(error))
        finally:
            self._uploads.close()

    def _guarded(self, device: str, manifest: schemas.Manifest, work: _Work) -> None:
        """Limit an unexpected error to its update, so that others continue. Errors of the coordinator's disk, database and artifact store are raised."""
        try:
            work()
        except (WireError, OSError, SQLAlchemyError, StoreError):
            raise
        except Exception as error:  # it would happen again after a restart, so the update is rejected
            where = f"the update of {device} to round {manifest.round}, attempt {manifest.attempt}"
            log.exception("%s was rejected: its check failed", where)
            self.refusals.note("unforeseen", error, device)
            reason = f"its check failed with {type(error).__name__}; see the coordinator's log"
            self._end_with(self.checks.rejected(device, manifest, self.checks.clock(), reason), manifest)
            raise OrderError(f"the update of {device} was rejected after an unexpected error") from error

    def _answer(self, device: str) -> None:
        with self._filled:
            manifest = self._manifests.pop(device)
        try:
            self._guarded(device, manifest, lambda: self._announced(device, manifest))
            self.without_room.pop(device, None)
        except WireError as error:
            if isinstance(error, CapacityError):
                self.without_room[device] = str(error)
            log.warning("the update of %s must be announced again: %s", device, error)

    def _announced(self, device: str, manifest: schemas.Manifest) -> None:
        earlier = self.checks.ended(device, manifest)
        if earlier is not None:
            self._repeat(device, manifest, earlier)
            return
        end = self.checks.end_without_check(device, manifest)
        if end is not None:
            self._finish(device, manifest, *end)
            return
        now = self.checks.clock()
        if (reason := self.checks.why_too_large(manifest)) is not None:
            self._end_with(self.checks.rejected(device, manifest, now, reason), manifest)
            return
        carrier = self.publisher.carrier(device)
        self._follow(self._uploads.begin(device, manifest, time.monotonic(), now, carrier))

    def _feed(self, device: str, payload: bytes) -> None:
        try:
            self._take(device, read_frame(payload))
        except WireError as error:
            self._refuse(device, error)

    def _feed_chunk(self, device: str, chunk: Chunk) -> None:
        ref = self._announced_ref(device)
        try:
            if ref is None or ref.id != chunk.artifact:
                raise OrderError(f"no update {chunk.artifact} of {device} is in transfer")
            self._take(device, chunk)
        except WireError as error:
            self._refuse(device, error)
            raise

    def _announced_ref(self, device: str) -> schemas.ArtifactRef | None:
        manifest = self._uploads.manifest(device)
        return None if manifest is None else manifest.artifact

    def _refuse(self, device: str, error: WireError) -> None:
        self.refusals.note(f"a chunk of {device}", error, device)

    def _take(self, device: str, chunk: Chunk) -> None:
        now, manifest = time.monotonic(), self._uploads.manifest(device)
        if manifest is None:
            self.dropped += 1
            return
        self._guarded(device, manifest, lambda: self._follow(self._uploads.feed(device, chunk, now)))
        self._last_seen[device] = now
        for grant in self._uploads.held_back(now):
            self._follow(grant)

    def _tick(self) -> None:
        now = time.monotonic()
        for grant in list(self._uploads.stalled(now)):
            self._follow(grant)
        if now - self._collected_at >= COLLECT_S:
            self._collected_at = now
            self._partials.collect()

    def _follow(self, event: Grant | Received | None) -> None:
        if isinstance(event, Received):
            self._end_with(self.checks.check(event), event.manifest, event)
        elif event is not None:
            if event.is_queued:
                self._admit(event)
            self.publisher.need(event.device, event.manifest, event.ranges)

    def _admit(self, grant: Grant) -> None:
        """Accept the granted frames; they may arrive as soon as the grant is published."""
        with self._filled:
            frames = self._frames.get(grant.device, SPARE_FRAMES) + sum(count for _, count in grant.ranges)
            self._frames[grant.device] = min(frames, MAX_FRAMES)

    # How an update ends

    def _end_with(self, record: UpdateRecord, manifest: schemas.Manifest, received: Received | None = None) -> None:
        """Commit an update's outcome, send its receipt, and notify the round engine."""
        device, stored = record.client, self.checks.store_end(record)
        if stored is None:
            self._finish(device, manifest, *self.checks.why_late(manifest))
        elif stored is not record:
            self._repeat(device, manifest, stored)
        elif received is None or record.outcome is not schemas.Outcome.ACCEPTED:
            self._finish(device, manifest, record.outcome, record.reason)
            self.notify(UpdateRefused(record.round, record.attempt, device, record.reason))
        else:
            self._end(device)
            self.events.write(
                "update_stored",
                client=device,
                **vars(record.at),
                artifact=record.artifact,
                size=record.size,
                seconds=round(record.stored_at - record.manifest_at, 4),
                **received.counts,
            )
            self._receipt(device, manifest, record.outcome, "")
            self.notify(UpdateStored(record.round, record.attempt, device, record.artifact))

    def _repeat(self, device: str, manifest: schemas.Manifest, earlier: UpdateRecord) -> None:
        """Respond to a manifest of a device whose update to this attempt has already ended."""
        if earlier.artifact == manifest.artifact.id:
            self._end(device)
            self._receipt(device, manifest, earlier.outcome, earlier.reason)
        else:
            self._finish(device, manifest, *self.checks.why_second(earlier))

    def _finish(self, device: str, manifest: schemas.Manifest, outcome: schemas.Outcome, reason: str) -> None:
        """Drop an upload that is not merged, and send its receipt."""
        self._end(device)
        self.events.write("update_refused", client=device, **vars(manifest.at), outcome=outcome.value, reason=reason)
        self._receipt(device, manifest, outcome, reason)

    def _receipt(self, device: str, manifest: schemas.Manifest, outcome: schemas.Outcome, reason: str) -> None:
        self.publisher.receipt(device, manifest.at, manifest.artifact.id, outcome, reason)

    def _end(self, device: str) -> None:
        self.without_room.pop(device, None)
        with self._filled:
            self._frames.pop(device, None)
        self._uploads.end(device)

    def _end_all(self, attempt: schemas.RoundAttempt, outcome: schemas.Outcome, reason: str) -> None:
        ended = self._uploads.end_attempt(attempt)
        self.without_room.clear()
        with self._filled:
            for device in ended:
                self._frames.pop(device, None)
        for device, manifest in ended.items():
            self._receipt(device, manifest, outcome, reason)
