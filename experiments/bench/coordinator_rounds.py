"""Rounds of a real coordinator and a real Mosquitto, both by their commands, with many sessions and turns of watchers.

Every device sends one recorded local round. Works out times by the database, memory over rounds, and the cost of watchers. Torch
only while the update is recorded.
"""

import asyncio
import contextlib
import http.client
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import psutil

from coordinator.errors import BrokerError
from coordinator.members.api_tokens import ApiTokens, Role
from coordinator.operations.operations import open_federation
from coordinator.paths import Home
from coordinator.storage.store import Store
from edge_client.config import PolicySection
from edge_client.firewall import UpdateFacts, build_update
from experiments.bench.sessions import (
    FEDERATION,
    READY_S,
    SECONDS_MAX,
    MakeUpdate,
    device_name,
    device_processes,
    enrol,
    expect,
    process_of,
    running_broker,
)
from experiments.demo.event_follower import Follower, whole
from experiments.demo.processes import POLL_S, Child
from experiments.demo.run_folder import LOOPBACK
from experiments.simulation.batch import RunSetting
from fedcg.learning.spec import FederationSpec, plan_from_mapping
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import Base, codecs_for, unpack
from fedcg.wire.artifacts.payload import PartArrays
from fedcg.wire.messages.schemas import Outcome
from fedcg.wire.parts import DEFAULT_AGGREGATE_CODEC, DEFAULT_UPDATE_CODEC, Report


@dataclass(frozen=True)
class Replay:
    """Makes the updates of a federation from the result of one local round.

    Attributes:
        spec: the federation's spec, as its canonical JSON.
        shared: the parts that the local round shared.
        report: of the local round.
    """

    spec: bytes
    shared: PartArrays
    report: Report

    def update(self, device: str, round_number: int, attempt: int, base: Path) -> bytes:
        """The update of a device, through its firewall and the federation's codec.

        Args:
            device: its id.
            round_number: of the round.
            attempt: of the round.
            base: the round's aggregate.
        """
        return build_update(
            self.shared,
            self.report,
            spec=_spec(self.spec),
            policy=PolicySection(),
            facts=UpdateFacts(device, round_number, attempt),
            base=_base(self.spec, base.name, base.read_bytes()),
        )


@lru_cache(maxsize=1)
def _spec(data: bytes) -> FederationSpec:
    return FederationSpec.parse(data)


@lru_cache(maxsize=1)
def _base(spec: bytes, artifact: str, data: bytes) -> Base:
    """The decoded aggregate of the latest round: all devices of a process start from it."""
    parts = {part: _spec(spec).layouts[part] for part in sorted(_spec(spec).upload)}
    return Base(artifact, unpack(data, parts, codecs=codecs_for(parts, _spec(spec).aggregate_codec)).parts)


SERVER_ITERATIONS = 20


def set_up(home: Home, names: Sequence[str], rounds: int, network: str) -> MakeUpdate:
    """Make the federation, the devices, and the update that they send, while the broker runs. Uses torch."""
    run = RunSetting(
        clients=1,
        partition="iid",
        images_per_client=200,
        rounds=rounds,
        network=network,
        generator="mlp_small",
        codec=DEFAULT_UPDATE_CODEC,
        aggregate_codec=DEFAULT_AGGREGATE_CODEC,
        quick=True,
        params={"server_iterations": SERVER_ITERATIONS},
    )
    quorum = {"min_clients": len(names), "min_cohort": 1, "deadline_s": SECONDS_MAX}
    plan = plan_from_mapping({**run.plan(run.source()), "federation": FEDERATION, **quorum})
    record = enrol(home, names, lambda store: open_federation(home, store, plan))
    return Replay(ArtifactStore(home.artifacts).get(record.spec), *_recorded(run)).update


def _recorded(run: RunSetting) -> tuple[PartArrays, Report]:
    """What the first local round of a client shares and reports."""
    import torch

    from experiments.simulation.party_builder import simulated_party
    from fedcg.learning.networks.plans import initial_parts
    from fedcg.learning.registry import get_method
    from fedcg.learning.tensor_conversion import to_arrays

    torch.set_num_threads(1)
    party, method = simulated_party(run, run.source()), get_method(run.method)
    initial, ((name, dataset),) = initial_parts(party.spec, party.roots.cohort), party.datasets.items()
    aggregate, state = method.init_server(party.spec, initial).aggregate, method.init_client(party.spec, initial)
    result = method.local_round(state, dataset.train, aggregate, party.client_context(name, 1))
    return to_arrays(result.shared.parts), result.report


