"""What devices report of themselves: it is stored, becomes problems with remedies, and reaches the page and the API."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from coordinator.config import RoundSettings
from coordinator.facts.devices import LOOK, doctor_findings
from coordinator.facts.models import by_class, served_models
from coordinator.facts.problems import Problem, open_problems
from coordinator.rounds.records import UpdateRecord
from coordinator.service.reports import ConditionBoard
from coordinator.updates import receiver as receiver_module
from fedcg.sentences import texts
from fedcg.wire.errors import MalformedError
from fedcg.wire.messages import schemas
from fedcg.wire.parts import AuditFigure, ClassAccuracies, PrivacySpent, Report, RoundCost
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.coordinator.world import MakeWorld, RunningService
from tests.support.page.pages import ServedPage, tiny_page
from tests.support.waiting import wait_until
from tests.support.wire.golden_files import CONDITION

NOTHING = schemas.DeviceCondition()
BOOTS = ("1" * 32, "2" * 32)


def report(device: str = "a", condition: schemas.DeviceCondition = NOTHING, **fields: Any) -> schemas.SelfReport:
    about = {"federation": FEDERATION, "sender": device, "recipient": schemas.COORDINATOR, "boot": BOOTS[0]}
    return schemas.SelfReport(**{**about, "condition": condition, **fields})


SHOWN: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("/f/tiny/models", 'id="m-a"', "</tr>"): (
        "0003, round 2",
        ">int8<",
        "50.0 %",
        "+25.0",
        "47.5 %, agreement 95.0 %, 30.0 kB, 0.5 ms",
    ),
    ("/devices/a", 'id="readings"', "</section>"): (
        "81.4 °C, hot from 95.0 °C",
        "7.3 W, on battery, 40 % charged",
        ">hardware<",
        "unavailable",
    ),
    ("/devices/a", 'id="privacy-tiny"', "</section>"): (
        "Privacy audit on the device",
        "label distribution, L1 distance",
        "+0.0421",
        "\N{MINUS SIGN}0.01",
        "epsilon 3.2 of 8 at delta 1e-05",
    ),
    ("/devices/a", "<h1>", "</html>"): ("1 min, 415 J",),
    ("/devices/a", "Accuracy by class in tiny", "</section>"): ("12.5 %",),
    ("/f/tiny/worth", ">x</td>", "</tr>"): ("75.0 %", "25.0 %", "12.5 %", "\N{MINUS SIGN}50.0", "/devices/a"),
    ("/f/tiny/worth", 'id="w-a" class="loses"', "</tr>"): ("40.0 %",),
    ("/f/tiny/sent", 'id="s-a"', "</tr>"): ("model", "telemetry"),
    ("/f/tiny/audits", 'id="a-a"', "</tr>"): ("label distribution, L1 distance", "+0.0421", ">none</td>", "1 <span"),
}
"""By page, where a part of it begins and where that ends: what it shows."""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ServedPage]:
    with tiny_page(tmp_path, clients=("a", "b", "c")) as running:
        yield running


def test_all_that_a_device_reports_is_on_the_pages_and_its_updates_report_in_the_interface(page: ServedPage) -> None:
    device, reader = page.made.devices["tiny"][0], page.reader()
    for each in page.made.devices["tiny"]:
        each.silent = True  # no report waits behind an update
        each.start()
    wait_until(lambda: device.session is not None, "a session")
    read = schemas.Readings(
        temperature_c=81.4, limit_c=95.0, watts=7.3, battery=0.4, on_mains=False, slowed_by=("hardware",)
    )
    told = Report(
        examples=9,
        accuracy=0.5,
        shadow=0.6,
        downloaded=0.4,
        per_class=ClassAccuracies(accuracy=(0.25, None, 1.0), shadow=(0.75, None, 1.0), downloaded=(0.125, None, 1.0)),
        audit={"label_l1": 0.0421, "reid": -0.01},
        epsilon=PrivacySpent(epsilon=3.2, delta=1e-5, budget=8.0),
        cost=RoundCost(seconds=83.0, joules=415.2),
    )
    assert 'id="readings"' not in reader.get("/devices/a")[1]
    device.tell(report(condition=CONDITION, telemetry=read))
    device.make_update = partial(type(device).make_update, device, report=told)  # type: ignore[method-assign]
    device.silent = False
    device.act()
    wait_until(lambda: bool(device.receipts()), "the update is judged")
    wait_until(lambda: 'id="readings"' in reader.get("/devices/a")[1], "the readings are shown")
    for (path, begins, ends), words in SHOWN.items():
        shown = reader.get(path)[1].partition(begins)[2].partition(ends)[0]
        assert [text for text in words if text not in shown] == [], (path, begins, shown)
    page_of_a = reader.get("/devices/a")[1]
    doctor = page_of_a.partition('id="doctor"')[2].partition("</section>")[0]
    for state, check in (("warning", "data"), ("failed", "disk")):
        what, remedy = texts().findings[check][state]
        assert what.split("'")[0] in doctor
        assert (remedy or LOOK).split("`")[0] in doctor
    assert "membership" not in page_of_a.partition('id="privacy-tiny"')[2].partition("</section>")[0]
    page_of_b = reader.get("/devices/b")[1]
    assert ("the device has not reported its checks" in page_of_b, 'id="privacy-tiny"' in page_of_b) == (True, False)
    (attempt,) = json.loads(reader.get("/api/v1/federations/tiny/rounds/1")[1])["attempts"]
    (update,) = attempt["updates"]
    assert update["report"].items() >= json.loads(told.model_dump_json(include={"audit", "epsilon", "cost"})).items()
    described = json.loads(reader.get("/openapi.json")[1])["components"]["schemas"]
    assert {"audit", "epsilon", "cost"} <= set(described["Report"]["properties"])
    device.tell(report())
    wait_until(lambda: 'id="readings"' not in reader.get("/devices/a")[1], "the readings are gone")


def test_a_condition_outlives_the_service(make_world: MakeWorld) -> None:
    world = make_world()
    with RunningService(world):
        world.start_devices()
        a = world.devices["a"]
        wait_until(lambda: a.session is not None, "a session")
        a.tell(report(condition=CONDITION))
        a.tell(report(condition=CONDITION.model_copy(update={"findings": ()})))
        wait_until(
            lambda: any('"findings":[]' in each.content for each in world.store.presence.conditions("tiny")),
            "the later one is stored",
        )
    known = world.known()
    (model,) = served_models(known, "tiny")
    assert (model.device, model.model, model.gain) == ("a", CONDITION.model, 0.25)
    assert doctor_findings(known) == {"a": []}


def test_a_wrong_clock_and_two_agents_under_one_identity_are_problems(make_world: MakeWorld) -> None:
    world, now = make_world(rounds=1000), time.time()
    with RunningService(world) as running:
        world.start_devices()
        wait_until(lambda: running.service.state.online == {"a", "b"}, "both are online")
        note = partial(running.service.conditions.note, now=now, is_delayed=False)
        note("a", report(clock=now - 50))
        assert "clock" not in world.problems(running.service)
        note("a", report(clock=now - 600))
        found = world.problems(running.service)["clock"]
        assert (found.device, found.what) == ("a", "its clock is 10 min behind the coordinator's")
        assert "timedatectl set-ntp true" in found.remedy
        note("a", report(clock=now))
        assert "clock" not in world.problems(running.service)
        for boot in BOOTS:
            note("b", report("b", boot=boot))
        assert "two devices with one identity" not in world.problems(running.service)
        note("b", report("b", boot=BOOTS[0]))
        found = world.problems(running.service)["two devices with one identity"]
        assert (found.device, "fedcg device revoke b" in found.remedy) == ("b", True)
        assert "The problem closes 10 minutes after the last time that both reported" in found.remedy
        for later_s, is_open in ((599, True), (601, False)):
            then = replace(world.known(running.service), now=now + later_s)
            assert any(each.kind == found.kind for each in open_problems(then)) is is_open


def test_a_report_that_waited_behind_an_update_is_no_evidence_of_a_wrong_clock(make_world: MakeWorld) -> None:
    board = ConditionBoard(make_world().store, "tiny")
    board.note("a", report(clock=100.0), 200.0, is_delayed=True)
    assert board.clock_ahead_s == {}
    board.note("a", report(clock=100.0), 200.0, is_delayed=False)
    assert board.clock_ahead_s == {"a": -100.0}
    board.note("a", report(), 200.0, is_delayed=False)
    assert board.clock_ahead_s == {}


def test_devices_that_remember_more_than_the_coordinator_are_a_problem_with_its_remedy(make_world: MakeWorld) -> None:
    world = make_world(pacing=RoundSettings(gather_s=60.0))
    with RunningService(world) as running:

        def remember(epoch: int, round_number: int, key: str | None = None) -> dict[str, Problem]:
            world.devices["a"].remembers = {"epoch": epoch, "round": round_number, "key": key}
            world.devices["a"].hello()
            wait_until(
                lambda: running.service.conditions.remembered.get("a") == (epoch, round_number, key != "f" * 64),
                "its hello is taken",
            )
            return world.problems(running.service)

        world.start_devices()
        epoch = running.service.epoch
        assert "devices are ahead" not in remember(epoch, running.service.state.round)
        problem = remember(epoch, 20)["devices are ahead"]
        assert f"a knows epoch {epoch} and round 20; this coordinator is at epoch {epoch} and round 1" in problem.what
        assert "fedcg coordinator restore FILE --dir NEW" in problem.remedy
        assert "If they decline as `not eligible`: start once with" in problem.remedy
        assert not problem.is_severe
        problem = remember(epoch + 3, 1)["devices are ahead"]
        assert problem.is_severe
        assert "fedcg coordinator run --accept-loss" in problem.remedy
        wait_until(lambda: "a" not in running.service.state.online, "it refuses the welcome, and is not invited")
        assert "devices are ahead" in remember(epoch, 20, world.key.public.hex)
        will_follow_nothing = remember(epoch, 20, "f" * 64)
        assert "devices are ahead" not in will_follow_nothing, "the key is its problem"
        problem = will_follow_nothing["older message key"]
        assert problem.is_severe, "of one device among many it would not be: it may also tell an untruth"
        assert "signing-N.key" in problem.remedy
        assert "devices are ahead" in remember(epoch, 20)
        world.wait_finished()
        assert "devices are ahead" not in world.problems(running.service), "no round is left that it could lack"


def test_a_device_outside_the_cohort_is_a_problem_with_a_remedy(make_world: MakeWorld) -> None:
    world = make_world(pacing=RoundSettings(gather_s=60.0))
    with RunningService(world) as running:
        world.start_devices()
        wait_until(lambda: len(running.service.state.online) == 2, "all are online")
        for device, mark in (("a", "1" * 32), ("b", None)):
            running.service.cohorts.note(device, mark)
        found = world.problems(running.service)["cohort differs"]
    assert (found.device, found.what) == ("b", "it has no cohort secret")
    assert "`fedcg cohort join --config AGENT.TOML`" in found.remedy


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
    assert schemas.decode(schemas.encode(good)) == good
    with pytest.raises(MalformedError):
        schemas.decode(json.dumps({**good.model_dump(mode="json"), "condition": wrong}).encode())


def test_every_finding_that_a_device_can_report_has_a_sentence_and_a_remedy_and_every_figure_a_title() -> None:
    assert set(texts().audit_figures) == set(get_args(AuditFigure))
    assert set(texts().findings) == set(schemas.DoctorFinding.model_json_schema()["properties"]["check"]["enum"])


def test_accuracies_by_class_are_means_over_the_clients_and_name_who_loses_most(make_world: MakeWorld) -> None:
    world = make_world()
    known = world.known()

    def delivery(**report: Any) -> UpdateRecord:
        return UpdateRecord("tiny", 1, 1, "x", "", 1, schemas.Outcome.ACCEPTED, "", json.dumps(report), 0.0, 1.0)

    count, nothing = world.spec.class_count, [None] * world.spec.class_count
    # Class 0: gains +0.2 and -0.4, so the mean is -0.1 and b loses most; class 1: only a, and nothing to compare with.
    last = {
        "a": delivery(
            per_class={"accuracy": [0.7, 0.9, *nothing[2:]], "shadow": [0.5, *nothing[1:]], "downloaded": None}
        ),
        "b": delivery(
            per_class={"accuracy": [0.1, *nothing[1:]], "shadow": [0.5, *nothing[1:]], "downloaded": [0.3] * count}
        ),
        "c": delivery(accuracy=0.5),
    }
    found = by_class(known, "tiny", last)
    assert [each.name for each in found] == list(world.spec.classes)
    assert (found[0].personal, found[0].alone, found[0].downloaded) == pytest.approx((0.4, 0.5, 0.3))
    assert found[0].gain == pytest.approx(-0.1)
    assert found[0].worst == "b"
    assert (found[1].personal, found[1].alone, found[1].gain, found[1].worst) == (0.9, None, None, None)
    assert by_class(known, "tiny", {"c": last["c"]}) == []


def test_updates_that_find_no_room_are_a_problem_until_there_is_room(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "MAX_PARTIAL_FILES", 1)
    world = make_world(pacing=RoundSettings(gather_s=60.0))
    a, b = world.devices["a"], world.devices["b"]
    a.carrier = schemas.Carrier.HTTPS  # its update is under way for as long as nobody puts the chunks
    with RunningService(world) as running:
        b.silent = True
        world.start_devices()
        wait_until(lambda: running.service.receiver.is_busy("a"), "a occupies the folder")
        assert "full partial store" not in world.problems(running.service)
        b.silent = False
        b.act()
        wait_until(lambda: "full partial store" in world.problems(running.service), "b has to wait")
        found = world.problems(running.service)["full partial store"]
        assert (found.subject, "1 update can't be received yet" in found.what) == ("tiny", True)
        assert "max_clients" in found.remedy
        a.pending = None  # it does not announce its update again
        running.service.receiver.forget("a")
        wait_until(lambda: "full partial store" not in world.problems(running.service), "there is room again")
