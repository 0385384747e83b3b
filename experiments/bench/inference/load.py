"""A serving process and callers for `fedcg bench infer`. The callers are one event loop, to leave the cores to the server."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from export.errors import ServingError
from fedcg.worker_process import module_command

_START_S = 60.0
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


@dataclass(frozen=True)
class Serving:
    """A live serving process.

    Attributes:
        ready_s: seconds from its start until /readyz answered 200.
    """

    process: subprocess.Popen[str]
    port: int
    ready_s: float

    def peak_rss_mb(self) -> float:
        """Most memory that it held so far, in MB of 10⁶ bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024 / 1e6

    def version(self) -> str:
        """The version in service; "" while there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=10) as answer:
                found = re.search(rb'"version":"([^"]+)"', answer.read())
        except urllib.error.HTTPError:
            return ""
        return found[1].decode() if found else ""


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Serving]:
    """`fedcg infer serve` on a free port, ready, and ended by SIGTERM.

    Raises:
        ServingError: it did not start, or did not end as it should.
    """
    started = time.perf_counter()
    command = module_command("fedcg", "infer", "serve", "--model", model, "--port", 0, *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)$", process.stdout.readline().strip())
            if found is None:
                raise ServingError(f"`{' '.join(command)}` did not start; run it to see why")
            waiting = Serving(process, int(found[1]), 0.0)
            while not waiting.version():
                if time.perf_counter() - started > _START_S:
                    raise ServingError(f"`{' '.join(command)}` is not ready after {_START_S:g} s; run it to see why")
            yield Serving(process, waiting.port, time.perf_counter() - started)
            process.send_signal(signal.SIGTERM)
            if process.wait(_START_S) != 0:
                raise ServingError(f"`{' '.join(command)}` ended with exit code {process.returncode}")
        finally:
            process.kill()


@dataclass
class Load:
    """What callers saw: seconds of each answered request, and how many were not answered with 200."""

    seconds: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def answered(self) -> int:
        """Requests that are over, failed ones too."""
        return len(self.seconds) + self.failed

    def percentile_ms(self, share: float) -> float:
        """The latency that this share of the requests stayed within, in ms."""
        ranked = sorted(self.seconds)
        return ranked[min(int(share * len(ranked)), len(ranked) - 1)] * 1000


def ask(port: int, image: bytes, callers: int, goes_on: Callable[[int], bool], pause_s: float = 0.0) -> Load:
    """Let callers ask at the same time, each again as soon as it was answered.

    Args:
        port: of the server, on loopback.
        image: the bytes of an image file.
        callers: how many, each with a connection of its own that it keeps.
        goes_on: called with the number of requests answered so far; false ends the callers.
        pause_s: of a caller between an answer and its next request.
    """
    load = Load()
    asyncio.run(_all(port, image, callers, goes_on, load, pause_s))
    return load


async def _all(
    port: int, image: bytes, callers: int, goes_on: Callable[[int], bool], load: Load, pause_s: float
) -> None:
    await asyncio.gather(*(_caller(port, image, goes_on, load, pause_s) for _ in range(callers)))


async def _caller(port: int, image: bytes, goes_on: Callable[[int], bool], load: Load, pause_s: float) -> None:
    head = (
        f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(image)}\r\n\r\n"
    )
    request = head.encode() + image
    while goes_on(load.answered):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while goes_on(load.answered):
                began = time.perf_counter()
                if await _once(reader, writer, request) == 200:
                    load.seconds.append(time.perf_counter() - began)
                else:
                    load.failed += 1
                if pause_s:
                    await asyncio.sleep(pause_s)
        except (OSError, EOFError):
            load.failed += 1
        finally:
            writer.close()


async def _once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    await reader.readexactly(int(length[1]) if length else 0)
    return int(head[9:12])
