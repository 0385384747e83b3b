"""What devices report of themselves: it is stored, becomes problems with remedies, and reaches the page and the API."""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from coordinator.config import RoundSettings
from coordinator.facts.devices import AUDIT_TITLES, FINDINGS, doctor_findings
from coordinator.facts.known import Known
from coordinator.facts.models import by_class, served_models
from coordinator.facts.problems import Problem, open_problems
from coordinator.service.reports import ConditionBoard
from coordinator.storage.view_store import Delivery
from coordinator.updates import receiver as receiver_module
from fedcg.wire.errors import MalformedError
from fedcg.wire.messages.schemas import (
    COORDINATOR,
    Carrier,
    DeviceCondition,
    DoctorFinding,
    Outcome,
    Readings,
    SelfReport,
    decode,
    encode,
)
from fedcg.wire.parts import AuditFigure, ClassAccuracies, PrivacySpent, Report, RoundCost
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.coordinator.world import MakeWorld, RunningService, World
from tests.support.page.pages import ServedPage, served
from tests.support.waiting import wait_until
from tests.support.wire.golden_files import CONDITION
from tests.unit.coordinator.page.test_pages import make, start

NOTHING = DeviceCondition()
BOOTS = ("1" * 32, "2" * 32)


def report(device: str = "a", condition: DeviceCondition = NOTHING, **fields: Any) -> SelfReport:
    about = {"federation": FEDERATION, "sender": device, "recipient": COORDINATOR, "boot": BOOTS[0]}
    return SelfReport(**{**about, "condition": condition, **fields})


def tell(device: FakeDevice, message: SelfReport) -> None:
    """Send a report; the device's own thread may send at the same time."""
    with device.lock:
        device.tell(message)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ServedPage]:
    made = make(tmp_path)
    with served(made) as running:
        for device in made.devices["tiny"]:
            device.silent = True  # no report waits behind an update
        start(running)
        for device in made.devices["tiny"]:
            wait_until(lambda device=device: device.session is not None, "a session")  # type: ignore[misc]
        yield running
    made.world.store.close()


def test_models_and_findings_of_a_device_are_on_its_page_and_on_models(page: ServedPage) -> None:
    device, reader = page.made.devices["tiny"][0], page.reader()
    tell(device, report(condition=CONDITION))
    wait_until(lambda: 'id="m-a"' in reader.get("/f/tiny/models")[1], "the model is shown")
    row = reader.get("/f/tiny/models")[1].partition('id="m-a"')[2].partition("</tr>")[0]
    for text in ("0003, round 2", ">int8<", "50.0 %", "+25.0", "47.5 %, agrees 95.0 %, 30.0 kB, 0.5 ms"):
        assert text in row, row
    shown = reader.get("/devices/a")[1].partition('id="doctor"')[2].partition("</section>")[0]
    for state, check in (("warning", "data"), ("failed", "disk")):
        what, remedy = FINDINGS[(check, state)]
        assert what.split("'")[0] in shown
        assert remedy.split("`")[0] in shown
    assert "it has not reported its checks" in reader.get("/devices/b")[1]
    device.silent = False
    device.act()
    wait_until(
        lambda: "model" in reader.get("/f/tiny/sent")[1].partition('id="s-a"')[2].partition("</tr>")[0],
        "the privacy officer's page names the model",
    )


def test_readings_of_a_devices_sensors_are_on_its_page_until_it_reports_none(page: ServedPage) -> None:
    device, reader = page.made.devices["tiny"][0], page.reader()
    read = Readings(temperature_c=81.4, limit_c=95.0, watts=7.3, battery=0.4, on_mains=False, slowed_by=("hardware",))
    assert 'id="readings"' not in reader.get("/devices/a")[1]
    tell(device, report(telemetry=read))
    wait_until(lambda: 'id="readings"' in reader.get("/devices/a")[1], "the readings are shown")
    shown = reader.get("/devices/a")[1].partition('id="readings"')[2].partition("</section>")[0]
    for text in ("81.4 °C, hot from 95.0 °C", "7.3 W, on battery, charged to 40 %", ">hardware<", "unavailable"):
        assert text in shown, shown
    device.silent = False
    device.act()
    wait_until(
        lambda: "telemetry" in reader.get("/f/tiny/sent")[1].partition('id="s-a"')[2].partition("</tr>")[0],
        "the privacy officer's page names them",
    )
    tell(device, report())
    wait_until(lambda: 'id="readings"' not in reader.get("/devices/a")[1], "they are gone")


