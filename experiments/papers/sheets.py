"""The output of `fedcg tables`, as plain sheets of text: a title, columns, rows, notes. Independent of terminals."""

from collections.abc import Mapping, Sequence

from experiments.papers.catalogue import Published, Row
from experiments.papers.comparison import CRITERION, Comparison, Order
from experiments.papers.figures import Differences, Figure, Line, figure_of, is_far
from fedcg.values import Value

MEASURE_NAMES = {
    "personal": "accuracy",
    "after": "after download",
    "download": "last download",
    "last": "at the end",
    "deployed": "deployed",
    "ema": "moving average",
    "local": "L.acc",
    "global": "G.acc",
    "adr": "ADR",
}
_NONE = "-"
FAR_NOTE = "! differs from the paper by more than 2 of the paper's standard deviations"


class Sheet(Value):
    """A table of text; every row has one cell per column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def comparison_sheet(found: Comparison) -> Sheet:
    """Return the paper's rows next to ours."""
    first = found.preset.measures[0]
    # The paper's column of a measure is left out if it has no values.
    measures = {name: any(name in row.figures for row in found.preset.rows.values()) for name in found.preset.measures}
    columns = ["row"]
    for measure, is_printed in measures.items():
        name = MEASURE_NAMES[measure]
        columns += [f"paper {name}", f"ours {name}", "difference"] if is_printed else [f"ours {name}"]
    common = _common(found.lines)
    lines: dict[str, list[Line]] = {}
    for line in found.lines:
        lines.setdefault(line.row.key, []).append(line)
    rows: list[tuple[str, ...]] = []
    alone = next((_own(line, first) for line in lines.get("local", ())), {})
    for row in found.preset.rows.values():
        mine: list[Line | None] = [*lines.get(row.key, ())]
        for shown in mine or [None]:
            is_exact = not found.reduced and (shown is None or not shown.reduced)
            rows.append(_cells(row, shown, measures, common, alone, is_exact=is_exact))
    reduced = {**found.reduced, **common}
    planned = "published settings" if any(measures.values()) else "settings as planned"
    budget = f"REDUCED: {_differences(reduced)}" if reduced else planned
    notes = [f"data: {', '.join(found.data)}"]
    notes += [FAR_NOTE] if any(cell.endswith(" !") for cells in rows for cell in cells) else []
    if found.preset.stand_in is not None:
        notes.append(found.preset.stand_in)
    notes += [f"{file} matches no row of this table" for file in found.strangers]
    title = f"{found.preset.base}  {found.preset.title}  [{budget}]"
    columns += [
        *([] if {"after", "download"} & measures.keys() else ["after download"]),
        "local-only",
        "alone is better",
        "remarks",
    ]
    return Sheet(title, tuple(columns), tuple(rows), tuple(notes))


def orders_sheet(comparisons: Sequence[Comparison]) -> Sheet:
    """Return every order of the papers for which we have runs."""
    rows = [_order(found, order) for found in comparisons for order in found.orders]
    columns = ("table", "claim", "order", "measure", "paper", "ours", "seeds", "judgement")
    return Sheet("Orders stated by the papers", columns, tuple(rows), (CRITERION,))


def gains_sheet(found: Comparison) -> Sheet:
    """Return points over local-only per client, as in FedCG's figure 4."""
    clients = sorted({client for line in found.lines for client in line.gains})
    rows = [
        (line.row.label, *(f"{line.gains[client]:+.1f}" if client in line.gains else _NONE for client in clients))
        for line in found.lines
        if line.gains and line.row.key != "local"
    ]
    return Sheet(f"{found.preset.base}: points over local-only, per client", ("row", *clients), tuple(rows))


def figure_text(figure: Figure | Published | None) -> str:
    """Format as `47.5 ± 0.7 (3)`: mean, standard deviation and number of seeds; published figures have no number, some no deviation."""
    if figure is None:
        return _NONE
    if isinstance(figure, Published):
        return f"{figure.mean:.2f}" + ("" if figure.std is None else f" ± {figure.std:.2f}")
    spread = "" if figure.std is None else f" ± {figure.std:.2f}"
    return f"{figure.mean:.2f}{spread} ({figure.seeds})"


def _common(lines: Sequence[Line]) -> Differences:
    """Return differences common to all rows, which are shown once, above the rows."""
    ours = [line.reduced for line in lines if not line.from_shadow]
    first = ours[0] if len(ours) > 1 else {}
    return {name: pair for name, pair in first.items() if all(other.get(name) == pair for other in ours)}


def _cells(
    row: Row,
    line: Line | None,
    measures: Mapping[str, bool],
    common: Differences,
    alone: Mapping[int, float],
    *,
    is_exact: bool,
) -> tuple[str, ...]:
    cells = [row.label]
    for measure, is_printed in measures.items():
        paper, ours = row.figures.get(measure), None if line is None else line.figures.get(measure)
        difference = _NONE
        if paper is not None and ours is not None:
            mark = " !" if is_exact and is_far(ours, paper) else ""
            difference = f"{ours.mean - paper.mean:+.2f}{mark}"
        cells += [figure_text(paper), figure_text(ours), difference] if is_printed else [figure_text(ours)]
    after = [] if {"after", "download"} & measures.keys() else [figure_text(None if line is None else line.after)]
    if line is None:
        return (*cells, *after, _NONE, _NONE, "not run" if row.needs is None else f"can't be run: needs {row.needs}")
    losing = f"{line.losing} of {line.compared} clients" if line.compared else _NONE
    paired = figure_of(alone[seed] for seed in _own(line, next(iter(measures))) if seed in alone)
    return (*cells, *after, figure_text(paired), losing, _remarks(line, common))


def _own(line: Line, first: str) -> Mapping[int, float]:
    """Return, by seed, the accuracy of clients' own models if measured, else the first measure."""
    return line.by_seed.get("personal", line.by_seed.get(first, {}))


def _remarks(line: Line, common: Differences) -> str:
    remarks = []
    if line.from_shadow:
        remarks.append("local-only models of other runs")
    if line.offered > 1:
        remarks.append(f"best of {line.tried} of {line.offered}: {line.choice}")
    own = {name: pair for name, pair in line.reduced.items() if name not in common}
    if own:
        remarks.append(_differences(own))
    if line.failures:
        remarks.append(f"{line.failures} local rounds diverged")
    if line.unmerged:
        remarks.append(f"{line.unmerged} rounds without a merge")
    if line.collapsed:
        remarks.append(f"no verdict: in {line.collapsed} runs generated images share a texture, or may")
    return "; ".join(remarks)


def _differences(differences: Differences) -> str:
    return ", ".join(f"{name} {run} (published {before})" for name, (before, run) in sorted(differences.items()))


def _order(found: Comparison, order: Order) -> tuple[str, ...]:
    verdict, rows, end = order.verdict, found.preset.rows, order.claim.higher
    higher = rows[end].label if isinstance(end, str) else f"{end:g}"
    sign = "<" if order.claim.margin is None else "≈"
    ours = _NONE if verdict.difference is None else f"{verdict.difference:+.2f}"
    if verdict.half_width is not None:
        ours += f" ± {verdict.half_width:.2f}"
    return (
        found.preset.base + (" (reduced)" if found.reduced else ""),
        order.claim.text,
        f"{rows[order.claim.lower].label} {sign} {higher}",
        MEASURE_NAMES[order.measure],
        _NONE if order.published is None else f"{order.published:+.2f}",
        ours,
        str(verdict.seeds),
        verdict.judgement.value,
    )
