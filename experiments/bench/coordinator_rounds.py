"""Rounds of a real coordinator and a real Mosquitto, both started by their commands, with many sessions.

Every device sends one recorded local round. Times come from the database; memory is sampled over rounds. Torch is only
used to record the update.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import linear_regression

import psutil

from coordinator.errors import BrokerError
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
    running_broker,
)
from experiments.demo.event_follower import Follower, whole
from experiments.demo.processes import POLL_S, Child
from experiments.simulation.batch import RunSetting
from fedcg.learning.spec import FederationSpec, plan_from_mapping
from fedcg.values import Value
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import Base, codecs_for, unpack
from fedcg.wire.artifacts.payload import PartArrays
from fedcg.wire.messages.schemas import Outcome
from fedcg.wire.parts import DEFAULT_AGGREGATE_CODEC, DEFAULT_UPDATE_CODEC, Report


class Replay(Value):
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
        """Return the update of a device, through its firewall and the federation's codec.

        Args:
            device: the device's id.
            round_number: number of the round.
            attempt: attempt of the round.
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
    """Return the decoded aggregate of the latest round, from which all devices of a process start."""
    parts = {part: _spec(spec).layouts[part] for part in sorted(_spec(spec).upload)}
    return Base(artifact, unpack(data, parts, codecs=codecs_for(parts, _spec(spec).aggregate_codec)).parts)


SERVER_ITERATIONS = 20


def set_up(home: Home, names: Sequence[str], rounds: int, network: str) -> MakeUpdate:
    """Create the federation, the devices, and their update while the broker runs. Uses torch."""
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
    record = enrol(home, names, plan)
    return Replay(ArtifactStore(home.artifacts).get(record.spec), *_recorded(run)).update


def _recorded(run: RunSetting) -> tuple[PartArrays, Report]:
    """Return what the first local round of a client shares and reports."""
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


class Setting(Value):
    """The settings of a run; `network`: the split."""

    sessions: int
    rounds: int
    network: str = "lenet5_relu"


class Sample(Value):
    """The coordinator's processes at one point in time.

    Attributes:
        memory_mb: resident memory of the process, and of its children (the aggregation worker), in 10^6 bytes.
        processor_s: processor time of the process without its children.
    """

    memory_mb: tuple[float, float]
    processor_s: float


@dataclass
class Run:
    """Outside observations of the rounds.

    Attributes:
        opened, closed: samples by round.
        receipts: all receipts, by device and (round, attempt).
    """

    opened: dict[int, Sample] = field(default_factory=dict)
    closed: dict[int, Sample] = field(default_factory=dict)
    receipts: dict[str, Mapping[tuple[int, int], Outcome | None]] = field(default_factory=dict)

    def updates(self) -> dict[str, int]:
        """Count the sent updates, by receipt, and those without a receipt."""
        ends = [end for of_device in self.receipts.values() for end in of_device.values()]
        named = {outcome.value: ends.count(outcome) for outcome in Outcome if outcome in ends}
        return {"sent": len(ends), "accepted": 0, **named, "lost": ends.count(None)}


async def run_rounds(home: Home, setting: Setting, announce: Callable[[str], None]) -> Run:
    """Set up a federation and run all its rounds.

    Raises:
        BrokerError: no Mosquitto here, or the rounds do not finish.
        ProcessError: the broker or the coordinator exited.
    """
    run, names = Run(), tuple(map(device_name, range(setting.sessions)))
    async with running_broker(home) as processes:
        announce(f"setting up {setting.sessions} sessions ...")
        make_update = await asyncio.to_thread(set_up, home, names, setting.rounds, setting.network)
        coordinator = processes.fork("coordinator", "coordinator", "run", "--dir", home.root)
        await processes.line(coordinator, "coordinator of", READY_S)
        with device_processes(home, names, make_update) as devices:
            async for event, number in _moments(Follower(home.events_file), coordinator):
                sample = _sample(coordinator.pid)
                (run.opened if event == OPENED else run.closed)[number] = sample
                if event == CLOSED:
                    announce(f"round {number}: {sum(sample.memory_mb):.0f} MB")
            for pipe in devices:
                pipe.send("end")
                run.receipts |= expect(pipe)
    return run


async def _moments(follower: Follower, coordinator: Child) -> AsyncIterator[tuple[str, int]]:
    """Yield openings and closings of rounds from the event log until the federation is finished."""
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


WARM = 2
"""Rounds before memory is compared, so that allocators and caches have filled."""
POINTS = 8
"""Minimum rounds for a slope: with fewer, a single allocation looks like growth."""


class Round(Value):
    """One round.

    Attributes:
        seconds: from the opened attempt to its aggregate.
        update_mb_per_s: 10^6 bytes of updates per second, from the first manifest to the last stored update.
        next_offer_s: from the last stored update to the next offer; None for the last round.
        processor_s: processor time of the coordinator's process, without its worker, until the next offer.
        memory_mb: resident memory of the process and of its children, the worker, in 10^6 bytes, after the round.
    """

    round: int
    seconds: float
    update_mb_per_s: float
    next_offer_s: float | None
    processor_s: float
    memory_mb: tuple[float, float]


def rounds_of(store: Store, run: Run) -> list[Round]:
    """Return the rounds of a run, from the coordinator's database and the samples."""
    attempts, found = store.attempts(FEDERATION), []
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        number = attempt.round
        updates = store.updates(FEDERATION, attempt.at)
        first, last = min(update.manifest_at for update in updates), max(update.stored_at for update in updates)
        until = run.closed[number] if following is None else run.opened[following.round]
        found.append(
            Round(
                round=number,
                seconds=round((attempt.closed_at or 0.0) - attempt.opened_at, 3),
                update_mb_per_s=round(sum(update.size for update in updates) / (last - first) / 1e6, 2),
                next_offer_s=None if following is None else round(following.opened_at - last, 3),
                processor_s=round(until.processor_s - run.opened[number].processor_s, 2),
                memory_mb=run.closed[number].memory_mb,
            )
        )
    return found


def growth_mb(rounds: Sequence[Round]) -> float | None:
    """Return the growth of resident memory per round, in 10^6 bytes: the slope of a line after `WARM` rounds; None for fewer than `POINTS` rounds."""
    later = rounds[WARM:]
    if len(later) < POINTS:
        return None
    return round(linear_regression([each.round for each in later], [sum(each.memory_mb) for each in later]).slope, 3)
