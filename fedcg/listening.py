"""Listening sockets that outsiders can't exhaust, HTTP/1.1 with time-outs, and the check of a request's Host header.

Every listener of this project is created here. It decides which connections stay open, before TLS and before a byte is read. It must
not know routes and identities: the code that verifies a certificate calls `Connections.identify`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedcg.values import Value

HEADER_S = 5.0
"""Longest time from the first byte of a request, or from the start of the connection, to the end of the request's header."""
STALL_S = 30.0
"""Longest time without progress of a body that is received, or of a response that is sent."""
WARN_EVERY_S = 60.0
QUEUE = 1024
"""Connections that the kernel holds until they are accepted. A full queue delays honest clients by a second or more."""
ACCEPTS = 8
"""Connections accepted in one turn of the event loop. In a flood, existing connections also progress before they are ended."""
MAX_HEADER_BYTES = 16 * 1024
ERRORS_KEPT_S = 3600.0
ERRORS_OF_PEER, PEERS = 5, 100
"""In `ERRORS_KEPT_S`: the most tracebacks logged for one peer's requests, and the most peers with tracebacks."""
MAX_DESCRIPTORS = 65_536
"""The soft limit of file descriptors is raised up to this; a higher one would only hide a leak."""
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\[\]:]+)(:[0-9]*)?")

log = logging.getLogger(__name__)
Application = Callable[[Any, Any, Any], Any]
Identify = Callable[[asyncio.Transport], tuple[str | None, dict[str, object]]]


class Caps(Value):
    """How many connections may be open at once.

    Attributes:
        total: at all listeners together.
        per_address: of one IPv4 address, or one IPv6 /64 network, at one listener, without a certificate.
        per_certificate: with the certificate of one device.
    """

    total: int
    per_address: int
    per_certificate: int = 8


class Connection(socket.socket):
    """An accepted connection; it counts from `accept` until its descriptor is closed.

    Attributes:
        table: where it counts.
        is_busy: a whole request has arrived and its response is not finished; it isn't ended to free a place.
        is_ending: it was ended to free a place.
    """

    table: Connections
    is_busy = False
    is_ending = False

    def close(self) -> None:
        """Close it."""
        self.table.remove(self)
        super().close()


