"""The TLS listeners for boxes: their certificates, their sockets, and which certificate a connection showed.

For enrolment a client certificate is optional in the handshake (a new box has none), for the carrier it is required. One that
is shown must be of our authority and valid, else the handshake fails.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

from cryptography import x509
from fastapi import FastAPI
from uvicorn.server import ServerState

from coordinator.config import ListenerSettings
from coordinator.errors import HomeError
from coordinator.http.client_certificates import HANG_UP, PEER
from coordinator.paths import CRL_NAME
from coordinator.pki.authority import CA_NAME, Credential, credential_of
from fedcg.listening import ACCEPTS, Connections, Listener, http_config
from fedcg.wire.messages.enrolment_messages import common_name

HANDSHAKE_S = 5.0
KEEP_ALIVE_S = 20

log = logging.getLogger(__name__)


def server_context(
    pki: Path, credential: Credential, client_certificate: ssl.VerifyMode = ssl.CERT_OPTIONAL
) -> ssl.SSLContext:
    """TLS 1.3; a client certificate is verified when one is shown, and whether one must be shown is up to the listener.

    A revoked one fails in the handshake, from the moment on at which the revocation list names it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(credential_of(pki, CA_NAME).certificate)
    context.load_cert_chain(credential.certificate, credential.key)
    context.verify_mode = client_certificate
    _check_revocations(context, pki / CRL_NAME)
    return context


@contextmanager
def listening(name: str, settings: ListenerSettings, host: str, connections: Connections) -> Iterator[Listener | None]:
    """The socket of a listener, or None when it is off.

    Args:
        name: its section of coordinator.toml.
        settings: what is there.
        host: the name under which boxes reach it.
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
async def serving(
    application: FastAPI,
    listener: Listener,
    context: ssl.SSLContext,
) -> AsyncIterator[None]:
    """Serve boxes on a bound socket for as long as the context lasts."""
    config = http_config(
        application,
        listener,
        _identify,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
    )
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
            connection.transport.abort()


def carrying(
    application: FastAPI, listener: Listener, pki: Path, credential: Credential
) -> AbstractAsyncContextManager[None]:
    """Serve the carrier to boxes that show a certificate of the authority, for as long as the context lasts."""
    return serving(application, listener, server_context(pki, credential, ssl.CERT_REQUIRED))


def _identify(transport: asyncio.Transport) -> tuple[str | None, dict[str, object]]:
    der = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    name = None if der is None else common_name(x509.load_der_x509_certificate(der))
    return name, {PEER: der, HANG_UP: transport.abort}


def _check_revocations(context: ssl.SSLContext, path: Path) -> None:
    """Refuse certificates that the revocation list names, as it is in the file at each handshake; all of them without a list."""
    read = -1

    def before_handshake(*_: object) -> int | None:
        nonlocal read
        try:
            if (changed := path.stat().st_mtime_ns) != read:
                context.load_verify_locations(path)  # added: of two lists OpenSSL takes the newer
                read = changed
        except OSError as error:
            if read:
                log.error("nobody gets in: the revocation list %s can't be read: %s", path, error)  # noqa: TRY400
            read = 0
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        return None

    context.load_verify_locations(path)
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    context.num_tickets = 0  # a resumed session would bring no certificate to look at
    context.sni_callback = before_handshake
