"""Latency of predictions while a training process of each priority has the box's other time. Uses torch in the training process only."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Literal

from devices.detect import detect
from devices.profile import plan_training
from edge_client.training.turns import yield_cpu
from experiments.bench.inference.load import Load, ask, serving
from fedcg.child_python import spawning

PRIORITIES: tuple[Literal["normal", "low", "idle"], ...] = ("normal", "low", "idle")
ALONE = "one_caller"
PAUSE_S = 0.02
START_S = 120.0


def beside_training(model: Path, image: bytes, requests: int, repeats: int) -> dict[str, object]:
    """p50 and p99 of one caller that asks 50 times a second at most: alone, and beside training at each priority, in turn.

    Args:
        model: of the server, or the root of its versions.
        image: the bytes of an image file.
        requests: of a run.
        repeats: runs of each; the median counts, and the ratio is that of the runs of one turn.
    """
    loads = {name: list[Load]() for name in (ALONE, *(f"beside_{priority}" for priority in PRIORITIES))}
    with serving(model, "--threads", "1") as server:
        for _ in range(repeats):
            loads[ALONE].append(ask(server.port, image, 1, lambda done: done < requests, PAUSE_S))
            for priority in PRIORITIES:
                with _training(priority):
                    loads[f"beside_{priority}"].append(
                        ask(server.port, image, 1, lambda done: done < requests, PAUSE_S)
                    )
    return {name: _figures(runs, loads[ALONE]) for name, runs in loads.items()}


def _figures(runs: list[Load], alone: list[Load]) -> dict[str, float]:
    ratios = [run.percentile_ms(0.99) / base.percentile_ms(0.99) for run, base in zip(runs, alone, strict=True)]
    return {
        "p50_ms": round(statistics.median(run.percentile_ms(0.5) for run in runs), 2),
        "p99_ms": round(statistics.median(run.percentile_ms(0.99) for run in runs), 2),
        "p99_vs_alone": round(statistics.median(ratios), 2),
        "failed": sum(run.failed for run in runs),
    }


@contextmanager
def _training(priority: Literal["normal", "low", "idle"]) -> Iterator[None]:
    """A process that trains, with the threads that an agent would take here, for as long as the context lasts."""
    context = spawning()
    begins = context.Event()
    process = context.Process(
        target=_train, args=(priority, plan_training(detect(), device="cpu").threads, begins), daemon=True
    )
    process.start()
    try:
        if not begins.wait(START_S):
            raise TimeoutError(f"the training process did not begin within {START_S:g} s")
        yield
    finally:
        process.kill()
        process.join()


def _train(priority: Literal["normal", "low", "idle"], threads: int, begins: Event) -> None:
    from experiments.bench.learning.box_round import BoxRound, measure
    from fedcg.learning.spec import NetworkChoice

    yield_cpu(priority)
    network = NetworkChoice(split="lenet5_relu", generator="mlp")
    endless = BoxRound("cpu", "fedcg", network, size=32, images=1000, batch=16, epochs=1_000_000, threads=threads)
    measure(endless, lambda _: begins.set())  # the warm-up has as many epochs, and does not end either
