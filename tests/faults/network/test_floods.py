"""One enrolled device floods a real coordinator over a real Mosquitto: the others' rounds go on, and it is silenced when it overdoes it."""

from pathlib import Path

import pytest

from tests.floods import FLOODER, HONEST, ROUNDS, flooded

pytestmark = [pytest.mark.slow, pytest.mark.broker]
RATE, HARD_RATE = 500, 4000
SILENCED_WITHIN_S = 10.0
MAX_LOG_BYTES = 256 * 1024


@pytest.mark.parametrize("kind", ["heartbeats", "manifests", "bad signatures", "chunks", "hellos"])
def test_a_flooding_device_delays_the_others_little_and_is_silenced_above_what_is_allowed(
    tmp_path: Path, kind: str
) -> None:
    seen = flooded(tmp_path, kind, RATE, HARD_RATE)
    assert seen.flooded_s <= 2.0 * seen.calm_s + 1.0  # a second for a machine that has other work
    assert seen.silenced_s is not None
    assert 0.0 < seen.silenced_s <= SILENCED_WITHIN_S
    assert seen.log_bytes <= MAX_LOG_BYTES
    silenced = [event for event in seen.events if event["event"] == "silenced"]
    assert [event["client"] for event in silenced] == [FLOODER]
    assert "messages a second" in silenced[0]["reason"]
    stored = {(event["client"], event["round"]) for event in seen.events if event["event"] == "update_stored"}
    assert stored == {(device, number) for device in HONEST for number in range(2, ROUNDS + 1)} | {
        (client, number) for client, number in stored if number == 1
    }
    assert not [event for event in seen.events if event["event"] == "departed"]
