"""The page over real HTTP, as a browser without script sees it."""

import gzip
import html
import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import insert, select, update

from coordinator.aggregation.jobs import Progressed
from coordinator.facts.sent import SENT, own_fields
from coordinator.http.access import COOKIE
from coordinator.members.api_tokens import Role
from coordinator.page.views import Recent
from coordinator.rounds.records import FederationStatus, PresenceRecord
from coordinator.storage import schema
from edge_client.store.checked_files import SENT_FILE, SentRecord, sent_items
from fedcg.sentences import texts
from fedcg.wire.messages.schemas import DeclineReason, DeviceCondition, DoctorFinding, Heartbeat, RoundAttempt
from fedcg.wire.parts import ReportField
from tests.support.commands import data_of, run_fedcg, succeeds
from tests.support.coordinator.world import REASON, TOO_LONG, OddC, World
from tests.support.page.pages import Reader, ServedPage, add_crowd, shows, tiny_page
from tests.support.present import present
from tests.support.wire.golden_files import CONDITION

MAX_FIRST_PAINT_BYTES, MAX_SCRIPT_BYTES = 150_000, 70_000
LOADED = re.compile(r'(?:src|href|data-plot|data-plot-style)="(/static/[^"]+)"')
SCREENS = (
    "/",
    "/search?q=line-0",
    "/f/tiny",
    "/f/tiny/worth",
    "/f/tiny/models",
    "/f/tiny/sent",
    "/f/tiny/sent/line-0005",
    "/f/tiny/audits",
    "/devices",
    "/repairs",
    "/events",
)
WORTHLESS = json.dumps({"accuracy": 0.0})
MORE_SCREENS = ("/enrolment", "/f/tiny/policy", "/federations", "/federations/new", "/confirm/stop/tiny")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ServedPage]:
    with tiny_page(tmp_path, "second", clients=("a", "b", "c")) as running:
        yield running


def test_without_a_login_every_screen_leads_to_it_and_back(page: ServedPage) -> None:
    stranger = Reader(page.port)
    for path in (*SCREENS, *MORE_SCREENS, "/devices/a", "/f/tiny/sent.html"):
        status, headers, _ = stranger.ask("GET", path)
        assert (status, headers["location"]) == (303, f"/login?to={quote(path)}")
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
    assert "is waiting for: 2 more devices (quorum 2)" in reader.get("/f/tiny")[1]
    page.made.start()
    shows(reader, "/f/tiny", "1<small> of 3 wanted", "no data", "3<small> of 3 online")
    text = reader.get("/f/tiny")[1]
    for device, phase in (("a", "delivered"), ("b", "declined"), ("c", "training")):
        assert phase in text.partition(f'id="c-{device}"')[2].partition("</tr>")[0]
    shows(reader, "/repairs", "b in tiny", "Put images where")
    assert "50.0 %" in reader.get("/f/tiny/worth")[1].partition('id="w-a"')[2].partition("</tr>")[0]
    worth = reader.get("/f/tiny/worth")[1]
    assert "No device reports a local-only model" in worth
    assert "[training]\nshadow_every = 4</pre>" in worth
    assert "loses" not in worth.partition("Worst client")[2].partition("</section>")[0]
    sent = reader.get("/f/tiny/sent")[1]
    assert "Never sent: extractor, and training data." in sent
    (update,) = page.made.world.store.updates("tiny", RoundAttempt(1, 1))
    for path in ("/f/tiny/sent", "/f/tiny/sent.html"):
        text = html.unescape(reader.get(path)[1])
        for model in SENT:
            assert ", ".join(own_fields(model)) in text, f"{path} leaves out fields of {model.__name__}"
        assert all(field.meaning in text for field in ReportField)
        assert update.artifact in text
        for name, value in json.loads(update.facts or "").items():
            assert f"{name} {value}" in text
    assert "weights of the private networks: cohort secret, or the public spec seed on a device without one." in sent
    assert "Devices without a cohort secret: a, b, c." in sent
    assert "2" + "\N{NARROW NO-BREAK SPACE}" + "000" in sent  # the classifier's 40 x 50 numbers
    shows(reader, "/events", "tiny: round 1: update of a accepted (", "b declined (no_data)", 'tr class="warning"')
    shows(reader, "/f/tiny", "round 1: update of a accepted (")
    shows(reader, "/events?event=update_stored", "update of a accepted")
    shows(reader, "/devices/a", ">accepted</span>")
    shows(reader, "/f/tiny/sent.html", "<td>accepted</td>")
    assert "opened (" not in reader.get("/events?event=update_stored")[1].partition("<tbody>")[2]
    assert "a accepted the invitation" not in reader.get("/events")[1]
    assert "a accepted the invitation" in reader.get("/events?level=debug")[1]


