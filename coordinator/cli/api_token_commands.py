"""The command `fedcg coordinator token`: tokens with which people and programs use the API and the page."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import typer

from coordinator.cli.shared_options import AsJson, Somewhere, Url, print_result

api_token_app = typer.Typer(
    help="Make, list and revoke the tokens with which people and programs use the coordinator.", no_args_is_help=True
)


@api_token_app.command("create")
def token_create(
    name: Annotated[str, typer.Option("--name", help="Of the person or program; it stands in the audit log.")],
    role: Annotated[
        Literal["viewer", "operator", "admin"],
        typer.Option("--role", help="viewer reads; operator steers; admin makes tokens."),
    ],
    directory: Somewhere = None,
    url: Url = None,
    days: Annotated[float | None, typer.Option("--days", help="After which it expires; without, never.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token; it is shown once, and only a hash of it is kept."""
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        made = client.change("POST", "/api-tokens", {"name": name, "role": role, "days": days})
    text = (
        f"{made['token']}\n\nShown this once: `Authorization: Bearer {made['token'][:10]}...`, or FEDCG_API_TOKEN for commands with --url.\n"
        f"Whoever has it is {name!r}, {role}, {_until(made)}. It ends with `fedcg coordinator token revoke {made['id']}`."
    )
    print_result(made, text, as_json=as_json)


@api_token_app.command("list")
def token_list(directory: Somewhere = None, url: Url = None, as_json: AsJson = False) -> None:
    """List all tokens; their secrets are stored nowhere."""
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        found = client.all("/api-tokens")
    print_result(found, "\n".join(map(_line, found)), as_json=as_json)


@api_token_app.command("revoke")
def token_revoke(
    token: Annotated[str, typer.Argument(help="Its id, as `fedcg coordinator token list` shows it.")],
    directory: Somewhere = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Make a token unusable at once, and every session of the page that was opened with it."""
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        done = client.change("DELETE", f"/api-tokens/{token}")
    print_result(done, f"token {token} of {done['name']} is revoked.", as_json=as_json)


def _line(token: dict[str, Any]) -> str:
    used = "never used" if token["last_used_at"] is None else f"used {_when(token['last_used_at'])}"
    state = "revoked" if token["revoked_at"] else "valid" if token["is_valid"] else "expired"
    return "\t".join([token["id"], token["name"], token["role"], state, _until(token), used])


def _until(token: dict[str, Any]) -> str:
    return "without an end" if token["expires_at"] is None else f"until {_when(token['expires_at'])}"


def _when(at: float) -> str:
    return time.strftime("%F %T", time.localtime(at))
