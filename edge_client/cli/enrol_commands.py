"""Commands for a device's identity: `fedcg enrol`, `fedcg agent join|renew|leave`. Importing this module loads no torch."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from edge_client.cli.shared_options import ConfigOption, read_config
from fedcg.config_file import set_values
from fedcg.errors import NOT_FOUND, BadInputError
from fedcg.files import replace_durably
from fedcg.learning.program import PROGRAM_PATTERN
from fedcg.terminal import Result, confirm, prints
from fedcg.text_output import seconds_of

STDIN = "-"
ProgramOption = Annotated[
    str | None,
    typer.Option(
        "--program",
        metavar="MODULE:FUNCTION",
        help="This device's own program, used instead of images (docs/how-to/programs.md).",
    ),
]


@prints
def enrol_command(
    token: Annotated[
        str,
        typer.Option(
            "--token",
            envvar="FEDCG_TOKEN",
            help="Token from `fedcg token create`, or - to read it from standard input.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="New folder for the device, with its agent.toml.")],
    url: Annotated[
        str | None, typer.Option(help="https://HOST:PORT of the coordinator, if the token does not contain it.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Device id (a-z, 0-9, dashes), if the token does not contain one.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Folder or file with this device's images (docs/how-to/data.md).")
    ] = None,
    program: ProgramOption = None,
) -> Result:
    """Enrol this machine as a device of a federation. Its keys are created here and never leave it.

    If the connection is lost, run the same command again to continue.
    Exit codes: 0 enrolled; 1 failed; 2 bad input, or a wrong clock; 3 no answer in time; 4 refused, or not connected; 6 --out is not
    empty; 7 --data not found.

    Example: fedcg enrol --token - --device line-4 --data /data/images --out /etc/fedcg/casting
    """
    from edge_client.identity.enrol import enrol
    from fedcg.agent_config import DATA
    from fedcg.wire.messages.enrolment_messages import Token

    if token == STDIN and sys.stdin.isatty():
        typer.echo("token: ", err=True, nl=False)
    parsed = Token.parse(sys.stdin.readline() if token == STDIN else token)
    where = DATA if data is None else _place(data, ". The token was not used; correct --data, or omit it")
    _check_program(program, data)
    enrolled = enrol(parsed, out, url=url, device=device, data=where)
    _write_program(enrolled.config, program)
    until = enrolled.certificate.not_valid_after_utc
    about = {"device": enrolled.device, "federation": enrolled.federation, "config": str(enrolled.config)}
    advice = "" if data or program else f"Set [data] root in {enrolled.config}.\n"
    return {**about, "certificate_expires": until.isoformat()}, (
        f"Enrolled as {enrolled.device} of federation {enrolled.federation}; certificate valid until {until:%Y-%m-%d}. The agent "
        f"renews it.\n{advice}{_next_steps(enrolled.config)}"
    )


@prints
def join_command(
    federation: Annotated[str, typer.Option("--federation", help="Federation to join, on the same coordinator.")],
    out: Annotated[Path, typer.Option("--out", help="New folder for agent.toml and the private store.")],
    data: Annotated[
        str | None,
        typer.Option("--data", help="Folder or file with this device's images for it (docs/how-to/data.md)."),
    ] = None,
    config: ConfigOption = Path("agent.toml"),
    program: ProgramOption = None,
) -> Result:
    """Join another federation with this device's identity. Each federation has its own agent.

    The training processes of the agents take turns on this device.
    Exit codes: 0 written; 1 failed; 2 bad input; 6 the folder is not empty; 7 --data or agent.toml not found.

    Example: fedcg agent join --federation welding --data /data/welding --out /etc/fedcg/welding
    """
    from edge_client.identity.enrol import join
    from fedcg.agent_config import DATA

    _check_program(program, data)
    if data is None and program is None:
        raise BadInputError("give --data, or --program for this device's own program")
    where, settings = DATA if data is None else _place(data), read_config(config)
    written = join(settings, config.read_text(encoding="utf-8"), federation, out, where)
    _write_program(written, program)
    return {"device": settings.device, "federation": federation, "config": str(written)}, (
        f"{settings.device} is configured for {federation} in addition to {settings.federation}, with the same keys and certificates.\n"
        f"fedcg doctor checks whether the coordinator has {federation} and accepts this device.\n"
        f"{_next_steps(written)}"
    )


@prints
def renew_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """Renew this device's certificate now. The agent renews it automatically in the last third of its validity.

    The agent may run meanwhile.
    Exit codes: 0 renewed; 1 failed; 2 configuration or keys can't be used; 3 no answer in time; 4 refused, or not connected.

    Example: fedcg agent renew --config /etc/fedcg/casting/agent.toml
    """
    from edge_client.identity.credentials import load_keys, renew

    settings = read_config(config)
    certificate = renew(settings, load_keys(settings).signing)
    until = certificate.not_valid_after_utc
    text = f"The certificate of {settings.device} is valid until {until:%Y-%m-%d %H:%M} UTC."
    return {"device": settings.device, "certificate_expires": until.isoformat()}, text


@prints
def leave_command(
    config: ConfigOption = Path("agent.toml"),
    erase: Annotated[
        bool,
        typer.Option("--erase", help="Also erase the private store with its models, the keys and the certificates."),
    ] = False,
    without_coordinator: Annotated[
        bool,
        typer.Option("--without-coordinator", help="Do not notify the coordinator, e.g. because it no longer exists."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    span: Annotated[
        str, typer.Option("--timeout", metavar="SPAN", help="How long to wait for the coordinator, e.g. 2m.")
    ] = "30s",
) -> Result:
    """Leave the federation permanently. Notifies the coordinator. With --erase, also erases the private data.

    Images and agent.toml are kept. Exit codes: 0 left; 1 failed; 2 invalid configuration, or not confirmed; 3 the coordinator did not
    confirm; 5 an agent still runs, nothing was erased; 7 no agent.toml, or no private store.

    Example: fedcg agent leave --erase
    """
    from edge_client.identity.conversation import leave

    timeout_s = seconds_of(span, "--timeout")
    settings = read_config(config)
    if not yes:
        confirm(_leaving(settings.device, settings.federation, settings.store if erase else None))
    left = leave(settings, erase=erase, notify=not without_coordinator, timeout_s=timeout_s)
    values = {"device": settings.device, "confirmed": left.confirmed, "erased": [str(path) for path in left.erased]}
    values |= {"kept": [str(path) for path in left.kept], "aside": [str(path) for path in left.aside]}
    outcome = "the coordinator confirmed" if left.confirmed else "the coordinator was not notified"
    gone = "".join(f"\n  erased {path}" for path in left.erased)
    gone += "".join(f"\n  kept {path}: not created by this program" for path in left.kept)
    gone += "".join(
        f"\n  kept {one}, a store that was moved aside, with secrets. To erase it: rm -r {shlex.quote(str(one))}"
        for one in left.aside
    )
    following = "Next: to enrol it again, create a token on the coordinator: fedcg token create"
    return values, f"{settings.device} has left {settings.federation}; {outcome}.{gone}\n{following}"


def _next_steps(config: Path) -> str:
    return (
        f"If the other devices have a cohort secret, before the first round: fedcg cohort join --config {config}\n"
        f"Next: fedcg doctor --config {config}, then fedcg agent run --config {config}"
    )


def _place(data: str, advice: str = "") -> str:
    """The absolute path of --data."""
    if not Path(data).exists():
        raise BadInputError(f"--data {data}: no such file or folder{advice}", exit_code=NOT_FOUND)
    return str(Path(data).absolute())


def _check_program(program: str | None, data: str | None) -> None:
    if program is not None and (data is not None or not re.fullmatch(PROGRAM_PATTERN, program)):
        raise BadInputError(f'--program {program}: give MODULE:FUNCTION, such as "client:client", and omit --data')


def _write_program(config: Path, program: str | None) -> None:
    """Set `program` in agent.toml, which permits the program to run. A line copied from another federation is commented out."""
    text = re.sub(r"(?m)^program\s*=", "# program =", config.read_text(encoding="utf-8"))
    values = {} if program is None else {("training", "program"): program}
    replace_durably(config, set_values(text, values).encode())


def _leaving(device: str, federation: str, erased: Path | None) -> str:
    what = f"{device} leaves {federation} permanently. To enrol it again, a new token is needed."
    if erased is not None:
        what += f"\nThis erases {erased} with its personal models, the keys and the certificates."
    return f"{what}\nContinue?"
