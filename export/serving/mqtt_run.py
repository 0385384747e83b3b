"""Starts the MQTT server of a box: its model, its link, its end by a signal."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from export.errors import ServingError
from export.model.signature import Accept
from export.serving.drift_watch import Watch
from export.serving.live_model import ServedModel
from export.serving.mqtt_server import MqttServer, Place
from export.serving.request_bodies import Limits
from fedcg.wire.errors import TransportError
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles

INBOUND_FACTOR = 4  # a request up to so many times too large is answered, a larger one ends the link
MAX_IMAGES = 32  # of one request, in JSON


@dataclass(frozen=True)
class Broker:
    """How to reach it: mutual TLS, or plain text with `insecure` on loopback."""

    host: str
    port: int
    ca: Path | None
    cert: Path | None
    key: Path | None
    insecure: bool


def run(
    model: Path,
    prefix: str,
    name: str,
    broker: Broker,
    *,
    threads: int,
    queue: int,
    top: int,
    max_bytes: int,
    max_pixels: int,
    watch: int,
    accept: Accept | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ServingError: the broker's description can't be used.
        ExportError: a name that is no topic level.
    """
    given = [path for path in (broker.ca, broker.cert, broker.key) if path is not None]
    if len(given) not in (0, 3):
        raise ServingError("TLS needs all of --ca, --cert and --key")
    tls = TlsFiles(*given) if given else None
    place = Place(prefix, name)
    try:
        config = MqttConfig(
            broker.host,
            broker.port,
            name,
            tls=tls,
            insecure=broker.insecure,
            max_inbound=INBOUND_FACTOR * max_bytes + 65_536,
        )
        server = MqttServer(
            ServedModel(model, threads=threads, warm_up=(1,), accept=accept),
            place,
            lambda will: MqttTransport(config, will),
            Limits(max_bytes, max_pixels, MAX_IMAGES),
            queue,
            top,
            Watch(watch),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        server.run()
    except (TransportError, ValueError) as error:
        raise ServingError(str(error)) from error
