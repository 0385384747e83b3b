"""Updates on their way up: at most one per device, granted under a window. Pure; it neither sends nor stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fedcg.wire.messages import Manifest
from fedcg.wire.transfer import Chunk, Ranges, Receiver


@dataclass(frozen=True)
class Grant:
    """Chunks that a device may send now."""

    device: str
    manifest: Manifest
    ranges: Ranges


@dataclass(frozen=True)
class Received:
    """A complete update whose bytes have the announced sha256."""

    device: str
    manifest: Manifest
    manifest_at: float
    data: bytes


@dataclass
class _Upload:
    manifest: Manifest
    manifest_at: float
    receiver: Receiver
    taken: bool = False


class Uploads:
    """The receivers of one attempt."""

    def __init__(self) -> None:
        self._active: dict[str, _Upload] = {}

    def begin(self, device: str, manifest: Manifest, now: float, manifest_at: float) -> Grant | None:
        """Take note of a manifest; a repeated one changes nothing.

        Args:
            device: who sent it.
            manifest: announces the update.
            now: monotonic seconds.
            manifest_at: unix time, for the record.

        Returns:
            What to grant at once.
        """
        upload = self._active.get(device)
        if upload is None or upload.manifest.artifact != manifest.artifact:
            upload = _Upload(manifest, manifest_at, Receiver(manifest.artifact))
            self._active[device] = upload
        return self._grant(device, upload, now)

    def feed(self, device: str, chunk: Chunk, now: float) -> Received | Grant | None:
        """Take a chunk of a device's update.

        Returns:
            The whole update, once; or what to grant next.

        Raises:
            MalformedError: a chunk that the announced artifact can't have.
            IntegrityError: all chunks together have another sha256; the transfer starts again.
        """
        upload = self._active.get(device)
        if upload is None or upload.taken:
            return None
        upload.receiver.feed(chunk, now)
        if upload.receiver.complete:
            data = upload.receiver.data()
            upload.taken = True
            return Received(device, upload.manifest, upload.manifest_at, data)
        return self._grant(device, upload, now)

    def stalled(self, now: float) -> Iterator[Grant]:
        """What has to be granted (again) because time went on."""
        for device, upload in self._active.items():
            grant = None if upload.taken else self._grant(device, upload, now)
            if grant is not None:
                yield grant

    def end(self, device: str) -> None:
        """Forget a device's upload."""
        self._active.pop(device, None)

    def clear(self) -> dict[str, Manifest]:
        """Forget everything; returns the manifests of what was under way."""
        abandoned = {device: upload.manifest for device, upload in self._active.items()}
        self._active = {}
        return abandoned

    def has(self, device: str) -> bool:
        """Whether an update of a device is under way."""
        return device in self._active

    @staticmethod
    def _grant(device: str, upload: _Upload, now: float) -> Grant | None:
        ranges = upload.receiver.next_need(now)
        return None if ranges is None else Grant(device, upload.manifest, ranges)
