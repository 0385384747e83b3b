"""Requests of devices for artifacts that are not open: each artifact is read once for all that wait for it, off the loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from coordinator.updates.published_artifacts import PublishedArtifacts
from fedcg.wire.errors import IntegrityError
from fedcg.wire.messages.messages import Need
from fedcg.wire.transfer.chunk_sender import ChunkFile
from fedcg.wire.transfer.chunk_window import Ranges

log = logging.getLogger(__name__)


class ArtifactRequests:
    """Serves what devices ask for. One request of each device waits, the newest: a device asks again for what it misses.

    Args:
        published: the artifacts that devices may fetch.
        send: sends chunks of an open artifact to a device; from any thread.
        run: runs work that reads a disk on another thread, one after the other.
    """

    def __init__(
        self,
        published: PublishedArtifacts,
        send: Callable[[str, ChunkFile, Ranges], None],
        run: Callable[[Callable[[], object]], None],
    ) -> None:
        self._published = published
        self._send = send
        self._run = run
        self._lock = threading.Lock()
        self._waiting: dict[str, Need] = {}  # by device
        self._queued: set[str] = set()  # artifacts whose read was handed to `run` and has not begun

    def serve(self, device: str, need: Need) -> None:
        """Send what a device asks for, at once when the artifact is open; else when it has been read."""
        if not self._published.allows(need.artifact):
            return
        source = self._published.known(need.artifact)
        if source is not None:
            self._send(device, source, need.ranges)
            return
        with self._lock:
            self._waiting[device] = need
            if need.artifact in self._queued:
                return
            self._queued.add(need.artifact)
        self._run(partial(self._read, need.artifact))

    def _read(self, artifact: str) -> None:
        with self._lock:
            self._queued.discard(artifact)
            waiting = {device: need for device, need in self._waiting.items() if need.artifact == artifact}
            for device in waiting:
                del self._waiting[device]
        if not waiting:  # the devices have asked for another artifact since
            return
        try:
            source = self._published.source(artifact)
        except (IntegrityError, OSError):
            log.exception("%s asked for artifact %s, which can't be read", ", ".join(sorted(waiting)), artifact)
            return
        for device, need in waiting.items():
            self._send(device, source, need.ranges)