def test_accuracies_by_class_reach_the_page_and_those_of_other_classes_are_rejected(page: ServedPage) -> None:
    reader = page.reader()
    for device, personal in zip(page.made.devices["tiny"][:2], ((0.25, None, 1.0), (0.25, 1.0)), strict=True):
        by_class = ClassAccuracies(accuracy=personal, shadow=(0.75, None, 1.0), downloaded=(0.125, None, 1.0))
        told = Report(examples=9, accuracy=0.5, shadow=0.6, downloaded=0.4, per_class=by_class)
        device.make_update = partial(type(device).make_update, device, report=told)  # type: ignore[method-assign]
        device.silent = False
        device.act()
    wait_until(lambda: all(one.receipts() for one in page.made.devices["tiny"][:2]), "both updates are judged")
    (receipt,) = page.made.devices["tiny"][1].receipts()
    assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, "its accuracies by class are not of 3 classes")
    row = reader.get("/f/tiny/worth")[1].partition(">x</td>")[2].partition("</tr>")[0]
    for text in ("75.0 %", "25.0 %", "12.5 %", "\N{MINUS SIGN}50.0", "/devices/a"):
        assert text in row, row
    client = reader.get("/f/tiny/worth")[1].partition('id="w-a" class="loses"')[2].partition("</tr>")[0]
    assert "40.0 %" in client
    assert "12.5 %" in reader.get("/devices/a")[1].partition("Accuracy by class in tiny")[2].partition("</section>")[0]


def test_figures_of_a_devices_own_audit_and_its_privacy_budget_reach_its_page_and_the_interface(
    page: ServedPage,
) -> None:
    reader, device = page.reader(), page.made.devices["tiny"][0]
    told = Report(
        examples=9,
        audit={"label_l1": 0.0421, "reid": -0.01},
        epsilon=PrivacySpent(epsilon=3.2, delta=1e-5, budget=8.0),
        cost=RoundCost(seconds=83.0, joules=415.2),
    )
    device.make_update = partial(type(device).make_update, device, report=told)  # type: ignore[method-assign]
    device.silent = False
    device.act()
    wait_until(lambda: bool(device.receipts()), "the update is judged")
    assert device.receipts()[0].outcome is Outcome.ACCEPTED
    shown = reader.get("/devices/a")[1].partition('id="privacy-tiny"')[2].partition("</section>")[0]
    for text in (
        "What the device&#39;s own audit found",
        "label distribution, L1 distance",
        "+0.0421",
        "\N{MINUS SIGN}0.01",
        "epsilon 3.2 of 8 at delta 1e-05",
    ):
        assert text in shown, shown
    assert "membership" not in shown
    assert "1 min, 415 J" in reader.get("/devices/a")[1]
    assert 'id="privacy-tiny"' not in reader.get("/devices/b")[1]
    assert set(AUDIT_TITLES) == set(get_args(AuditFigure))
    (attempt,) = json.loads(reader.get("/api/v1/federations/tiny/rounds/1")[1])["attempts"]
    (update,) = attempt["updates"]
    assert update["report"]["audit"] == {"label_l1": 0.0421, "reid": -0.01}
    assert update["report"]["epsilon"] == {"epsilon": 3.2, "delta": 1e-5, "budget": 8.0}
    schemas = json.loads(reader.get("/openapi.json")[1])["components"]["schemas"]
    assert update["report"]["cost"] == {"seconds": 83.0, "joules": 415.2}
    assert {"audit", "epsilon", "cost"} <= set(schemas["Report"]["properties"])


def test_a_condition_outlives_the_service(make_world: MakeWorld) -> None:
    world = make_world()
    with RunningService(world):
        world.start_devices()
        a = world.devices["a"]
        wait_until(lambda: a.session is not None, "a session")
        tell(a, report(condition=CONDITION))
        tell(a, report(condition=CONDITION.model_copy(update={"findings": ()})))
        wait_until(
            lambda: any('"findings":[]' in each.content for each in world.store.presence.conditions("tiny")),
            "the later one is stored",
        )
    known = Known(world.store, lambda record: world.spec, world.root)
    (model,) = served_models(known, "tiny")
    assert (model.device, model.model, model.gain) == ("a", CONDITION.model, 0.25)
    assert (doctor_findings(known, "a"), doctor_findings(known, "b")) == ([], None)


def kinds(page: ServedPage) -> dict[str, dict[str, Any]]:
    """The open problems of the API, by kind."""
    headers = {"Authorization": f"Bearer {page.token()}"}
    status, _, text = page.reader().ask("GET", "/api/v1/problems", **headers)
    assert status == 200
    return {each["kind"]: each for each in json.loads(text)}


