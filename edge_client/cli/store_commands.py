"""Commands for a device's private store: `fedcg agent logs|sent|ledger|diagnose|backup|restore|store`. Importing this module loads no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_client.cli.shared_options import ConfigOption, alone_with_store, read_config
from fedcg.errors import EXISTS, NOT_FOUND, BadInputError
from fedcg.event_log import EventValue, follow_events, read_events
from fedcg.sentences import DEBUG, LEVEL_NAMES, sentence_of
from fedcg.terminal import PassphraseFile, Result, command, passphrase_of, print_data, prints
from fedcg.text_output import moment, moment_of

store_app = typer.Typer(help="Check this device's private store.", no_args_is_help=True)


@command(store_app, "migrate")
def migrate_command(config: ConfigOption = Path("agent.toml")) -> Result:
    """Check the private store and its secrets. Changes nothing. Stop the agent first.

    Exit codes: 0 done; 1 failed; 2 configuration or private store can't be used; 5 an agent runs; 7 no private store.

    Example: fedcg agent store migrate
    """
    from edge_client.store.private_store import STORE_FORMAT

    settings = read_config(config)
    if settings.store.exists() and (owner := settings.store.stat().st_uid) != os.geteuid():
        raise BadInputError(
            f"{settings.store} belongs to the user with id {owner}: run this as that user (sudo -u '#{owner}' ...). "
            "Otherwise the agent could no longer read its files"
        )
    with alone_with_store(settings) as store:
        generation, problems = store.generations.current()
        problems += store.damage()
        store.take_over()
    trained = None if generation is None else generation.round_attempt.round
    values = {"store": str(settings.store), "format": STORE_FORMAT, "round": trained, "problems": list(problems)}
    stands = "not trained yet" if trained is None else f"trained up to round {trained}"
    return values, "; ".join((f"{settings.store} has format {STORE_FORMAT}, {stands}", *problems))


@prints
def backup_command(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write. Must not exist.")],
    config: ConfigOption = Path("agent.toml"),
    passphrase_file: PassphraseFile = None,
) -> Result:
    """Write private store, keys, certificate and agent.toml into one encrypted file, to restore on replacement hardware.

    Stop the agent first. Images are not included. A device with damaged files is not backed up.
    Exit codes: 0 done; 1 failed; 2 bad input, or a damaged store; 5 an agent runs; 6 the file exists; 7 no agent.toml, store or key.

    Example: fedcg agent backup --out /backup/line-4 --passphrase-file /secure/passphrase
    """
    from edge_client.cli.status import damage_that_matters
    from edge_client.errors import StoreError
    from edge_client.store.backup import write_backup

    settings = read_config(config)
    with alone_with_store(settings) as store:
        if damage := damage_that_matters(settings, store):
            raise StoreError("; ".join((*damage, "no backup was written")))
        facts = write_backup(settings, config, store, out, passphrase_of(passphrase_file, is_new=True))
    return {"file": str(out), "bytes": out.stat().st_size, **facts.model_dump()}, (
        f"Wrote {out}: device {facts.device} of {facts.federation}, trained up to round {facts.round}.\n"
        "It holds the device's keys and private weights: store the passphrase separately.\n"
        f"Next: on the replacement machine, fedcg agent restore {out.name} --config {config}"
    )


@prints
def restore_command(
    file: Annotated[Path, typer.Argument(help="File written by `fedcg agent backup`.")],
    config: ConfigOption = Path("agent.toml"),
    passphrase_file: PassphraseFile = None,
) -> Result:
    """Restore a device from a backup on this machine. Overwrites nothing. An existing agent.toml sets the paths.

    Exit codes: 0 done; 1 failed, nothing was written; 2 bad input; 6 a target exists; 7 file not found.

    Example: fedcg agent restore /backup/line-4 --config /etc/fedcg/casting/agent.toml
    """
    from edge_client.store.backup import read_backup

    passphrase = passphrase_of(passphrase_file, is_new=False)
    facts, settings = read_backup(file, config, passphrase, os.environ)
    lines = [
        f"Restored device {facts.device} of {facts.federation}, trained up to round {facts.round}: {settings.store}",
        "The old machine must not run again. If two agents of one device send an update for a round, the first one counts",
        "and the second one gets the receipt `conflict`. If the old machine was stolen, have the operator revoke the device, then enrol this one again.",
    ]
    if (settings.store / "privacy.json").exists():
        lines.append(
            "The record of spent privacy lacks rounds trained with DP-SGD after the backup. Add them by hand, or "
            "enrol the device again."
        )
    if (settings.store / "roster.json").exists():
        lines.append(
            "Sealed sums are blocked until you confirm the round: run `fedcg cohort status` on the other devices, then here "
            f"fedcg cohort resume-sums ROUND --config {config}"
        )
    values = {"config": str(config), "store": str(settings.store), **facts.model_dump()}
    return values, "\n".join([*lines, f"Next: fedcg doctor --config {config}"])


FOLLOW_EVERY_S = 0.5
LoggedEvent = dict[str, EventValue]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", metavar="SPAN", help="E.g. 10m, 2h, 3d, or a time such as 2026-11-22T08:00 (UTC)."),
]


def logs_command(
    config: ConfigOption = Path("agent.toml"),
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines as they arrive.")] = False,
    since: SinceOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also print lines of level debug.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events with all fields, one JSON object per line.")
    ] = False,
) -> None:
    """Print this device's event log. The agent may run meanwhile.

    Exit codes: 0 printed; 2 --since is not a time; 7 no event log.

    Example: fedcg agent logs --since 2h --follow
    """
    store = read_config(config).store
    path = store / "events.jsonl"
    if not path.exists():
        raise BadInputError(f"{path} not found: `fedcg agent run` writes it", exit_code=NOT_FOUND)
    first = 0.0 if since is None else moment_of(since, time.time(), "--since")
    for event in _events_of(path, follow=follow):
        if isinstance(at := event.get("t"), int | float) and at >= first:
            if as_json:
                print_data(event)
            elif line := _event_line(event, at, verbose=verbose):
                typer.echo(line)


def _events_of(path: Path, *, follow: bool) -> Iterator[LoggedEvent]:
    yield from read_events(path.with_suffix(".old.jsonl"))
    yield from follow_events(path, FOLLOW_EVERY_S) if follow else read_events(path)


def _event_line(event: LoggedEvent, at: float, *, verbose: bool) -> str:
    sentence = sentence_of(event)
    if sentence is None or (sentence.level <= DEBUG and not verbose):
        return ""
    return f"{moment(at)} [{LEVEL_NAMES[sentence.level]:<9}] {sentence.text}"


MOST_EVENTS = 100_000
UNLISTED = """enrolment and renewals (token, device name, certificate request, public message key, signatures, a random number),
and the hello of `fedcg doctor` before the first run."""


@prints
def sent_command(config: ConfigOption = Path("agent.toml"), since: SinceOption = None) -> Result:
    """List every update and self-report that has left this device, from its own record. The agent may run meanwhile.

    Exit codes: 0 listed; 2 --since is not a time.

    Example: fedcg agent sent --since 3d
    """
    from edge_client.store.checked_files import SENT_FILE, lost_lines, sent_items, totals

    settings = read_config(config)
    first = 0.0 if since is None else moment_of(since, time.time(), "--since")
    items = sent_items(settings.store / SENT_FILE, first)
    problem = lost_lines(settings.store / SENT_FILE)
    sums = totals(items)
    lines = [_sent_line(item).rstrip() for item in items]
    lines += [
        f"{federation}: {counts['updates']} updates, {counts['bytes']} bytes, {counts['receipts']} with a receipt; "
        f"{counts['self_reports']} self-reports; {counts['message_bytes']} bytes of control messages"
        for federation, counts in sums.items()
    ]
    if not items:
        lines = [f"No update and no report has left this device{'' if since is None else ' since then'}."]
    values = {
        "device": settings.device,
        "items": items,
        "totals": sums,
        "problem": problem or None,
        "not_listed": UNLISTED,
    }
    return values, "\n".join((*lines, *filter(None, [problem]), f"Not listed: {UNLISTED}"))


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_plain(one)}" for name, one in value.items())
    return f"({', '.join(map(_plain, value))})" if isinstance(value, list) else str(value)


def _sent_line(item: dict[str, Any]) -> str:
    at = moment(item["t"])
    report = ", ".join(f"{name} {_plain(value)}" for name, value in item.get("report", {}).items()) or "nothing"
    messages = ", ".join(f"{kind} {size} bytes" for kind, size in item.get("messages", {}).items())
    before = f"{at}  earlier control messages: {messages}\n" if messages else ""
    if item["kind"] != "update":
        return before + (f"{at}  self-report: {report}" if item["kind"] == "self_report" else "")
    parts = ", ".join(f"{name} {size} bytes" for name, size in item.get("parts", {}).items())
    receipt = item["receipt"] or "no receipt"
    facts = ", ".join(f"{name} {value}" for name, value in item.get("facts", {}).items())
    return (
        f"{before}{at}  round {item['round']}, attempt {item['attempt']}: {item['bytes']} bytes ({parts}); reported: {report}; "
        f"facts: {facts}; sha256 {item['artifact']}; {receipt}"
    )


@prints
def diagnose_command(
    out: Annotated[Path, typer.Option("--out", metavar="FILE.zip", help="File to write. Must not exist.")],
    config: ConfigOption = Path("agent.toml"),
    events: Annotated[
        int, typer.Option("--events", min=0, max=MOST_EVENTS, help="Number of newest events to include.")
    ] = 2000,
) -> Result:
    """Write a support file: settings, status, doctor, events, versions and file sizes. No keys, secrets, images or weights.

    Exit codes: 0 written; 1 failed; 2 invalid configuration, or --out is not a .zip; 6 the file exists; 7 no agent.toml.

    Example: fedcg agent diagnose --out support.zip
    """
    from edge_client.cli.support_file import support_file
    from fedcg.files import write_durably

    settings = read_config(config)
    if out.suffix != ".zip" or not out.absolute().parent.is_dir():
        raise BadInputError(f"--out {out}: give a file name ending in .zip, in an existing folder")
    if out.exists():
        raise BadInputError(f"{out} exists already; choose another file", exit_code=EXISTS)
    content, names = support_file(settings, events)
    write_durably(out, content, is_new=True)
    values = {"device": settings.device, "file": str(out), "bytes": len(content), "holds": list(names)}
    return values, f"{out} ({len(content)} bytes) holds {', '.join(names)}.\nNext: review it, then send it to support."
