"""The current condition of a device: temperatures, power, throttling, memory, disk, links, and a one-word summary for reports.

Reads sysfs and procfs below any root, and NVML for the live machine. A reading that a machine does not report is None, never zero, and does not
prevent training.

Also reads why the hardware is throttled, by software (training continues) or by hardware (training pauses), and event rates. Software lowers
clocks to keep a power mode or a passive trip point, as designed. Hardware lowers them because of over-current, under-voltage or excessive
temperature.
"""

import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from devices.files import LIVE_ROOT, free_memory, read_int, read_text
from devices.nvidia import GpuReadings, nvml_readings
from devices.power import Rail, Supply, board_power, read_rails, read_supply
from fedcg.values import Value
from fedcg.wire.parts import Health

OVER_CURRENT = "over-current"
"""Prefix of the names of Jetson's over-current counters."""
RATE_WINDOW_S = 60.0
"""Time window of a rate. Events come in bursts, and a pause must outlast them."""
# Raspberry Pi firmware, `vcgencmd get_throttled`: bits for the current state; bits 16 to 19 are for the past.
_PI_HARDWARE = {0: "under-voltage", 2: "throttled by the firmware"}
_PI_SOFTWARE = {1: "CPU frequency capped by the firmware", 3: "soft temperature limit"}
# Fans, displays and radios are cooling devices too, but don't affect clocks.
_CLOCKS = re.compile(r"processor|cpufreq|cpu|gpu|devfreq|throttle|powerclamp", re.IGNORECASE)


class Causes(Value):
    """Current reasons for lowered clocks, by origin; empty if none are reported."""

    software: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()


def read_causes(root: Path) -> Causes:
    """The causes reported in sysfs."""
    software = []
    for folder in sorted((root / "sys/class/thermal").glob("cooling_device*")):
        kind = read_text(folder, "type") or ""
        if _CLOCKS.search(kind) and (read_int(folder, "cur_state") or 0) > 0:
            software.append(f"{kind} cools")
    bits = _pi_bits(root)
    software += [cause for bit, cause in _PI_SOFTWARE.items() if bits >> bit & 1]
    return Causes(
        tuple(dict.fromkeys(software)), tuple(cause for bit, cause in _PI_HARDWARE.items() if bits >> bit & 1)
    )


def _pi_bits(root: Path) -> int:
    for path in sorted((root / "sys/devices/platform").glob("soc*/*firmware/get_throttled")):
        text = read_text(path.parent, path.name) or ""
        if re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text):
            return int(text, 16)
    return 0


