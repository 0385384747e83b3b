"""Granted chunks on their way over HTTPS, one direction of it: a queue and the thread that works it off.

As with the MQTT sender, a chunk that still waits or is under way is not taken twice, however often it is granted, and a
failure forgets the whole queue: whoever still wants a chunk grants it again, ever more slowly when nothing comes.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from typing import Generic, Protocol, TypeVar

from fedcg.wire.errors import WireError
from fedcg.wire.messages.messages import ArtifactRef
from fedcg.wire.transfer.chunk_window import Ranges

MAX_GRANTED = 256  # chunks of one artifact; whoever wants more asks again
JOIN_S = 2.0
_log = logging.getLogger(__name__)
SourceT = TypeVar("SourceT")


class Line(Protocol):
    """The connection that a lane uses."""

    def hang_up(self) -> None:
        """Make whoever waits for the network stop soon; from any thread."""

    def close(self) -> None:
        """Let go of the connection; a later use makes a new one."""


@dataclass(frozen=True)
class _Run(Generic[SourceT]):
    source: SourceT
    artifact: str
    first: int
    count: int


class Lane(Generic[SourceT]):
    """Carries runs of chunks, one after the other.

    Args:
        name: of the thread.
        carry: carries `count` chunks of a source from index `first` on; returns when they have arrived.
        told: hears after every run how it went: None, or the error that ended it.
        line: what `carry` uses.

    Attributes:
        carried: chunks carried so far, per artifact.
    """

    def __init__(
        self,
        name: str,
        carry: Callable[[SourceT, int, int], None],
        told: Callable[[Exception | None], None],
        line: Line,
    ) -> None:
        self.carried: Counter[str] = Counter()
        self._name = name
        self._carry = carry
        self._told = told
        self._line = line
        self._sources: dict[str, SourceT] = {}
        self._waiting: dict[tuple[str, int], None] = {}  # chunks in the order of their grants
        self._under_way: set[tuple[str, int]] = set()
        self._filled = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to carry."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop at once; what was granted and not carried is forgotten."""
        with self._filled:
            self._closing = True
            self._filled.notify()
        self._line.hang_up()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    @property
    def is_busy(self) -> bool:
        """Whether chunks wait or are under way."""
        with self._filled:
            return bool(self._waiting or self._under_way)

    def add(self, source: SourceT, ref: ArtifactRef, ranges: Ranges) -> None:
        """Carry granted chunks; indices behind the last one are left out, a grant comes from the other side."""
        with self._filled:
            self._sources[ref.id] = source
            room = MAX_GRANTED - sum(artifact == ref.id for artifact, _ in self._waiting)
            for first, count in ranges:
                for index in range(first, min(first + count, ref.chunks)):
                    chunk = (ref.id, index)
                    if room > 0 and chunk not in self._under_way and chunk not in self._waiting:
                        self._waiting[chunk] = None
                        room -= 1
            self._filled.notify()

    def forget(self, artifact: str) -> None:
        """Carry nothing more of an artifact, and forget its count."""
        with self._filled:
            self._sources.pop(artifact, None)
            self._waiting = {chunk: None for chunk in self._waiting if chunk[0] != artifact}
            self.carried.pop(artifact, None)

    def _run(self) -> None:
        try:
            while (run := self._next()) is not None:
                self._settle(run, self._attempt(run))
        finally:
            self._line.close()

    def _next(self) -> _Run[SourceT] | None:
        """The longest run of neighbours at the head of the queue, once there is one; None at the end."""
        with self._filled:
            while not self._waiting and not self._closing:
                self._filled.wait()
            if self._closing:
                return None
            artifact, first = next(iter(self._waiting))
            count = 0
            while (artifact, first + count) in self._waiting:
                del self._waiting[artifact, first + count]
                self._under_way.add((artifact, first + count))
                count += 1
            return _Run(self._sources[artifact], artifact, first, count)

    def _attempt(self, run: _Run[SourceT]) -> Exception | None:
        try:
            self._carry(run.source, run.first, run.count)
        except (OSError, HTTPException, WireError) as error:
            return error
        except Exception as error:  # noqa: BLE001 - the run loop of a thread; logged with its traceback
            _log.exception("%s failed; what it carried is asked for again", self._name)
            return error
        return None

    def _settle(self, run: _Run[SourceT], error: Exception | None) -> None:
        with self._filled:
            self._under_way.clear()
            if error is not None:
                self._waiting.clear()
            elif run.artifact in self._sources:
                self.carried[run.artifact] += run.count
            if self._closing:
                return
        self._told(error)
