"""Figures of our runs over seeds: the lines of a row, the best of a search, clients below local-only, and update size against accuracy.

All are means over clients in percent: `personal` is accuracy_personal and `after` accuracy_after, at each client's best
validation round; `local` and `last` are accuracy_last, `download` is the last download, `global` global_accuracy_last.
`adr` is the share of global accuracy that a row loses, relative to the reference row of the same seed.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from experiments.papers.catalogue import Preset, Published, Row, row_fields
from experiments.papers.plan import variant_text
from experiments.papers.records import RunRecord
from experiments.simulation.batch import PARAM_OPTIONS
from fedcg.learning.spec import ParameterValue
from fedcg.values import Value

ADR = "adr"
FIELDS = {
    "personal": "accuracy_personal",
    "after": "accuracy_after",
    "download": "download_last",
    "last": "accuracy_last",
    "local": "accuracy_last",
    "global": "global_accuracy_last",
    "deployed": "accuracy_deployed",
    "ema": "accuracy_ema",
    ADR: "global_accuracy_last",
}
_OF_LAST_ROUND = frozenset({"download", "local", "global", ADR})
FAR_STDS = 2.0
# Differences that only affect rows with a generator, or with public images: they mark a row, not the whole table.
_ROW_FIELDS = frozenset({"generator", "discriminator", "noise_dim", "public_images", "codec", "aggregate_codec"})
_PARAMS = "params."  # prefix of a parameter's name in the list of differences
Differences = Mapping[str, tuple[object, object]]


class Figure(Value):
    """Mean and standard deviation over seeds, in percent; `std` is None for one seed."""

    mean: float
    std: float | None
    seeds: int


class Line(Value):
    """Our runs of one row.

    Attributes:
        choice: the best searched values, by validation accuracy; `tried` of `offered` values have runs.
        reduced: differences from the published setting that only affect this row.
        by_seed: measure to seed to percent.
        figures: measure to mean over seeds.
        after: accuracy with the round's aggregate loaded, at the round of the first measure; None if the aggregate has
            no measured part.
        losing: number of `compared` clients, over all seeds, below their local-only model.
        gains: points over local-only for each client, mean over seeds.
        transfer: gain of the deployed models over local-only ones; None if the records lack it.
        failures: local rounds that diverged and were reverted.
        unmerged: rounds without a merge, over all seeds.
        collapsed: number of runs whose defence collapsed; one is enough to leave the row's orders undecided.
        from_shadow: whether the figures come from the other runs' local-only models.
    """

    row: Row
    choice: str
    tried: int
    offered: int
    reduced: Differences
    by_seed: Mapping[str, Mapping[int, float]]
    figures: Mapping[str, Figure]
    losing: int
    compared: int
    gains: Mapping[str, float]
    failures: int
    unmerged: int = 0
    after: Figure | None = None
    collapsed: int = 0
    from_shadow: bool = False


def is_far(ours: Figure, paper: Published) -> bool:
    """Whether our mean is more than two of the paper's standard deviations from its mean; False if it prints none."""
    return paper.std is not None and abs(ours.mean - paper.mean) > FAR_STDS * paper.std


def row_of(run: RunRecord, preset: Preset) -> tuple[Row, str] | None:
    """Return the row of its preset for a run, and its searched values as text; None if no row matches."""
    for row in preset.rows.values():
        if row.home != (preset.base, row.key) or row.method != run.method:
            continue
        choice = {key: _searched(run, key) for key in row.search}
        if run.variant == variant_text(row.variant, choice):
            return row, variant_text("", choice)
    return None


def figure_of(values: Iterable[float]) -> Figure | None:
    """Return mean and sample standard deviation; None without values."""
    known = list(values)
    return Figure(fmean(known), stdev(known) if len(known) > 1 else None, len(known)) if known else None


def lines_of(row: Row, mine: Sequence[tuple[RunRecord, str]], measures: Sequence[str]) -> list[Line]:
    """Return our runs of a row, one line per set of differences that only affect this row.

    Args:
        row: the row of the table.
        mine: its runs, each with the searched values as text.
        measures: names of the figures.
    """
    groups: dict[str, dict[str, dict[int, RunRecord]]] = defaultdict(lambda: defaultdict(dict))
    for run, choice in sorted(mine, key=lambda pair: (pair[0].date, pair[0].file)):
        groups[key_of(row_differences(run))][choice][run.seed] = run  # the last of repeated runs counts
    offered = 1
    for values in row.search.values():
        offered *= len(values)
    return [_line(row, groups[key], offered, measures) for key in sorted(groups, key=lambda key: (key != "{}", key))]


