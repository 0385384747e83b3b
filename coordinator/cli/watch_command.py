"""`fedcg federation watch`: where a federation stands and its last events, live in a terminal; the facts of the page, over the API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.shared_options import Named, Somewhere, Url
from fedcg.terminal import print_data
from fedcg.text_output import moment

if TYPE_CHECKING:
    from rich.console import Group

LOOK_EVERY_S = 1.0
SHOWN = 20
EVENTS = 6
MAX_LINE = 10_000
"""Characters of a line where there is no terminal; more than any has."""


def federation_watch(
    federation: Named = None,
    directory: Somewhere = None,
    url: Url = None,
    once: Annotated[bool, typer.Option("--once", help="Print where it stands and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per change.")] = False,
) -> None:
    """Watch a federation until it is over: round, updates, deadline, and what every client does. Ctrl-C ends it.

    Example: fedcg federation watch --once
    """
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        watched, shown = client.federation(federation), None
        source = "running coordinator" if client.is_remote else "files; no coordinator runs"
        with _display(source, as_json=as_json) as show:
            while True:
                facts = client.get(f"/federations/{watched}/now")
                events = client.get("/events", federation=watched, level="info", limit=EVENTS)["events"]
                facts |= {"events": [{name: each[name] for name in ("t", "level", "message")} for each in events]}
                if facts != shown:
                    show(facts)
                    shown = facts
                if once or facts["phase"] == "finished":
                    return
                time.sleep(LOOK_EVERY_S)


@contextmanager
def _display(source: str, *, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that shows facts: as lines of JSON, or in place on a terminal."""
    if as_json:
        yield print_data
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        console.width = MAX_LINE
        yield lambda facts: console.print(_picture(facts, source))
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda facts: live.update(_picture(facts, source), refresh=True)


def _picture(facts: dict[str, Any], name: str) -> Group:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    counts = ", ".join(f"{number} {phase}" for phase, number in facts["counts"].items() if number)
    title = f"{facts['federation']}: {facts['phase'].replace('_', ' ')}, round {facts['round']} of {facts['rounds']}, attempt {facts['attempt']}"
    online = f"{facts['online']} of {facts['enrolled']} devices online{': ' + counts if counts else ''}"
    lines = [
        f"updates {facts['delivered']} of {facts['wanted']} (quorum {facts['quorum']}), {online}",
        *([f"deadline {_clock(facts['deadline_at'])}"] if facts["deadline_at"] else []),
        *([f"the last round ends about {_clock(facts['ends_at'])}"] if facts["ends_at"] else []),
        *([f"waits for {facts['waits_for']}"] if facts["waits_for"] else []),
        *([_merging(facts["merge"])] if facts["merge"] and facts["merge"]["phase"] else []),
        *([facts["reason"]] if facts["reason"] else []),
    ]
    table = Table(box=None, pad_edge=False)
    for column in ("client", "phase", "details"):
        table.add_column(column)
    for client in facts["clients"][:SHOWN]:
        done = "" if client["done"] is None else f"{client['done']:.0%} "
        ends = "" if client["ends_at"] is None else f", until about {_clock(client['ends_at'])}"
        table.add_row(client["client"], client["phase"], f"{done}{client['reason']}{ends}")
    more = len(facts["clients"]) - SHOWN
    bar = ProgressBar(total=max(1, facts["wanted"]), completed=facts["delivered"], width=40)
    return Group(
        Text(title, style="bold"),
        bar,
        *(Text(line) for line in lines),
        *([table] if facts["clients"] else []),
        *([Text(f"and {more} more")] if more > 0 else []),
        *(
            Text(f"{_clock(each['t'])} {each['message'].removeprefix(facts['federation'] + ': ')}")
            for each in facts["events"]
        ),
        Text(f"from the {name}", style="dim"),
    )


def _merging(merge: dict[str, Any]) -> str:
    loss = f", loss {merge['losses'][-1][1]:.4g}" if merge["losses"] else ""
    return f"{merge['phase']}: step {merge['step']} of {merge['steps']}{loss}"


def _clock(at: float) -> str:
    return moment(at).partition(" ")[2]
