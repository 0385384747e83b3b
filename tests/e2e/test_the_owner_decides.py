"""A device's owner, over a real broker: approval of what the policy does not allow, a pause, a stop, what was sent, and an update or a part that stays on the box."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedcg.wire.artifacts.artifacts import read_header
from fedcg.wire.messages.schemas import MAX_ARTIFACT_BYTES
from tests.support.commands import data_of
from tests.support.edge.toml_edit import set_values
from tests.support.page.pages import Reader
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]
ALLOWED = ("classifier", "generator", "statistics")
PLAIN, PAUSED, STRICT = "site-1", "site-2", "site-3"
STOP_S = 5.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A federation that shares statistics, and waits because the owners of two of three devices have not allowed that."""
    stack = Stack(
        root=tmp_path_factory.mktemp("owner"),
        devices=(PLAIN, PAUSED, STRICT),
        method="fedgh",
        params={"epochs": 40},
        rounds=2,
        allow_upload={PLAIN: ALLOWED},
        allow_report=("examples", "accuracy", "loss", "health", "label_counts"),
    )
    with stack.up(observer=()):
        for device in (PLAIN, PAUSED):
            stack.start_agent(device)
        # goes on when the federation has ended
        stack.start(STRICT, "agent", "run", "--config", str(stack.config(STRICT)))
        wait_for(lambda: bool(_declines(stack, STRICT) and _declines(stack, PAUSED)), "two owners are asked")
        yield stack


def _declines(stack: Stack, device: str) -> list[str]:
    return [event["reason"] for event in events(stack, "coordinator", "declined") if event["client"] == device]


def _agent(stack: Stack, device: str, command: str, *more: str) -> dict[str, Any]:
    return dict(data_of(stack.command("agent", command, *more, "--config", str(stack.config(device)), "--json")))


def _page(stack: Stack, path: str) -> str:
    status, text = Reader(stack.api_port).log_in((stack.home / "api.token").read_text().strip()).get(path)
    assert status == 200
    return text


def test_a_federation_whose_owners_have_not_approved_says_so_and_loses_no_attempt(stack: Stack) -> None:
    (view,) = data_of(stack.command("federation", "list", "--dir", str(stack.home), "--json"))
    assert (view["phase"], view["unapproved"], view["attempt"]) == ("waits_for_owners", [PAUSED, STRICT], 1)
    assert f"the owners of {PAUSED}, {STRICT} have not approved the spec" in view["reason"]
    assert "waits for owners" in _page(stack, "/f/shapes")
    assert "attempt_failed" not in {event["event"] for event in stack.events("coordinator")}


def test_a_spec_beyond_the_policy_waits_until_its_owner_approves_exactly_it(stack: Stack) -> None:
    assert set(_declines(stack, STRICT)) == {"upload_not_allowed"}
    (digest,) = _agent(stack, STRICT, "approve", "--list")["waiting"]
    assert _agent(stack, STRICT, "approve", "--yes") == {"device": STRICT, "spec": digest, "approved": True}
    assert list(_agent(stack, STRICT, "approve", "--list")["approved"]) == [digest]
    stack.command("federation", "pause", "--dir", str(stack.home))  # no further round opens by itself
    _agent(stack, PAUSED, "approve", "--yes")
    stack.wait_event("coordinator", lambda event: event["event"] == "aggregate_stored", "the round goes on by itself")
    assert "attempt_failed" not in {event["event"] for event in stack.events("coordinator")}


