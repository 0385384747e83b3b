"""Transfers of a device's artifacts over the configured carrier: uploads of updates, downloads of specs and aggregates.

`MqttCarrier` sends chunks that the receiver has granted. `HttpsCarrier` is in `https_client`. Downloaded chunks are written to disk as they
arrive. Missing chunks are requested, and silence is detected. Chunks received before a crash are reused
(`fedcg.wire.transfer.partial_files`). A full or failing disk pauses a download.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_client.link.https_client import HttpsCarrier
from edge_client.session.signals import ArtifactStored, Event, SessionLost, Wanted
from edge_client.session.state import SILENCE_S, SessionState
from edge_client.store.private_store import PrivateStore
from fedcg.event_log import EventLog
from fedcg.values import Value
from fedcg.wire.errors import IntegrityError, Refusals, TooLargeError
from fedcg.wire.messages.schemas import MAX_ARTIFACT_BYTES, ArtifactRef
from fedcg.wire.transfer.chunk_sender import ChunkFile, ChunkSender
from fedcg.wire.transfer.chunks import Chunk
from fedcg.wire.transfer.partial_files import DurableReceiver, Partials
from fedcg.wire.transfer.windows import Ranges, Window
from fedcg.wire.transport.transport import Transport

MAX_SPEC_BYTES = 8 * 1024 * 1024
DISK_PATIENCE_S = 5.0  # after the disk failed
SLOWNESS = 3.0  # a link counts as silent when a pause is this many times longer than the longest so far


class Downloaded(Value):
    """A complete, verified artifact, with statistics. Call `kept` or `failed` afterwards.

    Attributes:
        file: its path until it is moved to the store.
        counts: chunk counts from `DurableReceiver.counts`.
    """

    wanted: Wanted
    file: Path
    seconds: float
    counts: Mapping[str, int]


@dataclass
class _Download:
    wanted: Wanted
    started_at: float
    moved_at: float
    receiver: DurableReceiver | None = None
    asked_at: float | None = None
    not_before: float = float("-inf")
    slowest_s: float = 0.0  # the longest pause between two new chunks so far


class Downloads:
    """The receivers of all wanted artifacts.

    Args:
        partials: the folder of partly received artifacts.
        window: bounds the data in transit per download.
        max_bytes: size limit of an artifact.
    """

    def __init__(self, partials: Partials, window: Window | None = None, max_bytes: int = MAX_ARTIFACT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._partials = partials
        self._window = window
        self._active: dict[str, _Download] = {}

    @property
    def are_pending(self) -> bool:
        """Whether anything is wanted."""
        return bool(self._active)

    def want(self, downloads: tuple[Wanted, ...], now: float) -> None:
        """Replace the wanted downloads. Chunks that were already received are kept.

        Raises:
            TooLargeError: a spec or aggregate exceeds its size limit; nothing is fetched.
        """
        for wanted in downloads:
            if wanted.what == "spec" and wanted.ref.size > MAX_SPEC_BYTES:
                raise TooLargeError(f"a spec of {wanted.ref.size} bytes exceeds the limit of {MAX_SPEC_BYTES}")
            if wanted.ref.size > self._max_bytes:
                raise TooLargeError(
                    f"an aggregate of {wanted.ref.size} bytes; policy.max_download_mb of this device is "
                    f"{self._max_bytes // 1_000_000}"
                )
        before, self._active = self._active, {}
        for wanted in downloads:
            known = before.get(wanted.ref.id)
            if known is None or known.wanted.ref != wanted.ref:
                known = _Download(wanted, now, now)
            else:
                del before[wanted.ref.id]
            known.wanted = wanted
            self._active[wanted.ref.id] = known
        for artifact, download in before.items():
            self._close(download)
            if artifact not in self._active:
                self._partials.discard(artifact)

    def feed(self, chunk: Chunk, now: float) -> None:
        """Store a received chunk.

        Raises:
            MalformedError: the artifact can't have this chunk.
            OSError: the disk can't store it; the download pauses.
        """
        download = self._active.get(chunk.artifact)
        receiver = None if download is None else self._receiver(download, now)
        if download is None or receiver is None:
            return
        try:
            is_new = receiver.feed(chunk, now)
        except OSError:
            download.not_before = now + DISK_PATIENCE_S
            raise
        if is_new:
            if download.asked_at is not None:
                download.slowest_s = max(download.slowest_s, now - max(download.asked_at, download.moved_at))
            download.moved_at = now

    def completed(self, now: float) -> Downloaded | None:
        """An artifact whose last chunk has arrived, or None.

        Raises:
            IntegrityError: the chunks don't match the artifact's digest; it is fetched again.
            OSError: the disk failed; retried later.
        """
        for download in self._active.values():
            receiver = download.receiver
            if receiver is None or not receiver.complete or now < download.not_before:
                continue
            try:
                file = receiver.finish()
            except IntegrityError:
                download.asked_at = None
                raise
            except OSError:
                download.not_before = now + DISK_PATIENCE_S
                raise
            return Downloaded(download.wanted, file, now - download.started_at, receiver.counts)
        return None

    def kept(self, artifact: str) -> None:
        """A completed download was moved to the store."""
        del self._active[artifact]
        self._partials.discard(artifact)

    def failed(self, artifact: str, now: float) -> None:
        """A completed download could not be moved to the store. Retry later."""
        download = self._active[artifact]
        download.receiver = None
        download.not_before = now + DISK_PATIENCE_S

    def needs(self, now: float) -> Iterator[tuple[ArtifactRef, Ranges]]:
        """The next requests to the coordinator: artifacts and chunk ranges.

        Raises:
            OSError: the disk failed; the download pauses.
        """
        for download in self._active.values():
            patience = download.wanted.ask_after_s
            if patience is None or (download.asked_at is None and now - download.moved_at < patience):
                continue
            receiver = self._receiver(download, now)
            ranges = None if receiver is None else receiver.next_need(now)
            if ranges is not None:
                download.asked_at = now if download.asked_at is None else download.asked_at
                yield download.wanted.ref, ranges

    def is_silent(self, now: float) -> bool:
        """Whether a requested download has made no progress for a while. Restarts the measurement if so."""
        silent = [
            download
            for download in self._active.values()
            if download.asked_at is not None
            and now - max(download.asked_at, download.moved_at) >= max(SILENCE_S, SLOWNESS * download.slowest_s)
        ]
        for download in silent:
            download.asked_at = now
        return bool(silent)

    def close(self) -> None:
        """Close all files. Received chunks stay on disk."""
        for download in self._active.values():
            self._close(download)

    def _receiver(self, download: _Download, now: float) -> DurableReceiver | None:
        """The receiver of a download, opened on first use; None during the pause after a disk error."""
        if now < download.not_before:
            return None
        if download.receiver is None:
            try:
                download.receiver = self._partials.open(download.wanted.ref, self._window)
            except OSError:
                download.not_before = now + DISK_PATIENCE_S
                raise
        return download.receiver

    def _close(self, download: _Download) -> None:
        if download.receiver is not None:
            download.receiver.close()
            download.receiver = None
        self._partials.release(download.wanted.ref.id)


class MqttCarrier:
    """Transfers chunks over MQTT. Every method except `close` returns quickly. The transport delivers received chunks.

    Args:
        transport: the connection to the broker.
        topic: topic for this device's chunks.
        ask: sends the coordinator a `need` message for chunks of an artifact.
    """

    is_answered_in_session = True
    """Whether silence can mean that the coordinator has lost the session."""

    def __init__(self, transport: Transport, topic: str, ask: Callable[[ArtifactRef, Ranges], None]) -> None:
        self._topic = topic
        self._sender = ChunkSender(transport, "chunks")
        self.fetch = ask

    def start(self) -> None:
        """Start sending."""
        self._sender.start()

    def close(self) -> None:
        """Stop sending."""
        self._sender.close()

    def send(self, update: ChunkFile, ranges: Ranges) -> None:
        """Send granted chunks of the update at the link's speed."""
        self._sender.serve(self._topic, update, ranges)

    @property
    def is_sending(self) -> bool:
        """Whether granted chunks are still waiting to be sent."""
        return self._sender.is_busy

    def end(self, artifact: str) -> int:
        """Stop sending an update. Returns how many of its chunks were sent."""
        sent = self._sender.sent[artifact]
        self._sender.forget(artifact)
        return sent


