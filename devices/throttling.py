"""Why the box slows itself down, below any root: by software (training carries on), or by hardware (training pauses); event rates.

Software lowers clocks to keep a power mode or a passive trip point, as its maker planned. Hardware does it against over-current, an
under-voltage or a temperature that is already too high.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from devices.files import read_int, read_text

OVER_CURRENT = "over-current"
"""How the names of Jetson's over-current counters begin."""
RATE_WINDOW_S = 60.0
"""The time that a rate is of; events come in bursts, and a pause must outlast them."""
# Raspberry Pi firmware, `vcgencmd get_throttled`: bits of the present; bits 16 to 19 are of the past.
_PI_HARDWARE = {0: "under-voltage", 2: "throttled by the firmware"}
_PI_SOFTWARE = {1: "CPU frequency capped by the firmware", 3: "soft temperature limit"}
# Fans, displays and radios are cooling devices too; their state says nothing about clocks.
_CLOCKS = re.compile(r"processor|cpufreq|cpu|gpu|devfreq|throttle|powerclamp", re.IGNORECASE)


@dataclass(frozen=True)
class Causes:
    """What slows the box down now, by who does it; empty where nothing is reported."""

    software: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()


def read_causes(root: Path) -> Causes:
    """The causes that sysfs reports."""
    software = []
    for folder in sorted((root / "sys/class/thermal").glob("cooling_device*")):
        name = f"sys/class/thermal/{folder.name}"
        kind = read_text(root, f"{name}/type") or ""
        if _CLOCKS.search(kind) and (read_int(root, f"{name}/cur_state") or 0) > 0:
            software.append(f"{kind} cools")
    bits = _pi_bits(root)
    software += [cause for bit, cause in _PI_SOFTWARE.items() if bits >> bit & 1]
    return Causes(
        tuple(dict.fromkeys(software)), tuple(cause for bit, cause in _PI_HARDWARE.items() if bits >> bit & 1)
    )


def _pi_bits(root: Path) -> int:
    for path in sorted((root / "sys/devices/platform").glob("soc*/*firmware/get_throttled")):
        text = read_text(root, str(path.relative_to(root))) or ""
        if re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text):
            return int(text, 16)
    return 0


def read_cpu_mhz(root: Path) -> tuple[int, int] | None:
    """(clock now, highest clock) in MHz of the fastest group of CPUs; None when it is not reported."""
    read = []
    for folder in sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*")):
        name = f"sys/devices/system/cpu/cpufreq/{folder.name}"
        now, most = read_int(root, f"{name}/scaling_cur_freq"), read_int(root, f"{name}/cpuinfo_max_freq")
        if now is not None and most is not None:
            read.append((now // 1000, most // 1000))
    return max(read, key=lambda pair: pair[1], default=None)


def read_counters(root: Path) -> dict[str, int]:
    """Events since the box started: Jetson's over-current alarms, and thermal throttling of x86 packages."""
    found = {}
    for folder in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        for path in sorted(folder.glob("oc*_event_cnt")):
            count = read_int(root, f"sys/class/hwmon/{folder.name}/{path.name}")
            if count is not None:
                found[f"{OVER_CURRENT} {path.name.removesuffix('_event_cnt')}"] = count
    counts = [
        count
        for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/package_throttle_count")
        if (count := read_int(root, str(path.relative_to(root)))) is not None
    ]
    return found | ({"package throttle": max(counts)} if counts else {})


class EventRates:
    """Turns cumulative counters into events per minute, over the last minute."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def per_minute(self, counters: Mapping[str, int], now: float) -> dict[str, float | None]:
        """The rates after a reading.

        Args:
            counters: cumulative counts by name.
            now: monotonic seconds.

        Returns:
            Events per minute; None for a counter that was read once only, or that went backwards (a driver started anew).
        """
        rates: dict[str, float | None] = {}
        for name, count in counters.items():
            seen = self._seen.setdefault(name, deque())
            if seen and (count < seen[-1][1] or now <= seen[-1][0]):
                seen.clear()
            seen.append((now, count))
            while len(seen) > 2 and seen[1][0] <= now - RATE_WINDOW_S:
                seen.popleft()
            first_at, first = seen[0]
            rates[name] = None if len(seen) == 1 else (count - first) * 60 / (now - first_at)
        return rates