def read_cpu_mhz(root: Path) -> tuple[int, int] | None:
    """(current clock, maximum clock) in MHz of the fastest group of CPUs; None if not reported."""
    read = []
    for folder in sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*")):
        now, most = read_int(folder, "scaling_cur_freq"), read_int(folder, "cpuinfo_max_freq")
        if now is not None and most is not None:
            read.append((now // 1000, most // 1000))
    return max(read, key=lambda pair: pair[1], default=None)


def read_counters(root: Path) -> dict[str, int]:
    """Events since boot: Jetson's over-current alarms, and thermal throttling of x86 packages."""
    found = {}
    for path in sorted((root / "sys/class/hwmon").glob("hwmon*/oc*_event_cnt")):
        count = read_int(path.parent, path.name)
        if count is not None:
            found[f"{OVER_CURRENT} {path.name.removesuffix('_event_cnt')}"] = count
    folders = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle")
    counts = [count for one in folders if (count := read_int(one, "package_throttle_count")) is not None]
    return found | ({"package throttle": max(counts)} if counts else {})


HOT_BELOW_CRITICAL_C = 10.0
"""A zone this close to its critical trip point is about to throttle or shut down the device."""
HOT_WITHOUT_TRIP_C = 90.0
"""For zones without a hot or critical trip point."""
LOW_BATTERY_PERCENT = 20
LOW_DISK_BYTES = 512 * 1024 * 1024
"""A round of the largest shipped network stores less than 300 MB of generations and artifacts."""


class Zone(Value):
    """A thermal zone with its trip points in °C; None for missing kinds.

    Attributes:
        passive_c: software starts to lower clocks.
        hot_c: the board's warning; for a GPU, the hardware starts to lower clocks.
        critical_c: the board shuts down.
    """

    name: str
    temperature_c: float
    passive_c: float | None = None
    hot_c: float | None = None
    critical_c: float | None = None

    @property
    def limit_c(self) -> float:
        """The temperature at which the zone counts as hot."""
        own = [] if self.hot_c is None else [self.hot_c]
        own += [] if self.critical_c is None else [self.critical_c - HOT_BELOW_CRITICAL_C]
        return min(own, default=HOT_WITHOUT_TRIP_C)


class Link(Value):
    """A network interface.

    Attributes:
        state: from the kernel: "up", "down", "unknown".
        mbit_s: its speed; None if not reported, as for radio.
        is_default: whether the default route uses it.
    """

    name: str
    state: str | None
    mbit_s: int | None
    is_default: bool


class Telemetry(Value):
    """Live readings.

    Attributes:
        zones: thermal zones, and the GPU if NVML reports it.
        rails: power by rail.
        drawn: total power of the board, or else of the GPU, with the source's name; None if neither is known.
        supply: mains and battery.
        causes: current reasons for lowered clocks.
        cpu_mhz: (current clock, maximum clock).
        counters: events since boot.
        event_rates: of the counters, per minute, over the last minute; None without two readings.
        free_disk_bytes: available to ordinary users on the private store's disk.
        free_memory_bytes: that a process can allocate without swapping, within its control group's limits.
    """

    zones: tuple[Zone, ...] = ()
    rails: tuple[Rail, ...] = ()
    drawn: Rail | None = None
    supply: Supply = field(default_factory=Supply)
    causes: Causes = field(default_factory=Causes)
    cpu_mhz: tuple[int, int] | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    event_rates: Mapping[str, float | None] = field(default_factory=dict)
    free_disk_bytes: int | None = None
    free_memory_bytes: int | None = None
    links: tuple[Link, ...] = ()

    @property
    def is_hot(self) -> bool | None:
        """Whether a zone is above its limit; None if no zone can be read."""
        return any(zone.temperature_c >= zone.limit_c for zone in self.zones) if self.zones else None

    @property
    def hardware_throttling(self) -> tuple[str, ...]:
        """Why hardware lowers clocks, including over-current events of the last minute."""
        rates = {name: rate for name, rate in self.event_rates.items() if rate and name.startswith(OVER_CURRENT)}
        return (*self.causes.hardware, *(f"{name}: {rate:.1f} events a minute" for name, rate in rates.items()))

    @property
    def condition(self) -> Health:
        """The most severe condition in the readings."""
        if self.free_disk_bytes is not None and self.free_disk_bytes < LOW_DISK_BYTES:
            return Health.LOW_DISK
        if self.is_hot:
            return Health.HOT
        percent = self.supply.battery_percent
        if self.supply.is_discharging and percent is not None and percent < LOW_BATTERY_PERCENT:
            return Health.LOW_POWER
        return Health.DEGRADED if self.hardware_throttling else Health.OK


@dataclass(eq=False)
class Sensors:
    """Reads the sensors repeatedly, and computes the rates of counters.

    Args:
        disk: any directory on the disk to check for free space.
        root: the file system to read, "/" or a recorded tree.
        clock: monotonic seconds.
    """

    disk: Path
    root: Path = LIVE_ROOT
    clock: Callable[[], float] = time.monotonic

    _seen: dict[str, deque[tuple[float, int]]] = field(default_factory=dict, init=False)

    def read(self) -> Telemetry:
        """The current readings."""
        read = read_telemetry(self.disk, self.root)
        return replace(read, event_rates=self.per_minute(read.counters, self.clock()))

    def per_minute(self, counters: Mapping[str, int], now: float) -> dict[str, float | None]:
        """The rates of cumulative counters after a reading, over the last minute.

        Args:
            counters: cumulative counts by name.
            now: monotonic seconds.

        Returns:
            Events per minute; None for a counter that was read only once, or that decreased (the driver was restarted).
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


def read_telemetry(disk: Path, root: Path = LIVE_ROOT) -> Telemetry:
    """Read the sensors once, without rates, which need two readings.

    Args:
        disk: any directory on the disk to check for free space.
        root: the file system to read, "/" or a recorded tree.
    """
    folders = sorted((root / "sys/class/thermal").glob("thermal_zone*"))
    rails, causes, gpu = read_rails(root), read_causes(root), None
    found = [zone for zone in map(_zone, folders) if zone is not None]
    if root == LIVE_ROOT:
        gpu = nvml_readings()
        if gpu is not None:
            causes = Causes(causes.software + gpu.software, causes.hardware + gpu.hardware)
            found += [] if gpu.temperature_c is None else [Zone("GPU", gpu.temperature_c, hot_c=gpu.slowdown_c)]
    passive = [zone.name for zone in found if zone.passive_c is not None and zone.temperature_c >= zone.passive_c]
    software = causes.software + tuple(f"{name} is at its passive trip point" for name in passive)
    return Telemetry(
        zones=tuple(found),
        rails=rails + _gpu_rail(gpu),
        drawn=_drawn(root, rails, gpu),
        supply=read_supply(root),
        causes=Causes(software, causes.hardware),
        cpu_mhz=read_cpu_mhz(root),
        counters=read_counters(root),
        free_disk_bytes=_free_bytes(disk),
        free_memory_bytes=free_memory(root),
        links=_links(root),
    )


def read_power(root: Path = LIVE_ROOT) -> Rail | None:
    """The current power: of the whole board, or else of the GPU if NVML reports it; None if neither is measured."""
    return _drawn(root, read_rails(root), nvml_readings() if root == LIVE_ROOT else None)


def _drawn(root: Path, rails: tuple[Rail, ...], gpu: GpuReadings | None) -> Rail | None:
    return board_power(root, rails) or next(iter(_gpu_rail(gpu)), None)


def _gpu_rail(gpu: GpuReadings | None) -> tuple[Rail, ...]:
    return () if gpu is None or gpu.watts is None else (Rail("GPU", gpu.watts),)


def _zone(folder: Path) -> Zone | None:
    """A thermal zone; None if it does not report a temperature."""
    millidegrees = read_int(folder, "temp")
    if millidegrees is None:
        return None
    trips: dict[str, float] = {}
    for trip in sorted(folder.glob("trip_point_*_type")):
        kind, at = read_text(folder, trip.name), read_int(folder, trip.name.replace("_type", "_temp"))
        if kind is not None and at is not None and at > 0:  # drivers report 0 or less for a disabled trip point
            trips[kind] = min(at / 1000, trips.get(kind, float("inf")))
    kind = read_text(folder, "type") or folder.name
    return Zone(kind, millidegrees / 1000, trips.get("passive"), trips.get("hot"), trips.get("critical"))


def _links(root: Path) -> tuple[Link, ...]:
    """All interfaces except loopback."""
    lines = [line.split() for line in (read_text(root, "proc/net/route") or "").splitlines()[1:]]
    default = {fields[0] for fields in lines if len(fields) > 1 and fields[1] == "00000000"}
    links = []
    for folder in sorted((root / "sys/class/net").glob("*")):
        if folder.name == "lo" or not folder.is_dir():
            continue
        speed, state = read_int(folder, "speed"), read_text(folder, "operstate")
        links.append(Link(folder.name, state, speed if speed and speed > 0 else None, folder.name in default))
    return tuple(links)


def _free_bytes(disk: Path) -> int | None:
    try:
        return shutil.disk_usage(disk).free
    except OSError:
        return None
