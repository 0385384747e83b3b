"""Agents that attack their own updates, over a real broker: one whose gate does not hold sends nothing, and its figures stay with it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fedcg.wire.artifacts.artifacts import read_header
from fedcg.wire.messages.schemas import MAX_ARTIFACT_BYTES
from tests.support.commands import data_of
from tests.support.edge.toml_edit import set_values
from tests.support.page.pages import Reader
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(280)]
STRICT, OPEN, SILENT = "site-1", "site-2", "site-3"
NEVER, ALWAYS = "label_l1_gain<-3.125", "label_l1_gain<3.125"  # a distance of two distributions lies in [0, 2]
OF_A_REPORT = (b"iVBORw0KGgo", b"\x89PNG\r\n\x1a\n", b"<!doctype html>", b"report.html", NEVER.encode(), b"was audited")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A finished two-round federation of three devices that audit, whose coordinator and observer still run."""
    # At the default learning rate two epochs teach a client of 48 images nothing, and the attack's positive control says so.
    params = {"epochs": 2, "lr": 0.002, "server_iterations": 50, "ramp_rounds": 2}
    stack = Stack(root=tmp_path_factory.mktemp("withheld"), params=params, min_clients=2)
    stack.prepare()
    for device, gate in ((STRICT, NEVER), (OPEN, ALWAYS), (SILENT, ALWAYS)):
        report = ["examples", "accuracy", "health", *(["audit"] if device != SILENT else [])]
        audit: dict[tuple[str, str], Any] = {("audit", "before_publish"): "quick", ("audit", "gate"): gate}
        audit |= {("audit", "attacks"): ["labels"], ("policy", "allow_report"): report}
        set_values(stack.config(device), audit)
    with stack.up(agents=True, observer=("--frames",)):
        stack.wait_finished()
        wait_for(lambda: len(_artifacts(stack)) >= 1 + 3 + 2 * 2, "spec, three aggregates and four updates", 20)
        yield stack


def _artifacts(stack: Stack) -> list[dict[str, Any]]:
    path = stack.root / "wire" / "wire.json"
    return list(json.loads(path.read_text())["artifacts"]) if path.exists() else []


def _status(stack: Stack, device: str) -> dict[str, Any]:
    return dict(data_of(stack.command("agent", "status", "--config", str(stack.config(device)), "--json")))


def _report(stack: Stack, device: str) -> dict[str, Any]:
    return dict(json.loads((stack.store(device) / "audit" / "report.json").read_text()))


def test_a_device_whose_gate_does_not_hold_sends_nothing_and_its_owner_sees_why(stack: Stack) -> None:
    declined = [event for event in stack.events(STRICT) if event["event"] == "declined"]
    assert {event["reason"] for event in declined} == {"withheld"}
    assert {event["round"] for event in declined} == {1, 2}
    assert not any(event["event"] == "committed" for event in stack.events(STRICT))
    status = _status(stack, STRICT)
    assert NEVER in status["last_declined"]
    assert "at most" in status["last_declined"]
    page = stack.store(STRICT) / "audit" / "report.html"
    assert status["last_audit"] == f"round 2, attempt 1: withheld; {page}"
    assert f"gate {NEVER}: FAILED".replace("<", "&lt;") in page.read_text()
    assert _report(stack, STRICT)["attacks"][0]["figures"]
    assert "withheld" in (stack.root / f"{STRICT}.log").read_text()


def test_the_rounds_close_without_it_and_the_coordinator_shows_the_reason_alone(stack: Stack) -> None:
    answers = [event for event in stack.events("coordinator") if event["event"] == "declined"]
    assert {(event["client"], event["reason"]) for event in answers} == {(STRICT, "withheld")}
    merged = {
        (event["client"], event["round"]) for event in stack.events("coordinator") if event["event"] == "update_stored"
    }
    assert merged == {(device, number) for device in (OPEN, SILENT) for number in (1, 2)}
    assert not any(event["event"] == "left_out" for event in stack.events("coordinator"))
    assert f"{STRICT} declined (withheld)" in (stack.root / "coordinator.log").read_text()
    shown = _page(stack, f"/devices/{STRICT}")
    assert "withheld" in shown
    assert "own audit found" not in shown
    written = [path for path in stack.home.rglob("*") if path.is_file() and path.stat().st_size < MAX_ARTIFACT_BYTES]
    for path in (*written, stack.root / "coordinator.log"):
        assert NEVER.encode() not in path.read_bytes(), path
    assert any(b"withheld" in path.read_bytes() for path in written if path.name.startswith("database.sqlite"))


def test_a_device_whose_gate_holds_is_merged_and_its_figures_reach_the_page_where_its_owner_allows_them(
    stack: Stack,
) -> None:
    figures = [one for one in _report(stack, OPEN)["attacks"][0]["figures"] if not one["is_ceiling"]]
    largest = max(one["gain"]["high"] for one in figures if one["name"] == "label_l1")
    told = {entry["sender"]: set(entry["report"]) for entry in _artifacts(stack) if entry["kind"] == "update"}
    assert set(told) == {OPEN, SILENT}
    assert ("audit" in told[OPEN], "audit" in told[SILENT]) == (True, False)
    shown = _page(stack, f"/devices/{OPEN}").partition('id="privacy-shapes"')[2].partition("</section>")[0]
    assert f"{largest:+.3g}".replace("-", "\N{MINUS SIGN}") in shown
    assert "label distribution, L1 distance" in shown
    assert 'id="privacy-shapes"' not in _page(stack, f"/devices/{SILENT}")


def test_nothing_of_a_report_crosses_the_wire_and_only_allowed_figures_do(stack: Stack) -> None:
    frames = (stack.root / "wire" / "frames.bin").read_bytes()
    assert b"withheld" in frames
    for strange in OF_A_REPORT:
        assert strange not in frames
    for entry in _artifacts(stack):
        path = stack.root / "wire" / "artifacts" / entry["id"]
        if entry["kind"] == "update":
            report = read_header(path.read_bytes()).report
            assert report is not None
            assert set(report.audit or {}) <= {"label_l1", "label_accuracy"}
    assert b'"phase":"audit"' in frames  # progress, where the owner allows `health`


def _page(stack: Stack, path: str) -> str:
    reader = Reader(stack.api_port).log_in((stack.home / "api.token").read_text().strip())
    status, text = reader.get(path)
    assert status == 200
    return text
