"""Uploads in transfer: at most one per device, granted within a shared window, and stored on disk as they arrive.

A broker queues chunks that arrive faster than the coordinator reads them, and drops those that don't fit in its queue. So over MQTT, the
chunks in transfer are limited to that queue. Chunks received by a killed coordinator are found again
(`fedcg.wire.transfer.partial_files`). Hashes and writes on the receiver's thread. Sends nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedcg.values import Value
from fedcg.wire.messages.schemas import Carrier, Manifest, RoundAttempt
from fedcg.wire.transfer.chunks import Chunk
from fedcg.wire.transfer.partial_files import DurableReceiver, Partials
from fedcg.wire.transfer.windows import Ranges, Window


class Grant(Value):
    """Chunks that a device may send now.

    Attributes:
        is_queued: whether they arrive as frames over MQTT, through the coordinator's queue at the broker.
    """

    device: str
    manifest: Manifest
    ranges: Ranges
    is_queued: bool


class Received(Value):
    """A complete update whose bytes match the announced sha256; not stored durably yet.

    Attributes:
        manifest_at: when its first manifest arrived; unix time.
        file: path of its file.
        counts: counts of its chunks, see `DurableReceiver.counts`.
    """

    device: str
    manifest: Manifest
    manifest_at: float
    file: Path
    counts: Mapping[str, int]


@dataclass
class _Upload:
    manifest: Manifest
    manifest_at: float
    receiver: DurableReceiver
    is_queued: bool  # its chunks share the coordinator's queue at the broker


class Uploads:
    """The receivers of one federation's updates.

    Args:
        partials: the folder of half-received updates.
        window: limits for one device over MQTT.
        shared: limits for all devices together over MQTT, since they share the coordinator's queue at the broker.
    """

    def __init__(self, partials: Partials, window: Window, shared: Window) -> None:
        self._partials = partials
        self._window = window
        self._shared = shared
        self._active: dict[str, _Upload] = {}
        self._held_back: dict[str, None] = {}  # devices that are waiting for grants, oldest first
        self._chunks = self._bytes = 0  # granted but not received, for all devices

    def begin(
        self, device: str, manifest: Manifest, now: float, manifest_at: float, carrier: Carrier
    ) -> Received | Grant | None:
        """Record a manifest; a repeated one changes nothing.

        Args:
            device: the sender.
            manifest: announces the update.
            now: monotonic seconds.
            manifest_at: unix time, for the record.
            carrier: carrier of its chunks. Over HTTPS, all missing chunks are granted at once.

        Returns:
            The chunks to grant; or the complete update, if all of it was received before a restart.

        Raises:
            CapacityError: too many transfers; the device announces it again later.
            IntegrityError: the complete chunks from before a restart have another sha256; the transfer restarts.
        """
        upload, is_queued = self._active.get(device), carrier is Carrier.MQTT
        if upload is not None and upload.manifest.artifact != manifest.artifact:
            self.end(device)
            upload = None
        if upload is not None and upload.is_queued != is_queued:
            self._let_go(device)  # the device changed its carrier: chunks on disk still count, but other limits apply
            upload = None
        if upload is None:
            window = self._window if is_queued else None
            receiver = self._partials.open(manifest.artifact, window, device)
            upload = self._active[device] = _Upload(manifest, manifest_at, receiver, is_queued)
        return self._next(device, upload, now)

    def feed(self, device: str, chunk: Chunk, now: float) -> Received | Grant | None:
        """Handle a chunk of a device's update.

        Returns:
            The complete update, once; or the chunks to grant next.

        Raises:
            MalformedError: a chunk that is not part of the announced artifact.
            IntegrityError: the complete chunks have another sha256; the transfer restarts.
        """
        upload = self._active.get(device)
        if upload is None:
            return None
        before = upload.receiver.under_way
        upload.receiver.feed(chunk, now)
        self._count(upload, upload.receiver.under_way - before)
        return self._next(device, upload, now)

    def held_back(self, now: float) -> Iterator[Grant]:
        """Grants for devices that waited for others, as far as the window allows."""
        for device in list(self._held_back):
            if self._room(self._active[device]) <= 0:
                return
            grant = self._grant(device, self._active[device], now)
            if grant is not None:
                yield grant

    def stalled(self, now: float) -> Iterator[Grant]:
        """Grants that are due, including repeated ones."""
        for device, upload in self._active.items():
            grant = self._grant(device, upload, now)
            if grant is not None:
                yield grant

    def manifest(self, device: str) -> Manifest | None:
        """The manifest of a device's update in transfer; thread-safe."""
        upload = self._active.get(device)
        return None if upload is None else upload.manifest

    def end(self, device: str) -> None:
        """Drop a device's upload and its chunks."""
        upload = self._let_go(device)
        if upload is not None:
            self._partials.discard(upload.manifest.artifact.id, device)

    def end_attempt(self, attempt: RoundAttempt) -> dict[str, Manifest]:
        """Drop the uploads of an attempt that accepts no more updates, and files left by an earlier process.

        Returns:
            The manifests of those uploads, by device.
        """
        manifests = {device: upload.manifest for device, upload in self._active.items()}
        ended = {device: manifest for device, manifest in manifests.items() if manifest.at <= attempt}
        for device in ended:
            self.end(device)
        self._partials.clear()
        return ended

    def close(self) -> None:
        """Close all files; received chunks stay on disk for the next process."""
        for device in list(self._active):
            self._let_go(device)

    def _let_go(self, device: str) -> _Upload | None:
        upload = self._active.pop(device, None)
        self._held_back.pop(device, None)
        if upload is not None:
            upload.receiver.close()
            self._count(upload, -upload.receiver.under_way)
        return upload

    def _next(self, device: str, upload: _Upload, now: float) -> Received | Grant | None:
        receiver = upload.receiver
        if not receiver.complete:
            return self._grant(device, upload, now)
        return Received(device, upload.manifest, upload.manifest_at, receiver.finish(), receiver.counts)

    def _grant(self, device: str, upload: _Upload, now: float) -> Grant | None:
        room = self._room(upload)
        before = upload.receiver.under_way
        ranges = upload.receiver.next_need(now, max(0, room))  # also without room: drops stalled grants
        self._count(upload, upload.receiver.under_way - before)
        if ranges is None and room <= 0:
            self._held_back[device] = None
            return None
        self._held_back.pop(device, None)
        return None if ranges is None else Grant(device, upload.manifest, ranges, upload.is_queued)

    def _room(self, upload: _Upload) -> int:
        """How many more chunks of this upload fit in the shared window; a single transfer always gets some."""
        if not upload.is_queued:
            return upload.manifest.artifact.chunks
        if self._chunks == 0:
            return self._shared.chunks_of(upload.manifest.artifact.chunk_bytes)
        by_bytes = (self._shared.bytes - self._bytes) // upload.manifest.artifact.chunk_bytes
        return min(self._shared.chunks - self._chunks, by_bytes)

    def _count(self, upload: _Upload, more: int) -> None:
        if upload.is_queued:
            self._chunks += more
            self._bytes += more * upload.manifest.artifact.chunk_bytes
