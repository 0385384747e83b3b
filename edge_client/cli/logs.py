"""`fedcg agent logs`: the events of a device as sentences, or as they were written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from edge_client.cli.shared_options import ConfigOption, read_config
from fedcg.errors import NOT_FOUND, BadInputError
from fedcg.event_log import EventValue, follow_events, read_events
from fedcg.json_output import print_data
from fedcg.log.sentences import DEBUG, LEVELS, sentence_of
from fedcg.text_output import moment, moment_of

FOLLOW_EVERY_S = 0.5
_NAMES = {number: name for name, number in LEVELS.items()}
Event = dict[str, EventValue]


def logs_command(
    config: ConfigOption = Path("agent.toml"),
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Then print new lines as they come.")] = False,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="SPAN", help="10m, 2h, 3d, or a time such as 2026-11-22T08:00 (UTC)."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also lines of level debug.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The events with all their fields, one object a line.")
    ] = False,
) -> None:
    """Print what this device did, from its event log; the agent may run meanwhile.

    Exit codes: 0 printed; 2 --since is no time; 7 there is no event log.

    Example: fedcg agent logs --since 2h --follow
    """
    store = read_config(config).store
    path = store / "events.jsonl"
    if not path.exists():
        raise BadInputError(f"{path} is not there yet: `fedcg agent run` writes it", exit_code=NOT_FOUND)
    first = 0.0 if since is None else moment_of(since, time.time(), "--since")
    for event in _events(path, follow=follow):
        if isinstance(at := event.get("t"), int | float) and at >= first:
            if as_json:
                print_data(event)
            elif line := _line(event, at, verbose=verbose):
                typer.echo(line)


def _events(path: Path, *, follow: bool) -> Iterator[Event]:
    yield from read_events(path.with_suffix(".old.jsonl"))
    yield from follow_events(path, FOLLOW_EVERY_S) if follow else read_events(path)


def _line(event: Event, at: float, *, verbose: bool) -> str:
    sentence = sentence_of(event)
    if sentence is None or (sentence.level <= DEBUG and not verbose):
        return ""
    return f"{moment(at)} [{_NAMES[sentence.level]:<9}] {sentence.text}"
