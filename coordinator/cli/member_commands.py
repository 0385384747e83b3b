"""Commands about membership: `fedcg token` and `fedcg device`. Heavy imports happen inside the commands."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from coordinator.cli.shared_options import AsJson, Directory, Somewhere, Url, print_result, store_of

JoinedFederation = Annotated[
    str | None,
    typer.Option("--federation", help="The federation that the device joins; needed where there are several."),
]
Device = Annotated[str, typer.Argument(help="Its id.")]
token_app = typer.Typer(help="Make, list and revoke the one-time tokens that devices enrol with.", no_args_is_help=True)
device_app = typer.Typer(
    help="List, show, disable and revoke devices; make bundles for sites without a network.", no_args_is_help=True
)


@token_app.command("create")
def token_create(
    directory: Somewhere = None,
    url: Url = None,
    device: Annotated[
        str | None, typer.Option("--device", help="The only id that it enrols; else the device chooses.")
    ] = None,
    replaces: Annotated[
        str | None,
        typer.Option("--replaces", help="Put a new device in the place of this device and revoke the old one."),
    ] = None,
    hours: Annotated[float, typer.Option(help="For how long it can be used, at most 2160.")] = 24.0,
    enrolment_url: Annotated[
        str | None,
        typer.Option(help="URL under which devices reach the enrolment listener, if not the one in coordinator.toml."),
    ] = None,
    federation: JoinedFederation = None,
    as_json: AsJson = False,
) -> None:
    """Make a one-time token for a device; it is shown once, and holds the digest of this coordinator's authority."""
    from coordinator.cli.client import client_of

    wanted = {"device": device, "replaces": replaces, "hours": hours, "url": enrolment_url, "federation": federation}
    with client_of(directory, url) as client:
        made = client.change("POST", "/enrolment-tokens", wanted)
    named = "" if made["device"] else " --device ID"
    text = (
        f"{made['token']}\n\nOn the device, until {_when(made['expires_at'])}, once:\n"
        f"  fedcg enrol --token -{named} --out DIR --data IMAGES      # then paste the token and press Enter\n"
        "Whoever has the token can enrol a device: hand it over as you would a password."
    )
    print_result(made, text, as_json=as_json)


@token_app.command("list")
def token_list(directory: Somewhere = None, url: Url = None, as_json: AsJson = False) -> None:
    """List all tokens; their secrets are not known to the coordinator."""
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        found = client.all("/enrolment-tokens")
    lines = [_token_line(token) for token in found] or ["no tokens yet; make one with `fedcg token create`"]
    print_result(found, "\n".join(lines), as_json=as_json)


