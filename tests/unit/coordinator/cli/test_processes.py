"""The commands as processes: brokers that accept who is enrolled, and a coordinator that serves, answers and ends."""

import json
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cryptography import x509

from coordinator.paths import Home
from coordinator.rounds.records import DeviceState
from coordinator.storage.store import Store
from fedcg.errors import ALREADY_RUNNING
from fedcg.wire.messages.schemas import RoundAttempt
from tests.support.broker.broker_plant import Plant
from tests.support.commands import fails, run_fedcg
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.waiting import wait_until


def get(home: Home, path: str) -> tuple[int, Any]:
    """The status and the content of an answer; 0 where nothing listens."""
    headers = {"Authorization": f"Bearer {home.api_token.read_text().strip()}"} if home.api_token.exists() else {}
    try:
        answer = httpx.get(f"{home.config().api.url}{path}", headers=headers, timeout=5, trust_env=False)
    except httpx.TransportError:
        return 0, None
    return answer.status_code, answer.json()


def started(home: Home, processes: Plant, *words: str, name: str = "coordinator") -> subprocess.Popen[bytes]:
    """A coordinator that answers."""
    process = processes.fedcg(name, "coordinator", "run", *words)
    wait_until(lambda: get(home, "/healthz")[0] == 200 or process.poll() is not None, "it answers")
    assert process.poll() is None, processes.log(name)
    return process


@pytest.mark.slow
def test_a_coordinator_serves_its_federation_over_http_alone_and_ends_on_sigterm(home: Home, processes: Plant) -> None:
    process = started(home, processes)
    assert get(home, "/readyz")[0] == 503
    _, federation = get(home, "/api/v1/federations/tiny")
    assert (federation["federation"], federation["phase"]) == (FEDERATION, "waiting")
    assert federation["upload"] == ["classifier", "generator"]
    assert get(home, "/api/v1/federations/tiny/rounds") == (200, [])
    assert get(home, "/api/v1/federations/tiny/rounds/1")[0] == 404
    with closing(Store(home.database)) as store:
        store.open_attempt(FEDERATION, RoundAttempt(1, 1), "0" * 64, frozenset({"a"}), 1.0, 2.0)
    (person,) = get(home, "/api/v1/federations/tiny/rounds/1")[1]["attempts"][0]["participants"]
    assert (person["client"], person["state"], person["share"]) == ("a", "invited", 1.0)

    assert processes.fedcg("second", "coordinator", "run").wait(timeout=30) == ALREADY_RUNNING
    assert "is using" in processes.log("second")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0, processes.log("coordinator")


@pytest.mark.slow
def test_a_killed_coordinator_takes_its_worker_along_and_its_lease_is_not_reused(home: Home, processes: Plant) -> None:
    store = Store(home.database)  # a round is open, or there is no worker
    base = store.aggregates("tiny")[-1].artifact
    store.open_attempt("tiny", RoundAttempt(1, 1), base, frozenset({"a"}), 1.0, time.time() + 600)
    store.close()
    first = processes.fedcg("coordinator", "coordinator", "run")

    def worker_pid() -> int:
        lines = home.events_file.read_text().splitlines() if home.events_file.exists() else []
        ready = [json.loads(line) for line in lines if '"worker_ready"' in line]
        return int(ready[-1]["pid"]) if ready else 0

    wait_until(lambda: worker_pid() > 0, "the worker is ready")
    epoch = get(home, "/api/v1/federations/tiny")[1]["epoch"]
    first.kill()
    first.wait()
    wait_until(lambda: not Path(f"/proc/{worker_pid()}").exists(), "the worker is gone")
    started(home, processes, name="again")
    assert get(home, "/api/v1/federations/tiny")[1]["epoch"] > epoch


@pytest.mark.parametrize("damaged", ["signing.key", "artifacts"])
def test_a_coordinator_that_can_not_start_names_file_and_remedy(home: Home, damaged: str) -> None:
    if damaged == "artifacts":
        shutil.rmtree(home.artifacts)
    else:
        key = bytearray(home.signing_key.read_bytes())
        key[120] ^= 1
        home.signing_key.write_bytes(key)
    said = fails(2, "coordinator", "run", "--dir", home.root)
    assert damaged in said
    assert "backup" in said


