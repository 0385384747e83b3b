"""What a box reports right now: temperatures, power, throttling, supply, memory, disk and links, from file trees of boards and small ones."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from devices import telemetry
from devices.nvidia import GpuReadings, nvml_readings
from devices.power import EnergyMeter, Rail, Supply, read_rails, read_supply
from devices.telemetry import Causes, Telemetry, Zone, read_telemetry
from fedcg.wire.parts import Health
from tests.support.raising import raising

TREES = Path(__file__).parents[2] / "golden" / "devices"


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


def _zone(temperature: object, critical: int | None = None) -> dict[str, str]:
    zone = "sys/class/thermal/thermal_zone0"
    files = {f"{zone}/temp": str(temperature)}
    if critical is not None:
        files |= {f"{zone}/trip_point_0_type": "critical", f"{zone}/trip_point_0_temp": str(critical)}
    return files


def _battery(percent: int, status: str) -> dict[str, str]:
    supply = "sys/class/power_supply/BAT0"
    return {f"{supply}/type": "Battery", f"{supply}/capacity": str(percent), f"{supply}/status": status}


def test_a_machine_without_sensors_is_ok_and_says_that_nothing_could_be_read(tmp_path: Path) -> None:
    seen = read_telemetry(tmp_path, root=tmp_path)
    assert (seen.is_hot, seen.supply.battery_percent, seen.supply.on_mains) == (None,) * 3
    assert (seen.cpu_mhz, seen.free_memory_bytes) == (None,) * 2
    assert seen.condition is Health.OK


@pytest.mark.parametrize(
    ("files", "condition"),
    [
        (_zone(70_000, critical=97_000), Health.OK),
        (_zone(87_000, critical=97_000), Health.HOT),
        (_zone(89_000), Health.OK),
        (_zone(90_000), Health.HOT),
        (_battery(19, "Discharging"), Health.LOW_POWER),
        (_battery(19, "Charging"), Health.OK),
        (_battery(20, "Discharging"), Health.OK),
        (_zone("garbage"), Health.OK),
    ],
)
def test_the_condition_follows_the_sensors(tmp_path: Path, files: dict[str, str], condition: Health) -> None:
    assert read_telemetry(tmp_path, root=_write(tmp_path, files)).condition is condition


def test_a_full_disk_is_worse_than_heat() -> None:
    readings = Telemetry(zones=(Zone("cpu", 95.0),), free_disk_bytes=telemetry.LOW_DISK_BYTES - 1)
    assert readings.is_hot
    assert readings.condition is Health.LOW_DISK


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
        telemetry.Link("enp0s31f6", "down", None, is_default=False),
        telemetry.Link("wwan0", "up", None, is_default=True),
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
    assert (read.zones, read.rails, read.counters, read.cpu_mhz) == ((), (), {}, None)


@pytest.mark.parametrize(
    ("tree", "software", "hardware"),
    [
        ("jetson-xavier-nx", ("CPU-therm is at its passive trip point",), ()),
        ("jetson-orin-nano-8gb", (), ()),  # its fan runs, which slows nothing down
        ("raspberrypi-3", ("soft temperature limit",), ()),  # 0x80008: bit 3, and bit 19 of the past
        ("raspberrypi-4", (), ("under-voltage", "throttled by the firmware")),  # 0x50005: bits 0 and 2
        ("raspberrypi-5", (), ()),
        ("x86-laptop", ("Processor cools",), ()),  # not the radio, not the offset that the firmware sets
        ("x86-cpu", (), ()),
    ],
)
def test_software_and_hardware_throttling_are_told_apart_and_hardware_alone_degrades_a_box(
    tree: str, software: tuple[str, ...], hardware: tuple[str, ...], tmp_path: Path
) -> None:
    read = read_telemetry(tmp_path, TREES / tree)
    assert read.causes == Causes(software, hardware)
    assert (read.condition is Health.DEGRADED) == bool(hardware)


def test_clocks_and_counters_are_read_where_the_box_reports_them() -> None:
    orin, laptop = TREES / "jetson-orin-nano-8gb", TREES / "x86-laptop"
    assert (telemetry.read_cpu_mhz(orin), telemetry.read_cpu_mhz(laptop)) == ((1344, 1728), None)
    assert telemetry.read_counters(orin) == {"over-current oc1": 0, "over-current oc3": 41}
    assert telemetry.read_counters(laptop) == {"package throttle": 1207}


def test_a_cumulative_counter_becomes_events_per_minute_of_the_last_minute() -> None:
    rates = telemetry.Sensors(Path())
    assert rates.per_minute({"oc1": 41}, 100.0) == {"oc1": None}
    assert rates.per_minute({"oc1": 44}, 110.0) == {"oc1": 18.0}  # 3 in 10 s
    assert rates.per_minute({"oc1": 44}, 130.0) == {"oc1": 6.0}  # 3 in 30 s
    assert rates.per_minute({"oc1": 44}, 170.0) == {"oc1": 0.0}  # the reading at 110 s begins the last minute
    assert rates.per_minute({"oc1": 44, "oc2": 7}, 171.0) == {"oc1": 0.0, "oc2": None}


def test_a_counter_that_goes_backwards_is_unavailable_and_never_negative() -> None:
    rates = telemetry.Sensors(Path())
    rates.per_minute({"oc1": 41}, 0.0)
    assert rates.per_minute({"oc1": 2}, 10.0) == {"oc1": None}
    assert rates.per_minute({"oc1": 3}, 20.0) == {"oc1": 6.0}
    assert rates.per_minute({"oc1": 3}, 20.0) == {"oc1": None}  # no time has passed


def test_new_over_current_events_count_as_hardware_throttling_and_old_ones_do_not(tmp_path: Path) -> None:
    counter = tmp_path / "sys/class/hwmon/hwmon0/oc3_event_cnt"
    counter.parent.mkdir(parents=True)
    counter.write_text("41\n")
    now = 0.0
    sensors = telemetry.Sensors(tmp_path, tmp_path, lambda: now)
    sensors.read()
    now = 10.0
    assert sensors.read().hardware_throttling == ()
    counter.write_text("42\n")
    now = 20.0
    read = sensors.read()
    assert (read.hardware_throttling, read.condition) == (("over-current oc3: 3.0 events a minute",), Health.DEGRADED)


def _gpu(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    fakes = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetTemperature": lambda _handle, _sensor: 71,
        "nvmlDeviceGetTemperatureThreshold": lambda _handle, _kind: 95,
        "nvmlDeviceGetPowerUsage": lambda _handle: 68500,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _handle: bits,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)


@pytest.mark.parametrize(
    ("bits", "software", "hardware"),
    [
        (pynvml.nvmlClocksThrottleReasonGpuIdle, (), ()),
        (pynvml.nvmlClocksThrottleReasonSwPowerCap, ("GPU power cap",), ()),
        (pynvml.nvmlClocksThrottleReasonSwThermalSlowdown, ("GPU temperature (software)",), ()),
        (pynvml.nvmlClocksThrottleReasonHwThermalSlowdown, (), ("GPU temperature (hardware)",)),
        (pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, (), ("GPU power brake",)),
        (pynvml.nvmlClocksThrottleReasonHwSlowdown, (), ("GPU hardware slowdown",)),
    ],
)
def test_nvml_tells_who_lowers_the_clocks_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, bits: int, software: tuple[str, ...], hardware: tuple[str, ...]
) -> None:
    _gpu(monkeypatch, bits)
    assert nvml_readings() == GpuReadings(71.0, 95.0, 68.5, software, hardware)


def test_the_gpu_of_this_box_is_a_zone_and_a_rail_and_a_recorded_tree_never_gets_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _gpu(monkeypatch, 0)
    assert "GPU" not in {zone.name for zone in read_telemetry(tmp_path, TREES / "x86-laptop").zones}
    monkeypatch.setattr(telemetry, "LIVE_ROOT", TREES / "x86-laptop")
    read = read_telemetry(tmp_path, TREES / "x86-laptop")
    zone = next(zone for zone in read.zones if zone.name == "GPU")
    assert (zone.temperature_c, zone.limit_c) == (71.0, 95.0)
    assert [(rail.name, rail.watts) for rail in read.rails] == [("GPU", 68.5)]


def test_what_a_gpu_does_not_report_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch, 0)
    for name in ("Temperature", "TemperatureThreshold", "PowerUsage", "CurrentClocksThrottleReasons"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", raising(pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)))
    assert nvml_readings() == GpuReadings(None, None, None, (), ())


ORIN = TREES / "jetson-orin-nano-8gb"


def test_an_ina3221_gives_the_watts_of_its_three_rails_and_leaves_sums_and_shunts_out() -> None:
    rails = {rail.name: rail.watts for rail in read_rails(ORIN)}
    # 5048 mV × 1112 mA, 5048 × 400, 5040 × 288; curr4 is the sum of the three.
    assert rails == pytest.approx({"VDD_IN": 5.613376, "VDD_CPU_GPU_CV": 2.0192, "VDD_SOC": 1.45152})


def test_a_monitor_that_reports_power_is_read_in_microwatts_and_other_chips_are_left_out(tmp_path: Path) -> None:
    hwmon = "sys/class/hwmon"
    files = {f"{hwmon}/hwmon0/name": "ina226", f"{hwmon}/hwmon0/power1_input": "4250000"}
    files |= {f"{hwmon}/hwmon1/name": "nvme", f"{hwmon}/hwmon1/power1_input": "1"}
    assert [(rail.name, rail.watts) for rail in read_rails(_write(tmp_path, files))] == [("ina226 1", 4.25)]


def test_a_rail_without_a_current_is_unavailable_and_not_zero(tmp_path: Path) -> None:
    monitor = "sys/class/hwmon/hwmon0"
    assert read_rails(_write(tmp_path, {f"{monitor}/name": "ina3221", f"{monitor}/in1_input": "5000"})) == ()
    assert read_rails(_write(tmp_path, {f"{monitor}/curr1_input": "garbage"})) == ()


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, Supply()),
        ({"AC": ("Mains", "1", "")}, Supply(on_mains=True)),
        ({"AC": ("Mains", "0", "")}, Supply(on_mains=False)),
        ({"USBC": ("USB", "0", "")}, Supply()),  # an empty port of a box that is fed by something else
        ({"USBC": ("USB", "1", "")}, Supply(on_mains=True)),
        ({"BAT0": ("Battery", "40", "Discharging")}, Supply(on_mains=False, battery_percent=40, is_discharging=True)),
        ({"BAT0": ("Battery", "40", "Charging")}, Supply(None, 40)),
        ({"ups": ("UPS", "90", "Discharging")}, Supply(on_mains=False, battery_percent=90, is_discharging=True)),
    ],
)
def test_mains_and_batteries(tmp_path: Path, supplies: dict[str, tuple[str, str, str]], expected: Supply) -> None:
    for name, (kind, number, status) in supplies.items():
        folder = f"sys/class/power_supply/{name}"
        measured = "capacity" if status else "online"
        _write(tmp_path, {f"{folder}/type": kind, f"{folder}/{measured}": number, f"{folder}/status": status})
    assert read_supply(tmp_path) == expected
    # The laptop's mouse has a battery of its own.
    assert read_supply(TREES / "x86-laptop") == Supply(on_mains=False, battery_percent=64, is_discharging=True)


BOARDS = {
    # 19.16 V x 1.3 A + 19.16 x 0.52 + 4.968 x 1.016 + 4.968 x 0.44; VIN_SYS_5V0 alone is 5.05 W
    "jetson-agx-orin-jetpack5": ("VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0 + VDDQ_VDD2_1V8AO", 42.104608),
    # 19.024 V x (0.24 + 0.064 + 0.152 + 0 + 0.016 + 0.176) A; the rail GPU is a part of it
    "jetson-agx-xavier": ("GPU + CPU + SOC + CV + VDDRQ + SYS5V", 12.327552),
    "jetson-agx-thor": ("VIN", 23.1),  # of the carrier board's INA238, which has one label for its only channel
    "jetson-orin-nano-8gb": ("VDD_IN", 5.613376),
    "jetson-xavier-nx": ("VDD_IN", 4.968),
}


@pytest.mark.parametrize("tree", BOARDS)
def test_what_a_board_draws_is_the_sum_that_the_catalogue_names_else_unknown(tree: str, tmp_path: Path) -> None:
    name, watts = BOARDS[tree]
    whole = telemetry.read_power(TREES / tree)
    assert whole is not None
    assert whole.name == name
    assert whole.watts == pytest.approx(watts)
    assert read_telemetry(tmp_path, TREES / tree).drawn == whole
    assert all(rail.name != "NC" for rail in read_rails(TREES / tree))
    root = Path(shutil.copytree(TREES / tree, tmp_path / "box"))
    last = name.split(" + ")[-1]
    label = next(path for path in root.rglob("*label") if path.read_text().strip() == last)
    label.write_text("VDD_OTHER\n")
    assert telemetry.read_power(root) is None
    label.write_text(f"{last}\n")
    assert telemetry.read_power(root) is not None
    for compatible in root.rglob("compatible"):
        compatible.write_text("maker,board\0")
    assert telemetry.read_power(root) is None


def test_energy_is_power_over_time_read_once_a_second() -> None:
    now, watts, reads = [0.0], [10.0], [0]

    def read() -> Rail:
        reads[0] += 1
        return Rail("VDD_IN", watts[0])

    meter = EnergyMeter(read, lambda: now[0])
    for now[0] in (0.2, 0.5, 0.9):
        meter.look()
    assert (reads[0], meter.joules) == (1, 0.0)
    now[0], watts[0] = 2.0, 20.0
    meter.look()
    assert (meter.rail, meter.joules) == ("VDD_IN", 30.0)
    now[0] = 2.5
    meter.look(at_once=True)
    assert meter.joules == 40.0
    now[0] = 1000.0  # the box slept
    meter.look()
    assert meter.joules == 40.0


def test_a_box_without_a_sensor_has_no_energy_and_is_not_asked_again() -> None:
    answers: Iterator[Rail | None] = iter([None])  # one
    meter = EnergyMeter(lambda: next(answers))
    meter.look(at_once=True)
    assert (meter.rail, meter.joules) == (None, 0.0)
