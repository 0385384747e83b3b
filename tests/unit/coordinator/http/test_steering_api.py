"""Changes over HTTP: federations, devices and tokens, once per key, with an audit line; and the pages that are read."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from coordinator.http import changes
from coordinator.http.access import COOKIE, FORM_FIELD, MAX_BODY_BYTES, Access, Role
from coordinator.http.refusals import Rate
from coordinator.operations import create_federation
from coordinator.paths import Home
from fedcg.event_log import EventValue, read_events
from tests.support.coordinator.api import Api, running_api
from tests.support.waiting import wait_until

CASTING = "/api/v1/federations/casting"
PAUSE = "/api/v1/federations/{federation}/pause"
PLAN = {
    "federation": "second",
    "classes": ["x", "y"],
    "method": "fedavg",
    "rounds": 1,
    "image": {"mode": "L", "height": 28, "width": 28, "mean": [0.5], "std": [0.5]},
}


@pytest.fixture
def api(home: Home) -> Iterator[Api]:
    with running_api(home) as running:
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


def test_plans_wait_up_to_a_bound_and_those_whose_clients_left_are_not_made(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_federation_is_created_started_paused_resumed_extended_and_stopped(api: Api, operator: httpx.Client) -> None:
    made = operator.post("/api/v1/federations", json={"plan": PLAN, "start": False, "continued_from": None})
    assert (made.status_code, made.json()["status"]) == (201, "created"), made.text
    second = made.headers["location"]
    assert operator.get(second).json()["federation"] == "second"
    seen = []
    for action, content in (
        ("start", None),
        ("pause", {"reason": "the line is rebuilt"}),
        ("resume", None),
        ("extend", {"rounds": 4}),
        ("stop", {"reason": "enough"}),
    ):
        view = operator.post(f"{second}/{action}", json=content)
        assert view.status_code == 200, view.text
        seen.append((view.json()["status"], view.json()["rounds"], view.json()["reason"]))
    assert seen == [
        ("running", 1, ""),
        ("paused", 1, "the line is rebuilt"),
        ("running", 1, ""),
        ("running", 5, ""),
        ("stopped", 5, "enough"),
    ]
    again = operator.post("/api/v1/federations", json={"plan": PLAN})
    assert (again.status_code, again.json()["type"]) == (409, "urn:fedcg:exists")
    assert "already" in again.json()["detail"]
    assert api.store.federation("second").policy.rounds == 5


@pytest.mark.slow
def test_a_federation_goes_on_from_the_last_weights_of_another(api: Api, operator: httpx.Client) -> None:
    first = {**PLAN, "federation": "first"}
    assert operator.post("/api/v1/federations", json={"plan": first, "start": False}).status_code == 201
    wanted = {"plan": {**PLAN, "seed": 9}, "start": False, "continued_from": "first"}
    made = operator.post("/api/v1/federations", json=wanted)
    assert (made.status_code, made.json()["continued_from"]) == (201, "first"), made.text
    other = operator.post("/api/v1/federations", json={**wanted, "continued_from": "nobody"})
    assert (other.status_code, "casting" in other.json()["detail"]) == (404, True)


def test_all_errors_of_a_plan_and_of_a_policy_come_at_once(operator: httpx.Client) -> None:
    wrong = {**PLAN, "rounds": 0, "method": "nothing", "colour": "red"}
    refused = operator.post("/api/v1/federations", json={"plan": wrong})
    assert refused.status_code == 422
    assert {line.split(":")[0] for line in refused.json()["problems"]} == {
        "body.plan.rounds",
        "body.plan.method",
        "body.plan.colour",
    }
    policy = operator.patch(f"{CASTING}/policy", json={"rounds": -1, "fractoin": 0.5})
    assert policy.status_code == 422
    assert len(policy.json()["problems"]) == 2
    assert operator.post("/api/v1/federations", json={"plan": PLAN, "start": "1"}).status_code == 422
    twice = operator.patch(f"{CASTING}/policy", content='{"stop_gain": 0.1, "stop_gain": 0.3}')
    assert (twice.status_code, "given more than once" in twice.text) == (422, True)
    flipped = operator.post("/api/v1/federations", json={"plan": {**PLAN, "augment_flip": "1"}, "start": False})
    assert (flipped.status_code, "must be true or false" in flipped.text) == (422, True)


def test_a_policy_is_changed_only_where_it_is_still_the_one_that_was_read(operator: httpx.Client) -> None:
    read = operator.get(f"{CASTING}/policy")
    tag = {"If-Match": read.headers["etag"]}
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
    answers = [
        operator.post("/api/v1/enrolment-tokens", json={"device": name}, headers=key) for name in ("x", "x", "y")
    ]
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
        ("intent", "admin", f"POST {PAUSE}", ["casting"], None),
        ("outcome", "admin", f"POST {PAUSE}", ["casting"], 200),
        ("intent", "admin", "POST /api/v1/federations/{federation}/stop", ["nobody"], None),
        ("outcome", "admin", "POST /api/v1/federations/{federation}/stop", ["nobody"], 404),
    ]
    assert [line["change"] for line in lines[::2]] == [line["change"] for line in lines[1::2]]
    assert json.loads(str(lines[2]["changed"])) == {"reason": "rebuilt"}
    assert {line["address"] for line in lines} == {"127.0.0.1"}
    assert made["token"] not in api.home.audit_file.read_text()
    assert [line["route"] for line in admin.get("/api/v1/audit").json()["events"]] == [line["route"] for line in lines]


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR, Role.ADMIN])
def test_a_role_allows_its_routes_and_no_more(api: Api, role: Role) -> None:
    with api.as_(role) as client:
        allowed = [
            client.get("/api/v1/devices").status_code == 200,
            client.post(f"{CASTING}/pause").status_code == 200,
            client.get("/api/v1/audit").status_code == 200,
            client.post("/api/v1/api-tokens", json={"name": "x", "role": "viewer"}).status_code == 201,
        ]
    assert (
        allowed
        == {
            Role.VIEWER: [True, False, False, False],
            Role.OPERATOR: [True, True, False, False],
            Role.ADMIN: [True, True, True, True],
        }[role]
    )


def test_a_body_that_cannot_be_read_is_refused_only_to_a_role_that_may_make_the_change(api: Api) -> None:
    def answers(role: Role | None) -> list[int]:
        with api.as_(role) as client:
            client.headers["Content-Type"] = "application/json"
            return [client.request(*change, content=b"not json").status_code for change in routes]

    with api.as_(Role.VIEWER) as viewer:
        paths = viewer.get("/openapi.json").json()["paths"]
    routes = [(how, path) for path, methods in paths.items() for how in methods if how != "get" and "/api/v1" in path]
    assert len(routes) > 12
    assert answers(Role.VIEWER) == [403] * len(routes)
    assert answers(None) == [401] * len(routes)
    assert answers(Role.OPERATOR).count(422) >= 8
    refused = [line["outcome"] for line in audited(api.home) if line["event"] == "outcome"]
    assert refused.count(422) >= 8  # of one who may make it, it is a change that failed


def test_a_change_by_the_page_s_cookie_alone_could_come_from_another_site_and_is_refused(api: Api) -> None:
    value = api.access.open_session(api.tokens.create("ann", Role.OPERATOR).record.id)
    with api.as_(None) as browser:
        browser.cookies.set(COOKIE, value)
        assert browser.post(f"{CASTING}/pause").status_code == 403
        assert browser.post(f"{CASTING}/pause", headers={"X-FedCG": "1"}).status_code == 200
        form = {FORM_FIELD: api.access.form_token(value)}
        assert browser.post(f"{CASTING}/resume", data=form).status_code == 200
        assert browser.post(f"{CASTING}/resume", data={FORM_FIELD: "0" * 64}).status_code == 403


def test_devices_are_searched_and_sorted_and_an_answer_names_how_many_it_leaves_out(
    api: Api, operator: httpx.Client
) -> None:
    api.store.saw_device("c", 50.0, "1.0")
    api.store.saw_device("a", 40.0, "1.0")

    def found(query: str) -> tuple[list[str], str | None]:
        answer = operator.get(f"/api/v1/devices?{query}")
        return [device["id"] for device in answer.json()], answer.headers.get("x-left-out")

    assert found("sort=last_seen_at") == (["a", "c", "b", "d", "e"], None)  # those that were never seen come last
    assert found("sort=last_seen_at&limit=2") == (["a", "c"], "3")
    assert found("search=d") == (["d"], None)
    assert found("descending=true&limit=1") == (["e"], "4")
    assert operator.get("/api/v1/devices?limit=1001").status_code == 422


def test_a_device_is_disabled_enabled_and_revoked(api: Api, operator: httpx.Client) -> None:
    disabled = operator.post("/api/v1/devices/b/disable", json={"reason": "maintenance"}).json()
    assert (disabled["disabled_because"], disabled["state"]) == ("maintenance", "enrolled")
    assert operator.post("/api/v1/devices/b/enable").json()["disabled_at"] is None
    assert operator.post("/api/v1/devices/b/revoke", json={"reason": "stolen"}).json()["was_member"] is True
    assert operator.get("/api/v1/devices/b").json()["state"] == "revoked"
    assert operator.post("/api/v1/devices/b/disable").status_code == 409  # it is known, and can't be changed
    assert operator.get("/api/v1/devices/nobody").status_code == 404


def test_events_are_filtered_and_read_backwards(api: Api, operator: httpx.Client) -> None:
    for number in range(7):
        api.store.events.add(
            {"event": "online" if number % 2 else "offline", "client": "a", "number": number, "reason": "why"}
        )

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

    def pieces() -> Iterator[bytes]:
        yield from (body[at : at + 65_536] for at in range(0, len(body), 65_536))

    assert operator.post("/api/v1/federations", content=pieces()).status_code == 413


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


def test_the_documentation_names_every_route(api: Api, operator: httpx.Client) -> None:
    routes = {
        f"`{method.upper()} {path}`"
        for path, methods in operator.get("/openapi.json").json()["paths"].items()
        for method in methods
    }
    documented = (Path(__file__).parents[4] / "docs" / "api.md").read_text()
    assert {route for route in routes if route not in documented} == set()
