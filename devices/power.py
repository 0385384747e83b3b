"""Electrical power, read below any root: watts by rail, a Jetson's power mode, mains, batteries and UPS. Missing values are None."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from devices.detect import load_catalogue
from devices.files import compatible, read_int, read_text
from fedcg.values import Value

_CHANNEL = re.compile(r"(?:curr|power)(\d{1,2})_input$")


class Rail(Value):
    """The power measured on one supply rail."""

    name: str
    watts: float


_NOT_CONNECTED = "NC"
_EVERY_S = 1.0
_LONGEST_S = 60.0


def board_power(root: Path, rails: Sequence[Rail]) -> Rail | None:
    """The board's total power: the sum of the rails listed in the catalogue; None if none are listed or one is not measured."""
    board = load_catalogue().identify(compatible(root))
    watts = {rail.name: rail.watts for rail in rails}
    if board is None or not board.power or not watts.keys() >= set(board.power):
        return None
    return Rail(" + ".join(board.power), sum(watts[name] for name in board.power))


class EnergyMeter:
    """Adds up energy between calls of `look`, which reads the power at most once a second.

    Args:
        read: returns the current power; None if not measured.
        clock: monotonic seconds.

    Attributes:
        rail: name of the measured rail or sum of rails; None if nothing can be measured.
        joules: energy so far, without gaps of more than a minute between two readings.
    """

    def __init__(self, read: Callable[[], Rail | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        now = read()
        self.rail = None if now is None else now.name
        self.joules = 0.0
        self._at, self._watts = clock(), 0.0 if now is None else now.watts

    def look(self, *, at_once: bool = False) -> None:
        """Read the power if the last reading is at least a second old, or with `at_once`."""
        now = self._clock()
        if self.rail is None or (now - self._at < _EVERY_S and not at_once):
            return
        read = self._read()
        watts = None if read is None or read.name != self.rail else read.watts
        if watts is not None and now - self._at <= _LONGEST_S:
            self.joules += (self._watts + watts) / 2 * (now - self._at)
        self._at, self._watts = now, self._watts if watts is None else watts


class Supply(Value):
    """The device's power sources.

    Attributes:
        on_mains: whether a mains or USB supply is online; None if the device reports neither supply nor battery.
        battery_percent: charge of the emptiest battery or UPS; None without one.
        is_discharging: whether a battery or UPS is discharging.
    """

    on_mains: bool | None = None
    battery_percent: int | None = None
    is_discharging: bool = False


def read_rails(root: Path) -> tuple[Rail, ...]:
    """All rails of the INA monitors: voltage times current from `ina3221`, or the power directly (`ina2xx`)."""
    rails = []
    for folder in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        chip = read_text(folder, "name") or ""
        if not chip.startswith("ina"):
            continue
        numbers = sorted(int(found[1]) for path in folder.glob("*_input") if (found := _CHANNEL.match(path.name)))
        for number in dict.fromkeys(numbers):
            watts = _watts(folder, number)
            names = (f"in{number}_label", f"power{number}_label", *(("label",) if len(set(numbers)) == 1 else ()))
            label = next((text for name in names if (text := read_text(folder, name))), None)
            if watts is not None and label != _NOT_CONNECTED:
                rails.append(Rail(label or f"{chip} {number}", watts))
    return tuple(rails)


def _watts(monitor: Path, number: int) -> float | None:
    """Watts of a channel. hwmon reports microwatts, or millivolts of the bus and milliamperes."""
    microwatts = read_int(monitor, f"power{number}_input")
    if microwatts is not None:
        return microwatts / 1e6
    millivolts, milliamperes = read_int(monitor, f"in{number}_input"), read_int(monitor, f"curr{number}_input")
    # ina3221 has only bus voltages in1 to in3. curr4 is a sum that would count the rails twice.
    if millivolts is None or milliamperes is None or number > 3:
        return None
    return millivolts * milliamperes / 1e6


def read_supply(root: Path) -> Supply:
    """Mains, USB, batteries and UPS of the device, without those of mice and other peripherals."""
    supplies, batteries = [], []
    for folder in sorted((root / "sys/class/power_supply").glob("*")):
        kind = read_text(folder, "type")
        if read_text(folder, "scope") == "Device":
            continue
        if kind in ("Mains", "USB"):
            supplies.append((kind, read_int(folder, "online")))
        elif kind in ("Battery", "UPS"):
            batteries.append((read_int(folder, "capacity"), read_text(folder, "status") == "Discharging"))
    is_discharging = any(discharging for _, discharging in batteries)
    charges = [percent for percent, _ in batteries if percent is not None]
    return Supply(_on_mains(supplies, batteries, is_discharging), min(charges, default=None), is_discharging)


def _on_mains(
    supplies: list[tuple[str, int | None]], batteries: list[tuple[int | None, bool]], is_discharging: bool
) -> bool | None:
    known = [(kind, online) for kind, online in supplies if online is not None]
    if any(online > 0 for _, online in known):
        return True
    # An unused USB port alone proves nothing: the power plug may not be reported.
    if any(kind == "Mains" for kind, _ in known) or (known and batteries) or is_discharging:
        return False
    return None