def test_a_devices_own_record_is_compared_with_what_arrived(page: ServedPage, tmp_path: Path) -> None:
    page.made.start()
    reader, world = page.reader(Role.VIEWER), page.made.world
    shows(reader, "/f/tiny", "finished")
    shows(reader, "/f/tiny/sent/a", ">accepted</span>", "What left a", "9 more rounds", "10 more rounds")
    update, other = world.store.overview.deliveries("tiny", "a")
    times = itertools.count(update.stored_at - 1, 2)  # the record begins before they arrived, and ends afterwards
    own = SentRecord(tmp_path, "tiny", lambda: next(times))
    for each in (update, other):
        own.update(world.artifacts.get(each.artifact))
        own.receipt(each.artifact, "accepted")
    place, environment = ("--url", f"http://127.0.0.1:{page.port}"), {"FEDCG_API_TOKEN": page.token(Role.VIEWER)}

    def compared(**changes: object) -> tuple[int, str]:
        first, second = sent_items(tmp_path / SENT_FILE)
        values = {"ok": True, "data": {"device": "a", "items": [{**first, **changes}, second]}}
        status, _, text = reader.post("/f/tiny/sent/a", "/f/tiny/sent/a", record=json.dumps(values))
        (tmp_path / "sent.json").write_text(json.dumps(values))
        done = run_fedcg("federation", "reconcile", tmp_path / "sent.json", "tiny", *place, environment=environment)
        assert done.exit_code == (8 if changes else 0), done.output
        return status, text.partition('id="compare"')[2]

    assert "2 updates have the same SHA-256, size and outcome in both records. No differences." in compared()[1]
    for changes, told in (
        ({"bytes": 1}, f"1 bytes on the device, {update.size} here"),
        ({"receipt": "rejected"}, "rejected on the device, accepted here"),
        ({"artifact": "0" * 64, "receipt": None}, "the device sent it, but it never arrived completely"),
        ({"artifact": "0" * 64}, "it arrived here, but the device&#39;s record lacks it"),
    ):
        assert told in compared(**changes)[1], changes
    status, _, text = reader.post("/f/tiny/sent/a", "/f/tiny/sent/a", record='{"data": {"device": "<b>", "items": []}}')
    assert (status, "This is the record of &#39;&lt;b&gt;&#39;." in text) == (422, True)
    assert reader.post("/f/tiny/sent/a", "/f/tiny/sent/a", record="no")[0] == 422
    assert reader.get("/f/tiny/sent/nobody")[0] == 404


def test_versions_are_compared_pinned_and_downloaded(page: ServedPage) -> None:
    page.made.start()
    reader, store = page.reader(), page.made.world.store
    shows(reader, "/f/tiny", "finished")
    assert reader.post("/f/tiny/models/1/pin", "/f/tiny/models", label="best")[0] == 303
    row = reader.get("/f/tiny/models")[1].partition('id="v-1"')[2].partition("</tr>")[0]
    assert (">best</span>" in row, "<button>Unpin</button>" in row) == (True, True)
    place, environment = ("--url", f"http://127.0.0.1:{page.port}"), {"FEDCG_API_TOKEN": page.token(Role.OPERATOR)}

    def ask(*words: object) -> Any:
        return data_of(succeeds("federation", *words, *place, "--json", environment=environment))

    assert {each["round"]: each["pinned"] for each in ask("models", "tiny")} == {2: None, 1: "best", 0: None}
    ask("pin", "tiny", 1, "--remove")
    ask("pin", "tiny", 2)
    assert {each["round"]: each["pinned"] for each in ask("models", "tiny")} == {2: "pinned", 1: None, 0: None}
    assert reader.post("/f/tiny/models/9/pin", "/f/tiny/models", label="best")[0] == 404
    assert "write 1 to 40" in reader.post("/f/tiny/models/1/pin", "/f/tiny/models", label="x" * 41)[2]
    artifact = store.aggregates("tiny")[2].artifact
    status, headers, data = reader.transfer("GET", "/api/v1/federations/tiny/models/2/artifact")
    assert (status, data) == (200, page.made.world.artifacts.get(artifact))
    assert 'filename="tiny-round-2.fedcg"' in headers["content-disposition"]
    changes = {"answers": "1", "returned": "3", "because": "drift"}
    told = CONDITION.model_copy(update={"model": present(CONDITION.model).model_copy(update=changes)})
    store.presence.keep_condition("tiny", "a", time.time(), told.model_dump_json())
    row = shows(reader, "/f/tiny/models", "compared with 1, which answers").partition('id="m-a"')[2]
    assert "3 rolled back: drift" in row
    viewer = page.reader(Role.VIEWER)
    assert viewer.get("/api/v1/federations/tiny/models/2/artifact")[0] == 403
    assert "Unpin" not in viewer.get("/f/tiny/models")[1]
    figures = {each["what"]: (each["first"], each["second"]) for each in ask("compare", "tiny", 0, 1)}
    assert figures["mean accuracy after training from it"] == (0.5, 0.5)
    assert figures["merged updates"] == (0, 3)
    assert figures["relative L2 distance of the classifier"][1] > 0.1
    assert "relative L2 distance of the classifier" in viewer.get("/f/tiny/compare?first=0&second=1")[1]
    devices = {each["what"]: (each["first"], each["second"]) for each in ask("compare", "tiny", "a", "b")}
    assert devices["round of the last update"] == (2, 2)
    assert reader.get("/f/tiny/compare?first=0&second=a")[0] == 409
    assert reader.get("/f/tiny/compare?first=0&second=7")[0] == 404


