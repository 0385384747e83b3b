"""What a box says about itself right now, read from small sysfs trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from devices.telemetry import LOW_DISK_BYTES, Condition, Telemetry, read_telemetry
from fedcg.wire.parts import Health


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


def _zone(temperature: int, critical: int | None = None) -> dict[str, str]:
    zone = "sys/class/thermal/thermal_zone0"
    trips = (
        {}
        if critical is None
        else {f"{zone}/trip_point_0_type": "critical", f"{zone}/trip_point_0_temp": str(critical)}
    )
    return {f"{zone}/temp": str(temperature), **trips}


def _battery(percent: int, status: str) -> dict[str, str]:
    supply = "sys/class/power_supply/BAT0"
    return {f"{supply}/type": "Battery", f"{supply}/capacity": str(percent), f"{supply}/status": status}


def test_a_machine_without_sensors_is_ok_and_says_that_nothing_could_be_read(tmp_path: Path) -> None:
    seen = read_telemetry(tmp_path, root=tmp_path)
    assert (seen.hottest_c, seen.is_hot, seen.battery_percent) == (None, None, None)
    assert seen.condition is Condition.OK


@pytest.mark.parametrize(
    ("files", "condition"),
    [
        (_zone(70_000, critical=97_000), Condition.OK),
        (_zone(87_000, critical=97_000), Condition.HOT),
        (_zone(89_000), Condition.OK),
        (_zone(90_000), Condition.HOT),
        (_battery(19, "Discharging"), Condition.LOW_POWER),
        (_battery(19, "Charging"), Condition.OK),
        (_battery(20, "Discharging"), Condition.OK),
        ({"sys/class/thermal/thermal_zone0/temp": "garbage"}, Condition.OK),
    ],
)
def test_the_condition_follows_the_sensors(tmp_path: Path, files: dict[str, str], condition: Condition) -> None:
    assert read_telemetry(tmp_path, root=_write(tmp_path, files)).condition is condition


def test_a_full_disk_is_worse_than_heat() -> None:
    readings = Telemetry(
        95.0, is_hot=True, battery_percent=None, is_discharging=False, free_disk_bytes=LOW_DISK_BYTES - 1
    )
    assert readings.condition is Condition.LOW_DISK


def test_a_disk_that_cannot_be_asked_is_unavailable(tmp_path: Path) -> None:
    assert read_telemetry(tmp_path / "missing", root=tmp_path).free_disk_bytes is None


def test_every_condition_has_a_word_on_the_wire() -> None:
    assert {condition.value for condition in Condition} <= {health.value for health in Health}
