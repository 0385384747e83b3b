"""`fedcg bench privacy`: what comes back from the updates of a grid of simulated federations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcg.terminal import print_data


def privacy_command(
    grid: Annotated[
        str,
        typer.Argument(
            help="methods, pretrained, fedprobe, fedcg-table2, ppidsg, epochs, mechanisms, antigan, antigan-four, antigan-four-curves or antigan-split"
        ),
    ],
    data: Annotated[str, typer.Option(help="as for `fedcg simulate --data`")] = "digits",
    out: Annotated[
        Path, typer.Option(help="folder for one JSON per run; runs that are there are not done again")
    ] = Path("privacy-out"),
    seed: Annotated[list[int] | None, typer.Option(min=0, help="a seed; again for more  [default: 0, 1, 2]")] = None,
    row: Annotated[list[str] | None, typer.Option(help="only this row; again for more")] = None,
    clients: Annotated[int, typer.Option(min=2, help="clients")] = 4,
    images: Annotated[int, typer.Option(min=10, help="training images of a client, at most")] = 500,
    epochs: Annotated[int, typer.Option(min=1, help="local epochs a round")] = 5,
    effort: Annotated[str, typer.Option(help="of the audits: quick, default or thorough")] = "quick",
    processes: Annotated[int, typer.Option(min=1, help="attacks, and simulated clients, at once")] = 2,
    show: Annotated[bool, typer.Option("--show", help="run nothing; print the tables of what is there")] = False,
    settings: Annotated[bool, typer.Option("--settings", help="also print every setting of every attack")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the records")] = False,
) -> None:
    """Simulate the federations of a grid, audit one client's last update of each, and print the tables of docs/privacy.md.

    The same command goes on where an interrupted one stopped. With the grid `mechanisms` it also draws frontier.png, with
    `antigan` and `antigan-four-curves` curves.png.

    Example: fedcg bench privacy methods --show
    """
    from experiments.bench.privacy.cells import Sizes, chosen_grid, run_grid
    from experiments.bench.privacy.tables import draw_antigan, draw_frontier, summary, table

    curves = ("curves.png", draw_antigan)
    pictures = {"mechanisms": ("frontier.png", draw_frontier), "antigan": curves, "antigan-four-curves": curves}

    chosen, sizes = chosen_grid(grid, row or ()), Sizes(data, clients, images, epochs, effort, processes)
    records, failed = run_grid(grid, chosen, sizes, seed or (0, 1, 2), out, only_show=show)
    if as_json:
        print_data(records)
        raise typer.Exit(1 if failed else 0)
    for line in (f"**{chosen.title}**", "", *summary(records), *(table(records) if settings else ())):
        typer.echo(line)
    if grid in pictures and records:
        name, draw = pictures[grid]
        draw(records, out / grid / name)
        typer.echo(f"\n{out / grid / name}")
    if failed:
        typer.echo(f"{failed} runs failed; the same command tries them again", err=True)
        raise typer.Exit(1)
