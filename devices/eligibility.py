"""Whether a device may train now, from its readings and its owner's settings. Only `is_held` reads files, namely the owner's."""

import re
from collections.abc import Sequence
from datetime import datetime, time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from devices.telemetry import LOW_DISK_BYTES, Telemetry
from fedcg.config_file import Settings
from fedcg.values import Value
from fedcg.wire.messages.schemas import DeclineReason

COOLS_BY_C = 5.0
"""A device that was too hot resumes when it is this much cooler."""
MB = 1_000_000
_SPAN = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


def _check_span(span: str) -> str:
    if not _SPAN.fullmatch(span):
        raise ValueError(f'{span!r} is not a span of hours: use "22:00-06:00"')
    if len(set(span.split("-"))) < 2:
        raise ValueError(f'{span!r} has equal start and end: use "22:00-06:00", or "00:00-23:59" for the whole day')
    return span


class EligibilitySettings(Settings):
    """When this device may train. Without settings, only heat, hardware throttling and a full disk prevent training.

    Attributes:
        max_temperature_c: train only while every zone is below this temperature, in °C. Default: each zone's own limit, which always holds.
        min_free_memory_mb: train only with this much free memory, in MB.
        min_free_disk_mb: train only with this much free disk space at the store, in MB.
        on_mains: train only on mains power.
        quiet_hours: local hours without training, such as `["22:00-06:00"]`; a span may cross midnight.
        unmetered: don't train while the default route uses one of `metered_interfaces`.
        metered_interfaces: names of network interfaces, or patterns such as `wwan*`.
        stop_file: don't train while this file exists.
    """

    max_temperature_c: Annotated[float, Field(ge=20, le=120)] | None = None
    min_free_memory_mb: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    min_free_disk_mb: Annotated[int, Field(ge=0, le=1 << 24)] = LOW_DISK_BYTES // MB
    on_mains: bool = False
    quiet_hours: tuple[Annotated[str, AfterValidator(_check_span)], ...] = ()
    unmetered: bool = False
    metered_interfaces: tuple[str, ...] = ("wwan*", "ppp*")
    stop_file: Path | None = None


class Reason(Value):
    """Why a device may not train now: a code, and a sentence for its owner that stays on the device."""

    obstacle: DeclineReason
    detail: str

    @property
    def pauses(self) -> bool:
        """Whether it interrupts a running round. The other reasons are only checked before a round."""
        return self.obstacle.value not in ("low_disk", "low_memory", "metered", "no_time")


def obstacles(
    readings: Telemetry, settings: EligibilitySettings, now: datetime, *, before: DeclineReason | None = None
) -> tuple[Reason, ...]:
    """All reasons why the device may not train now, most important first.

    Args:
        readings: of its sensors; a reading that is None does not prevent training.
        settings: of its owner.
        now: local time.
        before: the reason at the last reading. After heat the device must cool by 5 °C.
    """
    is_on_battery = settings.on_mains and readings.supply.on_mains is False
    found = {
        DeclineReason.RESERVED: is_held(settings),
        DeclineReason.HOT: _heat(readings, settings, COOLS_BY_C if before is DeclineReason.HOT else 0.0),
        DeclineReason.THROTTLED: ", ".join(readings.hardware_throttling),
        DeclineReason.ON_BATTERY: "no mains power" if is_on_battery else "",
        DeclineReason.QUIET_HOURS: _quiet(settings.quiet_hours, now),
        DeclineReason.LOW_DISK: _short("disk", readings.free_disk_bytes, settings.min_free_disk_mb),
        DeclineReason.LOW_MEMORY: _short("memory", readings.free_memory_bytes, settings.min_free_memory_mb),
        DeclineReason.METERED: _metered(readings, settings),
    }
    return tuple(Reason(obstacle, detail) for obstacle, detail in found.items() if detail)


def is_held(settings: EligibilitySettings) -> str:
    """Why the application needs the device now; empty if it does not."""
    stop = settings.stop_file
    return f"{stop} exists" if stop is not None and stop.exists() else ""


def no_time(left_s: float, round_s: float | None) -> Reason | None:
    """The reason NO_TIME if the last round took longer than the time until the deadline.

    Args:
        left_s: seconds until the deadline. A deadline that has passed will be moved, so it is ignored.
        round_s: how long the last round took here; None if unknown.
    """
    if round_s is None or not 0 < left_s < round_s:
        return None
    return Reason(DeclineReason.NO_TIME, f"the last round took {round_s:.0f} s here, but only {left_s:.0f} s are left")


def _heat(readings: Telemetry, settings: EligibilitySettings, cools_by_c: float) -> str:
    for zone in readings.zones:
        limit_c = min(zone.limit_c, settings.max_temperature_c or zone.limit_c) - cools_by_c
        if zone.temperature_c >= limit_c:
            return f"{zone.name} has {zone.temperature_c:.0f} °C, must be below {limit_c:.0f} °C"
    return ""


def _quiet(spans: Sequence[str], now: datetime) -> str:
    for span in spans:
        start, end = (time.fromisoformat(part) for part in span.split("-"))
        at = now.time()
        if (start <= at < end) if start <= end else (at >= start or at < end):
            return f"quiet hours {span}, it is {now:%H:%M}"
    return ""


def _short(what: str, free_bytes: int | None, least_mb: int) -> str:
    if free_bytes is None or free_bytes >= least_mb * MB:
        return ""
    return f"{free_bytes // MB} MB of {what} free, needs {least_mb} MB"


def _metered(readings: Telemetry, settings: EligibilitySettings) -> str:
    if not settings.unmetered:
        return ""
    default = [link.name for link in readings.links if link.is_default]
    metered = [name for name in default if any(fnmatchcase(name, one) for one in settings.metered_interfaces)]
    # With two default routes the unmetered one is assumed to carry the traffic.
    return f"the default route uses {metered[0]}" if metered and len(metered) == len(default) else ""