def test_a_clock_that_is_off_by_more_than_a_minute_is_a_problem_until_it_is_right(page: ServedPage) -> None:
    device, reader = page.made.devices["tiny"][2], page.reader()
    tell(device, report("c", clock=time.time() - 50))
    tell(device, report("c", clock=time.time() - 600))
    wait_until(lambda: "clock" in kinds(page), "the clock is a problem")
    found = kinds(page)["clock"]
    assert (found["device"], found["what"]) == ("c", "its clock is 10 min behind the coordinator's")
    assert "timedatectl set-ntp true" in found["remedy"]
    assert "10 min behind" in reader.get("/repairs")[1]
    tell(device, report("c", clock=time.time()))
    wait_until(lambda: "clock" not in kinds(page), "the clock is right again")


def test_two_agents_that_take_turns_under_one_identity_are_a_problem_and_a_restarted_one_is_none(
    page: ServedPage,
) -> None:
    device = page.made.devices["tiny"][1]
    for boot in (BOOTS[0], BOOTS[1]):
        tell(device, report("b", boot=boot, clock=time.time() - 600))
    wait_until(lambda: "clock" in kinds(page), "both are taken")
    assert "two devices with one identity" not in kinds(page)
    tell(device, report("b", boot=BOOTS[0]))
    wait_until(lambda: "two devices with one identity" in kinds(page), "the copy is noticed")
    found = kinds(page)["two devices with one identity"]
    assert (found["device"], "fedcg device revoke b" in found["remedy"]) == ("b", True)
    assert "two devices with one identity" in page.reader().get("/repairs")[1]


def test_a_report_that_waited_behind_an_update_is_no_evidence_of_a_wrong_clock(make_world: MakeWorld) -> None:
    board = ConditionBoard(make_world().store, "tiny")
    board.note("a", report(clock=100.0), 200.0, is_delayed=True)
    assert board.clock_ahead_s == {}
    board.note("a", report(clock=100.0), 200.0, is_delayed=False)
    assert board.clock_ahead_s == {"a": -100.0}
    board.note("a", report(), 200.0, is_delayed=False)
    assert board.clock_ahead_s == {}


def test_a_process_that_goes_on_reporting_is_not_doubled(make_world: MakeWorld) -> None:
    board = ConditionBoard(make_world().store, "tiny")
    for at, boot in enumerate((BOOTS[0], BOOTS[0], BOOTS[1], BOOTS[1], "3" * 32)):
        board.note("a", report(boot=boot), float(at), is_delayed=False)
    assert board.doubled_at == {}
    board.note("a", report(boot=BOOTS[1]), 9.0, is_delayed=False)
    assert board.doubled_at == {"a": 9.0}


def test_devices_that_remember_more_than_the_coordinator_are_a_problem_with_its_remedy(make_world: MakeWorld) -> None:
    world = make_world(pacing=RoundSettings(gather_s=60.0))
    with RunningService(world) as running:

        def found(kind: str = "devices are ahead") -> Problem | None:
            known = Known(world.store, lambda _: world.spec, world.root, {"tiny": running.service})
            return next((each for each in open_problems(known) if each.kind == kind), None)

        def remember(epoch: int, round_number: int, key: str | None = None) -> None:
            world.devices["a"].remembers = {"epoch": epoch, "round": round_number, "key": key}
            world.devices["a"].hello()
            wait_until(
                lambda: running.service.conditions.remembered.get("a") == (epoch, round_number, key != "f" * 64),
                "its hello is taken",
            )

        world.start_devices()
        epoch = running.service.epoch
        remember(epoch, running.service.state.round)
        assert found() is None
        remember(epoch, 20)
        problem = found()
        assert problem is not None
        assert "a know epoch 1 and round 20; this coordinator is at epoch 1 and round 1" in problem.what
        assert "fedcg coordinator restore FILE --dir NEW" in problem.remedy
        assert not problem.is_severe
        remember(epoch + 3, 1)
        problem = found()
        assert problem is not None
        assert problem.is_severe
        assert "fedcg coordinator run --accept-loss" in problem.remedy
        remember(epoch, 20, world.key.public.hex)
        assert found() is not None, "it accepts the coordinator's key, and is only ahead"
        remember(epoch, 20, "f" * 64)
        assert found() is None, "it will follow nothing: the key is its problem"
        problem = found("older message key")
        assert problem is not None
        assert problem.is_severe, "of one device among many it would not be: it may also tell an untruth"
        assert "signing-N.key" in problem.remedy
        assert "nothing has to be done" not in problem.remedy


def test_a_device_outside_the_cohort_is_a_problem_whose_remedy_also_holds_after_its_first_round(
    make_world: MakeWorld,
) -> None:
    world = make_world(clients=("a", "b", "c"), pacing=RoundSettings(gather_s=60.0), min_clients=3)
    world.devices["c"].silent = True
    with RunningService(world) as running:
        world.start_devices()
        wait_until(lambda: len(running.service.state.online) == 3, "all are online")
        for device, mark in (("a", "1" * 32), ("b", "1" * 32), ("c", None)):
            running.service.cohorts.note(device, mark)
        known = Known(world.store, lambda _: world.spec, world.root, {"tiny": running.service})
        (found,) = (each for each in open_problems(known) if each.kind == "cohort differs")
    assert (found.device, found.what) == ("c", "it has no cohort secret")
    assert found.remedy.index("`fedcg cohort join --config AGENT.TOML`") < found.remedy.index(
        "has trained, or has another secret"
    )
    assert "`mv STORE STORE.before`" in found.remedy


