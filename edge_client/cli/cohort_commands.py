"""`fedcg cohort create|renew|join|status|card|roster|resume-sums`: what the devices of a federation know of each other and not from the coordinator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_client.cli.shared_options import ConfigOption, alone_with_store, read_config
from fedcg.errors import NOT_FOUND, BadInputError
from fedcg.terminal import Result, ask_secret, confirm, prints

if TYPE_CHECKING:
    from edge_client.store.private_store import PrivateStore
    from edge_client.store.roster import Roster

app = typer.Typer(
    help="Give the devices of a federation their common secret and roster; the coordinator never sees the secret.",
    no_args_is_help=True,
)


@app.command("create")
@prints
def create_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """Make the secret on the FIRST device, before its first round, and print the code for the others.

    The code is shown this once. It is the secret: carry it by people, not through the coordinator, and keep no copy.
    Exit codes: 0 done; 1 failed; 2 configuration or private store can't be used; 6 there is a secret already.

    Example: fedcg cohort create
    """
    from edge_client.store.cohort_secret import create

    store, _ = _store_of(config)
    following = "Next: on every other device, before its first round, fedcg cohort join --config AGENT.TOML"
    return _with_code(create(store), store, config, following)


YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
_REPLACED = (
    "The device keeps its networks and its model. It is in no more sums of the rounds that it knows, and later in sums with the devices that "
    "have the new secret alone."
)


@app.command("renew")
@prints
def renew_command(config: ConfigOption = Path("agent.toml"), yes: YesOption = False) -> Result:
    """Replace the cohort's secret, starting on ONE device: after a device was revoked, lost or stolen, whose old secret would open later sums.

    The agent must not run meanwhile. Print the code for the others; it is shown this once.
    Exit codes: 0 done; 1 failed; 2 not confirmed, or configuration or private store can't be used; 5 an agent runs; 7 there is no secret.

    Example: fedcg cohort renew
    """
    from edge_client.store.cohort_secret import create

    with _replacing(config, yes=yes, code=None) as store:
        code = create(store, replace=True)
    return _with_code(
        code,
        store,
        config,
        "Next: with the agent stopped, on every other device that stays: fedcg cohort join --replace --config AGENT.TOML\n"
        f"Then start the agents. A device that is gone comes off the roster as well: fedcg cohort roster FILE --config {config}",
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
    replace: Annotated[
        bool, typer.Option("--replace", help="Also in the place of another secret, after `fedcg cohort renew`.")
    ] = False,
    yes: YesOption = False,
) -> Result:
    """Take the code that `fedcg cohort create` printed on the first device, or with --replace that of `fedcg cohort renew`.

    With --replace the agent must not run meanwhile.
    Exit codes: 0 done, also when the same secret was there; 1 failed; 2 a bad code, not confirmed, configuration or private store; 5 an agent
    runs; 6 there is another secret.

    Example: fedcg cohort join --code-file -
    """
    from edge_client.store.cohort_secret import join, mark_in, secret_of

    secret_of(code := _code(code_file))  # a wrong one makes no store
    store, federation = _store_of(config)
    if replace:
        with _replacing(config, yes=yes, code=code) as store:
            joined = join(store, code, replace=True)
    else:
        joined = join(store, code)
    mark = mark_in(store, federation)
    following = f"fedcg agent run --config {config}" if replace else f"fedcg cohort card --config {config}"
    text = f"{'Joined' if joined else 'This device had joined before'}; mark {mark}\nNext: {following}"
    return {"joined": joined, "mark": mark}, text


@app.command("status")
@prints
def status_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """Print the marks of this device's secret and roster, the same on all devices of a cohort, and its last round with a sum.

    Exit codes: 0 there is a secret; 1 failed; 2 configuration or private store can't be used; 7 there is none.

    Example: fedcg cohort status
    """
    from edge_client.store.cohort_secret import mark_in
    from edge_client.store.roster import roster_mark

    store, federation = _store_of(config, make=False)
    mark, roster = mark_in(store, federation), store.roster()
    rosters = roster_mark(roster, federation) if roster.keys else None
    last, obstacle = store.sum_gate.last_round, store.sum_gate.obstacle(store.seen()[1] + 1)
    values: dict[str, object] = {"mark": mark, "last_sum_round": last, "sums": obstacle}
    values |= {"roster": sorted(roster.keys), "alone": sorted(roster.alone), "roster_mark": rosters}
    if mark is None:
        following = f"Next: on the first device fedcg cohort create --config {config}, on others fedcg cohort join --config {config}"
        return values, f"No cohort secret.\n{following}", NOT_FOUND
    lines = [
        f"mark of the secret {mark}",
        f"{_consents(roster)}mark of the roster {rosters}, {len(roster.keys)} devices" if rosters else "no roster",
        f"last round with a sum: {'unknown' if last is None else f'{last}, whatever came of it' if last else 'none'}",
        *([f"sums: {obstacle}"] if obstacle else []),
        "A device was revoked, lost or stolen? Its secret opens later sums: fedcg cohort renew",
    ]
    return values, "\n".join(lines)


@app.command("card")
@prints
def card_command(
    config: ConfigOption = Path("agent.toml"),
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="The owner consents that all members may see the numbers of this device alone, where it comes, leaves or adds images: "
            "of `analytic` its class counts, class sums and second moments. Not meant for methods that train: it would be weights.",
        ),
    ] = False,
) -> Result:
    """Print this device's line of the cohort's roster: its name and its key for sums, which is made for this alone.

    Collect the lines of all devices in one file, by people and not through the coordinator, and give it to `fedcg cohort roster` on each.
    Exit codes: 0 done; 1 failed; 2 configuration or private store can't be used.

    Example: fedcg cohort card >> roster.txt
    """
    from edge_client.store.roster import card_of

    settings = read_config(config)
    card = card_of(settings.device, settings.federation, _store_of(config)[0].sum_key(), alone=alone)
    return {"device": settings.device, "card": card, "alone": alone}, card


@app.command("roster")
@prints
def roster_command(
    file: Annotated[str, typer.Argument(help="lines of `fedcg cohort card`, one for each device; - for stdin")],
    config: ConfigOption = Path("agent.toml"),
) -> Result:
    """Take the cards of all devices of the cohort, in the place of those that were given before, and print their mark.

    A sum counts only devices whose keys are here, so that nobody can invent some.
    Exit codes: 0 done; 1 failed; 2 a bad line, configuration or private store; 7 there is no such file.

    Example: fedcg cohort roster roster.txt
    """
    from edge_client.store.roster import COMPARE, MAX_ROSTER_BYTES, card_of, roster_mark, roster_of

    text = _text_of(file, "FILE", MAX_ROSTER_BYTES)
    settings = read_config(config)
    roster = roster_of(text, settings.federation, "the roster" if file == "-" else file)
    store, federation = _store_of(config)
    own = store.sum_key()
    if roster.keys.get(settings.device) != own.public:
        raise BadInputError(f"{file} lacks this device's own card: {card_of(settings.device, federation, own)}")
    store.save_roster(roster)
    mark, names = roster_mark(roster, federation), sorted(roster.keys)
    least = settings.policy.least_sum
    few = "" if len(names) >= least else f"\nA sealed sum needs {least} devices: get the cards of the others too."
    text = f"{len(names)} devices: {', '.join(names)}\n{_consents(roster)}mark of the roster {mark}\n{COMPARE}.{few}"
    return {"devices": names, "alone": sorted(roster.alone), "mark": mark}, text


@app.command("resume-sums")
@prints
def resume_sums_command(
    last: Annotated[
        int,
        typer.Argument(
            metavar="ROUND", min=0, max=1 << 53, help="the highest last round with a sum of the other devices"
        ),
    ],
    config: ConfigOption = Path("agent.toml"),
) -> Result:
    """Let this device be in sums again, above ROUND, after its private store was restored or its record of sums was lost.

    Such a store does not know the last sums that this device was in, and two sums of one round could show what one hides. The other devices
    know them: ROUND is the highest number that `fedcg cohort status` shows on any of them. The coordinator's word is no proof.
    The agent must not run meanwhile. Exit codes: 0 done, also when sums were not blocked; 1 failed; 2 configuration or private store can't be used;
    5 an agent runs.

    Example: fedcg cohort resume-sums 17
    """
    with alone_with_store(read_config(config)) as store:
        known = store.sum_gate.first_round
        is_due = known is None or 1 < known <= last  # a number that was too low is corrected
        first = store.sum_gate.resume(max(last, store.seen()[1])) if is_due else known
    text = "" if is_due else "Sums are not blocked here. "
    return (
        {"was_blocked": known is None, "first_round": first},
        f"{text}This device takes part in sums from round {first} on.\nNext: fedcg agent run --config {config}",
    )


def _consents(roster: Roster) -> str:
    """The line of the devices whose owners consent to be seen alone, if there are any."""
    return f"Members may see alone the numbers of: {', '.join(sorted(roster.alone))}\n" if roster.alone else ""


@contextmanager
def _replacing(config: Path, *, yes: bool, code: str | None) -> Iterator[PrivateStore]:
    """A store whose secret is about to be replaced: confirmed by its owner, while no agent uses it."""
    from edge_client.store.cohort_secret import secret_of

    settings = read_config(config)
    with alone_with_store(settings) as store:
        kept = store.cohort_secret()
        if kept is None and code is None:
            raise BadInputError(
                f"{store.root} has no cohort secret to renew: `fedcg cohort create` makes the first one",
                exit_code=NOT_FOUND,
            )
        if kept is not None and (code is None or kept != secret_of(code)):
            if settings.data.defence_params.get("key") == "cohort":
                raise BadInputError(
                    "data.defence encrypts this device's images with a key of the cohort's secret (key = cohort), and trained networks "
                    "know no other: open a new federation, with a new secret"
                )
            if not yes:
                confirm(f"This replaces the cohort secret of {settings.device}. {_REPLACED}\nGo on?")
        yield store


def _with_code(code: str, store: PrivateStore, config: Path, following: str) -> Result:
    """The result of a command that made a secret."""
    from edge_client.store.cohort_secret import mark_in

    mark = mark_in(store, read_config(config).federation)
    return {"code": code, "mark": mark}, (
        f"Code of this cohort, shown this once:\n\n  {code}\n\n"
        f"Devices have the same secret when `fedcg cohort status` prints the same mark everywhere: {mark}\n{following}"
    )


def _code(code_file: str | None) -> str:
    if code_file is None:
        return ask_secret("Cohort code", "--code-file FILE")
    return _text_of(code_file, "--code-file", 1024)


def _text_of(path: str, option: str, most: int) -> str:
    try:
        with nullcontext(sys.stdin) if path == "-" else Path(path).open(encoding="ascii") as file:
            text = file.read(most + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise BadInputError(f"{option} {path} can't be read: {error}") from error
    if len(text) > most:
        raise BadInputError(f"{option} {path} has more than {most} characters")
    return text


def _store_of(config: Path, *, make: bool = True) -> tuple[PrivateStore, str]:
    from edge_client.store.private_store import open_store

    settings = read_config(config)
    return open_store(settings, make=make), settings.federation
