"""The current condition of a box: temperatures, power, throttling, memory, disk, links, and the one word that may be reported about it.

Reads sysfs and procfs below any root; for the box itself NVML too. A reading that a machine does not report is None, never zero, and
does not count against it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from devices.files import read_int, read_text
from devices.limits import free_memory
from devices.nvidia import GpuReadings, nvml_readings
from devices.power import Rail, Supply, board_power, jetson_stats, read_power_mode, read_rails, read_supply
from devices.throttling import OVER_CURRENT, Causes, EventRates, read_causes, read_counters, read_cpu_mhz

HOT_BELOW_CRITICAL_C = 10.0
"""A zone this close to its critical trip point is about to throttle or to switch the box off."""
HOT_WITHOUT_TRIP_C = 90.0
"""For zones that name neither a hot nor a critical trip point."""
LOW_BATTERY_PERCENT = 20
LOW_DISK_BYTES = 512 * 1024 * 1024
"""A round of the largest shipped network keeps under 300 MB of generations and artifacts."""
LIVE_ROOT = Path("/")


class Condition(str, Enum):
    """One word for the state of a box, worst first where several hold."""

    LOW_DISK = "low_disk"
    HOT = "hot"
    LOW_POWER = "low_power"
    DEGRADED = "degraded"
    OK = "ok"


@dataclass(frozen=True)
class Zone:
    """A thermal zone with its own trip points, in °C; None where it has none of a kind.

    Attributes:
        passive_c: software begins to lower clocks.
        hot_c: the board's warning; of a GPU, where the hardware begins to slow it down.
        critical_c: the board switches itself off.
    """

    name: str
    temperature_c: float
    passive_c: float | None = None
    hot_c: float | None = None
    critical_c: float | None = None

    @property
    def limit_c(self) -> float:
        """The temperature from which it counts as hot."""
        own = [] if self.hot_c is None else [self.hot_c]
        own += [] if self.critical_c is None else [self.critical_c - HOT_BELOW_CRITICAL_C]
        return min(own, default=HOT_WITHOUT_TRIP_C)


@dataclass(frozen=True)
class Link:
    """A network interface.

    Attributes:
        state: the kernel's word: "up", "down", "unknown".
        mbit_s: its speed; None where the driver reports none, as for radio.
        is_default: whether the default route goes over it.
    """

    name: str
    state: str | None
    mbit_s: int | None
    is_default: bool


@dataclass(frozen=True)
class Telemetry:
    """Live readings.

    Attributes:
        zones: thermal zones, and the GPU where NVML reports it.
        rails: power by rail.
        drawn: by the whole board, else by the GPU alone, with what it is read from; None where neither is known.
        power_mode: of a Jetson.
        supply: mains and battery.
        causes: what slows the box down now.
        cpu_mhz: (clock now, highest clock).
        counters: events since the box started.
        event_rates: of the counters, per minute, over the last minute; None where two readings are missing.
        free_disk_bytes: free for ordinary users where the private store lies.
        free_memory_bytes: that a process could take without swapping, within the limits of its control group.
    """

    zones: tuple[Zone, ...] = ()
    rails: tuple[Rail, ...] = ()
    drawn: Rail | None = None
    power_mode: str | None = None
    supply: Supply = field(default_factory=Supply)
    causes: Causes = field(default_factory=Causes)
    cpu_mhz: tuple[int, int] | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    event_rates: Mapping[str, float | None] = field(default_factory=dict)
    free_disk_bytes: int | None = None
    free_memory_bytes: int | None = None
    links: tuple[Link, ...] = ()

    @property
    def hottest_c(self) -> float | None:
        """The highest temperature of all zones."""
        return max((zone.temperature_c for zone in self.zones), default=None)

    @property
    def is_hot(self) -> bool | None:
        """Whether a zone is above its own limit; None when no zone can be read."""
        return any(zone.temperature_c >= zone.limit_c for zone in self.zones) if self.zones else None

    @property
    def hardware_throttling(self) -> tuple[str, ...]:
        """Why hardware slows the box down, over-current events of the last minute included."""
        rates = {name: rate for name, rate in self.event_rates.items() if rate and name.startswith(OVER_CURRENT)}
        return (*self.causes.hardware, *(f"{name}: {rate:.1f} events a minute" for name, rate in rates.items()))

    @property
    def condition(self) -> Condition:
        """The worst condition that the readings show."""
        if self.free_disk_bytes is not None and self.free_disk_bytes < LOW_DISK_BYTES:
            return Condition.LOW_DISK
        if self.is_hot:
            return Condition.HOT
        percent = self.supply.battery_percent
        if self.supply.is_discharging and percent is not None and percent < LOW_BATTERY_PERCENT:
            return Condition.LOW_POWER
        return Condition.DEGRADED if self.hardware_throttling else Condition.OK


class Sensors:
    """Reads a box again and again, and knows the rates of its counters.

    Args:
        disk: any directory on the disk that must not fill up.
        root: the file system to read, "/" or a recorded tree.
        clock: monotonic seconds.
        asks_services: as for `read_telemetry`.
    """

    def __init__(
        self,
        disk: Path,
        root: Path = LIVE_ROOT,
        clock: Callable[[], float] = time.monotonic,
        *,
        asks_services: bool = False,
    ) -> None:
        self._disk = disk
        self._root = root
        self._clock = clock
        self._asks_services = asks_services
        self._rates = EventRates()

    def read(self) -> Telemetry:
        """The readings now."""
        read = read_telemetry(self._disk, self._root, asks_services=self._asks_services)
        return replace(read, event_rates=self._rates.per_minute(read.counters, self._clock()))


def read_telemetry(disk: Path, root: Path = LIVE_ROOT, *, asks_services: bool = False) -> Telemetry:
    """Read the sensors now; without rates, which take two readings.

    Args:
        disk: any directory on the disk that must not fill up.
        root: the file system to read, "/" or a recorded tree.
        asks_services: on this box, ask the service of jetson-stats where sysfs shows no power; it may take seconds to answer.
    """
    zones = [_zone(root, folder.name) for folder in sorted((root / "sys/class/thermal").glob("thermal_zone*"))]
    rails, mode, causes, gpu = read_rails(root), read_power_mode(root), read_causes(root), None
    found = [zone for zone in zones if zone is not None]
    if root == LIVE_ROOT:
        if asks_services and not rails and mode is None:
            rails, mode = jetson_stats(root)
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
        power_mode=mode,
        supply=read_supply(root),
        causes=Causes(software, causes.hardware),
        cpu_mhz=read_cpu_mhz(root),
        counters=read_counters(root),
        free_disk_bytes=_free_bytes(disk),
        free_memory_bytes=free_memory(root),
        links=_links(root),
    )


def read_power(root: Path = LIVE_ROOT) -> Rail | None:
    """What the box draws now: the whole board, else the GPU alone where NVML reports that; None where neither is measured."""
    return _drawn(root, read_rails(root), nvml_readings() if root == LIVE_ROOT else None)


def _drawn(root: Path, rails: tuple[Rail, ...], gpu: GpuReadings | None) -> Rail | None:
    return board_power(root, rails) or next(iter(_gpu_rail(gpu)), None)


def _gpu_rail(gpu: GpuReadings | None) -> tuple[Rail, ...]:
    return () if gpu is None or gpu.watts is None else (Rail("GPU", gpu.watts),)


def _zone(root: Path, name: str) -> Zone | None:
    """A thermal zone; None when it does not report its temperature."""
    folder = f"sys/class/thermal/{name}"
    millidegrees = read_int(root, f"{folder}/temp")
    if millidegrees is None:
        return None
    trips: dict[str, float] = {}
    for trip in sorted((root / folder).glob("trip_point_*_type")):
        kind = read_text(root, f"{folder}/{trip.name}")
        at = read_int(root, f"{folder}/{trip.name.replace('_type', '_temp')}")
        if kind is not None and at is not None and at > 0:  # drivers write 0 or less for a trip that is off
            trips[kind] = min(at / 1000, trips.get(kind, float("inf")))
    kind = read_text(root, f"{folder}/type") or name
    return Zone(kind, millidegrees / 1000, trips.get("passive"), trips.get("hot"), trips.get("critical"))


def _links(root: Path) -> tuple[Link, ...]:
    """Every interface but the loopback."""
    lines = [line.split() for line in (read_text(root, "proc/net/route") or "").splitlines()[1:]]
    default = {fields[0] for fields in lines if len(fields) > 1 and fields[1] == "00000000"}
    links = []
    for folder in sorted((root / "sys/class/net").glob("*")):
        if folder.name == "lo" or not folder.is_dir():
            continue
        speed = read_int(root, f"sys/class/net/{folder.name}/speed")
        state = read_text(root, f"sys/class/net/{folder.name}/operstate")
        links.append(Link(folder.name, state, speed if speed and speed > 0 else None, folder.name in default))
    return tuple(links)


def _free_bytes(disk: Path) -> int | None:
    try:
        status = os.statvfs(disk)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
