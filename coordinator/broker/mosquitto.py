"""Mosquitto's configuration and access list for a coordinator's home."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from coordinator.config import LOOPBACK_HOSTS
from coordinator.paths import BROKER_NAME, CRL_NAME, Home
from coordinator.pki.authority import CA_NAME, credential_of
from fedcg.files import READABLE, replace_durably
from fedcg.wire.messages.topics import Topics

ACL_NAME = "acl"
CONFIG_NAME = "mosquitto.conf"
DATA_NAME = "data"


@dataclass(frozen=True)
class QueueLimits:
    """The broker's limits per session; `fedcg.wire.transfer.broker_presets` stays well inside.

    Attributes:
        packet_bytes: largest packet.
        in_flight: QoS 1 messages sent and not acknowledged.
        messages, bytes: queued for a session that is slow or away; further messages are dropped.
    """

    packet_bytes: int = 2_000_000
    in_flight: int = 20
    messages: int = 1000
    bytes: int = 64_000_000

    def lines(self) -> list[str]:
        """The limits as lines of mosquitto.conf."""
        return [
            f"max_packet_size {self.packet_bytes}",
            f"max_inflight_messages {self.in_flight}",
            f"max_queued_messages {self.messages}",
            f"max_queued_bytes {self.bytes}",
        ]


def write_config(home: Home, folder: Path, *, user: str | None = None, pki: Path | None = None) -> Path:
    """Write mosquitto.conf into a folder, and create the folder in it for Mosquitto's data.

    Args:
        home: whose certificates and port to use.
        folder: for the configuration; the access list lies there too, and a directory for the broker's database and its process id.
        user: the user that Mosquitto runs as when root starts it; by default root, because a user of its own could not read the
            home's keys.
        pki: directory of certificates, key and revocation list; default the home's own.

    Returns:
        The file.

    Raises:
        ConfigError: the home's configuration is not usable.
    """
    broker = home.config().broker
    folder, pki = folder.resolve(), (pki or home.pki).resolve()
    user = user or ("root" if os.geteuid() == 0 else None)
    (folder / DATA_NAME).mkdir(exist_ok=True, mode=stat.S_IRWXU)
    server = credential_of(pki, BROKER_NAME)
    template = files("coordinator.broker").joinpath(f"{CONFIG_NAME}.template").read_text(encoding="utf-8")
    text = Template(template).substitute(
        listener=f"{broker.port} 127.0.0.1" if broker.host in LOOPBACK_HOSTS else str(broker.port),
        ca=credential_of(pki, CA_NAME).certificate,
        certificate=server.certificate,
        key=server.key,
        acl=folder / ACL_NAME,
        crl=pki / CRL_NAME,
        persistence=folder / DATA_NAME,
        limits="\n".join(QueueLimits().lines()),
        extra="" if user is None else f"user {user}",
    )
    replace_durably(folder / CONFIG_NAME, text, READABLE)
    return folder / CONFIG_NAME


def access_list(federations: Sequence[str], devices: Iterable[str], observers: Iterable[str]) -> str:
    """Mosquitto's access list: one `user` section per device, nothing for anybody else."""
    if not federations:
        return "# No federation yet: nobody may read or write anything.\n"
    ids = sorted(devices)
    return "\n".join(Topics(federation).mosquitto_acl(ids, observers) for federation in federations)
