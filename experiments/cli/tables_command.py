"""`fedcg tables`: the papers' tables next to our runs. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.papers.catalogue import find_presets
from experiments.papers.comparison import CRITERION, compare
from experiments.papers.records import Folder, read_folder
from experiments.papers.sheets import Sheet, comparison_sheet, gains_sheet, orders_sheet
from fedcg.terminal import print_data

_WIDTH = 160
_RUNS = Path(__file__).parents[1] / "records/runs"
"""The records next to these sources."""


def tables_command(
    runs: Annotated[Path, typer.Option(help="folder with JSON records of runs", show_default="ours")] = _RUNS,
    paper: Annotated[
        str | None, typer.Option(help="one table or a group, e.g. fedcg:table1:cifar10-4, fedmd_cg:table1:cifar10")
    ] = None,
    by_client: Annotated[bool, typer.Option("--clients", help="add each client's points over local-only")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as one JSON")] = False,
) -> None:
    """Print the papers' tables next to our runs: mean ± standard deviation over (seeds), and whether the stated orders hold.

    Example: fedcg tables --paper fedcg:table1:cifar10-4
    """
    chosen = None if paper is None else find_presets(paper.partition("@")[0], with_stand_ins=True)
    folder = read_folder(runs)
    found = compare(folder.runs, chosen)
    if as_json:
        damaged = [{"file": file, "reason": reason} for file, reason in folder.damaged]
        print_data(
            {"tables": to_jsonable_python(found), "criterion": CRITERION, "runs": len(folder.runs), "damaged": damaged}
        )
        return
    gains = [gains_sheet(one) for one in found] if by_client else []
    orders = orders_sheet(found)
    _show([*map(comparison_sheet, found), *(one for one in (*gains, orders) if one.rows)], folder)


def _show(sheets: Sequence[Sheet], folder: Folder) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=max(_WIDTH, console.width), highlight=False)
    for sheet in sheets:
        table = Table(*(escape(column) for column in sheet.columns), title=escape(sheet.title), title_justify="left")
        for row in sheet.rows:
            table.add_row(*(escape(cell) for cell in row))
        console.print(table)
        for note in sheet.notes:
            console.print(note, markup=False, soft_wrap=True)
    errors = Console(stderr=True, highlight=False)
    if not any(sheet.rows for sheet in sheets):
        errors.print("No runs for these tables.", markup=False)
    errors.print(
        f"{len(folder.runs)} simulated runs. Tables show runs of "
        "`fedcg simulate --paper NAME` by the paper's own methods; `runs.csv` in a folder of runs has them all.",
        markup=False,
        soft_wrap=True,
    )
    for file, reason in folder.damaged:
        errors.print(f"Damaged: {file}: {reason}", markup=False, soft_wrap=True)
