"""Real brokers for tests, and clients that record received messages."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode

from coordinator.pki.authority import create_ca, credential_of, issue, write_revocations
from fedcg.find_mosquitto import Mosquitto
from fedcg.wire.messages.topics import Topics
from fedcg.wire.tls import ServerRole
from fedcg.wire.transport.mqtt import MqttConfig, MqttTransport, TlsFiles
from fedcg.wire.transport.mqtt_config import Protocol
from fedcg.wire.transport.transport import Delivery, Transport, Will
from tests.support.waiting import free_port, wait_until

HOST = "127.0.0.1"
DEVICES = ("a", "b", "c")
DEADLINE_S = 15.0


@dataclass(frozen=True)
class QueueLimits:
    """A broker's limits per session; without arguments, those of the generated configuration.

    Attributes:
        packet_bytes: largest packet.
        in_flight: unacknowledged QoS 1 messages.
        messages, bytes: queued for a slow or disconnected session; further messages are dropped.
    """

    packet_bytes: int = 2_000_000
    in_flight: int = 20
    messages: int = 1000
    bytes: int = 64_000_000

    def lines(self) -> list[str]:
        """Return the limits as lines of mosquitto.conf."""
        return [
            f"max_packet_size {self.packet_bytes}",
            f"max_inflight_messages {self.in_flight}",
            f"max_queued_messages {self.messages}",
            f"max_queued_bytes {self.bytes}",
        ]


@dataclass(frozen=True)
class Pki:
    """A throw-away authority with a certificate per identity."""

    directory: Path

    @staticmethod
    def create(directory: Path, identities: tuple[str, ...], now: datetime | None = None) -> Pki:
        create_ca(directory, now=now)
        for role in ServerRole:
            issue(directory, role.value, server=True, now=now)
        for identity in identities:
            issue(directory, identity, now=now)
        write_revocations(directory, (), now=now)
        return Pki(directory)

    @property
    def ca(self) -> Path:
        return credential_of(self.directory, "ca").certificate

    def tls(self, identity: str) -> TlsFiles:
        credential = credential_of(self.directory, identity)
        return TlsFiles(self.ca, credential.certificate, credential.key)


@dataclass
class RunningMosquitto:
    """One Mosquitto with mutual TLS, configured as in a real deployment."""

    mosquitto: Mosquitto
    pki: Pki
    folder: Path
    acl: str
    limits: QueueLimits = field(default_factory=QueueLimits)
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        acl = self.folder / "acl"
        acl.write_text(self.acl)
        acl.chmod(0o600)
        server = self.pki.tls("broker")
        lines = [
            "per_listener_settings false",
            "allow_anonymous false",
            f"listener {self.port} {HOST}",
            f"cafile {server.ca}",
            f"certfile {server.cert}",
            f"keyfile {server.key}",
            "require_certificate true",
            "use_identity_as_username true",
            "tls_version tlsv1.3",
            f"acl_file {acl}",
            *self.limits.lines(),
            "set_tcp_nodelay true",
        ]
        if os.geteuid() == 0:
            lines.append("user root")  # else it switches to user mosquitto, who can't read our 0600 keys
        configuration = self.folder / "mosquitto.conf"
        configuration.write_text("\n".join(lines) + "\n")
        with (self.folder / "mosquitto.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.mosquitto.binary), "-c", str(configuration)],
                stdout=log,
                stderr=log,
                env=self.mosquitto.environment(),
            )
        wait_until(self._listens, f"mosquitto listens: {(self.folder / 'mosquitto.log').read_text()}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def config(self, identity: str, protocol: Protocol = "5", port: int | None = None) -> MqttConfig:
        return MqttConfig(HOST, port or self.port, identity, tls=self.pki.tls(identity), protocol=protocol)

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "mosquitto.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0


class Intruder(MqttTransport):
    """Stays connected if its subscriptions are refused, like an eavesdropper."""

    def _subscribed(self, link: Any, data: Any, packet: int, reasons: list[ReasonCode], properties: Any) -> None:
        granted = [ReasonCode(PacketTypes.SUBACK, identifier=0) for _ in reasons]
        super()._subscribed(link, data, packet, granted, properties)


class Client:
    """A transport and everything that it received."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.deliveries: list[Delivery] = []
        self.links: list[bool] = []

    def start(self) -> Client:
        self.transport.start(self._delivered, self._link_changed)
        return self

    def await_link(self, ups: int = 1) -> Client:
        wait_until(lambda: self.links.count(True) >= ups, f"link {ups} is up; so far {self.links}")
        return self

    def payloads(self, topic: str) -> list[bytes]:
        return [delivery.payload for delivery in list(self.deliveries) if delivery.topic == topic]

    def await_payload(self, topic: str, payload: bytes) -> None:
        wait_until(lambda: payload in self.payloads(topic), f"{payload[:40]!r} on {topic}")

    def _delivered(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)

    def _link_changed(self, up: bool) -> None:
        self.links.append(up)


def mqtt_client(config: MqttConfig, will: Will | None = None) -> Client:
    return Client(MqttTransport(config, will))


def acl_for(federation: str) -> str:
    return Topics(federation).mosquitto_acl(DEVICES, ["observer"])
