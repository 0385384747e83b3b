"""The limits of known brokers and services, as named settings. Knows no MQTT library.

The figures are the services' documented limits. Only Mosquitto is run here; a Mosquitto that is limited the same way stands
for the others in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedcg.wire.messages.enrolment_messages import PresetName
from fedcg.wire.messages.messages import MAX_CHUNK_BYTES
from fedcg.wire.transfer.chunk_window import Window
from fedcg.wire.transport.mqtt_config import IN_FLIGHT

DEFAULT_PRESET: PresetName = "mosquitto"


@dataclass(frozen=True)
class LinkLimits:
    """How a link to a broker is used.

    Attributes:
        max_packet: largest MQTT packet in bytes, whatever the broker announces.
        in_flight: QoS 1 publishes that wait for the broker's acknowledgement at most.
        window: what one transfer may have under way.
        shared: what all transfers to one receiver together may have under way: they meet in its queue at the broker.
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
    """The limits of a preset, with single settings of the configuration in place of its own."""
    limits = PRESETS[preset]
    window = Window(window_chunks or limits.window.chunks, window_bytes or limits.window.bytes)
    shared = Window(max(limits.shared.chunks, window.chunks), max(limits.shared.bytes, window.bytes))
    return replace(limits, window=window, shared=shared, chunk_bytes=chunk_bytes or limits.chunk_bytes)
