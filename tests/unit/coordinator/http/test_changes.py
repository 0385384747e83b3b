"""Changes over HTTP: federations, devices and tokens, once per key; the audit log, which nothing keeps a line out of; and the facts that are read."""

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from coordinator.http import changes
from coordinator.http.access import COOKIE, FORM_FIELD, MAX_BODY_BYTES, READING, Access, Role
from coordinator.http.changes import DAY_S, AuditLog
from coordinator.operations import create_federation
from coordinator.operations.create_federation import example_plan
from coordinator.page import add_page
from coordinator.paths import Home
from coordinator.rounds.records import FederationStatus
from coordinator.token_buckets import Rate
from fedcg.event_log import EventValue, read_events
from tests.support.coordinator.api import Api, identity, running_api
from tests.support.waiting import wait_until

CASTING = "/api/v1/federations/casting"
PAUSE_ROUTE = "POST /api/v1/federations/{federation}/pause"
PLAN = {
    "federation": "second",
    "classes": ["x", "y"],
    "method": "fedavg",
    "rounds": 1,
    "input": {"mode": "L", "height": 28, "width": 28, "mean": [0.5], "std": [0.5]},
}


@pytest.fixture
def api(home: Home) -> Iterator[Api]:
    with running_api(home) as running:
        add_page(running.application)
        for number, name in enumerate(("a", "b", "c", "d", "e")):
            running.store.add_device(name, f"{number:02x}" * 32, float(number))
        yield running


@pytest.fixture
def operator(api: Api) -> Iterator[httpx.Client]:
    with api.as_(Role.OPERATOR) as client:
        yield client


@pytest.fixture
def admin(api: Api) -> Iterator[httpx.Client]:
    with api.as_(Role.ADMIN) as client:
        yield client


def audited(home: Home) -> list[dict[str, EventValue]]:
    return list(read_events(home.audit_file))


