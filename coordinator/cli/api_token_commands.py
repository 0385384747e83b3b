"""The command `fedcg coordinator token`: tokens with which people and programs use the API and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordinator.cli.shared_options import Result, asks, when

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
    days: Annotated[float, typer.Option("--days", help="After which it expires; at most 3650.")] = 90.0,
) -> Result:
    """Make a token; it is shown once, and only a hash of it is kept."""
    made = client.change("POST", "/api-tokens", {"name": name, "role": role, "days": days})
    return made, (
        f"{made['token']}\n\nShown this once: `Authorization: Bearer {made['token'][:10]}...`, or FEDCG_API_TOKEN for commands with --url.\n"
        f"Whoever has it is {name!r}, {role}, {_until(made)}. It ends with `fedcg coordinator token revoke {made['id']}`."
    )


@api_token_app.command("list")
@asks
def token_list(client: Client) -> Result:
    """List all tokens; their secrets are stored nowhere."""
    found = client.all("/api-tokens")
    return found, "\n".join(map(_line, found))


@api_token_app.command("revoke")
@asks
def token_revoke(
    client: Client, token: Annotated[str, typer.Argument(help="Its id, as `fedcg coordinator token list` shows it.")]
) -> Result:
    """Make a token unusable at once, and every session of the page that was opened with it."""
    done = client.change("DELETE", f"/api-tokens/{token}")
    return done, f"token {token} of {done['name']} is revoked."


def _line(token: dict[str, Any]) -> str:
    used = "never used" if token["last_used_at"] is None else f"used {when(token['last_used_at'])}"
    state = "revoked" if token["revoked_at"] else "valid" if token["is_valid"] else "expired"
    return "\t".join([token["id"], token["name"], token["role"], state, _until(token), used])


def _until(token: dict[str, Any]) -> str:
    return "without an end" if token["expires_at"] is None else f"until {when(token['expires_at'])}"