def test_what_a_device_found_names_the_federations_that_it_is_about(page: ServedPage) -> None:
    secret, disk = (DoctorFinding(check=check, state="warning") for check in ("cohort secret", "disk"))
    for federation, findings in (("tiny", (secret, disk)), ("second", (disk,))):
        content = DeviceCondition(findings=findings).model_dump_json()
        page.made.world.store.presence.keep_condition(federation, "b", time.time(), content)
    doctor = page.reader().get("/devices/b")[1].partition('id="doctor"')[2].partition("</section>")[0]
    rows = dict(re.findall(r'data-label="Finding">(.*?)</td>.*?data-label="Federation">(.*?)</td>', doctor))
    assert sorted(rows.values()) == ["second, tiny", "tiny"]
    assert next(where for what, where in rows.items() if "cohort secret" in what) == "tiny"


class StillMerging(OddC):
    """Merges the others for as long as the test takes."""

    def finish(self, *_: object) -> None:
        return


def test_an_update_in_quarantine_is_shown_with_reason_figure_and_threshold_by_page_and_commands(tmp_path: Path) -> None:
    why = f"not merged (quarantine): {TOO_LONG}; {REASON}"
    with tiny_page(tmp_path, clients=("a", "b", "c", "d"), make_worker=StillMerging) as page:
        page.made.start()
        reader, escaped = page.reader(), html.escape(why, quote=True).replace("&#x27;", "&#39;")
        shown = shows(reader, "/f/tiny", "3 delivered", "1 quarantined", "4<small> of 4 wanted")
        assert "Odd updates" in shown
        assert f'<a href="/devices/c">c</a>, round 1: {escaped}' in shown
        row = html.unescape(shown.partition('id="c-c"')[2].partition("</tr>")[0])
        assert '<span class="dot quarantined"></span>quarantined' in row
        assert why in row
        odd = f"its update to round 1 of tiny is {escaped}"
        shows(reader, "/devices/c", odd, ">quarantine</span>", f"{escaped}</td>")
        shows(reader, "/repairs", "odd update", "raise the figure&#39;s bound")
        assert "quarantine" not in reader.get("/devices/a")[1]
        place = ("--url", f"http://127.0.0.1:{page.port}")
        environment = {"FEDCG_API_TOKEN": page.token(Role.VIEWER), "COLUMNS": "40"}  # of the shell; a pipe has no width
        assert f"tiny, round 1: {why}" in run_fedcg("device", "show", "c", *place, environment=environment).output
        told = run_fedcg("federation", "show", "tiny", *place, environment=environment).output
    assert "\nupdates 4 of 4 (quorum 2), 4 of 4 devices online\n" in told


def test_training_and_merge_are_shown_as_far_as_they_are(page: ServedPage) -> None:
    device = page.made.devices["tiny"][0]
    for each in page.made.devices["tiny"]:
        each.silent = True
    page.made.start()
    reader = page.reader()
    shows(reader, "/f/tiny", "3 training")

    def report(step: int) -> None:
        at = {"federation": "tiny", "sender": "a", "recipient": "coordinator", "round": 1, "attempt": 1}
        device.tell(Heartbeat(**at, phase="classify", step=step, steps=200))

    report(20)
    row = shows(reader, "/f/tiny", '<progress max="1" value="0.1" ').partition('id="c-a"')[2].partition("</tr>")[0]
    assert "10 %" in row
    assert "classify" in row
    assert ", done" not in row  # one report has no rate
    begun = page.made.world.store.participants("tiny", RoundAttempt(1, 1))[0].training_at
    assert begun is not None
    time.sleep(0.05)
    report(60)
    row = shows(reader, "/f/tiny", '<progress max="1" value="0.3" ').partition('id="c-a"')[2].partition("</tr>")[0]
    assert "30 %, done" in row
    assert page.made.world.store.participants("tiny", RoundAttempt(1, 1))[0].training_at == begun, "the first report"
    assert "3 training" in shows(reader, "/f/tiny?phase=training", 'id="c-b"')
    assert "No client is declined now." in reader.get("/f/tiny?phase=declined")[1]
    ends_at = page.made.coordinator.services["tiny"].progress["a"].ends_at
    assert ends_at is not None
    assert f'data-until="{ends_at:.0f}"' in row
    worker = page.made.world.workers[0]
    for step, loss in ((10, 1.5), (20, 0.75), (30, 0.5)):
        worker.notify(Progressed(1, 1, 1, "distil", step, 40, loss))
    merge = ("Round 1, distil: step 30 of 40", "loss <b>0.5</b> at step 30, from 1.5 at step 10")
    text = shows(reader, "/f/tiny", *merge)
    # the curve falls from 1.5 at the left edge to 0.5 at the right one; 0.75 at step 20 is three quarters down
    assert 'points="0.0,0.0 100.0,30.0 200.0,40.0 "' in text
    for each in page.made.devices["tiny"]:
        each.silent = False
        each.act()
    text = shows(reader, "/f/tiny", "The federation has ended", "Distillation of round 1: loss <b>0.5</b>")
    assert "distil: step" not in text


