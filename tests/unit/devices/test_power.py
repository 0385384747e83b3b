"""Rails, power mode, mains and batteries, from file trees of boards and small ones."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from devices import telemetry
from devices.nvidia import GpuReadings
from devices.power import EnergyMeter, Rail, Supply, jetson_stats, read_power_mode, read_rails, read_supply
from devices.telemetry import read_power, read_telemetry

TREES = Path(__file__).parents[2] / "golden" / "devices"
ORIN = TREES / "jetson-orin-nano-8gb"


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


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


def test_the_power_mode_is_named_by_nvpmodels_configuration_else_by_its_number(tmp_path: Path) -> None:
    assert read_power_mode(ORIN) == "25W"
    assert read_power_mode(TREES / "jetson-xavier-nx") == "8"
    assert read_power_mode(tmp_path) is None


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


def test_the_battery_of_a_mouse_is_not_that_of_the_box() -> None:
    assert read_supply(TREES / "x86-laptop") == Supply(on_mains=False, battery_percent=64, is_discharging=True)


class _RefusedError(Exception):
    """The error of jetson-stats without its service."""


@contextmanager
def _board() -> Iterator[SimpleNamespace]:
    rails = {"VDD_SOC": {"power": 1400, "volt": 5000}}
    yield SimpleNamespace(power={"rail": rails, "tot": {"power": 5600, "name": "VDD_IN"}}, nvpmodel="15W")


def test_jetson_stats_completes_a_jetson_and_without_its_service_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise _RefusedError

    assert jetson_stats(ORIN) == ((), None)  # not installed
    monkeypatch.setitem(sys.modules, "jtop", SimpleNamespace(jtop=_board, JtopException=_RefusedError))
    rails, mode = jetson_stats(ORIN)
    assert ([(rail.name, rail.watts) for rail in rails], mode) == ([("VDD_SOC", 1.4), ("VDD_IN", 5.6)], "15W")
    assert jetson_stats(TREES / "raspberrypi-5") == ((), None)
    monkeypatch.setitem(sys.modules, "jtop", SimpleNamespace(jtop=refuse, JtopException=_RefusedError))
    assert jetson_stats(ORIN) == ((), None)


def test_only_commands_ask_the_service_since_it_may_take_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "box"
    (root / "proc/device-tree").mkdir(parents=True)
    (root / "proc/device-tree/compatible").write_bytes((ORIN / "proc/device-tree/compatible").read_bytes())
    monkeypatch.setattr(telemetry, "LIVE_ROOT", root)
    monkeypatch.setitem(sys.modules, "jtop", SimpleNamespace(jtop=_board, JtopException=_RefusedError))
    assert telemetry.Sensors(tmp_path, root).read().power_mode is None
    assert telemetry.Sensors(tmp_path, root, asks_services=True).read().power_mode == "15W"


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
def test_what_a_board_draws_is_the_sum_that_the_catalogue_names_for_it(tree: str, tmp_path: Path) -> None:
    name, watts = BOARDS[tree]
    whole = read_power(TREES / tree)
    assert whole is not None
    assert whole.name == name
    assert whole.watts == pytest.approx(watts)
    assert read_telemetry(tmp_path, TREES / tree).drawn == whole
    assert all(rail.name != "NC" for rail in read_rails(TREES / tree))


@pytest.mark.parametrize("tree", BOARDS)
def test_without_one_of_its_rails_and_on_an_unknown_board_the_total_is_unknown_and_not_guessed(
    tree: str, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(TREES / tree, tmp_path / "box"))
    last = BOARDS[tree][0].split(" + ")[-1]
    label = next(path for path in root.rglob("*label") if path.read_text().strip() == last)
    label.write_text("VDD_OTHER\n")
    assert read_power(root) is None
    label.write_text(f"{last}\n")
    assert read_power(root) is not None
    for compatible in root.rglob("compatible"):
        compatible.write_text("maker,board\0")
    assert read_power(root) is None


def test_where_nvml_reports_a_cards_power_that_stands_for_the_box_and_no_other_monitor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monitor = "sys/class/hwmon/hwmon0"
    root = _write(tmp_path, {f"{monitor}/name": "ina226", f"{monitor}/power1_input": "4000000"})
    monkeypatch.setattr(telemetry, "LIVE_ROOT", root)
    monkeypatch.setattr(telemetry, "nvml_readings", lambda: GpuReadings(None, None, 60.0, (), ()))
    assert read_power(root) == Rail("GPU", 60.0)
    monkeypatch.setattr(telemetry, "nvml_readings", lambda: None)
    assert read_power(root) is None


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
