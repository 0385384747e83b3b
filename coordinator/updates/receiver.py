"""The thread that takes updates in: hashing and disk stay off the event loop, which only hears what follows.

Chunk frames come straight from the transport, and only as many as their device was granted get in; everything else comes from
the event loop. Bounded in bytes: what does not fit is dropped and counted, and asked for again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from coordinator.updates.upload_windows import Grant, Received, Uploads
from fedcg.refusal_counter import Refusals
from fedcg.wire.errors import CapacityError, OrderError, WireError
from fedcg.wire.messages.messages import MAX_CHUNK_BYTES, ArtifactRef, Carrier, Manifest
from fedcg.wire.transfer.chunks import FRAME_OVERHEAD_BYTES, Chunk, read_frame

MAX_BYTES = 64 * 1024 * 1024
SPARE_FRAMES = 32  # of an update beyond its grants: what was not acknowledged when a link broke comes twice
MAX_FRAMES = 512  # granted to one device and not received; those of grants that stalled count until then
COLLECT_S = 3600.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Broken:
    """Something failed that is no device's, the disk for example: the coordinator must not go on as if nothing had happened."""

    error: BaseException


@dataclass(frozen=True)
class GivenUp:
    """Something that nobody foresaw happened under one update, which is not complete."""

    received: Received
    error: Exception


IntakeEvent = Grant | Received | GivenUp | Broken
_Work = Callable[[], None]
ResultT = TypeVar("ResultT")