def test_a_refresh_of_now_is_its_live_part_made_once_for_all_who_watch(page: ServedPage) -> None:
    viewer, operator = page.reader(Role.VIEWER), page.reader()
    page.application.state.recent = Recent(clock=lambda: 0.0)  # six requests may take longer than a part is kept
    refresh = {"HX-Request": "true"}
    readers = (viewer, page.reader(Role.VIEWER), operator, page.reader())
    parts = [reader.ask("GET", "/f/tiny", **refresh)[2] for reader in readers for _ in range(2)]
    assert len(set(parts)) == 2, "they differ more than by the links of operators, so each was made for one reader"
    part = parts[0]
    assert ["/confirm/pause/tiny?to=/f/tiny" in each for each in parts] == [False] * 4 + [True] * 4
    assert 'id="live"' in part
    assert 'id="repairs-count"' in part
    assert all(word not in part for word in ("<html", "<nav", "form_token"))
    whole = viewer.get("/f/tiny")[1]
    assert all(word in whole for word in ('id="live"', 'id="repairs-count"', "<nav", "form_token"))
    assert Reader(page.port).ask("GET", "/f/tiny", **refresh)[0] == 401


def test_a_presence_timeline_has_gaps_where_nothing_was_observed(page: ServedPage) -> None:
    store, hour = page.made.world.store, 3600.0
    now = time.time()
    seen = ((18.0, True, ""), (12.0, False, "its status"), (6.0, True, ""), (3.0, False, "the coordinator was stopped"))
    store.presence.note(*(PresenceRecord("tiny", "a", now - ago * hour, online, why) for ago, online, why in seen))
    drawn = re.findall(r'<rect class="(\w+)" (?:x="([\d.]+)" )?width="([\d.]+)"', page.reader().get("/devices/a")[1])
    bands = [(name, float(x or 0), float(width)) for name, x, width in drawn]
    # of a day of 1000 units: 6 hours are 250; before the first change, 18 hours ago, the device was not observed
    expected = [("unknown", 0, 1000), ("on", 250, 250), ("off", 500, 250), ("on", 750, 125), ("unknown", 875, 125)]
    assert [each[0] for each in bands] == [each[0] for each in expected]
    for (_, x, width), (_, wanted_x, wanted_width) in zip(bands, expected, strict=True):
        assert (x, width) == pytest.approx((wanted_x, wanted_width), abs=1.0)
    week = page.reader().get("/devices/a?days=7")[1]
    assert re.findall(r'<rect class="on" x="([\d.]+)"', week) == [f"{1000 - 18 / 0.168:.1f}", f"{1000 - 6 / 0.168:.1f}"]


def test_the_operator_steers_with_forms_and_a_viewer_may_not(page: ServedPage) -> None:
    operator, viewer, store = page.reader(), page.reader(Role.VIEWER), page.made.world.store
    for form, form_of, fields, shown, text in (
        ("federations/tiny/pause", "/confirm/pause/tiny", {"reason": "cleaning"}, "/f/tiny", 'badge warn">paused'),
        ("federations/tiny/resume", "/federations", {}, "/events", "tiny: started or resumed by an operator"),
        ("federations/tiny/extend", "/federations", {"rounds": "5"}, "/f/tiny", "of 7"),
        ("devices/a/disable", "/confirm/disable/a", {"reason": "moved"}, "/devices/a", "disabled: moved"),
        ("devices/a/enable", "/devices/a", {}, "/events", "a enabled and invited again"),
        ("federations/tiny/stop", "/confirm/stop/tiny", {}, "/federations", "stopped"),
        ("federations/tiny/archive", "/federations", {}, "/federations?archived=true", 'id="f-tiny"'),
    ):
        assert operator.post(f"/{form}", form_of=form_of, **fields)[0] == 303, form
        shows(operator, shown, text)
    assert 'id="f-tiny"' not in operator.get("/federations")[1]
    assert operator.get("/f/tiny")[0] == 200  # the data of an archived one stay
    for form, fields, answer, text in (
        ("federations/second/extend", {"rounds": "-5"}, 409, "whole number"),
        ("federations/second/stop", {"reason": "x" * 5000}, 409, "write at most 300"),
        ("federations/second/stop", {"form_token": "0" * 64}, 403, "form&#39;s hidden token"),  # of another site
    ):
        code, _, found = operator.post(f"/{form}", form_of="" if answer == 403 else "/federations", **fields)
        assert (code, text in found) == (answer, True), form
    assert "<form" not in viewer.get("/federations")[1].partition('id="live"')[2]
    assert viewer.post("/federations/second/stop", form_of="/federations")[0] == 403
    assert store.federation("second").status is FederationStatus.RUNNING
    assert operator.post("/logout", form_of="/devices")[0] == 303
    assert operator.ask("GET", "/devices")[1]["location"] == "/login?to=/devices"


