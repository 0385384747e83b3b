"""What `fedcg bench infer` measures: a network in onnxruntime against eager torch, and a real serving process. Uses torch."""

from __future__ import annotations

import io
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from devices.detect import detect
from devices.profile import plan_training
from edge_client.training.box_limits import yield_cpu
from experiments.bench.inference.load import Load, Serving, ask, serving
from export.build.install_model import package_personal
from export.build.variants import HeldOut, add_variants
from export.model.runtime import Model
from export.model.versions import Slots
from fedcg.imaging import Pixels
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.networks import build_part, weights_of
from fedcg.learning.networks.assembly import personal_model
from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice
from fedcg.wire.parts import Part, ReportField
from fedcg.worker_process import spawning

CLASSES = 10
JUDGED, CALIBRATING = 20, 20  # pictures that variants are tried by
VERSIONS = 3
SWAPPING_CALLERS = 8
BARS: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "lenet5": {"speedup_vs_eager": ("at least", 3.0), "ready_s": ("at most", 1.0), "rss_mb": ("at most", 150.0)},
    "resnet18": {"int8_vs_fp32": ("at least", 2.0)},
}
"""What a network must show; a network without an entry is measured all the same."""


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        images: pictures that both sides predict one by one.
        repeats: runs of each measurement, in turn; the median counts.
        callers: that ask at the same time.
        requests: of all callers together, per run.
        swaps: changes of the version under load.
        side: pixels of a picture's sides.
    """

    images: int = 200
    repeats: int = 5
    callers: int = 32
    requests: int = 3000
    swaps: int = 20
    side: int = 32


def measure(split: str, plan: Plan, announce: Callable[[str], None]) -> dict[str, object]:
    """All figures of one network; every process and torch use one thread.

    Raises:
        ServingError: the serving process does not start.
        ExportError: the network cannot be exported.
    """
    torch.set_num_threads(1)
    spec = _spec(split, plan.side)
    with tempfile.TemporaryDirectory(prefix="fedcg-bench-") as folder:
        root = Path(folder) / "models"
        for number in range(VERSIONS):
            parts = _parts(spec, number)
            package_personal(spec, parts, root, round_number=number)
        announce(f"{split}: {plan.repeats} x {plan.images} images one by one, eager torch and onnxruntime in turn")
        found: dict[str, object] = _single(spec, parts, Model.load(root, threads=1), plan)
        announce(f"{split}: float16 and int8 beside float32")
        found |= _variants(Slots(root).current(), Path(folder) / "variants", plan)
        announce(f"{split}: {plan.callers} callers, with and without batches in turn")
        found |= _served(root, plan)
        announce(f"{split}: one caller, alone and beside training at each priority in turn")
        found |= beside_training(root, _encoded(plan.side), plan.requests, plan.repeats)
        announce(f"{split}: {plan.swaps} new versions under load")
        return found | {"swaps": _swapped(root, plan)}


def _spec(split: str, side: int) -> FederationSpec:
    return FederationSpec(
        federation="bench",
        classes=tuple(map(str, range(CLASSES))),
        image=ImageForm(mode="RGB", height=side, width=side, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)),
        network=NetworkChoice(split=split),
        method="fedcg",
        params={},
        rounds=1,
        seed=0,
        upload=(Part.CLASSIFIER,),
        report=(ReportField.EXAMPLES,),
        layouts={},
    )


def _parts(spec: FederationSpec, seed: int) -> Mapping[Part, Mapping[str, torch.Tensor]]:
    stream = torch.Generator().manual_seed(seed)
    return {part: weights_of(build_part(spec, part, stream)) for part in (Part.EXTRACTOR, Part.CLASSIFIER)}


def _pictures(count: int, side: int) -> list[Pixels]:
    return list(np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8))


def _single(
    spec: FederationSpec, parts: Mapping[Part, Mapping[str, torch.Tensor]], model: Model, plan: Plan
) -> dict[str, object]:
    """Seconds of one image, from its pixels to its probabilities."""
    pictures = _pictures(plan.images, plan.side)
    eager = personal_model(spec, parts)

    def with_torch() -> None:
        with torch.inference_mode():
            for picture in pictures:
                eager(normalise(torch.from_numpy(picture)[None].permute(0, 3, 1, 2), spec.image)).softmax(1)

    def with_onnxruntime() -> None:
        for picture in pictures:
            model.predict([picture])

    for warm_up in (with_torch, with_onnxruntime):
        warm_up()
    runs = [(_seconds(with_torch), _seconds(with_onnxruntime)) for _ in range(plan.repeats)]
    ours, theirs = (statistics.median(run[side] for run in runs) / plan.images for side in (1, 0))
    return {
        "eager_ms": round(theirs * 1000, 4),
        "onnxruntime_ms": round(ours * 1000, 4),
        "speedup_vs_eager": round(statistics.median(run[0] / run[1] for run in runs), 2),
    }


def _variants(source: Path, directory: Path, plan: Plan) -> dict[str, object]:
    """How many times as fast as float32 the variants are, one image at a time; whether they would be served is not asked."""
    shutil.copytree(source, directory)
    pictures = _pictures(JUDGED + CALIBRATING, plan.side)
    held_out = HeldOut(pictures[:JUDGED], [0] * JUDGED, pictures[JUDGED:])
    tried = {one.name: one.latency_ms for one in add_variants(directory, held_out, threads=1).variants}
    plain = tried.pop("fp32") or 0.0
    return {f"{name}_vs_fp32": round(plain / taken, 2) if taken else None for name, taken in tried.items()}


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _encoded(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(_pictures(1, side)[0]).save(buffer, "PNG")
    return buffer.getvalue()


def _served(root: Path, plan: Plan) -> dict[str, object]:
    image, ready, peaks = _encoded(plan.side), list[float](), list[float]()
    loads: dict[str, list[Load]] = {"batches": [], "single": []}
    for _ in range(plan.repeats):
        for name, options in (("batches", ()), ("single", ("--max-batch", "1"))):
            with serving(root, "--threads", "1", *options) as server:
                ask(server.port, image, plan.callers, lambda answered: answered < plan.callers)  # connections are warm
                loads[name].append(ask(server.port, image, plan.callers, lambda done: done < plan.requests))
                ready.append(server.ready_s)
                peaks.append(server.peak_rss_mb())
    return {
        "ready_s": round(statistics.median(ready), 3),
        "rss_mb": round(max(peaks), 1),
        "callers": plan.callers,
        **{name: _latencies(runs) for name, runs in loads.items()},
    }


def _latencies(runs: list[Load]) -> dict[str, float]:
    return {
        "p50_ms": round(statistics.median(run.percentile_ms(0.5) for run in runs), 2),
        "p99_ms": round(statistics.median(run.percentile_ms(0.99) for run in runs), 2),
        "failed": sum(run.failed for run in runs),
    }


def _swapped(root: Path, plan: Plan) -> dict[str, int]:
    """Requests while the version changes; a swap is over when the server serves the new version."""
    slots = Slots(root)
    names = [version.name for version in slots.versions()]
    done = threading.Event()
    with serving(root, "--threads", "1", "--watch", "0", "--shadow", "0") as server:  # these versions do differ
        swapping = threading.Thread(target=_swap, args=(server, slots, names, plan.swaps, done))
        swapping.start()
        load = ask(server.port, _encoded(plan.side), SWAPPING_CALLERS, lambda _: not done.is_set())
        swapping.join()
    return {"swaps": plan.swaps, "requests": load.answered, "failed": load.failed}


def _swap(server: Serving, slots: Slots, names: list[str], swaps: int, done: threading.Event) -> None:
    try:
        for number in range(swaps):
            wanted = names[number % len(names)]
            slots.use(wanted)
            while server.version() != wanted:
                time.sleep(0.02)
    finally:
        done.set()


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
