"""Strangers at the ports of a real coordinator that may open 1,024 files, and one enrolled device that floods it: it lives, and the others are served meanwhile."""

import http.client
import json
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coordinator.config import CarrierSettings
from coordinator.members.membership import revoke
from coordinator.paths import Home
from coordinator.storage.locks import changing_members
from coordinator.storage.store import Store
from tests.support.broker.floods import FLOODER, HONEST, ROUNDS, flooded
from tests.support.coordinator.homes import bundle, make_home
from tests.support.serving import Server, install_versions
from tests.support.stack import wait_for
from tests.support.waiting import free_port

HOST = "127.0.0.1"
DESCRIPTORS = 1024
PLAIN = 1500
IDLE_TLS = 160
REVOKED = 400
WITHIN_S = 60.0
pytestmark = pytest.mark.slow


def with_few_descriptors(*words: str) -> list[str]:
    """A `fedcg` command under a limit that it can't raise."""
    return ["sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh", sys.executable, "-m", "fedcg", *words]


@pytest.fixture(scope="module", autouse=True)
def many_descriptors() -> Iterator[None]:
    """This process holds the other ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(4096, before[1])), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@dataclass
class Coordinator:
    """A coordinator process without a broker, and what an operator and devices ask of it."""

    home: Home
    process: subprocess.Popen[bytes]
    log: Path
    held: list[socket.socket] = field(default_factory=list)

    @property
    def ports(self) -> dict[str, int]:
        config = self.home.config()
        assert config.enrolment.port is not None
        assert config.carrier.port is not None
        return {"enrolment": config.enrolment.port, "carrier": config.carrier.port, "api": config.api.port}

    def context(self, device: str | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.home.pki / "ca.pem"))
        if device is not None:
            folder = bundle(self.home, device) / "tls"
            context.load_cert_chain(folder / "device.pem", folder / "device.key")
        return context

    def api(self, path: str = "/healthz", host: str = HOST) -> int:
        token = self.home.api_token.read_text().strip() if self.home.api_token.exists() else ""
        with closing(http.client.HTTPConnection(HOST, self.ports["api"], timeout=20)) as connection:
            connection.request("GET", path, headers={"Host": host, "Authorization": f"Bearer {token}"})
            return connection.getresponse().status

    def https(self, port: int, path: str, device: str | None = None) -> int:
        with closing(http.client.HTTPSConnection(HOST, port, timeout=20, context=self.context(device))) as connection:
            connection.request("GET", path)
            return connection.getresponse().status

    def answers(self) -> bool:
        """Whether operator, new boxes, renewals and the carrier are served; each is tried again by its caller."""
        with suppress(OSError, http.client.HTTPException):
            return [
                self.api(),
                self.https(self.ports["enrolment"], "/v1/authority"),
                self.https(self.ports["enrolment"], "/v1/authority", "good"),
                self.https(self.ports["carrier"], "/v1/ready", "good"),
            ] == [200, 200, 200, 204]
        return False

    def hold(self, port: int, context: ssl.SSLContext | None = None) -> None:
        """Open a connection and say nothing."""
        with suppress(OSError):  # refused, or ended in the handshake
            connection = socket.create_connection((HOST, port), 20)
            self.held.append(connection if context is None else context.wrap_socket(connection, server_hostname=HOST))

    def let_go(self) -> None:
        for connection in self.held:
            connection.close()
        self.held.clear()


def home_of(root: Path) -> Home:
    """A coordinator's directory with a federation, a device, and one that was revoked."""
    home = make_home(root, ["good", "bad", "late"], carrier=CarrierSettings(port=free_port()))
    with closing(Store(home.database)) as store:
        revoke(home, store, "bad", "stolen", time.time())
    return home


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    root = tmp_path_factory.mktemp("strangers")
    home, log = home_of(root), root / "log"
    with log.open("wb") as errors:
        words = with_few_descriptors("coordinator", "run", "--dir", str(home.root))
        process = subprocess.Popen(words, stderr=errors, stdout=subprocess.DEVNULL)
    made = Coordinator(home, process, log)
    try:
        wait_for(made.answers, "the coordinator answers")
        yield made
    finally:
        made.let_go()
        process.kill()
        process.wait()