def test_the_front_page_has_a_row_for_each_federation_and_a_search_that_leads_to_what_it_finds(
    page: ServedPage,
) -> None:
    add_crowd(page.made.world.store, "second", 3, 2, time.time())
    reader = page.reader()
    front = reader.get("/")[1]
    rows = {name: front.partition(f'id="f-{name}"')[2].partition("</tr>")[0] for name in ("tiny", "second")}
    assert '<a href="/f/second">' in rows["second"]
    expected = (
        'aria-label="second: mean accuracy by round, from 69.0 % in round 1 to 71.0 % in round 2; local-only 66.0 %"'
    )
    assert expected in rows["second"]
    # of a range of 7 points, local-only rises by the lowest two and personal by the highest two
    assert re.findall(r'<polyline(?: class="\w+")? points="([^"]+)"', rows["second"]) == [
        "0.0,24.0 100.0,17.1 ",
        "0.0,6.9 100.0,0.0 ",
    ]
    assert "0 of 6<small>online" in rows["second"]
    assert "round 1<" not in rows["tiny"]
    assert "unavailable" in rows["tiny"]
    assert '<a href="/f/second/worth"' in reader.get("/f/tiny/worth")[1], "the switcher keeps the screen"
    found = reader.get("/search?q=line-0001")[1]
    assert '<a href="/devices/line-0001">line-0001</a>' in found
    assert "Nothing matches “&lt;b&gt;”" in reader.get("/search?q=%3Cb%3E")[1]


def test_the_address_of_the_devices_has_filter_order_and_columns(page: ServedPage) -> None:
    for device, number in (("a", 10), ("b", 2)):
        page.made.operations.describe(device, {"labels": ["north"], "site": f"hall {number}", "note": "<i>"})
    reader = page.reader(Role.VIEWER)
    _, headers, text = reader.ask("GET", "/devices?label=north&sort=-site&columns=note&columns=site&q=")
    assert re.findall(r'id="d-([^"]+)', text) == ["a", "b"]
    assert re.findall(r'data-label="(\w+)"', text) == ["Device", "Site", "Note"] * 2
    assert '<td data-label="Note" class="details">&lt;i&gt;</td>' in text
    assert headers["hx-replace-url"] == "/devices?label=north&sort=-site&columns=site&columns=note"
    assert "Hall" not in text
    assert re.search(r"<option selected>north</option>", text)
    assert 'href="/devices?label=north&amp;sort=site&amp;columns=site&amp;columns=note"' in text
    assert reader.ask("GET", "/devices?state=&columns=none&page=9")[1]["hx-replace-url"] == "/devices?"
    assert 'form="bulk"' not in text, "a viewer selects nothing"


def test_several_devices_are_changed_at_once_with_a_result_for_each_and_a_line_in_the_audit_log(
    page: ServedPage,
) -> None:
    operator, viewer, known = page.reader(), page.reader(Role.VIEWER), page.made.world.store
    shown = operator.get("/confirm/devices?action=disable&device=a&device=b")[1]
    assert "Disable: 2 devices?" in shown
    fields = dict.fromkeys(re.findall(r'name="(device:\w+)"', shown), "on") | {"device:none": "on"}
    answer = operator.post("/devices", "/devices", action="disable", reason="moved", **fields)
    assert answer[0] == 200
    assert "Disable: 2 of 3 done" in answer[2]
    assert "there is no device" in answer[2].partition('href="/devices/none"')[2].partition("</tr>")[0]
    assert [each.id for each in known.devices() if each.disabled_because == "moved"] == ["a", "b"]
    for action, done in (("enable", 2), ("label", 2), ("unlabel", 2)):
        text = operator.post("/devices", "/devices", action=action, label="north", **fields)[2]
        assert f"{done} of 3 done" in text
        assert [device for device in "abc" if known.register.labels(device)[device]] == (
            ["a", "b"] if action == "label" else []
        )
    assert "0 of 3 done" in operator.post("/devices", "/devices", action="label", label="No!", **fields)[2]
    assert operator.post("/devices", "/devices", action="erase", **fields)[0] == 409
    assert viewer.post("/devices", "/devices", action="enable", **fields)[0] == 403
    assert "No device is selected" in operator.get("/confirm/devices?action=enable")[1]
    matching = operator.get("/confirm/devices?action=revoke&scope=matching&q=b")[1]
    assert re.findall(r'name="device:(\w+)"', matching) == ["b"]
    lines = [line for line in page.application.state.changes.audit.last(99) if line["route"] == "POST /devices"]
    assert all(f'"device:{device}"' in lines[-1]["changed"] for device in ("a", "b", "none"))
    form = {
        "labels": "north, pilot",
        "site": "hall 1",
        "note": "",
        "was_site": "hall 1",
    }  # another tab changed the site
    assert operator.post("/devices/a/describe", "/devices/a", **form)[0] == 303
    assert present(known.device("a")).site == ""
    assert 'value="north pilot"' in operator.get("/devices/a")[1]
    assert "<dd>north, pilot</dd>" in viewer.get("/devices/a")[1]


