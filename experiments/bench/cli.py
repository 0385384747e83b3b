"""`fedcg bench`: measurements that packages register in the entry-point group `fedcg.benches`, loaded only when called."""

from __future__ import annotations

import typer

from fedcg.cli import LazyGroup


class BenchGroup(LazyGroup):
    """The measurements of all packages."""

    entry_point_group = "fedcg.benches"


app = typer.Typer(
    cls=BenchGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Measure this machine: ratios of two things run in one go. Timings belong here, never in tests.",
)


@app.callback()
def _bench() -> None:
    """Measure this machine: ratios of two things run in one go. Timings belong here, never in tests."""
