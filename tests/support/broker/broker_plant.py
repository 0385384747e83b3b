"""A coordinator's home with devices a, b and c, and a real broker in a separate process, configured by the product."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.cli.opening import create_home
from coordinator.config import BrokerSettings, CoordinatorConfig
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, credential_of
from fedcg.find_mosquitto import find_mosquitto
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles, connection_name
from fedcg.wire.transport.transport import Will
from tests.support.broker.brokers import Client
from tests.support.commands import succeeds
from tests.support.coordinator.homes import add_federation, bundle, message_key
from tests.support.waiting import free_port, wait_until

FEDERATION = "casting"
TOPICS = Topics(FEDERATION)
SUBSCRIBED = {
    "coordinator": (TOPICS.up_control("+"), TOPICS.up_chunk("+"), TOPICS.status("+")),
    "observer": (TOPICS.everything(),),
}


@dataclass
class Plant:
    """The home, its broker, and connections to it.

    Attributes:
        folder: the folder that the broker runs from, if not the home.
    """

    root: Path
    home: Home
    folder: Path | None = None
    broker: subprocess.Popen[bytes] | None = None
    clients: list[Client] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.home.config().broker.port

    @property
    def ca(self) -> Path:
        return credential_of(self.home.pki, CA_NAME).certificate

    def tls(self, name: str) -> TlsFiles:
        """Return the TLS files of a device's bundle, or those of the home for the coordinator and the observer."""
        folder = bundle(self.home, name) / "tls"
        if folder.exists():
            return TlsFiles(folder / "ca.pem", folder / "device.pem", folder / "device.key")
        own = credential_of(self.home.pki, name)
        return TlsFiles(self.ca, own.certificate, own.key)

    def client(
        self,
        name: str,
        *topics: str,
        will: Will | None = None,
        shown: str | None = None,
        kind: type[MqttTransport] = MqttTransport,
    ) -> Client:
        """Return a client that subscribes to these topics, with its own certificate or that of `shown`; not started."""
        connection = "" if shown or not bundle(self.home, name).exists() else message_key(self.home, name)
        config = MqttConfig(
            "127.0.0.1",
            self.port,
            name,
            tls=self.tls(shown or name),
            protocol="3.1.1",
            connection=connection and connection_name(FEDERATION, bytes.fromhex(connection)),
        )
        made = Client(kind(config, will))
        for topic in topics:
            made.transport.subscribe(topic)
        self.clients.append(made)
        return made

    def connect(self, name: str, *, wait: bool = True) -> Client:
        """Return a client with the subscriptions of its identity."""
        made = self.client(name, *SUBSCRIBED.get(name, (TOPICS.down_control(name),))).start()
        return made.await_link() if wait else made

    def start(self, name: str, *command: str, environment: Mapping[str, str] = os.environ) -> subprocess.Popen[bytes]:
        """Start a process, whose output goes to `<root>/<name>.log`, until the plant closes."""
        with (self.root / f"{name}.log").open("wb") as log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        return self.processes[-1]

    def fedcg(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a `fedcg` command on the home."""
        return self.start_python(name, "fedcg", *words, "--dir", str(self.home.root))

    def start_python(self, name: str, *module: str) -> subprocess.Popen[bytes]:
        return self.start(name, sys.executable, "-m", *module)

    def log(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def close_clients(self) -> None:
        while self.clients:
            self.clients.pop().transport.close()

    def close(self) -> None:
        """Close the clients and stop the processes."""
        self.close_clients()
        for process in reversed(self.processes):
            end(process)

    def start_broker(self) -> None:
        folder = self.folder or self.home.root
        self.broker = self.start_python("broker", "fedcg", "broker", "run", "--dir", str(folder))
        broker = self.broker
        wait_until(lambda: "ready" in self.log("broker") or broker.poll() is not None, "the broker is ready", 30)
        assert broker.poll() is None, self.log("broker")

    def end_broker(self) -> None:
        if self.broker is not None:
            end(self.broker)
            self.broker = None

    def command(self, *arguments: str) -> str:
        return succeeds(*arguments, "--dir", self.home.root)


@contextmanager
def open_plant(
    root: Path, kind: str, devices: Sequence[str] = ("a", "b", "c"), federation: str = FEDERATION, **options: Any
) -> Iterator[Plant]:
    """A plant with a broker.

    Args:
        root: an empty folder.
        kind: "run" for the broker in the coordinator's directory, "deployed" for one in a folder of `fedcg deploy mosquitto`, moved.
        devices: devices with a bundle.
        federation: its id.
        options: options of the federation, see `add_federation`.
    """
    assert find_mosquitto() is not None, "mark the test with `broker`"
    config = CoordinatorConfig(broker=BrokerSettings(port=free_port()))
    home = create_home(root / "home", config, observers=("observer",))
    add_federation(home, federation, devices, **options)
    made = Plant(root, home)
    try:
        if kind == "deployed":
            made.command("deploy", "mosquitto", "--out", str(root / "written"))
            made.folder = (root / "written").rename(root / "moved")
        made.start_broker()
        yield made
    finally:
        made.close()


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=20)
