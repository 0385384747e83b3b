"""A device's owner, over a real broker: approval of what the policy does not allow, a pause, a stop while it trains, what was sent, the support file."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.commands import data_of, run_fedcg
from tests.support.page.pages import Reader
from tests.support.stack import CLASSES, Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(290)]
ALLOWED = ("classifier", "generator", "statistics")
PLAIN, PAUSED, STRICT = "site-1", "site-2", "site-3"
STOP_S = 5.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A federation that shares statistics, and waits because the owners of two of three devices have not allowed that."""
    stack = Stack(
        root=tmp_path_factory.mktemp("owner"),
        devices=(PLAIN, PAUSED, STRICT),
        method="fedproto",
        params={"epochs": 40},
        rounds=2,
        allow_upload={PLAIN: ALLOWED},
        allow_report=("examples", "accuracy", "loss", "health", "label_counts"),
    )
    with stack.up(observer=()):
        for device in (PLAIN, PAUSED):
            stack.start_agent(device)
        stack.start(
            STRICT, "agent", "run", "--config", str(stack.config(STRICT))
        )  # goes on when the federation has ended
        wait_for(lambda: bool(_declines(stack, STRICT) and _declines(stack, PAUSED)), "two owners are asked")
        yield stack


def _declines(stack: Stack, device: str) -> list[str]:
    answers = [event for event in stack.events("coordinator") if event["event"] == "declined"]
    return [event["reason"] for event in answers if event["client"] == device]


def _agent(stack: Stack, device: str, command: str, *more: str) -> dict[str, Any]:
    return dict(data_of(stack.command("agent", command, *more, "--config", str(stack.config(device)), "--json")))


def _page(stack: Stack, path: str) -> str:
    reader = Reader(stack.api_port).log_in((stack.home / "api.token").read_text().strip())
    status, text = reader.get(path)
    assert status == 200
    return text


def test_a_federation_whose_owners_have_not_approved_says_so_everywhere_and_loses_no_attempt(stack: Stack) -> None:
    reason = f"the owners of {PAUSED}, {STRICT} have not approved the spec"
    (view,) = data_of(stack.command("federation", "list", "--dir", str(stack.home), "--json"))
    assert (view["phase"], view["unapproved"], view["attempt"]) == ("waits_for_owners", [PAUSED, STRICT], 1)
    for text in (
        view["reason"],
        " ".join(stack.command("coordinator", "status", "--dir", str(stack.home)).split()),
        stack.command("federation", "watch", "shapes", "--once", "--dir", str(stack.home)),
        _page(stack, "/f/shapes"),
    ):
        assert "fedcg agent approve" in text
        assert reason in text or f"{PAUSED}, {STRICT}" in text
    assert "waits for owners" in _page(stack, "/f/shapes")
    assert "attempt_failed" not in {event["event"] for event in stack.events("coordinator")}


def test_a_spec_beyond_the_policy_waits_until_its_owner_approves_exactly_it(stack: Stack) -> None:
    assert set(_declines(stack, STRICT)) == {"upload_not_allowed"}
    (digest,) = _agent(stack, STRICT, "approve", "--list")["waiting"]
    assert "statistics" in _agent(stack, STRICT, "status")["waits_for_approval"][0]
    refused = run_fedcg("agent", "approve", "--config", stack.config(STRICT), typed="n\n")
    assert refused.exit_code == 2
    shown = " ".join(refused.stderr.split())
    assert "numbers computed of the images" in shown
    assert "(not in [policy])" in shown
    assert "epochs 40" in shown
    assert "the number of training images of each class" in shown
    assert _agent(stack, STRICT, "approve", "--yes") == {"device": STRICT, "spec": digest, "approved": True}
    assert list(_agent(stack, STRICT, "approve", "--list")["approved"]) == [digest]
    stack.command("federation", "pause", "--dir", str(stack.home))  # no further round opens by itself
    _agent(stack, PAUSED, "approve", "--yes")
    stack.wait_event("coordinator", lambda event: event["event"] == "aggregate_stored", "the round goes on by itself")
    assert "attempt_failed" not in {event["event"] for event in stack.events("coordinator")}


