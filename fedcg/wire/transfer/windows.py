"""Flow control of transfers: windows, the limits of known brokers, and the chunks of one artifact to request next.

Pure; holds no data and must not know an MQTT library.

Over MQTT a window limits the chunks in transit, because a broker drops messages beyond the limit of the receiver's queue (`PRESETS`).
The window starts small, grows with every chunk that arrives quickly, and shrinks when chunks take long. Otherwise chunks would fill the
queues of a slow link and delay keepalives and receipts. HTTPS has no such queue and no window: all missing chunks are requested at once.

The figures are the services' documented limits. Tests use only Mosquitto, also with the limits of the other services.
"""

from collections.abc import Iterable
from dataclasses import replace

from fedcg.values import Value
from fedcg.wire.messages.enrolment_messages import PresetName
from fedcg.wire.messages.schemas import MAX_CHUNK_BYTES, ArtifactRef
from fedcg.wire.transport.mqtt_config import IN_FLIGHT

FIRST_CHUNKS = 4  # requested before the link is measured
MAX_STALL_S = 60.0
MAX_RANGES = 256  # in one request; the limit of the message
GAP_FACTOR = 2.0  # grants count as lost after this many times the pause between two chunks
CALMING = 0.75  # how fast that time shrinks again, per chunk
UNDER_WAY_S = 4.0  # granted chunks should arrive within this time
Ranges = tuple[tuple[int, int], ...]