def test_an_operator_steers_from_now_and_comes_back_to_it(page: ServedPage) -> None:
    operator, store = page.reader(), page.made.world.store
    page.made.operations.change_policy("tiny", {"deadline_s": 90.5, "max_clients": 40})
    line = shows(operator, "/f/tiny", 'class="hint policy"').partition('class="hint policy">')[2].partition("</p>")[0]
    assert line == "fedcg · at least 2 clients, at most 40 · deadline 2 min · 3 attempts · equal-steps"
    done = operator.post("/federations/tiny/extend", form_of="/confirm/extend/tiny", rounds="2", to="//evil.example")
    assert (done[0], done[1]["location"], store.federation("tiny").policy.rounds) == (303, "/", 4)
    assert "Only operators and admins" in page.reader(Role.VIEWER).get("/confirm/stop/tiny")[1]


def test_repairs_have_buttons_that_lead_to_a_confirmation_and_back(page: ServedPage) -> None:
    operator, store = page.reader(), page.made.world.store
    page.made.operations.disable("c", "moved")
    page.made.operations.change_policy("tiny", {"min_cohort": 1})
    page.made.devices["tiny"][0].start()
    fewer = '"/f/tiny/policy?min_clients=1&amp;">Change policy: min_clients = 1…'
    shown = shows(operator, "/repairs", "too few devices", '"/confirm/enable/c?to=/repairs">Enable c…', fewer)
    assert texts().operations["enable"][1] in shown
    viewer = page.reader(Role.VIEWER).get("/repairs")[1]
    assert ("/confirm/" in viewer, texts().operations["enable"][1] in viewer) == (False, True)
    form = "/confirm/enable/c?to=/repairs"
    status, headers, _ = operator.post("/devices/c/enable", form_of=form, to="/repairs")
    assert (status, headers["location"], store.members()[2].disabled_at) == (303, "/repairs", None)
    assert operator.post("/devices/c/readmit", form_of="/confirm/readmit/c", to="/repairs")[0] == 303
    assert store.members()[2].readmitted_at is not None
    assert re.search(r'name="min_clients"[^>]* value="1"', operator.get("/f/tiny/policy?min_clients=1&")[1])


def test_the_timeline_of_a_round_is_drawn_and_written_in_the_page(page: ServedPage) -> None:
    store, now = page.made.world.store, time.time()
    add_crowd(store, "second", 30, 2, now)
    opened = store.attempts("second")[1].opened_at
    accepted, third = {"accepted_at": opened + 48.0, "training_at": opened + 96.0}, schema.participants
    with store._engine.begin() as connection:
        connection.execute(update(third).where(third.c.round == 2, third.c.client == "line-0003").values(**accepted))
        at_updates = schema.updates.c.round == 2, schema.updates.c.client == "line-0003"
        times = {"manifest_at": opened + 240.0, "stored_at": opened + 288.0}
        connection.execute(update(schema.updates).where(*at_updates).values(**times))
    text = page.reader().get("/f/second?round=2")[1].partition('id="timeline"')[2].partition("</section>")[0]
    row = text.partition('href="/devices/line-0003"')[2].partition("</tr>")[0]
    bars = re.findall(r'<rect class="([a-z-]+)" x="([\d.]+)" width="([\d.]+)"', row)
    # of 480 s: 48 s are 100 units
    assert [(name, float(x), float(width)) for name, x, width in bars] == [
        ("invited", 0.0, 100.0),
        ("download", 100.0, 100.0),
        ("training", 200.0, 300.0),
        ("upload", 500.0, 100.0),
        ("waiting", 600.0, 400.0),
    ]
    assert "training <b>2 min</b>" in row
    place = ("--url", f"http://127.0.0.1:{page.port}")
    environment = {"FEDCG_API_TOKEN": page.token(Role.VIEWER), "COLUMNS": "200"}
    shown = run_fedcg("federation", "show", "second", *place, environment=environment).output
    assert re.search(r"\n2 +1 +480\.0 +30 +0\.\d+ +0\.\d+", shown)
    last = page.reader().get("/f/second")[1]
    assert 'href="/f/second?round=2#timeline"' in last.partition('id="rounds"')[2]
    assert "The slowest 20 of 30" in last
    assert page.reader().get("/f/second?round=9")[0] == 404


