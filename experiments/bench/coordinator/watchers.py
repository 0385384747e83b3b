"""People who watch the page: each follows the event stream and loads the page `Now` after an event, as the page's script does."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from typing import Any

from experiments.demo.run_folder import LOOPBACK

REFRESH_S = 2.0
"""A page is loaded at most once in so many seconds, however many events come: `REFRESH_MS` of page.js."""
CONNECT_S = 30.0
TIMEOUT_S = 60.0


class Watcher:
    """One open page, on a thread of its own.

    Args:
        port: of the coordinator's HTTP interface on this machine.
        token: of its API.
        page: that is loaded.

    Attributes:
        pages: loaded so far.
        events: received so far.
    """

    def __init__(self, port: int, token: str, page: str) -> None:
        self._headers = {"Authorization": f"Bearer {token}"}
        self._page = page
        self._stream, self._pages = (http.client.HTTPConnection(LOOPBACK, port, timeout=TIMEOUT_S) for _ in range(2))
        self._is_closed = False
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.pages = self.events = 0
        self._thread.start()

    def wait_open(self) -> None:
        """Wait for the stream's first line.

        Raises:
            TimeoutError: it does not come.
        """
        if not self._is_open.wait(CONNECT_S):
            raise TimeoutError(f"the event stream did not open within {CONNECT_S:.0f} s")

    def close(self) -> None:
        """End the stream."""
        self._is_closed = True
        with contextlib.suppress(OSError, AttributeError):
            self._stream.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_S)

    def _watch(self) -> None:
        self._stream.request("GET", "/api/v1/events/stream", headers=self._headers)
        answer, loaded_at = self._stream.getresponse(), 0.0
        while not self._is_closed and (line := answer.readline()):
            self._is_open.set()
            self.events += line.startswith(b"data: ")
            if line.startswith(b"data: ") and time.monotonic() - loaded_at >= REFRESH_S:
                loaded_at = time.monotonic()
                self._load()
        for link in (answer, self._stream, self._pages):
            link.close()

    def _load(self) -> None:
        self._pages.request("GET", self._page, headers=self._headers | {"HX-Request": "true"})
        answer = self._pages.getresponse()
        answer.read()
        self.pages += answer.status == http.HTTPStatus.OK


def run_watchers(port: int, token: str, page: str, pipe: Any) -> None:
    """A process of its own: so many watchers as the last number from the pipe says, until it says None.

    It answers each number once the watchers are there, with the pages and events of those that it ended. Its priority
    is the lowest: watchers belong to other machines.
    """
    os.nice(19)
    watchers: list[Watcher] = []
    while (count := pipe.recv()) is not None:
        ended, watchers = watchers, [Watcher(port, token, page) for _ in range(count)]
        for watcher in ended:
            watcher.close()
        for watcher in watchers:
            watcher.wait_open()
        pipe.send((sum(each.pages for each in ended), sum(each.events for each in ended)))