class Connections:
    """The open connections of some listeners, oldest first, and their owners.

    If there are too many, the oldest idle connection of the owner with the most connections ends. One with a certificate ends only if
    there is no other. So a flood affects only connections from its own address, and a connected device stays connected.

    Args:
        caps: as configured; the total is at most half of the process's descriptors.
    """

    def __init__(self, caps: Caps) -> None:
        self._caps = caps
        self._total = min(caps.total, _raise_descriptor_limit() // 2)
        self._open: dict[Connection, tuple[bool, str]] = {}
        self._ended = 0
        self._warned_at = float("-inf")
        self._errors: Counter[str] = Counter()
        self._errors_since = float("-inf")
        if self._total < caps.total:
            log.warning("room for %d of %d connections; raise LimitNOFILE or `ulimit -n`", self._total, caps.total)

    def admit(self, connection: Connection, listener: str, address: str) -> None:
        """Count a new connection. If there are too many, another one ends, or this one if all others are busy."""
        self._count(connection, (False, f"{listener} {network_of(address)}"), self._caps.per_address)

    def identify(self, connection: Connection, name: str) -> None:
        """From now on, count a connection as that of the device whose verified certificate it has shown."""
        self._count(connection, (True, name), self._caps.per_certificate)

    def of(self, descriptor: int) -> Connection:
        """The open connection of a descriptor."""
        return next(connection for connection in self._open if connection.fileno() == descriptor)

    def remove(self, connection: Connection) -> None:
        """Forget a closed connection."""
        self._open.pop(connection, None)

    def warn(self, cause: str) -> None:
        """Count an ended or refused connection; log at most once a minute."""
        self._ended += 1
        now = time.monotonic()
        if now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            log.warning("%s; connections ended or refused so far: %d", cause, self._ended)

    def failed(self, peer: str, error: Exception, *, is_gone: bool) -> None:
        """Log an error of a request: with its traceback, unless the peer ended the request or has caused too many errors.

        Args:
            peer: the sender of the request, as `network_of` returns it.
            error: from the application.
            is_gone: the peer ended the connection before the whole request arrived.
        """
        if is_gone:
            self.warn(f"{peer} ended a request before all of it arrived")
            return
        now = time.monotonic()
        if now - self._errors_since >= ERRORS_KEPT_S:
            self._errors_since = now
            self._errors.clear()
        if peer in self._errors or len(self._errors) < PEERS:
            self._errors[peer] += 1
        if 0 < self._errors[peer] <= ERRORS_OF_PEER:
            log.error("a request of %s failed: %s", peer, error, exc_info=error)
        else:
            self.warn(f"requests of {peer} fail; the log has the first errors")

    def _count(self, connection: Connection, owner: tuple[bool, str], cap: int) -> None:
        self._open[connection] = owner
        if sum(other == owner for other in self._open.values()) > cap:
            self._end_oldest(owner)
        elif len(self._open) > self._total:
            idle = [owner for one, owner in self._open.items() if not one.is_busy and not one.is_ending]
            strangers = [owner for owner in idle if not owner[0]]
            self._end_oldest(Counter(strangers or idle).most_common(1)[0][0])

    def _end_oldest(self, owner: tuple[bool, str]) -> None:
        self.warn(f"too many connections, most of them of {owner[1]}")
        own = (connection for connection, other in self._open.items() if other == owner)
        oldest = next(connection for connection in own if not connection.is_busy and not connection.is_ending)
        oldest.is_ending = True
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # the event loop sees the end and closes it


class Listener(socket.socket):
    """A listening socket for asyncio whose connections are counted.

    Args:
        name: its purpose, for logs.
        address: to listen on.
        port: 0 takes a free one.
        connections: where its connections count.

    Raises:
        OSError: the port is in use, or the address is not this machine's.
    """

    def __init__(self, name: str, address: str, port: int, connections: Connections) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio sets no TCP_NODELAY
        self.connections, self._name = connections, name
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.bind((address, port))
        except OSError:
            self.close()
            raise

    def listen(self, backlog: int = 0, /) -> None:
        """Listen with a long queue. asyncio passes `ACCEPTS`, which it uses for both."""
        super().listen(max(backlog, QUEUE))

    def accept(self) -> tuple[Connection, Any]:
        """Accept the next connection and count it. asyncio's event loop calls this when one waits.

        Raises:
            BlockingIOError: none waits.
            OSError: no descriptor is free. `Connections` limits its own share, so something else uses them; asyncio logs it and
                retries after a second.
        """
        accepted, address = super().accept()
        connection = Connection(self.family, self.type, self.proto, accepted.detach())
        connection.table = self.connections
        self.connections.admit(connection, self._name, address[0])
        return connection, address


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 with time-outs for headers, bodies and responses; for the arguments see `http_config`.

    uvicorn has no such limits, and the base class is not part of its interface. So pyproject.toml pins uvicorn to one minor version, and
    tests/unit/fedcg/test_listening.py fails if a later version changes what is used here.
    """

    def __init__(self, connections: Connections, identify: Identify, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._table, self._identify = connections, identify
        self._header: asyncio.TimerHandle | None = None
        self._is_serving = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start a connection."""
        super().connection_made(transport)
        self._expect_header()
        connection, application = self._table.of(transport.get_extra_info("socket").fileno()), self.app
        name, more = self._identify(transport)
        if name is not None:
            self._table.identify(connection, name)

        async def serve(scope: Any, receive: Any, send: Any) -> None:
            await self._serve(connection, application, ({**scope, **more}, receive, send))

        self.app = serve

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        if not self._is_serving:
            self._expect_header()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self._header_is_here()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, unless a response is in progress, and end. Later output of the request's handler is discarded."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _expect_header(self) -> None:
        if self._header is None:
            self._header = self.loop.call_later(HEADER_S, self.transport.abort)

    def _header_is_here(self) -> None:
        if self._header is not None:
            self._header.cancel()
            self._header = None

    async def _serve(self, connection: Connection, application: Any, request: tuple[Any, Any, Any]) -> None:
        scope, receive, send = request
        is_gone = False

        async def receiving() -> Any:
            nonlocal is_gone
            message = await (receive() if connection.is_busy else self._in_time(receive()))
            is_gone |= message["type"] == "http.disconnect" and not connection.is_busy
            connection.is_busy = not message.get("more_body", False)
            return message

        self._is_serving = True
        self._header_is_here()
        try:
            await application(scope, receiving, lambda message: self._in_time(send(message)))
            await self._in_time(self.flow.drain())
        except Exception as error:  # noqa: BLE001 - request errors are logged only here; uvicorn would log every one
            # a peer that has reset the connection has no address
            address = scope["client"][0] if scope["client"] else "unknown"
            self._table.failed(network_of(address), error, is_gone=is_gone)
        finally:
            self._is_serving = connection.is_busy = False

    async def _in_time(self, moving: Any) -> Any:
        stalled = self.loop.call_later(STALL_S, self.transport.abort)
        try:
            return await moving
        finally:
            stalled.cancel()


def http_config(
    application: Any, listener: Listener, identify: Identify = lambda _: (None, {}), **more: Any
) -> uvicorn.Config:
    """The configuration with which uvicorn serves an application on a `Listener`.

    Args:
        application: ASGI.
        listener: where its connections count.
        identify: returns the device whose certificate a connection has shown, if any, and entries for the scope of its requests.
        more: settings that differ between listeners.
    """
    return uvicorn.Config(
        application,
        http=partial(GuardedProtocol, listener.connections, identify),  # type: ignore[arg-type]  # it only calls it
        ws="none",
        log_level=logging.ERROR,  # a lower level would log every malformed request
        log_config=None,
        access_log=False,
        proxy_headers=False,  # use the address of the connection: the sender chooses its headers
        server_header=False,
        backlog=ACCEPTS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        **more,
    )


def own_hosts_only(
    application: Application, names: Iterable[str], setting: str, refuse: Callable[[str], Application]
) -> Application:
    """Refuse requests whose Host header names another host. This stops web pages that make a browser call this machine (DNS rebinding).

    Loopback addresses, `localhost` and the address that the connection arrived at are always accepted, with any port.

    Args:
        application: receives the requests that name this host.
        names: further names of this host.
        setting: where further names are configured, for the message.
        refuse: returns the response with a message.
    """
    own = {"127.0.0.1", "::1", "localhost", *(name.strip("[]").lower() for name in names)}

    async def check(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            named = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
            found = HOST.fullmatch(named.lower())
            if found is None or found["name"].strip("[]") not in own | {scope["server"][0].removeprefix("::ffff:")}:
                message = f"the Host header names {named[:100]!r}, which is not this server; add that name to {setting}"
                await refuse(message)(scope, receive, send)
                return
        await application(scope, receive, send)

    return check


def network_of(address: str) -> str:
    """The address itself, or the /64 network of an IPv6 address: one customer has at least that many addresses."""
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    return address if parsed.ipv4_mapped else str(ipaddress.ip_network((parsed, 64), strict=False).network_address)


def _raise_descriptor_limit() -> int:
    soft, hard = (MAX_DESCRIPTORS if limit < 0 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    wanted = max(soft, min(hard, MAX_DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return wanted
