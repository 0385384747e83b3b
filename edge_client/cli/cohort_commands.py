"""`fedcg cohort create|renew|join|status|card|roster|resume-sums`: secret and roster that devices share without the coordinator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_client.cli.shared_options import ConfigOption, alone_with_store, read_config
from fedcg.errors import NOT_FOUND, BadInputError
from fedcg.terminal import Result, ask_secret, command, confirm

if TYPE_CHECKING:
    from edge_client.store.private_store import PrivateStore
    from edge_client.store.roster import Roster

app = typer.Typer(
    help="Manage the secret and roster that a federation's devices share. The coordinator never sees the secret.",
    no_args_is_help=True,
)


@command(app, "create")
def create_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """Create the cohort secret on the FIRST device, before its first round, and print the code for the other devices.

    The code is the secret and is shown only once. Hand it over in person, not through the coordinator. Keep no copy.
    Exit codes: 0 done; 1 failed; 2 configuration or private store can't be used; 6 a secret already exists.

    Example: fedcg cohort create
    """
    from edge_client.store.cohort_secret import create

    store, _ = _store_of(config)
    following = "Next: on every other device, before its first round, fedcg cohort join --config AGENT.TOML"
    return _with_code(create(store), store, config, following)


YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
_REPLACED = (
    "The device keeps its networks and its model. It joins no more sums of rounds that have started. In later rounds it only joins sums "
    "with devices that have the new secret."
)


@command(app, "renew")
def renew_command(config: ConfigOption = Path("agent.toml"), yes: YesOption = False) -> Result:
    """Replace the cohort secret, starting on ONE device, after a device was revoked, lost or stolen.

    Its old secret would open later sums. Stop the agent first. Prints the code for the other devices, only once.
    Exit codes: 0 done; 1 failed; 2 not confirmed, or configuration or private store can't be used; 5 an agent runs; 7 no secret.

    Example: fedcg cohort renew
    """
    from edge_client.store.cohort_secret import create

    with _replacing(config, yes=yes, code=None) as store:
        code = create(store, replace=True)
    return _with_code(
        code,
        store,
        config,
        "Next: on every other remaining device, with its agent stopped: fedcg cohort join --replace --config AGENT.TOML\n"
        f"Then start the agents. Also remove the missing device from the roster: fedcg cohort roster FILE --config {config}",
    )


@command(app, "join")
def join_command(
    config: ConfigOption = Path("agent.toml"),
    code_file: Annotated[
        str | None,
        typer.Option(
            "--code-file", help="Read the code from this file, or from stdin with -. Default: the command asks for it."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing secret, after `fedcg cohort renew`.")
    ] = False,
    yes: YesOption = False,
) -> Result:
    """Join the cohort with the code from `fedcg cohort create`, or with --replace the code from `fedcg cohort renew`.

    With --replace, stop the agent first.
    Exit codes: 0 done, or the same secret was already set; 1 failed; 2 bad code, not confirmed, or configuration or private store can't be
    used; 5 an agent runs; 6 another secret exists.

    Example: fedcg cohort join --code-file -
    """
    from edge_client.store.cohort_secret import join, mark_in, secret_of

    secret_of(code := _code(code_file))  # checked before a store is created
    store, federation = _store_of(config)
    if replace:
        with _replacing(config, yes=yes, code=code) as store:
            joined = join(store, code, replace=True)
    else:
        joined = join(store, code)
    mark = mark_in(store, federation)
    following = f"fedcg agent run --config {config}" if replace else f"fedcg cohort card --config {config}"
    text = f"{'Joined' if joined else 'This device had already joined'}; mark {mark}\nNext: {following}"
    return {"joined": joined, "mark": mark}, text


@command(app, "status")
def status_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """Print the marks of this device's secret and roster, and its last round with a sum.

    All devices of a cohort must have the same marks.
    Exit codes: 0 has a secret; 1 failed; 2 configuration or private store can't be used; 7 no secret.

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
        f"last round with a sum: {'unknown' if last is None else f'{last}, even if the sum failed' if last else 'none'}",
        *([f"sums: {obstacle}"] if obstacle else []),
        "If a device was revoked, lost or stolen, its secret opens later sums: fedcg cohort renew",
    ]
    return values, "\n".join(lines)