@token_app.command("revoke")
def token_revoke(
    token: Annotated[str, typer.Argument(help="Its id, as `fedcg token list` shows it.")],
    directory: Somewhere = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Make a token that was not used yet unusable."""
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        revoked = client.change("DELETE", f"/enrolment-tokens/{token}")
    print_result(revoked, f"token {token} is revoked.", as_json=as_json)


@device_app.command("add")
def device_add(
    ids: Annotated[list[str], typer.Argument(help="Ids: lower-case letters, digits, dashes.")],
    directory: Directory,
    out: Annotated[Path, typer.Option("--out", help="Where the bundles go: OUT/ID.")],
    federation: JoinedFederation = None,
    as_json: AsJson = False,
) -> None:
    """Enrol devices without a network: certificate, keys and agent.toml of each in a bundle that a person carries.

    Devices that reach the coordinator enrol by themselves, with `fedcg token create` here and `fedcg enrol` there.
    """
    from coordinator.broker.access_lists import NOT_APPLIED, publish_access
    from coordinator.members.bundle_enrolment import enrol
    from coordinator.storage.locks import changing_members

    with store_of(directory) as (home, store), changing_members(home):
        bundles = enrol(home, store, ids, out, time.time(), federation)
        reloaded = publish_access(home)
    values: dict[str, object] = {
        "devices": {device: str(path) for device, path in bundles.items()},
        "broker_reloaded": reloaded,
    }
    text = "\n".join(f"{device}: {path}" for device, path in bundles.items())
    text = f"{text}\nThe bundles hold private keys: carry them over a safe channel."
    print_result(values, text if reloaded else f"{text}\n{NOT_APPLIED}", as_json=as_json)


@device_app.command("list")
def device_list(
    directory: Somewhere = None,
    url: Url = None,
    search: Annotated[str, typer.Option(help="Only those with this in their id.")] = "",
    state: Annotated[
        Literal["enrolled", "revoked", "left"] | None, typer.Option(help="Only those in this state.")
    ] = None,
    sort: Annotated[Literal["id", "enrolled_at", "last_seen_at"], typer.Option(help="In this order.")] = "id",
    as_json: AsJson = False,
) -> None:
    """List all devices, also those that were revoked or left."""
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        found = client.all("/devices", search=search, state=state, sort=sort)
    lines = [_device_line(values) for values in found] or ["no devices; see `fedcg token create`"]
    print_result(found, "\n".join(lines), as_json=as_json)


@device_app.command("show")
def device_show(device: Device, directory: Somewhere = None, url: Url = None, as_json: AsJson = False) -> None:
    """Show one device: state, keys, certificates."""
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        values = client.get(f"/devices/{device}")
    lines = [_device_line(values), f"message key\t{values['public_key']}", f"enrolled\t{_when(values['enrolled_at'])}"]
    for known in values["certificates"]:
        ended = f", revoked {_when(known['revoked_at'])}" if known["revoked_at"] else ""
        lines.append(f"certificate\t{known['serial']}, until {_when(known['expires_at'])}{ended}")
    print_result(values, "\n".join(lines), as_json=as_json)


@device_app.command("disable")
def device_disable(
    device: Device,
    directory: Somewhere = None,
    url: Url = None,
    reason: Annotated[str, typer.Option(help="For the record, e.g. maintenance.")] = "",
    as_json: AsJson = False,
) -> None:
    """Invite a device to no round until it is enabled; it stays enrolled."""
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        values = client.change("POST", f"/devices/{device}/disable", {"reason": reason})
    print_result(values, _device_line(values), as_json=as_json)


@device_app.command("enable")
def device_enable(device: Device, directory: Somewhere = None, url: Url = None, as_json: AsJson = False) -> None:
    """Invite a disabled device again."""
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        values = client.change("POST", f"/devices/{device}/enable")
    print_result(values, _device_line(values), as_json=as_json)


@device_app.command("revoke")
def device_revoke(
    device: Device,
    directory: Somewhere = None,
    url: Url = None,
    reason: Annotated[str, typer.Option(help="For the record, e.g. stolen.")] = "",
    as_json: AsJson = False,
) -> None:
    """Cut a device off: its certificates, its keys, and the session it may have now; no round waits for it."""
    from coordinator.broker.access_lists import NOT_APPLIED
    from coordinator.cli.client import client_of

    with client_of(directory, url) as client:
        done = client.change("POST", f"/devices/{device}/revoke", {"reason": reason})
    text = f"{device} is revoked: {done['certificates']} certificates are on the revocation list."
    print_result(done, text if done["broker_reloaded"] else f"{text}\n{NOT_APPLIED}", as_json=as_json)


def _device_line(values: dict[str, Any]) -> str:
    seen = "never seen" if values["last_seen_at"] is None else f"seen {_when(values['last_seen_at'])}"
    expiry = values["certificate_expires_at"]
    lines = [values["id"], values["state"], *(["silenced"] if values["silenced"] else []), seen]
    if values["online"]:
        lines.append(f"online in {', '.join(values['online'])}")
    if values["disabled_at"] is not None:
        lines.append(f"disabled {_when(values['disabled_at'])} {values['disabled_because']}".strip())
    if values["state"] == "enrolled" and expiry is not None:
        lines.append(f"certificate until {_when(expiry)}")
    if values["ended_at"] is not None:
        lines.append(f"since {_when(values['ended_at'])} {values['ended_because']}".strip())
    return "\t".join(lines)


def _token_line(token: dict[str, Any]) -> str:
    meant = f"for {token['device']}" if token["device"] else "for any id"
    if token["replaces"]:
        meant = f"replaces {token['device']}"
    used = token["used_at"]
    ended = f"used by {token['used_by']} {_when(used)}" if used else f"until {_when(token['expires_at'])}"
    return f"{token['id']}\t{token['state']}\t{meant}\t{ended}"


def _when(at: float) -> str:
    return time.strftime("%F %T", time.localtime(at))