ArtifactCarrier = MqttCarrier | HttpsCarrier
"""How chunks are transferred."""


@dataclass(eq=False)
class ArtifactTransfer:
    """Transfers the artifacts of one device.

    Args:
        store: its private store.
        carrier: sends the update's chunks and requests chunks of downloads.
        downloads: the current downloads.
        refusals: counts invalid specs.
        events: the event log.
    """

    store: PrivateStore
    carrier: ArtifactCarrier
    downloads: Downloads
    refusals: Refusals
    events: EventLog

    def start(self) -> None:
        """Start the carrier, and delete files of expired transfers."""
        self.store.partials.collect()
        self.carrier.start()

    def keep_completed(self, state: SessionState, now: float) -> Event | None:
        """Move a completed download to the store, if there is one.

        Raises:
            IntegrityError: its chunks don't match the artifact's digest; it is fetched again.
            OSError: the disk failed or is full; retried later.
        """
        download = self.downloads.completed(now)
        return None if download is None else self._keep(download, state, now)

    def ask(self, now: float) -> Event | None:
        """Request missing chunks. Returns an event if none arrive.

        Raises:
            WireError: the request can't be sent.
            OSError: the disk failed; the download pauses.
        """
        for ref, ranges in list(self.downloads.needs(now)):
            self.carrier.fetch(ref, ranges)
        is_silent = self.carrier.is_answered_in_session and self.downloads.is_silent(now)
        return SessionLost() if is_silent else None

    def _keep(self, download: Downloaded, state: SessionState, now: float) -> Event:
        what, ref = download.wanted.what, download.wanted.ref
        try:
            if what == "spec":
                self.store.save_spec(download.file.read_bytes())
            else:
                self.store.artifacts.adopt(download.file, ref.id)
        except ValueError as error:  # not a spec: the following check refuses it
            self.refusals.note("spec", error)
        except OSError:
            self.downloads.failed(ref.id, now)  # e.g. a full disk: retried later
            raise
        self.downloads.kept(ref.id)
        self.events.write(
            "artifact_stored",
            artifact=ref.id,
            what=what,
            bytes=ref.size,
            **download.counts,
            seconds=round(download.seconds, 3),
            round=0 if state.offer is None else state.offer.round,
            final=state.finished is not None,
        )
        return ArtifactStored(ref.id)
