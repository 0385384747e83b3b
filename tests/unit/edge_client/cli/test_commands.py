"""`fedcg agent status`, `fedcg agent run` on bad input, `fedcg agent logs`, and `fedcg doctor`."""

import errno
import importlib.util
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest
from typer.testing import Result

from edge_client.cli.doctor import checks
from edge_client.cli.doctor.checks import Finding, examine
from edge_client.config import AgentConfig, load_config
from edge_client.errors import unreadable
from edge_client.store.private_store import DeliveryRecord, PrivateStore
from fedcg.errors import BAD_INPUT, FAILED, NOT_FOUND
from fedcg.event_log import EventLog, follow_events
from fedcg.files import checked_secret
from fedcg.wire.messages.schemas import RoundAttempt
from tests.conftest import StartMosquitto
from tests.support.broker.brokers import Pki, RunningMosquitto, acl_for
from tests.support.commands import data_of, fails, run_fedcg
from tests.support.edge.world import draw_images, toy_generation, toy_spec, write_device
from tests.support.waiting import wait_until


@pytest.fixture
def device(tmp_path: Path, pki: Pki) -> Path:
    """A device's folder as the coordinator's bundle lays it out, with an image of each class; returns its agent.toml."""
    config, tls = write_device(tmp_path, "a"), pki.tls("a")
    files = f'[tls]\nca = "{tls.ca}"\ncert = "{tls.cert}"\nkey = "{tls.key}"\n'
    config.write_text(config.read_text().replace("insecure = true\n", "") + files)
    draw_images(tmp_path / "data", 1, seed=1)
    return config


def run(*arguments: str) -> Result:
    return run_fedcg("agent", *arguments)


def findings(config: Path) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(load_config(config, {}), datetime.now(timezone.utc))}


def opened(config: AgentConfig) -> PrivateStore:
    return PrivateStore.open(config.store, config.federation, config.device)


def test_a_wrong_configuration_ends_with_code_2_and_all_problems(tmp_path: Path) -> None:
    (tmp_path / "agent.toml").write_text('federation = "Shapes"\n')
    for command in ("run", "status"):
        told = fails(2, "agent", command, "--config", tmp_path / "agent.toml")
        assert "line 1: federation" in told
        assert "device" in told


def test_status_before_the_first_run_says_what_to_do(device: Path) -> None:
    assert "fedcg agent run" in fails(NOT_FOUND, "agent", "status", "--config", device)


def test_status_shows_round_outbox_and_receipts_without_stopping_an_agent(device: Path) -> None:
    store = opened(load_config(device, {}))
    generation = store.generations.commit(toy_generation(toy_spec(), RoundAttempt(3, 2)))
    assert generation.outbox is not None
    with store.locked():
        waiting = data_of(run("status", "--config", str(device), "--json").stdout)
    assert (waiting["round"], waiting["attempt"], waiting["running"]) == (3, 2, True)
    assert waiting["update_waiting"] == generation.outbox.artifact
    assert waiting["private_parts_start"] == "public spec seed"
    store.save_delivery(DeliveryRecord(generation.outbox.artifact, 3, 2, "accepted", ""))
    (store.root / "secrets" / "cohort.key").write_bytes(checked_secret(b"c" * 32))
    done = data_of(run("status", "--config", str(device), "--json").stdout)
    assert (done["update_waiting"], done["running"]) == (None, False)
    assert (done["last_receipt"], done["private_parts_start"]) == ("round 3.2: accepted", "cohort secret")


@pytest.mark.parametrize(
    "name",
    ["left_out.json", "delivered.json", "traffic.json", "format.json", "pause.json", "consent.json", "revoked.json"],
)
def test_status_names_a_damaged_file_and_shows_all_that_does_not_come_from_it(device: Path, name: str) -> None:
    store = opened(load_config(device, {}))
    store.generations.commit(toy_generation(toy_spec(), RoundAttempt(3, 2)))
    (store.root / name).write_bytes(b"{")
    shown = run("status", "--config", str(device))
    assert shown.exit_code == 0, shown.stderr
    assert f"{store.root / name} is damaged" in shown.stdout
    assert "fedcg agent run" in shown.stdout
    values = data_of(run("status", "--config", str(device), "--json").stdout)
    assert (values["round"], values["attempt"], values["running"]) == (3, 2, False)
    assert f"{store.root / name} is damaged" in values["problem"]


