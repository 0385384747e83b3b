"""Commands about this box's identity: `fedcg enrol`, `fedcg agent renew`, `fedcg agent leave`. Importing this loads no torch."""

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
        help="This box's own program, in the place of images (docs/how-to/programs.md).",
    ),
]


@prints
def enrol_command(
    token: Annotated[
        str,
        typer.Option(
            "--token", envvar="FEDCG_TOKEN", help="What `fedcg token create` printed; - reads it from standard input."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The device's new folder; agent.toml goes there.")],
    url: Annotated[
        str | None, typer.Option(help="https://HOST:PORT of the coordinator, where the token does not hold it.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="This box's id, where the token is for any: a-z, 0-9, dashes.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Folder or file with this box's images (docs/how-to/data.md).")
    ] = None,
    program: ProgramOption = None,
) -> Result:
    """Make this box a device of a federation, in one step; its keys are made here and never leave it.

    Exit codes: 0 enrolled; 1 failed; 2 bad input, or a wrong clock; 3 no answer in time; 4 refused, or not connected; 6 --out holds a device or other things;
    7 --data is not there. Run again after a lost answer, it goes on.

    Example: fedcg enrol --token - --device line-4 --data /data/images --out /etc/fedcg/casting
    """
    from edge_client.identity.enrol import enrol
    from fedcg.agent_config import DATA
    from fedcg.wire.messages.enrolment_messages import Token

    if token == STDIN and sys.stdin.isatty():
        typer.echo("token: ", err=True, nl=False)
    parsed = Token.parse(sys.stdin.readline() if token == STDIN else token)
    where = DATA if data is None else _place(data, ". The token was not used; correct --data, or leave it out")
    _check_program(program, data)
    enrolled = enrol(parsed, out, url=url, device=device, data=where)
    _write_program(enrolled.config, program)
    until = enrolled.certificate.not_valid_after_utc
    about = {"device": enrolled.device, "federation": enrolled.federation, "config": str(enrolled.config)}
    advice = "" if data or program else f"Set [data] root in {enrolled.config}.\n"
    return {**about, "certificate_expires": until.isoformat()}, (
        f"Enrolled as {enrolled.device} of federation {enrolled.federation}; certificate until {until:%Y-%m-%d}, renewed by "
        f"the agent.\n{advice}{_next_steps(enrolled.config)}"
    )


@prints
def join_command(
    federation: Annotated[str, typer.Option("--federation", help="The other federation of the same coordinator.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder, for agent.toml and the private store.")],
    data: Annotated[
        str | None, typer.Option("--data", help="Folder or file with this box's images for it (docs/how-to/data.md).")
    ] = None,
    config: ConfigOption = Path("agent.toml"),
    program: ProgramOption = None,
) -> Result:
    """Take part in a second federation with this device's identity; each federation has an agent of its own.

    Exit codes: 0 written; 1 failed; 2 bad input; 6 the folder is not empty; 7 --data or agent.toml is not there. The training processes take turns on this device.

    Example: fedcg agent join --federation welding --data /data/welding --out /etc/fedcg/welding
    """
    from edge_client.identity.enrol import join
    from fedcg.agent_config import DATA

    _check_program(program, data)
    if data is None and program is None:
        raise BadInputError("give --data, or --program of this box's own program")
    where, settings = DATA if data is None else _place(data), read_config(config)
    written = join(settings, config.read_text(encoding="utf-8"), federation, out, where)
    _write_program(written, program)
    return {"device": settings.device, "federation": federation, "config": str(written)}, (
        f"{settings.device} can take part in {federation} beside {settings.federation}, with the same keys and certificates.\n"
        f"Whether the coordinator has {federation}, with a place for this device, fedcg doctor asks it.\n"
        f"{_next_steps(written)}"
    )


@prints
def renew_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """Renew this device's certificate now; the agent does it by itself in the last third of its life.

    Exit codes: 0 renewed; 1 failed; 2 configuration or keys can't be used; 3 no answer in time; 4 refused, or not connected. A running agent goes on meanwhile.

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
        typer.Option("--erase", help="Then erase the private store with its models, the keys and the certificates."),
    ] = False,
    without_coordinator: Annotated[
        bool,
        typer.Option(
            "--without-coordinator", help="Do not inform the coordinator; for a coordinator that is gone for good."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    span: Annotated[
        str, typer.Option("--timeout", metavar="SPAN", help="How long to wait for the coordinator, e.g. 2m.")
    ] = "30s",
) -> Result:
    """Leave the federation for good: inform the coordinator, so that no round waits, and with --erase remove the private data.

    The images and agent.toml stay. Exit codes: 0 left; 2 the configuration is wrong, or the question was not answered with yes;
    3 the coordinator did not confirm; 5 an agent still runs, and nothing was erased.

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
    outcome = "the coordinator confirmed" if left.confirmed else "the coordinator was not informed"
    gone = "".join(f"\n  erased {path}" for path in left.erased)
    gone += "".join(f"\n  left {path}: this program did not make it" for path in left.kept)
    gone += "".join(
        f"\n  left {one}, moved aside with its secrets: rm -r {shlex.quote(str(one))}" for one in left.aside
    )
    following = "Next: a new token brings it back: on the coordinator, fedcg token create"
    return values, f"{settings.device} has left {settings.federation}; {outcome}.{gone}\n{following}"


def _next_steps(config: Path) -> str:
    return (
        f"Where the other devices have a cohort secret, before the first round: fedcg cohort join --config {config}\n"
        f"Next: fedcg doctor --config {config}, then fedcg agent run --config {config}"
    )


def _place(data: str, advice: str = "") -> str:
    """The images that --data names, from everywhere."""
    if not Path(data).exists():
        raise BadInputError(f"--data {data}: there is no such file or folder{advice}", exit_code=NOT_FOUND)
    return str(Path(data).absolute())


def _check_program(program: str | None, data: str | None) -> None:
    if program is not None and (data is not None or not re.fullmatch(PROGRAM_PATTERN, program)):
        raise BadInputError(f'--program {program}: give MODULE:FUNCTION, such as "client:client", and leave --data out')


def _write_program(config: Path, program: str | None) -> None:
    """The line in agent.toml by which its owner lets the program run; a line of another federation goes."""
    text = re.sub(r"(?m)^program\s*=", "# program =", config.read_text(encoding="utf-8"))
    values = {} if program is None else {("training", "program"): program}
    replace_durably(config, set_values(text, values).encode())


def _leaving(device: str, federation: str, erased: Path | None) -> str:
    what = f"{device} leaves {federation} for good; only a new token brings it back."
    if erased is not None:
        what += f"\n{erased} with the personal models in it, the keys and the certificates are erased."
    return f"{what}\nGo on?"
