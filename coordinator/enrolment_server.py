"""The TLS listener for boxes: its certificate, its socket, and which certificate a connection showed.

A client certificate is optional in the handshake (a new box has none), but one that is shown must be of our authority and
valid, else the handshake fails. No connection lives longer than `CONNECTION_S`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import uvicorn
from cryptography import x509
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from coordinator.config import CoordinatorConfig
from coordinator.enrolment_api import PEER
from coordinator.errors import HomeError
from coordinator.home import Home
from coordinator.provision.pki import CA_NAME, Credential, credential_of, issue

SERVER_NAME = "enrolment"
HANDSHAKE_S = 10.0
CONNECTION_S = 20.0
MAX_CONNECTIONS = 128
MAX_HEADER_BYTES = 16 * 1024
RENEW_SERVER_BEFORE = timedelta(days=60)


class EnrolmentProtocol(H11Protocol):
    """HTTP/1.1 whose requests carry the connection's certificate, on connections of a limited life."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection."""
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        certificate = None if tls is None else tls.getpeercert(binary_form=True)
        application = self.app

        async def with_peer(scope: Any, receive: Any, send: Any) -> None:
            await application({**scope, PEER: certificate}, receive, send)

        self.app = with_peer
        self._expiry = self.loop.call_later(CONNECTION_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self._expiry.cancel()
        super().connection_lost(exc)


def server_credential(home: Home, config: CoordinatorConfig) -> Credential:
    """The listener's certificate: issued, and issued anew when it runs out or boxes use other names."""
    names = tuple(dict.fromkeys((config.enrolment_host, "127.0.0.1", "localhost")))
    credential = credential_of(home.pki, SERVER_NAME)
    if credential.certificate.exists() and credential.key.exists():
        certificate = x509.load_pem_x509_certificate(credential.certificate.read_bytes())
        left = certificate.not_valid_after_utc - datetime.now(timezone.utc)
        if left > RENEW_SERVER_BEFORE and _names(certificate) == set(names):
            return credential
    return issue(home.pki, SERVER_NAME, server=True, sans=names)


def server_context(home: Home, credential: Credential) -> ssl.SSLContext:
    """TLS 1.3; a client certificate is verified when one is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(credential_of(home.pki, CA_NAME).certificate)
    context.load_cert_chain(credential.certificate, credential.key)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


@contextmanager
def listening(config: CoordinatorConfig) -> Iterator[socket.socket | None]:
    """The listener's socket, or None when enrolment is off.

    Raises:
        HomeError: the port is taken, or the address is not this machine's.
    """
    address, port = config.enrolment_address, config.enrolment.port
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
                f"the enrolment listener can't have {address}:{port}: {error.strerror}; end what listens there or change "
                "[enrolment] port or listen in coordinator.toml"
            ) from error
        yield listener


@asynccontextmanager
async def serving(application: FastAPI, listener: socket.socket, context: ssl.SSLContext) -> AsyncIterator[None]:
    """Serve boxes on a bound socket for as long as the context lasts."""
    config = uvicorn.Config(
        application,
        http=EnrolmentProtocol,
        ws="none",
        lifespan="off",
        log_level=logging.WARNING,
        log_config=None,
        access_log=False,
        proxy_headers=False,  # the address that counts is the connection's: a header is whatever the sender likes
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: EnrolmentProtocol(config, state, {}),
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


def _names(certificate: x509.Certificate) -> set[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    found = {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    return found | set(names.get_values_for_type(x509.DNSName))
