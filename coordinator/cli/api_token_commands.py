"""The command `fedcg coordinator token`: tokens with which people and programs use the API and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordinator.cli.shared_options import Result, asks
from fedcg.text_output import moment, seconds_of, table

if TYPE_CHECKING:
    from coordinator.cli.client import Client

api_token_app = typer.Typer(
    help="Make, list and revoke the tokens with which people and programs use the coordinator.", no_args_is_help=True
)


@api_token_app.command("create")
@asks
def token_create(
    client: Client,
    name: Annotated[str, typer.Option("--name", help="Of the person or program; it stands in the audit log.")],
    role: Annotated[
        Literal["viewer", "operator", "admin"],
        typer.Option("--role", help="viewer reads; operator steers; admin makes tokens."),
    ],
    span: Annotated[str, typer.Option("--for", metavar="SPAN", help="After which it expires, at most 3650d.")] = "90d",
) -> Result:
    """Make a token; it is shown once, and only a hash of it is kept.

    Example: fedcg coordinator token create --name ann --role operator --for 90d
    """
    days = None if span is None else seconds_of(span, "--for") / 86_400
    made = client.change("POST", "/api-tokens", {"name": name, "role": role, "days": days})
    return made, (
        f"{made['token']}\n\nShown this once: `Authorization: Bearer {made['token'][:10]}...`, or FEDCG_API_TOKEN for commands with --url.\n"
        f"Whoever has it is {name!r}, {role}, {_until(made)}.\nNext: to end it, fedcg coordinator token revoke {made['id']}"
    )


@api_token_app.command("list")
@asks
def token_list(client: Client) -> Result:
    """List all tokens; their secrets are stored nowhere.

    Example: fedcg coordinator token list
    """
    found = client.all("/api-tokens")
    columns = ("id", "name", "role", "state", "expires", "last used")
    return found, table(columns, map(_row, found), "No tokens yet.\nNext: fedcg coordinator token create")


@api_token_app.command("revoke")
@asks
def token_revoke(
    client: Client, token: Annotated[str, typer.Argument(help="Its id, as `fedcg coordinator token list` shows it.")]
) -> Result:
    """Make a token unusable at once, and every session of the page that was opened with it.

    Example: fedcg coordinator token revoke 3f9c21d07a54
    """
    done = client.change("DELETE", f"/api-tokens/{token}")
    return done, f"token {token} of {done['name']} is revoked."


def _row(token: dict[str, Any]) -> tuple[object, ...]:
    used = None if token["last_used_at"] is None else moment(token["last_used_at"])
    state = "revoked" if token["revoked_at"] else "valid" if token["is_valid"] else "expired"
    return token["id"], token["name"], token["role"], state, _until(token), used


def _until(token: dict[str, Any]) -> str:
    return "without an end" if token["expires_at"] is None else f"until {moment(token['expires_at'])}"
