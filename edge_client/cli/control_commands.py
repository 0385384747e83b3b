"""`fedcg agent pause|resume|approve`: the owner's decisions, as requests to the running agent. Importing this loads no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_client.cli.shared_options import ConfigOption, read_config
from fedcg.errors import NOT_FOUND, BadInputError
from fedcg.terminal import Result, confirm, prints
from fedcg.text_output import moment, seconds_of, table

if TYPE_CHECKING:
    from edge_client.config import AgentConfig
    from edge_client.store.owner_record import ConsentFile
    from fedcg.learning.spec import FederationSpec

SHORT = 12
"""Digits of a digest that are shown, and as many as a digest needs to be named."""


@prints
def pause_command(
    config: ConfigOption = Path("agent.toml"),
    span: Annotated[
        str | None, typer.Option("--for", metavar="SPAN", help="Ends by itself after 30m, 2h or 3d.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="For people at this device; it is never sent.")] = "",
    now: Annotated[
        bool, typer.Option("--now", help="Also abandon the round under way, which is finished else.")
    ] = False,
) -> Result:
    """Train no new round until `fedcg agent resume`; the agent stays connected, and keeps the pause when it starts again.

    A round under way is finished and delivered; then the training process ends, which frees its memory. Exit codes: 0 paused; 1 failed;
    2 --for is no time; 4 no agent runs.

    Example: fedcg agent pause --for 2h --reason "the line is being cleaned"
    """
    from edge_client.agent.owner_requests import MAX_PAUSE_S, PauseRequest, ask_agent
    from edge_client.store.owner_record import MAX_REASON

    for_s = None if span is None else seconds_of(span, "--for", f"{MAX_PAUSE_S / 86_400:g}d")
    if for_s == 0:
        raise BadInputError(f"--for {span}: choose more than 0, or leave it out")
    if len(reason) > MAX_REASON:
        raise BadInputError(f"--reason has {len(reason)} characters, at most {MAX_REASON} are kept")
    settings = read_config(config)
    data = ask_agent(settings.store, PauseRequest(for_s=for_s, reason=reason, now=now))
    until = "" if data["until"] is None else f" until {moment(data['until'])}"
    text = f"{settings.device} is paused{until}.\nNext: to take part again, fedcg agent resume"
    return {"device": settings.device, "paused": True, **data}, text


@prints
def resume_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """End a pause: the device takes part from the next round on.

    Exit codes: 0 it takes part; 1 failed; 4 no agent runs.

    Example: fedcg agent resume
    """
    from edge_client.agent.owner_requests import ResumeRequest, ask_agent

    settings = read_config(config)
    data = ask_agent(settings.store, ResumeRequest())
    text = "takes part again" if data["was_paused"] else "was not paused"
    return {"device": settings.device, "paused": False, **data}, f"{settings.device} {text}."


@prints
def approve_command(
    digest: Annotated[
        str, typer.Argument(help="The spec's digest, or its first 12 digits; without it the only one that waits.")
    ] = "",
    config: ConfigOption = Path("agent.toml"),
    list_all: Annotated[
        bool, typer.Option("--list", help="List specs that wait, and those that are approved.")
    ] = False,
    revoke: Annotated[str | None, typer.Option("--revoke", metavar="DIGEST", help="Revoke an approval.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> Result:
    """Show what would leave this device under a spec beyond its policy, and approve exactly that spec.

    A changed spec needs another approval. Exit codes: 0 approved, listed or revoked; 1 failed; 2 the question was not answered with
    yes; 7 nothing of that name waits.

    Example: fedcg agent approve 3f9c21d07a54
    """
    from edge_client.store.owner_record import Consent

    settings = read_config(config)
    kept = Consent(settings.store).read()
    if list_all:
        return _listed(kept)
    if revoke is not None:
        chosen = _named(revoke, kept.approved, "approved")
        outcome = f"Spec {chosen[:SHORT]} is not approved any more.\nNext: fedcg agent status"
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
    """The digest that a text names."""
    found = [digest for digest in known if digest.startswith(text)]
    if len(found) == 1 and (not text or len(text) >= SHORT):
        return found[0]
    if not known:
        raise BadInputError(
            "no spec waits for approval" if what == "waiting" else f"no spec is {what}", exit_code=NOT_FOUND
        )
    names = ", ".join(one[:SHORT] for one in sorted(known))
    raise BadInputError(
        f"{text or 'one spec'}: no single spec of that name is {what} ({names}); name one by its first {SHORT} digits",
        exit_code=NOT_FOUND,
    )


def _listed(kept: ConsentFile) -> Result:
    waiting = {digest: one.model_dump(exclude={"format"}) for digest, one in kept.waiting.items()}
    rows = [(digest[:SHORT], "waits", moment(one.since), one.detail) for digest, one in kept.waiting.items()]
    rows += [(digest[:SHORT], "approved", moment(at), "") for digest, at in kept.approved.items()]
    text = table(("spec", "state", "since", "why"), rows, "No spec waits for approval, and none is approved.")
    following = "".join(f"\nNext: fedcg agent approve {digest[:SHORT]}" for digest in list(kept.waiting)[:1])
    return {"waiting": waiting, "approved": kept.approved}, text + following


def _decide(settings: AgentConfig, digest: str, *, approve: bool) -> None:
    """Tell the running agent; without one write the decision into the store."""
    from edge_client.agent.owner_control import decide
    from edge_client.agent.owner_requests import ApproveRequest, RevokeRequest, ask_agent
    from edge_client.errors import NotRunningError
    from edge_client.store.private_store import open_store
    from fedcg.event_log import EventLog

    request = ApproveRequest(spec=digest) if approve else RevokeRequest(spec=digest)
    try:
        ask_agent(settings.store, request)
    except NotRunningError:
        store = open_store(settings)
        with store.locked("lock"):
            decide(store, EventLog(store.root / "events.jsonl", time.time).unwatched(), request, time.time())


def _consent_text(settings: AgentConfig, digest: str, why: str) -> str:
    """What would leave the device under a spec, and what a round costs, in plain words."""
    from edge_client.agent.owner_control import part_bytes, update_bytes
    from edge_client.firewall import beyond_policy, excesses, unlisted, widened
    from edge_client.store.private_store import open_store
    from fedcg.event_log import log_text, read_events
    from fedcg.wire.parts import VOLUNTARY_REPORT

    spec = open_store(settings).spec(digest)
    if spec is None:
        raise BadInputError(
            f"spec {digest} is not in the store any more; it waits again when the coordinator offers it"
        )
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
        f"Why it waits: {'; '.join(text for _, text in beyond_policy(spec, policy)) or why}",
        f"After each round this would leave {settings.device}, up to {_size(update_bytes(spec))}:",
        *(
            f"  {part.value:<16} {_size(sizes[part.value]):>9}  {spec.meaning_of(part)}"
            f"{'' if part in policy.allow_upload else new}"
            for part in spec.upload
        ),
        "With it, about the round:",
        *(
            f"  {field.value:<16} {'':>9}  {field.meaning}{'' if field in policy.allow_report else new}"
            for field in sorted(reported)
        ),
        f"  {'':<16} {'':>9}  versions of torch and fedcg-edge, model of the processor, threads, batch size, precision",
        f"What a round asks of it: {_work(spec, dict.fromkeys(excesses(spec, policy), new))}.",
    ]
    return "\n".join(log_text(line, len(line)) for line in lines)  # values of a spec can't steer the terminal


def _work(spec: FederationSpec, marks: Mapping[str, str]) -> str:
    named = {name: spec.params[name] for name in ("epochs", "steps", "batch_size") if spec.params.get(name)}
    items = (f"{name.replace('_', ' ')} {value}{marks.get(name, '')}" for name, value in named.items())
    return ", ".join(items) or "the defaults of its method"


def _size(count: int) -> str:
    """Rounded up: what is shown is a bound."""
    return f"{ceil(count / 1e5) / 10:.1f} MB" if count >= 1e6 else f"{ceil(count / 1e2) / 10:.1f} kB"
