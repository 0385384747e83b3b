"""What `fedcg bench infer` measures: a network in onnxruntime against eager torch, and a real serving process under callers.

The callers are one event loop, to leave the cores to the server. Uses torch.
"""

import asyncio
import io
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from devices.detect import detect
from devices.profile import plan_training
from edge_client.training.box_limits import yield_cpu
from export.build.install_model import package_personal
from export.build.variants import HeldOut, add_variants
from export.errors import ServingError
from export.model.runtime import Model
from export.model.versions import ModelVersions
from fedcg.child_python import module_command, spawning
from fedcg.imaging import Pixels
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.networks import build_part, weights_of
from fedcg.learning.networks.assembly import personal_model
from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice
from fedcg.wire.parts import Part, ReportField

_START_S = 60.0
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


@dataclass(frozen=True)
class Serving:
    """A live serving process.

    Attributes:
        ready_s: seconds from its start until /readyz answered 200.
    """

    process: subprocess.Popen[str]
    port: int
    ready_s: float

    def peak_rss_mb(self) -> float:
        """Most memory that it held so far, in MB of 10⁶ bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024 / 1e6

    def version(self) -> str:
        """The version in service; "" while there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=10) as answer:
                found = re.search(rb'"version":"([^"]+)"', answer.read())
        except urllib.error.HTTPError:
            return ""
        return found[1].decode() if found else ""


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Serving]:
    """`fedcg infer serve` on a free port, ready, and ended by SIGTERM.

    Raises:
        ServingError: it did not start, or did not end as it should.
    """
    started = time.perf_counter()
    command = module_command("fedcg", "infer", "serve", "--model", model, "--port", 0, *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)$", process.stdout.readline().strip())
            if found is None:
                raise ServingError(f"`{' '.join(command)}` did not start; run it to see why")
            waiting = Serving(process, int(found[1]), 0.0)
            while not waiting.version():
                if time.perf_counter() - started > _START_S:
                    raise ServingError(f"`{' '.join(command)}` is not ready after {_START_S:g} s; run it to see why")
            yield Serving(process, waiting.port, time.perf_counter() - started)
            process.send_signal(signal.SIGTERM)
            if process.wait(_START_S) != 0:
                raise ServingError(f"`{' '.join(command)}` ended with exit code {process.returncode}")
        finally:
            process.kill()


@dataclass
class Load:
    """What callers saw: seconds of each answered request, and how many were not answered with 200."""

    seconds: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def answered(self) -> int:
        """Requests that are over, failed ones too."""
        return len(self.seconds) + self.failed

    def percentile_ms(self, share: float) -> float:
        """The latency that this share of the requests stayed within, in ms."""
        ranked = sorted(self.seconds)
        return ranked[min(int(share * len(ranked)), len(ranked) - 1)] * 1000


def ask(port: int, image: bytes, callers: int, goes_on: Callable[[int], bool], pause_s: float = 0.0) -> Load:
    """Let callers ask at the same time, each again as soon as it was answered.

    Args:
        port: of the server, on loopback.
        image: the bytes of an image file.
        callers: how many, each with a connection of its own that it keeps.
        goes_on: called with the number of requests answered so far; false ends the callers.
        pause_s: of a caller between an answer and its next request.
    """
    load = Load()
    asyncio.run(_all(port, image, callers, goes_on, load, pause_s))
    return load


async def _all(
    port: int, image: bytes, callers: int, goes_on: Callable[[int], bool], load: Load, pause_s: float
) -> None:
    await asyncio.gather(*(_caller(port, image, goes_on, load, pause_s) for _ in range(callers)))


async def _caller(port: int, image: bytes, goes_on: Callable[[int], bool], load: Load, pause_s: float) -> None:
    head = (
        f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(image)}\r\n\r\n"
    )
    request = head.encode() + image
    while goes_on(load.answered):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while goes_on(load.answered):
                began = time.perf_counter()
                if await _once(reader, writer, request) == 200:
                    load.seconds.append(time.perf_counter() - began)
                else:
                    load.failed += 1
                if pause_s:
                    await asyncio.sleep(pause_s)
        except (OSError, EOFError):
            load.failed += 1
        finally:
            writer.close()


async def _once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    await reader.readexactly(int(length[1]) if length else 0)
    return int(head[9:12])


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
        found |= _variants(ModelVersions(root).current(), Path(folder) / "variants", plan)
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
    installed = ModelVersions(root)
    names = [version.name for version in installed.versions()]
    done = threading.Event()
    with serving(root, "--threads", "1", "--watch", "0", "--shadow", "0") as server:  # these versions do differ
        swapping = threading.Thread(target=_swap, args=(server, installed, names, plan.swaps, done))
        swapping.start()
        load = ask(server.port, _encoded(plan.side), SWAPPING_CALLERS, lambda _: not done.is_set())
        swapping.join()
    return {"swaps": plan.swaps, "requests": load.answered, "failed": load.failed}


def _swap(server: Serving, installed: ModelVersions, names: list[str], swaps: int, done: threading.Event) -> None:
    try:
        for number in range(swaps):
            wanted = names[number % len(names)]
            installed.use(wanted)
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
    from experiments.bench.box_round import BoxRound, measure
    from fedcg.learning.spec import NetworkChoice

    yield_cpu(priority)
    network = NetworkChoice(split="lenet5_relu", generator="mlp")
    endless = BoxRound("cpu", "fedcg", network, size=32, images=1000, batch=16, epochs=1_000_000, threads=threads)
    measure(endless, lambda _: begins.set())  # the warm-up has as many epochs, and does not end either
