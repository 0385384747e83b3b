"""What an agent knows of its own box: whether it takes part, its metrics, and what it reports to the coordinator."""

from datetime import datetime, timezone
from pathlib import Path

import pytest

from devices.eligibility import EligibilitySettings
from devices.power import Rail, Supply
from devices.telemetry import Causes, Telemetry, Zone
from edge_client.agent.hardware import HardwareWatch
from edge_client.agent.reports import REPORT_EVERY_S, SelfReporter, readings, served_model
from edge_client.cli.doctor.checks import findings_of
from edge_client.config import PolicySection
from edge_client.session.signals import Chosen, Invited
from edge_client.store.checked_files import SENT_FILE, read_lines
from edge_client.store.private_store import FINALISED_FILE
from export.model.manifest import read_manifest
from export.model.versions import ModelVersions
from fedcg.wire.messages import schemas
from fedcg.wire.parts import DEFAULT_ALLOW_REPORT, ReportField
from tests.support.edge.conversations import box_config
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import MakeWorld, World, connected, make_config
from tests.support.present import present
from tests.support.raising import raising
from tests.support.waiting import wait_until
from tests.support.wire.golden_files import messages

ORIN = Path(__file__).parents[3] / "golden" / "devices" / "jetson-orin-nano-8gb"
NOON = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)


def decline_a_round(world: World) -> Path:
    """Open a round for a device that its application needs; return the file that says so."""
    stop = world.root / "stop"
    stop.parent.mkdir(parents=True, exist_ok=True)
    stop.touch()
    world.config = world.config.model_copy(update={"eligibility": EligibilitySettings(stop_file=stop)})
    world.connect()
    world.open_round()
    return stop


def test_a_device_that_its_application_needs_declines_with_that_reason_and_takes_part_when_it_is_asked_again(
    make_world: MakeWorld,
) -> None:
    world = make_world(is_automatic=False)
    stop = decline_a_round(world)
    assert world.coordinator.wait(schemas.Decline).reason is schemas.DeclineReason.RESERVED
    assert world.trainer.rounds() == []
    stop.unlink()
    world.coordinator.invite(1)
    assert world.coordinator.wait(schemas.Accept).round == 1
    (declined,) = world.events("declined")
    assert declined["detail"] == f"{stop} exists"


def test_without_the_report_field_health_the_reason_stays_on_the_box(make_world: MakeWorld) -> None:
    world = make_world(policy=PolicySection(allow_report=frozenset({ReportField.EXAMPLES, ReportField.ACCURACY})))
    stop = decline_a_round(world)
    assert world.coordinator.wait(schemas.Decline).reason is schemas.DeclineReason.NOT_ELIGIBLE
    world.coordinator.work_until(lambda: bool(world.events("declined")), "the decline is written down")
    assert world.events("declined")[0]["detail"] == f"{stop} exists"


def offer(deadline_at: float) -> schemas.Offer:
    """Of round 2, attempt 1."""
    first = messages()[0]
    assert isinstance(first, schemas.Offer)
    return first.model_copy(update={"deadline_at": deadline_at})


def test_a_round_that_takes_longer_here_than_what_is_left_is_declined_by_the_coordinators_clock(tmp_path: Path) -> None:
    watch = HardwareWatch(make_config(tmp_path), Telemetry, lambda: NOON)
    invited = Invited(schemas.RoundAttempt(2, 1))
    watch.welcomed(server_time=1_000_000.0, now=50.0)
    assert watch.decline(invited, offer(1_000_100.0), now=90.0) is None  # no round was measured yet
    watch.noted({"event": "phase_started", "phase": "load"})
    watch.noted({"event": "resumed", "seconds": 30.0})
    watch.noted({"event": "committed", "seconds": 100.0})  # 70 without the pause
    assert watch.decline(invited, offer(1_000_111.0), now=90.0) is None  # 1,000,040 there: 71 s are left
    found = watch.decline(invited, offer(1_000_109.0), now=90.0)
    assert found == (schemas.DeclineReason.NO_TIME, "the last round took 70 s here, but only 69 s are left")
    assert (
        watch.decline(Invited(schemas.RoundAttempt(2, 2)), offer(1_000_109.0), now=90.0) is None
    )  # of another attempt
    assert watch.decline(invited, offer(1_000_000.0), now=90.0) is None  # passed: the coordinator moves it


