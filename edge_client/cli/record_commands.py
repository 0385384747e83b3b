"""`fedcg agent sent|ledger|diagnose`: what has left this device, what rounds cost it, and one file for support. Importing this loads no torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_client.cli.shared_options import ConfigOption, JsonOption, read_config
from fedcg.errors import BadInputError
from fedcg.json_output import print_data
from fedcg.text_output import moment, moment_of, table

MOST_EVENTS = 100_000
SinceOption = Annotated[
    str | None, typer.Option("--since", metavar="SPAN", help="10m, 2h, 3d, or a time such as 2026-11-22 (UTC).")
]


def sent_command(
    config: ConfigOption = Path("agent.toml"),
    since: SinceOption = None,
    as_json: JsonOption = False,
) -> None:
    """List every update and every report about itself that has left this device, from its own record; the agent may run meanwhile.

    Exit codes: 0 listed; 2 --since is no time.

    Example: fedcg agent sent --since 3d
    """
    from edge_client.store.sent_record import SENT_FILE, sent_items, totals

    settings = read_config(config)
    first = 0.0 if since is None else moment_of(since, time.time(), "--since")
    items = sent_items(settings.store / SENT_FILE, first)
    sums = totals(items)
    if as_json:
        print_data({"device": settings.device, "items": items, "totals": sums})
        return
    for item in items:
        typer.echo(_line(item).rstrip())
    for federation, counts in sums.items():
        typer.echo(
            f"{federation}: {counts['updates']} updates, {counts['bytes']} bytes, {counts['receipts']} with a receipt; "
            f"{counts['self_reports']} reports about the device; {counts['message_bytes']} bytes of control messages"
        )
    if not items:
        typer.echo("Nothing has left this device." if since is None else "Nothing has left this device since then.")


def _line(item: dict[str, Any]) -> str:
    at = moment(item["t"])
    report = ", ".join(f"{name} {value}" for name, value in item.get("report", {}).items()) or "nothing"
    messages = ", ".join(f"{kind} {size} bytes" for kind, size in item.get("messages", {}).items())
    before = f"{at}  control messages until then: {messages}\n" if messages else ""
    if item["kind"] != "update":
        return before + (f"{at}  report about the device: {report}" if item["kind"] == "self_report" else "")
    parts = ", ".join(f"{name} {size} bytes" for name, size in item.get("parts", {}).items())
    receipt = item["receipt"] or "no receipt"
    facts = ", ".join(f"{name} {value}" for name, value in item.get("facts", {}).items())
    return (
        f"{before}{at}  round {item['round']}, attempt {item['attempt']}: {item['bytes']} bytes ({parts}); reported: {report}; "
        f"facts: {facts}; sha256 {item['artifact']}; {receipt}"
    )


def ledger_command(
    config: ConfigOption = Path("agent.toml"),
    since: SinceOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what each round cost this device: seconds, bytes of the update, and energy where a sensor measures it; the agent may run meanwhile.

    Exit codes: 0 listed; 2 --since is no time.

    Example: fedcg agent ledger --since 7d
    """
    from edge_client.store.sent_record import LEDGER_FILE, read_lines

    settings = read_config(config)
    first = 0.0 if since is None else moment_of(since, time.time(), "--since")
    rounds = [
        line for line in read_lines(settings.store / LEDGER_FILE) if line["kind"] == "round" and line["t"] >= first
    ]
    measured = [line["joules"] for line in rounds if line.get("joules") is not None]
    sums = {
        "rounds": len(rounds),
        "seconds": round(sum(line.get("seconds") or 0.0 for line in rounds), 3),
        "update_bytes": sum(line.get("update_bytes") or 0 for line in rounds),
        "joules": round(sum(measured), 1) if measured else None,
    }
    if as_json:
        print_data({"device": settings.device, "rounds": rounds, "totals": sums})
        return
    rows = []
    for line in rounds:
        energy = "not measured" if line.get("joules") is None else f"{line['joules']:.0f} J ({line['rail']})"
        work = f"{line['seconds']:.1f}", line["device"], line["images"], line["update_bytes"] or 0, energy
        rows.append((moment(line["t"]), line["federation"], line["round"], line["attempt"], *work))
    columns = ("time", "federation", "round", "attempt", "seconds", "on", "images", "bytes to send", "energy")
    typer.echo(table(columns, rows, "No rounds yet."))
    energy = "" if sums["joules"] is None else f", {sums['joules']:.0f} J in {len(measured)} of them"
    typer.echo(f"{sums['rounds']} rounds: {sums['seconds']:.1f} s, {sums['update_bytes']} bytes to send{energy}")


def diagnose_command(
    out: Annotated[Path, typer.Option("--out", metavar="FILE.zip", help="The file to write.")],
    config: ConfigOption = Path("agent.toml"),
    events: Annotated[
        int, typer.Option("--events", min=0, max=MOST_EVENTS, help="Newest events that go into it.")
    ] = 2000,
    with_class_names: Annotated[
        bool, typer.Option("--with-class-names", help="Leave the names of classes in; else they are numbered.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write one file to send to support: settings, status, doctor, events, versions, sizes of files; no key, secret, image or weight.

    Exit codes: 0 written; 1 failed; 2 the configuration is wrong, or --out is no .zip.

    Example: fedcg agent diagnose --out support.zip
    """
    from edge_client.cli.support_file import support_file
    from fedcg.files import replace_durably

    settings = read_config(config)
    if out.suffix != ".zip" or not out.absolute().parent.is_dir():
        raise BadInputError(f"--out {out}: give a file that ends in .zip, in a folder that exists")
    content, names = support_file(settings, events, with_class_names=with_class_names)
    replace_durably(out, content)
    if as_json:
        print_data({"device": settings.device, "file": str(out), "bytes": len(content), "holds": list(names)})
        return
    typer.echo(f"{out} ({len(content)} bytes) holds {', '.join(names)}.\nNext: read it, then send it to support.")
