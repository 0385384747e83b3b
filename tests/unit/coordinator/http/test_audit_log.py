"""The audit log: a line before and a line after every change, that no refused request and no broken content keeps out."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from coordinator.http import changes
from coordinator.http.access import READING, Access, Role
from coordinator.http.changes import DAY_S, AuditLog
from coordinator.http.refusals import Rate
from coordinator.page import add_page
from coordinator.paths import Home
from fedcg.event_log import EventValue, read_events
from tests.support.coordinator.api import Api, running_api

PAUSE = "/api/v1/federations/casting/pause"
MALFORMED = (
    b'{"x": 1}',
    b"[" * 60_000,
    b'{"reason":' * 9000,
    b"\xff\xfe\x00",
    b"&a=" * 2000,
    b'{"rounds": ' + b"9" * 5000 + b"}",
)
REAL = {"federation": "casting", "device": "a", "action": "pause", "token": "0" * 16}
NO_CHANGE = {"/login", "/logout"}
"""They open and end a session, and change nothing else."""


@pytest.fixture
def api(home: Home) -> Iterator[Api]:
    with running_api(home) as running:
        add_page(running.application)
        running.store.add_device("a", "aa" * 32, 1.0)
        yield running


def lines(home: Home) -> list[dict[str, EventValue]]:
    return list(read_events(home.audit_file))


def test_every_route_that_changes_something_writes_the_intent_before_and_the_outcome_after_whatever_it_is_sent(
    api: Api,
) -> None:
    api.application.state.access = Access(api.tokens, api.home.secret(), per_token=Rate(10**6, 1e6))
    found = [(route, method) for route in _routes(api) for method in (route.methods or set()) - set(READING)]
    audited = set()
    assert len(found) >= 19
    with api.as_(Role.ADMIN) as admin:
        for route, method in found:
            for body in MALFORMED:
                path, before = route.path.format(**REAL), len(lines(api.home))
                answer = admin.request(method, path, content=body, headers={"Content-Type": media_of(route)})
                assert answer.status_code < 500, (path, body[:20], answer.text)
                own = lines(api.home)[before:]
                if not own:  # the body is no JSON: the route was never reached
                    assert answer.status_code in (400, 422), (path, body[:20])
                    continue
                audited.add(route.path)
                assert [line["event"] for line in own] == ["intent", "outcome"], (path, body[:20])
                assert own[1]["outcome"] == answer.status_code
                assert own[0]["route"] == own[1]["route"] == f"{method} {route.path}"
    assert audited == {route.path for route, _ in found}


def test_nothing_keeps_the_content_of_a_change_out_of_its_line(api: Api) -> None:
    padded = b'{"device": "hidden", "federation": "casting"' + b" " * 70_000 + b"}"
    form, form_headers = "/devices/a/disable", {"Content-Type": "application/x-www-form-urlencoded"}
    with api.as_(Role.ADMIN) as admin:
        assert admin.post(
            "/api/v1/enrolment-tokens", content=padded, headers={"Content-Type": "application/json"}
        ).is_success
        assert '"hidden"' in str(lines(api.home)[-2]["changed"])
        assert admin.post(form, content=b"a=" + b"x" * 6000 + b"&reason=worn", headers=form_headers).status_code == 303
        assert '"worn"' in str(lines(api.home)[-2]["changed"])
        before = len(lines(api.home))
        many = b"&".join(b"f%d=%s" % (number, b"x" * 90) for number in range(99)) + b"&reason=worn"
        refused = admin.post(form, content=many, headers=form_headers)
        assert refused.status_code == 422
        assert "more content than a line of the audit log holds" in refused.text
    assert len(lines(api.home)) == before


def media_of(route: APIRoute) -> str:
    return "application/json" if route.path.startswith("/api") else "application/x-www-form-urlencoded"


def _routes(api: Api) -> list[APIRoute]:
    included = [getattr(each, "original_router", api.application).routes for each in api.application.routes]
    routes = [route for routes in included for route in routes if isinstance(route, APIRoute)]
    return [route for route in routes if route.path not in NO_CHANGE]


def test_requests_that_are_refused_are_counted_as_an_event_and_not_audited(api: Api) -> None:
    with api.as_(Role.OPERATOR) as operator, api.as_(Role.VIEWER) as viewer, api.as_(None) as nobody:
        assert operator.post(PAUSE).status_code == 200
        audited = api.home.audit_file.read_bytes()
        for number in range(30):
            long = f"/api/v1/federations/{'a' * 12_000}/pause"
            assert viewer.post(long, content=b"x" * 9000).status_code == 403, number
        assert nobody.post(PAUSE).status_code == 401
        assert viewer.post("/federations/casting/stop").status_code == 403
    assert api.home.audit_file.read_bytes() == audited
    refused = [event for event in read_events(api.home.events_file) if event["event"] == "api_refused"]
    assert [(event["identity"], event["route"], event["refused"]) for event in refused] == [
        ("viewer", "POST /api/v1/federations/{federation}/pause", 1)
    ]


def test_changes_that_fail_are_limited_for_their_token_and_keep_no_line_of_a_real_change_out(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "FAILING", Rate(5, 1 / 60))
    with running_api(home) as api, api.as_(Role.OPERATOR) as operator, api.as_(Role.ADMIN) as other:
        for _ in range(8):
            assert operator.post(PAUSE).status_code == 200  # these cost nothing
        before = len(lines(home))
        answers = [operator.post(PAUSE, json={"reason": "x" * 400}).status_code for _ in range(12)]
        assert answers == [422] * 5 + [429] * 7
        assert len(lines(home)) == before + 2 * 5
        limited = operator.post(PAUSE)
        assert (limited.status_code, "changes that failed" in limited.json()["detail"]) == (429, True)
        assert other.post(PAUSE).status_code == 200
    assert [line["event"] for line in lines(home)[-2:]] == ["intent", "outcome"]
    refused = [event for event in read_events(home.events_file) if event["event"] == "api_refused"]
    assert refused[0]["identity"] == "operator"


def test_a_line_is_bounded_and_readable_whatever_a_request_names(api: Api) -> None:
    with api.as_(Role.OPERATOR) as operator:
        operator.post(f"/api/v1/federations/{'%1B%C2%9B' * 1000}/pause", json={"reason": '"\x1b' * 5000})
    assert [len(line) < 12_000 for line in api.home.audit_file.read_bytes().splitlines()] == [True, True]
    assert len(lines(api.home)) == 2


def test_nothing_is_changed_where_the_audit_log_can_t_be_written(api: Api) -> None:
    api.home.audit_file.mkdir()
    with api.as_(Role.OPERATOR) as operator:
        refused = operator.post(PAUSE)
    assert (refused.status_code, "audit log" in refused.json()["detail"]) == (503, True)
    assert api.store.federation("casting").status.value == "running"


def test_a_change_whose_intent_was_not_written_has_no_outcome(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    write = AuditLog.write

    def full(log: AuditLog, fields: Mapping[str, EventValue]) -> None:
        if fields["event"] == "intent":
            raise OSError(28, "No space left on device")
        write(log, fields)

    monkeypatch.setattr(AuditLog, "write", full)
    with api.as_(Role.OPERATOR) as operator:
        assert operator.post(PAUSE).status_code == 503
    assert lines(api.home) == []


def test_a_line_that_a_full_disk_cut_leaves_no_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", keep_days=1)
    log.write({"event": "one"})
    before = log.path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:9]))
    with pytest.raises(OSError, match="No space"):
        log.write({"event": "two"})
    assert log.path.read_bytes() == before


def test_lines_stay_for_their_days_however_many_files_they_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "ROTATE_BYTES", 300)
    log = AuditLog(tmp_path / "audit.jsonl", keep_days=2)
    for number in range(40):
        log.write({"event": "intent", "number": number})
    files = list(tmp_path.glob("audit*.jsonl"))
    assert len(files) > 4
    kept = [json.loads(line)["number"] for file in files for line in file.read_text().splitlines()]
    assert sorted(kept) == list(range(40))
    for file, days in zip(sorted(tmp_path.glob("audit.1*.jsonl"))[:2], (3, 1), strict=True):
        at = time.time() - days * DAY_S
        os.utime(file, (at, at))
    for number in range(10):
        log.write({"event": "intent", "number": 40 + number})
    left = {
        json.loads(line)["number"] for file in tmp_path.glob("audit*.jsonl") for line in file.read_text().splitlines()
    }
    assert {*range(50)} - left == {0, 1, 2, 3, 4, 5} - left
    assert 0 not in left
