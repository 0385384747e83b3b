"""Commands that run and control a device's agent: `fedcg agent run|status|pause|resume|approve|unit`, and `fedcg doctor`.

Importing this module loads no torch. The systemd unit is rendered from the package's template, which holds its hardening and restart rules.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from edge_client.cli import store_commands
from edge_client.cli.enrol_commands import join_command, leave_command, renew_command
from edge_client.cli.shared_options import ConfigOption, read_config
from fedcg.child_python import loading
from fedcg.errors import FAILED, NOT_CONNECTED, NOT_FOUND, BadInputError
from fedcg.log_output import LogForm, LogFormOption, LogLevel, LogLevelOption, LogSettings
from fedcg.terminal import AsJson, Result, command, confirm, print_data, prints
from fedcg.text_output import moment, seconds_of, table

if TYPE_CHECKING:
    from edge_client.cli.doctor.findings import Finding
    from edge_client.config import AgentConfig
    from edge_client.store.owner_record import ConsentFile
    from fedcg.learning.spec import FederationSpec
    from fedcg.wire.messages.schemas import DoctorFinding


SHORT = 12
"""Digits of a digest that are shown, and the fewest that name one."""


@prints
def pause_command(
    config: ConfigOption = Path("agent.toml"),
    span: Annotated[
        str | None, typer.Option("--for", metavar="SPAN", help="How long to pause, e.g. 30m, 2h or 3d.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Shown on this device only, never sent.")] = "",
    now: Annotated[bool, typer.Option("--now", help="Abandon the current round instead of finishing it.")] = False,
) -> Result:
    """Pause training until `fedcg agent resume`. The agent stays connected. The pause survives a restart.

    The agent finishes and delivers the current round. Then the training process exits and frees its memory.
    Exit codes: 0 paused; 1 failed; 2 --for is not a time span; 4 no agent runs.

    Example: fedcg agent pause --for 2h --reason "the line is being cleaned"
    """
    from edge_client.agent.owner import MAX_PAUSE_S, PauseRequest, ask_agent
    from edge_client.store.owner_record import MAX_REASON

    for_s = None if span is None else seconds_of(span, "--for", f"{MAX_PAUSE_S / 86_400:g}d")
    if for_s == 0:
        raise BadInputError(f"--for {span}: give a time above 0, or omit --for")
    if len(reason) > MAX_REASON:
        raise BadInputError(f"--reason has {len(reason)} characters, the limit is {MAX_REASON}")
    settings = read_config(config)
    data = ask_agent(settings.store, PauseRequest(for_s=for_s, reason=reason, now=now))
    until = "" if data["until"] is None else f" until {moment(data['until'])}"
    text = f"{settings.device} is paused{until}.\nNext: to end the pause, fedcg agent resume"
    return {"device": settings.device, "paused": True, **data}, text


@prints
def resume_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """End a pause. The device participates from the next round on.

    Exit codes: 0 not paused any more; 1 failed; 4 no agent runs.

    Example: fedcg agent resume
    """
    from edge_client.agent.owner import ResumeRequest, ask_agent

    settings = read_config(config)
    data = ask_agent(settings.store, ResumeRequest())
    text = "is no longer paused" if data["was_paused"] else "was not paused"
    return {"device": settings.device, "paused": False, **data}, f"{settings.device} {text}."


@prints
def approve_command(
    digest: Annotated[
        str, typer.Argument(help="Digest of the spec, or its first 12 digits. Default: the only spec that waits.")
    ] = "",
    config: ConfigOption = Path("agent.toml"),
    list_all: Annotated[bool, typer.Option("--list", help="List waiting and approved specs.")] = False,
    revoke: Annotated[str | None, typer.Option("--revoke", metavar="DIGEST", help="Revoke an approval.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> Result:
    """Approve one spec that exceeds this device's policy, after showing what would leave the device.

    A changed spec needs a new approval. Exit codes: 0 approved, listed or revoked; 1 failed; 2 not confirmed; 7 no such spec.

    Example: fedcg agent approve 3f9c21d07a54
    """
    from edge_client.store.owner_record import Consent

    settings = read_config(config)
    kept = Consent(settings.store).read()
    if list_all:
        return _listed(kept)
    if revoke is not None:
        chosen = _named(revoke, kept.approved, "approved")
        outcome = f"Spec {chosen[:SHORT]} is no longer approved.\nNext: fedcg agent status"
    else:
        chosen = _named(digest, kept.waiting, "waiting")
        typer.echo(_consent_text(settings, chosen, kept.waiting[chosen].detail), err=True)
        if not yes:
            confirm("Approve this?")
        outcome = (
            f"Spec {chosen[:SHORT]} is approved.\nNext: to revoke it, fedcg agent approve --revoke {chosen[:SHORT]}"
        )
    _decide(settings, chosen, approve=revoke is None)
    return {"device": settings.device, "spec": chosen, "approved": revoke is None}, outcome


def _named(text: str, known: Mapping[str, object], what: str) -> str:
    """The full digest of the spec that `text` abbreviates."""
    found = [digest for digest in known if digest.startswith(text)]
    if len(found) == 1 and (not text or len(text) >= SHORT):
        return found[0]
    if not known:
        raise BadInputError(
            "no spec is waiting for approval" if what == "waiting" else f"no spec is {what}", exit_code=NOT_FOUND
        )
    names = ", ".join(one[:SHORT] for one in sorted(known))
    raise BadInputError(
        f"{text or 'no digest'}: does not match exactly one {what} spec ({names}); give the first {SHORT} digits of one",
        exit_code=NOT_FOUND,
    )


def _listed(kept: ConsentFile) -> Result:
    waiting = {digest: one.model_dump(exclude={"format"}) for digest, one in kept.waiting.items()}
    rows = [(digest[:SHORT], "waits", moment(one.since), one.detail) for digest, one in kept.waiting.items()]
    rows += [(digest[:SHORT], "approved", moment(at), "") for digest, at in kept.approved.items()]
    text = table(("spec", "state", "since", "why"), rows, "No spec is waiting for approval or approved.")
    following = "".join(f"\nNext: fedcg agent approve {digest[:SHORT]}" for digest in list(kept.waiting)[:1])
    return {"waiting": waiting, "approved": kept.approved}, text + following


def _decide(settings: AgentConfig, digest: str, *, approve: bool) -> None:
    """Send the decision to the running agent. Without a running agent, write it into the store."""
    from edge_client.agent.owner import DecisionRequest, ask_agent, decide
    from edge_client.errors import NotRunningError
    from edge_client.store.private_store import open_store
    from fedcg.event_log import EventLog

    request = DecisionRequest(command="approve" if approve else "revoke", spec=digest)
    try:
        ask_agent(settings.store, request)
    except NotRunningError:
        store = open_store(settings)
        with store.locked("lock"):
            decide(settings, store, EventLog(store.root / "events.jsonl", time.time).unwatched(), request, time.time())


def _consent_text(settings: AgentConfig, digest: str, why: str) -> str:
    """What would leave the device under a spec, and what a round costs, as text."""
    from edge_client.agent.owner import part_bytes, update_bytes
    from edge_client.firewall import beyond_policy, excesses, unlisted, widened
    from edge_client.store.private_store import open_store
    from fedcg.event_log import log_text, read_events
    from fedcg.wire.parts import VOLUNTARY_REPORT

    spec = open_store(settings).spec(digest)
    if spec is None:
        raise BadInputError(f"spec {digest} is no longer in the store; it waits again when the coordinator offers it")
    policy, sizes = settings.policy, part_bytes(spec)
    reported = widened(policy, spec).allow_report & (frozenset(spec.report) | VOLUNTARY_REPORT)
    offers = [one for one in read_events(settings.store / "events.jsonl") if one.get("event") == "offer"]
    about = [
        ("Federation", "federations", spec.federation),
        ("method", "methods", spec.method),
        *(("rounds", "", one.get("rounds")) for one in offers[-1:]),
    ]
    new, strange = " (not in [policy])", unlisted(spec, policy)
    named = (f"{name} {value}{new if listed in strange else ''}" for name, listed, value in about)
    lines = [
        f"{', '.join(named)}, spec {digest[:SHORT]}.",
        f"Needs approval because: {'; '.join(text for _, text in beyond_policy(spec, policy)) or why}",
        f"Leaves {settings.device} after each round, up to {_size(update_bytes(spec))}:",
        *(
            f"  {part.value:<16} {_size(sizes[part.value]):>9}  {spec.meaning_of(part)}"
            f"{'' if part in policy.allow_upload else new}"
            for part in spec.upload
        ),
        "Report on the round:",
        *(
            f"  {field.value:<16} {'':>9}  {field.meaning}{'' if field in policy.allow_report else new}"
            for field in sorted(reported)
        ),
        f"  {'facts':<16} {'':>9}  versions of torch and fedcg-edge, processor model, cpu or cuda, threads, batch size,",
        f"  {'':<16} {'':>9}  rows per training step, SHA-256 of the device's own program",
        f"Work per round: {_work(spec, dict.fromkeys(excesses(spec, policy), new))}.",
    ]
    return "\n".join(log_text(line, len(line)) for line in lines)  # values of a spec can't steer the terminal


def _work(spec: FederationSpec, marks: Mapping[str, str]) -> str:
    named = {name: spec.params[name] for name in ("epochs", "steps", "batch_size") if spec.params.get(name)}
    items = (f"{name.replace('_', ' ')} {value}{marks.get(name, '')}" for name, value in named.items())
    return ", ".join(items) or "the method's defaults"


def _size(count: int) -> str:
    """A size in MB or kB, rounded up because it is shown as a bound."""
    return f"{ceil(count / 1e5) / 10:.1f} MB" if count >= 1e6 else f"{ceil(count / 1e2) / 10:.1f} kB"


app = typer.Typer(
    help="Run and control this device's agent. Inspect its state and what has left this device.", no_args_is_help=True
)

app.command("pause")(pause_command)
app.command("resume")(resume_command)
app.command("approve")(approve_command)
app.command("sent")(store_commands.sent_command)
app.command("diagnose")(store_commands.diagnose_command)
app.add_typer(store_commands.store_app, name="store")
app.command("backup")(store_commands.backup_command)
app.command("restore")(store_commands.restore_command)
app.command("join")(join_command)
app.command("logs")(store_commands.logs_command)
app.command("renew")(renew_command)
app.command("leave")(leave_command)
_STYLES = {"ok": None, "warning": "yellow", "failed": "red"}


@app.command("run")
def run_command(
    config: ConfigOption = Path("agent.toml"),
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="Exit after the last round and the model's export.")
    ] = False,
    form: LogFormOption = LogForm.CONSOLE,
    level: LogLevelOption = LogLevel.INFO,
    as_json: AsJson = False,
) -> None:
    """Run the agent until SIGTERM or Ctrl-C. SIGUSR1 toggles the log level `debug`.

    Exit codes: 0 stopped; 1 failed; 2 configuration, keys or private store can't be used; 4 stopped, and the coordinator has
    revoked this device; 5 an agent already runs; 7 no agent.toml.

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
        from edge_client.cli.doctor.checks import findings_of  # imports the checks of images and training

        return findings_of(settings)

    code = run_agent(settings, log, examine, until_finished=until_finished)
    if as_json:
        print_data({"event": "ended", "device": settings.device, "exit_code": code})
    raise typer.Exit(code)


