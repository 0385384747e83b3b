"""Sends granted chunks at the pace of the link. Each chunk is read from disk just before it is sent, so memory use stays constant.

One thread per sender, fair between receivers. It keeps no state that a restart could lose: the receiver grants a chunk again if it was
not sent. A chunk that still waits for the link is not sent twice, however often it is granted.
"""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fedcg.files import file_sha256
from fedcg.wire.errors import IntegrityError, TransportError
from fedcg.wire.messages.schemas import ArtifactRef
from fedcg.wire.transfer.chunks import chunk_check, chunk_frame, chunk_length
from fedcg.wire.transfer.windows import Ranges
from fedcg.wire.transport.transport import Publication, Transport

HIGH_WATER_BYTES = 2_000_000  # the most that may wait for the link; at 300 MB/s enough for two pauses
HIGH_WATER_MESSAGES = 200  # for small chunks; control messages need space in the transport's queue
PAUSE_S = 0.003
REFUSED_S = 0.05
MAX_GRANTED = 256  # chunks of one receiver, which can request more later
SPARE_PUBLICATIONS = 16  # clean up at twice the publications in progress at the last clean-up, plus these
BURST_CHUNKS = 16
_LOG = logging.getLogger(__name__)


def file_ref(path: Path, chunk_bytes: int) -> ArtifactRef:
    """The reference that announces the artifact in a file; reads it in pieces.

    Raises:
        OSError: it can't be read.
    """
    return ArtifactRef(id=file_sha256(path), size=path.stat().st_size, chunk_bytes=chunk_bytes)


class ChunkFile:
    """An artifact on disk as a source of chunk frames. It is opened for the first frame; after that its name may be deleted."""

    def __init__(self, path: Path, ref: ArtifactRef) -> None:
        self.path = path
        self.ref = ref
        self._checks: dict[int, bytes] = {}
        self._file = -1

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def frame(self, index: int) -> bytes:
        """The frame of one chunk; raises as `data` does."""
        data = self.data(index)
        check = self._checks.get(index)
        if check is None:
            check = self._checks[index] = chunk_check(self.ref.id, index, data)
        return chunk_frame(self.ref.id, index, data, check)

    def data(self, index: int) -> bytes:
        """The bytes of one chunk.

        Raises:
            OSError: the file is gone or can't be read.
            IntegrityError: it has become shorter.
        """
        if self._file < 0:
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        length = chunk_length(self.ref, index)
        data = os.pread(self._file, length, index * self.ref.chunk_bytes)
        if len(data) != length:
            raise IntegrityError(f"{self.path} has become shorter than the artifact that it holds")
        return data


@dataclass
class _Job:
    topic: str
    source: ChunkFile
    waiting: deque[int] = field(default_factory=deque)
    listed: set[int] = field(default_factory=set)

    def add(self, ranges: Ranges, is_under_way: Callable[[int], bool]) -> None:
        """Queue granted chunks. A grant comes from the other side, so indices after the last chunk are ignored."""
        for first, count in ranges:
            for index in range(first, min(first + count, self.source.ref.chunks)):
                if len(self.waiting) >= MAX_GRANTED:
                    return
                if index not in self.listed and not is_under_way(index):
                    self.waiting.append(index)
                    self.listed.add(index)


@dataclass
class _Broadcast:
    topic: str
    source: ChunkFile
    is_current: Callable[[], bool]
    bytes_per_s: float
    burst: int
    next: int = 0
    ready_at: float = 0.0