@pytest.mark.broker
def test_the_doctor_finds_nothing_to_repair_on_a_sound_device_but_that_no_coordinator_answers(
    device: Path, mosquitto: StartMosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_client.cli.doctor.checks.ANSWER_TIMEOUT_S", 1.0)
    server: RunningMosquitto = mosquitto(acl_for("shapes"))
    device.write_text(device.read_text().replace("port = 1\n", f"port = {server.port}\n"))
    found = findings(device)
    assert {finding.check for finding in found.values() if finding.state == "failed"} == {"coordinator"}
    assert "TLSv1.3" in found["broker"].detail
    assert "the coordinator has never run" in found["coordinator"].detail
    assert "fedcg device show a" in found["coordinator"].advice
    assert not load_config(device, {}).store.exists()  # it would belong to whoever asked


def test_the_doctor_says_whether_the_store_lies_on_an_encrypted_disk(device: Path, tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    disk = tmp_path / "sys/dev/block" / f"{os.major(number)}:{os.minor(number)}"  # where Linux describes it
    unknown = f"unknown: Linux reports no disk for {tmp_path} (btrfs, a container, a network?)"
    assert checks.check_encryption(tmp_path, tmp_path)[:2] == ("ok", unknown)
    disk.mkdir(parents=True)
    state, detail, advice = checks.check_encryption(tmp_path, tmp_path)
    assert (state, f"no: {tmp_path} is on an unencrypted disk" in detail) == ("warning", True)
    assert "LUKS with the TPM" in advice
    assert "docs/how-to/encrypt-disk.md" in advice
    (disk / "dm").mkdir()
    (disk / "dm" / "uuid").write_text("CRYPT-LUKS2-0f2e6f1c-fedcg\n")
    assert checks.check_encryption(tmp_path, tmp_path)[0] == "ok"
    assert findings(device)["encrypted disk"].state in ("ok", "warning"), "of this machine"


@pytest.mark.parametrize(
    ("table", "module", "extra"),
    [
        ('[audit]\nbefore_publish = "quick"\n', "skimage", "fedcg-edge[audit]"),
        ("[privacy.dp_sgd]\nnoise_multiplier = 1.0\n", "opacus", "fedcg-edge[privacy]"),
    ],
)
def test_without_the_extra_that_a_section_needs_the_doctor_and_the_start_fail_with_its_name(
    device: Path, monkeypatch: pytest.MonkeyPatch, table: str, module: str, extra: str
) -> None:
    device.write_text(device.read_text() + table)
    check = table[1:].partition("]")[0].partition(".")[0]
    assert findings(device)[check].state == "ok"
    find = importlib.util.find_spec
    for place in ("audit.choices", "edge_client.config"):
        monkeypatch.setattr(f"{place}.find_spec", lambda name, *rest: None if name == module else find(name, *rest))
    found = findings(device)[check]
    assert found.state == "failed"
    assert extra in found.detail
    assert extra in fails(2, "agent", "run", "--config", device)
    assert not load_config(device, {}).store.exists()


def _other_owner(box: Path) -> None:
    shutil.rmtree(box / "store")
    PrivateStore.open(box / "store", "shapes", "b")


def _file_for_store(box: Path) -> None:
    shutil.rmtree(box / "store")
    (box / "store").touch()


@pytest.mark.parametrize(
    ("mends_not_itself", "named"),
    [
        (lambda box: (box / "signing.key").unlink(), "Enrol the device again (`fedcg enrol`)"),
        (lambda box: (box / "coordinator.pub").write_text("x"), "Enrol the device again (`fedcg enrol`)"),
        (_other_owner, "belongs to device 'b' of federation 'shapes'"),
        (lambda box: (box / "store" / "secrets" / "device.key").write_bytes(b"x"), "device.key is damaged"),
        (_file_for_store, "set another `store`"),
        (lambda box: (box / "agent.toml").write_bytes(b"\xff"), "can't be read"),
        (
            lambda box: (box / "agent.toml").write_text(
                (box / "agent.toml").read_text().replace('cert = "', 'cert = "gone')
            ),
            "enrol the device again",
        ),
    ],
)
def test_what_only_a_person_can_mend_ends_the_agent_with_a_code_at_which_its_unit_stops(
    device: Path, mends_not_itself: Callable[[Path], object], named: str
) -> None:
    opened(load_config(device, {})).device_secret()
    unit = Path(__file__).parents[4] / "deploy" / "systemd" / "fedcg-agent@.service"
    stops_at = unit.read_text().split("RestartPreventExitStatus=")[1].split("\n")[0].split()
    mends_not_itself(device.parent)
    assert stops_at == ["2", "7"]
    assert named in fails(2, "agent", "run", "--config", device)


def test_a_disk_that_fails_for_a_moment_does_not_stop_the_unit_and_a_file_of_another_user_does(tmp_path: Path) -> None:
    assert unreadable(tmp_path, OSError(errno.EIO, "Input/output error")).exit_code == FAILED
    assert unreadable(tmp_path, PermissionError(errno.EACCES, "Permission denied")).exit_code == BAD_INPUT


def test_the_doctor_tells_of_a_configuration_that_cannot_be_read_or_is_not_there(tmp_path: Path) -> None:
    missing = run_fedcg("doctor", "--config", tmp_path / "nowhere.toml", "--json")
    assert (missing.exit_code, json.loads(missing.stdout)["ok"]) == (NOT_FOUND, False)
    (tmp_path / "nowhere.toml").write_text("federation = 1")
    result = run_fedcg("doctor", "--config", tmp_path / "nowhere.toml", "--json")
    assert result.exit_code == FAILED
    assert data_of(result.stdout)["findings"][0]["check"] == "configuration"


def test_the_doctor_notices_each_fault(device: Path) -> None:
    config = load_config(device, {})
    assert "the connection was refused" in findings(device)["broker"].detail
    assert findings(device)["cohort secret"].state == "warning"
    config.keys.signing.chmod(0o644)
    assert findings(device)["keys"].state == "warning"
    config.keys.signing.write_text("no key")
    assert findings(device)["keys"].state == "failed"
    for image in config.data.root.rglob("*.png"):
        image.unlink()
    assert findings(device)["data"].state == "failed"
    device.write_text(device.read_text().replace('device = "a"', 'device = "b"', 1))
    assert "not for b" in findings(device)["certificate"].detail


@pytest.fixture
def config(tmp_path: Path) -> Path:
    made = write_device(tmp_path / "box")
    (tmp_path / "box" / "store").mkdir()
    return made


def log(config: Path, t: float) -> EventLog:
    return EventLog(config.parent / "store" / "events.jsonl", lambda: t)


def test_the_events_of_a_device_are_printed_as_sentences(config: Path) -> None:
    log(config, 1.0).write("link", up=True, down_s=None)
    log(config, 2.0).write("phase_started", phase="load", round=1, attempt=1)
    log(config, 3.0).write("declined", round=1, attempt=1, rounds=9, reason="no_data", detail="/srv: no images")
    first, second = run_fedcg("agent", "logs", "--config", config).output.splitlines()
    assert first.endswith("[info     ] connected to the broker")
    expected = "[warning  ] round 1 of 9: declined (no_data): /srv: no images. What to do: put images where [data] root"
    assert expected in second
    assert "load started" in run_fedcg("agent", "logs", "--config", config, "--verbose").output


def test_since_takes_a_span_or_a_time_and_json_gives_the_events(config: Path) -> None:
    now = time.time()
    log(config, now - 7200).write("welcomed", epoch=1)
    log(config, now - 60).write("welcomed", epoch=2)
    words = ("agent", "logs", "--config", config, "--json", "--since")
    assert [data_of(line)["epoch"] for line in run_fedcg(*words, "1h").output.splitlines()] == [2]
    assert [data_of(line)["epoch"] for line in run_fedcg(*words, "2020-01-01").output.splitlines()] == [1, 2]
    assert run_fedcg(*words, "2999-01-01T00:00Z").output == ""


def test_a_log_that_is_not_there_yet_and_a_time_that_is_none_are_bad_input(config: Path) -> None:
    words = ("agent", "logs", "--config", config)
    assert "events.jsonl not found" in fails(NOT_FOUND, *words)
    log(config, 1.0).write("welcomed", epoch=1)
    assert "give 10m, 2h, 3d" in fails(BAD_INPUT, *words, "--since", "soon")


def test_a_followed_log_goes_on_after_its_rotation_without_a_gap(config: Path) -> None:
    path = config.parent / "store" / "events.jsonl"
    log(config, 1.0).write("welcomed", epoch=1)
    found: list[object] = []

    def follow() -> None:
        for event in follow_events(path, 0.02):
            found.append(event["epoch"])
            if event["epoch"] == 4:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    wait_until(lambda: found == [1], "the first event")
    log(config, 2.0).write("welcomed", epoch=2)
    path.replace(path.with_suffix(".old.jsonl"))
    with path.with_suffix(".old.jsonl").open("a") as late:  # a process that has the old file open still
        late.write('{"t": 3, "event": "welcomed", "epoch": 3}\n')
    log(config, 4.0).write("welcomed", epoch=4)
    thread.join(20)
    assert found == [1, 2, 3, 4]
