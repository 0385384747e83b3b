"""Our runs compared with the published tables: one comparison per preset and budget, with a verdict on the papers' orders.

A run of `local` provides the local-only accuracies for all other runs of its table, budget, seed and learning rate.

A paper's order is tested with runs paired by seed, and undecided within the noise. Both runs of a pair have the same
split, initial weights and order of images, so common effects cancel.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from statistics import fmean, stdev

from scipy.special import stdtrit

from experiments.papers.catalogue import Claim, Preset, claims, presets
from experiments.papers.figures import (
    ADR,
    Differences,
    Line,
    figures_of,
    key_of,
    lines_of,
    row_of,
    table_differences,
    with_degradation,
)
from experiments.papers.records import ClientRecord, RunRecord
from fedcg.values import Value

_LOCAL = "local"
LEAST_SEEDS = 3
CRITERION = (
    f"An order is confirmed or refuted if the two-sided 95 % t interval of the difference per seed lies entirely on one side of 0, "
    f"with at least {LEAST_SEEDS} common seeds; otherwise it is undecided. `≈` is confirmed if that interval lies within ± the margin, "
    "refuted if it lies entirely outside. There is no correction for judging many orders at once."
)
_Key = tuple[str | None, str, str, int, str]


def beside_local(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs, with local-only accuracies for clients that were trained without a local-only model.

    A local-only model is trained exactly as in a run of `local`: same data, split, weights and streams, no aggregate.
    """
    alone: dict[_Key, dict[str, float]] = {}
    for run in sorted(runs, key=lambda run: (run.date, run.file)):
        if run.method == _LOCAL:
            figures = {client.id: client.accuracy_personal for client in run.clients}
            alone[_key(run)] = {name: figure for name, figure in figures.items() if figure is not None}
    return [run if run.method == _LOCAL else _compared(run, alone.get(_key(run), {})) for run in runs]


def _key(run: RunRecord) -> _Key:
    lr = run.params.get("lr", run.setting.get("lr"))
    return run.base, key_of(table_differences(run)), run.network.split, run.seed, str(lr)


def _compared(run: RunRecord, alone: dict[str, float]) -> RunRecord:
    return run.model_copy(update={"clients": [_beside(client, alone.get(client.id)) for client in run.clients]})


def _beside(client: ClientRecord, local: float | None) -> ClientRecord:
    if client.accuracy_local is not None or local is None or client.accuracy_personal is None:
        return client
    return client.model_copy(update={"accuracy_local": local, "below_local": client.accuracy_personal < local})