class ChunkSender:
    """Publishes chunks for one transport.

    Args:
        transport: the link.
        name: of the thread.
        clock: monotonic seconds.

    Attributes:
        sent: chunks published so far, per artifact.
    """

    def __init__(self, transport: Transport, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.sent: Counter[str] = Counter()
        self._transport = transport
        self._name = name
        self._clock = clock
        self._jobs: dict[tuple[str, str], _Job] = {}  # jobs with waiting chunks; each has a turn
        self._under_way: dict[tuple[str, str, int], Publication] = {}
        self._look_at = SPARE_PUBLICATIONS
        self._turns: deque[tuple[str, str]] = deque()
        self._broadcasts: deque[_Broadcast] = deque()
        self._filled = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to send."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop at once; granted chunks that are not published are dropped."""
        with self._filled:
            self._closing = True
            self._filled.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def is_busy(self) -> bool:
        """Whether chunks wait to be published, or are published and wait for the link."""
        with self._filled:
            return bool(self._turns) or any(sent.is_under_way for sent in self._under_way.values())

    def serve(self, topic: str, source: ChunkFile, ranges: Ranges) -> None:
        """Send these chunks on a topic (QoS 1), after earlier grants there."""
        key = (topic, source.ref.id)
        with self._filled:
            known = self._jobs.get(key)
            job = known if known is not None and known.source.ref == source.ref else _Job(topic, source)
            job.add(ranges, lambda index: self._is_under_way((*key, index)))
            if job.waiting:
                self._jobs[key] = job
                if known is None:
                    self._turns.append(key)
                self._filled.notify()

    def broadcast(
        self,
        topic: str,
        source: ChunkFile,
        is_current: Callable[[], bool],
        bytes_per_s: float,
        burst: int = BURST_CHUNKS,
    ) -> None:
        """Send all chunks once, at most once each (QoS 0), while `is_current` is True.

        Args:
            topic: of the broadcast.
            source: the artifact.
            is_current: False ends the broadcast.
            bytes_per_s: its pace.
            burst: the most chunks sent at once; a subscriber's queue at the broker must hold them.
        """
        with self._filled:
            self._broadcasts.append(_Broadcast(topic, source, is_current, bytes_per_s, min(burst, BURST_CHUNKS)))
            self._filled.notify()

    def forget(self, artifact: str) -> None:
        """Stop sending an artifact, and reset its count."""
        with self._filled:
            self._jobs = {key: job for key, job in self._jobs.items() if key[1] != artifact}
            self._turns = deque(self._jobs)
            self._under_way = {key: sent for key, sent in self._under_way.items() if key[1] != artifact}
            self.sent.pop(artifact, None)

    def drop_waiting(self) -> None:
        """Drop granted chunks that are not published: the link is down, and receivers request them again."""
        with self._filled:
            self._jobs.clear()
            self._turns.clear()
            self._broadcasts.clear()

    def _run(self) -> None:
        while True:
            with self._filled:
                while not self._closing and not self._turns and not self._broadcasts:
                    self._filled.wait()
                if self._closing:
                    return
            try:
                pause_s = self._send_some()
            except Exception:  # noqa: BLE001 - the run loop of a thread; logged with its traceback
                _LOG.exception("%s failed to send a chunk; its receiver requests it again", self._name)
                pause_s = REFUSED_S
            if pause_s:
                with self._filled:
                    if not self._closing:
                        self._filled.wait(pause_s)

    def _send_some(self) -> float:
        """Send until the link has enough; returns how long to wait before the next call."""
        while True:
            backlog = self._transport.backlog
            if backlog.bytes >= HIGH_WATER_BYTES or backlog.messages >= HIGH_WATER_MESSAGES:
                return PAUSE_S
            with self._filled:
                if self._closing:
                    return 0.0
                broadcast = self._broadcasts[0] if self._broadcasts else None
            now = self._clock()
            if broadcast is not None and now >= broadcast.ready_at:
                if not self._burst(broadcast, now):
                    with self._filled:
                        if self._broadcasts and self._broadcasts[0] is broadcast:
                            self._broadcasts.popleft()
                continue
            taken = self._take()
            if taken is None:
                return 0.0 if broadcast is None else max(PAUSE_S, min(broadcast.ready_at - now, REFUSED_S))
            if not self._publish(*taken):
                return REFUSED_S

    def _take(self) -> tuple[_Job, int] | None:
        with self._filled:
            if not self._turns:
                return None
            key = self._turns.popleft()
            job = self._jobs[key]
            index = job.waiting.popleft()
            job.listed.discard(index)
            if job.waiting:
                self._turns.append(key)
            else:
                del self._jobs[key]
            return job, index

    def _publish(self, job: _Job, index: int) -> bool:
        try:
            frame = job.source.frame(index)
        except (OSError, IntegrityError) as error:
            _LOG.error("artifact %s can't be sent: %s", job.source.ref.id, error)
            self.forget(job.source.ref.id)
            return True
        try:
            publication = self._transport.publish(job.topic, frame)
        except TransportError as error:
            _LOG.info("not published on %s: %s", job.topic, error)
            self.drop_waiting()  # no link, or a full queue: a receiver that still needs the chunk requests it again
            return False
        with self._filled:
            self._remember((job.topic, job.source.ref.id, index), publication)
            self.sent[job.source.ref.id] += 1
        return True

    def _remember(self, key: tuple[str, str, int], publication: Publication) -> None:
        """Keep publications in progress and only a few finished ones: each holds its chunk's bytes."""
        self._under_way[key] = publication
        if len(self._under_way) >= self._look_at:
            self._under_way = {name: sent for name, sent in self._under_way.items() if sent.is_under_way}
            self._look_at = 2 * len(self._under_way) + SPARE_PUBLICATIONS

    def _is_under_way(self, key: tuple[str, str, int]) -> bool:
        known = self._under_way.get(key)
        return known is not None and known.is_under_way

    def _burst(self, broadcast: _Broadcast, now: float) -> bool:
        """Send the next chunks of a broadcast; False at its end."""
        sent = 0
        for index in range(broadcast.next, min(broadcast.next + broadcast.burst, broadcast.source.ref.chunks)):
            if not broadcast.is_current():
                return False
            try:
                frame = broadcast.source.frame(index)
                self._transport.publish(broadcast.topic, frame, qos=0)
            except (TransportError, OSError, IntegrityError) as error:
                _LOG.info("a broadcast ends early: %s", error)
                return False
            broadcast.next = index + 1
            sent += len(frame)
            if sent >= broadcast.bytes_per_s:  # a slow broadcast must not send bursts of several seconds
                break
        broadcast.ready_at = now + sent / broadcast.bytes_per_s
        return broadcast.next < broadcast.source.ref.chunks
