"""Every preset through a Mosquitto that is limited the same way: real agents, the real coordinator, full queues."""

from pathlib import Path

import pytest

from fedcg.wire.messages.enrolment_messages import PresetName
from fedcg.wire.messages.schemas import COORDINATOR
from fedcg.wire.transfer.chunks import FRAME_OVERHEAD_BYTES
from fedcg.wire.transfer.windows import PRESETS, limits_for
from tests.conftest import StartMosquitto
from tests.support.broker.brokers import QueueLimits, acl_for
from tests.support.wire.transfer_parties import FEDERATION, prepared

LIKE: dict[PresetName, QueueLimits] = {
    "mosquitto": QueueLimits(),
    "aws-iot": QueueLimits(packet_bytes=128 * 1024, in_flight=100, messages=100),
    "azure-event-grid": QueueLimits(packet_bytes=512 * 1024, in_flight=16, messages=100, bytes=1_000_000),
    "emqx": QueueLimits(packet_bytes=1024 * 1024, in_flight=32, messages=1000),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_stays_inside_the_limits_of_its_broker(preset: PresetName) -> None:
    limits, broker = PRESETS[preset], LIKE[preset]
    assert limits.max_packet <= broker.packet_bytes
    assert limits.in_flight <= broker.in_flight
    for window in (limits.window, limits.shared):
        assert window.chunks <= 0.7 * broker.messages
        assert window.bytes <= 0.8 * broker.bytes


def test_single_settings_take_the_place_of_a_presets_own() -> None:
    limits = limits_for("aws-iot", chunk_bytes=20_000, window_chunks=80, window_bytes=5_000_000)
    assert (limits.max_packet, limits.chunk_bytes) == (128 * 1024, 20_000)
    assert (limits.window.chunks, limits.window.bytes) == (80, 5_000_000)
    assert limits.shared.chunks >= 80
    assert limits.shared.bytes >= 5_000_000
    assert limits_for("aws-iot") == PRESETS["aws-iot"]


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.parametrize("preset", PRESETS)
def test_a_round_goes_through_a_broker_limited_like_the_presets(
    tmp_path: Path, mosquitto: StartMosquitto, preset: PresetName
) -> None:
    broker = mosquitto(acl_for(FEDERATION), limits=LIKE[preset])
    ports = dict.fromkeys(("a", "b"), broker.port)
    with prepared(tmp_path, broker, ports, size=1_500_000, preset=preset, chunk_bytes=None) as federation:
        federation.start_all()
        federation.wait_finished()
        stored = federation.events(COORDINATOR, "update_stored")
        assert sorted(event["client"] for event in stored) == ["a", "b"]
        largest = min(120 * 1024, LIKE[preset].packet_bytes - 512) - FRAME_OVERHEAD_BYTES
        assert [event["received"] for event in stored] == [-(-event["size"] // largest) for event in stored]
    broker.stop()