def test_a_plan_with_errors_comes_back_with_all_of_them_and_the_text(page: ServedPage) -> None:
    plan = 'federation = "Bad Name"\nrounds = 0\nclasses = ["a", "b"]\nmethod = "none"\n# my own note\n'
    status, _, text = page.reader().post("/federations/new", form_of="/federations/new", plan=plan)
    assert status == 422
    for part in ("federation", "rounds", "there is no method", "# my own note", "line 1"):
        assert part in text
    # Only the method refuses this one:
    image = 'image = {mode = "L", height = 28, width = 28, mean = [0.5], std = [0.5]}'
    plan = f'federation = "x"\nrounds = 1\nclasses = ["a", "b"]\nmethod = "fedavg"\n{image}\n[params]\nbogus = 1\n'
    assert "line 7: params.bogus" in page.reader().post("/federations/new", form_of="/federations/new", plan=plan)[2]
    assert len(page.made.world.store.federations()) == 2


def test_a_refused_form_comes_back_with_its_input_and_can_be_sent_again(page: ServedPage) -> None:
    reader = page.reader()
    sent = {"device": "a", "hours": "24", "federation": "tiny"}
    status, _, text = reader.post("/enrolment", form_of="/enrolment", **sent)
    assert (status, "already" in text) == (409, True)
    for name, value in sent.items():
        assert f'name="{name}" value="{value}"' in text
    status, _, text = reader.post("/federations/tiny/extend", form_of="/federations", rounds="five")
    assert (status, 'name="rounds" value="five"' in text) == (409, True)
    (token,) = re.findall(r'name="form_token" value="([0-9a-f]+)"', text)
    assert reader.post("/federations/tiny/extend", rounds="5", form_token=token)[0] == 303
    status, _, text = page.reader(Role.VIEWER).post("/enrolment", form_of="/federations", **sent)
    assert (status, 'value="tiny"' in text, "Send again" in text) == (403, True, False)
    plan = "federation = 'x'\n# what I wrote while the session ended\n"
    status, _, text = Reader(page.port).post("/federations/new", plan=plan, form_token="0" * 64)
    assert (status, "# what I wrote" in text, "form_token" in text) == (401, True, True)
    assert "Send again" not in text
    text = reader.post("/federations/new", form_of="/federations/new", plan="rounds = 0")[2]
    assert 'name="start" value="yes">' in text, "it was not to be started"
    assert reader.post("/enrolment", form_of="/enrolment", **{f"f{n}": "" for n in range(1100)})[0] == 400


