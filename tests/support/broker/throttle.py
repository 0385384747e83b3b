"""A TCP proxy with a bad link: delay with jitter, a rate, stalls, resets, cuts, and links that go dead without an error."""

import contextlib
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass

from tests.support.broker.brokers import HOST

PIECE = 2048
TURN_S = 0.02
BUFFER = 16 * 1024


@dataclass(frozen=True)
class Weather:
    """The behaviour of a link, in each direction.

    Attributes:
        bytes_per_s: its rate; 0: unlimited.
        delay_s, jitter_s: each piece is delayed by `delay_s` ± at most `jitter_s`; order is kept.
        stall_s: range of a stall, which occurs with probability `stalls` before a piece.
        reset_after: byte counts after which the connection is reset, once for each.
    """

    bytes_per_s: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    stalls: float = 0.0
    stall_s: tuple[float, float] = (0.2, 3.0)
    reset_after: tuple[int, ...] = ()


GOOD = Weather()


class Throttle:
    """The proxy in front of a broker; `weather` may change at any time."""

    def __init__(self, target_port: int, weather: Weather = GOOD, seed: int = 1, host: str = HOST) -> None:
        self.weather = weather
        self.resets = 0
        self.carried = 0
        self._target_port = target_port
        self._rng = random.Random(seed)
        self._flowing = threading.Event()
        self._flowing.set()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._sockets: set[socket.socket] = set()
        self._cut = threading.Event()
        self._server = socket.socket()
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)  # a deep buffer would hide the rate
        self._server.bind((host, 0))
        self._server.listen()
        self.port = int(self._server.getsockname()[1])
        self._spawn(self._accept)

    def hold(self) -> None:
        """Stop carrying data; the connections stay open."""
        self._flowing.clear()

    def release(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Close all connections and refuse new ones until `mend`."""
        with self._lock:
            self._cut.set()
            self._shut_all()

    def mend(self) -> None:
        self._cut.clear()

    def _shut_all(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):  # the other side was first
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing.set()
        self._flowing.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in list(self._threads):
            thread.join(5.0)

    def _spawn(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            if self._cut.is_set():
                near.close()
                continue
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            try:
                far.connect((HOST, self._target_port))
            except OSError:
                near.close()
                far.close()
                continue
            for sock in (near, far):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {near, far}
                if self._cut.is_set():
                    self._shut_all()
            self._spawn(self._pair, near, far)

    def _pair(self, near: socket.socket, far: socket.socket) -> None:
        over = threading.Event()
        back = threading.Thread(target=self._carry, args=(far, near, over), daemon=True)
        back.start()
        self._carry(near, far, over)
        back.join()
        with self._lock:
            self._sockets -= {near, far}
        for sock in (near, far):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
            sock.close()

    def _carry(self, source: socket.socket, sink: socket.socket, over: threading.Event) -> None:
        """Carry one direction: pieces wait until they are due, at most one second of data."""
        waiting: list[tuple[float, bytes]] = []
        free_at = time.monotonic()
        for sock in (source, sink):
            sock.settimeout(TURN_S)
        try:
            while not self._closing.is_set() and not over.is_set():
                weather = self.weather
                room = not waiting or waiting[-1][0] - time.monotonic() < weather.delay_s + weather.jitter_s + 1.0
                if not room or not self._flowing.is_set():
                    over.wait(TURN_S)
                else:
                    with contextlib.suppress(TimeoutError):
                        data = source.recv(PIECE)
                        if not data:
                            break
                        free_at = max(free_at, time.monotonic()) + self._takes(len(data))
                        late = weather.delay_s + self._rng.uniform(-1, 1) * weather.jitter_s
                        before = waiting[-1][0] if waiting else 0.0
                        waiting.append((max(before, free_at + max(0.0, late)), data))
                while waiting and waiting[0][0] <= time.monotonic() and self._flowing.is_set():
                    self._push(sink, waiting.pop(0)[1], over)
        except OSError:
            pass
        over.set()

    def _push(self, sink: socket.socket, data: bytes, over: threading.Event) -> None:
        while data and not over.is_set() and not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                data = data[sink.send(data) :]

    def _takes(self, size: int) -> float:
        weather = self.weather
        takes = size / weather.bytes_per_s if weather.bytes_per_s else 0.0
        if weather.stalls and self._rng.random() < weather.stalls:
            takes += self._rng.uniform(*weather.stall_s)
        with self._lock:
            self.carried += size
            due = len(weather.reset_after) > self.resets and self.carried >= weather.reset_after[self.resets]
            self.resets += due
        if due:
            raise ConnectionResetError
        return takes