def test_heat_is_remembered_between_two_looks(tmp_path: Path) -> None:
    degrees = [95.0, 88.0, 84.0]
    watch = HardwareWatch(
        make_config(tmp_path), lambda: Telemetry(zones=(Zone("cpu", degrees.pop(0), critical_c=100.0),)), lambda: NOON
    )
    seen = [watch.reason() for _ in range(3)]
    assert [one and one.obstacle for one in seen] == [schemas.DeclineReason.HOT, schemas.DeclineReason.HOT, None]


ABOUT = {"federation": "shapes", "sender": "site-1", "recipient": "coordinator"}
NO_DATA = schemas.DoctorFinding(check="data", state="failed")


def due(reporter: SelfReporter, now: float = 0.0) -> schemas.SelfReport:
    """The report that must be due."""
    return present(reporter.due(ABOUT, now))


def test_a_report_comes_with_each_session_and_with_each_change(make_world: MakeWorld) -> None:
    world = connected(make_world)
    first = world.coordinator.wait(schemas.SelfReport)
    assert (first.condition.findings, first.condition.model) == (None, None)
    world.agent.self_reporter.findings = (NO_DATA,)
    changed = world.coordinator.wait(schemas.SelfReport)
    assert changed.condition.findings == (NO_DATA,)
    world.coordinator.restart()
    world.coordinator.wait(schemas.Hello)
    again = world.coordinator.wait(schemas.SelfReport)
    assert (again.condition, again.boot) == (changed.condition, first.boot)
    assert again.session != changed.session
    world.stop_agent()
    world.start_agent()
    assert world.coordinator.wait(schemas.SelfReport).boot != first.boot


@pytest.mark.parametrize("allowed", [frozenset(), DEFAULT_ALLOW_REPORT])
def test_health_covers_clock_and_findings_and_without_it_none_of_them_leaves(
    tmp_path: Path, allowed: frozenset[ReportField]
) -> None:
    reporter = SelfReporter(PolicySection(allow_report=allowed), tmp_path, wall=lambda: 7.5)
    with reporter.examining(lambda: (NO_DATA,)):
        if allowed:
            wait_until(lambda: reporter.findings is not None, "the device is examined")
        report = due(reporter)
    assert (report.clock, report.condition.findings) == ((7.5, (NO_DATA,)) if allowed else (None, None))


def test_the_same_is_reported_again_only_after_a_while(tmp_path: Path) -> None:
    reporter = SelfReporter(PolicySection(), tmp_path)
    times = (0.0, 1.0, REPORT_EVERY_S - 1, REPORT_EVERY_S, REPORT_EVERY_S + 1)
    assert [now for now in times if reporter.due(ABOUT, now) is not None] == [0.0, REPORT_EVERY_S]


