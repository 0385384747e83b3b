"""Runs a batch: in this process, in a pool of processes or on a Ray cluster.

Shows progress, writes files next to the records, and prints the results at the end. Uses torch; the command imports it
at run time.
"""

import os
import re
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from experiments.demo.report import percent
from experiments.errors import OptionError
from experiments.simulation.batch import STATE_FOLDER, Batch, PlannedRun, RunSetting, has_record
from experiments.simulation.curves import draw_curves, figures_of, write_tables
from experiments.simulation.simulation_record import label_of
from experiments.simulation.single_run import FailedRun, Given, Runs, Simulator, write_failures
from fedcg.errors import told
from fedcg.files import file_sha256, replace_durably
from fedcg.learning.simulation.simulation import Simulation
from fedcg.learning.simulation.tasks import Runner
from fedcg.tracking import TrackedRun, Tracking


def default_workers(clients: int, device: str) -> int:
    """Return one per CPU of this process, at most one per client; one for an accelerator, which processes would have to share."""
    return min(len(os.sched_getaffinity(0)), clients) if device == "cpu" else 1


@contextmanager
def open_workers(workers: int, threads: int) -> Iterator[Simulator]:
    """Yield what runs a simulation on this machine; its processes are ended at the end of the block.

    Args:
        workers: number of processes; 1: this process.
        threads: torch threads of each.
    """
    from experiments.parallel.pool_runner import PoolRunner
    from fedcg.learning.simulation.simulation import simulate
    from fedcg.learning.simulation.tasks import SerialRunner

    runner: Runner = SerialRunner() if workers == 1 else PoolRunner(workers, threads)
    try:
        yield partial(simulate, runner=runner)
    finally:
        runner.close()


@contextmanager
def open_ray_workers(address: str, settings: list[RunSetting], announce: Callable[[str], None]) -> Iterator[Simulator]:
    """Yield what runs a simulation on a Ray cluster, which is disconnected at the end of the block.

    Args:
        address: as for `experiments.parallel.ray_cluster.open_cluster`.
        settings: of the runs to do.
        announce: prints a line for the operator.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        OptionError: the cluster can't be used.
    """
    from experiments.parallel.ray_cluster import open_cluster, slots
    from fedcg.learning.simulation.simulation import simulate

    with open_cluster(address, announce) as met:
        from experiments.parallel.ray_runner import RayRunner

        threads = max(setting.threads for setting in settings)
        if slots(threads) == 0:
            raise OptionError(f"--threads {threads}: the Ray cluster has fewer CPUs")
        yield partial(simulate, runner=RayRunner(threads, met))


_COLUMNS = {
    "own test\npersonal": "accuracy_personal",
    "local\nonly": "accuracy_local",
    "after\ndownload": "accuracy_after",
    "common\npersonal": "accuracy_common_personal",
    "global\nlast": "global_accuracy_last",
}


@dataclass(eq=False)
class BatchRunner:
    """Runs all runs of a batch in its folder.

    Args:
        folder: of the batch.
        simulator: runs a simulation.
        console: for progress and messages.
        tracks: the trackers that receive every run (`fedcg.tracking`).
        picture: whether curves.png is drawn.
        given: the clients of all runs (`Runs`).

    Attributes:
        runs: the runs of the folder.
    """

    folder: Path
    simulator: Simulator
    console: Console
    _: KW_ONLY
    tracks: Sequence[str] = ()
    picture: bool = True
    given: Given | None = None
    _tracked: dict[str, list[Tracking]] = field(default_factory=dict, init=False)
    _counted_rounds: dict[str, int] = field(
        default_factory=dict, init=False
    )  # rounds of a run that are known to the bar

    def __post_init__(self) -> None:
        self.runs = Runs(self.folder, self.simulator, self._after_round, self._print, self.given)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
            speed_estimate_period=3600.0,  # rounds take minutes, and the estimate should cover several
        )
        self._task = self._bar.add_task("", total=0)

    def run(self, batch: Batch, *, force: bool = False) -> tuple[list[dict[str, Any]], list[FailedRun]]:
        """Run all unfinished runs.

        Args:
            batch: the runs.
            force: whether to repeat finished runs too.

        Returns:
            The records of the new runs, and the failed runs.

        Raises:
            OptionError: a record of another setting has the same name; nothing was run.
        """
        if force:
            for planned in batch.runs:
                self.runs.forget(planned)
        done = [planned for planned in batch.runs if has_record(self.folder, planned)]
        todo = [planned for planned in batch.runs if planned not in done]
        for planned in done:
            is_lacking = planned.keep_updates and not self.runs.recording(planned).exists()
            note = ", without a recording of its updates; --force repeats it" if is_lacking else ""
            self._print(f"{planned.setting.name}: already done{note}")
        self._counted_rounds = {planned.setting.name: self.runs.done_rounds(planned) for planned in todo}
        total = sum(planned.setting.rounds for planned in todo)
        self._bar.update(self._task, total=total, completed=sum(self._counted_rounds.values()))
        with self._bar:
            outcomes = [self._one(planned) for planned in todo]
        records = [outcome for outcome in outcomes if not isinstance(outcome, FailedRun)]
        failed = [outcome for outcome in outcomes if isinstance(outcome, FailedRun)]
        write_failures(self.folder, failed)
        return records, failed

    def _one(self, planned: PlannedRun) -> dict[str, Any] | FailedRun:
        setting = planned.setting
        self._bar.update(self._task, description=_shown(setting.name))
        try:
            tracked = self._tracked_run(planned) if self.tracks else None
            self._tracked[setting.name] = [Tracking(track, tracked) for track in self.tracks if tracked]
            record = self.runs.run(planned)
            files = [{"file": file.name, "sha256": file_sha256(file)} for file in self.runs.files(planned)]
            clients = [
                {"client": one["id"], **{name: one[name] for name in record["mean"] if name in one}}
                for one in record["clients"]
            ]
            for tracking in self._tracked[setting.name]:
                tracking.finish({"clients": clients, "files": files})
        except Exception as error:  # noqa: BLE001 - one failed run does not stop the batch; it is recorded and printed
            trace = self.folder / STATE_FOLDER / f"{setting.name}.traceback.txt"
            trace.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            trace.write_text(traceback.format_exc())
            self._print(f"{setting.name}: failed: {told(error)} (where: {trace})")
            return FailedRun(setting.name, told(error), error)
        finally:
            for tracking in self._tracked.pop(setting.name, []):
                tracking.close()
            self._bar.update(self._task, advance=setting.rounds - self._counted_rounds[setting.name])
        self._print(f"{setting.name}: {_figures(record)}")
        write_tables(self.folder)
        if self.picture:
            draw_curves(self.folder)
        return record

    def _after_round(self, planned: PlannedRun, now: Simulation) -> None:
        name, figures = planned.setting.name, figures_of(now)
        for tracking in self._tracked[name] if figures else ():
            tracking.add(now.rounds, figures)
        self._counted_rounds[name] += 1
        self._bar.update(self._task, advance=1, description=f"{_shown(name)}, round {now.rounds}")
        if not self.console.is_terminal:
            self._print(f"{name}: round {now.rounds}/{planned.setting.rounds}{_so_far(figures)}")

    def _tracked_run(self, planned: PlannedRun) -> TrackedRun:
        """Return the run for trackers; a resumed run keeps its identity."""
        setting, kept = planned.setting, self.folder / STATE_FOLDER / f"{planned.setting.name}.tracked"
        is_continued = self.runs.done_rounds(planned) > 0 and kept.exists()
        if not is_continued:
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_durably(kept, uuid.uuid4().hex)
        return TrackedRun(setting.name, kept.read_text(), setting.published, is_continued)

    def _print(self, line: str) -> None:
        self.console.print(_shown(line), markup=False, highlight=False, soft_wrap=True)


