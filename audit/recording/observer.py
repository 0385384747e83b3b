"""The observer: an independent, read-only subscriber that records every message on a federation's topics.

Owns the loop between a transport and a `Capture`, and the files in its output folder: `wire.json` (replaced atomically
at every change), `artifacts/SHA256`, and on request `frames.bin` with every raw frame.
"""

import json
import queue
import struct
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from audit.errors import CaptureError
from audit.recording.capture import Capture
from fedcg.files import READABLE, replace_durably
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transport.transport import Delivery, Transport

WIRE_FILE = "wire.json"
ARTIFACTS = "artifacts"
FRAMES_FILE = "frames.bin"
WRITE_EVERY_S = 0.25
QUIET_S = 1.0  # wait after the announced end: late chunks and receipts still count
MAX_QUEUED = 100_000
_FRAME = struct.Struct(">II")
"""Precedes each frame of `frames.bin`: lengths in bytes of its topic and its payload, which follow."""
_GAPS = {
    "incomplete": "incomplete transfers",
    "bases_not_seen": "base aggregates of updates that were not recorded",
    "undecoded": "artifacts that could not be decoded",
    "lost_frames": "frames dropped because the observer was too slow",
    "damaged_frames": "damaged frames",
}


def gaps(path: Path, without: Collection[str] = ()) -> tuple[str, ...]:
    """Return the gaps that an observer's record states, except some by name; empty without a record.

    Raises:
        CaptureError: the record can't be read.
    """
    try:
        record = json.loads(path.read_text())
        found = {name: record.get(name) for name in _GAPS if name not in without}
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, AttributeError) as error:
        raise CaptureError(f"{path} can't be read: {error}") from error
    return tuple(
        f"{len(value) if isinstance(value, list) else value} {_GAPS[name]}" for name, value in found.items() if value
    )


class Observer:
    """Records a federation from a read-only transport.

    Args:
        transport: not started yet; its identity needs permission to read everything.
        federation: its id.
        out: folder for the recording; created if missing.
        keep_frames: also append every frame to `frames.bin`.
    """

    def __init__(self, transport: Transport, federation: str, out: Path, *, keep_frames: bool = False) -> None:
        self.capture = Capture(federation)
        self._transport = transport
        self._out = out
        self._queue: queue.Queue[Delivery] = queue.Queue(MAX_QUEUED)
        self._lost = 0
        self._links = 0
        self._linked = threading.Event()
        (out / ARTIFACTS).mkdir(parents=True, exist_ok=True)
        if (out / WIRE_FILE).exists():
            self._continue()
        self._frames = (out / FRAMES_FILE).open("ab") if keep_frames else None

    def _continue(self) -> None:
        """Continue an earlier recording in the same folder."""
        try:
            earlier = json.loads((self._out / WIRE_FILE).read_text())
            blobs = {path.name: path.read_bytes() for path in sorted((self._out / ARTIFACTS).iterdir())}
            self.capture.restore(earlier["bytes"], blobs)
        except (OSError, ValueError, KeyError) as error:
            raise CaptureError(f"{self._out} holds a recording that can't be continued: {error}") from error

    def start(self) -> None:
        """Connect in the background and subscribe to everything."""
        self._transport.subscribe(Topics(self.capture.federation).everything())
        self._transport.start(self._on_delivery, self._on_link)

    def _on_delivery(self, delivery: Delivery) -> None:
        try:
            self._queue.put_nowait(delivery)
        except queue.Full:
            self._lost += 1

    def _on_link(self, is_up: bool) -> None:
        if is_up:
            self._links += 1
            self._linked.set()

    def run(self, stop: threading.Event, *, until_finished: bool, on_ready: Callable[[], None]) -> None:
        """Record until `stop` is set, or until the federation is finished and no more frames arrive."""
        changed, ready, written_at, received_at = True, False, -WRITE_EVERY_S, time.monotonic()
        while not stop.is_set():
            if not ready and self._linked.is_set():
                self._write()
                on_ready()
                ready = True
            if self._take(timeout_s=0.05):
                changed, received_at = True, time.monotonic()
            now = time.monotonic()
            if changed and ready and now - written_at >= WRITE_EVERY_S:
                self._write()
                changed, written_at = False, now
            if until_finished and self.capture.is_finished and now - received_at >= QUIET_S:
                break
        self.close()

    def close(self) -> None:
        """Process the queued frames, write the final record, and disconnect."""
        while self._take(timeout_s=0.0):
            pass
        self._transport.close()
        self._write()
        if self._frames is not None:
            self._frames.close()

    def _take(self, timeout_s: float) -> bool:
        try:
            delivery = self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return False
        if self._frames is not None:
            topic = delivery.topic.encode()
            self._frames.write(_FRAME.pack(len(topic), len(delivery.payload)) + topic + delivery.payload)
        for artifact, data in self.capture.feed(delivery.topic, delivery.payload).items():
            replace_durably(self._out / ARTIFACTS / artifact, data)
        return True

    def _write(self) -> None:
        if self._frames is not None:
            self._frames.flush()
        record = self.capture.record() | {"lost_frames": self._lost, "links": self._links}
        replace_durably(self._out / WIRE_FILE, json.dumps(record, indent=1), READABLE)
