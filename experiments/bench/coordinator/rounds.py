"""Rounds of a real coordinator and a real Mosquitto, both by their commands, with many sessions and turns of watchers."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil

from coordinator.errors import BrokerError
from coordinator.members.api_tokens import ApiTokens, Role
from coordinator.paths import Home
from coordinator.storage.store import Store
from experiments.bench.coordinator.stage import set_up
from experiments.bench.transport.broker import (
    FEDERATION,
    READY_S,
    SECONDS_MAX,
    expect,
    process_of,
    running_broker,
)
from experiments.demo.event_follower import Follower, whole
from experiments.demo.processes import POLL_S, Child, fedcg
from experiments.demo.run_folder import LOOPBACK
from fedcg.wire.messages.schemas import Outcome

OPENED, CLOSED = "attempt_opened", "aggregate_stored"


@dataclass(frozen=True)
class Setting:
    """What is run: `rounds` without watchers, or so many turns of `rounds` without and `rounds` with them."""

    sessions: int
    rounds: int
    watchers: int
    turns: int

    @property
    def all_rounds(self) -> int:
        """Rounds of the federation."""
        return self.rounds * (2 * self.turns if self.watchers else 1)

    def begins_turn(self, number: int) -> bool:
        """Whether watchers may come or go in a round."""
        return (number - 1) % self.rounds == 0

    def watchers_in(self, number: int) -> int:
        """Watchers of the turn that a round is in; turns without them come first."""
        return self.watchers * ((number - 1) // self.rounds % 2)


@dataclass(frozen=True)
class Sample:
    """The coordinator's processes at one moment.

    Attributes:
        memory_mb: resident memory of the process, and of its children (the aggregation worker), in 10^6 bytes.
        processor_s: processor time of the process alone.
    """

    memory_mb: tuple[float, float]
    processor_s: float


@dataclass
class Run:
    """What was observed from outside while the rounds ran.

    Attributes:
        opened, closed: samples by round.
        receipts: of all devices, by device and (round, attempt).
        pages, events: that the watchers got.
    """

    opened: dict[int, Sample] = field(default_factory=dict)
    closed: dict[int, Sample] = field(default_factory=dict)
    receipts: dict[str, Mapping[tuple[int, int], Outcome | None]] = field(default_factory=dict)
    pages: int = 0
    events: int = 0

    def updates(self) -> dict[str, int]:
        """How many updates were sent, how each ended by its receipt, and how many have none."""
        ends = [end for of_device in self.receipts.values() for end in of_device.values()]
        named = {outcome.value: ends.count(outcome) for outcome in Outcome if outcome in ends}
        return {"sent": len(ends), "accepted": 0, **named, "lost": ends.count(None)}


async def run_rounds(home: Home, setting: Setting, announce: Callable[[str], None]) -> Run:
    """Set a federation up and run all its rounds.

    Raises:
        BrokerError: no Mosquitto here, or the rounds do not end.
        ProcessError: the broker or the coordinator ended.
    """
    run = Run()
    async with running_broker(home) as processes:
        announce(f"setting up {setting.sessions} sessions ...")
        shares = await asyncio.to_thread(set_up, home, setting.sessions, setting.all_rounds)
        coordinator = await processes.start("coordinator", fedcg("coordinator", "run", "--dir", home.root))
        await processes.line(coordinator, "coordinator of", READY_S)
        with ExitStack() as stack:
            crowd = stack.enter_context(process_of(_watchers(home)))
            stack.callback(crowd.send, None)
            devices = [stack.enter_context(process_of(share)) for share in shares]
            async for event, number in _moments(Follower(home.events_file), coordinator):
                sample = _sample(coordinator.process.pid)
                (run.opened if event == OPENED else run.closed)[number] = sample
                if event == OPENED and setting.begins_turn(number):
                    _change(crowd, setting.watchers_in(number), run)
                if event == CLOSED:
                    announce(f"round {number}: {sum(sample.memory_mb):.0f} MB")
            _change(crowd, 0, run)
            for pipe in devices:
                pipe.send("end")
                run.receipts |= expect(pipe)
    return run


def _watchers(home: Home) -> Callable[..., None]:
    with closing(Store.of(home)) as store:
        token = ApiTokens(store.api).create("watcher", Role.VIEWER).text
    return partial(run_watchers, home.config().api.port, token, f"/f/{FEDERATION}")


async def _moments(follower: Follower, coordinator: Child) -> AsyncIterator[tuple[str, int]]:
    """When a round opens and closes, as the event log has it, until the federation is finished."""
    end = time.monotonic() + SECONDS_MAX
    while time.monotonic() < end:
        for event in follower.new():
            name = str(event["event"])
            if name in (OPENED, CLOSED):
                end = time.monotonic() + SECONDS_MAX
                yield name, whole(event, "round")
            elif name == "attempt_failed":
                raise BrokerError(f"round {whole(event, 'round')} failed: {event.get('reason')}")
            elif name == "finished":
                return
        if not coordinator.is_running:
            raise coordinator.ended_too_early()
        await asyncio.sleep(POLL_S)
    raise BrokerError(f"no round opened or closed within {SECONDS_MAX:.0f} s; see {coordinator.log}")


def _sample(pid: int) -> Sample:
    process = psutil.Process(pid)
    own, used = process.memory_info().rss, process.cpu_times()
    children_rss = sum(child.memory_info().rss for child in process.children(recursive=True))
    return Sample((round(own / 1e6, 1), round(children_rss / 1e6, 1)), round(used.user + used.system, 2))


def _change(crowd: Any, count: int, run: Run) -> None:
    crowd.send(count)
    pages, events = expect(crowd)
    run.pages, run.events = run.pages + pages, run.events + events


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
