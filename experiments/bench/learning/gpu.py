"""A CUDA device's steps: milliseconds with and without a graph, kernels launched, floating-point operations, share of the peak."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from experiments.bench.learning.steps import Steps, cases_of
from experiments.bench.learning.training import Setting, Stage, median_seconds, work_of

_COUNTED_STEPS = 10
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
# Float32 operations per second without tensor cores, from the makers' data sheets, by the words of the device's name.
_PEAKS: Mapping[frozenset[str], float] = {
    frozenset(words.split()): flops
    for words, flops in {
        "H200": 67e12,
        "H100": 67e12,
        "H100 PCIe": 51e12,
        "A100": 19.5e12,
        "A10": 31.2e12,
        "L40S": 91.6e12,
        "L4": 30.3e12,
        "T4": 8.1e12,
    }.items()
}


def peak_flops(device_name: str) -> float | None:
    """Float32 operations per second of a GPU, by its name as the driver gives it; None for one that is not listed."""
    words = frozenset(device_name.replace("-", " ").split())
    known = [listed for listed in _PEAKS if listed <= words]
    return _PEAKS[max(known, key=len)] if known else None


def counted_flops(work: Callable[[], object]) -> int:
    """Floating-point operations of matrix products and convolutions, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def launches_among(names: Iterable[str]) -> int:
    """How many of a profile's events, by name, start kernels: one each, or a whole graph."""
    return sum(name.startswith(_LAUNCHES) for name in names)


def measure(plan: Steps, announce: Callable[[str], None]) -> list[dict[str, str | int | float | None]]:
    """One entry per networks, batch size and stage, measured on the current CUDA device.

    Args:
        plan: what to time; `steps` at least 50, or nothing runs as a graph.
        announce: called with a line of progress before every case.
    """
    cases: list[dict[str, str | int | float | None]] = []
    for setting, stage, what in cases_of(plan):
        announce(f"{what['generator']}/{what['discriminator']}, batch {setting.batch}, on the GPU: {stage.value}")
        cases.append({**what, **case(replace(setting, device="cuda"), stage, plan.repeats)})
    return cases


def case(setting: Setting, stage: Stage, repeats: int) -> dict[str, int | float | None]:
    """The figures of one stage: per step."""
    plain = replace(setting, graphs=False)
    with_graph, without = (
        1e3 * seconds
        for seconds in median_seconds(
            [lambda: _step_seconds(setting, stage), lambda: _step_seconds(plain, stage)], repeats
        )
    )
    flops = counted_flops(work_of(plain, stage, _COUNTED_STEPS)) / _COUNTED_STEPS
    name = torch.cuda.get_device_name() if setting.device == "cuda" else ""
    return {
        "graph_ms": round(with_graph, 4),
        "plain_ms": round(without, 4),
        "graph_launches": _launches(setting, stage),
        "plain_launches": _launches(plain, stage),
        **achieved(flops, with_graph / 1e3, peak_flops(name)),
    }


def achieved(flops: float, seconds: float, peak: float | None) -> dict[str, float | None]:
    """What a step of so many operations in so many seconds makes of a GPU whose peak is known, or is not."""
    rate = flops / seconds
    return {
        "flops": flops,
        "flops_per_second": rate,
        "peak_flops_per_second": peak,
        "share_of_peak": None if peak is None else round(rate / peak, 6),
    }


def _step_seconds(setting: Setting, stage: Stage) -> float:
    """Seconds of a step: those of twice as many less those of the steps, without what comes once (loading, capture)."""
    once, twice = (_seconds(work_of(setting, stage, many * setting.steps)) for many in (1, 2))
    return max(twice - once, 1e-9) / setting.steps


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()  # ends with a look at the loss, and so with the device's last kernel
    return time.perf_counter() - begin


def _launches(setting: Setting, stage: Stage) -> float:
    """Launches of a step: as `_step_seconds`, counted."""
    once, twice = (_launched(work_of(setting, stage, many * setting.steps)) for many in (1, 2))
    return round((twice - once) / setting.steps, 2)


def _launched(work: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
    return launches_among(event.name for event in profiler.events() or ())