class Judgement(str, Enum):
    """The verdict of our runs on an order."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


class JudgedClaim(Value):
    """A verdict and its evidence.

    Attributes:
        seeds: number of seeds of both rows.
        difference: mean over seeds of higher - lower, in points; None without a common seed.
        half_width: half the width of its 95 % interval; None below two seeds.
    """

    judgement: Judgement
    seeds: int
    difference: float | None
    half_width: float | None


def judge(lower: Mapping[int, float], higher: Mapping[int, float], margin: float | None = None) -> JudgedClaim:
    """Judge `lower < higher`, or with a margin `lower ≈ higher`.

    Args:
        lower: accuracy in percent by seed.
        higher: likewise, for the other row.
        margin: difference in points up to which two rows count as about equal.
    """
    differences = [higher[seed] - lower[seed] for seed in sorted(lower.keys() & higher.keys())]
    count = len(differences)
    mean = fmean(differences) if differences else None
    if mean is None or count < 2:
        return JudgedClaim(Judgement.UNDECIDED, count, mean, None)
    half = float(stdtrit(count - 1, 0.975)) * stdev(differences) / math.sqrt(count)
    if count < LEAST_SEEDS:
        return JudgedClaim(Judgement.UNDECIDED, count, mean, half)
    return JudgedClaim(_place(mean - half, mean + half, margin), count, mean, half)


def _place(low: float, high: float, margin: float | None) -> Judgement:
    if margin is None:
        confirmed, refuted = low > 0.0, high < 0.0
    else:
        confirmed, refuted = -margin < low and high < margin, low > margin or high < -margin
    if confirmed:
        return Judgement.CONFIRMED
    return Judgement.REFUTED if refuted else Judgement.UNDECIDED


class Order(Value):
    """A claim and the verdict of our runs, in one measure."""

    claim: Claim
    measure: str
    published: float | None
    verdict: JudgedClaim


class Comparison(Value):
    """A preset and our runs of it under one budget.

    Attributes:
        reduced: differences from the published setting that affect the whole table; empty: published settings.
        data: names of the runs' data.
        strangers: files of runs that match no row.
    """

    preset: Preset
    reduced: Differences
    data: tuple[str, ...]
    lines: tuple[Line, ...]
    orders: tuple[Order, ...]
    strangers: tuple[str, ...]


def compare(runs: Iterable[RunRecord], chosen: Sequence[Preset] | None = None) -> tuple[Comparison, ...]:
    """Return one comparison per preset and budget with runs, in the order of the papers.

    Args:
        runs: records; those without a preset are skipped.
        chosen: only these presets; all when None.
    """
    by_budget: dict[str, dict[str, list[RunRecord]]] = defaultdict(lambda: defaultdict(list))
    for run in beside_local([run for run in runs if run.base is not None]):
        by_budget[key_of(table_differences(run))][run.base or ""].append(run)
    names = list(presets()) if chosen is None else list(dict.fromkeys(preset.base for preset in chosen))
    found = []
    for name in names:
        for budget in sorted(by_budget, key=lambda key: (key != "{}", key)):
            comparison = _comparison(presets()[name], by_budget[budget])
            if comparison is not None:
                found.append(comparison)
    return tuple(found)


def _comparison(preset: Preset, runs: Mapping[str, Sequence[RunRecord]]) -> Comparison | None:
    used: list[RunRecord] = []
    lines: list[Line] = []
    for row in preset.rows.values():
        home, key = row.home
        mine = [
            (run, match[1])
            for run in runs.get(home, ())
            if (match := row_of(run, presets()[home])) is not None and match[0].key == key
        ]
        used += [run for run, _ in mine]
        lines += lines_of(row, mine, preset.measures)
    strangers = [run for run in runs.get(preset.base, ()) if row_of(run, preset) is None]
    if not any(run.base == preset.base for run in used) and not strangers:
        return None
    if "personal" in preset.measures:
        lines = _with_shadows(lines, used, preset)
    if ADR in preset.measures and preset.reference is not None:
        lines = with_degradation(lines, preset.reference)
    shown = used or strangers
    return Comparison(
        preset=preset,
        reduced=table_differences(shown[0]),
        data=tuple(sorted({run.data for run in shown})),
        lines=tuple(lines),
        orders=_orders(preset, lines),
        strangers=tuple(run.file for run in strangers),
    )


def _with_shadows(lines: Sequence[Line], used: Sequence[RunRecord], preset: Preset) -> list[Line]:
    """Without runs of `local`, its row shows the local-only models of other runs: same data, split, weights and streams."""
    row = preset.rows.get(_LOCAL)
    if row is None or any(line.row.key == _LOCAL for line in lines):
        return list(lines)
    shadows: dict[int, float] = {}
    for run in sorted(used, key=lambda run: (run.method, run.file), reverse=True):
        figure = run.figure("accuracy_local")
        if figure is not None:
            shadows[run.seed] = figure
    if not shadows:
        return list(lines)
    by_seed = {"personal": shadows}
    return [Line(row, "", 1, 1, {}, by_seed, figures_of(by_seed), 0, 0, {}, 0, from_shadow=True), *lines]


def _orders(preset: Preset, lines: Sequence[Line]) -> tuple[Order, ...]:
    first: dict[str, Line] = {}
    # Among several lines of a row: published settings first, then the one with the most seeds.
    for line in sorted(lines, key=lambda line: (bool(line.reduced), -max(map(len, line.by_seed.values())))):
        first.setdefault(line.row.key, line)
    orders = []
    for claim in claims():
        if claim.preset == preset.base and claim.lower in first:
            for measure in preset.measures:
                lower = first[claim.lower].by_seed.get(measure, {})
                if isinstance(claim.higher, str):
                    higher = first[claim.higher].by_seed.get(measure, {}) if claim.higher in first else {}
                else:
                    higher = dict.fromkeys(lower, claim.higher)
                if lower and higher:
                    verdict = judge(lower, higher, claim.margin)
                    if any(first[end].collapsed for end in (claim.lower, claim.higher) if isinstance(end, str)):
                        verdict = replace(verdict, judgement=Judgement.NOT_COMPARABLE)
                    orders.append(Order(claim, measure, _published_difference(preset, claim, measure), verdict))
    return tuple(orders)


def _published_difference(preset: Preset, claim: Claim, measure: str) -> float | None:
    lower, higher = (_printed(preset, end, measure) for end in (claim.lower, claim.higher))
    return None if lower is None or higher is None else higher - lower


def _printed(preset: Preset, end: str | float, measure: str) -> float | None:
    """Return the paper's figure of a row; a level is returned unchanged."""
    if isinstance(end, float):
        return end
    figure = preset.rows[end].figures.get(measure)
    return None if figure is None else figure.mean
