"""The current condition of a box: temperatures, power, free disk, and the one word that may be reported about it.

Reads sysfs below any root. A reading that a machine does not report is None, never zero, and does not count against it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from devices.files import read_int, read_text

HOT_BELOW_CRITICAL_C = (
    10.0  # a zone this close to its critical trip point is about to throttle or to switch the box off
)
HOT_WITHOUT_TRIP_C = 90.0  # for zones that name no critical trip point
LOW_BATTERY_PERCENT = 20
LOW_DISK_BYTES = (
    512 * 1024 * 1024
)  # a round of the largest shipped network keeps under 300 MB of generations and artifacts


class Condition(str, Enum):
    """One word for the state of a box, worst first where several hold."""

    LOW_DISK = "low_disk"
    HOT = "hot"
    LOW_POWER = "low_power"
    OK = "ok"


@dataclass(frozen=True)
class Telemetry:
    """Live readings.

    Attributes:
        hottest_c: the highest temperature of all thermal zones.
        is_hot: whether a zone is close to its own critical trip point; None when no zone can be read.
        battery_percent: charge of the emptiest battery; None without one.
        is_discharging: whether a battery is discharging.
        free_disk_bytes: free for ordinary users where the private store lies; None when it can't be read.
    """

    hottest_c: float | None
    is_hot: bool | None
    battery_percent: int | None
    is_discharging: bool
    free_disk_bytes: int | None

    @property
    def condition(self) -> Condition:
        """The worst condition that the readings show."""
        if self.free_disk_bytes is not None and self.free_disk_bytes < LOW_DISK_BYTES:
            return Condition.LOW_DISK
        if self.is_hot:
            return Condition.HOT
        if self.is_discharging and self.battery_percent is not None and self.battery_percent < LOW_BATTERY_PERCENT:
            return Condition.LOW_POWER
        return Condition.OK


def read_telemetry(disk: Path, root: Path = Path("/")) -> Telemetry:
    """Read the sensors now.

    Args:
        disk: any directory on the disk that must not fill up.
        root: the file system to read, "/" or a recorded tree.
    """
    zones = [_zone(root, folder.name) for folder in sorted((root / "sys/class/thermal").glob("thermal_zone*"))]
    read = [zone for zone in zones if zone is not None]
    batteries = _batteries(root)
    return Telemetry(
        hottest_c=max((temperature_c for temperature_c, _ in read), default=None),
        is_hot=any(temperature_c >= limit_c for temperature_c, limit_c in read) if read else None,
        battery_percent=min((percent for percent, _ in batteries), default=None),
        is_discharging=any(discharging for _, discharging in batteries),
        free_disk_bytes=_free_bytes(disk),
    )


def _zone(root: Path, name: str) -> tuple[float, float] | None:
    """(temperature, the temperature from which it counts as hot) of a thermal zone; None when it does not report it."""
    folder = f"sys/class/thermal/{name}"
    millidegrees = read_int(root, f"{folder}/temp")
    if millidegrees is None:
        return None
    for trip in sorted((root / folder).glob("trip_point_*_type")):
        if read_text(root, f"{folder}/{trip.name}") == "critical":
            critical = read_int(root, f"{folder}/{trip.name.replace('_type', '_temp')}")
            if critical is not None and critical > 0:
                return millidegrees / 1000, critical / 1000 - HOT_BELOW_CRITICAL_C
    return millidegrees / 1000, HOT_WITHOUT_TRIP_C


def _batteries(root: Path) -> list[tuple[int, bool]]:
    """(charge in percent, is discharging) of every battery."""
    found = []
    for folder in sorted((root / "sys/class/power_supply").glob("*")):
        name = f"sys/class/power_supply/{folder.name}"
        percent = read_int(root, f"{name}/capacity")
        if read_text(root, f"{name}/type") == "Battery" and percent is not None:
            found.append((percent, read_text(root, f"{name}/status") == "Discharging"))
    return found


def _free_bytes(disk: Path) -> int | None:
    try:
        status = os.statvfs(disk)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
