"""Gets what is wanted: asks for missing chunks over the device's carrier, takes what comes, keeps what is complete and verified."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from edge_client.config import AgentConfig
from edge_client.session.events import ArtifactStored, DownloadSilent, Event
from edge_client.session.state import SessionState
from edge_client.store.private_store import PrivateStore
from edge_client.transfer.downloads import Downloaded, Downloads
from edge_client.transfer.https_client import HttpsCarrier
from fedcg.event_log import EventLog
from fedcg.wire.messages.messages import COORDINATOR, ArtifactRef, Need
from fedcg.wire.transfer.chunk_window import Ranges
from fedcg.wire.transfer.chunks import Chunk


class Reporter(Protocol):
    """Writes down what is refused, and what the disk does not take."""

    def noting(self, refused: str) -> AbstractContextManager[None]:
        """Write down what ends the context."""
        ...

    def refuse(self, what: str, error: Exception) -> None:
        """Something that came is not used."""
        ...

    def stumble(self, what: str, error: OSError) -> None:
        """The disk failed at something."""
        ...


class Fetching:
    """Fetches for one device.

    Args:
        config: of the device.
        store: its private store.
        downloads: what is being fetched.
        ask: sends what is missing over MQTT.
        https: fetches over HTTPS, and asks nobody else; None when chunks come over MQTT.
        reporter: writes down what fails.
        events: the event log.
    """

    def __init__(
        self,
        config: AgentConfig,
        store: PrivateStore,
        downloads: Downloads,
        ask: Callable[[Need], None],
        https: HttpsCarrier | None,
        reporter: Reporter,
        events: EventLog,
    ) -> None:
        self._config = config
        self._store = store
        self._downloads = downloads
        self._ask = ask
        self._https = https
        self._reporter = reporter
        self._events = events

    def take(self, chunk: Chunk, now: float) -> None:
        """Take a chunk that came over HTTPS."""
        with self._reporter.noting("download"):
            self._downloads.feed(chunk, now)

    def keep_completed(self, state: SessionState, now: float) -> Event | None:
        """Take over a download that has become complete."""
        download = None
        with self._reporter.noting("download"):
            download = self._downloads.completed(now)
        return None if download is None else self._keep(download, state, now)

    def ask(self, state: SessionState, now: float) -> Event | None:
        """Ask for what is missing; says when nothing of it comes."""
        is_silent = False
        with self._reporter.noting("download"):
            for ref, ranges in list(self._downloads.needs(now)):
                if self._https is not None:
                    self._https.fetch(ref, ranges)
                else:
                    self._ask(self._need(ref, ranges, state))
            # Over HTTPS no session is asked: what does not come is asked for again, ever more slowly, and that is all.
            is_silent = self._https is None and self._downloads.is_silent(now)
        return DownloadSilent() if is_silent else None

    def _need(self, ref: ArtifactRef, ranges: Ranges, state: SessionState) -> Need:
        target = state.offer or state.finished
        return Need(
            federation=self._config.federation,
            sender=self._config.device,
            recipient=COORDINATOR,
            epoch=state.epoch,
            round=0 if target is None else target.round,
            attempt=0 if target is None else target.attempt,
            artifact=ref.id,
            ranges=ranges,
        )

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
            self._reporter.stumble("a download", error)
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
