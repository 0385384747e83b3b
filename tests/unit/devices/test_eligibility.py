"""Whether a box may train now: each condition by its readings, hysteresis, quiet hours, and what the box's application holds."""

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from devices.eligibility import EligibilitySettings, Reason, is_held, no_time, obstacles
from devices.power import Supply
from devices.telemetry import LOW_DISK_BYTES, Causes, Link, Telemetry, Zone, read_telemetry
from fedcg.wire.messages.schemas import DeclineReason

TREES = Path(__file__).parents[2] / "golden" / "devices"
NOON = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
BATTERY = Supply(on_mains=False, battery_percent=50, is_discharging=True)
WWAN, LAN = Link("wwan0", "up", None, is_default=True), Link("eth0", "up", 1000, is_default=True)


def eligibility(readings: Telemetry, settings: EligibilitySettings, now: datetime, **more: Any) -> Reason | None:
    return next(iter(obstacles(readings, settings, now, **more)), None)


def found(readings: Telemetry, before: DeclineReason | None = None, **settings: Any) -> DeclineReason | None:
    reason = eligibility(readings, EligibilitySettings(**settings), NOON, before=before)
    return None if reason is None else reason.obstacle


@pytest.mark.parametrize(
    ("readings", "settings", "obstacle"),
    [
        (Telemetry(), {}, None),
        (Telemetry(zones=(Zone("cpu", 94.0, critical_c=104.5),)), {}, None),
        (Telemetry(zones=(Zone("cpu", 94.5, critical_c=104.5),)), {}, DeclineReason.HOT),
        (Telemetry(zones=(Zone("cpu", 88.0, hot_c=88.0, critical_c=104.5),)), {}, DeclineReason.HOT),
        (Telemetry(zones=(Zone("cpu", 91.0, passive_c=80.0, critical_c=104.5),)), {}, None),  # software throttles
        (Telemetry(zones=(Zone("cpu", 70.0),)), {"max_temperature_c": 70}, DeclineReason.HOT),
        (Telemetry(zones=(Zone("cpu", 90.0),)), {"max_temperature_c": 120}, DeclineReason.HOT),  # its own limit stands
        (Telemetry(causes=Causes(("GPU power cap",), ())), {}, None),
        (Telemetry(causes=Causes((), ("under-voltage",))), {}, DeclineReason.THROTTLED),
        (Telemetry(event_rates={"over-current oc1": 2.0}), {}, DeclineReason.THROTTLED),
        (Telemetry(event_rates={"over-current oc1": None}), {}, None),
        (Telemetry(event_rates={"package throttle": 9.0}), {}, None),
        (Telemetry(supply=BATTERY), {}, None),
        (Telemetry(supply=BATTERY), {"on_mains": True}, DeclineReason.ON_BATTERY),
        (Telemetry(supply=Supply()), {"on_mains": True}, None),
        (Telemetry(free_disk_bytes=LOW_DISK_BYTES - 1_000_000), {}, DeclineReason.LOW_DISK),
        (Telemetry(free_disk_bytes=LOW_DISK_BYTES), {"min_free_disk_mb": 600}, DeclineReason.LOW_DISK),
        (Telemetry(free_memory_bytes=399_999_999), {"min_free_memory_mb": 400}, DeclineReason.LOW_MEMORY),
        (Telemetry(free_memory_bytes=400_000_000), {"min_free_memory_mb": 400}, None),
        (Telemetry(links=(WWAN,)), {}, None),
        (Telemetry(links=(WWAN,)), {"unmetered": True}, DeclineReason.METERED),
        (Telemetry(links=(WWAN, LAN)), {"unmetered": True}, None),
        (Telemetry(links=(LAN,)), {"unmetered": True, "metered_interfaces": ["eth*"]}, DeclineReason.METERED),
    ],
)
def test_each_condition_follows_its_reading_and_what_is_unavailable_does_not_count(
    readings: Telemetry, settings: dict[str, Any], obstacle: DeclineReason | None
) -> None:
    assert found(readings, **settings) is obstacle


def test_a_box_that_was_hot_goes_on_five_degrees_below_its_limit() -> None:
    limit: dict[str, Any] = {"max_temperature_c": 70}
    at = [Telemetry(zones=(Zone("cpu", float(degrees)),)) for degrees in (69, 66, 65, 64)]
    assert [found(readings, **limit) for readings in at] == [None] * 4
    assert [found(readings, DeclineReason.HOT, **limit) for readings in at] == [*[DeclineReason.HOT] * 3, None]


@pytest.mark.parametrize(("span", "hours"), [("22:00-06:00", {22, 23, *range(6)}), ("08:00-18:00", {*range(8, 18)})])
def test_quiet_hours_may_pass_midnight(span: str, hours: set[int]) -> None:
    for hour in range(24):
        reason = eligibility(Telemetry(), EligibilitySettings(quiet_hours=(span,)), NOON.replace(hour=hour))
        assert (reason is not None) is (hour in hours), hour
        assert reason is None or (reason.obstacle, span in reason.detail) == (DeclineReason.QUIET_HOURS, True)


@pytest.mark.parametrize("span", ["22:00", "22-06", "24:00-06:00", "22:00-06:60", "22:00-22:00", "at night"])
def test_hours_of_another_form_are_refused_with_an_example(span: str) -> None:
    with pytest.raises(ValidationError, match='use "22:00-06:00"'):
        EligibilitySettings(quiet_hours=(span,))


def test_an_application_keeps_training_away_by_its_file(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    settings = EligibilitySettings(stop_file=stop)
    assert is_held(settings) == ""
    stop.touch()
    reason = eligibility(Telemetry(), settings, NOON)
    assert reason is not None
    assert (reason.obstacle, reason.detail) == (DeclineReason.RESERVED, f"{stop} exists")


@pytest.mark.parametrize(
    ("left_s", "round_s", "is_short"),
    [(100.0, 99.0, False), (100.0, 101.0, True), (100.0, None, False), (-5.0, 101.0, False)],
)
def test_a_round_that_does_not_fit_is_declined_by_the_time_of_the_last_one(
    left_s: float, round_s: float | None, is_short: bool
) -> None:
    assert (no_time(left_s, round_s) is not None) is is_short


def test_all_obstacles_are_found_at_once_and_the_first_one_counts(tmp_path: Path) -> None:
    read = read_telemetry(tmp_path, TREES / "x86-laptop")
    settings = EligibilitySettings(on_mains=True, unmetered=True, min_free_memory_mb=20_000)
    several = obstacles(read, settings, NOON)
    assert [one.obstacle.value for one in several] == ["on_battery", "low_memory", "metered"]
    assert eligibility(read, settings, NOON) == several[0]


def test_every_obstacle_of_the_box_but_missing_time_may_pass_while_the_attempt_is_open() -> None:
    reasons = list(DeclineReason)
    of_the_box = set(reasons[reasons.index(DeclineReason.RESERVED) :])
    passing = {reason for reason in reasons if reason.passes}
    assert passing == of_the_box - {DeclineReason.NO_TIME} | {DeclineReason.INTERRUPTED}
