"""Listeners under strangers: who may stay connected, what may stand still for how long, and which Host headers count."""

import asyncio
import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from fedcg import listening
from fedcg.listening import Caps, Connections, Listener, http_config, network_of, own_hosts_only
from tests.support.waiting import wait_until

HOST = "127.0.0.1"
OTHER = "127.0.0.2"
LARGE = bytes(32_000_000)
LARGE_ASKED = b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connect(port: int, source: str = HOST) -> socket.socket:
    return socket.create_connection((HOST, port), 20, source_address=(source, 0))


def is_ended(connection: socket.socket) -> bool:
    """Whether the server has ended a connection; does not wait."""
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connection.settimeout(20)


def is_reset(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"\r\n")
    except ConnectionError:
        return True
    return False


def ask(connection: socket.socket, path: str = "/") -> int:
    """The status of a request on an open connection."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


@dataclass
class Site:
    """A server of a small application: `/` answers, `/slow` once `go` is set, `/large` with many bytes, `/broken` fails."""

    port: int = 0
    go: threading.Event = field(default_factory=threading.Event)
    slow: list[str] = field(default_factory=list)
    ended: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        answer: Response = PlainTextResponse("ok")
        if request.method == "POST" or request.url.path == "/slow":
            try:
                await request.body()
            except ClientDisconnect:
                self.ended += 1
                raise
        if request.url.path == "/broken":
            raise ValueError("a mistake in the program")
        if request.url.path == "/slow":
            self.slow.append(request.url.path)
            await asyncio.to_thread(self.go.wait, 20)
        if request.url.path == "/large":
            answer = Response(LARGE)
        await answer(scope, receive, send)


@contextmanager
def serving(caps: Caps, wrap: Callable[[Any], Any] = lambda application: application) -> Iterator[Site]:
    site = Site()
    connections = Connections(caps)
    with Listener("test", HOST, 0, connections) as listener:
        site.port = listener.getsockname()[1]
        server = uvicorn.Server(http_config(wrap(site), listener, lifespan="off", timeout_keep_alive=60))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            wait_until(lambda: server.started, "it listens")
            yield site
        finally:
            site.go.set()
            server.force_exit = server.should_exit = True
            thread.join(20)
    assert connections._open == {}


@pytest.fixture
def open_sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_the_oldest_connection_of_an_address_ends_for_a_new_one(open_sockets: ExitStack) -> None:
    with serving(Caps(total=100, per_address=3)) as site:
        held = [open_sockets.enter_context(connect(site.port)) for _ in range(4)]
        wait_until(lambda: is_ended(held[0]), "the first ends")
        assert [ask(one) for one in held[1:]] == [200, 200, 200]


def test_a_flood_from_one_address_ends_no_connection_of_another(open_sockets: ExitStack) -> None:
    with serving(Caps(total=6, per_address=100)) as site:
        quiet = open_sockets.enter_context(connect(site.port, OTHER))
        flood = [open_sockets.enter_context(connect(site.port)) for _ in range(40)]
        wait_until(lambda: sum(map(is_ended, flood)) == 35, "only five of the flood are left")
        assert ask(quiet) == 200
        assert ask(open_sockets.enter_context(connect(site.port, OTHER))) == 200


def test_a_request_that_is_being_answered_is_not_ended_to_make_room(open_sockets: ExitStack) -> None:
    with serving(Caps(total=100, per_address=2)) as site:
        held = [open_sockets.enter_context(connect(site.port)) for _ in range(2)]
        for one in held:
            one.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: len(site.slow) == 2, "both requests are under way")
        refused = open_sockets.enter_context(connect(site.port))
        wait_until(lambda: is_ended(refused), "there is no room")
        site.go.set()
        for one in held:
            http.client.HTTPResponse(one).begin()
        assert ask(open_sockets.enter_context(connect(site.port))) == 200


@pytest.mark.parametrize(
    ("limit", "first", "last"),
    [
        ("HEADER_S", b"", b""),
        ("HEADER_S", b"", b"GET / HT"),
        ("HEADER_S", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET"),
        ("STALL_S", b"", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf"),
        ("STALL_S", b"", LARGE_ASKED),
    ],
)
def test_a_header_a_body_and_an_answer_that_stand_still_end_their_connection(
    limit: str, first: bytes, last: bytes, open_sockets: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, limit, 0.2)
    with serving(Caps(10, 10)) as site:
        slow = open_sockets.enter_context(connect(site.port))
        if first:
            slow.sendall(first)
            http.client.HTTPResponse(slow).begin()
        slow.sendall(last)
        is_over = is_reset if last == LARGE_ASKED else is_ended  # nobody reads the large answer
        wait_until(lambda: is_over(slow), "it is ended")


@pytest.mark.parametrize("resets", [True, False])
def test_requests_that_their_peers_end_are_one_line_without_a_traceback(
    resets: bool, open_sockets: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Caps(100, 100)) as site:
        for _ in range(20):
            with connect(site.port) as gone:
                gone.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf")
                if resets:
                    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: site.ended == 20, "all are ended")
        assert ask(open_sockets.enter_context(connect(site.port))) == 200
    assert len(caplog.records) == 1
    assert " ended a request before all of it arrived" in caplog.text
    assert "Traceback" not in caplog.text


CHUNKED = b" / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        (b"PUT" + CHUNKED + b"ZZZ\r\n",),
        (b"PUT" + CHUNKED, b"ZZZ\r\n"),
        (b"PUT" + CHUNKED + b"2\r\n{}\r\n", b"ZZZ\r\n", b"ZZZ\r\n"),
        (b"\x00\x01\r\n\r\n",),
    ],
    ids=["with its header", "after the answer", "after a chunk", "no header"],
)
def test_a_body_that_is_no_http_ends_its_connection_and_writes_no_traceback(
    pieces: tuple[bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Caps(100, 100)) as site:
        for _ in range(5):
            with connect(site.port) as peer, suppress(ConnectionError):
                for piece in pieces:
                    peer.sendall(piece)
                    if piece != pieces[-1]:
                        assert peer.recv(1000).startswith(b"HTTP/1.1 200")
                while peer.recv(1000):
                    pass
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_a_peer_whose_requests_fail_writes_five_tracebacks_and_another_one_its_own(
    open_sockets: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Caps(100, 100)) as site:
        for source in [HOST] * 20 + [OTHER]:
            assert ask(open_sockets.enter_context(connect(site.port, source)), "/broken") == 500
    peers = [record.getMessage().split(":")[0] for record in caplog.records if record.exc_info]
    assert peers == ["a request of 127.0.0.1 failed"] * 5 + ["a request of 127.0.0.2 failed"]
    assert caplog.text.count("requests of 127.0.0.1 fail") == 1


def accepted(listener: Listener, clients: ExitStack, *sources: str) -> list[listening.Connection]:
    """Connections from these addresses that a listener has accepted; closed at the end."""
    port = listener.getsockname()[1]
    made = []
    for source in sources:
        clients.enter_context(connect(port, source))
        made.append(clients.enter_context(listener.accept()[0]))
    return made


@pytest.fixture
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    with Listener("test", HOST, 0, Connections(getattr(request, "param", Caps(4, 100, 2)))) as made:
        made.listen()
        yield made


def test_who_has_shown_a_certificate_stays_when_strangers_of_many_addresses_come(
    listener: Listener, open_sockets: ExitStack
) -> None:
    *device, first, second = accepted(listener, open_sockets, HOST, HOST, OTHER, "127.0.0.3")
    for connection in device:
        listener.connections.identify(connection, "line-4")
    accepted(listener, open_sockets, "127.0.0.4", "127.0.0.5")
    assert [one.is_ending for one in (*device, first, second)] == [False, False, True, True]


def test_a_device_loses_the_oldest_of_too_many_connections(listener: Listener, open_sockets: ExitStack) -> None:
    made = accepted(listener, open_sockets, *[HOST] * 3)
    for connection in made:
        listener.connections.identify(connection, "line-4")
    assert [connection.is_ending for connection in made] == [True, False, False]


def test_a_device_whose_connections_are_busy_gets_no_further_one(listener: Listener, open_sockets: ExitStack) -> None:
    *busy, further = accepted(listener, open_sockets, *[HOST] * 3)
    for connection in busy:
        listener.connections.identify(connection, "line-4")
        connection.is_busy = True
    listener.connections.identify(further, "line-4")
    assert [one.is_ending for one in (*busy, further)] == [False, False, True]


def test_half_of_the_descriptors_bound_the_connections(
    open_sockets: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "_raise_descriptor_limit", lambda: 6)
    with Listener("test", HOST, 0, Connections(Caps(100, 100))) as listener:
        listener.listen()
        made = accepted(listener, open_sockets, *[HOST] * 4)
    assert [connection.is_ending for connection in made] == [True, False, False, False]
    assert "LimitNOFILE" in caplog.text


def test_a_flood_is_one_log_line(listener: Listener, open_sockets: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    accepted(listener, open_sockets, *[HOST] * 30)
    assert len(caplog.records) == 1
    assert "test 127.0.0.1" in caplog.text


def test_an_ipv6_network_counts_as_one_address_and_an_ipv4_address_in_ipv6_form_as_itself() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") != network_of("::ffff:10.0.0.2")
    assert network_of("10.0.0.1") == "10.0.0.1"


@pytest.fixture(scope="module")
def named_site() -> Iterator[Site]:
    def wrap(application: Any) -> Any:
        refuse = partial(JSONResponse, status_code=400)
        return own_hosts_only(application, ["line-4.example"], "--allow-host", lambda told: refuse({"detail": told}))

    with serving(Caps(10, 10), wrap) as site:
        yield site


OURS = ("127.0.0.1", "localhost", "LocalHost:80", "[::1]", "[::1]:8440", "line-4.example", "line-4.example:443")
FOREIGN = (
    "",
    "evil.example",
    "evil.example:8440",
    "localhost.evil.example",
    "[::1].evil.example",
    "localhost@evil.example",
)


@pytest.mark.parametrize(("named", "status"), [*((name, 200) for name in OURS), *((name, 400) for name in FOREIGN)])
def test_only_names_of_this_server_count_in_the_host_header(named_site: Site, named: str, status: int) -> None:
    connection = http.client.HTTPConnection(HOST, named_site.port, timeout=20)
    connection.request("GET", "/", headers={"Host": named})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    assert response.status == status
    assert status == 200 or "add that name to --allow-host" in text