class Intake:
    """Owns the uploads; every call returns at once.

    Args:
        uploads: the receivers.
        collect: deletes what has expired from disk; called now and then.
        notify: gets what follows, on the intake's thread.
        refusals: counts and tells frames that were no chunk of the upload.
        monotonic: seconds.

    Attributes:
        dropped: frames that did not fit or belonged to no upload.
    """

    def __init__(
        self,
        uploads: Uploads,
        collect: Callable[[], None],
        notify: Callable[[IntakeEvent], None],
        refusals: Refusals,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropped = 0
        self._refusals = refusals
        self._uploads = uploads
        self._collect = collect
        self._notify = notify
        self._monotonic = monotonic
        self._work: deque[tuple[_Work, int]] = deque()
        self._bytes = 0
        self._filled = threading.Condition()
        self._closing = False
        self._heard: dict[str, float] = {}
        self._frames: dict[str, int] = {}  # that each device may send now
        self._thread: threading.Thread | None = None
        self._collected_at = float("-inf")

    def start(self) -> None:
        """Begin to work."""
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop soon; what came stays on disk."""
        with self._filled:
            self._closing = True
            self._filled.notify()
        if self._thread is not None:
            self._thread.join()

    def expect(self, device: str, devices: int) -> int:
        """Let the first chunks of a device's next update come with its manifest.

        Args:
            device: whose.
            devices: how many such devices there are.

        Returns:
            How many chunks; 0 when so many devices would overfill what all of them share.
        """
        chunks = self._uploads.first_chunks(devices)
        if chunks:
            self._allow(device, chunks)
            self._put(lambda: self._uploads.expect(device))
        return chunks

    def begin(self, device: str, manifest: Manifest, manifest_at: float, carrier: Carrier = Carrier.MQTT) -> None:
        """Let an announced update come; `manifest_at` is unix time."""
        self._put(lambda: self._begin(device, manifest, manifest_at, carrier))

    def frame(self, device: str, payload: bytes) -> bool:
        """Take a chunk frame as the broker delivered it on a device's topic. From any thread.

        Returns:
            False when it was dropped unseen, since it was not granted.
        """
        with self._filled:
            left = self._frames.get(device, 0)
            if not left or len(payload) > MAX_CHUNK_BYTES + FRAME_OVERHEAD_BYTES:
                self.dropped += 1
                return False
            self._frames[device] = left - 1
        self._put(lambda: self._feed(device, payload), len(payload))
        return True

    def announced(self, device: str) -> Future[ArtifactRef | None]:
        """Which update of a device is under way. From any thread."""
        return self._ask(lambda: self._uploads.announced(device))

    def chunk(self, device: str, chunk: Chunk) -> Future[None]:
        """Take a chunk that came over HTTPS. From any thread.

        Returns:
            Done when it is on disk; else CapacityError when too much is waiting already, or the error that makes it useless:
            OrderError when no such update is under way, MalformedError, IntegrityError.
        """
        return self._ask(lambda: self._feed_chunk(device, chunk), len(chunk.data))

    def end(self, device: str) -> None:
        """Forget a device's upload."""
        self._frames.pop(device, None)
        self._put(lambda: self._uploads.end(device))

    def clear(self) -> None:
        """Forget all uploads, and what earlier processes left."""
        self._frames.clear()
        self._put(self._uploads.clear)

    def tick(self) -> None:
        """Look after what stalled."""
        self._put(self._tick)

    def heard_at(self, device: str) -> float:
        """When a valid chunk of a device came last, in monotonic seconds."""
        return self._heard.get(device, float("-inf"))

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
            answer.set_exception(CapacityError("too many updates come at once; try again later"))
        return answer

    def _allow(self, device: str, frames: int) -> None:
        with self._filled:
            self._frames[device] = min(self._frames.get(device, SPARE_FRAMES) + frames, MAX_FRAMES)

    def _tell(self, event: Grant | Received) -> None:
        """On the intake's thread; what a grant allows may come as soon as it is told."""
        if isinstance(event, Grant):
            self._allow(event.device, sum(count for _, count in event.ranges))
        self._notify(event)

    def _put(self, work: _Work, size: int = 0) -> bool:
        with self._filled:
            if size and self._bytes + size > MAX_BYTES:
                self.dropped += 1
                return False
            self._work.append((work, size))
            self._bytes += size
            if len(self._work) == 1:
                self._filled.notify()
            return True

    def _run(self) -> None:
        try:
            while True:
                with self._filled:
                    while not self._work and not self._closing:
                        self._filled.wait()
                    if self._closing:
                        return
                    work, size = self._work.popleft()
                    self._bytes -= size
                work()
        except Exception as error:  # noqa: BLE001 - the run loop of a thread: told to the service, which ends with it
            self._notify(Broken(error))
        finally:
            self._uploads.close()

    def _begin(self, device: str, manifest: Manifest, manifest_at: float, carrier: Carrier) -> None:
        early = self._uploads.early(device)
        try:
            follows = self._uploads.begin(device, manifest, self._monotonic(), manifest_at, carrier)
        except WireError as error:
            log.warning("the update of %s has to be announced again: %s", device, error)
            return
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever is wrong with this update, the others go on
            self._notify(GivenUp(Received(device, manifest, manifest_at), error))
            return
        if follows is not None:
            self._tell(follows)
        for frame in early:
            self._feed(device, frame)

    def _feed(self, device: str, payload: bytes) -> None:
        if self._uploads.announced(device) is None:
            self.dropped += not self._uploads.keep_early(device, payload)
            return
        try:
            self._take(device, read_frame(payload))
        except WireError as error:
            self._refuse(device, error)

    def _feed_chunk(self, device: str, chunk: Chunk) -> None:
        ref = self._uploads.announced(device)
        try:
            if ref is None or ref.id != chunk.artifact:
                raise OrderError(f"no update {chunk.artifact} of {device} is under way")
            self._take(device, chunk)
        except WireError as error:
            self._refuse(device, error)
            raise

    def _refuse(self, device: str, error: WireError) -> None:
        if self._refusals.note(f"a chunk of {device}", error, device):
            log.warning("chunk of %s refused: %s", device, error)

    def _take(self, device: str, chunk: Chunk) -> None:
        now = self._monotonic()
        try:
            follows = self._uploads.feed(device, chunk, now)
        except (WireError, OSError):
            raise
        except Exception as error:  # whatever is wrong with this update, the others go on
            self._notify(GivenUp(self._uploads.give_up(device), error))
            raise OrderError(f"the update of {device} was given up") from error
        self._heard[device] = now
        if follows is not None:
            self._tell(follows)
        for grant in self._uploads.held_back(now):
            self._tell(grant)

    def _tick(self) -> None:
        now = self._monotonic()
        for grant in self._uploads.stalled(now):
            self._tell(grant)
        if now - self._collected_at >= COLLECT_S:
            self._collected_at = now
            self._collect()
