"""`fedcg cohort create|join|status|card|roster`: what the devices of a federation know of each other and not from the coordinator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_client.cli.shared_options import ConfigOption, read_config
from fedcg.errors import NOT_FOUND, BadInputError
from fedcg.terminal import Result, ask_secret, prints

if TYPE_CHECKING:
    from edge_client.store.private_store import PrivateStore

app = typer.Typer(
    help="Give the devices of a federation their common secret; the coordinator never sees it.", no_args_is_help=True
)


@app.command("create")
@prints
def create_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """Make the secret on the FIRST device, before its first round, and print the code for the others.

    The code is shown this once. It is the secret: carry it by people, not through the coordinator, and keep no copy.
    Exit codes: 0 done; 1 failed; 2 configuration or private store can't be used; 6 there is a secret already.

    Example: fedcg cohort create
    """
    from edge_client.store.cohort_secret import create, mark_in

    store, federation = _store_of(config)
    code = create(store)
    mark = mark_in(store, federation)
    return {"code": code, "mark": mark}, (
        f"Code of this cohort, shown this once:\n\n  {code}\n\n"
        f"Devices have the same secret when `fedcg cohort status` prints the same mark everywhere: {mark}\n"
        "Next: on every other device, before its first round, fedcg cohort join --config AGENT.TOML"
    )


@app.command("join")
@prints
def join_command(
    config: ConfigOption = Path("agent.toml"),
    code_file: Annotated[
        str | None,
        typer.Option(
            "--code-file", help="read the code from this file, - for stdin; otherwise the command asks for it"
        ),
    ] = None,
) -> Result:
    """Take the code that `fedcg cohort create` printed on the first device.

    Exit codes: 0 done, also when the same secret was there; 1 failed; 2 a bad code, configuration or private store; 6 there is another secret.

    Example: fedcg cohort join --code-file -
    """
    from edge_client.store.cohort_secret import join, mark_in, secret_of

    secret_of(code := _code(code_file))  # a wrong one makes no store
    store, federation = _store_of(config)
    joined = join(store, code)
    mark = mark_in(store, federation)
    text = f"{'Joined' if joined else 'This device had joined before'}; mark {mark}\nNext: fedcg cohort card --config {config}"
    return {"joined": joined, "mark": mark}, text


@app.command("status")
@prints
def status_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """Print the mark of this device's secret: the same on all devices of a cohort.

    Exit codes: 0 there is a secret; 1 failed; 2 configuration or private store can't be used; 7 there is none.

    Example: fedcg cohort status
    """
    from edge_client.store.cohort_secret import mark_in

    store, federation = _store_of(config, make=False)
    mark = mark_in(store, federation)
    values = {"mark": mark, "roster": sorted(store.roster())}
    if mark is None:
        following = f"Next: on the first device fedcg cohort create --config {config}, on others fedcg cohort join --config {config}"
        return values, f"No cohort secret.\n{following}", NOT_FOUND
    return values, f"mark {mark}; devices on the roster of masked sums: {len(store.roster()) or 'none'}"


@app.command("card")
@prints
def card_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """Print this device's name and public message key: a line of the cohort's roster, which methods with masked sums need.

    Collect the lines of all devices in one file, by people and not through the coordinator, and give it to `fedcg cohort roster` on each.
    Exit codes: 0 done; 1 failed; 2 configuration or keys can't be used.

    Example: fedcg cohort card >> roster.txt
    """
    from edge_client.identity.credentials import load_keys

    settings = read_config(config)
    key = load_keys(settings).signing.public.hex
    return {"device": settings.device, "key": key}, f"{settings.device} {key}"


@app.command("roster")
@prints
def roster_command(
    file: Annotated[str, typer.Argument(help="lines of `fedcg cohort card`, one for each device; - for stdin")],
    config: ConfigOption = Path("agent.toml"),
) -> Result:
    """Take the message keys of all devices of the cohort, in the place of those that were given before.

    A masked sum counts only devices whose keys are here, so that nobody can invent some.
    Exit codes: 0 done; 1 failed; 2 a bad line, configuration or private store; 7 there is no such file.

    Example: fedcg cohort roster roster.txt
    """
    from edge_client.identity.credentials import load_keys
    from edge_client.store.cohort_secret import roster_of

    text = _text_of(file, "FILE", 1 << 20)
    settings = read_config(config)
    roster = roster_of(text)
    own = load_keys(settings).signing.public
    if roster.get(settings.device) != own:
        raise BadInputError(f"{file} lacks this device's own card: {settings.device} {own.hex}")
    _store_of(config)[0].save_roster(roster)
    return {"devices": sorted(roster)}, f"{len(roster)} devices: {', '.join(sorted(roster))}"


def _code(code_file: str | None) -> str:
    if code_file is None:
        return ask_secret("Cohort code", "--code-file FILE")
    return _text_of(code_file, "--code-file", 1024)


def _text_of(path: str, option: str, most: int) -> str:
    if path == "-":
        return sys.stdin.read(most)
    try:
        with Path(path).open(encoding="ascii") as file:
            return file.read(most)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise BadInputError(f"{option} {path} can't be read: {error}") from error


def _store_of(config: Path, *, make: bool = True) -> tuple[PrivateStore, str]:
    from edge_client.store.private_store import open_store

    settings = read_config(config)
    return open_store(settings, make=make), settings.federation
