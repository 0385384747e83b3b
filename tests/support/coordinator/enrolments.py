"""A real enrolment listener in a thread, and servers that imitate one."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pytest

from coordinator.cli.opening import create_home
from coordinator.config import CoordinatorConfig, EnrolmentSettings
from coordinator.http.device_api import create_enrolment_app, listening, serving
from coordinator.http.refusals import ALL, PER_ADDRESS, FailureLimits
from coordinator.members.enrolment import WantedToken, create_tokens
from coordinator.members.membership import Admission
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, Credential, credential_of, server_context, server_credential
from coordinator.storage.store import Store
from coordinator.token_buckets import Rate
from edge_client.identity.enrolment_client import trusting
from fedcg.event_log import EventLog, read_events
from fedcg.listening import Caps, Connections
from fedcg.wire.messages.enrolment_messages import Token, load_certificate
from tests.support.coordinator.homes import add_federation
from tests.support.waiting import free_port

FEDERATION = "casting"


def open_home(root: Path) -> Home:
    """A coordinator's directory with a federation and an enrolment port."""
    home = create_home(root, CoordinatorConfig(enrolment=EnrolmentSettings(port=free_port())))
    add_federation(home, FEDERATION)
    return home


@dataclass
class Desk:
    """A running listener, with a clock that tests can move."""

    home: Home
    store: Store
    ahead_s: float = 0.0

    @property
    def url(self) -> str:
        url = self.home.config().url_of(self.home.config().enrolment)
        assert url is not None
        return url

    @property
    def port(self) -> int:
        return int(self.home.config().enrolment.port or 0)

    @property
    def authority(self) -> Path:
        return credential_of(self.home.pki, CA_NAME).certificate

    def context(self) -> ssl.SSLContext:
        """Return a TLS context for a client that knows the authority and shows no certificate."""
        return trusting(load_certificate(self.authority.read_bytes()))

    def clock(self) -> float:
        return time.time() + self.ahead_s

    def token(self, device: str | None = None, **wishes: Any) -> Token:
        return create_tokens(self.home, self.store, self.clock(), [WantedToken(device=device, **wishes)])[0][0]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [dict(event) for event in read_events(self.home.events_file) if event["event"] == name]


@contextmanager
def running_desk(home: Home, *, per_address: Rate = PER_ADDRESS) -> Iterator[Desk]:
    """Run the listener of a home, as in `fedcg coordinator run`, without a coordinator."""
    config, store = home.config(), Store(home.database)
    desk = Desk(home, store)
    admission = Admission(home, store, config, EventLog(home.events_file, time.time), desk.clock)
    limits, device_limits = (FailureLimits(time.monotonic, per_address, ALL) for _ in range(2))
    context = server_context(home.pki, server_credential(home.pki, "enrolment", config.host_of(config.enrolment)))
    ready, loops = threading.Event(), []

    async def serve() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        table = Connections(Caps(64, 32))
        with listening("enrolment", config.enrolment, config.host_of(config.enrolment), table) as listener:
            assert listener is not None
            async with serving(create_enrolment_app(admission, limits, device_limits), listener, context):
                ready.set()
                await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        assert ready.wait(20)
        yield desk
    finally:
        loop, stop = loops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        store.close()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A coordinator's directory with a federation and a port for enrolments."""
    return open_home(tmp_path / "home")


@pytest.fixture
def desk(home: Home) -> Iterator[Desk]:
    """Its running enrolment listener."""
    with running_desk(home) as running:
        yield running


@final
class Pretender:
    """A TLS server during a block that sends `authority` on request and records every decrypted byte."""

    def __init__(self, authority: bytes, own: Credential, respond: Callable[[bytes], bytes] | None = None) -> None:
        self.heard = bytearray()
        self._authority = authority
        self._respond = respond
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(own.certificate, own.key)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Pretender:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._server.accept()
            except OSError:
                return
            plain.settimeout(5)
            try:
                with self._context.wrap_socket(plain, server_side=True) as secured:
                    self._serve(secured)
            except OSError:
                plain.close()

    def _serve(self, secured: ssl.SSLSocket) -> None:
        request = secured.recv(65_536)
        if not request:
            return  # the client refused the certificate
        self.heard += request
        body = self._authority if request.startswith(b"GET") else self._answer(request, secured)
        secured.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def _answer(self, request: bytes, secured: ssl.SSLSocket) -> bytes:
        while b"}" not in request:
            more = secured.recv(65_536)
            self.heard += more
            request += more
        return b"{}" if self._respond is None else self._respond(request)


def json_of(raw: bytes) -> dict[str, Any]:
    """Return the body of a recorded HTTP request."""
    values: dict[str, Any] = json.loads(raw[raw.index(b"{") :])
    return values