def test_a_paused_device_declines_with_the_reason_and_the_page_shows_it(stack: Stack) -> None:
    assert _agent(stack, PAUSED, "pause", "--for", "2h", "--reason", "maintenance of line 4")["paused"] is True
    assert "maintenance of line 4" in _agent(stack, PAUSED, "status")["pause_reason"]
    wait_for(lambda: _agent(stack, PAUSED, "status")["agent_trainer"] == "gone", "its training process is released")
    stack.command("federation", "resume", "--dir", str(stack.home))
    stack.wait_event("coordinator", lambda event: event["event"] == "stalled", "the federation stalls")
    assert set(_declines(stack, PAUSED)) == {"upload_not_allowed", "paused"}
    shown = _page(stack, f"/devices/{PAUSED}")
    assert "its owner has paused it" in shown
    assert "maintenance" not in shown
    assert "maintenance" not in (stack.root / "coordinator.log").read_text()
    assert _agent(stack, PAUSED, "resume")["was_paused"] is True


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_an_agent_that_is_stopped_inside_a_batch_ends_at_once_and_the_round_goes_through(stack: Stack) -> None:
    wait_for(lambda: bool(_agent(stack, STRICT, "status")["agent_in_session"]), "it has a session")
    stack.command("federation", "resume", "--dir", str(stack.home))
    stack.wait_event(STRICT, lambda event: event["event"] == "progress" and event["round"] == 2, "it trains")
    trainers = psutil.Process(stack.running[STRICT].pid).children(recursive=True)
    stack.running[STRICT].terminate()
    assert stack.running[STRICT].wait(timeout=STOP_S) == 0
    wait_for(lambda: not any(_runs(one) for one in trainers), "no process of the agent is left", 10)
    stack.start(STRICT, "agent", "run", "--config", str(stack.config(STRICT)))
    for device in (PLAIN, PAUSED):
        assert stack.running[device].wait(timeout=150) == 0, stack.tail(device)
    stack.wait_event(STRICT, lambda event: event["event"] == "finished", "it knows the end, too")


def test_no_training_process_is_left_when_the_federation_has_ended(stack: Stack) -> None:
    stack.wait_event(
        STRICT, lambda event: event["event"] == "trainer_released" and "ended" in event["reason"], "released"
    )
    process = psutil.Process(stack.running[STRICT].pid)
    wait_for(
        lambda: not [one for one in process.children() if "fedcg-trainer" in " ".join(one.cmdline())], "no trainer", 20
    )
    assert sum(one.memory_info().rss for one in process.children(recursive=True)) < 50e6  # multiprocessing's tracker
    status = _agent(stack, STRICT, "status")
    assert (status["training_process"], status["agent_trainer"]) == (False, "gone")


def test_the_record_of_what_was_sent_is_what_the_observer_and_the_coordinator_received(stack: Stack) -> None:
    def updates() -> list[dict[str, Any]]:
        return [one for one in recorded(stack) if one["kind"] == "update"]

    wait_for(lambda: len({one["sender"] for one in updates()}) == 3, "the observer has all updates", 20)
    stored = {path.name for path in (stack.home / "artifacts").rglob("*") if path.is_file()}
    report = _page(stack, "/f/shapes/sent.html")
    for device in stack.devices:
        sent = _agent(stack, device, "sent")
        mine = {one["id"]: one for one in updates() if one["sender"] == device}
        listed = {item["artifact"]: item for item in sent["items"] if item["kind"] == "update"}
        assert set(listed) == set(mine)
        assert set(listed) <= stored
        for artifact, item in listed.items():
            payload = (stack.root / "wire" / "artifacts" / artifact).read_bytes()
            assert item["bytes"] == len(payload)
            assert (set(item["parts"]), set(item["report"])) == ({"statistics"}, set(mine[artifact]["report"]))
            assert item["receipt"] in ("accepted", "duplicate")
            assert artifact in report, "the report file lists it by SHA-256"
            assert item["facts"] == mine[artifact]["facts"]
            assert all(f"{name} {value}" in report for name, value in item["facts"].items())
        assert sent["totals"]["shapes"]["updates"] == len(mine)
        assert sent["totals"]["shapes"]["message_bytes"] > 0
        assert _agent(stack, device, "status")["bytes_today"]["up"] >= sum(item["bytes"] for item in listed.values())


NEVER, ALWAYS = "label_l1_gain<-3.125", "label_l1_gain<3.125"  # a distance of two distributions lies in [0, 2]
OF_A_REPORT = (b"iVBORw0KGgo", b"\x89PNG\r\n\x1a\n", b"<!doctype html>", b"report.html", NEVER.encode(), b"was audited")


