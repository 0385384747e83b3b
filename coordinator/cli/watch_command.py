"""`fedcg federation watch`: where a federation stands, live in a terminal; the facts of the page, over the API or from the files."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from coordinator.cli.shared_options import Directory
from fedcg.json_output import print_data

if TYPE_CHECKING:
    from rich.console import Group

    from coordinator.paths import Home

LEAST_S = 0.5
IDLE_S = 5.0
TIMEOUT_S = 10.0
SHOWN = 20


class Source(Protocol):
    """Where the facts come from."""

    name: str

    def facts(self) -> dict[str, Any]:
        """The fields of `CurrentRound`, now."""

    def wait(self, timeout_s: float) -> None:
        """Return when something happened, or after the timeout."""


class _Api:
    """A running coordinator: its facts, and its event stream on a thread of its own."""

    name = "running coordinator"

    def __init__(self, url: str, token: str, federation: str) -> None:
        self._url, self._federation = url, federation
        self._headers = {"Authorization": f"Bearer {token}"}
        self._happened = threading.Event()
        self._position = ""

    def start(self) -> _Api:
        threading.Thread(target=self._follow, daemon=True, name="events").start()
        return self

    def facts(self) -> dict[str, Any]:
        with self._open(f"/api/v1/federations/{self._federation}/now") as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def wait(self, timeout_s: float) -> None:
        self._happened.wait(timeout_s)
        self._happened.clear()

    def _follow(self) -> None:
        while True:
            with suppress(OSError):  # the coordinator is being started again; `facts` reports it when it stays away
                self._read_stream()
            time.sleep(IDLE_S)

    def _read_stream(self) -> None:
        with self._open("/api/v1/events/stream", self._position) as stream:
            for line in stream:
                if line.startswith(b"id: "):
                    self._position = line[4:].decode().strip()
                elif line.startswith(b"data: "):
                    self._happened.set()

    def _open(self, path: str, last_id: str = "") -> Any:
        headers = {**self._headers, **({"Last-Event-ID": last_id} if last_id else {})}
        request = urllib.request.Request(self._url + path, headers=headers)  # noqa: S310 - an address of coordinator.toml
        return urllib.request.urlopen(request, timeout=30 if "stream" in path else TIMEOUT_S)  # noqa: S310 - as above


class _Files:
    """The directory of a coordinator that does not run."""

    name = "files; no coordinator runs"

    def __init__(self, home: Home, federation: str) -> None:
        self._home, self._federation = home, federation

    def facts(self) -> dict[str, Any]:
        from dataclasses import asdict

        from coordinator.facts.current_round import current_round
        from coordinator.facts.known import known_at

        with known_at(self._home) as known:
            found: dict[str, Any] = json.loads(json.dumps(asdict(current_round(known, self._federation))))
            return found

    def wait(self, timeout_s: float) -> None:
        time.sleep(timeout_s)


def federation_watch(
    directory: Directory,
    federation: Annotated[str | None, typer.Argument(help="Its id; not needed where there is one.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print where it stands and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per change.")] = False,
) -> None:
    """Watch a federation until it is over: round, updates, deadline, and what every client does. Ctrl-C ends it."""
    from coordinator.paths import Home

    home = Home(directory).require()
    source = _source(home, _chosen(home, federation))
    shown: dict[str, Any] | None = None
    with _display(as_json=as_json) as show:
        while True:
            facts = source.facts()
            if facts != shown:
                show(facts, source.name)
                shown = facts
            if once or facts["phase"] == "finished":
                return
            time.sleep(LEAST_S)
            source.wait(IDLE_S - LEAST_S)


def _chosen(home: Home, federation: str | None) -> str:
    from coordinator.errors import NotFoundError
    from coordinator.facts.known import known_at

    with known_at(home) as known:
        names = [record.id for record in known.store.federations()]
        if federation is not None:
            return known.federation(federation).id
    if len(names) != 1:
        raise NotFoundError(f"name the federation to watch; there are: {', '.join(names) or 'none'}")
    return names[0]


def _source(home: Home, federation: str) -> Source:
    """The API where a coordinator answers, else the files."""
    token = home.root / "api.token"
    api = home.config().api
    if token.is_file():
        host = f"[{api.host}]" if ":" in api.host else api.host
        running = _Api(f"http://{host}:{api.port}", token.read_text().strip(), federation)
        try:
            running.facts()
        except (OSError, ValueError):
            return _Files(home, federation)
        return running.start()
    return _Files(home, federation)


@contextmanager
def _display(*, as_json: bool) -> Iterator[Any]:
    """A function that shows facts: as lines of JSON, or in place on a terminal."""
    if as_json:
        yield lambda facts, _: print_data(facts)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        yield lambda facts, name: console.print(_picture(facts, name))
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda facts, name: live.update(_picture(facts, name), refresh=True)


def _picture(facts: dict[str, Any], name: str) -> Group:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    counts = ", ".join(f"{number} {phase}" for phase, number in facts["counts"].items() if number)
    title = f"{facts['federation']}: {facts['phase']}, round {facts['round']} of {facts['rounds']}, attempt {facts['attempt']}"
    online = f"{facts['online']} of {facts['enrolled']} devices online{': ' + counts if counts else ''}"
    lines = [
        f"updates {facts['delivered']} of {facts['wanted']} (quorum {facts['quorum']}), {online}",
        *([f"deadline {_clock(facts['deadline_at'])}"] if facts["deadline_at"] else []),
        *([f"the last round ends about {_clock(facts['ends_at'])}"] if facts["ends_at"] else []),
        *([f"waits for {facts['waits_for']}"] if facts["waits_for"] else []),
        *([facts["reason"]] if facts["reason"] else []),
    ]
    table = Table(box=None, pad_edge=False)
    for column in ("client", "phase", "details"):
        table.add_column(column)
    for client in facts["clients"][:SHOWN]:
        done = "" if client["done"] is None else f"{client['done']:.0%} "
        table.add_row(client["client"], client["phase"], f"{done}{client['reason']}")
    more = len(facts["clients"]) - SHOWN
    bar = ProgressBar(total=max(1, facts["wanted"]), completed=facts["delivered"], width=40)
    return Group(
        Text(title, style="bold"),
        bar,
        *(Text(line) for line in lines),
        *([table] if facts["clients"] else []),
        *([Text(f"and {more} more")] if more > 0 else []),
        Text(f"from the {name}", style="dim"),
    )


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
