"""Runs one setting of a grid: a simulation that records its updates, and an audit of one client's last update, as a user would type them."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomllib
import typer

from experiments.errors import RunError
from experiments.record import bench_record
from experiments.simulation.recorded_updates import REAL
from fedcg.errors import BadInputError
from fedcg.files import READABLE, replace_durably
from fedcg.worker_process import module_command


@dataclass(frozen=True)
class Sizes:
    """What decides how long a grid takes.

    Attributes:
        data: as for `fedcg simulate --data`.
        images: training images of a client, at most.
        effort: of the audits; `processes`: attacks at once.
    """

    data: str
    clients: int = 4
    images: int = 500
    epochs: int = 5
    effort: str = "quick"
    processes: int = 2


@dataclass(frozen=True)
class Grid:
    """A table of runs, as `grids.toml` explains it; options are words of a command line."""

    title: str
    common: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, tuple[str, ...]]
    attacks: tuple[str, ...] = ()
    rounds: int = 3
    colluder: bool = False

    def cells(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """(row, column, options) of every run."""
        for row, of_row in self.rows.items():
            for column, of_column in self.columns.items():
                yield row, column, (*self.common, *of_row, *of_column)


def grids() -> dict[str, Grid]:
    """All grids, by name."""
    content = tomllib.loads(files(__package__).joinpath("grids.toml").read_text(encoding="utf-8"))
    words = content.pop("words")

    def options(text: str) -> tuple[str, ...]:
        return tuple(shlex.split(text.format_map(words)))

    def named(entry: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        return {name: options(text) for name, text in entry.items()}

    return {
        name: Grid(
            title=entry["title"],
            common=options(entry["common"]),
            rows=named(entry["rows"]),
            columns=named(entry.get("columns", {"": ""})),
            attacks=tuple(entry.get("attacks", ())),
            rounds=entry.get("rounds", 3),
            colluder=entry.get("colluder", False),
        )
        for name, entry in content.items()
    }


def chosen_grid(name: str, rows: Sequence[str]) -> Grid:
    """A grid, or only these rows of it.

    Raises:
        BadInputError: there is none, or it has no such row.
    """
    known = grids()
    if name not in known:
        raise BadInputError(f"no grid {name!r}; there are {', '.join(known)}")
    grid = known[name]
    unknown = sorted(set(rows) - grid.rows.keys())
    if unknown:
        raise BadInputError(f"grid {name} has no row {', '.join(unknown)}; it has {', '.join(grid.rows)}")
    return replace(grid, rows={row: grid.rows[row] for row in rows}) if rows else grid


def run_grid(
    name: str, grid: Grid, sizes: Sizes, seeds: Sequence[int], out: Path, *, only_show: bool
) -> tuple[list[dict[str, Any]], int]:
    """The records of a grid, and how many runs failed; each record is a file, and one that is there is not made again."""
    records, failed = [], 0
    jobs = [(seed, *cell) for seed in seeds for cell in grid.cells()]
    for number, (seed, row, column, options) in enumerate(jobs):
        path = (
            out / name / f"{'-'.join(filter(None, (Path(sizes.data).name, _slug(row), _slug(column))))}-seed{seed}.json"
        )
        if not path.is_file() and not only_show:
            typer.echo(f"{number + 1} of {len(jobs)}: {row} {column} seed {seed}".replace("  ", " "), err=True)
            try:
                record = {"grid": name, "row": row, "column": column, **run_cell(grid, options, sizes, seed)}
            except RunError as error:
                failed += 1
                typer.echo(f"failed: {error}", err=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_durably(path, json.dumps(record, indent=1) + "\n", READABLE)
        if path.is_file():
            records.append(json.loads(path.read_text(encoding="utf-8")))
    return records, failed


def _slug(name: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


def run_cell(grid: Grid, options: Sequence[str], sizes: Sizes, seed: int) -> dict[str, Any]:
    """The record of one setting with one seed: accuracy, epsilon, and every figure of the audit.

    Raises:
        RunError: a command failed; its last lines are in the message.
    """
    with TemporaryDirectory(prefix="fedcg-privacy-") as place:
        out = Path(place)
        rounds = _value(options, "--rounds") or str(grid.rounds)
        simulated = [
            "simulate", "--data", sizes.data, "--clients", str(sizes.clients), "--images-per-client", str(sizes.images),
            "--local-epochs", str(sizes.epochs), "--rounds", rounds, *options, "--seeds", str(seed), "--no-shadow",
            "--no-plot", "--no-tensorboard", "--evaluate-every", rounds, "--keep-updates", rounds, "--workers", str(sizes.processes),
        ]  # fmt: skip
        (run,) = _result([*simulated, "--out", str(out / "runs")])["runs"]
        (recording,) = (out / "runs" / "updates").iterdir()
        truth = recording / "truth"
        images = min((truth / REAL).glob("*.npz"), default=None) or min(truth.glob("*.npz"))
        client = images.stem  # the first one, however many digits the names of so many clients have
        audited = [
            "audit", "run", "--updates", str(recording), "--client", client, "--data", str(images),
            "--private", str(truth / f"{client}-round-{rounds}.safetensors"), "--auxiliary", str(recording / "auxiliary.npz"),
            "--effort", sizes.effort, "--seed", str(seed), "--processes", str(sizes.processes),
            *(("--attacks", ",".join(grid.attacks)) if grid.attacks else ()),
            *(("--cohort", str(recording / "initial.json")) if grid.colluder else ()),
        ]  # fmt: skip
        report = _result([*audited, "--out", str(out / "audit")])
        return {
            **bench_record("bench privacy"),
            "commands": [_published(words, sizes.data, out) for words in (simulated, audited)],
            "seed": seed,
            "accuracy": run["mean"]["accuracy_personal"],
            "accuracy_after": run["mean"]["accuracy_after"],
            "accuracy_global": run["mean"]["global_accuracy_last"],
            "epsilon": max((client["epsilon"] for client in run["clients"] if "epsilon" in client), default=None),
            "sent": report["subject"]["sent"],
            "attacks": report["attacks"],
        }


def _value(options: Sequence[str], name: str) -> str | None:
    return options[options.index(name) + 1] if name in options else None


def _published(words: Sequence[str], data: str, out: Path) -> str:
    """A command without paths of this machine."""
    text = shlex.join(["fedcg", *words]).replace(data, Path(data).name)
    return text.replace(f"{out}/runs/", "").replace(str(out), "OUT")


def _result(words: Sequence[str]) -> Any:
    """What a command of ours prints with `--json`."""
    done = subprocess.run(module_command("fedcg", *words, "--json"), capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise RunError(f"fedcg {shlex.join(words)}: exit code {done.returncode}\n{lines[-1] if lines else ''}\n{last}")
    return json.loads(lines[-1])["data"]
