"""Transfers artifacts between this device and its coordinator over HTTPS: downloads with `Range`, uploads with `Content-Range`.

Uses mutual TLS 1.3 with the device's certificate and one persistent connection per direction. There is no window: the missing part of an
artifact is transferred as a whole, and after a failure only the rest.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError

from edge_client.config import AgentConfig
from fedcg.event_log import EventLog
from fedcg.wire.errors import MalformedError, TransportError, WireError
from fedcg.wire.messages.enrolment_messages import Refusal
from fedcg.wire.messages.schemas import ArtifactRef, Carrier
from fedcg.wire.tls import ServerRole
from fedcg.wire.transfer.chunk_sender import ChunkFile
from fedcg.wire.transfer.chunks import ARTIFACTS_PATH, HTTPS_STALL_S, READY_PATH, UPDATES_PATH, Chunk, span_of
from fedcg.wire.transfer.windows import Ranges
from fedcg.wire.transport.mqtt_config import TlsFiles

CONNECT_S = 10.0
JOIN_S = 2.0
SEND_BYTES = 16 * 1024
"""Bytes passed to the connection at once. They must be sent within `HTTPS_STALL_S`."""
MAX_REFUSAL_BYTES = 4096
MAX_REST_BYTES = 4096
"""Bytes read after the expected part of an answer to keep the connection. If there are more, the connection is closed."""
_log = logging.getLogger(__name__)
SourceT = TypeVar("SourceT")


class HttpsCarrier:
    """Transfers artifacts. Every method except `close` returns immediately.

    Args:
        url: of the coordinator's listener.
        tls: authority, and this device's certificate and key. They are read for every connection, because they are renewed.
        deliver: called with each received chunk, on a thread of this carrier; may wait.
        events: the event log, which records when the carrier fails and when it works again.
    """

    is_answered_in_session = False  # missing chunks are requested again, with increasing pauses

    def __init__(self, url: str, tls: TlsFiles, deliver: Callable[[Chunk], None], events: EventLog) -> None:
        self._events = events
        self._trouble: dict[str, str | None] = {"up": "", "down": ""}
        self._sent: Counter[str] = Counter()
        self._up: Direction[ChunkFile] = Direction("up", Line(url, tls), self._put, self._report)
        get = partial(Line.get, deliver=deliver)
        self._down: Direction[ArtifactRef] = Direction("down", Line(url, tls), get, self._report)

    def start(self) -> None:
        """Start the transfers."""
        self._up.start()
        self._down.start()

    def close(self) -> None:
        """Stop soon. Received chunks have already been delivered."""
        self._up.close()
        self._down.close()

    def send(self, update: ChunkFile, ranges: Ranges) -> None:
        """Upload these chunks of the update."""
        self._up.add(update, update.ref, ranges)

    @property
    def is_sending(self) -> bool:
        """Whether chunks of an update have not arrived yet."""
        return self._up.is_busy

    def end(self, artifact: str) -> int:
        """Stop uploading an update. Returns how many of its chunks were sent."""
        self._up.forget(artifact)
        return self._sent.pop(artifact, 0)

    def fetch(self, ref: ArtifactRef, ranges: Ranges) -> None:
        """Download these chunks of the spec or an aggregate."""
        self._down.add(ref, ref, ranges)

    def _put(self, line: Line, update: ChunkFile, first: int, count: int) -> None:
        line.put(update, first, count, lambda: self._sent.update((update.ref.id,)))

    def _report(self, way: str, error: Exception | None) -> None:
        """Write an event when a direction starts to fail, fails with another error, or works (again)."""
        trouble = None if error is None else str(error) or type(error).__name__
        if trouble != self._trouble[way]:
            self._trouble[way] = trouble
            self._events.write("carrier", way=way, works=trouble is None, detail=trouble or "")


class Direction(Generic[SourceT]):
    """The queue of artifacts for one connection, and the thread that transfers them one after the other.

    An artifact that is queued or in transfer is not added twice. After a failure it is dropped: the side that needs it asks again, with
    increasing pauses.

    Args:
        way: "up" or "down".
        line: the connection.
        carry: transfers `count` chunks of a source from index `first` on; returns when they have arrived.
        report: called after every artifact with the way and None, or the error that ended it.
    """

    def __init__(
        self,
        way: str,
        line: Line,
        carry: Callable[[Line, SourceT, int, int], None],
        report: Callable[[str, Exception | None], None],
    ) -> None:
        self._line = line
        self._carry = partial(carry, line)
        self._report = partial(report, way)
        self._jobs: dict[str, tuple[SourceT, Ranges]] = {}  # the first one is in transfer
        self._filled = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"https-{way}", daemon=True)

    def start(self) -> None:
        """Start the transfers."""
        self._thread.start()

    def close(self) -> None:
        """Stop immediately. Queued artifacts are dropped."""
        with self._filled:
            self._closing = True
            self._filled.notify()
        self._line.hang_up()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    @property
    def is_busy(self) -> bool:
        """Whether an artifact is queued or in transfer."""
        return bool(self._jobs)

    def add(self, source: SourceT, ref: ArtifactRef, ranges: Ranges) -> None:
        """Queue chunks. Indices after the last chunk are dropped, because they come from the other side."""
        sound = tuple((first, min(count, ref.chunks - first)) for first, count in ranges if first < ref.chunks)
        with self._filled:
            if sound and ref.id not in self._jobs:
                self._jobs[ref.id] = (source, sound)
                self._filled.notify()

    def forget(self, artifact: str) -> None:
        """Remove an artifact from the queue."""
        with self._filled:
            self._jobs.pop(artifact, None)

    def _run(self) -> None:
        while True:
            with self._filled:
                self._filled.wait_for(lambda: self._jobs or self._closing)
                if self._closing:
                    self._line.close()
                    return
                artifact, (source, ranges) = next(iter(self._jobs.items()))
            error: Exception | None = None
            try:
                for first, count in ranges:
                    self._carry(source, first, count)
            except (OSError, http.client.HTTPException, WireError) as failure:
                error = failure
            except Exception as failure:  # noqa: BLE001 - the run loop of a thread; logged with its traceback
                _log.exception("an artifact could not be transferred; it will be requested again")
                error = failure
            self.forget(artifact)
            if not self._closing:
                self._report(error)


def https_carrier(config: AgentConfig, deliver: Callable[[Chunk], None], events: EventLog) -> HttpsCarrier | None:
    """The HTTPS carrier, if configured; None if artifacts are sent over MQTT."""
    if config.carrier is not Carrier.HTTPS or config.carrier_url is None or config.tls is None:
        return None
    return HttpsCarrier(config.carrier_url, config.tls.files, deliver, events)


def check_ready(url: str, tls: TlsFiles) -> None:
    """Ask the coordinator's listener whether it accepts this device.

    Raises:
        TransportError, OSError, HTTPException: it does not answer, or refuses with a reason.
    """
    with contextlib.closing(Line(url, tls)) as line:
        line.ready()


class Line:
    """One connection to the coordinator, reopened after a failure. Used by one thread. Only `hang_up` may be called from any thread."""

    def __init__(self, url: str, tls: TlsFiles) -> None:
        place = urlsplit(url)
        self._host, self._port = place.hostname or "", place.port
        self._tls = tls
        self._connection: http.client.HTTPSConnection | None = None

    def hang_up(self) -> None:
        """Make a thread that is waiting for the network stop soon."""
        connection = self._connection
        secured = None if connection is None else connection.sock
        if secured is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(secured, socket.SHUT_RDWR)  # not TLS's own: another thread may be using it

    def close(self) -> None:
        """Close the connection. The next request opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def ready(self) -> None:
        """Ask whether this device is accepted."""
        self._exchange(lambda connection: connection.request("GET", READY_PATH), lambda response: None)

    def put(self, update: ChunkFile, first: int, count: int, sent: Callable[[], object] = lambda: None) -> None:
        """Upload chunks of an announced update, calling `sent` after each. Returns when they have arrived."""
        span = span_of(update.ref, first, count)

        def ask(connection: http.client.HTTPSConnection) -> None:
            connection.putrequest("PUT", f"{UPDATES_PATH}/{update.ref.id}", skip_accept_encoding=True)
            connection.putheader("Content-Range", span.content_range)
            connection.putheader("Content-Length", str(span.length))
            connection.endheaders()
            for index in range(first, first + count):
                data = update.data(index)
                for start in range(0, len(data), SEND_BYTES):
                    connection.send(data[start : start + SEND_BYTES])
                sent()

        self._exchange(ask, lambda response: None)

    def get(self, ref: ArtifactRef, first: int, count: int, deliver: Callable[[Chunk], None]) -> None:
        """Download chunks of an artifact, and deliver each when it is received."""
        span = span_of(ref, first, count)

        def take(response: http.client.HTTPResponse) -> None:
            if (
                response.status != http.client.PARTIAL_CONTENT
                or response.headers["Content-Range"] != span.content_range
            ):
                raise MalformedError(f"asked for {span.content_range}, got {response.headers['Content-Range']!r}")
            for index, length in span.chunks(ref):
                data = response.read(length)
                if len(data) != length:
                    raise MalformedError(f"the answer ended in chunk {index} of artifact {ref.id}")
                deliver(Chunk(ref.id, index, data))

        path = f"{ARTIFACTS_PATH}/{ref.id}"
        self._exchange(lambda connection: connection.request("GET", path, headers={"Range": span.range}), take)

    def _exchange(
        self, ask: Callable[[http.client.HTTPSConnection], None], take: Callable[[http.client.HTTPResponse], None]
    ) -> None:
        """Send a request and handle its answer. A dead persistent connection is replaced once, because every request may be repeated."""
        kept = self._connection is not None
        try:
            response = self._ask(ask)
        except (ConnectionError, ssl.SSLError):
            if not kept:
                raise
            response = self._ask(ask)
        try:
            _check_granted(response)
            take(response)
            response.read(MAX_REST_BYTES)
        except BaseException:
            self.close()
            raise
        if response.will_close or not response.isclosed():
            self.close()

    def _ask(self, ask: Callable[[http.client.HTTPSConnection], None]) -> http.client.HTTPResponse:
        try:
            connection = self._connect()
            ask(connection)
            return connection.getresponse()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> http.client.HTTPSConnection:
        if self._connection is None:
            context = self._tls.context(ServerRole.CARRIER)
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=CONNECT_S, context=context)
            self._connection = connection
            connection.connect()
            connection.sock.settimeout(HTTPS_STALL_S)
        return self._connection


def _check_granted(response: http.client.HTTPResponse) -> None:
    if response.status < http.client.BAD_REQUEST:
        return
    try:
        message = Refusal.model_validate_json(response.read(MAX_REFUSAL_BYTES)).error
    except ValidationError:
        message = response.reason
    raise TransportError(f"the coordinator refused ({response.status}): {message}")
