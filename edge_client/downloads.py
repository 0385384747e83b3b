"""Downloads under way: feeds chunk frames to receivers, says what to ask for, and notices silence. No I/O of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edge_client.session_events import Wanted
from edge_client.session_state import SILENCE_S
from fedcg.wire.errors import TooLargeError
from fedcg.wire.transfer import Chunk, Ranges, Receiver

MAX_SPEC_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Downloaded:
    """A complete, verified artifact."""

    what: str
    artifact: str
    data: bytes
    seconds: float


@dataclass
class _Download:
    wanted: Wanted
    receiver: Receiver
    started_at: float
    moved_at: float
    asked_at: float | None = None


class Downloads:
    """The receivers of everything that is wanted now."""

    def __init__(self) -> None:
        self._active: dict[str, _Download] = {}

    @property
    def are_pending(self) -> bool:
        """Whether anything is wanted."""
        return bool(self._active)

    def want(self, downloads: tuple[Wanted, ...], now: float) -> None:
        """From now on exactly these are wanted; what has come of them already is kept.

        Raises:
            TooLargeError: a spec larger than any real one; nothing is fetched.
        """
        for wanted in downloads:
            if wanted.what == "spec" and wanted.ref.size > MAX_SPEC_BYTES:
                raise TooLargeError(f"a spec of {wanted.ref.size} bytes is over the bound of {MAX_SPEC_BYTES}")
        before, self._active = self._active, {}
        for wanted in downloads:
            known = before.get(wanted.ref.id)
            if known is None or known.receiver.ref != wanted.ref:
                known = _Download(wanted, Receiver(wanted.ref), now, now)
            known.wanted = wanted
            self._active[wanted.ref.id] = known

    def feed(self, chunk: Chunk, now: float) -> Downloaded | None:
        """Take a chunk; returns its artifact when that made it complete.

        Raises:
            MalformedError: a chunk that its artifact can't have.
            IntegrityError: the chunks don't add up to the artifact, which is fetched again.
        """
        download = self._active.get(chunk.artifact)
        if download is None:
            return None
        if download.receiver.feed(chunk, now):
            download.moved_at = now
        if not download.receiver.complete:
            return None
        data = download.receiver.data()
        del self._active[chunk.artifact]
        return Downloaded(download.wanted.what, chunk.artifact, data, now - download.started_at)

    def needs(self, now: float) -> Iterator[tuple[str, Ranges]]:
        """What to ask the coordinator for now: artifact and chunk ranges."""
        for artifact, download in self._active.items():
            patience = download.wanted.ask_after_s
            if patience is None or (download.asked_at is None and now - download.moved_at < patience):
                continue
            ranges = download.receiver.next_need(now)
            if ranges is not None:
                download.asked_at = now if download.asked_at is None else download.asked_at
                yield artifact, ranges

    def is_silent(self, now: float) -> bool:
        """Whether something asked for has not moved for a while; asking counts anew afterwards."""
        silent = [
            download
            for download in self._active.values()
            if download.asked_at is not None and now - max(download.asked_at, download.moved_at) >= SILENCE_S
        ]
        for download in silent:
            download.asked_at = now
        return bool(silent)