def test_an_unknown_address_is_a_page_for_a_browser_and_a_problem_for_a_program(page: ServedPage) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for reader in (page.reader(), Reader(page.port)):
        status, headers, text = reader.ask("GET", "/no/such/page", **browser)
        assert (status, headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert "<h1>Not found</h1>" in text
        assert reader.ask("GET", "/no/such/page", Accept="*/*")[1]["content-type"] == "application/problem+json"
        assert reader.ask("GET", "/api/v1/none", **browser)[1]["content-type"] == "application/problem+json"
    assert "<h1>" in Reader(page.port).ask("PUT", "/devices", **browser)[2]
    status, _, text = page.reader().ask("GET", "/devices?page=soon", **browser)
    assert (status, "openapi" in text) == (422, False)
    assert "page: must be" in text


def test_a_failed_attempt_is_no_point_in_a_chart_and_has_no_part_in_a_mean(page: ServedPage) -> None:
    store = page.made.world.store
    add_crowd(store, "second", 3, 2, time.time())
    with store._engine.begin() as connection:  # the second attempt of the second round is the one that was merged
        for table in (schema.attempts, schema.updates):
            rows = connection.execute(select(table).where(table.c.federation == "second", table.c.round == 2))
            connection.execute(insert(table), [{**row, "attempt": 2} for row in rows.mappings()])
            was = update(table).where(table.c.round == 2, table.c.attempt == 1)
            connection.execute(was.values({"state": "failed"} if table is schema.attempts else {"report": WORTHLESS}))
    drawn = re.findall(r"data-chart='([^']+)'", page.reader().get("/devices/line-0001")[1])
    assert [json.loads(each)["x"] for each in drawn] == [[1, 2]]
    (drawn,) = re.findall(r"data-chart='([^']+)'", page.reader().get("/f/second/worth")[1])
    assert min(json.loads(drawn)["series"][0]["values"]) > 0.5


def test_what_does_not_exist_is_a_page_that_names_what_there_is(page: ServedPage) -> None:
    reader = page.reader()
    for path, hint in (
        ("/f/none", "existing ones: tiny, second"),
        ("/f/none/worth", "existing ones: tiny, second"),
        ("/devices/none", "fedcg device list"),
    ):
        status, text = reader.get(path)
        assert (status, hint in text, "<h1>Not found</h1>" in text) == (404, True, True)
    assert reader.get("/devices?page=x")[0] == 422
    assert reader.get("/devices?page=-3&sort=%27&state=%3Cb%3E")[0] == 200


def test_names_that_are_markup_are_shown_as_text(page: ServedPage) -> None:
    page.made.operations.disable("a", "<script>alert(1)</script>")
    text = page.reader().get("/devices/a")[1]
    assert "&lt;script&gt;alert" in text
    assert "<script>alert" not in text


def test_an_empty_coordinator_says_how_to_begin(tmp_path: Path) -> None:
    def prepare(world: World) -> None:
        with world.store._engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM aggregates")
            connection.exec_driver_sql("DELETE FROM federations")

    with tiny_page(tmp_path, clients=(), prepare=prepare) as page:
        reader = page.reader()
        assert "No federation yet" in reader.get("/")[1]
        assert "No devices enrolled yet" in reader.get("/devices")[1]
        assert "Nothing to repair" in reader.get("/repairs")[1]
        for path in ("/federations", "/events", "/enrolment"):
            assert reader.get(path)[0] == 200


def first_paint(reader: Reader, path: str) -> tuple[int, int]:
    """Bytes that cross the network until a browser without a cache shows a page, and those of scripts among them."""
    status, headers, page = reader.transfer("GET", path, **{"Accept-Encoding": "gzip"})
    assert (status, headers.get("content-encoding"), headers["vary"]) == (200, "gzip", "Accept-Encoding")
    text = gzip.decompress(page).decode()
    charts = "data-chart=" in text
    total, scripts = len(page), 0
    for address in {each for each in LOADED.findall(text) if charts or "uplot" not in each}:
        status, headers, body = reader.transfer("GET", address, **{"Accept-Encoding": "gzip"})
        assert (status, "immutable" in headers["cache-control"]) == (200, True), address
        total += len(body)
        scripts += len(body) if ".js?" in address else 0
    assert 10_000 < scripts < MAX_SCRIPT_BYTES
    return total, scripts


def test_files_have_their_content_in_the_address_and_are_sent_once_and_compressed(page: ServedPage) -> None:
    reader = Reader(page.port)
    address = next(each for each in LOADED.findall(reader.get("/login")[1]) if "page.js" in each)
    _, headers, whole = reader.transfer("GET", address)
    _, packed_headers, packed = reader.transfer("GET", address, **{"Accept-Encoding": "gzip"})
    assert gzip.decompress(packed) == whole
    assert len(packed) < len(whole) / 2
    assert headers["etag"] == packed_headers["etag"]
    status, _, body = reader.transfer("GET", address, **{"If-None-Match": headers["etag"]})
    assert (status, body) == (304, b"")
    other = reader.transfer("GET", address.partition("?")[0] + "?0")[1]
    assert other["cache-control"] == "no-cache"  # of an earlier version: asked for again
    assert reader.transfer("GET", "/static/site.py")[0] == 404


@pytest.mark.slow
def test_a_thousand_devices_fit_into_a_first_paint(tmp_path: Path) -> None:
    def prepare(world: World) -> None:
        add_crowd(world.store, "tiny", 1000, 8, time.time())

    with tiny_page(tmp_path, clients=(), rounds=20, prepare=prepare) as page:
        reader = page.reader()
        for path in (*SCREENS, *MORE_SCREENS, "/devices/line-0005"):
            status, text = reader.get(path)
            assert (status, len(text.encode()) < MAX_FIRST_PAINT_BYTES) == (200, True), f"{path}: {len(text)} bytes"
            assert first_paint(reader, path)[0] < MAX_FIRST_PAINT_BYTES
        assert "125 of 1000 do worse than their local-only model" in reader.get("/f/tiny/worth")[1]
        assert "1000 of 1000 devices" in reader.get("/devices")[1]
        assert "page 10 of 10" in reader.get("/devices?page=99")[1]
        assert "1 of 1000 devices" in reader.get("/devices?q=line-0999&state=offline")[1]
        assert re.findall(r'id="d-([^"]+)', reader.get("/devices?sort=-device")[1])[0] == "line-0999"
        assert reader.get("/f/tiny/sent.html")[1].count("<h3>line-") == 1000
