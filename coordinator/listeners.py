"""The TLS listeners for boxes: their certificates, their sockets, and which certificate a connection showed.

For enrolment a client certificate is optional in the handshake (a new box has none), for the carrier it is required. One that
is shown must be of our authority and valid, else the handshake fails.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from coordinator.config import ListenerSettings
from coordinator.errors import HomeError
from coordinator.peers import HANG_UP, PEER
from coordinator.provision.pki import CA_NAME, Credential, credential_of
from fedcg.wire.carrier import STALL_S

HANDSHAKE_S = 10.0
CONNECTION_S = 20.0
KEEP_ALIVE_S = 20
MAX_CONNECTIONS = 128
MAX_CARRIER_CONNECTIONS = 1024
MAX_HEADER_BYTES = 16 * 1024
Send = Callable[[Any], Awaitable[None]]


class EnrolmentProtocol(H11Protocol):
    """HTTP/1.1 whose requests carry the connection's certificate, on connections of a limited life."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection."""
        super().connection_made(transport)
        self._expiry = self.loop.call_later(CONNECTION_S, transport.abort)
        tls = transport.get_extra_info("ssl_object")
        certificate = None if tls is None else tls.getpeercert(binary_form=True)
        application = self.app

        async def with_peer(scope: Any, receive: Any, send: Any) -> None:
            await application({**scope, PEER: certificate, HANG_UP: transport.abort}, receive, self._watched(send))

        self.app = with_peer

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self._expiry.cancel()
        super().connection_lost(exc)

    def _watched(self, send: Send) -> Send:
        return send


class CarrierProtocol(EnrolmentProtocol):
    """The same on connections that live for as long as something moves on them."""

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self._moved()
        super().data_received(data)

    def _watched(self, send: Send) -> Send:
        async def sending(message: Any) -> None:
            await send(message)  # waits for as long as the other side does not read
            self._moved()

        return sending

    def _moved(self) -> None:
        self._expiry.cancel()
        if not self.transport.is_closing():
            self._expiry = self.loop.call_later(STALL_S, self.transport.abort)


def server_context(
    pki: Path, credential: Credential, client_certificate: ssl.VerifyMode = ssl.CERT_OPTIONAL
) -> ssl.SSLContext:
    """TLS 1.3; a client certificate is verified when one is shown, and whether one must be shown is up to the listener."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(credential_of(pki, CA_NAME).certificate)
    context.load_cert_chain(credential.certificate, credential.key)
    context.verify_mode = client_certificate
    return context


@contextmanager
def listening(name: str, settings: ListenerSettings, host: str) -> Iterator[socket.socket | None]:
    """The socket of a listener, or None when it is off.

    Args:
        name: its section of coordinator.toml.
        settings: what is there.
        host: the name under which boxes reach it.

    Raises:
        HomeError: the port is taken, or the address is not this machine's.
    """
    address, port = settings.address(host), settings.port
    if port is None:
        yield None
        return
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    ) as listener:  # named, else asyncio sets no TCP_NODELAY
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            raise HomeError(
                f"the {name} listener can't have {address}:{port}: {error.strerror}; end what listens there or change "
                f"[{name}] port or listen in coordinator.toml"
            ) from error
        yield listener


@asynccontextmanager
async def serving(
    application: FastAPI,
    listener: socket.socket,
    context: ssl.SSLContext,
    protocol: type[EnrolmentProtocol] = EnrolmentProtocol,
    max_connections: int = MAX_CONNECTIONS,
) -> AsyncIterator[None]:
    """Serve boxes on a bound socket for as long as the context lasts."""
    config = uvicorn.Config(
        application,
        http=protocol,
        ws="none",
        lifespan="off",
        log_level=logging.WARNING,
        log_config=None,
        access_log=False,
        proxy_headers=False,  # the address that counts is the connection's: a header is whatever the sender likes
        server_header=False,
        limit_concurrency=max_connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config, state, {}),
        sock=listener,
        ssl=context,
        ssl_handshake_timeout=HANDSHAKE_S,
    )
    try:
        yield
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()


def carrying(
    application: FastAPI, listener: socket.socket, pki: Path, credential: Credential
) -> AbstractAsyncContextManager[None]:
    """Serve the carrier to boxes that show a certificate of the authority, for as long as the context lasts."""
    context = server_context(pki, credential, ssl.CERT_REQUIRED)
    return serving(application, listener, context, CarrierProtocol, MAX_CARRIER_CONNECTIONS)
