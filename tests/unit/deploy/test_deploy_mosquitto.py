"""The Mosquitto configuration of `deploy/` on a real Mosquitto: who gets in, and as whom."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from string import Template

import pytest

from coordinator.broker.mosquitto import QueueLimits
from coordinator.pki.authority import create_ca, issue, write_revocations
from fedcg.find_mosquitto import find_mosquitto
from fedcg.wire.messages.topics import Topics

CONFIG = Path(__file__).parents[3] / "deploy" / "mosquitto" / "mosquitto.conf"
DEADLINE_S = 15.0
ACCEPTED = bytes([0x20, 0x02, 0x00, 0x00])
PUBLISH = 0x30
SUBACK = 0x90


def string(text: str) -> bytes:
    return len(text).to_bytes(2, "big") + text.encode()


def packet(kind: int, body: bytes) -> bytes:
    assert len(body) < 128
    return bytes([kind, len(body)]) + body


class Client:
    """A bare MQTT 3.1.1 client: enough to be let in, to subscribe, and to publish."""

    def __init__(self, port: int, pki: Path, certificate: str | None, client_id: str = "any") -> None:
        context = ssl.create_default_context(cafile=str(pki / "ca.pem"))
        if certificate is not None:
            context.load_cert_chain(pki / f"{certificate}.pem", pki / f"{certificate}.key")
        raw = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        self._socket = context.wrap_socket(raw, server_hostname="localhost")
        try:
            self._socket.sendall(packet(0x10, string("MQTT") + bytes([4, 2, 0, 60]) + string(client_id)))
            self.greeting = self.read()
        except OSError:
            self.close()
            raise

    def read(self) -> bytes:
        head = self._exactly(2)
        return head + self._exactly(head[1])

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            if not more:
                raise ConnectionError("the broker closed the connection")
            data += more
        return data

    def subscribe(self, topic: str) -> None:
        self._socket.sendall(packet(0x82, b"\0\1" + string(topic) + b"\0"))
        while self.read()[0] != SUBACK:
            pass

    def publish(self, topic: str, payload: bytes) -> None:
        self._socket.sendall(packet(PUBLISH, string(topic) + payload))

    def next_payload(self, topic: str) -> bytes:
        received = self.read()
        assert received[0] & 0xF0 == PUBLISH
        assert received[2:].startswith(string(topic))
        return received[2 + len(string(topic)) :]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    found = find_mosquitto()
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("Mosquitto is missing, in CI it must be there")
        pytest.skip("no Mosquitto; `make setup-broker` puts one in place")
    folder = tmp_path_factory.mktemp("mosquitto")
    pki = folder / "tls"
    create_ca(pki)
    issue(pki, "broker", server=True)
    for name in ("coordinator", "observer", "a", "b"):
        issue(pki, name)
    (folder / "acl").mkdir()
    access = folder / "acl" / "acl"
    access.write_text(Topics("casting").mosquitto_acl(["a", "b"], ["observer"]))
    access.chmod(0o600)
    write_revocations(pki, ()).rename(folder / "acl" / "crl.pem")
    (folder / "data").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = CONFIG.read_text()
    changes = {
        "listener 8883": f"listener {port} 127.0.0.1",
        "/etc/mosquitto/fedcg/": f"{folder}/",
        "/var/lib/fedcg-broker/": f"{folder}/data/",
    }
    for ours, here in changes.items():
        assert ours in text
        text = text.replace(ours, here)
    # As root Mosquitto would drop to a user that cannot read the keys; in a container it starts as an ordinary user.
    (folder / "mosquitto.conf").write_text(text + ("user root\n" if os.geteuid() == 0 else ""))
    command = [str(found.binary), "-c", str(folder / "mosquitto.conf")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=found.environment())
    try:
        wait_until_it_listens(port, process, folder / "log")
        yield port, pki
    finally:
        process.terminate()
        process.wait(timeout=DEADLINE_S)


def wait_until_it_listens(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.01)  # polling a condition with a deadline
        else:
            return
    pytest.fail(f"Mosquitto did not listen within {DEADLINE_S} s: {log.read_text()}")


def test_the_configuration_is_what_the_template_gives() -> None:
    """So what is tried here is what `fedcg broker run` and `fedcg deploy mosquitto` use, but for the folders."""
    template = files("coordinator.broker").joinpath("mosquitto.conf.template").read_text(encoding="utf-8")
    rendered = Template(template).substitute(
        listener="8883",
        ca="/etc/mosquitto/fedcg/tls/ca.pem",
        certificate="/etc/mosquitto/fedcg/tls/broker.pem",
        key="/etc/mosquitto/fedcg/tls/broker.key",
        acl="/etc/mosquitto/fedcg/acl/acl",
        crl="/etc/mosquitto/fedcg/acl/crl.pem",
        persistence="/var/lib/fedcg-broker",
        limits="\n".join(QueueLimits().lines()),
        extra="",
    )
    assert settings(CONFIG.read_text()) == settings(rendered)


def settings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.broker
def test_an_enrolled_device_gets_in_over_tls(broker: tuple[int, Path]) -> None:
    client = Client(*broker, "a")
    assert client.greeting == ACCEPTED
    client.close()


@pytest.mark.broker
def test_without_a_certificate_nobody_gets_in(broker: tuple[int, Path]) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        Client(*broker, None)


@pytest.mark.broker
def test_a_device_cannot_evict_another_by_taking_its_client_id(broker: tuple[int, Path]) -> None:
    topic = "fedcg/1/casting/offer"
    victim = Client(*broker, "a", client_id="a")
    victim.subscribe(topic)
    thief = Client(*broker, "b", client_id="a")
    assert thief.greeting == ACCEPTED
    speaker = Client(*broker, "coordinator")
    speaker.publish(topic, b"still here")
    assert victim.next_payload(topic) == b"still here"
    for client in (victim, thief, speaker):
        client.close()


@pytest.mark.broker
def test_a_device_hears_only_what_is_meant_for_it_and_speaks_only_for_itself(broker: tuple[int, Path]) -> None:
    topics = Topics("casting")
    coordinator, a, b = (Client(*broker, name) for name in ("coordinator", "a", "b"))
    b.subscribe("fedcg/1/casting/#")
    coordinator.subscribe(topics.all_up_control())
    coordinator.publish(topics.down_control("a"), b"for a alone")
    coordinator.publish(topics.down_control("b"), b"for b")
    assert b.next_payload(topics.down_control("b")) == b"for b"
    a.publish(topics.up_control("b"), b"a speaks for b")
    a.publish(topics.up_control("a"), b"a speaks")
    assert coordinator.next_payload(topics.up_control("a")) == b"a speaks"
    for client in (coordinator, a, b):
        client.close()
