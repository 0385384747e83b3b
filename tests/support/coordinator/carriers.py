"""The real listener of the HTTPS carrier next to a running service, and requests to it from any program."""

import http.client
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.config import CarrierSettings
from coordinator.http.device_api import create_carrier_app, listening, serving
from coordinator.pki.authority import credential_of, server_context
from coordinator.service.service import Service
from fedcg.listening import Caps, Connections
from fedcg.wire.tls import ServerRole
from tests.support.broker.brokers import HOST, Pki
from tests.support.coordinator.federations import hosting


@asynccontextmanager
async def carrying(
    pki: Path, port: int, service: Service, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[None]:
    """Serve devices on a loopback port."""
    application = create_carrier_app(hosting(service), clock)
    tls = server_context(pki, credential_of(pki, "carrier"), ssl.CERT_REQUIRED)
    with listening("carrier", CarrierSettings(port=port), HOST, Connections(Caps(64, 32))) as listener:
        assert listener is not None
        async with serving(application, listener, tls):
            yield


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


def connect(port: int, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection(HOST, port, timeout=20, context=context)


def ask(
    port: int,
    pki: Pki,
    identity: str,
    path: str,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Make one request with an identity's certificate."""
    connection = connect(port, pki.tls(identity).context(ServerRole.CARRIER))
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        return Answer(
            response.status, {name.title(): value for name, value in response.headers.items()}, response.read()
        )
    finally:
        connection.close()