@pytest.mark.slow
def test_a_coordinator_that_lost_a_revocation_starts_once_the_loss_is_accepted(home: Home, processes: Plant) -> None:
    first = started(home, processes)
    assert run_fedcg("device", "revoke", "a", "--dir", home.root).exit_code == 0
    first.kill()
    first.wait()
    home.database.with_name("database.sqlite-wal").write_bytes(b"")
    assert processes.fedcg("second", "coordinator", "run").wait(timeout=60) == 1
    started(home, processes, "--accept-loss", name="third")
    assert get(home, "/api/v1/federations/tiny")[1]["epoch"] > 1_000_000


@pytest.mark.broker
def test_a_coordinator_publishes_who_is_enrolled_or_revoked_after_any_crash(home: Home, processes: Plant) -> None:
    """As after a coordinator that was killed between its database and the broker's lists."""
    processes.start_broker()
    assert "user a" in (home.broker / "acl").read_text().splitlines()
    store = Store(home.database)
    store.add_device("late", "aa" * 32, 1.0)
    assert store.register.end_membership("a", DeviceState.REVOKED, "", 1.0)
    (certificate,) = store.register.certificates("a")
    store.close()
    started(home, processes)
    wait_until(lambda: "user late" in (home.broker / "acl").read_text().splitlines(), "the broker has the new list")
    _, _, of_a = (home.broker / "acl").read_text().partition("user a\n")
    assert of_a.strip() == "topic read fedcg/1/tiny/devices/a/down/control", "where it is told that it is revoked"
    revoked = x509.load_pem_x509_crl(home.revocations.read_bytes())
    assert [f"{entry.serial_number:x}" for entry in revoked] == [certificate.serial]


@pytest.mark.broker
def test_a_second_broker_for_a_home_is_refused_and_the_first_ends_on_sigterm(home: Home, processes: Plant) -> None:
    first = processes.fedcg("broker", "broker", "run")
    wait_until(lambda: "ready" in processes.log("broker") or first.poll() is not None, "the broker is ready")
    assert processes.fedcg("second", "broker", "run").wait(timeout=30) == ALREADY_RUNNING
    assert "is using" in processes.log("second")
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=20) == 0, processes.log("broker")


def test_without_mosquitto_neither_a_broker_nor_the_demo_starts_and_the_message_says_how_to_install_it(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("coordinator.broker.broker_process", "experiments.cli.demo_command"):
        monkeypatch.setattr(f"{module}.find_mosquitto", lambda: None)
    for words in (("broker", "run", "--dir", home.root), ("demo", "--out", tmp_path / "out")):
        told = fails(2, *words)
        assert ("make setup-broker" in told, "apt-get install mosquitto" in told) == (True, True)


@pytest.mark.slow
def test_a_coordinator_that_is_stopped_refuses_the_plans_under_way_and_creates_nothing_afterwards(
    home: Home, processes: Plant
) -> None:
    process = started(home, processes)
    headers = {"Authorization": f"Bearer {home.api_token.read_text().strip()}"}
    image = {"mode": "RGB", "height": 64, "width": 64, "mean": [0.5] * 3, "std": [0.5] * 3}

    def create(name: str) -> tuple[int, str]:
        plan = {"federation": name, "classes": ["x", "y"], "method": "fedcg", "rounds": 1, "input": image}
        url = f"{home.config().api.url}/api/v1/federations"
        answer = httpx.post(url, json={"plan": plan}, headers=headers, timeout=60, trust_env=False)
        return answer.status_code, answer.json()["detail"]

    with ThreadPoolExecutor(2) as askers:
        asked = [askers.submit(create, name) for name in ("first", "second")]
        wait_until(lambda: children(process.pid) != [], "a plan is being completed")
        (child,) = children(process.pid)
        process.send_signal(signal.SIGTERM)
        refusal = "nothing was created: the coordinator is stopping; try again when it is running"
        assert [each.result() for each in asked] == [(503, refusal)] * 2
    assert process.wait(timeout=10) == 0, processes.log("coordinator")
    assert not Path(f"/proc/{child}").exists()
    assert [record.id for record in Store(home.database).federations()] == [FEDERATION]
    lines = [json.loads(line) for line in home.audit_file.read_text().splitlines()]
    ends = sorted((line["event"], line.get("outcome", 0)) for line in lines)
    assert ends == [("intent", 0)] * 2 + [("outcome", 503)] * 2
    assert "Traceback" not in processes.log("coordinator")


def children(pid: int) -> list[int]:
    """The processes that complete a plan for a coordinator."""
    found = [one.info for one in psutil.process_iter(["pid", "ppid", "cmdline"])]  # leaves out what ends meanwhile
    return [one["pid"] for one in found if one["ppid"] == pid and "create_federation" in " ".join(one["cmdline"] or ())]
