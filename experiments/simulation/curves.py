"""Curves of simulated runs: runs.csv, curves.csv and curves.png from the records of a folder; figures for trackers."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from experiments.demo.report import mean
from experiments.simulation.simulation_record import COLUMNS, label_of, read_records
from fedcg.files import READABLE, replace_durably

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedcg.learning.simulation.simulation import Simulation


RUNS_FILE, CURVES_FILE, PICTURE_FILE = "runs.csv", "curves.csv", "curves.png"
_ABOUT = ("name", "paper", "method", "variant", "seed", "data", "partition", "rounds")
_BYTES = ("up", "up_artifact")  # of one update: its encoded tensors, and the compressed file

Record = Mapping[str, Any]


def write_tables(folder: Path) -> None:
    """Write one line per run, and one line per run, client and round, for all records in the folder."""
    records = read_records(folder)
    means = sorted({name for record in records for name in record["mean"]})
    runs = (
        [
            *(record[name] for name in _ABOUT),
            *(record["mean"].get(name) for name in means),
            *(record["bytes"].get(name) for name in _BYTES),
            record["seconds"]["total"],
        ]
        for record in records
    )
    _write_csv(folder / RUNS_FILE, [*_ABOUT, *means, *(f"bytes_{name}" for name in _BYTES), "seconds"], runs)
    lines = (
        [record["name"], record["method"], record["variant"], record["seed"], client["id"], *values]
        for record in records
        for client in record["clients"]
        for values in zip(*(client["curve"][column] for column in COLUMNS), strict=True)
    )
    _write_csv(folder / CURVES_FILE, ["name", "method", "variant", "seed", "client", *COLUMNS], lines)


def _write_csv(path: Path, header: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    replace_durably(path, text.getvalue(), READABLE)


def draw_curves(folder: Path) -> None:
    """Plot the records of a folder into its picture; does nothing without records."""
    if records := read_records(folder):
        picture = io.BytesIO()
        drawn(records).savefig(picture, dpi=110, format="png")
        replace_durably(folder / PICTURE_FILE, picture.getvalue(), READABLE)


def drawn(records: Sequence[Record]) -> Figure:
    """Plot accuracy on the clients' own test images over rounds: one colour per method, local-only models dashed.

    A line is the mean over clients and seeds, its band the standard deviation over them. One panel per data set, partition
    and published setting.
    """
    panels: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        own = record["data"].removeprefix("program:")
        of_sites = f"the sites' own data ({own[:8]})" if own != record["data"] else ""
        panels[record["paper"] or of_sites or f"{own}, {record['partition']}"].append(record)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for panel, (title, some) in zip(axes, sorted(panels.items()), strict=True):
        _draw_panel(panel, some)
        panel.set_title(title)
    return figure


def _draw_panel(panel: Any, records: Sequence[Record]) -> None:
    by_label: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_label[label_of(record)].append(record)
    for index, (label, some) in enumerate(sorted(by_label.items())):
        for column, line in (("accuracy", "-"), ("local", "--")):
            rounds, means, spreads = mean_curve(some, column)
            if not rounds:
                continue
            panel.plot(rounds, means, line, color=f"C{index % 10}", label=label if line == "-" else None)
            if line == "-":
                low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
                high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
                panel.fill_between(rounds, low, high, color=f"C{index % 10}", alpha=0.15, linewidth=0)
    panel.set_xlabel("round")
    panel.set_ylabel("accuracy on own test images, %")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)
    panel.legend(title="dashed: local only", fontsize="small", title_fontsize="small")


def mean_curve(records: Sequence[Record], column: str) -> tuple[list[int], list[float], list[float]]:
    """Return (rounds, means, standard deviations) of a column over all clients of some runs, in percent; gaps are skipped."""
    values: dict[int, list[float]] = defaultdict(list)
    for record in records:
        for client in record["clients"]:
            curve = client["curve"]
            for number, value in zip(curve["round"], curve[column], strict=True):
                if value is not None:
                    values[number].append(100.0 * value)
    rounds = sorted(values)
    return rounds, [fmean(values[number]) for number in rounds], [pstdev(values[number]) for number in rounds]


def figures_of(now: Simulation) -> dict[str, float]:
    """Return the figures of the latest round for a tracker, by column of the curve and client, and means; empty if it was not measured."""
    latest = {name: curve[-1] for name, curve in now.curves.items() if curve and curve[-1].round == now.rounds}
    figures: dict[str, float] = {}
    for tag, name in [*COLUMNS.items()][1:]:  # the first one is the round
        of_clients = {f"{tag}/{client}": getattr(record, name) for client, record in latest.items()}
        of_clients[f"{tag}/mean"] = mean([*of_clients.values()])
        figures |= {label: value for label, value in of_clients.items() if value is not None}
    if now.global_accuracy and now.global_accuracy[-1][0] == now.rounds:
        figures["accuracy/global"] = now.global_accuracy[-1][1]
    return figures
