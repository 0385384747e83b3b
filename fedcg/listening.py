"""Listening sockets that outsiders can't exhaust, HTTP/1.1 with time-outs on them, and the check of a request's Host header.

Every listener of this project is made here: it decides which connections stay open, before TLS and before a byte is read. It
knows nothing of routes and identities: the code that verifies a certificate calls `Connections.identify`.
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
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_S = 5.0
"""Longest time from the first byte of a request, or from the start of the connection, to the end of the request's header."""
STALL_S = 30.0
"""Longest time that a body may stop arriving, or an answer may stop being read."""
WARN_EVERY_S = 60.0
QUEUE = 1024
"""Connections that the kernel holds until they are accepted: a full queue delays honest ones by a second and more."""
ACCEPTS = 8
"""Accepted in one turn of the event loop: in a flood the connections that are there get on too, before they are ended."""
MAX_HEADER_BYTES = 16 * 1024
ERRORS_KEPT_S = 3600.0
ERRORS_OF_PEER, PEERS = 5, 100
"""In so many seconds: tracebacks that the requests of one peer may write, and peers whose requests may write some."""
MAX_DESCRIPTORS = 65_536
"""The soft limit of descriptors is raised up to this; a higher one would only hide a leak."""
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\[\]:]+)(:[0-9]*)?")

log = logging.getLogger(__name__)
Application = Callable[[Any, Any, Any], Any]
Identify = Callable[[asyncio.Transport], tuple[str | None, dict[str, object]]]


@dataclass(frozen=True)
class Caps:
    """How many connections may be open at once.

    Attributes:
        total: at all listeners together.
        per_address: of one IPv4 address, or one IPv6 network of 64 bits, at one listener, while they have shown no certificate.
        per_certificate: that have shown one device's certificate.
    """

    total: int
    per_address: int
    per_certificate: int = 8


class Connection(socket.socket):
    """An accepted connection; it counts from `accept` until its descriptor is closed.

    Attributes:
        table: where it counts.
        is_busy: a whole request is here and its answer is not finished: it isn't ended to make room.
        is_ending: it was ended to make room.
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

    Where there are too many, the oldest idle one of the owner with most of them ends; one that has shown a certificate only when
    there is no other. So a flood affects only connections from its own address, and a connected device stays connected.

    Args:
        caps: as configured; half of the process's descriptors bound the total.
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
        """Count a new connection; where there are too many, another one ends for it, or itself when all others are busy."""
        self._count(connection, (False, f"{listener} {network_of(address)}"), self._caps.per_address)

    def identify(self, connection: Connection, name: str) -> None:
        """Count a connection as that of the device whose certificate it has shown, verified, from now on."""
        self._count(connection, (True, name), self._caps.per_certificate)

    def of(self, descriptor: int) -> Connection:
        """The open connection of a descriptor."""
        return next(connection for connection in self._open if connection.fileno() == descriptor)

    def remove(self, connection: Connection) -> None:
        """A connection is closed."""
        self._open.pop(connection, None)

    def warn(self, cause: str) -> None:
        """Count a connection that was ended or refused; a line in the log once a minute."""
        self._ended += 1
        now = time.monotonic()
        if now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            log.warning("%s; connections ended or refused so far: %d", cause, self._ended)

    def failed(self, peer: str, error: Exception, *, is_gone: bool) -> None:
        """Log that a request ended with an error: its traceback, unless its peer ended it or has caused too many.

        Args:
            peer: whose request it was, as `network_of` has it.
            error: from the application.
            is_gone: the peer ended the connection before the whole request was here.
        """
        if is_gone:
            self.warn(f"{peer} ended a request before all of it was here")
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
        name: its purpose, in logs.
        address: to listen on.
        port: 0 takes a free one.
        connections: where its connections count.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, name: str, address: str, port: int, connections: Connections) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, else asyncio sets no TCP_NODELAY
        self.connections, self._name = connections, name
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.bind((address, port))
        except OSError:
            self.close()
            raise

    def listen(self, backlog: int = 0, /) -> None:
        """Listen with a long queue. What asyncio gives is `ACCEPTS`, which it uses for both."""
        super().listen(max(backlog, QUEUE))

    def accept(self) -> tuple[Connection, Any]:
        """The next connection that may stay; asyncio's event loop calls it whenever one waits.

        Raises:
            BlockingIOError: none waits.
            OSError: no descriptor is free, which the bound of `Connections` leaves to other causes; asyncio logs it and tries again
                a second later.
        """
        accepted, address = super().accept()
        connection = Connection(self.family, self.type, self.proto, accepted.detach())
        connection.table = self.connections
        self.connections.admit(connection, self._name, address[0])
        return connection, address


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 whose headers, bodies and answers may not stand still; for the arguments see `http_config`.

    uvicorn has no such bounds, and this class is not part of its interface: pyproject.toml holds uvicorn to one minor version, and
    tests/unit/fedcg/test_listening.py fails when a later one moves what is used here.
    """

    def __init__(self, connections: Connections, identify: Identify, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._table, self._identify = connections, identify
        self._header: asyncio.TimerHandle | None = None
        self._is_serving = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection."""
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
        """Take received bytes."""
        if not self._is_serving:
            self._expect_header()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self._header_is_here()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, where no answer is under way, and end; what the handler of the request still sends goes nowhere."""
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
        except Exception as error:  # noqa: BLE001 - the one place where a request's error is logged; uvicorn logs every one
            # a peer that has reset the connection has none
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
    """How uvicorn serves an application on a `Listener`.

    Args:
        application: ASGI.
        listener: where its connections count.
        identify: gives the device whose certificate a connection has shown, if any, and the entries for the scope of its requests.
        more: settings that differ between listeners.
    """
    return uvicorn.Config(
        application,
        http=partial(GuardedProtocol, listener.connections, identify),  # type: ignore[arg-type]  # it only calls it
        ws="none",
        log_level=logging.ERROR,  # below that, every malformed request would be a line
        log_config=None,
        access_log=False,
        proxy_headers=False,  # the address that counts is the connection's: the sender chooses its headers
        server_header=False,
        backlog=ACCEPTS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        **more,
    )


def own_hosts_only(
    application: Application, names: Iterable[str], setting: str, refuse: Callable[[str], Application]
) -> Application:
    """Refuse requests whose Host header names another host: a web page may make a browser call this machine under its own name.

    Loopback addresses, `localhost` and the address that the connection came to are always right, with any port.

    Args:
        application: gets the requests that name this host.
        names: further names of this host.
        setting: where further names are configured, for the message.
        refuse: the answer with a message.
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
    """The address itself, or the network of 64 bits of an IPv6 address: one customer has at least so many."""
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