OPENED, CLOSED = "attempt_opened", "aggregate_stored"


@dataclass(frozen=True)
class Setting:
    """What is run: `rounds` without watchers, or so many turns of `rounds` without and `rounds` with them; `network`: the split."""

    sessions: int
    rounds: int
    watchers: int
    turns: int
    network: str = "lenet5_relu"

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
    run, names = Run(), tuple(map(device_name, range(setting.sessions)))
    async with running_broker(home) as processes:
        announce(f"setting up {setting.sessions} sessions ...")
        make_update = await asyncio.to_thread(set_up, home, names, setting.all_rounds, setting.network)
        coordinator = processes.fork("coordinator", "coordinator", "run", "--dir", home.root)
        await processes.line(coordinator, "coordinator of", READY_S)
        with ExitStack() as stack:
            crowd = stack.enter_context(process_of(_watchers(home)))
            stack.callback(crowd.send, None)
            devices = stack.enter_context(device_processes(home, names, make_update))
            async for event, number in _moments(Follower(home.events_file), coordinator):
                sample = _sample(coordinator.pid)
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


WARM = 2
"""Rounds after which memory is compared: allocators and caches have filled."""
POINTS = 8
"""Rounds that a slope needs: in fewer, one allocation looks like growth."""


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        watchers: event streams that were open all the time; None where they came or went.
        seconds: from the opened attempt to its aggregate.
        update_mb_per_s: 10^6 bytes of updates in a second, from the first manifest to the last stored update.
        next_offer_s: from the last stored update to the next offer; None for the last round.
        processor_s: processor time of the coordinator's process, without its worker, until the next offer.
        memory_mb: resident memory of the process and of its children, the worker, in 10^6 bytes, after the round.
    """

    round: int
    watchers: int | None
    seconds: float
    update_mb_per_s: float
    next_offer_s: float | None
    processor_s: float
    memory_mb: tuple[float, float]


def rounds_of(store: Store, run: Run, setting: Setting) -> list[Round]:
    """The rounds of a run, by the coordinator's database and the samples."""
    attempts, found = store.attempts(FEDERATION), []
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        number = attempt.round
        changes = setting.watchers > 0 and setting.begins_turn(number)
        updates = store.updates(FEDERATION, attempt.at)
        first, last = min(update.manifest_at for update in updates), max(update.stored_at for update in updates)
        until = run.closed[number] if following is None else run.opened[following.round]
        found.append(
            Round(
                round=number,
                watchers=None if changes else setting.watchers_in(number),
                seconds=round((attempt.closed_at or 0.0) - attempt.opened_at, 3),
                update_mb_per_s=round(sum(update.size for update in updates) / (last - first) / 1e6, 2),
                next_offer_s=None if following is None else round(following.opened_at - last, 3),
                processor_s=round(until.processor_s - run.opened[number].processor_s, 2),
                memory_mb=run.closed[number].memory_mb,
            )
        )
    return found


def growth_mb(rounds: Sequence[Round]) -> float | None:
    """Resident memory per round, in 10^6 bytes: the slope of a straight line after `WARM` rounds; None for fewer than `POINTS` rounds."""
    later = rounds[WARM:]
    if len(later) < POINTS:
        return None
    return round(linear_regression([each.round for each in later], [sum(each.memory_mb) for each in later]).slope, 3)


def cost_of_watchers(rounds: Sequence[Round], turn: int) -> dict[str, dict[str, Any]]:
    """With watchers over without: for each figure the median of each turn's rounds, and the ratio of neighbouring turns.

    Rounds in which watchers came or went are left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in ("seconds", "next_offer_s", "processor_s"):
        turns: list[float] = []
        for start in range(0, len(rounds), turn):
            values = [getattr(each, name) for each in rounds[start : start + turn] if each.watchers is not None]
            turns.append(median(value for value in values if value is not None))
        ratios = [round(watched / alone, 3) for alone, watched in zip(turns[0::2], turns[1::2], strict=True)]
        found[name] = {"without": turns[0::2], "with": turns[1::2], "ratios": ratios, "ratio": round(median(ratios), 3)}
    return found


def draw_memory(rounds: Sequence[Round], path: Path, title: str) -> None:
    """Draw resident memory over rounds, of the coordinator's process and of its worker, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    numbers = [each.round for each in rounds]
    for index, label in enumerate(("coordinator", "its aggregation worker")):
        panel.plot(numbers, [each.memory_mb[index] for each in rounds], marker=".", label=label)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("round")
    panel.set_ylabel("resident memory, MB")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.3)
    panel.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