def test_plans_wait_up_to_a_bound_and_abandoned_ones_are_not_made(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    complete = create_federation.in_a_process
    monkeypatch.setattr(
        create_federation, "in_a_process", lambda given, stopping: complete(given) if free.wait(60) else (1, "no turn")
    )
    turns = api.application.state.creating

    def post(name: str, timeout: float) -> int:
        with api.as_(Role.OPERATOR) as client:
            try:
                return client.post(
                    "/api/v1/federations", json={"plan": {**PLAN, "federation": name}, "start": False}, timeout=timeout
                ).status_code
            except httpx.ReadTimeout:
                return 0

    with ThreadPoolExecutor(8) as askers:
        under_way = askers.submit(post, "first", 60)
        wait_until(lambda: turns.statistics().borrowed_tokens == 1, "the first plan is completed")
        waiting = [askers.submit(post, f"left-{number}", 1) for number in range(changes.MAX_WAITING)]
        wait_until(lambda: turns.statistics().tasks_waiting == changes.MAX_WAITING, "the others wait")
        assert post("too-many", 60) == 503
        assert [asker.result() for asker in waiting] == [0] * changes.MAX_WAITING
        free.set()
        assert under_way.result() == 201
    wait_until(lambda: turns.statistics().borrowed_tokens == turns.statistics().tasks_waiting == 0, "no plan is left")
    assert [record.id for record in api.store.federations()] == ["casting", "first"]


def test_a_token_that_the_page_makes_is_shown_once_and_can_be_deleted(api: Api, operator: httpx.Client) -> None:
    made = operator.post("/enrolment", data={"device": "line-9", "hours": "24"})
    (secret,) = re.findall(r'id="token">([^<]+)<', made.text)
    (token,) = api.store.register.tokens()
    shown = operator.get("/enrolment").text
    assert (made.text.count(secret) > 0, secret in shown, "line-9" in shown) == (True, False, True)
    assert operator.post(f"/enrolment/{token.id}/delete").status_code == 303
    assert "revoked" in operator.get("/enrolment").text


def test_the_page_creates_a_federation_from_the_text_of_a_plan(api: Api, operator: httpx.Client) -> None:
    made = operator.post("/federations/new", data={"plan": example_plan().replace('"casting"', '"second"')})
    assert (made.status_code, made.headers["location"]) == (303, "/f/second")
    assert api.store.federation("second").status is FederationStatus.CREATED


def test_all_errors_of_a_plan_and_of_a_policy_come_at_once(operator: httpx.Client) -> None:
    wrong = {**PLAN, "rounds": 0, "method": "nothing", "colour": "red"}
    refused = operator.post("/api/v1/federations", json={"plan": wrong})
    assert refused.status_code == 422
    places = {line.split(":")[0] for line in refused.json()["problems"]}
    assert places == {"body.plan.rounds", "body.plan.method", "body.plan.colour"}
    policy = operator.patch(f"{CASTING}/policy", json={"rounds": -1, "fractoin": 0.5})
    assert policy.status_code == 422
    assert len(policy.json()["problems"]) == 2
    assert operator.post("/api/v1/federations", json={"plan": PLAN, "start": "1"}).status_code == 422
    twice = operator.patch(f"{CASTING}/policy", content='{"stop_gain": 0.1, "stop_gain": 0.3}')
    assert (twice.status_code, "contains a field more than once" in twice.text) == (422, True)
    flipped = operator.post("/api/v1/federations", json={"plan": {**PLAN, "augment_flip": "1"}, "start": False})
    assert (flipped.status_code, "must be true or false" in flipped.text) == (422, True)


def test_a_policy_is_changed_only_where_it_is_still_the_one_that_was_read(operator: httpx.Client) -> None:
    tag = {"If-Match": operator.get(f"{CASTING}/policy").headers["etag"]}
    changed = operator.patch(f"{CASTING}/policy", json={"rounds": 40}, headers=tag)
    assert (changed.status_code, changed.json()["rounds"]) == (200, 40)
    refused = operator.patch(f"{CASTING}/policy", json={"rounds": 41}, headers=tag)
    assert (refused.status_code, refused.headers["content-type"]) == (412, "application/problem+json")
    assert operator.get(f"{CASTING}/policy").json()["rounds"] == 40
    now = {"If-Match": changed.headers["etag"]}
    assert operator.patch(f"{CASTING}/policy", json={"rounds": 41}, headers=now).status_code == 200


def test_a_key_makes_one_change_and_a_refused_one_leaves_it_unused(api: Api, operator: httpx.Client) -> None:
    key = {"Idempotency-Key": "one"}
    refused = [operator.post("/api/v1/federations/nobody/stop", headers=key).status_code for _ in range(2)]
    assert refused == [404, 404]
    answers = [operator.post("/api/v1/enrolment-tokens", json={"device": box}, headers=key) for box in ("x", "x", "y")]
    assert [answer.status_code for answer in answers] == [201, 409, 409]
    assert answers[1].json()["type"] == "urn:fedcg:used-key"
    assert len(api.store.register.tokens()) == 1
    with api.as_(Role.ADMIN) as another:  # keys of two tokens have nothing to do with each other
        assert another.post("/api/v1/enrolment-tokens", json={"device": "z"}, headers=key).status_code == 201
    assert operator.post("/api/v1/enrolment-tokens", headers={"Idempotency-Key": "a b"}).status_code == 422


def test_every_change_is_audited_with_who_what_and_outcome_and_without_secrets(api: Api, admin: httpx.Client) -> None:
    made = admin.post("/api/v1/api-tokens", json={"name": "ann", "role": "viewer"}).json()
    admin.post(f"{CASTING}/pause", json={"reason": "rebuilt"})
    admin.post("/api/v1/federations/nobody/stop")
    with api.as_(Role.VIEWER) as viewer:
        viewer.post(f"{CASTING}/resume")
        viewer.get(CASTING)
    lines = audited(api.home)
    assert [(line["event"], line["identity"], line["route"], line["names"], line.get("outcome")) for line in lines] == [
        ("intent", "admin", "POST /api/v1/api-tokens", [], None),
        ("outcome", "admin", "POST /api/v1/api-tokens", [], 201),
        ("intent", "admin", PAUSE_ROUTE, ["casting"], None),
        ("outcome", "admin", PAUSE_ROUTE, ["casting"], 200),
        ("intent", "admin", "POST /api/v1/federations/{federation}/stop", ["nobody"], None),
        ("outcome", "admin", "POST /api/v1/federations/{federation}/stop", ["nobody"], 404),
    ]
    assert [line["change"] for line in lines[::2]] == [line["change"] for line in lines[1::2]]
    assert json.loads(str(lines[2]["changed"])) == {"reason": "rebuilt"}
    assert {line["address"] for line in lines} == {"127.0.0.1"}
    assert made["token"] not in api.home.audit_file.read_text()
    assert [line["route"] for line in admin.get("/api/v1/audit").json()["events"]] == [line["route"] for line in lines]


def test_a_body_that_cannot_be_read_is_refused_only_to_a_role_that_may_make_the_change(api: Api) -> None:
    def answers(role: Role | None) -> list[int]:
        with api.as_(role) as client:
            client.headers["Content-Type"] = "application/json"
            return [client.request(*change, content=b"not json").status_code for change in routes]

    with api.as_(Role.VIEWER) as viewer:
        paths = viewer.get("/openapi.json").json()["paths"]
    del paths["/api/v1/sessions/{session}"]  # everybody may end their own
    routes = [(how, path) for path, methods in paths.items() for how in methods if how != "get" and "/api/v1" in path]
    assert len(routes) > 12
    assert answers(Role.VIEWER) == [403] * len(routes)
    assert answers(None) == [401] * len(routes)
    told = dict(zip(routes, answers(Role.OPERATOR), strict=True))
    assert list(told.values()).count(422) >= 8
    assert {path for (_, path), answer in told.items() if answer == 403} == {
        path for _, path in routes if "api-tokens" in path
    }
    refused = [line["outcome"] for line in audited(api.home) if line["event"] == "outcome"]
    assert refused.count(422) >= 8  # of one who may make it, it is a change that failed


def test_a_change_by_the_page_s_cookie_alone_could_come_from_another_site_and_is_refused(api: Api) -> None:
    value = api.access.open_session(identity(api.tokens.create("ann", Role.OPERATOR)))
    with api.as_(None) as browser:
        browser.cookies.set(COOKIE, value)
        assert browser.post(f"{CASTING}/pause").status_code == 403
        assert browser.post(f"{CASTING}/pause", headers={"X-FedCG": "1"}).status_code == 200
        assert browser.post(f"{CASTING}/resume", data={FORM_FIELD: api.access.form_token(value)}).status_code == 200
        assert browser.post(f"{CASTING}/resume", data={FORM_FIELD: "0" * 64}).status_code == 403


def test_devices_are_searched_and_sorted_and_those_left_out_are_counted(api: Api, operator: httpx.Client) -> None:
    api.store.saw_device("c", 50.0, "1.0")
    api.store.saw_device("a", 40.0, "1.0")

    def found(query: str) -> tuple[list[str], str | None]:
        answer = operator.get(f"/api/v1/devices?{query}")
        return [device["id"] for device in answer.json()], answer.headers.get("x-left-out")

    assert found("sort=last_seen_at") == (["a", "c", "b", "d", "e"], None)  # those that were never seen come last
    assert found("sort=last_seen_at&limit=2") == (["a", "c"], "3")
    assert found("search=d") == (["d"], None)
    api.store.disable("b", 60.0, "on loan")
    assert [found(f"standing={one}")[0] for one in ("disabled", "offline")] == [["b"], ["a", "c", "d", "e"]]
    assert [len(found(f"state={one}")[0]) for one in ("enrolled", "left")] == [5, 0]
    (problem,) = operator.get("/api/v1/devices?standing=bogus").json()["problems"]
    assert problem.startswith("query.standing: ")
    assert found("descending=true&limit=1") == (["e"], "4")
    assert operator.get("/api/v1/devices?limit=1001").status_code == 422


def test_events_are_filtered_and_read_backwards(api: Api, operator: httpx.Client) -> None:
    for number in range(7):
        kind = "online" if number % 2 else "offline"
        api.store.events.add({"event": kind, "client": "a", "number": number, "reason": "why"})

    def found(query: str) -> tuple[list[int], int | None]:
        answer = operator.get(f"/api/v1/events?{query}").json()
        return [event["number"] for event in answer["events"]], answer["older"]

    assert found("limit=3&event=online") == ([1, 3, 5], 2)
    assert found("level=warning&text=OFFLINE") == ([0, 2, 4, 6], None)
    assert found("limit=3") == ([4, 5, 6], 5)
    assert found("limit=9&before=5") == ([0, 1, 2, 3], None)
    (last,) = operator.get("/api/v1/events?limit=1&client=a").json()["events"]
    assert (last["id"], last["level"], last["message"]) == (7, "warning", "a is offline: why")
    assert operator.get("/api/v1/events?level=loud").status_code == 422


def test_the_audit_log_is_read_backwards_over_a_rotation(api: Api, admin: httpx.Client) -> None:
    path = api.home.audit_file
    for number, reason in enumerate(("first", "second", "third")):
        admin.post(f"{CASTING}/pause", json={"reason": reason})
        if number == 1:
            path.replace(path.with_suffix(".old.jsonl"))
            path.touch()
    found, before = [], None
    while True:
        page = admin.get("/api/v1/audit", params={"limit": 2, **({"before": before} if before else {})}).json()
        found += [line["event"] for line in reversed(page["events"])]
        before = page["older"]
        if before is None:
            break
    assert found == ["outcome", "intent"] * 3
    assert admin.get("/api/v1/audit?identity=nobody").json() == {"events": [], "older": None}


def test_a_body_above_its_bound_is_refused_whether_its_size_is_announced_or_not(operator: httpx.Client) -> None:
    body = b" " * (MAX_BODY_BYTES + 1)
    assert operator.post("/api/v1/federations", content=body).status_code == 413
    pieces = (body[at : at + 65_536] for at in range(0, len(body), 65_536))
    assert operator.post("/api/v1/federations", content=pieces).status_code == 413


def test_every_answer_has_the_security_headers_and_no_other_site_may_read_it(operator: httpx.Client) -> None:
    for path in ("/healthz", CASTING, "/nowhere", "/openapi.json"):
        answer = operator.get(path, headers={"Origin": "https://evil.example"})
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in answer.headers
    preflight = operator.options(
        CASTING, headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert "access-control-allow-origin" not in preflight.headers
    assert operator.get("/nowhere").headers["content-type"] == "application/problem+json"


def test_too_many_requests_of_a_token_are_refused_with_the_time_to_wait(api: Api, operator: httpx.Client) -> None:
    api.application.state.access = Access(api.tokens, api.home.secret(), per_token=Rate(5, 0.01))
    answers = [operator.get(CASTING) for _ in range(7)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 2
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 101
    with api.as_(Role.VIEWER) as other:
        assert other.get(CASTING).status_code == 200


PAUSE = f"{CASTING}/pause"
NINES, NO_TEXT = b'{"rounds": %b}' % (b"9" * 5000), b"\xff\xfe\x00"
MALFORMED = (b'{"x": 1}', b"[" * 60_000, b'{"reason":' * 9000, NO_TEXT, b"&a=" * 2000, NINES)
REAL = {"federation": "casting", "device": "a", "action": "pause", "token": "0" * 16, "channel": "mail", "session": "0"}
REAL |= {"number": "0"}
NO_CHANGE = {"/login", "/logout", "/federations/new/plan", "/f/{federation}/sent/{device}"}
"""They open and end a session, show a plan or compare a record, and change nothing else."""


def test_every_route_that_changes_anything_writes_intent_before_and_outcome_after_whatever_it_is_sent(api: Api) -> None:
    api.application.state.access = Access(api.tokens, api.home.secret(), per_token=Rate(10**6, 1e6))
    found = [(route, method) for route in _routes(api) for method in (route.methods or set()) - set(READING)]
    seen = set()
    assert len(found) >= 19
    with api.as_(Role.ADMIN) as admin:
        for route, method in found:
            media = "application/json" if route.path.startswith("/api") else "application/x-www-form-urlencoded"
            for body in MALFORMED:
                path, before = route.path.format(**REAL), len(audited(api.home))
                answer = admin.request(method, path, content=body, headers={"Content-Type": media})
                assert answer.status_code < 500, (path, body[:20], answer.text)
                own = audited(api.home)[before:]
                if not own:  # the body is no JSON: the route was never reached
                    assert answer.status_code in (400, 422), (path, body[:20])
                    continue
                seen.add(route.path)
                assert [line["event"] for line in own] == ["intent", "outcome"], (path, body[:20])
                assert own[1]["outcome"] == answer.status_code
                assert own[0]["route"] == own[1]["route"] == f"{method} {route.path}"
    assert seen == {route.path for route, _ in found}


def test_nothing_keeps_the_content_of_a_change_out_of_its_line(api: Api) -> None:
    padded = b'{"device": "hidden", "federation": "casting"' + b" " * 70_000 + b"}"
    form, form_headers = "/devices/a/disable", {"Content-Type": "application/x-www-form-urlencoded"}
    with api.as_(Role.ADMIN) as admin:
        assert admin.post(
            "/api/v1/enrolment-tokens", content=padded, headers={"Content-Type": "application/json"}
        ).is_success
        assert '"hidden"' in str(audited(api.home)[-2]["changed"])
        assert admin.post(form, content=b"a=" + b"x" * 6000 + b"&reason=worn", headers=form_headers).status_code == 303
        assert '"worn"' in str(audited(api.home)[-2]["changed"])
        before = len(audited(api.home))
        many = b"&".join(b"f%d=%s" % (number, b"x" * 90) for number in range(99)) + b"&reason=worn"
        refused = admin.post(form, content=many, headers=form_headers)
        assert refused.status_code == 422
        assert "too long for a line of the audit log" in refused.text
    assert len(audited(api.home)) == before


def _routes(api: Api) -> list[APIRoute]:
    included = [getattr(each, "original_router", api.application).routes for each in api.application.routes]
    routes = [route for routes in included for route in routes if isinstance(route, APIRoute)]
    return [route for route in routes if route.path not in NO_CHANGE]


def test_requests_that_are_refused_are_counted_as_an_event_and_not_audited(api: Api) -> None:
    with api.as_(Role.OPERATOR) as operator, api.as_(Role.VIEWER) as viewer, api.as_(None) as nobody:
        assert operator.post(PAUSE).status_code == 200
        before = api.home.audit_file.read_bytes()
        assert viewer.get("/api/v1/audit").status_code == 403
        for number in range(30):
            long = f"/api/v1/federations/{'a' * 12_000}/pause"
            assert viewer.post(long, content=b"x" * 9000).status_code == 403, number
        assert nobody.post(PAUSE).status_code == 401
        assert viewer.post("/federations/casting/stop").status_code == 403
    assert api.home.audit_file.read_bytes() == before
    refused = [event for event in read_events(api.home.events_file) if event["event"] == "api_refused"]
    assert [(event["identity"], event["route"], event["refused"]) for event in refused] == [
        ("viewer", "GET /api/v1/audit", 1)
    ]


def test_changes_that_fail_are_limited_for_their_token_and_keep_no_line_of_a_real_change_out(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "FAILING", Rate(5, 1 / 60))
    with running_api(home) as api, api.as_(Role.OPERATOR) as operator, api.as_(Role.ADMIN) as other:
        for _ in range(8):
            assert operator.post(PAUSE).status_code == 200  # these cost nothing
        before = len(audited(home))
        answers = [operator.post(PAUSE, json={"reason": "x" * 400}).status_code for _ in range(12)]
        assert answers == [422] * 5 + [429] * 7
        assert len(audited(home)) == before + 2 * 5
        limited = operator.post(PAUSE)
        assert (limited.status_code, "changes that failed" in limited.json()["detail"]) == (429, True)
        assert other.post(PAUSE).status_code == 200
    assert [line["event"] for line in audited(home)[-2:]] == ["intent", "outcome"]
    refused = [event for event in read_events(home.events_file) if event["event"] == "api_refused"]
    assert refused[0]["identity"] == "operator"


def test_a_line_is_bounded_and_readable_whatever_a_request_names(api: Api) -> None:
    with api.as_(Role.OPERATOR) as operator:
        operator.post(f"/api/v1/federations/{'%1B%C2%9B' * 1000}/pause", json={"reason": '"\x1b' * 5000})
    assert [len(line) < 12_000 for line in api.home.audit_file.read_bytes().splitlines()] == [True, True]
    assert len(audited(api.home)) == 2


def test_nothing_is_changed_where_the_audit_log_can_t_be_written_and_there_is_no_outcome(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = AuditLog.write

    def full(log: AuditLog, fields: Mapping[str, EventValue]) -> None:
        if fields["event"] == "intent":
            raise OSError(28, "No space left on device")
        write(log, fields)

    monkeypatch.setattr(AuditLog, "write", full)
    with api.as_(Role.OPERATOR) as operator:
        refused = operator.post(PAUSE)
    assert (refused.status_code, "audit log" in refused.json()["detail"]) == (503, True)
    assert api.store.federation("casting").status is FederationStatus.RUNNING
    assert audited(api.home) == []


def test_a_line_that_a_full_disk_cut_leaves_no_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", keep_days=1)
    log.write({"event": "one"})
    before = log.path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:9]))
    with pytest.raises(OSError, match="No space"):
        log.write({"event": "two"})
    assert log.path.read_bytes() == before


def test_lines_stay_their_days_however_many_files_they_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "ROTATE_BYTES", 300)
    log = AuditLog(tmp_path / "audit.jsonl", keep_days=2)

    def kept() -> list[int]:
        return [int(str(line["number"])) for file in tmp_path.glob("audit*.jsonl") for line in read_events(file)]

    for number in range(40):
        log.write({"event": "intent", "number": number})
    assert len(list(tmp_path.glob("audit*.jsonl"))) > 4
    assert sorted(kept()) == list(range(40))
    for file, days in zip(sorted(tmp_path.glob("audit.1*.jsonl"))[:2], (3, 1), strict=True):
        at = time.time() - days * DAY_S
        os.utime(file, (at, at))
    for number in range(10):
        log.write({"event": "intent", "number": 40 + number})
    left = set(kept())
    assert {*range(50)} - left == {0, 1, 2, 3, 4, 5} - left
    assert 0 not in left
