"""What a box says about itself right now, read from small sysfs trees."""

import shutil
from pathlib import Path

import pytest

from devices.telemetry import LOW_DISK_BYTES, Condition, Link, Telemetry, Zone, read_telemetry
from fedcg.wire.parts import Health

TREES = Path(__file__).parents[2] / "golden" / "devices"


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
    assert (seen.hottest_c, seen.is_hot, seen.supply.battery_percent, seen.supply.on_mains) == (None,) * 4
    assert (seen.power_mode, seen.cpu_mhz, seen.free_memory_bytes) == (None,) * 3
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
    readings = Telemetry(zones=(Zone("cpu", 95.0),), free_disk_bytes=LOW_DISK_BYTES - 1)
    assert readings.is_hot
    assert readings.condition is Condition.LOW_DISK


def test_a_disk_that_cannot_be_asked_is_unavailable(tmp_path: Path) -> None:
    assert read_telemetry(tmp_path / "missing", root=tmp_path).free_disk_bytes is None


def test_every_condition_has_a_word_on_the_wire() -> None:
    assert {condition.value for condition in Condition} <= {health.value for health in Health}


def test_zones_have_their_own_trip_points_and_trips_that_are_off_do_not_count(tmp_path: Path) -> None:
    orin = {zone.name: zone for zone in read_telemetry(tmp_path, TREES / "jetson-orin-nano-8gb").zones}
    assert orin["tj-thermal"] == Zone("tj-thermal", 53.406, passive_c=99.0, critical_c=104.5)
    assert orin["tj-thermal"].limit_c == 94.5
    laptop = {zone.name: zone for zone in read_telemetry(tmp_path, TREES / "x86-laptop").zones}
    assert laptop["x86_pkg_temp"] == Zone("x86_pkg_temp", 73.0)  # its passive trip is at -274 °C
    assert laptop["acpitz"].passive_c is None
    xavier = read_telemetry(tmp_path, TREES / "jetson-xavier-nx")
    assert (xavier.zones[0].limit_c, xavier.is_hot) == (86.0, True)


def test_links_have_state_speed_and_the_default_route_and_no_speed_is_unavailable(tmp_path: Path) -> None:
    assert read_telemetry(tmp_path, TREES / "x86-laptop").links == (
        Link("enp0s31f6", "down", None, is_default=False),
        Link("wwan0", "up", None, is_default=True),
    )


def test_free_memory_is_within_the_limits_of_the_control_group(tmp_path: Path) -> None:
    root = _write(tmp_path, {"proc/meminfo": "MemTotal: 4000 kB\nMemAvailable: 3000 kB", "proc/self/cgroup": "0::/box"})
    assert read_telemetry(tmp_path, root).free_memory_bytes == 3000 * 1024
    group = "sys/fs/cgroup/box"
    limits = {f"{group}/memory.max": "2000000", f"{group}/memory.current": "1500000"}
    _write(tmp_path, {**limits, f"{group}/memory.stat": "anon 1\ninactive_file 400000\nactive_file 7"})
    assert read_telemetry(tmp_path, root).free_memory_bytes == 900_000  # 2,000,000 - 1,500,000 + 400,000


def test_no_reading_of_a_damaged_tree_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "box"
    shutil.copytree(TREES / "jetson-orin-nano-8gb", root)
    for file in root.rglob("*"):
        if file.is_file():
            file.write_bytes(b"\xff\xfe::garbage\0-1 0,,-")
    read = read_telemetry(tmp_path, root)
    assert (read.zones, read.rails, read.power_mode, read.counters, read.cpu_mhz) == ((), (), None, {}, None)
