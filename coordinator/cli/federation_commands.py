"""The command `fedcg federation`: plans, life cycle and policy of federations, and `watch` in a terminal.

Heavy imports happen inside the commands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.shared_options import Named, Reason, asks
from fedcg.terminal import Result, command, confirm
from fedcg.text_output import moment, table

if TYPE_CHECKING:
    from coordinator.cli.client import Client


federation_app = typer.Typer(help="Create, inspect and control federations.", no_args_is_help=True)

Start = Annotated[bool, typer.Option("--start/--no-start", help="Start now, or later with `fedcg federation start`.")]


@command(federation_app, "plan")
def federation_plan(
    plan: Annotated[Path | None, typer.Argument(help="TOML file to check; nothing is created.")] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a commented example plan.")] = False,
    is_frozen: Annotated[
        bool, typer.Option("--frozen", help="With --example: one round on a frozen pretrained backbone.")
    ] = False,
    project: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Print the plan of a project folder (its plan.toml plus the network in its client.py), or of class folders with images.",
        ),
    ] = None,
) -> Result:
    """Check a plan, or print an example plan or the plan of your own project or images. docs/reference/plan.md describes every field.

    Give exactly one of the file, `--example` and `--from`. `--from` runs a project's code in this process. Of images it measures mode,
    size, mean and deviation, which all devices then see.

    Example: fedcg federation plan --example > plan.toml
    """
    from coordinator.errors import PlanError
    from coordinator.operations.create_federation import example_plan, read_plan

    if example:
        text = example_plan(is_frozen=is_frozen)
        return {"plan": text}, text.rstrip("\n")
    if project is not None:
        from fedcg.learning.project import image_plan, plan_text, project_plan

        made = (project_plan if (project / "client.py").is_file() else image_plan)(project)
        return made, plan_text(made)
    if plan is None:
        raise PlanError("name a plan file to check, or use --example or --from")
    wanted = read_plan(plan, in_full=True)
    usable = f"{plan}: the plan is valid ({wanted.method})."
    return wanted.model_dump(mode="json"), f"{usable}\nNext: fedcg federation create {plan}"


@asks(federation_app, "create")
def federation_create(
    client: Client, plan: Annotated[Path, typer.Argument(help="TOML file with the plan.")], start: Start = True
) -> Result:
    """Create a federation: check the plan, complete it to a spec, and create the initial aggregate.

    Example: fedcg federation create plan.toml
    """
    return _opened(client, plan, start=start, continued_from=None)


@asks(federation_app, "continue")
def federation_continue(
    client: Client,
    plan: Annotated[Path, typer.Argument(help="TOML file with the plan of the new federation.")],
    federation: Annotated[
        str | None,
        typer.Argument(help="Federation whose last weights become the initial ones, or ID@ROUND. Default: see `list`."),
    ] = None,
    start: Start = True,
) -> Result:
    """Create a federation that starts from the weights of another one: its last ones, or those of a round, which rolls back.

    Example: fedcg federation continue plan.toml casting
    """
    return _opened(client, plan, start=start, continued_from=client.federation(federation))


@asks(federation_app, "duplicate")
def federation_duplicate(client: Client, federation: Named = None) -> Result:
    """Print a plan for another federation like this one, under the next free id. Nothing is created.

    Example: fedcg federation duplicate casting > plan.toml
    """
    from fedcg.learning.project import plan_text

    plan = client.get(f"/federations/{client.federation(federation)}/plan")
    return plan, plan_text(plan)


@asks(federation_app, "list")
def federation_list(
    client: Client,
    archived: Annotated[bool, typer.Option("--all", "--archived", help="Include archived federations.")] = False,
) -> Result:
    """List all federations with their status.

    The status is created (not started), running, paused, stopped, archived or finished. The phase is waiting (for devices), collecting
    (updates), distilling (merging), waits for owners, paused, stalled or finished.

    A command without a federation id means the only federation that is created, running or paused. If none is, it means the only one that
    is stopped or finished. Archived ones do not count.

    Example: fedcg federation list --all
    """
    found = client.all("/federations", archived="true" if archived else None)
    return found, federations_table(found)


@asks(federation_app, "show")
def federation_show(client: Client, federation: Named = None) -> Result:
    """Show the status, updates, policy and codecs of a federation.

    Example: fedcg federation show
    """
    named = client.federation(federation)
    found, now = client.get(f"/federations/{named}"), client.get(f"/federations/{named}/now")
    policy = ", ".join(f"{name} = {_toml(value)}" for name, value in found["policy"].items() if value is not None)
    coded = f"codec of updates: {found['codec']}, of aggregates: {found['aggregate_codec']}"
    forgotten = f"\nforgotten: {', '.join(found['forgotten'])}" if found["forgotten"] else ""
    updates = f"updates {now['delivered']} of {now['wanted']} (quorum {now['quorum']})"
    online = f"{now['online']} of {now['enrolled']} devices online"
    text = f"{_line(found)}\n{updates}, {online}\n{policy}\n{coded}{_sealed(found)}{forgotten}"
    names = ("round", "attempts", "seconds", "merged", "accuracy", "alone")
    rows = [[round(each[name], 3) if each[name] is not None else None for name in names] for each in now["last_rounds"]]
    return found, text + (f"\n\n{table((*names[:-1], 'local-only'), rows, '')}" if rows else "")


@asks(federation_app, "start")
def federation_start(client: Client, federation: Named = None) -> Result:
    """Start a federation that was created with --no-start.

    Example: fedcg federation start casting
    """
    return _steered(client, federation, "start")


@asks(federation_app, "pause")
def federation_pause(client: Client, federation: Named = None, reason: Reason = "") -> Result:
    """Pause a federation. The open attempt finishes normally; no further one opens.

    Example: fedcg federation pause --reason maintenance
    """
    return _steered(client, federation, "pause", {"reason": reason}, "to continue, fedcg federation resume {}")


@asks(federation_app, "resume")
def federation_resume(client: Client, federation: Named = None) -> Result:
    """Resume a federation that an operator paused or that stalled, or open the next attempt after a failed one without a delay.

    Example: fedcg federation resume
    """
    return _steered(client, federation, "resume")


@asks(federation_app, "stop")
def federation_stop(client: Client, federation: Named = None, reason: Reason = "") -> Result:
    """Stop a federation now. Its devices keep the last aggregate; an open attempt fails.

    Example: fedcg federation stop casting --reason "the line is closed"
    """
    following = "fedcg federation archive {} hides it in lists, fedcg federation extend {} --rounds N continues it"
    return _steered(client, federation, "stop", {"reason": reason}, following)


@asks(federation_app, "archive")
def federation_archive(client: Client, federation: Named = None) -> Result:
    """Hide an ended federation from the lists and the page. All its data is kept.

    A command without a federation id no longer selects it.

    Example: fedcg federation archive casting
    """
    following = "fedcg federation list --all shows it, fedcg federation extend {} --rounds N reopens it"
    return _steered(client, federation, "archive", following=following)


@asks(federation_app, "extend")
def federation_extend(
    client: Client,
    rounds: Annotated[int, typer.Option(min=1, max=100_000, help="Number of rounds to add.")],
    federation: Named = None,
) -> Result:
    """Add rounds to a federation. One that has ended or was stopped continues from its last aggregate.

    Example: fedcg federation extend --rounds 10
    """
    return _steered(client, federation, "extend", {"rounds": rounds})


_FORGOTTEN = (
    "the next round's sum excludes them if the other devices sign it. They sign it if the owners of the forgotten devices consented in their cards "
    "(`fedcg cohort card --alone`). `fedcg cohort status` on any device lists the consents. Otherwise they sit out the round and log the reason.\n"
    "Exported models do not change. A forgotten device still has the cohort secret: run `fedcg cohort renew` on another device.\n"
    "To see the round: fedcg federation show {}"
)


@asks(federation_app, "forget")
def federation_forget(
    client: Client,
    federation: Annotated[str, typer.Argument(help="Federation id.")],
    devices: Annotated[list[str], typer.Argument(metavar="DEVICE...", help="Devices to exclude permanently.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> Result:
    """Permanently remove devices from a federation and from its model. Only for methods based on exact sums, such as analytic.

    A federation that has ended or is in its last round gets one more round.

    Example: fedcg federation forget casting line-4
    """
    if not yes:
        confirm(f"This permanently removes {', '.join(devices)} from {federation}.\nContinue?")
    return _steered(client, federation, "forget", {"devices": devices}, _FORGOTTEN)


@asks(federation_app, "set")
def federation_set(
    client: Client,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="[FEDERATION] FIELD=VALUE...",
            help="Federation id (default: see `list`) and policy fields, e.g. rounds=40.",
        ),
    ],
) -> Result:
    """Change policy fields of a running federation. docs/reference/plan.md lists them. The value `none` clears a field.

    Example: fedcg federation set rounds=40 min_clients=4
    """
    named = None if "=" in changes[0] else changes.pop(0)
    wanted = _assigned(changes)
    federation = client.federation(named)
    before = client.get(f"/federations/{federation}/now")
    policy = client.change("PATCH", f"/federations/{federation}/policy", wanted)
    lines = [f"{name} = {_toml(policy[name])}" for name in wanted]
    needed, invited = max(policy["min_clients"], policy["min_cohort"]), len(before["clients"])
    if 0 < invited < needed and before["phase"] != "distilling":
        lines.append(
            f"Round {before['round']} is open with only {invited} of {needed} clients invited. This attempt ends and does not "
            f"count towards max_attempts. The next one opens when {needed} devices are online."
        )
    return {"federation": federation, "policy": policy}, "\n".join(lines)


@asks(federation_app, "policy")
def federation_policy(client: Client, federation: Named = None) -> Result:
    """Show the policy and its last changes. `fedcg federation set` changes it.

    Example: fedcg federation policy casting
    """
    path = f"/federations/{client.federation(federation)}/policy"
    policy, changes = client.get(path), client.all(f"{path}/changes")
    values = "\n".join(f"{name} = {_toml(value)}" for name, value in policy.items())
    rows = [(moment(at), by, name, _toml(old), _toml(new)) for at, by, name, old, new in map(dict.values, changes)]
    told = table(("time", "by", "field", "from", "to"), rows, "The policy is the plan's, unchanged.")
    return {"policy": policy, "changes": changes}, f"{values}\n\n{told}"


@asks(federation_app, "worth")
def federation_worth(client: Client, federation: Named = None) -> Result:
    """Show each client's gain over its local-only model, worst first, with the 95 % interval over its last rounds, in points.

    Example: fedcg federation worth casting
    """
    found = client.get(f"/federations/{client.federation(federation)}/worth")
    names = ("accuracy", "alone", "gain", "mean", "low", "high")
    rows = [
        [each["client"], each["round"], *(each[name] and round(100 * each[name], 1) for name in names), each["verdict"]]
        for each in found["clients"]
    ]
    columns = ("client", "round", "accuracy", "local-only", "gain", "mean gain", "low", "high", "verdict")
    return found, table(columns, rows, "No client has sent an update yet.")


@asks(federation_app, "models")
def federation_models(client: Client, federation: Named = None) -> Result:
    """List the versions of the shared model, newest first.

    Example: fedcg federation models casting
    """
    found = client.all(f"/federations/{client.federation(federation)}/models")
    rows = [
        (each["round"], moment(each["stored_at"]), each["merged"], each["size"], each["accuracy"], each["pinned"] or "")
        for each in found
    ]
    return found, table(("round", "created", "merged", "bytes", "accuracy", "pinned"), rows, "")


@asks(federation_app, "compare")
def federation_compare(
    client: Client,
    federation: Annotated[str, typer.Argument(help="Federation id.")],
    first: Annotated[str, typer.Argument(help="Round of a version, or a device.")],
    second: Annotated[str, typer.Argument(help="The same of the other one.")],
) -> Result:
    """Compare two versions of the shared model, or two devices: accuracy, classes, size, latency, distance.

    Example: fedcg federation compare casting 3 12
    """
    found = client.get(f"/federations/{client.federation(federation)}/compare", first=first, second=second)
    rows = [
        (each["what"], *(round(v, 4) if isinstance(v := each[name], float) else v for name in ("first", "second")))
        for each in found
    ]
    return found, table(("figure", first, second), rows, "")


@asks(federation_app, "pin")
def federation_pin(
    client: Client,
    federation: Annotated[str, typer.Argument(help="Federation id.")],
    number: Annotated[int, typer.Argument(metavar="ROUND", min=0, help="Round of the version; 0 is the initial one.")],
    label: Annotated[str | None, typer.Option("--label", help='Why it is kept, e.g. "best".')] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Keep it no longer than others.")] = False,
) -> Result:
    """Keep a version of the shared model: it is not deleted after `keep_rounds` closed rounds.

    Example: fedcg federation pin casting 12 --label best
    """
    path = f"/federations/{client.federation(federation)}/models/{number}/pin"
    client.change("DELETE" if remove else "PUT", path, None if remove else {"label": label or "pinned"})
    kept = "kept no longer than others" if remove else f"kept as {label or 'pinned'}"
    return {"round": number, "pinned": None if remove else label or "pinned"}, f"round {number}: {kept}"


@asks(federation_app, "reconcile")
def federation_reconcile(
    client: Client,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Output of `fedcg agent sent --json` on a device.")],
    federation: Named = None,
) -> Result:
    """Compare a device's own record of what it sent with the coordinator's. Differences are named; nothing is stored.

    Exit code 8 if the records differ.

    Example: fedcg federation reconcile sent-2026-11.json casting
    """
    from pydantic import ValidationError

    from coordinator.facts.sent import OwnRecord, compare_records
    from fedcg.errors import NOT_MET, BadInputError, in_words

    named = client.federation(federation)
    try:
        record = OwnRecord.read(file.read_bytes())
        (device,) = client.get(f"/federations/{named}/sent", device=record.device)["devices"]
        found = compare_records(record, named, device["rounds"])
    except (OSError, ValidationError) as error:
        why = in_words(error) if isinstance(error, OSError) else "run that on the device, and give all it prints"
        raise BadInputError(f"{file} is not the output of `fedcg agent sent --json`: {why}") from error
    rows = [(each.round, each.attempt, each.what, each.artifact) for each in found.differences]
    same = f"{found.same} updates of {record.device} have the same SHA-256, size and outcome in both records."
    same += f" {found.outside} from before its first line or after its last were not compared." if found.outside else ""
    text = f"{table(('round', 'attempt', 'difference', 'sha256'), rows, 'No difference.')}\n{same}"
    return asdict(found), text, NOT_MET if rows else 0


def federations_table(found: Sequence[Mapping[str, Any]]) -> str:
    """The status of federations as a table for people."""
    columns = ("federation", "status", "phase", "round", "online", "created", "reason")
    rows = []
    for each in found:
        phase, where = each["phase"].replace("_", " "), f"{each['round']} of {each['rounds']}"
        standing = each["federation"], each["status"], phase, where, len(each["online"])
        rows.append((*standing, moment(each["created_at"]), each["reason"]))
    following = "`fedcg federation list --all` includes archived ones.\nNext: fedcg federation create"
    return table(columns, rows, f"No federations; {following}")


def _opened(client: Client, plan: Path, *, start: bool, continued_from: str | None) -> Result:
    from coordinator.errors import RequestError
    from coordinator.operations.create_federation import read_plan
    from fedcg.config_file import numbered

    wanted = {"plan": read_plan(plan).model_dump(mode="json"), "start": start, "continued_from": continued_from}
    try:
        made = client.change("POST", "/federations", wanted)
    except RequestError as error:
        lines = numbered(plan.read_text(encoding="utf-8"), str(error).split("\n  "))
        raise RequestError("\n  ".join(lines), exit_code=error.exit_code) from error
    started = "rounds start once devices connect" if start else "it is not started"
    following = "for each device, fedcg token create" if start else f"fedcg federation start {made['federation']}"
    opened = f"Created federation {made['federation']} ({made['method']}, {made['rounds']} rounds); {started}."
    return made, f"{opened}{_sealed(made)}\nNext: {following}"


def _sealed(found: Mapping[str, Any]) -> str:
    """A note on the checks that are impossible when parts of the updates are sealed."""
    parts = ", ".join(found["sealed"])
    unseen = "only the devices of the cohort can read the mean, and screening can't check the sealed numbers of a single device"
    return f"\n{parts} sealed: {unseen}" if parts else ""


def _steered(
    client: Client,
    federation: str | None,
    action: str,
    content: Mapping[str, object] | None = None,
    following: str = "fedcg federation show {}",
) -> Result:
    done = client.change("POST", f"/federations/{client.federation(federation)}/{action}", content)
    later = "" if client.is_remote else "\nNo coordinator is running; the change applies at its next start."
    return done, f"{_line(done)}{later}\nNext: {following.replace('{}', done['federation'])}"


def _assigned(changes: list[str]) -> dict[str, object]:
    """The values of FIELD=VALUE words. Anything but a number, true, false or none is a string; the coordinator checks all values."""
    from fedcg.config_file import plain_value
    from fedcg.errors import BadInputError

    if wrong := [word for word in changes or ["nothing to change"] if "=" not in word]:
        raise BadInputError(f"{', '.join(map(repr, wrong))}: write FIELD=VALUE, e.g. rounds=40")
    pairs = [(name.strip(), text.strip()) for name, _, text in (word.partition("=") for word in changes)]
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInputError(f"{', '.join(twice)}: given more than once")
    return {name: None if text == "none" else plain_value(text) for name, text in pairs}


def _line(view: Mapping[str, Any]) -> str:
    status = f" ({view['status']})" if view["status"] in ("created", "stopped", "archived") else ""
    reason = f": {view['reason']}" if view["reason"] else ""
    where = f"round {view['round']} of {view['rounds']}, attempt {view['attempt']}"
    return f"{view['federation']}: {view['phase'].replace('_', ' ')}{status}, {where}{reason}"


def _toml(value: object) -> str:
    return "none" if value is None else json.dumps(value)
