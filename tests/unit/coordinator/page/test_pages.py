"""The page over real HTTP, as a browser without script sees it."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.config import RoundSettings
from coordinator.http.access import COOKIE
from coordinator.members.api_tokens import Role
from coordinator.rounds.records import FederationStatus
from fedcg.event_log import read_events
from fedcg.wire.messages.messages import DeclineReason
from tests.support.coordinator.federations import Federations
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.coordinator.world import World
from tests.support.page.crowds import add_crowd
from tests.support.page.pages import Reader, ServedPage, served
from tests.support.waiting import wait_until

MAX_FIRST_PAINT_BYTES = 150_000
SCREENS = ("/", "/f/tiny", "/f/tiny/worth", "/f/tiny/models", "/f/tiny/sent", "/devices", "/repairs", "/events")
MORE_SCREENS = ("/enrolment", "/federations", "/federations/new", "/confirm/stop/tiny")


def make(tmp_path: Path, *names: str, clients: tuple[str, ...] = ("a", "b", "c"), rounds: int = 2) -> Federations:
    spec = tiny_spec(rounds)
    base, gather = aggregate_bytes(spec, 0, 0, seed=1), RoundSettings(gather_s=60.0, retry_s=0.0)
    world = World(tmp_path / "home", spec, base, clients=clients, min_clients=2, pacing=gather)
    return Federations(world, *names)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ServedPage]:
    made = make(tmp_path, "second")
    with served(made) as running:
        yield running
    made.world.store.close()


def start(page: ServedPage, federation: str = "tiny") -> None:
    for device in page.made.devices[federation]:
        device.start()


def shows(reader: Reader, path: str, *texts: str) -> None:
    """Wait until a page shows all of these."""
    wait_until(
        lambda: all(text in reader.get(path)[1] for text in texts), f"{path} shows {texts}; {reader.get(path)[1]}"
    )


def test_without_a_login_every_screen_leads_to_it_and_back(page: ServedPage) -> None:
    stranger = Reader(page.port)
    for path in (*SCREENS, *MORE_SCREENS, "/devices/a", "/devices.csv", "/f/tiny/sent.html"):
        status, headers, _ = stranger.ask("GET", path)
        assert (status, headers["location"]) == (303, f"/login?to={path}")
    assert stranger.ask("GET", "/devices", **{"HX-Request": "true"})[0] == 401
    assert stranger.get("/static/page.css")[0] == 200
    assert stranger.ask("POST", "/federations/tiny/stop")[1]["location"] == "/login"
    status, headers, _ = stranger.post("/login", token=page.token(Role.VIEWER), to="/devices?q=a")
    assert (status, headers["location"]) == (303, "/devices?q=a")
    assert "HttpOnly" in headers["set-cookie"]
    assert headers["set-cookie"].startswith(COOKIE)


@pytest.mark.parametrize("elsewhere", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:1"])
def test_a_login_never_leads_to_another_site(page: ServedPage, elsewhere: str) -> None:
    _, headers, _ = Reader(page.port).post("/login", token=page.token(), to=elsewhere)
    assert headers["location"] == "/"


def test_a_wrong_token_is_answered_with_the_form_and_the_reason(page: ServedPage) -> None:
    status, headers, text = Reader(page.port).post("/login", token="fcga_0_0")
    assert (status, "set-cookie" in headers) == (401, False)
    assert "the token is not valid" in text


def test_a_running_federation_shows_its_clients_and_what_they_delivered(page: ServedPage) -> None:
    page.made.devices["tiny"][2].silent = True
    page.made.devices["tiny"][1].decline = DeclineReason.NO_DATA
    reader = page.reader()
    assert "It waits for: 2 more devices (quorum 2)" in reader.get("/f/tiny")[1]
    start(page)
    shows(reader, "/f/tiny", "1<small> of 3 wanted", "no data", "3<small> of 3 online")
    text = reader.get("/f/tiny")[1]
    for device, phase in (("a", "delivered"), ("b", "declined"), ("c", "training")):
        assert phase in text.partition(f'id="c-{device}"')[2].partition("</tr>")[0]
    shows(reader, "/repairs", "b in tiny", "put images where")
    assert "50.0 %" in reader.get("/f/tiny/worth")[1].partition('id="w-a"')[2].partition("</tr>")[0]
    sent = reader.get("/f/tiny/sent")[1]
    assert "Never sent: extractor, and images." in sent
    assert "2" + "\N{NARROW NO-BREAK SPACE}" + "000" in sent  # the classifier's 40 x 50 numbers
    shows(reader, "/events?event=update_stored", "update stored")
    assert "attempt opened" not in reader.get("/events?event=update_stored")[1].partition("<tbody>")[2]


def test_a_refresh_of_now_is_its_live_part_made_once_for_all_who_watch(page: ServedPage) -> None:
    viewer, operator = page.reader(Role.VIEWER), page.reader()
    refresh = {"HX-Request": "true"}
    parts = {reader.ask("GET", "/f/tiny", **refresh)[2] for reader in (viewer, operator) for _ in range(3)}
    assert len(parts) == 1, "they differ, so each was made for one reader"
    (part,) = parts
    assert 'id="live"' in part
    assert 'id="repairs-count"' in part
    assert all(word not in part for word in ("<html", "<nav", "form_token"))
    whole = viewer.get("/f/tiny")[1]
    assert all(word in whole for word in ('id="live"', 'id="repairs-count"', "<nav", "form_token"))
    assert Reader(page.port).ask("GET", "/f/tiny", **refresh)[0] == 401


def test_presence_is_drawn_from_stored_changes_and_an_offline_device_has_no_health(page: ServedPage) -> None:
    start(page)
    reader = page.reader()
    shows(reader, "/devices?q=a", "good", "online")
    shows(reader, "/devices/a", 'class="on"', "round 2, on its own")
    page.made.world.broker.drop("a")
    shows(reader, "/devices/a", 'class="off"', ">offline</span>", "unavailable")
    changes = page.made.world.store.presence.changes("a", 0.0)
    assert [change.online for change in changes] == [True, False]


def test_the_operator_steers_with_forms_and_a_viewer_may_not(page: ServedPage) -> None:
    operator, viewer = page.reader(), page.reader(Role.VIEWER)
    store = page.made.world.store

    def status() -> FederationStatus:
        return store.federation("tiny").status

    assert operator.post("/federations/tiny/pause", form_of="/confirm/pause/tiny", reason="cleaning")[0] == 303
    assert (status(), store.federation("tiny").status_reason) == (FederationStatus.HELD, "cleaning")
    assert operator.post("/federations/tiny/resume", form_of="/federations")[0] == 303
    assert status() is FederationStatus.RUNNING
    assert operator.post("/federations/tiny/extend", form_of="/federations", rounds="5")[0] == 303
    assert store.federation("tiny").operator_policy.rounds == 7
    assert operator.post("/federations/tiny/extend", form_of="/federations", rounds="-5")[0] == 409
    assert operator.post("/devices/a/disable", form_of="/confirm/disable/a", reason="moved")[0] == 303
    assert "disabled: moved" in operator.get("/devices/a")[1]
    assert operator.post("/federations/tiny/stop", form_of="/confirm/stop/tiny")[0] == 303
    assert status() is FederationStatus.STOPPED
    assert "<form" not in viewer.get("/federations")[1].partition('id="live"')[2]
    assert viewer.post("/federations/second/stop", form_of="/federations")[0] == 403
    assert store.federation("second").status is FederationStatus.RUNNING
    audited = list(read_events(page.made.world.root / "audit.jsonl"))
    assert [(each["identity"], each["route"], each["outcome"]) for each in audited][-2:] == [
        ("operator", "POST /federations/tiny/stop", 303),
        ("viewer", "POST /federations/second/stop", 403),
    ]


def test_a_form_of_another_site_changes_nothing(page: ServedPage) -> None:
    operator = page.reader()
    status, _, text = operator.post("/federations/tiny/stop")
    assert (status, "form&#39;s own token" in text) == (403, True)
    assert operator.post("/federations/tiny/stop", form_token="0" * 64)[0] == 403
    assert page.made.world.store.federation("tiny").status is FederationStatus.RUNNING


def test_a_plan_with_errors_comes_back_with_all_of_them_and_the_text(page: ServedPage) -> None:
    plan = 'federation = "Bad Name"\nrounds = 0\nclasses = ["a", "b"]\nmethod = "none"\n# my own note\n'
    status, _, text = page.reader().post("/federations/new", form_of="/federations/new", plan=plan)
    assert status == 422
    for part in ("federation", "rounds", "there is no method", "# my own note", "line 1"):
        assert part in text
    assert len(page.made.world.store.federations()) == 2


def test_what_does_not_exist_is_a_page_that_names_what_there_is(page: ServedPage) -> None:
    reader = page.reader()
    for path, hint in (
        ("/f/none", "there are: tiny, second"),
        ("/f/none/worth", "there are: tiny, second"),
        ("/devices/none", "fedcg device list"),
    ):
        status, text = reader.get(path)
        assert (status, hint in text, "<h1>Not found</h1>" in text) == (404, True, True)
    assert reader.get("/devices?page=x")[0] == 422
    assert reader.get("/devices?page=-3&sort=%27&state=%3Cb%3E")[0] == 200


def test_names_that_are_markup_are_shown_as_text(page: ServedPage) -> None:
    page.made.steering.disable("a", "<script>alert(1)</script>")
    text = page.reader().get("/devices/a")[1]
    assert "&lt;script&gt;alert" in text
    assert "<script>alert" not in text


def test_an_empty_coordinator_says_how_to_begin(tmp_path: Path) -> None:
    made = make(tmp_path, clients=())
    with made.world.store._engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM aggregates")
        connection.exec_driver_sql("DELETE FROM federations")
    with served(made) as page:
        reader = page.reader()
        assert "No federation yet" in reader.get("/")[1]
        assert "No device is enrolled yet" in reader.get("/devices")[1]
        assert "Nothing to repair" in reader.get("/repairs")[1]
        for path in ("/federations", "/events", "/enrolment"):
            assert reader.get(path)[0] == 200
    made.world.store.close()


@pytest.mark.slow
def test_a_thousand_devices_fit_into_a_first_paint(tmp_path: Path) -> None:
    made = make(tmp_path, clients=(), rounds=20)
    add_crowd(made.world.store, "tiny", 1000, 8, time.time())
    with served(made) as page:
        reader = page.reader()
        for path in (*SCREENS, *MORE_SCREENS, "/devices/line-0005"):
            status, text = reader.get(path)
            assert (status, len(text.encode()) < MAX_FIRST_PAINT_BYTES) == (200, True), f"{path}: {len(text)} bytes"
        assert "125 of 1000 are worse off than alone" in reader.get("/f/tiny/worth")[1]
        assert "1000 of 1000 devices" in reader.get("/devices")[1]
        assert "page 10 of 10" in reader.get("/devices?page=99")[1]
        found = reader.get("/devices?q=line-0999&state=offline")[1]
        assert "1 of 1000 devices" in found
        rows = list(csv.DictReader(io.StringIO(reader.get("/devices.csv?sort=-device")[1])))
        assert (len(rows), rows[0]["device"], rows[0]["accuracy"]) == (1000, "line-0999", "")
        report = reader.get("/f/tiny/sent.html")[1]
        assert report.count("<h3>line-") == 1000
    made.world.store.close()