def events(stack: Stack, of: str, name: str) -> list[dict[str, Any]]:
    return [event for event in stack.events(of) if event["event"] == name]


def recorded(stack: Stack) -> list[dict[str, Any]]:
    """The artifacts that the observer saw cross."""
    path = stack.root / "wire" / "wire.json"
    return list(json.loads(path.read_text())["artifacts"]) if path.exists() else []


def test_an_update_whose_gate_does_not_hold_is_withheld_and_figures_leave_only_where_their_owner_allows_them(
    tmp_path: Path,
) -> None:
    strict, free, silent = "site-1", "site-2", "site-3"
    # At the default learning rate two epochs teach a client of 48 images nothing, and the attack's positive control says so.
    params = {"epochs": 2, "lr": 0.002, "server_iterations": 50, "ramp_rounds": 1}
    stack = Stack(root=tmp_path, params=params, rounds=1, min_clients=2)
    stack.prepare()
    for device, gate in ((strict, NEVER), (free, ALWAYS), (silent, ALWAYS)):
        report = ["examples", "accuracy", "health", *(["audit"] if device != silent else [])]
        audit: dict[tuple[str, str], Any] = {("audit", "before_publish"): "quick", ("audit", "gate"): gate}
        audit |= {("audit", "attacks"): ["labels"], ("policy", "allow_report"): report}
        set_values(stack.config(device), audit)
    with stack.up(agents=True, observer=("--frames",)):
        stack.wait_finished()
        wait_for(lambda: len(recorded(stack)) >= 1 + 2 + 2, "spec, two aggregates and two updates", 20)
        reader = Reader(stack.api_port).log_in((stack.home / "api.token").read_text().strip())
        pages = {device: reader.get(f"/devices/{device}")[1] for device in stack.devices}

    assert not events(stack, strict, "committed")
    assert NEVER in events(stack, strict, "declined")[0]["detail"]
    assert f"gate {NEVER}: FAILED".replace("<", "&lt;") in (stack.store(strict) / "audit" / "report.html").read_text()
    answers = {(event["client"], event["reason"]) for event in events(stack, "coordinator", "declined")}
    assert answers == {(strict, "withheld")}
    assert {event["client"] for event in events(stack, "coordinator", "update_stored")} == {free, silent}
    assert "withheld" in pages[strict]
    written = [path for path in stack.home.rglob("*") if path.is_file() and path.stat().st_size < MAX_ARTIFACT_BYTES]
    for path in (*written, stack.root / "coordinator.log"):
        assert NEVER.encode() not in path.read_bytes(), path
    assert any(b"withheld" in path.read_bytes() for path in written if path.name.startswith("database.sqlite"))

    found = json.loads((stack.store(free) / "audit" / "report.json").read_text())["attacks"][0]["figures"]
    largest = max(one["gain"]["high"] for one in found if one["name"] == "label_l1" and not one["is_ceiling"])
    shown = pages[free].partition('id="privacy-shapes"')[2].partition("</section>")[0]
    assert f"{largest:+.3g}".replace("-", "\N{MINUS SIGN}") in shown
    assert 'id="privacy-shapes"' not in pages[silent]

    frames = (stack.root / "wire" / "frames.bin").read_bytes()
    assert b"withheld" in frames
    assert b'"phase":"audit"' in frames  # progress, where the owner allows `health`
    for strange in OF_A_REPORT:
        assert strange not in frames
    updates = {entry["sender"]: entry for entry in recorded(stack) if entry["kind"] == "update"}
    assert {sender: "audit" in entry["report"] for sender, entry in updates.items()} == {free: True, silent: False}
    for entry in updates.values():
        sent = read_header((stack.root / "wire" / "artifacts" / entry["id"]).read_bytes()).report
        assert sent is not None
        assert set(sent.audit or {}) <= {"label_l1", "label_accuracy"}
