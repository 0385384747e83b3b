"""How fast updates get from devices into the coordinator's database, over what paho alone does in the same run.

Mosquitto runs with the configuration that we generate, mutual TLS included. Senders and receiver are processes of their own,
in both halves of a ratio. Ours counts from the first manifest of a round to the last update that is checked and durable.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from experiments.bench.transport.broker import SECONDS_MAX, Bench, bench, device_name, expect, process_of
from experiments.bench.transport.paho_alone import PlainParty, run_plain_receiver, run_plain_senders
from experiments.bench.transport.rounds import round_of
from fedcg.wire.messages.messages import COORDINATOR, MAX_CHUNK_BYTES
from fedcg.wire.transfer.broker_presets import LinkLimits, limits_for
from fedcg.wire.transfer.chunks import chunk_bytes_for

SMALL, LARGE = 250_000, 57_000_000


@dataclass(frozen=True)
class Case:
    """What is measured: `count` artifacts of `size` bytes by each of `sessions`, one after the other.

    Each session has at most `window` chunks under way. Artifacts smaller than a window come from as many sessions as fill it.
    """

    size: int
    window: int
    count: int
    sessions: int = 1


def filled(size: int, window: int, total: int) -> Case:
    """The case of a size and a window, with the sessions that fill the window, repeated up to `total` bytes."""
    chunks = -(-size // chunk_bytes_for(MAX_CHUNK_BYTES))
    sessions = max(1, window // chunks)
    return Case(size, window, max(1, total // (size * sessions)), sessions)


@dataclass(frozen=True)
class Measured:
    """Seconds of each run, ours and those of paho alone, in turns."""

    case: Case
    ours_s: tuple[float, ...]
    paho_s: tuple[float, ...]

    def mb_per_s(self, seconds: Sequence[float]) -> float:
        """10^6 bytes of artifacts in a second, in the median run."""
        return self.case.size * self.case.count * self.case.sessions / statistics.median(seconds) / 1e6

    @property
    def ratio(self) -> float:
        """Our throughput over paho's: medians of runs that took turns."""
        return statistics.median(self.paho_s) / statistics.median(self.ours_s)


def measure(cases: Sequence[Case], repeats: int, announce: Callable[[str], None]) -> list[Measured]:
    """Run every case, ours and paho's in turns.

    Raises:
        BrokerError: no Mosquitto here.
    """
    measured: list[Measured] = []
    with bench([device_name(number) for number in range(max(case.sessions for case in cases))]) as made:
        for case in cases:
            ours, plain = [], []
            for turn in range(repeats):
                ours.append(
                    sum(round_of(case.sessions, case.size, case.count, _limits(case.window), announce).transfer_s)
                )
                plain.append(_plain(made, case, turn))
            measured.append(Measured(case, tuple(ours), tuple(plain)))
    return measured


def _plain(made: Bench, case: Case, turn: int) -> float:
    limits = _limits(case.window)
    chunk = chunk_bytes_for(limits.max_packet)
    parties = tuple(
        PlainParty(made.mqtt(name, limits), made.topics.up_chunk(name), made.topics.down_control(name))
        for name in (device_name(number) for number in range(case.sessions))
    )
    acks = {party.chunks_on: party.acks_on for party in parties}
    payloads = tuple(random.Random(f"{turn} {number}").randbytes(case.size) for number in range(case.count))
    chunks, all_chunks = -(-case.size // chunk), made.topics.all_up_chunk()
    receiver = partial(run_plain_receiver, made.mqtt(COORDINATOR, limits), all_chunks, acks, chunks, case.window)
    return _pair(receiver, partial(run_plain_senders, parties, payloads, chunk, case.window))


def _limits(window: int) -> LinkLimits:
    return limits_for(window_chunks=window, window_bytes=window * 128 * 1024)


def _pair(receiver: Callable[..., None], sender: Callable[..., None]) -> float:
    """Run both ends in processes; the seconds that the sender measured."""
    with process_of(receiver) as receiving, process_of(sender) as sending:
        expect(receiving)
        expect(sending)
        sending.send("go")
        first = wait([sending, receiving], SECONDS_MAX)  # a receiver sends nothing but its end
        seconds = expect(receiving if receiving in first else sending)
        receiving.send("end")
        return float(seconds)


def as_json(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """The figures of all cases."""
    return [
        {
            **asdict(one.case),
            "ours_s": [round(seconds, 4) for seconds in one.ours_s],
            "paho_s": [round(seconds, 4) for seconds in one.paho_s],
            "ours_mb_per_s": round(one.mb_per_s(one.ours_s), 1),
            "paho_mb_per_s": round(one.mb_per_s(one.paho_s), 1),
            "ratio": round(one.ratio, 3),
        }
        for one in measured
    ]