def test_a_paused_device_declines_with_the_reason_and_the_page_shows_it(stack: Stack) -> None:
    answer = _agent(stack, PAUSED, "pause", "--for", "2h", "--reason", "maintenance of line 4")
    assert answer["paused"] is True
    before = _agent(stack, PAUSED, "status")
    assert "maintenance of line 4" in before["pause_reason"]
    wait_for(lambda: _agent(stack, PAUSED, "status")["agent_trainer"] == "gone", "its training process is released")
    stack.command("federation", "resume", "--dir", str(stack.home))
    stack.wait_event("coordinator", lambda event: event["event"] == "stalled", "the federation stalls")
    assert set(_declines(stack, PAUSED)) == {"upload_not_allowed", "paused"}
    shown = _page(stack, f"/devices/{PAUSED}")
    assert "its owner has paused it" in shown
    assert "maintenance" not in shown
    assert "maintenance" not in (stack.root / "coordinator.log").read_text()


def test_the_pause_outlives_the_agent_and_resume_ends_it(stack: Stack) -> None:
    stack.running[PAUSED].terminate()
    stack.running[PAUSED].wait(timeout=30)
    stack.start_agent(PAUSED)
    wait_for(lambda: "agent_obstacle" in _agent(stack, PAUSED, "status"), "it answers again", 30)
    assert _agent(stack, PAUSED, "status")["agent_obstacle"] == "paused"
    assert _agent(stack, PAUSED, "resume")["was_paused"] is True
    assert _agent(stack, PAUSED, "status")["paused"] is None


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_an_agent_that_is_stopped_inside_a_batch_ends_at_once_and_the_round_goes_through(stack: Stack) -> None:
    wait_for(lambda: bool(_agent(stack, STRICT, "status")["agent_in_session"]), "it has a session")
    stack.command("federation", "resume", "--dir", str(stack.home))
    stack.wait_event(STRICT, lambda event: event["event"] == "progress" and event["round"] == 2, "it trains")
    process = psutil.Process(stack.running[STRICT].pid)
    trainers = process.children(recursive=True)
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
    seen = stack.root / "wire" / "wire.json"

    def updates() -> list[dict[str, Any]]:
        return [one for one in json.loads(seen.read_text())["artifacts"] if one["kind"] == "update"]

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
            assert set(item["parts"]) == {"statistics"}
            assert set(item["report"]) == set(mine[artifact]["report"])
            assert item["receipt"] in ("accepted", "duplicate")
            assert artifact in report, "the report file lists it by SHA-256"
            assert item["facts"] == mine[artifact]["facts"]
            assert all(f"{name} {value}" in report for name, value in item["facts"].items())
        assert sent["totals"]["shapes"]["updates"] == len(mine)
        assert sent["totals"]["shapes"]["message_bytes"] > 0
        assert _agent(stack, device, "status")["bytes_today"]["up"] >= sum(item["bytes"] for item in listed.values())


def test_the_support_file_holds_what_support_needs_and_nothing_private(stack: Stack, tmp_path: Path) -> None:
    out, token = tmp_path / "support.zip", "planted-token-2f0c"
    arguments = ("agent", "diagnose", "--config", stack.config(STRICT), "--out", out)
    done = run_fedcg(*arguments, environment={"FEDCG_API_TOKEN": token})
    assert done.exit_code == 0, done.output
    assert out.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(out) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert json.loads(texts["status.json"])["agent_in_session"] is True
    assert any(one["check"] == "broker" for one in json.loads(texts["doctor.json"]))
    assert "approval_needed" in texts["events.jsonl"]
    whole = "".join(texts.values())
    signing = (stack.config(STRICT).parent / "signing.key").read_bytes()
    for secret in (token, "c" * 32, (b"c" * 32).hex(), signing.hex(), signing.decode("latin1").strip()):
        assert secret not in whole
    for name in (*CLASSES, ".png"):
        assert name not in whole
    assert str(stack.config(STRICT).parent / "signing.key") in texts["configuration.json"]
