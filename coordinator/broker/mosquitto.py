"""Mosquitto's configuration for a broker's folder."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from coordinator.broker.broker_folder import ACL_NAME, DATA_NAME, read_address
from coordinator.config import LOOPBACK_HOSTS
from coordinator.paths import BROKER_NAME, CRL_NAME
from coordinator.pki.authority import CA_NAME, credential_of
from fedcg.files import READABLE, replace_durably

CONFIG_NAME = "mosquitto.conf"


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


def write_config(folder: Path) -> Path:
    """Write mosquitto.conf into a broker's folder, with the paths that it has now, and create the folder for Mosquitto's data in it.

    Returns:
        The file.

    Raises:
        BrokerError: it is no broker's folder.
    """
    address, folder = read_address(folder), folder.resolve()
    (folder / DATA_NAME).mkdir(exist_ok=True, mode=stat.S_IRWXU)
    server = credential_of(folder, BROKER_NAME)
    template = files("coordinator.broker").joinpath(f"{CONFIG_NAME}.template").read_text(encoding="utf-8")
    text = Template(template).substitute(
        listener=f"{address.port} 127.0.0.1" if address.host in LOOPBACK_HOSTS else str(address.port),
        ca=credential_of(folder, CA_NAME).certificate,
        certificate=server.certificate,
        key=server.key,
        acl=folder / ACL_NAME,
        crl=folder / CRL_NAME,
        persistence=folder / DATA_NAME,
        limits="\n".join(QueueLimits().lines()),
        extra="user root" if os.geteuid() == 0 else "",  # a user of its own could not read the folder
    )
    replace_durably(folder / CONFIG_NAME, text, READABLE)
    return folder / CONFIG_NAME
