"""The agent looks at its box before it takes part, and writes its readings for Prometheus."""

import fcntl
from datetime import datetime, timezone
from pathlib import Path

import pytest

from devices.eligibility import EligibilitySettings, Obstacle
from devices.telemetry import Sensors, Telemetry, Zone
from edge_client.agent.hardware import HardwareWatch, metrics_text
from edge_client.config import PolicySection
from edge_client.session.signals import Invited
from fedcg.wire.messages.schemas import EVERYONE, Accept, ArtifactRef, Decline, DeclineReason, Offer, RoundAttempt
from fedcg.wire.parts import ReportField
from tests.support.edge.world import DEVICE, FEDERATION, MakeWorld, make_config
from tests.support.waiting import wait_until

ORIN = Path(__file__).parents[3] / "golden" / "devices" / "jetson-orin-nano-8gb"
NOON = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
SPEC = ArtifactRef(id="a" * 64, size=1000, chunk_bytes=500)


def test_a_device_whose_lock_is_held_declines_with_that_reason_and_takes_part_when_it_is_asked_again(
    make_world: MakeWorld,
) -> None:
    world = make_world(is_automatic=False)
    lock = world.root / "app.lock"
    world.config = world.config.model_copy(update={"eligibility": EligibilitySettings(lock_file=lock)})
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        world.connect()
        world.open_round()
        assert world.coordinator.wait(Decline).reason is DeclineReason.RESERVED
        assert world.trainer.rounds() == []
    world.coordinator.invite(1)
    assert world.coordinator.wait(Accept).round == 1
    (declined,) = world.events("declined")
    assert declined["detail"] == f"{lock} is locked"


def test_without_the_report_field_health_the_reason_stays_on_the_box(make_world: MakeWorld) -> None:
    world = make_world(policy=PolicySection(allow_report=frozenset({ReportField.EXAMPLES, ReportField.ACCURACY})))
    stop = world.root / "stop"
    stop.parent.mkdir(parents=True, exist_ok=True)
    stop.touch()
    world.config = world.config.model_copy(update={"eligibility": EligibilitySettings(stop_file=stop)})
    world.connect()
    world.open_round()
    assert world.coordinator.wait(Decline).reason is DeclineReason.NOT_ELIGIBLE
    world.coordinator.work_until(lambda: bool(world.events("declined")), "the decline is written down")
    assert world.events("declined")[0]["detail"] == f"{stop} exists"


def offer(deadline_at: float) -> Offer:
    about = {
        "federation": FEDERATION,
        "sender": "coordinator",
        "recipient": EVERYONE,
        "epoch": 1,
        "round": 2,
        "attempt": 1,
    }
    return Offer(**about, spec=SPEC, aggregate=SPEC, rounds=3, deadline_at=deadline_at)


def test_a_round_that_takes_longer_here_than_what_is_left_is_declined_by_the_coordinators_clock(tmp_path: Path) -> None:
    watch = HardwareWatch(make_config(tmp_path), Telemetry, lambda: NOON)
    invited = Invited(RoundAttempt(2, 1))
    watch.welcomed(server_time=1_000_000.0, now=50.0)
    assert watch.decline(invited, offer(1_000_100.0), now=90.0) is None  # no round was measured yet
    watch.noted({"event": "phase_started", "phase": "load"})
    watch.noted({"event": "resumed", "seconds": 30.0})
    watch.noted({"event": "committed", "seconds": 100.0})  # 70 without the pause
    assert watch.decline(invited, offer(1_000_111.0), now=90.0) is None  # 1,000,040 there: 71 s are left
    found = watch.decline(invited, offer(1_000_109.0), now=90.0)
    assert found == (DeclineReason.NO_TIME, "the last round took 70 s here, 69 s are left")
    assert watch.decline(Invited(RoundAttempt(2, 2)), offer(1_000_109.0), now=90.0) is None  # of another attempt
    assert watch.decline(invited, offer(1_000_000.0), now=90.0) is None  # passed: the coordinator moves it


def test_heat_is_remembered_between_two_looks(tmp_path: Path) -> None:
    degrees = [95.0, 88.0, 84.0]
    watch = HardwareWatch(
        make_config(tmp_path), lambda: Telemetry(zones=(Zone("cpu", degrees.pop(0), critical_c=100.0),)), lambda: NOON
    )
    seen = [watch.reason() for _ in range(3)]
    assert [one and one.obstacle for one in seen] == [Obstacle.HOT, Obstacle.HOT, None]


def test_the_metrics_are_whole_and_leave_out_what_is_unavailable(tmp_path: Path) -> None:
    config = make_config(tmp_path).model_copy(update={"metrics_folder": tmp_path / "prom"})
    (tmp_path / "prom").mkdir()
    watch = HardwareWatch(config, Sensors(tmp_path, ORIN).read, lambda: NOON)
    path = tmp_path / "prom" / f"fedcg-{FEDERATION}-{DEVICE}.prom"
    with watch.watching():
        wait_until(path.exists, "the first metrics")
    text, about = path.read_text(), f'federation="{FEDERATION}",device="{DEVICE}"'
    assert path.stat().st_mode & 0o777 == 0o644
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines[f'fedcg_device_temperature_celsius{{{about},zone="tj-thermal 2"}}'] == "53.406"
    assert lines[f'fedcg_device_temperature_limit_celsius{{{about},zone="tj-thermal 2"}}'] == "94.5"
    assert float(lines[f'fedcg_device_power_watts{{{about},rail="VDD_IN 0"}}']) == pytest.approx(5.61338)
    assert lines[f'fedcg_device_throttle_events_total{{{about},event="over-current oc3"}}'] == "41"
    assert lines[f'fedcg_device_eligible{{{about},reason=""}}'] == "1"
    assert "battery" not in text
    assert "on_mains" not in text
    names = [line.split("{")[0] for line in lines]
    assert len(set(names)) == len([name for name, before in zip(names, ["", *names], strict=False) if name != before])


def test_a_label_is_escaped(tmp_path: Path) -> None:
    read = Telemetry(zones=(Zone('odd "zone"\\', 1.0),))
    assert 'zone="odd \\"zone\\"\\\\ 0"} 1' in metrics_text(make_config(tmp_path), read, None)


def test_a_folder_of_metrics_that_is_not_there_is_a_warning_and_the_agent_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path).model_copy(update={"metrics_folder": tmp_path / "missing"})
    with HardwareWatch(config, Telemetry, lambda: NOON).watching():
        wait_until(lambda: "metrics_folder" in caplog.text, "the warning")