def test_readings_leave_as_numbers_and_codes_where_the_owner_allows_them(tmp_path: Path) -> None:
    read = Telemetry(
        zones=(Zone("cpu of press 4", 61.26, critical_c=105.0), Zone("gpu", 83.0, hot_c=90.0)),
        rails=(Rail("GPU", 2.0), Rail("VDD_IN", 7.25)),
        drawn=Rail("VDD_IN", 7.25),
        supply=Supply(on_mains=False, battery_percent=40, is_discharging=True),
        causes=Causes(software=("cpufreq cools",)),
        event_rates={"over-current 1": 3.0},
        free_memory_bytes=512,
    )
    assert readings(read).model_dump() == {
        "temperature_c": 83.0,
        "limit_c": 90.0,
        "watts": 7.2,
        "battery": 0.4,
        "on_mains": False,
        "slowed_by": ("software", "hardware"),
        "free_memory": 512,
        "free_disk": None,
    }
    assert readings(Telemetry()).model_dump(exclude_none=True) == {"slowed_by": ()}
    last: list[Telemetry | None] = [None]
    reporter = SelfReporter(PolicySection(allow_report=frozenset({ReportField.TELEMETRY})), tmp_path, lambda: last[0])
    at_first = due(reporter)
    last[0] = read
    assert reporter.due(ABOUT, 1.0) is None, "readings change all the time"
    later = due(reporter, REPORT_EVERY_S)
    assert (at_first.telemetry, later.telemetry, later.clock) == (None, readings(read), None)
    unasked = due(SelfReporter(PolicySection(), tmp_path, lambda: read))
    assert unasked.telemetry is None
    assert "telemetry" not in unasked.model_dump()


def test_an_agent_reports_what_its_sensors_read_and_its_record_says_which(make_world: MakeWorld) -> None:
    world = connected(make_world, policy=PolicySection(allow_report=frozenset({ReportField.TELEMETRY})))
    assert world.coordinator.wait(schemas.SelfReport).telemetry is None
    world.agent.hardware.reason()  # looks, as the agent does every 15 s
    world.agent.self_reporter.repeat()
    told = present(world.coordinator.wait(schemas.SelfReport).telemetry)
    assert present(told.free_disk) > 0
    (line,) = [one for one in read_lines(world.store.root / SENT_FILE) if one["kind"] == "self_report"]
    assert "free_disk" in line["report"]["telemetry"]


def test_an_examination_that_fails_leaves_the_agent_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reporter = SelfReporter(PolicySection(), tmp_path)
    with reporter.examining(raising(OSError("the disk does not answer"))):
        wait_until(lambda: "the disk does not answer" in caplog.text, "it is in the log")
    assert reporter.findings is None


def test_findings_of_the_doctor_leave_as_codes(tmp_path: Path) -> None:
    found = findings_of(box_config(tmp_path))
    assert NO_DATA in found
    assert schemas.DoctorFinding(check="cohort secret", state="warning") in found
    assert str(tmp_path) not in "".join(one.model_dump_json() for one in found)


def test_the_model_in_use_is_reported_with_what_its_export_measured(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec(), export=True)
    site.configure(export={"variants": True, "gate_points": 100.0})
    trainer, models = site.trainer(), site.store.root / "models"
    trainer.afterwards(trainer.do(site.round(1)))
    first = present(served_model(models))
    assert (first.version, first.round, first.serves, first.before) == ("0001", 1, "fp32", None)
    assert [form.name for form in first.forms] == ["fp32"]
    assert trainer.do(site.end) == Chosen(site.aggregate, succeeded=True)
    allowed = PolicySection(allow_report=frozenset({ReportField.MODEL}))
    model = present(due(SelfReporter(allowed, models)).condition.model)
    assert (model.version, model.before) == ("0002", first.accuracy)
    judged = {one.images for one in read_manifest(ModelVersions(models).current()).variants if one.accuracy is not None}
    assert judged == {site.store.record(FINALISED_FILE)["val_images"]}, "never by test images"
    forms = {form.name: form for form in model.forms}
    assert {"fp32", "fp16", "int8"} <= set(forms)
    assert forms["fp32"].size is not None
    for name in ("fp32", "int8"):
        assert forms[name].latency_ms is not None
        assert forms[name].accuracy is not None
        assert forms[name].images > 0
    assert due(SelfReporter(PolicySection(), models)).condition.model is None
    ModelVersions(models).rollback("drift")
    back = present(served_model(models))
    assert (back.version, back.answers, back.returned, back.because) == ("0001", None, "0002", "drift")
