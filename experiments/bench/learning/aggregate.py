"""Does a merge take longer, or more memory, the more clients there are? One case per fresh process, so that peaks are its own.

Updates are initial weights with noise on them, on disk like a coordinator's; each is added before the next one arrives. What is
timed begins when the last update is there: its own teacher pass, then the merge.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fedcg.child_python import spawning
from fedcg.learning.aggregation.row_store import DirectorySpill
from fedcg.learning.method import Aggregator, RoundContext, Update
from fedcg.learning.networks.initial_weights import complete_spec, initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationPlan, FederationSpec, ImageForm, NetworkChoice, ParameterValue
from fedcg.wire.parts import Part

CLASSES = 10
_PERTURBATION = 0.05
_PROC = Path("/proc/self")


@dataclass(frozen=True)
class Case:
    """What is measured once.

    Attributes:
        method: its name.
        clients: how many updates are merged.
        generator: "conv" or "mlp"; split `lenet5`, 32x32 colour images.
        iterations: student steps; 0 takes the method's default (published) number.
        teachers: different sets of weights; a client whose weights had their teacher pass before brings its rows along, as after
            a restart, which saves the time of a bench that is not timed. The last client always has weights of its own.
        threads: of torch.
    """

    method: str
    clients: int
    generator: str
    iterations: int
    teachers: int
    threads: int


@dataclass(frozen=True)
class Measured:
    """The outcome of a case.

    Attributes:
        last_add_s: the last update's own teacher pass.
        finish_s: from there to the aggregate.
        peak_bytes: resident memory at its peak.
        growth_bytes: the same less what the process held before the first update.
    """

    case: Case
    last_add_s: float
    finish_s: float
    peak_bytes: int
    growth_bytes: int

    @property
    def seconds(self) -> float:
        """From the last update's arrival to the aggregate."""
        return self.last_add_s + self.finish_s


def measure(cases: Sequence[Case], repeats: int, announce: Callable[[Case], None]) -> list[Measured]:
    """Run every case `repeats` times, each in a process of its own, and in turn: other load on the machine hits all alike.

    The fastest run counts, for the others were held up, and the median of its memory.

    Args:
        cases: what to measure.
        repeats: runs of each.
        announce: called before each run.
    """
    runs: dict[Case, list[Measured]] = {case: [] for case in cases}
    for _ in range(repeats):
        for case in cases:
            announce(case)
            with ProcessPoolExecutor(max_workers=1, mp_context=spawning()) as pool:
                runs[case].append(pool.submit(run, case).result())
    return [_summary(some) for some in runs.values()]


def _summary(runs: Sequence[Measured]) -> Measured:
    fastest = min(runs, key=lambda one: one.seconds)
    peak, growth = (
        int(statistics.median(sizes))
        for sizes in ([one.peak_bytes for one in runs], [one.growth_bytes for one in runs])
    )
    return replace(fastest, peak_bytes=peak, growth_bytes=growth)


