"""What `fedcg bench infer` measures: a network in onnxruntime beside eager torch, and a real serving process under callers.

The callers are one event loop that speaks HTTP by itself, to leave the cores to the server. Uses torch.
"""

import asyncio
import io
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import torch
from PIL import Image

from export.build.install_model import package_personal
from export.errors import ServingError
from export.model.runtime import Model
from fedcg.child_python import module_command
from fedcg.imaging import Pixels
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.networks import build_part, weights_of
from fedcg.learning.networks.assembly import personal_model
from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice
from fedcg.wire.parts import Part, ReportField

_START_S = 60.0
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


@dataclass(frozen=True)
class Load:
    """How much is measured, with random pictures of `side` pixels.

    Attributes:
        images: that both sides predict one by one.
        callers: that ask at the same time, each again as soon as it was answered.
        requests: of all callers together, per run.
        repeats: runs of each measurement, in turn; the median counts.
    """

    side: int = 32
    images: int = 200
    callers: int = 32
    requests: int = 3000
    repeats: int = 5


def measure(split: str, load: Load, announce: Callable[[str], None]) -> dict[str, float]:
    """All figures of one network; torch, onnxruntime and the server use one thread each.

    Raises:
        ServingError: the serving process does not start, or leaves a request without an answer.
        ExportError: the network cannot be exported.
    """
    torch.set_num_threads(1)
    spec = FederationSpec(
        federation="bench",
        classes=tuple(map(str, range(10))),
        input=ImageForm(mode="RGB", height=load.side, width=load.side, mean=(0.5,) * 3, std=(0.25,) * 3),
        network=NetworkChoice(split=split),
        method="fedcg",
        params={},
        rounds=1,
        seed=0,
        upload=(Part.CLASSIFIER,),
        report=(ReportField.EXAMPLES,),
        layouts={},
    )
    stream = torch.Generator().manual_seed(0)
    parts = {part: weights_of(build_part(spec, part, stream)) for part in (Part.EXTRACTOR, Part.CLASSIFIER)}
    eager = personal_model(spec, parts)
    pictures = list(np.random.default_rng(0).integers(0, 256, (load.images, load.side, load.side, 3), dtype=np.uint8))

    def with_torch() -> None:
        with torch.inference_mode():
            for picture in pictures:
                eager(normalise(torch.from_numpy(picture)[None].permute(0, 3, 1, 2), spec.image)).softmax(1)

    with tempfile.TemporaryDirectory(prefix="fedcg-bench-") as folder:
        package_personal(spec, parts, Path(folder), round_number=0)
        model = Model.load(Path(folder), threads=1)

        def with_onnxruntime() -> None:
            for picture in pictures:
                model.predict([picture])

        announce(f"{split}: {load.repeats} x {load.images} images one by one, eager torch and onnxruntime in turn")
        runs = [(_seconds(with_torch), _seconds(with_onnxruntime)) for _ in range(load.repeats + 1)][1:]  # one warms up
        announce(f"{split}: {load.callers} callers, and one, in turn")
        served = [_served(Path(folder), _png(pictures[0]), load) for _ in range(load.repeats)]
    return {
        "eager_ms": round(median(run[0] for run in runs) / load.images * 1000, 4),
        "onnxruntime_ms": round(median(run[1] for run in runs) / load.images * 1000, 4),
        "speedup_vs_eager": round(median(run[0] / run[1] for run in runs), 2),
        **{name: round(median(run[name] for run in served), 3) for name in served[0]},
    }


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _png(picture: Pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def _served(model: Path, image: bytes, load: Load) -> dict[str, float]:
    with _serving(model) as (process, port, ready_s):
        asyncio.run(_ask(port, image, load.callers, load.callers))  # warms up
        many = asyncio.run(_ask(port, image, load.callers, load.requests))
        one = asyncio.run(_ask(port, image, 1, load.requests // 10))
        rss_mb = psutil.Process(process.pid).memory_info().rss / 1e6
    found = {"ready_s": ready_s, "rss_mb": rss_mb}
    for name, seconds in (("one_caller", one), ("callers", many)):
        cuts = np.percentile(seconds, (50, 99)) * 1000
        found |= {f"{name}_p50_ms": float(cuts[0]), f"{name}_p99_ms": float(cuts[1])}
    return found


@contextmanager
def _serving(model: Path) -> Iterator[tuple[subprocess.Popen[str], int, float]]:
    """`fedcg infer serve` on a free port, and the seconds from its start until /readyz answered 200; ended by SIGTERM."""
    started = time.perf_counter()
    command = module_command("fedcg", "infer", "serve", "--model", model, "--port", 0, "--threads", "1")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)$", process.stdout.readline().strip())
            while found and not _is_ready(int(found[1])) and time.perf_counter() - started < _START_S:
                time.sleep(0.005)
            if found is None or not _is_ready(int(found[1])):
                raise ServingError(f"`{' '.join(command)}` is not ready after {_START_S:g} s; run it to see why")
            yield process, int(found[1]), time.perf_counter() - started
            process.send_signal(signal.SIGTERM)
            process.wait(_START_S)
        finally:
            process.kill()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False


async def _ask(port: int, image: bytes, callers: int, requests: int) -> list[float]:
    """Seconds of each request, of so many callers with a connection each."""
    head = (
        f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(image)}\r\n\r\n"
    )
    seconds: list[float] = []
    left = iter(range(requests))

    async def caller() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in left:
            began = time.perf_counter()
            writer.write(head.encode() + image)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(answer)
            await reader.readexactly(int(length[1]) if length else 0)
            if answer[9:12] != b"200":
                raise ServingError(
                    f"a request got {answer[9:12].decode()}: the server is not able to take {callers} callers"
                )
            seconds.append(time.perf_counter() - began)
        writer.close()

    try:
        await asyncio.gather(*(caller() for _ in range(callers)))
    except (OSError, EOFError) as error:
        raise ServingError(f"the server ended a connection before its answer: {error}") from error
    return seconds
