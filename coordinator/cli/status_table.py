"""What `fedcg coordinator status` shows a person: the federations, and the open problems with their remedies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

View = Mapping[str, Any]


def tables_of(*, runs: bool, federations: Sequence[View], problems: Sequence[View]) -> Iterator[str | Table]:
    """What is printed, one after the other.

    Args:
        runs: whether a coordinator answered.
        federations: as the API shows them.
        problems: the open ones.
    """
    yield "The coordinator runs." if runs else "No coordinator runs; this is what its directory holds."
    if not federations:
        yield "No federations here; `fedcg federation create` opens one."
    else:
        table = Table("federation", "status", "phase", "round", "online", "reason", box=None, pad_edge=False)
        for view in federations:
            rounds = f"{view['round']} of {view['rounds']}"
            names = (view["federation"], view["status"], view["phase"].replace("_", " "))
            table.add_row(*map(escape, (*names, rounds, str(len(view["online"])), view["reason"])))
        yield table
    if not problems:
        yield "No open problems."
        return
    table = Table("problem", "of", "what", "what to do", box=None, pad_edge=False)
    for problem in problems:
        table.add_row(*(escape(str(problem[name])) for name in ("kind", "subject", "what", "remedy")))
    yield table