@command(app, "card")
def card_command(
    config: ConfigOption = Path("agent.toml"),
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="The owner agrees that members may see this device's individual numbers when it joins, leaves or adds images. With "
            "`analytic` these are class counts, class sums and second moments. Not meant for methods that train: they would be weights.",
        ),
    ] = False,
) -> Result:
    """Print this device's card: one line with its name and its key for sealed sums. The key has no other use.

    Collect the cards of all devices in one file, in person and not through the coordinator. Run `fedcg cohort roster` with it on each device.
    Exit codes: 0 done; 1 failed; 2 configuration or private store can't be used.

    Example: fedcg cohort card >> roster.txt
    """
    from edge_client.store.roster import card_of

    settings = read_config(config)
    card = card_of(settings.device, settings.federation, _store_of(config)[0].sum_key(), alone=alone)
    return {"device": settings.device, "card": card, "alone": alone}, card


@command(app, "roster")
def roster_command(
    file: Annotated[str, typer.Argument(help="File with the `fedcg cohort card` lines of all devices; - for stdin.")],
    config: ConfigOption = Path("agent.toml"),
) -> Result:
    """Set the roster: the cards of all devices of the cohort. Replaces the previous roster and prints its mark.

    Only devices on the roster count in a sealed sum, so invented devices are excluded.
    Exit codes: 0 done; 1 failed; 2 bad line, or configuration or private store can't be used; 7 file not found.

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
    few = "" if len(names) >= least else f"\nA sealed sum needs {least} devices: add the cards of the other devices."
    text = f"{len(names)} devices: {', '.join(names)}\n{_consents(roster)}mark of the roster {mark}\n{COMPARE}.{few}"
    return {"devices": names, "alone": sorted(roster.alone), "mark": mark}, text


@command(app, "resume-sums")
def resume_sums_command(
    last: Annotated[
        int,
        typer.Argument(
            metavar="ROUND", min=0, max=1 << 53, help="Highest `last round with a sum` of the other devices."
        ),
    ],
    config: ConfigOption = Path("agent.toml"),
) -> Result:
    """Allow sealed sums above ROUND again, after the private store was restored or its record of sums was lost.

    The restored store lacks the latest sums of this device, and two sums of one round could reveal what one hides. Run `fedcg cohort status`
    on the other devices: ROUND is the highest number shown. Don't rely on the coordinator for it. Stop the agent first.
    Exit codes: 0 done, or sums were not blocked; 1 failed; 2 configuration or private store can't be used; 5 an agent runs;
    7 no private store.

    Example: fedcg cohort resume-sums 17
    """
    with alone_with_store(read_config(config)) as store:
        known = store.sum_gate.first_round
        is_due = known is None or 1 < known <= last  # corrects a number that was too low
        first = store.sum_gate.resume(max(last, store.seen()[1])) if is_due else known
    text = "" if is_due else "Sums were not blocked. "
    text += f"This device joins sums from round {first} on.\nNext: fedcg agent run --config {config}"
    return {"was_blocked": known is None, "first_round": first}, text


def _consents(roster: Roster) -> str:
    """The line that lists devices whose owners agreed to be seen individually, if any."""
    return f"Members may see individual numbers of: {', '.join(sorted(roster.alone))}\n" if roster.alone else ""


@contextmanager
def _replacing(config: Path, *, yes: bool, code: str | None) -> Iterator[PrivateStore]:
    """The store whose secret is about to be replaced, locked and confirmed by the owner."""
    from edge_client.store.cohort_secret import secret_of

    settings = read_config(config)
    with alone_with_store(settings) as store:
        kept = store.cohort_secret()
        if kept is None and code is None:
            raise BadInputError(
                f"{store.root} has no cohort secret to renew: create one with `fedcg cohort create`",
                exit_code=NOT_FOUND,
            )
        if kept is not None and (code is None or kept != secret_of(code)):
            if settings.data.defence_params.get("key") == "cohort":
                raise BadInputError(
                    "data.defence encrypts this device's images with a key from the cohort secret (key = cohort). Trained networks "
                    "only work with that key: open a new federation, with a new secret"
                )
            if not yes:
                confirm(f"This replaces the cohort secret of {settings.device}. {_REPLACED}\nContinue?")
        yield store


def _with_code(code: str, store: PrivateStore, config: Path, following: str) -> Result:
    """The result of a command that created a secret."""
    from edge_client.store.cohort_secret import mark_in

    mark = mark_in(store, read_config(config).federation)
    return {"code": code, "mark": mark}, (
        f"Code of this cohort, shown only once:\n\n  {code}\n\n"
        f"Check that `fedcg cohort status` prints this mark on every device: {mark}\n{following}"
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