@pytest.mark.parametrize("place", ["enrolment", "carrier", "api"])
def test_silent_connections_neither_end_a_coordinator_nor_lock_others_out(coordinator: Coordinator, place: str) -> None:
    key = coordinator.home.signing_key
    kept = key.rename(key.with_name("kept.key"))  # would be missed if it was read again
    try:
        for _ in range(PLAIN):
            coordinator.hold(coordinator.ports[place])
        wait_for(coordinator.answers, f"everybody is served while {PLAIN} connections are open", WITHIN_S)
        assert coordinator.process.poll() is None, coordinator.log.read_text()
    finally:
        coordinator.let_go()
        kept.rename(key)
    assert "Traceback" not in coordinator.log.read_text()
    assert len(coordinator.log.read_text().splitlines()) < 200


def test_idle_tls_connections_lock_out_neither_enrolment_nor_renewal(coordinator: Coordinator) -> None:
    context = coordinator.context()
    for _ in range(IDLE_TLS):
        coordinator.hold(coordinator.ports["enrolment"], context)
    assert len(coordinator.held) == IDLE_TLS
    assert coordinator.answers()
    coordinator.let_go()


def test_connections_with_a_revoked_certificate_end_in_the_handshake(coordinator: Coordinator) -> None:
    context, open_at_once = coordinator.context("bad"), []

    def attack() -> None:
        for number in range(REVOKED):
            coordinator.hold(coordinator.ports["carrier"], context)
            if number % 50 == 0:
                open_at_once.append(len(list(Path(f"/proc/{coordinator.process.pid}/fd").iterdir())))

    attacking = threading.Thread(target=attack)
    attacking.start()
    wait_for(coordinator.answers, "everybody is served meanwhile", WITHIN_S)
    attacking.join()
    assert coordinator.answers()
    assert max(open_at_once) < 100
    coordinator.let_go()


def test_the_members_lock_holds_up_enrolments_and_nobody_else(coordinator: Coordinator) -> None:
    """More requests wait for the lock than the web framework and asyncio have threads."""
    values = {"token": "0" * 16, "secret": "0" * 64, "signing_key": "0" * 64, "proof": "0" * 128}
    body = json.dumps({**values, "device": "x", "request": "x"}).encode()
    context, waiting = coordinator.context(), ExitStack()
    with changing_members(coordinator.home), waiting:
        for _ in range(60):
            connection = http.client.HTTPSConnection(HOST, coordinator.ports["enrolment"], timeout=20, context=context)
            waiting.callback(connection.close)
            connection.request("POST", "/v1/enrol", body, {"Content-Type": "application/json"})
        assert [coordinator.api("/healthz"), coordinator.api("/api/v1/devices")] == [200, 200]
        assert coordinator.https(coordinator.ports["carrier"], "/v1/ready", "good") == 204


def test_the_prediction_server_lives_through_silent_connections(tmp_path: Path) -> None:
    install_versions(tmp_path / "models", 1)
    words = with_few_descriptors("infer", "serve", "--model", str(tmp_path / "models"), "--port", "0")
    with (
        ExitStack() as held,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        held.callback(process.kill)
        server = Server(process)
        for _ in range(PLAIN):
            with suppress(OSError):
                held.enter_context(socket.create_connection((HOST, server.port), 20))

        def answers() -> bool:
            with suppress(OSError, http.client.HTTPException):
                return server.ask("/readyz").status == 200
            return False

        wait_for(answers, f"it answers while {PLAIN} connections are open", WITHIN_S)
        held.pop_all().close()
    assert process.returncode == -signal.SIGKILL


RATE, HARD_RATE = 500, 4000
SILENCED_WITHIN_S = 10.0
MAX_LOG_BYTES = 256 * 1024


@pytest.mark.broker
@pytest.mark.parametrize("kind", ["heartbeats", "manifests", "bad signatures", "chunks", "hellos"])
def test_a_flooding_device_delays_others_little_and_is_silenced_above_its_share(tmp_path: Path, kind: str) -> None:
    seen = flooded(tmp_path, kind, RATE, HARD_RATE)
    assert seen.flooded_s <= 2.0 * seen.calm_s + 1.0  # a second for a machine that has other work
    assert seen.silenced_s is not None
    assert 0.0 < seen.silenced_s <= SILENCED_WITHIN_S
    assert seen.log_bytes <= MAX_LOG_BYTES
    silenced = [event for event in seen.events if event["event"] == "silenced"]
    assert [event["client"] for event in silenced] == [FLOODER]
    assert "messages per second" in silenced[0]["reason"]
    stored = {(event["client"], event["round"]) for event in seen.events if event["event"] == "update_stored"}
    assert stored == {(device, number) for device in HONEST for number in range(2, ROUNDS + 1)} | {
        (client, number) for client, number in stored if number == 1
    }
    assert not [event for event in seen.events if event["event"] == "departed"]
