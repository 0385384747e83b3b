"""The command `fedcg federation`: plans, and the life and policy of federations. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli.shared_options import AsJson, Somewhere, Url, print_result

federation_app = typer.Typer(help="Open, look at and steer federations.", no_args_is_help=True)

Named = Annotated[str | None, typer.Argument(help="Its id; not needed where there is one federation.")]
Because = Annotated[str, typer.Option("--reason", help="For the record.")]


@federation_app.command("plan")
def federation_plan(
    plan: Annotated[Path | None, typer.Argument(help="TOML file to check; nothing is created.")] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a plan with comments, to start from.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a plan, or print an example of one; docs/plan.md has every field."""
    from coordinator.errors import PlanError
    from coordinator.operations.create_federation import example_plan, read_plan

    if example:
        print_result({"plan": example_plan()}, example_plan().rstrip("\n"), as_json=as_json)
        return
    if plan is None:
        raise PlanError("name a file to check, or ask for --example")
    wanted = read_plan(plan)
    print_result(wanted.model_dump(mode="json"), f"{plan}: all fields can be used ({wanted.method}).", as_json=as_json)


@federation_app.command("create")
def federation_create(
    plan: Annotated[Path, typer.Argument(help="TOML file with the plan.")],
    directory: Somewhere = None,
    url: Url = None,
    held: Annotated[bool, typer.Option("--held", help="Create it only; `fedcg federation start` starts it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Open a federation: check the plan, complete it to a spec, make the initial aggregate."""
    _open(plan, directory, url, held=held, continued_from=None, as_json=as_json)


@federation_app.command("continue")
def federation_continue(
    federation: Annotated[str, typer.Argument(help="The federation whose last weights are the new one's first.")],
    plan: Annotated[Path, typer.Argument(help="TOML file with the plan of the new federation.")],
    directory: Somewhere = None,
    url: Url = None,
    held: Annotated[bool, typer.Option("--held", help="Create it only; `fedcg federation start` starts it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Open a federation that starts from the last weights of another one."""
    _open(plan, directory, url, held=held, continued_from=federation, as_json=as_json)


@federation_app.command("list")
def federation_list(directory: Somewhere = None, url: Url = None, as_json: AsJson = False) -> None:
    """List all federations and where they stand."""
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        found = client.all("/federations")
    lines = [_line(one) for one in found] or ["no federations yet; `fedcg federation create` opens one"]
    print_result(found, "\n".join(lines), as_json=as_json)


@federation_app.command("show")
def federation_show(
    federation: Named = None, directory: Somewhere = None, url: Url = None, as_json: AsJson = False
) -> None:
    """Show where a federation stands, its policy, and how its artifacts are coded."""
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        found = client.get(f"/federations/{client.federation(federation)}")
    policy = ", ".join(f"{name} = {_toml(value)}" for name, value in found["policy"].items() if value is not None)
    coded = f"updates coded {found['codec']}, aggregates {found['aggregate_codec']}"
    print_result(found, f"{_line(found)}\n{policy}\n{coded}", as_json=as_json)


@federation_app.command("start")
def federation_start(
    federation: Named = None, directory: Somewhere = None, url: Url = None, as_json: AsJson = False
) -> None:
    """Start a federation that was created with --held."""
    _steer("start", federation, directory, url, None, as_json=as_json)


@federation_app.command("pause")
def federation_pause(
    federation: Named = None,
    directory: Somewhere = None,
    url: Url = None,
    reason: Because = "",
    as_json: AsJson = False,
) -> None:
    """Open no further attempt of a round; the open one ends as it would."""
    _steer("pause", federation, directory, url, {"reason": reason}, as_json=as_json)


@federation_app.command("resume")
def federation_resume(
    federation: Named = None, directory: Somewhere = None, url: Url = None, as_json: AsJson = False
) -> None:
    """Let a federation go on that was paused, by an operator or after failed attempts."""
    _steer("resume", federation, directory, url, None, as_json=as_json)


@federation_app.command("stop")
def federation_stop(
    federation: Named = None,
    directory: Somewhere = None,
    url: Url = None,
    reason: Because = "",
    as_json: AsJson = False,
) -> None:
    """End a federation now; its devices keep the last aggregate, and an open attempt fails."""
    _steer("stop", federation, directory, url, {"reason": reason}, as_json=as_json)


@federation_app.command("extend")
def federation_extend(
    rounds: Annotated[int, typer.Option(min=1, max=100_000, help="How many to add.")],
    federation: Named = None,
    directory: Somewhere = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Add rounds, also to a federation that is over or was stopped: it goes on from its last aggregate."""
    _steer("extend", federation, directory, url, {"rounds": rounds}, as_json=as_json)


@federation_app.command("set")
def federation_set(
    federation: Annotated[str, typer.Argument(help="Its id.")],
    changes: Annotated[
        list[str], typer.Argument(metavar="FIELD=VALUE...", help="Fields of the policy, e.g. rounds=40.")
    ],
    directory: Somewhere = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Change fields of the policy while the federation runs; docs/plan.md has them. `none` clears one."""
    from coordinator.cli.client import client_of

    wanted = dict(map(_assignment, changes))
    with client_of(directory, url) as client:
        policy = client.change("PATCH", f"/federations/{federation}/policy", wanted)
    text = "\n".join(f"{name} = {_toml(policy[name])}" for name in wanted)
    print_result({"federation": federation, "policy": policy}, text, as_json=as_json)


def _open(
    plan: Path, directory: Path | None, url: str | None, *, held: bool, continued_from: str | None, as_json: bool
) -> None:
    from coordinator.cli.client import client_of
    from coordinator.operations.create_federation import read_plan

    wanted = {"plan": read_plan(plan).model_dump(mode="json"), "held": held, "continued_from": continued_from}
    with client_of(directory, url) as client:
        made = client.change("POST", "/federations", wanted)
    started = "held until `fedcg federation start`" if held else "it starts when devices come"
    text = f"Opened federation {made['federation']} ({made['method']}, {made['rounds']} rounds); {started}."
    print_result(made, text, as_json=as_json)


def _steer(
    action: str,
    federation: str | None,
    directory: Path | None,
    url: str | None,
    content: Mapping[str, object] | None,
    *,
    as_json: bool,
) -> None:
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        done = client.change("POST", f"/federations/{client.federation(federation)}/{action}", content)
        is_here = client.is_remote
    text = _line(done) if is_here else f"{_line(done)}\nNo coordinator runs; one that starts goes by this."
    print_result(done, text, as_json=as_json)


def _assignment(text: str) -> tuple[str, Any]:
    from fedcg.errors import BadInputError

    name, sign, value = text.partition("=")
    if not sign:
        raise BadInputError(f"{text!r}: write FIELD=VALUE, e.g. rounds=40")
    try:
        return name.strip(), None if value.strip() == "none" else json.loads(value)
    except ValueError as error:
        raise BadInputError(f"{text!r}: the value is a number, true, false or none") from error


def _line(view: Mapping[str, Any]) -> str:
    status = "" if view["status"] == "running" else f" ({view['status']})"
    reason = f": {view['reason']}" if view["reason"] else ""
    where = f"round {view['round']} of {view['rounds']}, attempt {view['attempt']}"
    return f"{view['federation']}: {view['phase']}{status}, {where}{reason}"


def _toml(value: object) -> str:
    return "none" if value is None else json.dumps(value)
