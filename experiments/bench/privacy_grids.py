"""Grids of simulated and audited federations for `fedcg bench privacy`: runs each setting as a user would type it, and shows the records as a Markdown table."""

import json
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import tomllib
import typer

from experiments.errors import RunError
from experiments.record import bench_record, write_record
from experiments.simulation.recorded_updates import REAL
from fedcg.child_python import module_command
from fedcg.errors import BadInputError


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
            write_record(record, path)
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
        rounds = _value_of_option(options, "--rounds") or str(grid.rounds)
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


def _value_of_option(options: Sequence[str], name: str) -> str | None:
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


Record = Mapping[str, Any]
_SCALE = {"share": 100.0}


def summary(records: Sequence[Record]) -> Iterator[str]:
    """Per cell the accuracy, and of every figure the strongest setting that a real attacker can have: value, and gain in brackets.

    Means over seeds with their standard deviation; `*`: from the gradient of one batch, which is not sent; `?`: a positive control failed.
    """
    names = list(dict.fromkeys(figure["name"] for record in records for figure in _figures(record)))
    yield f"| run | accuracy, % | after the download, % | ε | {' | '.join(names)} |"
    yield "|---" * (len(names) + 4) + "|"
    for cell, of_cell in _by(records, _cell).items():
        columns = [_mean([record[name] for record in of_cell], 100.0) for name in ("accuracy", "accuracy_after")]
        columns.append(_mean([record["epsilon"] for record in of_cell], 1.0))
        yield f"| {cell} | {' | '.join([*columns, *(_strongest_cell(of_cell, name) for name in names)])} |"


def _strongest_cell(records: Sequence[Record], name: str) -> str:
    found = [figure for record in records if (figure := strongest(record, name)) is not None]
    if not found:
        return "-"
    scale = _SCALE.get(found[0]["unit"], 1.0)
    value, gain = (_mean([one[field]["value"] for one in found], scale) for field in ("value", "gain"))
    attacks = [attack for record in records for attack in record["attacks"] if _has(attack, name)]
    controls = [one for attack in attacks for one in attack["controls"] if one.get("figure", "") in ("", name)]
    doubt = "" if all(one["passed"] for one in controls) else " ?"
    return f"{value} ({gain}){'' if found[0]['is_of_update'] else ' *'}{doubt}"


def _has(attack: Mapping[str, Any], name: str) -> bool:
    return any(figure["name"] == name for figure in attack["figures"])


def _cell(record: Record) -> str:
    return f"{record['row']}, {record['column']}".rstrip(", ")


def strongest(record: Record, name: str) -> Mapping[str, Any] | None:
    """The setting of a figure with the largest gain that a real attacker can have, on the update itself where there is one."""
    possible = [one for one in _figures(record) if one["name"] == name and not one["is_ceiling"]]
    of_update = [one for one in possible if one["is_of_update"]]
    return max(of_update or possible, key=lambda one: one["gain"]["value"], default=None)


def _figures(record: Record) -> Iterator[Mapping[str, Any]]:
    return (figure for attack in record["attacks"] for figure in attack["figures"])


def _by(items: Sequence[Any], key: Any) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def _mean(values: Sequence[float | None], scale: float) -> str:
    there = [scale * value for value in values if value is not None]
    if not there:
        return "-"
    deviation = f" ± {stdev(there):.2g}" if len(there) > 1 else ""
    return f"{fmean(there):.3g}{deviation}"
