"""One device's local round on random images: steps and images a second, energy where a sensor measures it, and peak memory."""

import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from devices.detect import detect
from devices.power import EnergyMeter
from devices.telemetry import read_power
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Aggregate, Callbacks, Cohort, Machine, RoundContext
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationPlan, ImageForm, NetworkChoice

_CLASSES = tuple(map(str, range(10)))
_WARM_BATCHES = 4


@dataclass(frozen=True)
class BoxRound:
    """What to time.

    Attributes:
        device: torch device.
        size: pixels of a side.
        images: of the round, in batches of `batch`, `epochs` times.
        threads: torch threads on the CPU.
    """

    device: str
    method: str
    network: NetworkChoice
    size: int
    images: int
    batch: int
    epochs: int
    threads: int


def measure(plan: BoxRound, announce: Callable[[str], None]) -> dict[str, Any]:
    """The figures of the method's second round, which has an aggregate to learn from; a short round before it warms up.

    Raises:
        LearningError: the networks or the method refuse the setting.
    """
    torch.set_num_threads(plan.threads)
    image = ImageForm(mode="RGB", height=plan.size, width=plan.size, mean=(0.5,) * 3, std=(0.5,) * 3)
    asked = FederationPlan(
        federation="bench",
        classes=_CLASSES,
        input=image,
        network=plan.network,
        method=plan.method,
        params={"epochs": plan.epochs, "batch_size": plan.batch},
        rounds=2,
    )
    spec, method, streams = complete_spec(asked), get_method(plan.method), Streams(bytes(32))
    parts = initial_parts(spec, bytes(32))
    aggregate = Aggregate({part: parts[part] for part in method.payload.down})
    steps: dict[str, int] = {}
    meter = EnergyMeter(read_power)

    def progress(phase: str, step: int, total: int) -> None:
        steps[phase] = total
        meter.look()

    def run(count: int) -> float:
        drawn = torch.randint(0, 256, (count, 3, plan.size, plan.size), generator=streams.generator("images"))
        data = ImageSet(drawn.to(torch.uint8), torch.arange(count) % len(_CLASSES), _CLASSES)
        ctx = RoundContext(spec, 2, 1, streams, Machine(plan.device), Callbacks(progress), Cohort(streams))
        started = time.perf_counter()
        method.local_round(method.init_client(spec, parts), data, aggregate, ctx)
        if plan.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - started

    announce("warming up")
    run(min(plan.images, _WARM_BATCHES * plan.batch))
    steps.clear()
    announce(f"a round of {plan.images} images x {plan.epochs} epochs")
    meter = EnergyMeter(read_power)
    seconds = run(plan.images)
    meter.look(at_once=True)
    total = sum(steps.values())
    return {
        "box": _name(plan.device),
        "steps": steps,
        "seconds": round(seconds, 3),
        "steps_per_second": round(total / seconds, 2),
        "images_per_second": round(total * plan.batch / seconds, 1),
        "joules": None if meter.rail is None else round(meter.joules, 1),
        "rail": meter.rail,
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6),
        "gpu_peak_mb": round(torch.cuda.max_memory_allocated() / 1e6) if plan.device.startswith("cuda") else None,
    }


def _name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    box = detect()
    return box.known_as or box.model or box.cpu_model or platform.machine()


def line_of(plan: BoxRound, found: dict[str, Any]) -> str:
    """The figures in one line, to compare boxes."""
    energy = "energy not measured" if found["joules"] is None else f"{found['joules']} J ({found['rail']})"
    gpu = "" if found["gpu_peak_mb"] is None else f", {found['gpu_peak_mb']} MB of the GPU"
    return (
        f"{found['box']} ({plan.device}, {plan.threads} threads): {plan.method} with {plan.network.split} at {plan.size} pixels, batches of "
        f"{plan.batch}: {found['steps_per_second']} steps/s, {found['images_per_second']} images/s, {found['seconds']} s a round of "
        f"{plan.images} images x {plan.epochs}, {energy}, peak {found['peak_mb']} MB{gpu}"
    )