class Window(Value):
    """How much may be granted and not yet received: chunks and bytes, whichever is reached first."""

    chunks: int = 16
    bytes: int = 1_900_000

    def chunks_of(self, chunk_bytes: int) -> int:
        """The number of chunks of this size that fit; at least one."""
        return max(1, min(self.chunks, self.bytes // chunk_bytes))


class ChunkRecord:
    """The record of one artifact's chunks: received, granted, missing.

    Args:
        ref: the announced artifact; the caller has checked that its size is acceptable.
        window: the most that may be in transit; None for no limit.
        stall_s: if no chunk arrives for this time, missing granted chunks are granted again. Longer pauses between chunks show a
            slow link and extend it, because chunks that are granted twice are sent twice.
    """

    def __init__(self, ref: ArtifactRef, window: Window | None, stall_s: float = 2.0) -> None:
        self.ref = ref
        self._limit = ref.chunks if window is None else window.chunks_of(ref.chunk_bytes)
        self._least = self._limit if window is None else 1
        self._credit = self._limit if window is None else min(self._limit, FIRST_CHUNKS)
        self._stall_s = stall_s
        self._patience_s = stall_s
        self._have = bytearray(ref.chunks)
        self._count = 0
        self._granted: set[int] = set()
        self._asked_at: dict[int, float] = {}  # when a chunk that is still missing was first granted
        self._next = 0  # every chunk below was received or granted since the last stall
        self._granted_at: float | None = None
        self._heard_at: float | None = None
        self._slowed_at = float("-inf")

    @property
    def complete(self) -> bool:
        """Whether every chunk was received."""
        return self._count == self.ref.chunks

    @property
    def under_way(self) -> int:
        """Chunks granted and not received."""
        return len(self._granted)

    def has(self, index: int) -> bool:
        """Whether a chunk was received."""
        return bool(self._have[index])

    def restore(self, indices: Iterable[int]) -> None:
        """Start again with exactly these chunks received."""
        self._have = bytearray(self.ref.chunks)
        self._count = self._next = 0
        self._granted.clear()
        self._asked_at.clear()
        for index in indices:
            self._add(index)

    def received(self, index: int, now: float) -> bool:
        """Count a chunk, requested or not; True if it is new."""
        self._arrived(index, now)
        self._granted.discard(index)
        return self._add(index)

    def next_need(self, now: float, room: int | None = None) -> Ranges | None:
        """Chunks to grant now as (first, count) pairs, or None if there is nothing to request now.

        New grants wait until half of the window is free, so that one message grants several chunks.

        Args:
            now: monotonic seconds.
            room: the most chunks, if several transfers share a limit; None for no such limit.
        """
        if self.complete:
            return None
        if self._granted and self._granted_at is not None and now - self._granted_at >= self._patience_s:
            self._granted.clear()
            self._patience_s = min(2.0 * self._patience_s, MAX_STALL_S)
            self._credit = max(self._least, self._credit // 2)
        if not self._granted:
            self._next = 0
        free = self._credit - len(self._granted)
        if self._granted and free < (self._credit + 1) // 2:
            return None
        fresh = self._take(free if room is None else min(free, room))
        if not fresh:
            return None
        if self._heard_at is None or not self._asked_at:
            self._heard_at = now
        self._granted.update(fresh)
        for index in fresh:
            self._asked_at.setdefault(index, now)
        self._granted_at = now
        return _as_ranges(fresh)

    def _add(self, index: int) -> bool:
        if self._have[index]:
            return False
        self._have[index] = 1
        self._count += 1
        return True

    def _arrived(self, index: int, now: float) -> None:
        gap = 0.0 if self._heard_at is None else now - self._heard_at
        self._patience_s = min(MAX_STALL_S, max(self._stall_s, GAP_FACTOR * gap, CALMING * self._patience_s))
        self._heard_at = self._granted_at = now
        asked_at = self._asked_at.pop(index, None)
        if asked_at is None:
            return
        took = now - asked_at
        if took <= UNDER_WAY_S:
            self._credit = min(self._limit, self._credit + 1)
        elif asked_at > self._slowed_at:  # once per window
            self._credit = max(self._least, int(self._credit * UNDER_WAY_S / took))
            self._slowed_at = now

    def _take(self, room: int) -> list[int]:
        fresh: list[int] = []
        ranges = 0
        while len(fresh) < room:
            index = self._have.find(0, self._next)
            if index < 0:
                self._next = self.ref.chunks
                break
            self._next = index + 1
            if index in self._granted:
                continue
            ranges += not fresh or fresh[-1] + 1 != index
            if ranges > MAX_RANGES:
                self._next = index
                break
            fresh.append(index)
        return fresh


def _as_ranges(indices: list[int]) -> Ranges:
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and sum(ranges[-1]) == index:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((index, 1))
    return tuple(ranges)


DEFAULT_PRESET: PresetName = "mosquitto"


class LinkLimits(Value):
    """The limits for a link to a broker.

    Attributes:
        max_packet: largest MQTT packet in bytes, even if the broker announces more.
        in_flight: the most QoS 1 publishes that wait for the broker's acknowledgement.
        window: of one transfer.
        shared: window of all transfers to one receiver together, which share its queue at the broker.
        broadcast_bytes_per_s: pace of a QoS 0 broadcast.
        chunk_bytes: largest chunk frame in bytes; the broker's packet limit still holds.
    """

    max_packet: int
    in_flight: int
    window: Window
    shared: Window
    broadcast_bytes_per_s: float
    chunk_bytes: int = MAX_CHUNK_BYTES


PRESETS: dict[PresetName, LinkLimits] = {
    # Queue of 1,000 messages and 64 MB per session in the generated configuration.
    "mosquitto": LinkLimits(2_000_000, IN_FLIGHT, Window(), Window(500, 32_000_000), 40e6),
    # 128 KB per publish, not adjustable; 100 unacknowledged publishes and 512 KB/s per connection; 7 slashes in a topic.
    "aws-iot": LinkLimits(128 * 1024, IN_FLIGHT, Window(), Window(64, 4_000_000), 400e3),
    # No QoS 2; 512 KB per packet; a session queues 100 messages or 1 MB, and control messages need room, too.
    "azure-event-grid": LinkLimits(512 * 1024, 16, Window(16, 500_000), Window(60, 750_000), 400e3),
    # 1 MB per packet; 1,000 queued messages and 32 in flight per session.
    "emqx": LinkLimits(1024 * 1024, IN_FLIGHT, Window(), Window(500, 32_000_000), 20e6),
}


def limits_for(
    preset: PresetName = DEFAULT_PRESET,
    chunk_bytes: int | None = None,
    window_chunks: int | None = None,
    window_bytes: int | None = None,
) -> LinkLimits:
    """The limits of a preset, with single settings replaced by the configuration."""
    limits = PRESETS[preset]
    window = Window(window_chunks or limits.window.chunks, window_bytes or limits.window.bytes)
    shared = Window(max(limits.shared.chunks, window.chunks), max(limits.shared.bytes, window.bytes))
    return replace(limits, window=window, shared=shared, chunk_bytes=chunk_bytes or limits.chunk_bytes)
