"""Transfers of a device's artifacts: the update up, spec and aggregates down, over the configured carrier.

Carries artifacts between this device and its coordinator over the broker, as chunks that the receiving side has granted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from edge_client.session.commands import Wanted
from edge_client.session.events import ArtifactStored, Event, SessionLost
from edge_client.session.state import SessionState
from edge_client.store.private_store import PrivateStore
from edge_client.transfer.downloads import Downloaded, Downloads
from fedcg.event_log import EventLog
from fedcg.wire.messages.schemas import ArtifactRef
from fedcg.wire.transfer.chunk_sender import ChunkFile, ChunkSender
from fedcg.wire.transfer.chunks import Chunk
from fedcg.wire.transfer.windows import Ranges, Window
from fedcg.wire.transport.transport import Transport


class MqttCarrier:
    """Moves chunks; every call but `close` returns soon. Chunks that come are delivered by the transport.

    Args:
        transport: the connection to the broker.
        topic: of this device's chunks.
        ask: sends the coordinator a `need` for chunks of an artifact.
    """

    is_answered_in_session = True

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


class Reporter(Protocol):
    """Reports refused messages and errors of the disk."""

    def recording_errors(self, refused: str) -> AbstractContextManager[None]:
        """Record an error that ends the context."""
        ...

    def refuse(self, what: str, error: Exception) -> None:
        """Count something received that is not used."""
        ...

    def disk_failed(self, what: str, error: OSError) -> None:
        """Report that the disk failed during an action."""
        ...


class ArtifactCarrier(Protocol):
    """How chunks travel: `MqttCarrier` or `HttpsCarrier`."""

    is_answered_in_session: bool
    """Whether silence may mean that the coordinator has forgotten the session."""

    def start(self) -> None:
        """Begin to carry."""

    def close(self) -> None:
        """Stop."""

    def send(self, update: ChunkFile, ranges: Ranges) -> None:
        """Send chunks of the update."""

    def fetch(self, ref: ArtifactRef, ranges: Ranges) -> None:
        """Ask for chunks of an artifact."""

    @property
    def is_sending(self) -> bool:
        """Whether chunks of the update have not left yet."""

    def end(self, artifact: str) -> int:
        """Send nothing more of an update; returns how many chunks of it were sent."""


class ArtifactTransfer:
    """Moves the artifacts of one device.

    Args:
        store: its private store.
        carrier: moves chunks.
        window: what one download may have under way; None for no bound.
        max_bytes: of the largest artifact that is fetched.
        reporter: records failures.
        events: the event log.
    """

    def __init__(
        self,
        store: PrivateStore,
        carrier: ArtifactCarrier,
        window: Window | None,
        max_bytes: int,
        reporter: Reporter,
        events: EventLog,
    ) -> None:
        self._store = store
        self._carrier = carrier
        self._downloads = Downloads(store.partials, window, max_bytes)
        self._reporter = reporter
        self._events = events

    def start(self) -> None:
        """Begin to carry; files of expired transfers are deleted."""
        self._store.partials.collect()
        self._carrier.start()

    def stop_sending(self) -> None:
        """Carry nothing more."""
        self._carrier.close()

    def close(self) -> None:
        """Close all files; received chunks stay on disk."""
        self._downloads.close()

    # Up

    def send(self, update: ChunkFile, ranges: Ranges) -> None:
        """Send chunks of the update that the coordinator needs."""
        self._carrier.send(update, ranges)

    @property
    def is_sending(self) -> bool:
        """Whether chunks of the update have not left yet."""
        return self._carrier.is_sending

    def end_update(self, artifact: str) -> int:
        """Send nothing more of an update; returns how many chunks of it were sent."""
        return self._carrier.end(artifact)

    # Down

    @property
    def is_fetching(self) -> bool:
        """Whether anything is wanted."""
        return self._downloads.are_pending

    def want(self, downloads: tuple[Wanted, ...], now: float) -> None:
        """Replace the wanted downloads by these.

        Raises:
            TooLargeError: one is over its bound; nothing is fetched.
        """
        self._downloads.want(downloads, now)

    def take(self, chunk: Chunk, now: float) -> None:
        """Take a chunk.

        Raises:
            MalformedError: one that its artifact can't have.
            OSError: the disk does not take it; the download pauses.
        """
        self._downloads.feed(chunk, now)

    def keep_completed(self, state: SessionState, now: float) -> Event | None:
        """Take over a download that has become complete."""
        download = None
        with self._reporter.recording_errors("download"):
            download = self._downloads.completed(now)
        return None if download is None else self._keep(download, state, now)

    def ask(self, now: float) -> Event | None:
        """Ask for missing chunks; returns an event when none of them comes."""
        is_silent = False
        with self._reporter.recording_errors("download"):
            for ref, ranges in list(self._downloads.needs(now)):
                self._carrier.fetch(ref, ranges)
            is_silent = self._carrier.is_answered_in_session and self._downloads.is_silent(now)
        return SessionLost() if is_silent else None

    def _keep(self, download: Downloaded, state: SessionState, now: float) -> Event | None:
        try:
            if download.what == "spec":
                self._store.save_spec(download.file.read_bytes())
            else:
                self._store.artifacts.adopt(download.file, download.artifact)
        except ValueError as error:  # not a spec: the check that follows refuses it
            self._reporter.refuse("spec", error)
        except OSError as error:
            self._downloads.failed(download.artifact, now)  # a full disk: tried again when there is room
            self._reporter.disk_failed("a download", error)
            return None
        self._downloads.kept(download.artifact)
        self._events.write(
            "artifact_stored",
            artifact=download.artifact,
            what=download.what,
            bytes=download.size,
            resumed=download.resumed,
            received=download.fresh,
            repeated=download.repeated,
            seconds=round(download.seconds, 3),
            round=0 if state.offer is None else state.offer.round,
            final=state.finished is not None,
        )
        return ArtifactStored(download.artifact)