def ratios(measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Time and memory of each case over those of its method's case with the fewest clients."""
    found: dict[str, dict[str, float]] = {}
    for one in measured:
        peers = [other for other in measured if other.case.method == one.case.method]
        least = min(peers, key=lambda other: other.case.clients)
        if one is not least:
            found[f"{one.case.method}_{one.case.clients}_over_{least.case.clients}"] = {
                "time": round(one.seconds / least.seconds, 3),
                "peak_memory": round(one.peak_bytes / least.peak_bytes, 3),
                "memory_growth": round(one.growth_bytes / max(least.growth_bytes, 1), 3),
            }
    return found


def as_json(measured: Measured) -> dict[str, object]:
    """A case and its figures, flat."""
    return {
        **asdict(measured.case),
        "seconds": round(measured.seconds, 4),
        "last_add_s": round(measured.last_add_s, 4),
        "finish_s": round(measured.finish_s, 4),
        "peak_bytes": measured.peak_bytes,
        "growth_bytes": measured.growth_bytes,
    }


def run(case: Case) -> Measured:
    """One case in this process."""
    torch.set_num_threads(case.threads)
    with tempfile.TemporaryDirectory(prefix="fedcg-bench-") as folder:
        spec = spec_of(case.method, case.generator, case.iterations)
        _write_updates(spec, Path(folder), case.teachers)
        spill = DirectorySpill(Path(folder) / "spill")
        updates = {f"client-{number:04}": _loader(spec, Path(folder), case, number) for number in range(case.clients)}
        *early, last = updates
        _warm_up(case, updates[last], Path(folder) / "warm-up")
        before = _restart_peak()
        merge = _aggregator(spec, spill)
        seen: dict[int, str] = {}
        for number, client in enumerate(early):
            first = seen.setdefault(number % case.teachers, client)
            if first != client:
                spill.put(client, spill.get(first))
            merge.add(updates[client]())
        started = time.perf_counter()
        merge.add(updates[last]())
        added = time.perf_counter()
        merge.finish(updates)
        finished = time.perf_counter()
        peak = _status_bytes("VmHWM")
    return Measured(case, added - started, finished - added, peak, peak - before)


def spec_of(method: str, generator: str, iterations: int) -> FederationSpec:
    """A federation on CIFAR-10's form of images with the method's published server settings."""
    params: dict[str, ParameterValue] = {"server_iterations": iterations} if iterations else {}
    plan = FederationPlan(
        federation="bench",
        classes=tuple(f"class-{number}" for number in range(CLASSES)),
        image=ImageForm(mode="RGB", height=32, width=32, mean=(0.5,) * 3, std=(0.5,) * 3),
        network=NetworkChoice(split="lenet5", generator=generator),
        method=method,
        params=params,
        rounds=1,
        seed=0,
    )
    return complete_spec(plan)


def _aggregator(spec: FederationSpec, spill: DirectorySpill) -> Aggregator:
    method = get_method(spec.method)
    server = method.init_server(spec, initial_parts(spec, b"bench"))
    return method.aggregator(server, RoundContext(spec, 1, 1, 1, Streams(b"bench").at(spec.federation, 1, 1)), spill)


def _write_updates(spec: FederationSpec, folder: Path, teachers: int) -> None:
    initial = initial_parts(spec, b"bench")
    for number in range(teachers + 1):
        stream = torch.Generator().manual_seed(number)
        for part in get_method(spec.method).shared_up:
            noisy = {
                name: tensor + _PERTURBATION * torch.randn(tensor.shape, generator=stream) * tensor.abs()
                if tensor.is_floating_point()
                else tensor
                for name, tensor in initial[part].items()
            }
            save_file(noisy, folder / f"{part.value}-{number}.safetensors")


def _loader(spec: FederationSpec, folder: Path, case: Case, number: int) -> Callable[[], Update]:
    """Loads one client's update anew at every call; each client has twice as many images of two classes as of the others."""
    weights = case.teachers if number == case.clients - 1 else number % case.teachers
    counts = tuple(100 if label in {number % CLASSES, (number + 1) % CLASSES} else 50 for label in range(CLASSES))
    return partial(_load, spec, folder, weights, f"client-{number:04}", counts)


def _load(spec: FederationSpec, folder: Path, weights: int, client: str, counts: tuple[int, ...]) -> Update:
    parts: dict[Part, dict[str, torch.Tensor]] = {
        part: load_file(folder / f"{part.value}-{weights}.safetensors") for part in get_method(spec.method).shared_up
    }
    return Update(client, parts, sum(counts), counts)


def _warm_up(case: Case, load: Callable[[], Update], folder: Path) -> None:
    """What happens once in a process (loading kernels, starting threads) belongs to no merge."""
    merge = _aggregator(spec_of(case.method, case.generator, 2), DirectorySpill(folder))
    update = load()
    merge.add(update)
    merge.finish({update.client: load})


def _restart_peak() -> int:
    """Resident bytes now; where the kernel allows it, the peak is counted from here on."""
    with contextlib.suppress(OSError):  # not allowed: the peak of the warm-up counts too
        (_PROC / "clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    """A figure of /proc/self/status."""
    lines = (_PROC / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024