@command(app, "status")
def status_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """Show the state of this device: link, round, receipts, last decline, deployed model, outcome.

    If the agent runs, its current activity is shown too. Exit codes: 0 shown; 2 invalid configuration;
    4 shown, and the coordinator has revoked this device; 7 no agent.toml, or no private store.

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
    hardware: Annotated[
        bool, typer.Option("--hardware", help="Show the hardware, its live readings and whether each allows training.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check clock, paths, disk, keys, certificate, broker, data and training on this device. Print a remedy for each problem.

    --hardware also works without agent.toml. Exit codes: 0 all checks passed; 1 a check failed; 7 no agent.toml.

    Example: fedcg doctor --config /etc/fedcg/casting/agent.toml
    """
    from edge_client.cli.doctor.checks import Finding, examine
    from edge_client.config import load_config
    from edge_client.errors import ConfigError
    from fedcg.files import is_locked

    logging.getLogger("fedcg.wire").addHandler(logging.NullHandler())  # its warnings become a finding
    try:
        settings = None if hardware and not config.exists() else load_config(config, os.environ)
        if hardware or settings is None:
            findings = _hardware(settings)
        else:
            findings = examine(settings, datetime.now(timezone.utc))
    except ConfigError as error:
        if error.exit_code == NOT_FOUND:
            raise
        findings = (Finding("configuration", "failed", str(error), f"correct {config}"),)
    is_sound = all(finding.state != "failed" for finding in findings)
    if as_json:
        print_data({"sound": is_sound, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            _print(f"{finding.state:<8} {finding.check:<14} {finding.detail}", _STYLES[finding.state])
            if finding.advice:
                _print(f"{'':<23} what to do: {finding.advice}")
        if is_sound and settings is not None and not hardware:
            runs = is_locked(settings.store / "lock")
            following = "the agent already runs: fedcg agent status" if runs else "fedcg agent run"
            _print(f"Next: {following} --config {config}")
    raise typer.Exit(0 if is_sound else FAILED)


def _hardware(settings: AgentConfig | None) -> tuple[Finding, ...]:
    from devices.eligibility import EligibilitySettings
    from edge_client.cli.doctor.hardware import examine_hardware

    eligibility = EligibilitySettings() if settings is None else settings.eligibility
    return examine_hardware(eligibility, Path.cwd() if settings is None else settings.store)


def _print(line: str, style: str | None = None) -> None:
    """Print one line without wrapping, so that a path in it can be copied."""
    Console(highlight=False).print(line, style=style, markup=False, soft_wrap=True)
