"""`fedcg agent pause|resume|approve|sent|diagnose` and the owner's lines of `status`, as a person at the device calls them."""

import base64
import json
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from edge_client.agent.owner import OwnerRequest, success
from edge_client.store.checked_files import SENT_FILE, SentRecord
from edge_client.store.owner_record import NO_CODE, Consent, Pause, PauseFile, TrafficCounter
from edge_client.store.private_store import PrivateStore
from fedcg.config_file import set_values
from fedcg.errors import BAD_INPUT, EXISTS, NOT_FOUND
from fedcg.event_log import EventLog
from fedcg.wire.artifacts.artifacts import artifact_id
from fedcg.wire.messages.schemas import DeclineReason, RoundAttempt
from fedcg.wire.parts import Part, ReportField, TensorLayout
from tests.support.commands import data_of, fails, run_fedcg
from tests.support.edge.answering_agent import answering_agent
from tests.support.edge.world import DEVICE, FEDERATION, toy_spec, update_of, write_device

STATISTICS = toy_spec(
    upload=(Part.CLASSIFIER, Part.STATISTICS),
    report=(ReportField.EXAMPLES, ReportField.LABEL_COUNTS),
    layouts={
        Part.CLASSIFIER: (TensorLayout(name="weight", dtype="float32", shape=(3, 400)),),
        Part.STATISTICS: (TensorLayout(name="means", dtype="float32", shape=(3, 100_000)),),
    },
    params={"epochs": 500, "batch_size": 16},
)
"""1,200 and 300,000 numbers of 4 bytes."""


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A device with a private store that no agent uses; returns its agent.toml."""
    config = write_device(tmp_path)
    store = PrivateStore.open(tmp_path / "store", FEDERATION, DEVICE)
    store.save_spec(STATISTICS.canonical())
    Consent(store.root).wait_for(STATISTICS.digest, DeclineReason.UPLOAD_NOT_ALLOWED, "statistics are not listed", 1e9)
    return config


@pytest.fixture
def asked(device: Path) -> Iterator[list[OwnerRequest]]:
    """What reaches an agent of the device, which agrees to everything."""
    data = {"until": 1e9, "reason": "", "was_paused": True, "now": "waiting for a round"}
    with answering_agent(device.parent / "store", success(data)) as taken:
        yield taken


def run(device: Path, *words: object, typed: str | None = None) -> Any:
    return run_fedcg("agent", *words, "--config", device, typed=typed)


def test_pause_and_resume_reach_the_running_agent(device: Path, asked: list[OwnerRequest]) -> None:
    paused = run(device, "pause", "--for", "2h", "--reason", "maintenance", "--now")
    assert paused.stdout.startswith(f"{DEVICE} is paused until 2001-09-09 01:46:40 UTC.\nNext: ")
    assert asked[0].model_dump() == {"v": 1, "command": "pause", "for_s": 7200.0, "reason": "maintenance", "now": True}
    assert run(device, "resume").stdout == f"{DEVICE} is no longer paused.\n"
    assert data_of(run(device, "pause", "--json").stdout)["paused"] is True
    assert data_of(run(device, "resume", "--json").stdout)["paused"] is False


@pytest.mark.parametrize("words", [("--for", "soon"), ("--for", "0s"), ("--for", "999999d"), ("--reason", "x" * 201)])
def test_a_pause_that_makes_no_sense_is_refused_by_its_option(device: Path, words: tuple[str, str]) -> None:
    assert words[0] in fails(2, "agent", "pause", *words, "--config", device)


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_without_a_running_agent_the_command_ends_with_code_4(device: Path, command: str) -> None:
    assert "fedcg agent run" in fails(4, "agent", command, "--config", device)


def test_what_a_spec_says_of_its_work_cannot_repaint_what_the_owner_reads(device: Path) -> None:
    spec = STATISTICS.model_copy(update={"params": {"epochs": "5\x1b[2A\x1b[2K"}, "seed": 9})
    store = PrivateStore.open(device.parent / "store", FEDERATION, DEVICE)
    store.save_spec(spec.canonical())
    Consent(store.root).wait_for(spec.digest, DeclineReason.UPLOAD_NOT_ALLOWED, "statistics are not listed", 1e9)
    shown = run(device, "approve", spec.digest, typed="n\n")
    assert "epochs 5\\x1b[2A\\x1b[2K" in shown.stderr
    assert "\x1b" not in shown.stderr


def test_approve_shows_in_plain_words_what_would_leave_and_asks(device: Path) -> None:
    refused = run(device, "approve", typed="n\n")
    assert refused.exit_code == 2
    lines = [" ".join(line.split()) for line in refused.stderr.splitlines()]
    assert lines[0] == f"Federation {FEDERATION}, method {STATISTICS.method}, spec {STATISTICS.digest[:12]}."
    assert "policy.allow_upload of this device does not list: statistics" in lines[1]
    assert lines[1].endswith("; the spec asks for epochs = 500; policy.max_epochs of this device is 200")
    assert lines[2] == f"Leaves {DEVICE} after each round, up to 1.3 MB:"
    assert "classifier 4.8 kB the network from features to classes; it never sees an image" in lines
    assert any(
        line.startswith("statistics 1.2 MB numbers computed from the images") and "(not in [policy])" in line
        for line in lines
    )
    assert "label_counts the number of training images of each class (not in [policy])" in lines
    assert "examples the number of training images" in lines
    assert "Work per round: epochs 500 (not in [policy]), batch size 16." in lines
    assert not Consent(device.parent / "store").read().approved
    assert run(device, "approve", typed="y\n").exit_code == 0
    assert list(Consent(device.parent / "store").read().approved) == [STATISTICS.digest]
    (event,) = [json.loads(line) for line in (device.parent / "store" / "events.jsonl").read_text().splitlines()]
    assert event["event"] == "approved"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("agent", "approve"), "--yes"),
        (("agent", "leave"), "--yes"),
        (("agent", "backup", "--out", "backup"), "--passphrase-file"),
        (("cohort", "join"), "--code-file"),
    ],
)
def test_a_question_without_a_terminal_ends_with_an_envelope_that_names_the_option_that_answers(
    device: Path, words: tuple[str, ...], option: str
) -> None:
    command = [sys.executable, "-m", "fedcg", *words, "--config", str(device), "--json"]
    asked = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, start_new_session=True
    )
    envelope = json.loads(asked.stdout)
    assert (asked.returncode, envelope["ok"]) == (BAD_INPUT, False)
    assert f"run it again with {option}" in envelope["error"]["next"]
    assert "Traceback" not in asked.stderr
    assert not Consent(device.parent / "store").read().approved
    if words == ("agent", "approve"):
        assert "Leaves site-1 after each round" in asked.stderr, "nobody approves what was not shown"


def test_approvals_are_listed_named_by_their_first_digits_and_revoked(device: Path) -> None:
    short = STATISTICS.digest[:12]
    listed = run(device, "approve", "--list").stdout.splitlines()
    assert listed[0].split() == ["SPEC", "STATE", "SINCE", "WHY"]
    assert listed[1].startswith(f"{short}  waits  2001-09-09 01:46:40 UTC  ")
    assert listed[2] == f"Next: fedcg agent approve {short}"
    for name in ("0" * 12, STATISTICS.digest[:5]):
        assert run(device, "approve", name, "--yes").exit_code == NOT_FOUND
    assert run(device, "approve", short, "--yes").exit_code == 0
    assert f"{short}  approved" in run(device, "approve", "--list").stdout
    assert "no spec is waiting for approval" in fails(NOT_FOUND, "agent", "approve", "--yes", "--config", device)
    revoked = data_of(run(device, "approve", "--revoke", short, "--json").stdout)
    assert revoked == {"device": DEVICE, "spec": STATISTICS.digest, "approved": False}
    assert data_of(run(device, "approve", "--list", "--json").stdout) == {"waiting": {}, "approved": {}}
    assert "No spec is waiting" in run(device, "approve", "--list").stdout


def test_code_is_approved_as_it_was_shown_and_its_permission_is_taken_back(device: Path) -> None:
    code, consent = device.parent / "client.py", Consent(device.parent / "store")
    device.write_text(set_values(device.read_text(), {("training", "program"): "client:client"}))
    code.write_text("shown = 1")
    shown, again = (sha256(text).hexdigest() for text in (b"shown = 1", b"other = 2"))
    consent.wait_for(STATISTICS.digest, DeclineReason.NEEDS_APPROVAL, f"has changed: sha256 {shown[:12]}", 1e9)
    code.write_text("other = 2")
    assert f"has changed again: sha256 {again[:12]}; nothing was approved" in run(device, "approve", "--yes").stderr
    assert run(device, "approve", "--yes").exit_code == 0
    assert consent.read().programs == {STATISTICS.digest: again}
    assert run(device, "approve", "--revoke", STATISTICS.digest).exit_code == 0
    assert consent.read().programs == {STATISTICS.digest: NO_CODE}


def test_an_approval_goes_to_the_running_agent(device: Path, asked: list[OwnerRequest]) -> None:
    assert run(device, "approve", "--yes").exit_code == 0
    assert asked[0].model_dump() == {"v": 1, "command": "approve", "spec": STATISTICS.digest}
    assert not Consent(device.parent / "store").read().approved  # it is the agent's to write


def test_status_shows_the_owners_decisions_and_what_the_agent_does(device: Path, asked: list[OwnerRequest]) -> None:
    store = device.parent / "store"
    PauseFile(store).write(Pause(since=time.time(), until=4e9, reason="maintenance"))
    TrafficCounter(store, time.time).sent(12)
    status = data_of(run(device, "status", "--json").stdout)
    assert (status["paused"], status["pause_reason"]) == ("until 2096-10-02 07:06:40 UTC", "maintenance")
    assert status["waits_for_approval"] == [f"{STATISTICS.digest[:12]}: statistics are not listed"]
    assert (status["bytes_today"], status["agent_now"]) == ({"up": 12, "down": 0}, "waiting for a round")
    lines = [re.split(r"  +", line) for line in run(device, "status").stdout.splitlines()]
    assert lines[0] == ["ABOUT", "STATE"]
    assert ["bytes today", "up 12, down 0"] in lines
    assert ["paused", status["paused"]] in lines
    assert ["running", "no"] in lines
    assert lines[-1] == [f"Next: fedcg agent approve --config {device}"]
    PauseFile(store).write(Pause(since=0.0, until=1.0))
    assert data_of(run(device, "status", "--json").stdout)["paused"] is None


def test_sent_lists_everything_since_a_time_with_totals(device: Path) -> None:
    now, store = 1e9, device.parent / "store"
    assert run(device, "sent").stdout.startswith(
        "No update and no report has left this device.\nNot listed: enrolment "
    )
    record = SentRecord(store, FEDERATION, lambda: now)
    update = update_of(toy_spec(), RoundAttempt(1, 1))
    record.message("hello", 532)
    record.update(update)
    record.self_report({"paused": True})
    now = 2e9
    record.update(update_of(toy_spec(), RoundAttempt(2, 1)))
    data = data_of(run(device, "sent", "--json").stdout)
    assert [item["kind"] for item in data["items"]] == ["update", "self_report", "update"]
    assert data["totals"][FEDERATION]["updates"] == 2
    shown = run(device, "sent").stdout
    assert f"2001-09-09 01:46:40 UTC  round 1, attempt 1: {len(update)} bytes (classifier 60 bytes" in shown
    assert "reported: accuracy 0.5, examples 3; facts: " in shown
    assert artifact_id(update) in shown
    assert "earlier control messages: hello 532 bytes" in shown
    assert "no receipt" in shown
    late = data_of(run(device, "sent", "--since", "2030-01-01", "--json").stdout)["items"]
    assert [item["round"] for item in late] == [2]
    assert run(device, "sent", "--since", "yesterday").exit_code == 2
    assert (store / SENT_FILE).stat().st_mode & 0o777 == 0o600
    assert data["problem"] is None
    (store / SENT_FILE).write_text((store / SENT_FILE).read_text().replace("update", "updatE", 1))
    assert f"{store / SENT_FILE} is damaged: 1 of its lines are ignored" in run(device, "sent").stdout


def members(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_the_support_file_has_only_numbers_and_words_of_the_program(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, store = device.parent, PrivateStore(device.parent / "store")
    (root / "data" / "Zeppelin").mkdir(parents=True)
    (root / "data" / "Zeppelin" / "mrs smith.png").write_bytes(b"no image")
    monkeypatch.setenv("FEDCG_API_TOKEN", "planted_in_environment")
    store.keep_cohort_secret(bytes(range(32)))
    signing = (root / "signing.key").read_bytes()
    secrets = [store.device_secret().hex(), base64.b64encode(bytes(range(32))).decode(), signing.hex()]
    secrets += [signing.decode("latin1").strip(), "planted_in_environment", "Zeppelin", "mrs smith", "/srv/earlier"]
    secrets += ["gateway-7.hospital.example", "otto_the_owner"]
    events = EventLog(store.root / "events.jsonl", time.time).unwatched()
    at: dict[str, int] = {"round": 3, "attempt": 1}
    for leaked in secrets:  # as if a message had it
        for name in ("agent_error", "link_problem", "declined", "round_failed", "audited", "refused"):
            events.write(name, **at, detail=leaked, host=leaked, report=leaked, classes=[leaked], counts={leaked: 1})
        events.write("refused", what=f"{leaked}.png", count=1)
        PauseFile(store.root).write(Pause(since=time.time(), until=4e9, reason=leaked[-200:]))
        events.write("agent_paused", until=4e9, reason=leaked)
    store.save_left_out({"a": "; ".join(secrets)})
    events.write("declined", **at, reason="no_data", detail="mrs smith")
    out = root / "support.zip"
    done = data_of(run(device, "diagnose", "--out", out, "--json").stdout)
    again = fails(EXISTS, "agent", "diagnose", "--out", out, "--config", device)
    assert f"{out} exists already; choose another file" in again
    texts = members(out)
    names = ("about", "configuration", "status", "doctor", "files", "events")
    assert done["holds"] == list(texts) == [f"{name}.json" for name in names]
    whole = "".join(texts.values())
    assert [one for one in secrets if one in whole or json.dumps(one)[1:-1] in whole] == []
    about, configuration, status, doctor, files, logged = (json.loads(text) for text in texts.values())
    assert (about["packages"]["torch"] != "", "FEDCG_API_TOKEN" in about["environment"]) == (True, True)
    assert configuration["keys"]["signing"] == str(root / "signing.key")
    assert (files["secrets/cohort.key"], status["running"]) == (40, False)
    assert {one["check"]: one["state"] for one in doctor}["data"] == "failed"
    last = {name: logged[-1][name] for name in ("event", "reason", *at)}
    assert last == {"event": "declined", "reason": "no_data", **at}
    assert run(device, "diagnose", "--out", root / "b.zip", "--events", "1").exit_code == 0
    assert json.loads(members(root / "b.zip")["events.json"]) == logged[-1:]


def test_diagnose_works_before_the_first_run_and_refuses_a_file_that_is_no_zip(tmp_path: Path) -> None:
    config = write_device(tmp_path)
    assert run(config, "diagnose", "--out", tmp_path / "a.zip").exit_code == 0
    assert json.loads(members(tmp_path / "a.zip")["status.json"]) == {"is_readable": False}
    for wrong in (tmp_path / "a.txt", tmp_path / "absent" / "a.zip"):
        assert "--out" in fails(2, "agent", "diagnose", "--out", wrong, "--config", config)
