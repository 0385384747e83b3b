"""Transfers of a device's artifacts: the update up, spec and aggregates down, over the configured carrier.

`MqttCarrier` carries chunks that the receiving side has granted; `HttpsCarrier` is in `https_client`. Chunks of downloads go to disk as they
arrive, missing ones are asked for, and silence is noticed. Chunks that a killed agent had received are found again
(`fedcg.wire.transfer.partial_files`). A disk that is full or broken pauses a download.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_client.link.https_client import HttpsCarrier
from edge_client.session.signals import ArtifactStored, Event, SessionLost, Wanted
from edge_client.session.state import SILENCE_S, SessionState
from edge_client.store.private_store import PrivateStore
from fedcg.event_log import EventLog
from fedcg.wire.errors import IntegrityError, Refusals, TooLargeError
from fedcg.wire.messages.schemas import MAX_ARTIFACT_BYTES, ArtifactRef
from fedcg.wire.transfer.chunk_sender import ChunkFile, ChunkSender
from fedcg.wire.transfer.chunks import Chunk
from fedcg.wire.transfer.partial_files import DurableReceiver, Partials
from fedcg.wire.transfer.windows import Ranges, Window
from fedcg.wire.transport.transport import Transport

MAX_SPEC_BYTES = 8 * 1024 * 1024
DISK_PATIENCE_S = 5.0  # after the disk failed
SLOWNESS = 3.0  # a link is silent when it pauses so many times longer than it did before


@dataclass(frozen=True)
class Downloaded:
    """A complete, verified artifact, and how it came; `kept` or `failed` must follow.

    Attributes:
        file: where it lies until it is taken over.
        counts: its chunks, as of `DurableReceiver.counts`.
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
    """The receivers of everything that is wanted now.

    Args:
        partials: where half-received artifacts lie.
        window: what one download may have under way.
        max_bytes: of the largest artifact.
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
        """Replace the wanted downloads by these; chunks of them that were received already are kept.

        Raises:
            TooLargeError: a spec larger than any real one, or an aggregate above the bound; nothing is fetched.
        """
        for wanted in downloads:
            if wanted.what == "spec" and wanted.ref.size > MAX_SPEC_BYTES:
                raise TooLargeError(f"a spec of {wanted.ref.size} bytes is over the bound of {MAX_SPEC_BYTES}")
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
        """Take a chunk.

        Raises:
            MalformedError: a chunk that its artifact can't have.
            OSError: the disk does not take it; the download pauses.
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
        """An artifact whose last chunk has come.

        Raises:
            IntegrityError: the chunks don't add up to the artifact, which is fetched again.
            OSError: the disk failed; tried again later.
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
        """A completed download was taken over."""
        del self._active[artifact]
        self._partials.discard(artifact)

    def failed(self, artifact: str, now: float) -> None:
        """A completed download could not be taken over: tried again later."""
        download = self._active[artifact]
        download.receiver = None
        download.not_before = now + DISK_PATIENCE_S

    def needs(self, now: float) -> Iterator[tuple[ArtifactRef, Ranges]]:
        """The next request to the coordinator: artifact and chunk ranges.

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
        """Whether a requested download has not moved for a while; the time is measured anew afterwards."""
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
        """Close all files; received chunks stay on disk."""
        for download in self._active.values():
            self._close(download)

    def _receiver(self, download: _Download, now: float) -> DurableReceiver | None:
        """The files of a download, opened at their first use; None while the disk is paused after an error."""
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
    """Moves chunks; every call but `close` returns soon. Chunks that come are delivered by the transport.

    Args:
        transport: the connection to the broker.
        topic: of this device's chunks.
        ask: sends the coordinator a `need` for chunks of an artifact.
    """

    is_answered_in_session = True
    """Whether silence may mean that the coordinator has forgotten the session."""

    def __init__(self, transport: Transport, topic: str, ask: Callable[[ArtifactRef, Ranges], None]) -> None:
        self._topic = topic
        self._sender = ChunkSender(transport, "chunks")
        self.fetch = ask

    def start(self) -> None:
        """Begin to send."""
        self._sender.start()

    def close(self) -> None:
        """Stop sending."""
        self._sender.close()

    def send(self, update: ChunkFile, ranges: Ranges) -> None:
        """Send granted chunks of the update, as the link takes them."""
        self._sender.serve(self._topic, update, ranges)

    @property
    def is_sending(self) -> bool:
        """Whether granted chunks still wait for the link."""
        return self._sender.is_busy

    def end(self, artifact: str) -> int:
        """Send nothing more of an update; returns how many chunks of it were sent."""
        sent = self._sender.sent[artifact]
        self._sender.forget(artifact)
        return sent


ArtifactCarrier = MqttCarrier | HttpsCarrier
"""How chunks travel."""


class ArtifactTransfer:
    """Moves the artifacts of one device.

    Args:
        store: its private store.
        carrier: moves chunks.
        window: what one download may have under way; None for no bound.
        max_bytes: of the largest artifact that is fetched.
        refusals: counts specs that are none.
        events: the event log.

    Attributes:
        carrier: moves the chunks of the update, and asks for those of downloads.
        downloads: what is being fetched.
    """

    def __init__(
        self,
        store: PrivateStore,
        carrier: ArtifactCarrier,
        window: Window | None,
        max_bytes: int,
        refusals: Refusals,
        events: EventLog,
    ) -> None:
        self._store = store
        self.carrier = carrier
        self.downloads = Downloads(store.partials, window, max_bytes)
        self._refusals = refusals
        self._events = events

    def start(self) -> None:
        """Begin to carry; files of expired transfers are deleted."""
        self._store.partials.collect()
        self.carrier.start()

    def keep_completed(self, state: SessionState, now: float) -> Event | None:
        """Take over a download that has become complete.

        Raises:
            IntegrityError: its chunks don't add up to the artifact, which is fetched again.
            OSError: the disk failed, or is full; tried again later.
        """
        download = self.downloads.completed(now)
        return None if download is None else self._keep(download, state, now)

    def ask(self, now: float) -> Event | None:
        """Ask for missing chunks; returns an event when none of them comes.

        Raises:
            WireError: a chunk can't be asked for.
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
                self._store.save_spec(download.file.read_bytes())
            else:
                self._store.artifacts.adopt(download.file, ref.id)
        except ValueError as error:  # not a spec: the check that follows refuses it
            self._refusals.note("spec", error)
        except OSError:
            self.downloads.failed(ref.id, now)  # a full disk: tried again when there is room
            raise
        self.downloads.kept(ref.id)
        self._events.write(
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