def _line(row: Row, by_choice: Mapping[str, Mapping[int, RunRecord]], offered: int, measures: Sequence[str]) -> Line:
    is_last = measures[0] in _OF_LAST_ROUND
    choice = _winner(by_choice, last=is_last)
    runs = by_choice[choice]
    clients = [client for run in runs.values() for client in run.clients]
    gains: dict[str, list[float]] = defaultdict(list)
    for client in clients:
        if client.accuracy_personal is not None and client.accuracy_local is not None:
            gains[client.id].append(100.0 * (client.accuracy_personal - client.accuracy_local))
    by_seed = {measure: _by_seed(runs, FIELDS[measure]) for measure in measures}
    after = [run.after_download(last=is_last) for run in runs.values()]
    return Line(
        row=row,
        choice=choice,
        tried=len(by_choice),
        offered=offered,
        reduced=row_differences(next(iter(runs.values()))),
        by_seed=by_seed,
        figures=figures_of(by_seed),
        losing=sum(client.below_local is True for client in clients),
        compared=sum(client.below_local is not None for client in clients),
        gains={name: fmean(values) for name, values in sorted(gains.items())},
        failures=sum(len(client.failures) for client in clients),
        unmerged=sum(len(run.server_failures) for run in runs.values()),
        after=figure_of(value for value in after if value is not None),
        collapsed=sum(run.collapsed for run in runs.values()),
    )


def _winner(by_choice: Mapping[str, Mapping[int, RunRecord]], *, last: bool) -> str:
    """Return the values with the best mean validation accuracy, among the searched values with the most seeds."""
    most = max(len(runs) for runs in by_choice.values())

    def validation(choice: str) -> float:
        figures = [run.validation(last=last) for run in by_choice[choice].values()]
        known = [figure for figure in figures if figure is not None]
        return fmean(known) if known else float("-inf")

    return max((choice for choice, runs in by_choice.items() if len(runs) == most), key=validation)


def _by_seed(runs: Mapping[int, RunRecord], field: str) -> dict[int, float]:
    figures = {seed: run.figure(field) for seed, run in sorted(runs.items())}
    return {seed: figure for seed, figure in figures.items() if figure is not None}


def figures_of(by_seed: Mapping[str, Mapping[int, float]]) -> dict[str, Figure]:
    """Return means over seeds of every measure with values."""
    figures = {measure: figure_of(values.values()) for measure, values in by_seed.items()}
    return {measure: figure for measure, figure in figures.items() if figure is not None}


def _searched(run: RunRecord, key: str) -> ParameterValue:
    value = run.params.get(key, run.setting.get(key))
    return value if isinstance(value, (bool, int, float, str)) else None


def with_degradation(lines: Sequence[Line], reference: str) -> list[Line]:
    """Return the lines with accuracies as the loss relative to the reference's first line, in percent (ADR)."""
    whole = next((line.by_seed for line in lines if line.row.key == reference), {}).get(ADR, {})

    def lost(line: Line) -> Line:
        accuracies = {seed: value for seed, value in line.by_seed[ADR].items() if whole.get(seed)}
        by_seed = {**line.by_seed, ADR: {seed: 100 * (1 - value / whole[seed]) for seed, value in accuracies.items()}}
        return replace(line, by_seed=by_seed, figures=figures_of(by_seed))

    return [lost(line) for line in lines]


def _concerns_row(name: str, run: RunRecord) -> bool:
    return (
        name in _ROW_FIELDS
        or name in row_fields(run.paper or "")
        or (name.startswith(_PARAMS) and name.removeprefix(_PARAMS) not in PARAM_OPTIONS.values())
    )


def table_differences(run: RunRecord) -> dict[str, tuple[object, object]]:
    """Return differences from the published setting that define another table."""
    return {name: pair for name, pair in run.reduced.items() if not _concerns_row(name, run)}


def row_differences(run: RunRecord) -> dict[str, tuple[object, object]]:
    """Return differences from the published setting that only affect the run's row: its parameters, generator and codecs."""
    return {name: pair for name, pair in run.reduced.items() if _concerns_row(name, run)}


def key_of(differences: Differences) -> str:
    """Return text that is equal for equal differences; `{}` for none."""
    return json.dumps(differences, sort_keys=True, default=list)
