"""Commands of a device: `fedcg agent run|status|pause|resume|approve|sent|diagnose|renew|leave|unit` and `fedcg doctor`. Importing this loads no torch.

The systemd unit is rendered from the template that is part of the package; its hardening and restart rules are there.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path, PurePosixPath
from string import Template
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from edge_client.cli.control_commands import approve_command, pause_command, resume_command
from edge_client.cli.enrol_commands import join_command, leave_command, renew_command
from edge_client.cli.record_commands import diagnose_command, ledger_command, logs_command, sent_command
from edge_client.cli.shared_options import ConfigOption, read_config
from edge_client.cli.store_commands import backup_command, restore_command, store_app
from fedcg.errors import FAILED, NOT_CONNECTED, NOT_FOUND
from fedcg.log_output import LogForm, LogFormOption, LogLevel, LogLevelOption, LogSettings
from fedcg.terminal import AsJson, Result, print_data, prints
from fedcg.worker_process import loading

if TYPE_CHECKING:
    from edge_client.cli.doctor.findings import Finding
    from edge_client.config import AgentConfig
    from fedcg.wire.messages.schemas import DoctorFinding

DEFAULT_EXECUTABLE = PurePosixPath("/opt/fedcg/venv/bin/fedcg")
DEFAULT_CONFIG_ROOT = PurePosixPath("/etc/fedcg")
AGENT_UNIT = "fedcg-agent@.service"


def render_agent_unit(
    executable: PurePosixPath = DEFAULT_EXECUTABLE, config_root: PurePosixPath = DEFAULT_CONFIG_ROOT
) -> str:
    """The text of `fedcg-agent@.service`.

    Args:
        executable: Absolute path of the installed `fedcg` command.
        config_root: Absolute path of the folder that holds one device bundle per federation.

    Returns:
        The unit file's content.

    Raises:
        ValueError: When a path is not absolute, or has characters that systemd would interpret.
    """
    for path in (executable, config_root):
        if not path.is_absolute() or set(str(path)) & set(" \t\n%$\"'\\;"):
            raise ValueError(f"{path} must be an absolute path without spaces, quotes, % or $")
    text = files("edge_client.cli").joinpath(f"{AGENT_UNIT}.template").read_text(encoding="utf-8")
    return Template(text).substitute(executable=executable, config_root=config_root)


@prints
def unit_command(
    executable: Annotated[
        str, typer.Option("--executable", help="Absolute path of the installed `fedcg` command.")
    ] = str(DEFAULT_EXECUTABLE),
    config_root: Annotated[
        str, typer.Option("--config-root", help="Absolute path of the folder with one bundle per federation.")
    ] = str(DEFAULT_CONFIG_ROOT),
) -> Result:
    """Print the systemd unit fedcg-agent@.service.

    Example: fedcg agent unit --config-root /etc/fedcg
    """
    try:
        text = render_agent_unit(PurePosixPath(executable), PurePosixPath(config_root))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return {"unit": AGENT_UNIT, "text": text}, text.removesuffix("\n")


app = typer.Typer(
    help="Run this device's agent, steer it, and see what it does and what has left this device.", no_args_is_help=True
)

app.command("pause")(pause_command)
app.command("resume")(resume_command)
app.command("approve")(approve_command)
app.command("sent")(sent_command)
app.command("ledger")(ledger_command)
app.command("diagnose")(diagnose_command)
app.add_typer(store_app, name="store")
app.command("backup")(backup_command)
app.command("restore")(restore_command)
app.command("unit")(unit_command)
app.command("join")(join_command)
app.command("logs")(logs_command)
app.command("renew")(renew_command)
app.command("leave")(leave_command)
_STYLES = {"ok": None, "warning": "yellow", "failed": "red"}


@app.command("run")
def run_command(
    config: ConfigOption = Path("agent.toml"),
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="End after the last round, once the model is exported.")
    ] = False,
    form: LogFormOption = LogForm.CONSOLE,
    level: LogLevelOption = LogLevel.INFO,
    as_json: AsJson = False,
) -> None:
    """Take part in the federation until SIGTERM or Ctrl-C. SIGUSR1 toggles the log level `debug`.

    Exit codes: 0 ended in order; 1 failed; 2 configuration, keys or private store can't be used; 4 ended in order, and the coordinator has
    revoked this device; 5 an agent runs already.

    Example: fedcg agent run --config /etc/fedcg/casting/agent.toml
    """
    with loading():
        from edge_client.agent.run import run_agent
    from fedcg.log_output import set_up_log, toggle_debug_on_signal

    log = LogSettings(form, level)
    set_up_log(log)
    toggle_debug_on_signal(log)
    settings = read_config(config)
    if as_json:
        print_data({"event": "agent", "device": settings.device, "store": str(settings.store)})
    else:
        place = f"{settings.broker.host}:{settings.broker.port}"
        print(f"agent {settings.device} of {settings.federation}, broker {place}, store {settings.store}", flush=True)

    def examine() -> tuple[DoctorFinding, ...]:
        from edge_client.cli.doctor.checks import findings_of  # what checks images and training comes with it

        return findings_of(settings)

    code = run_agent(settings, log, examine, until_finished=until_finished)
    if as_json:
        print_data({"event": "ended", "device": settings.device, "exit_code": code})
    raise typer.Exit(code)


@app.command("status")
@prints
def status_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """Show where this device stands: link, round, receipts, why it declined last, the model in use, how it ended.

    While the agent runs, also what it does now. Exit codes: 0 shown; 2 the configuration is wrong;
    4 shown, and the coordinator has revoked this device; 7 there is no private store.

    Example: fedcg agent status
    """
    from edge_client.cli.status import read_status, status_table

    status = read_status(read_config(config))
    following = "fedcg agent logs --follow" if status["running"] else "fedcg agent run"
    following = "fedcg agent approve" if status.get("waits_for_approval") else following
    revoked = "ask the coordinator's operator for a token, then fedcg enrol"
    is_revoked = bool(status.get("revoked"))
    following = revoked if is_revoked else f"{following} --config {config}"
    return status, f"{status_table(status)}\nNext: {following}", NOT_CONNECTED if is_revoked else 0


def doctor_command(
    config: ConfigOption = Path("agent.toml"),
    samples: Annotated[
        Path | None,
        typer.Option(
            "--samples", metavar="FILE.png", help="also write real images beside what the data defence makes of them"
        ),
    ] = None,
    hardware: Annotated[
        bool,
        typer.Option("--hardware", help="show the box and its live readings instead, and whether each lets it train"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check clock, paths, disk, keys, certificate, broker, data and training on this device, and print what to do.

    --hardware works without an agent.toml too. Exit codes: 0 nothing failed; 1 a check failed; 7 there is no agent.toml.

    Example: fedcg doctor --config /etc/fedcg/casting/agent.toml
    """
    from edge_client.cli.doctor.checks import Finding, examine
    from edge_client.config import load_config
    from edge_client.errors import ConfigError
    from edge_client.store.private_store import is_locked

    logging.getLogger("fedcg.wire").addHandler(logging.NullHandler())  # its warnings become a finding
    code = FAILED
    try:
        settings = None if hardware and not config.exists() else load_config(config, os.environ)
        if hardware or settings is None:
            findings = _hardware(settings)
        else:
            findings = examine(settings, datetime.now(timezone.utc))
        if samples is not None and settings is not None:
            findings += (_samples(settings, samples),)
    except ConfigError as error:
        findings = (Finding("configuration", "failed", str(error), f"correct {config}"),)
        code = NOT_FOUND if error.exit_code == NOT_FOUND else FAILED
    is_sound = all(finding.state != "failed" for finding in findings)
    if as_json:
        print_data({"sound": is_sound, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            _print(f"{finding.state:<8} {finding.check:<14} {finding.detail}", _STYLES[finding.state])
            if finding.advice:
                _print(f"{'':<23} what to do: {finding.advice}")
        if is_sound and settings is not None and not hardware:
            following = (
                "the agent runs already: fedcg agent status"
                if is_locked(settings.store / "lock")
                else "fedcg agent run"
            )
            _print(f"Next: {following} --config {config}")
    raise typer.Exit(0 if is_sound else code)


def _hardware(settings: AgentConfig | None) -> tuple[Finding, ...]:
    from devices.eligibility import EligibilitySettings
    from edge_client.cli.doctor.hardware import examine_hardware

    eligibility = EligibilitySettings() if settings is None else settings.eligibility
    return examine_hardware(eligibility, Path.cwd() if settings is None else settings.store)


def _samples(settings: AgentConfig, path: Path) -> Finding:
    from edge_client.cli.doctor.findings import Finding

    try:
        from edge_client.cli.doctor.defence_samples import make_samples  # torch comes with it
    except ModuleNotFoundError as error:
        return Finding("samples", "failed", f"{error.name} not installed", "pip install 'fedcg-edge[edge]'")
    return make_samples(settings, path)


def _print(line: str, style: str | None = None) -> None:
    """Print one line, never broken: a path in it can be copied."""
    Console(highlight=False).print(line, style=style, markup=False, soft_wrap=True)
