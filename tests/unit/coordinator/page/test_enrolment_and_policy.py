"""Enrolment, policy and events on the page and in the API, over real HTTP."""

import csv
import html
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from coordinator.members.api_tokens import Role
from coordinator.page import pages
from coordinator.pki.authority import create_ca
from coordinator.storage import schema
from fedcg.wire.messages.enrolment_messages import Token
from fedcg.wire.messages.schemas import DeviceCondition, DoctorFinding
from tests.support.page.pages import ServedPage, shows, tiny_page
from tests.support.waiting import wait_until

RANGE = {"device": "line-8..line-10", "hours": "24", "data": "/data/my images"}


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ServedPage]:
    with tiny_page(tmp_path, rounds=3, clients=("a", "b", "c")) as running:
        create_ca(running.application.state.home.pki)
        running.made.world.key.save(running.application.state.home.signing_key)
        yield running


def api(page: ServedPage, path: str) -> Any:
    return json.loads(page.reader().ask("GET", f"/api/v1{path}", Accept="application/json")[2])


def test_a_token_is_shown_as_a_line_and_as_a_code_without_inline_styles(page: ServedPage) -> None:
    operator = page.reader()
    about = {"device": "line-4", "data": "/data/my images", "labels": "north pilot", "site": "hall 3"}
    _, _, text = operator.post("/enrolment", form_of="/enrolment", **about)
    (token,) = page.made.world.store.register.tokens()
    assert (token.labels, token.site) == ("north pilot", "hall 3")
    for wrong, named in (({"labels": "No!"}, "labels"), ({"hours": "0"}, "hours"), ({"data": "a\nb"}, "images")):
        status, _, answer = operator.post("/enrolment", form_of="/enrolment", **{**about, **wrong})
        assert (status, named in answer) == (409, True)
    line = html.unescape(text.partition('id="line">')[2].partition("</code>")[0])
    assert re.fullmatch(r" case .* esac; FEDCG_TOKEN=\S+ fedcg enrol --out tiny --data '/data/my images'", line)
    assert Token.parse(line.partition("esac; FEDCG_TOKEN=")[2].split()[0]).device == "line-4"
    code = text.partition('aria-label="QR code of the line">')[2].partition("</figure>")[0]
    assert len(re.findall("h", code)) > 300
    assert " style=" not in text
    assert line not in operator.get("/enrolment")[1]


def test_a_batch_is_downloaded_once_or_not_made_at_all(page: ServedPage) -> None:
    operator, kept = page.reader(), page.made.world.store.register.tokens
    status, headers, text = operator.post("/enrolment", form_of="/enrolment", **RANGE)
    assert (status, "attachment" in headers["content-disposition"], headers["cache-control"]) == (200, True, "no-store")
    assert [row["device"] for row in csv.DictReader(text.splitlines())] == ["line-8", "line-9", "line-10"]
    with page.made.world.store._engine.begin() as connection:
        connection.execute(update(schema.devices).filter_by(id="c").values(id="line-10"))
    for device, reason in (("line-9..line-11", "already exists"), ("line-1..line-201", "at most 200")):
        status, _, text = operator.post("/enrolment", form_of="/enrolment", **{**RANGE, "device": device})
        assert (status, reason in text) == (409, True)
    assert len(kept()) == 3
    assert page.reader(Role.VIEWER).post("/enrolment", form_of="/devices", **RANGE)[0] == 403


def test_a_form_that_replaces_a_device_is_filled_in_from_its_page(page: ServedPage) -> None:
    operator = page.reader()
    assert "/enrolment?device=a&amp;replaces=true" in operator.get("/devices/a")[1]
    assert 'name="device" value="a"' in operator.get("/enrolment?device=a&replaces=true")[1]
    operator.post("/enrolment", form_of="/enrolment", device="a", replaces="yes")
    (token,) = page.made.world.store.register.tokens()
    assert (token.device, token.replaces) == ("a", True)
    assert operator.post("/enrolment", form_of="/enrolment", device="", replaces="yes")[0] == 404


def test_revoked_devices_are_gone_at_once_and_viewers_revoke_none(page: ServedPage) -> None:
    page.application.state.home.broker.mkdir()
    fields = {"action": "revoke", "reason": "sold", "device:a": "on", "device:b": "on"}
    assert page.reader(Role.VIEWER).post("/devices", "/devices", **fields)[0] == 403
    assert "Revoke: 2 of 2 done" in page.reader().post("/devices", "/devices", **fields)[2]
    ended = [device.ended_because for device in page.made.world.store.devices()]
    assert ended == ["sold", "sold", ""]


