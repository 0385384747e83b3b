"""The commands as processes: brokers that accept who is enrolled, and a coordinator that serves, answers and ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from coordinator.broker.access_lists import publish_access
from coordinator.cli.opening import create_home
from coordinator.config import ApiSettings, BrokerSettings, CoordinatorConfig
from coordinator.members.bundle_enrolment import enrol
from coordinator.paths import Home
from coordinator.rounds.records import DeviceState
from coordinator.storage.store import Store
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles
from tests.support.broker.brokers import Client, mqtt_client
from tests.support.commands import run_fedcg
from tests.support.coordinator.homes import add_federation, bundle
from tests.support.coordinator.world import FEDERATION
from tests.support.waiting import free_port, wait_until


@pytest.fixture
def home(tmp_path: Path) -> Home:
    config = CoordinatorConfig(broker=BrokerSettings(port=free_port()), api=ApiSettings(port=free_port()))
    made = create_home(tmp_path / "home", config)
    add_federation(made, FEDERATION, ["a"])
    return made


class Processes:
    """Starts `fedcg` commands with their output in a file, and ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: object) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedcg", *map(str, arguments)], stdout=log, stderr=subprocess.STDOUT
            )
        self._running.append(process)
        return process

    def output(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def end_all(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.end_all()


def start_broker(processes: Processes, home: Home) -> subprocess.Popen[bytes]:
    process = processes.start("broker", "broker", "run", "--dir", home.root)
    wait_until(lambda: "ready" in processes.output("broker") or process.poll() is not None, "the broker is ready")
    assert process.poll() is None, processes.output("broker")
    return process


def connected(home: Home, device: str) -> Client:
    """A device's connection with its bundle's certificate, which reads the coordinator's status."""
    tls = bundle(home, device) / "tls"
    files = TlsFiles(tls / "ca.pem", tls / "device.pem", tls / "device.key")
    client = mqtt_client(MqttConfig("127.0.0.1", home.config().broker.port, device, tls=files))
    client.transport.subscribe(Topics(FEDERATION).coordinator)
    return client.start().await_link()


def get(home: Home, path: str) -> tuple[int, object]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{home.config().api.port}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
    except urllib.error.URLError:
        return 0, None


@pytest.mark.broker
def test_a_coordinator_serves_over_a_real_broker_and_ends_when_told(
    home: Home, processes: Processes, tmp_path: Path
) -> None:
    broker = start_broker(processes, home)
    assert processes.output("broker").splitlines()[0].startswith("broker: mosquitto")
    coordinator = processes.start("coordinator", "coordinator", "run", "--dir", home.root)
    wait_until(lambda: get(home, "/readyz")[0] == 200, "the coordinator is ready")
    device = connected(home, "a")
    wait_until(lambda: bool(device.deliveries), "its status is retained and readable")

    store = Store(home.database)
    enrol(home, store, ["late"], tmp_path / "bundles", time.time())
    store.close()
    assert publish_access(home)
    late = connected(home, "late")

    def may_read() -> bool:
        """Subscribe anew: the broker sends what it retains only after it has read the new list."""
        assert isinstance(late.transport, MqttTransport)
        late.transport.reconnect()
        late.await_link(late.links.count(True) + 1)
        return bool(late.deliveries)

    wait_until(may_read, "a device that was added later may read")

    coordinator.send_signal(signal.SIGTERM)
    assert coordinator.wait(timeout=20) == 0, processes.output("coordinator")
    wait_until(lambda: len(device.deliveries) >= 2, "its goodbye")
    device.transport.close()
    late.transport.close()
    broker.send_signal(signal.SIGTERM)
    assert broker.wait(timeout=20) == 0, processes.output("broker")


def test_the_http_interface_tells_about_federation_rounds_and_devices(home: Home, processes: Processes) -> None:
    process = processes.start("coordinator", "coordinator", "run", "--dir", home.root)
    wait_until(lambda: get(home, "/healthz")[0] == 200 or process.poll() is not None, "it answers")
    assert process.poll() is None, processes.output("coordinator")
    assert get(home, "/readyz")[0] == 503
    _, federation = get(home, "/api/v1/federation")
    assert isinstance(federation, dict)
    assert (federation["federation"], federation["phase"], federation["epoch"]) == (FEDERATION, "waiting", 1)
    assert federation["upload"] == ["classifier", "generator"]
    assert get(home, "/api/v1/rounds") == (200, [])
    assert get(home, "/api/v1/rounds/1")[0] == 404
    _, devices = get(home, "/api/v1/devices")
    assert isinstance(devices, list)
    assert [(device["id"], device["online"]) for device in devices] == [("a", False)]
    store = Store(home.database)
    store.open_attempt((FEDERATION, 1, 1), "0" * 64, frozenset({"a"}), 1.0, 2.0)
    store.close()
    _, rounds = get(home, "/api/v1/rounds/1")
    assert isinstance(rounds, dict)
    assert rounds["attempts"][0]["participants"] == [{"client": "a", "state": "invited", "reason": ""}]

    second = processes.start("second", "coordinator", "run", "--dir", home.root)
    assert second.wait(timeout=30) == 2
    assert "is using" in processes.output("second")


def test_a_killed_coordinator_takes_its_worker_along_and_its_lease_is_not_reused(
    home: Home, processes: Processes
) -> None:
    first = processes.start("coordinator", "coordinator", "run", "--dir", home.root)

    def worker_pid() -> int:
        lines = home.events_file.read_text().splitlines() if home.events_file.exists() else []
        ready = [json.loads(line) for line in lines if '"worker_ready"' in line]
        return int(ready[-1]["pid"]) if ready else 0

    wait_until(lambda: worker_pid() > 0, "the worker is ready")
    first.kill()
    first.wait()
    wait_until(lambda: not Path(f"/proc/{worker_pid()}").exists(), "the worker is gone")
    processes.start("again", "coordinator", "run", "--dir", home.root)
    wait_until(lambda: get(home, "/healthz")[0] == 200, "it answers again")
    _, federation = get(home, "/api/v1/federation")
    assert isinstance(federation, dict)
    assert federation["epoch"] == 2


@pytest.mark.broker
def test_a_starting_coordinator_publishes_who_is_enrolled_or_revoked_whatever_was_interrupted(
    home: Home, processes: Processes
) -> None:
    """As after a coordinator that was killed between its database and the broker's lists."""
    start_broker(processes, home)
    assert "user a" in (home.broker / "acl").read_text().splitlines()
    store = Store(home.database)
    store.add_device("late", "aa" * 32, 1.0)
    assert store.register.end_membership("a", DeviceState.REVOKED, "", 1.0)
    (certificate,) = store.register.certificates("a")
    store.close()
    process = processes.start("coordinator", "coordinator", "run", "--dir", home.root)
    wait_until(lambda: get(home, "/healthz")[0] == 200 or process.poll() is not None, "it answers")
    assert process.poll() is None, processes.output("coordinator")
    wait_until(lambda: "user late" in (home.broker / "acl").read_text().splitlines(), "the broker has the new list")
    assert "user a" not in (home.broker / "acl").read_text().splitlines()
    revoked = x509.load_pem_x509_crl(home.revocations.read_bytes())
    assert [f"{entry.serial_number:x}" for entry in revoked] == [certificate.serial]


@pytest.mark.broker
def test_a_second_broker_for_the_same_home_is_refused(home: Home, processes: Processes) -> None:
    start_broker(processes, home)
    second = processes.start("second", "broker", "run", "--dir", home.root)
    assert second.wait(timeout=30) == 2
    assert "is using" in processes.output("second")


def test_without_mosquitto_the_command_says_how_to_get_one(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.broker.broker_process.find_mosquitto", lambda: None)
    refused = run_fedcg("broker", "run", "--dir", home.root)
    assert refused.exit_code == 2
    assert "make setup-broker" in refused.stderr
    assert "For a demo on this machine --broker amqtt" in refused.stderr


def test_the_embedded_broker_serves_no_other_machine(tmp_path: Path) -> None:
    home = create_home(tmp_path / "other", CoordinatorConfig(broker=BrokerSettings(host="broker.example")))
    refused = run_fedcg("broker", "run", "--dir", home.root, "--broker", "amqtt")
    assert refused.exit_code == 2
    assert "for demos on this machine" in refused.stderr
