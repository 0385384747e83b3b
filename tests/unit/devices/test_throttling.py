"""Who slows a box down, and how often: causes by software and hardware, and counters as rates."""

from pathlib import Path

import pynvml
import pytest

from devices import telemetry
from devices.nvidia import GpuReadings, nvml_readings
from devices.telemetry import (
    Causes,
    Condition,
    EventRates,
    Sensors,
    read_causes,
    read_counters,
    read_cpu_mhz,
    read_telemetry,
)

TREES = Path(__file__).parents[2] / "golden" / "devices"


@pytest.mark.parametrize(
    ("tree", "software", "hardware"),
    [
        ("jetson-orin-nano-8gb", (), ()),  # its fan runs, which slows nothing down
        ("raspberrypi-3", ("soft temperature limit",), ()),  # 0x80008: bit 3, and bit 19 of the past
        ("raspberrypi-4", (), ("under-voltage", "throttled by the firmware")),  # 0x50005: bits 0 and 2
        ("raspberrypi-5", (), ()),
        ("x86-laptop", ("Processor cools",), ()),  # not the radio, not the offset that the firmware sets
        ("x86-cpu", (), ()),
    ],
)
def test_software_and_hardware_throttling_are_told_apart(
    tree: str, software: tuple[str, ...], hardware: tuple[str, ...]
) -> None:
    assert read_causes(TREES / tree) == Causes(software, hardware)


def test_software_throttling_leaves_the_condition_ok_and_hardware_throttling_does_not(tmp_path: Path) -> None:
    assert read_telemetry(tmp_path, TREES / "raspberrypi-3").condition is Condition.OK
    assert read_telemetry(tmp_path, TREES / "raspberrypi-4").condition is Condition.DEGRADED


def test_a_zone_at_its_passive_trip_point_is_throttled_by_software(tmp_path: Path) -> None:
    read = read_telemetry(tmp_path, TREES / "jetson-xavier-nx")
    assert read.causes == Causes(("CPU-therm is at its passive trip point",), ())


def test_clocks_and_counters_are_read_where_the_box_reports_them() -> None:
    orin, laptop = TREES / "jetson-orin-nano-8gb", TREES / "x86-laptop"
    assert read_cpu_mhz(orin) == (1344, 1728)
    assert read_cpu_mhz(laptop) is None
    assert read_counters(orin) == {"over-current oc1": 0, "over-current oc3": 41}
    assert read_counters(laptop) == {"package throttle": 1207}


def test_a_cumulative_counter_becomes_events_per_minute_of_the_last_minute() -> None:
    rates = EventRates()
    assert rates.per_minute({"oc1": 41}, 100.0) == {"oc1": None}
    assert rates.per_minute({"oc1": 44}, 110.0) == {"oc1": 18.0}  # 3 in 10 s
    assert rates.per_minute({"oc1": 44}, 130.0) == {"oc1": 6.0}  # 3 in 30 s
    assert rates.per_minute({"oc1": 44}, 170.0) == {"oc1": 0.0}  # the reading at 110 s begins the last minute
    assert rates.per_minute({"oc1": 44, "oc2": 7}, 171.0) == {"oc1": 0.0, "oc2": None}


def test_a_counter_that_goes_backwards_is_unavailable_and_never_negative() -> None:
    rates = EventRates()
    rates.per_minute({"oc1": 41}, 0.0)
    assert rates.per_minute({"oc1": 2}, 10.0) == {"oc1": None}
    assert rates.per_minute({"oc1": 3}, 20.0) == {"oc1": 6.0}
    assert rates.per_minute({"oc1": 3}, 20.0) == {"oc1": None}  # no time has passed


def test_new_over_current_events_count_as_hardware_throttling_and_old_ones_do_not(tmp_path: Path) -> None:
    counter = tmp_path / "sys/class/hwmon/hwmon0/oc3_event_cnt"
    counter.parent.mkdir(parents=True)
    counter.write_text("41\n")
    now = 0.0
    sensors = Sensors(tmp_path, tmp_path, lambda: now)
    sensors.read()
    now = 10.0
    assert sensors.read().hardware_throttling == ()
    counter.write_text("42\n")
    now = 20.0
    read = sensors.read()
    assert read.hardware_throttling == ("over-current oc3: 3.0 events a minute",)
    assert read.condition is Condition.DEGRADED


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
    def unsupported(*_arguments: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    _gpu(monkeypatch, 0)
    for name in ("Temperature", "TemperatureThreshold", "PowerUsage", "CurrentClocksThrottleReasons"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", unsupported)
    assert nvml_readings() == GpuReadings(None, None, None, (), ())