def test_updates_that_find_no_room_are_a_problem_until_there_is_room(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "MAX_PARTIAL_FILES", 1)
    world = make_world(pacing=RoundSettings(gather_s=60.0))
    a, b = world.devices["a"], world.devices["b"]
    a.carrier = Carrier.HTTPS  # its update is under way for as long as nobody puts the chunks
    with RunningService(world) as running:

        def problems() -> dict[str, Problem]:
            services = {"tiny": running.service}
            return {
                each.kind: each
                for each in open_problems(Known(world.store, lambda _: world.spec, world.root, services))
            }

        b.silent = True
        world.start_devices()
        wait_until(lambda: running.service.receiver.is_busy("a"), "a occupies the folder")
        assert "full partial store" not in problems()
        b.silent = False
        b.act()
        wait_until(lambda: "full partial store" in problems(), "b has to wait")
        found = problems()["full partial store"]
        assert (found.subject, "1 update can't be received yet" in found.what) == ("tiny", True)
        assert "max_clients" in found.remedy
        a.pending = None  # it does not announce its update again
        running.service.receiver.forget("a")
        wait_until(lambda: "full partial store" not in problems(), "there is room again")


@pytest.mark.parametrize(
    "wrong",
    [
        {"findings": [{"check": "/data/cats/1.png", "state": "failed"}]},
        {"findings": [{"check": "data", "state": "failed", "detail": "/data"}]},
        {"findings": [{"check": "data", "state": "failed"}] * 17},
        {"model": {"version": "../0001", "round": 1, "serves": "fp32"}},
        {"model": {"version": "0001", "round": 1, "serves": "my form"}},
        {"model": {"version": "0001", "round": 1, "serves": "fp32", "accuracy": 1.5}},
        {"model": {"version": "0001", "round": 1, "serves": "fp32", "forms": [{"name": "int8", "latency_ms": -1.0}]}},
        {"model": {"version": "0001", "round": 1, "serves": "fp32", "forms": [{"name": "int8"}] * 9}},
        {"note": "free text"},
    ],
)
def test_a_self_report_holds_nothing_but_known_codes_and_bounded_numbers(wrong: dict[str, Any]) -> None:
    good = report(condition=CONDITION, clock=1.5)
    assert decode(encode(good)) == good
    with pytest.raises(MalformedError):
        decode(json.dumps({**good.model_dump(mode="json"), "condition": wrong}).encode())


def test_every_finding_that_a_device_can_report_has_a_sentence_and_a_remedy() -> None:
    known = {(check, state) for check, state in FINDINGS}
    assert {check for check, _ in known} == set(DoctorFinding.model_json_schema()["properties"]["check"]["enum"])


def test_accuracies_by_class_are_means_over_the_clients_and_name_who_loses_most(make_world: MakeWorld) -> None:
    world: World = make_world()
    known = Known(world.store, lambda record: world.spec, world.root)

    def delivery(**per_class: Any) -> Delivery:
        told = {"per_class": per_class}
        return Delivery(1, 1, "x", 1, "accepted", "", told, 1.0, 1, {})

    count = world.spec.class_count
    # Class 0: gains +0.2 and -0.4, so the mean is -0.1 and b loses most; class 1: only a, and nothing to compare with.
    last = {
        "a": delivery(accuracy=[0.7, 0.9, *[None] * (count - 2)], shadow=[0.5, *[None] * (count - 1)], downloaded=None),
        "b": delivery(
            accuracy=[0.1, None, *[None] * (count - 2)], shadow=[0.5, *[None] * (count - 1)], downloaded=[0.3] * count
        ),
        "c": Delivery(1, 1, "c", 1, "accepted", "", {"accuracy": 0.5}, 1.0, 1, {}),
    }
    found = by_class(known, "tiny", last)
    assert [each.name for each in found] == list(world.spec.classes)
    assert (found[0].personal, found[0].alone, found[0].downloaded) == pytest.approx((0.4, 0.5, 0.3))
    assert found[0].gain == pytest.approx(-0.1)
    assert found[0].worst == "b"
    assert (found[1].personal, found[1].alone, found[1].gain, found[1].worst) == (0.9, None, None, None)
    assert by_class(known, "tiny", {"c": last["c"]}) == []