def _shown(name: str) -> str:
    """Return a run's name without the digest of a program's clients."""
    return re.sub(r"^program-[0-9a-f]{16}-", "", name)


def _figures(record: Mapping[str, Any]) -> str:
    mean, seconds = record["mean"], record["seconds"]["total"]
    known = [f"{label} {percent(mean[name])}" for label, name in _measured(mean)]
    parts = [
        f"accuracy in %: {', '.join(known)}",
        *_spent(record),
        f"{record['rounds']} rounds in {seconds:.0f} s",
        *_troubles(record),
    ]
    return "; ".join(parts)


def _spent(record: Mapping[str, Any]) -> Iterator[str]:
    """Return the largest epsilon of any client, with DP-SGD."""
    spent = [client["epsilon"] for client in record["clients"] if client.get("epsilon") is not None]
    if spent:
        yield f"epsilon at most {max(spent):.2f} at delta {record['setting']['privacy']['dp_sgd']['delta']:g}"


def _so_far(figures: Mapping[str, float]) -> str:
    """Return mean accuracies of the latest round; empty if it was not measured."""
    labels = {"accuracy/mean": "own test personal", "local/mean": "local only"}
    means = [f"{label} {percent(figures[name])}" for name, label in labels.items() if name in figures]
    return f": accuracy in %: {', '.join(means)}" if means else ""


def _troubles(record: Mapping[str, Any]) -> Iterator[str]:
    """Return the limitations of the figures; the record has all of them, with reasons."""
    clients = record["clients"]
    for name, what in (("failures", "local rounds"), ("shadow_failures", "shadows' rounds")):
        failures = [failure for client in clients for failure in client[name]]
        if failures:
            yield f"{what} reverted: {len(failures)} ({failures[0]['reason']})"
    warnings = [warning for client in clients for warning in client.get("warnings", ())]
    if warnings:
        yield f"warnings: {len(warnings)} ({warnings[0]['reason']})"
    if record["server_failures"]:
        yield f"rounds without a merge: {len(record['server_failures'])} ({record['server_failures'][0]['reason']})"
    if record["skipped"]:
        yield f"images skipped: {len(record['skipped'])}"


def _measured(mean: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(label.replace("\n", " "), name) for label, name in _COLUMNS.items() if mean[name] is not None]


def table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return the runs as a table: means over clients, in percent. It fits 80 columns: only a run's name is wrapped."""
    result = Table(title="mean over clients; accuracy in %", box=box.SIMPLE_HEAD)
    result.add_column("run", overflow="fold")
    for label in (*_COLUMNS, "below\nlocal", "seconds"):
        result.add_column(label, justify="right", no_wrap=True)
    for record in records:
        below = [client["below_local"] for client in record["clients"] if client["below_local"] is not None]
        name = f"{label_of(record)} seed {record['seed']}"
        figures = (percent(record["mean"][figure]) for figure in _COLUMNS.values())
        counted = f"{sum(below)} of {len(below)}" if below else "-"
        result.add_row(name, *figures, counted, f"{record['seconds']['total']:.0f}")
    return result