def test_the_steps_of_each_token_name_what_is_missing(page: ServedPage) -> None:
    store = page.made.world.store
    for device in ("line-1", "line-2", "line-3"):
        page.reader().post("/enrolment", form_of="/enrolment", device=device)
    with store._engine.begin() as connection:
        for token, known in zip(store.register.tokens(), store.devices()[:2], strict=False):
            used = update(schema.tokens).values(used_by=known.id, used_at=known.enrolled_at)
            connection.execute(used.filter_by(id=token.id))

    def states() -> list[str]:
        found = api(page, "/enrolment-tokens")
        letters = {"done": "+", "open": "-", "failed": "!", "not reported": "?"}
        return ["".join(letters[step["state"]] for step in each["steps"]) for each in found[::-1]]

    assert states() == ["++??--", "++??--", "+-----"]
    for device, findings in (("a", ()), ("b", (DoctorFinding(check="data", state="failed"),))):
        store.presence.keep_condition("tiny", device, time.time(), DeviceCondition(findings=findings).model_dump_json())
    assert states()[:2] == ["++??--", "++??--"], "what an earlier device with this id reported does not count"
    page.made.start()
    wait_until(lambda: states() == ["+++-++", "++!-++", "+-----"], f"the devices take part: {states()}")
    text = shows(page.reader(), "/enrolment", "5 of 6, then cohort secret and roster")
    assert "<code>fedcg cohort join</code>" in text
    assert "4 of 6, then doctor ok" in text
    with store._engine.begin() as connection:
        connection.execute(update(schema.devices).filter_by(id="a").values(state="revoked"))
    assert states()[0] == "+-----"


def test_a_policy_is_changed_by_a_form_and_its_history_names_who_from_and_to(page: ServedPage) -> None:
    operator, viewer, path = page.reader(), page.reader(Role.VIEWER), "/f/tiny/policy"
    before = page.made.world.store.federation("tiny").policy
    form = {name: "" if value is None else str(value).lower() for name, value in before.model_dump().items()}
    (tag,) = set(re.findall(r'name="tag" value="([^"]+)"', html.unescape(operator.get(path)[1]).replace('""', '"')))
    tag = f'"{tag}"'
    wrong = {**form, "rounds": "0", "pace": "fast", "stop_gain": "7"}
    status, _, text = operator.post(path, form_of=path, tag=tag, **wrong)
    assert (status, page.made.world.store.federation("tiny").policy) == (422, before)
    for name, is_wrong in (("rounds", True), ("pace", True), ("stop_gain", False)):
        field = text.partition(f'id="p-{name}"')[2].partition("</p></div>")[0]
        assert ('aria-invalid="true"' in field, '<b class="bad">' in field) == (is_wrong, is_wrong), name
    assert 'value="7"' in text
    right = {**form, "deadline_s": "1200", "stop_patience": "4", "require_cohort": "true"}
    assert operator.post(path, form_of=path, tag=tag, **right)[0] == 303
    for _ in range(2):  # saved again, it does not undo the other change
        status, _, text = operator.post(path, form_of=path, tag=tag, **{**right, "deadline_s": "5"})
        assert (status, "has changed since you read it" in text, tag in html.unescape(text)) == (422, True, True)
    operator.post("/federations/tiny/extend", form_of="/federations", rounds="5")
    told: list[tuple[object, ...]] = [("rounds", 3, 8), ("deadline_s", before.deadline_s, 1200.0)]
    told += [("require_cohort", False, True), ("stop_patience", None, 4)]
    found = api(page, "/federations/tiny/policy/changes")
    assert [(each["field"], each["before"], each["after"]) for each in found] == told
    assert {each["by"] for each in found} == {"operator"}
    history = viewer.get(path)[1].partition('id="history"')[2]
    assert '>Stop patience</td><td data-label="From">none</td><td data-label="To">4</td>' in history
    assert "<button" not in viewer.get(path)[1].partition("<main>")[2]
    assert viewer.post(path, form_of="/devices", tag=tag, **right)[0] == 403


def test_events_have_time_ranges_and_pages(page: ServedPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SHOWN_EVENTS", 2)
    reader, day = page.reader(), 1_780_272_000.0  # 2026-06-01, 00:00 UTC
    for hour in range(5):
        page.made.world.store.events.add({"t": day + 3600 * hour, "event": "counted", "client": f"h{hour}"})

    def shown(query: str) -> list[str]:
        return re.findall(r'href="/devices/(h\d)"', reader.get(f"/events?event=counted&{query}")[1])

    assert shown("") == ["h4", "h3"]
    older = html.unescape(re.findall(r'href="/events\?([^"]+)">older', reader.get("/events?event=counted")[1])[0])
    assert shown(older) == ["h2", "h1"]
    assert shown("from=2026-06-01T01:00&to=2026-06-01T03:00") == ["h2", "h1"]
    assert shown("from=2026-06-01T05:30%2B05:30&to=2026-06-01T01:00:00.000Z") == ["h0"]
    assert reader.get("/events?from=yesterday")[0] == 422
    found = api(page, f"/events?event=counted&since={day + 3600}&until={day + 7200}")
    assert [each["client"] for each in found["events"]] == ["h1"]
