"""The TLS listeners for devices: their certificates, their sockets, and which certificate a connection showed.

For enrolment a client certificate is optional in the handshake (a new device has none), for the carrier it is required. One that
is shown must be of the coordinator's authority and valid, else the handshake fails.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

from cryptography import x509
from fastapi import FastAPI, Request
from uvicorn.server import ServerState

from coordinator.config import ListenerSettings
from coordinator.errors import HomeError
from fedcg.listening import ACCEPTS, Connections, Listener, http_config
from fedcg.wire.messages.enrolment_messages import common_name

HANDSHAKE_S = 5.0
KEEP_ALIVE_S = 20
PEER = "fedcg.peer"
"""Where a listener puts the DER form of the connection's certificate into the ASGI scope; None without one."""
HANG_UP = "fedcg.hang_up"
"""Where it puts the function that ends the connection at once."""


@contextmanager
def listening(name: str, settings: ListenerSettings, host: str, connections: Connections) -> Iterator[Listener | None]:
    """The socket of a listener, or None when it is off.

    Args:
        name: its section of coordinator.toml.
        settings: that section.
        host: the name under which devices reach it.
        connections: where its connections count.

    Raises:
        HomeError: the port is taken, or the address is not this machine's.
    """
    if settings.port is None:
        yield None
        return
    with bound(name, settings.address(host), settings.port, connections) as listener:
        yield listener


def bound(name: str, address: str, port: int, connections: Connections) -> Listener:
    """A listening socket.

    Raises:
        HomeError: the port is taken, or the address is not this machine's.
    """
    try:
        return Listener(name, address, port, connections)
    except OSError as error:
        raise HomeError(
            f"the {name} listener can't have {address}:{port}: {error.strerror}; end what listens there or change "
            f"the port under [{name}] in coordinator.toml"
        ) from error


@asynccontextmanager
async def serving(application: FastAPI, listener: Listener, context: ssl.SSLContext) -> AsyncIterator[None]:
    """Serve devices on a bound socket for as long as the context lasts."""
    config = http_config(application, listener, _identify, lifespan="off", timeout_keep_alive=KEEP_ALIVE_S)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config, state, {}),  # type: ignore[call-arg]
        sock=listener,
        backlog=ACCEPTS,
        ssl=context,
        ssl_handshake_timeout=HANDSHAKE_S,
        ssl_shutdown_timeout=HANDSHAKE_S,
    )
    try:
        yield
    finally:
        server.close()
        for connection in list(state.connections):
            hang_up(connection.transport)


def hang_up(transport: asyncio.Transport) -> None:
    """Cut a connection; one that has just closed has no protocol any more, and older releases of Python 3.11 fail over it."""
    with suppress(AttributeError):
        transport.abort()


def peer_of(request: Request) -> x509.Certificate | None:
    """The certificate of the connection, verified by TLS; None when it showed none."""
    der = request.scope.get(PEER)
    return x509.load_der_x509_certificate(der) if isinstance(der, bytes) else None


def _identify(transport: asyncio.Transport) -> tuple[str | None, dict[str, object]]:
    der = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    name = None if der is None else common_name(x509.load_der_x509_certificate(der))
    return name, {PEER: der, HANG_UP: partial(hang_up, transport)}
