"""Commands about membership: `fedcg token` and `fedcg device`. Heavy imports happen inside the commands."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordinator.cli.shared_options import Directory, Reason, Result, asks, prints, store_of, when

if TYPE_CHECKING:
    from coordinator.cli.client import Client

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
@asks
def token_create(
    client: Client,
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
) -> Result:
    """Make a one-time token for a device; it is shown once, and holds the digest of this coordinator's authority."""
    wanted = {"device": device, "replaces": replaces, "hours": hours, "url": enrolment_url, "federation": federation}
    made = client.change("POST", "/enrolment-tokens", wanted)
    named = "" if made["device"] else " --device ID"
    return made, (
        f"{made['token']}\n\nOn the device, until {when(made['expires_at'])}, once:\n"
        f"  fedcg enrol --token -{named} --out DIR --data IMAGES      # then paste the token and press Enter\n"
        "Whoever has the token can enrol a device: hand it over as you would a password."
    )


@token_app.command("list")
@asks
def token_list(client: Client) -> Result:
    """List all tokens; their secrets are not known to the coordinator."""
    found = client.all("/enrolment-tokens")
    return found, "\n".join(map(_token_line, found)) or "no tokens yet; make one with `fedcg token create`"


@token_app.command("revoke")
@asks
def token_revoke(
    client: Client, token: Annotated[str, typer.Argument(help="Its id, as `fedcg token list` shows it.")]
) -> Result:
    """Make a token that was not used yet unusable."""
    return client.change("DELETE", f"/enrolment-tokens/{token}"), f"token {token} is revoked."


@device_app.command("add")
@prints
def device_add(
    ids: Annotated[list[str], typer.Argument(help="Ids: lower-case letters, digits, dashes.")],
    directory: Directory,
    out: Annotated[Path, typer.Option("--out", help="Where the bundles go: OUT/ID.")],
    federation: JoinedFederation = None,
) -> Result:
    """Enrol devices without a network: certificate, keys and agent.toml of each in a bundle that a person carries.

    Devices that reach the coordinator enrol by themselves, with `fedcg token create` here and `fedcg enrol` there.
    """
    from coordinator.broker.access_lists import NOT_APPLIED, publish_access
    from coordinator.members.bundle_enrolment import enrol
    from coordinator.storage.locks import changing_members

    with store_of(directory) as (home, store), changing_members(home):
        bundles = enrol(home, store, ids, out, time.time(), federation)
        reloaded = publish_access(home)
    devices = {device: str(path) for device, path in bundles.items()}
    lines = [f"{device}: {path}" for device, path in devices.items()]
    lines.append("The bundles hold private keys: carry them over a safe channel.")
    return {"devices": devices, "broker_reloaded": reloaded}, "\n".join([*lines, *([] if reloaded else [NOT_APPLIED])])


@device_app.command("list")
@asks
def device_list(
    client: Client,
    search: Annotated[str, typer.Option(help="Only those with this in their id.")] = "",
    state: Annotated[
        Literal["enrolled", "revoked", "left"] | None, typer.Option(help="Only those in this state.")
    ] = None,
    sort: Annotated[Literal["id", "enrolled_at", "last_seen_at"], typer.Option(help="In this order.")] = "id",
) -> Result:
    """List all devices, also those that were revoked or left."""
    found = client.all("/devices", search=search, state=state, sort=sort)
    return found, "\n".join(map(_device_line, found)) or "no devices; see `fedcg token create`"


@device_app.command("show")
@asks
def device_show(client: Client, device: Device) -> Result:
    """Show one device: state, keys, certificates."""
    values = client.get(f"/devices/{device}")
    lines = [_device_line(values), f"message key\t{values['public_key']}", f"enrolled\t{when(values['enrolled_at'])}"]
    for known in values["certificates"]:
        ended = f", revoked {when(known['revoked_at'])}" if known["revoked_at"] else ""
        lines.append(f"certificate\t{known['serial']}, until {when(known['expires_at'])}{ended}")
    return values, "\n".join(lines)


@device_app.command("disable")
@asks
def device_disable(client: Client, device: Device, reason: Reason = "") -> Result:
    """Invite a device to no round until it is enabled; it stays enrolled."""
    values = client.change("POST", f"/devices/{device}/disable", {"reason": reason})
    return values, _device_line(values)


@device_app.command("enable")
@asks
def device_enable(client: Client, device: Device) -> Result:
    """Invite a disabled device again."""
    values = client.change("POST", f"/devices/{device}/enable")
    return values, _device_line(values)


@device_app.command("revoke")
@asks
def device_revoke(client: Client, device: Device, reason: Reason = "") -> Result:
    """Cut a device off: its certificates, its keys, and the session it may have now; no round waits for it."""
    from coordinator.broker.access_lists import NOT_APPLIED

    done = client.change("POST", f"/devices/{device}/revoke", {"reason": reason})
    text = f"{device} is revoked: {done['certificates']} certificates are on the revocation list."
    return done, text if done["broker_reloaded"] else f"{text}\n{NOT_APPLIED}"


def _device_line(values: dict[str, Any]) -> str:
    seen = "never seen" if values["last_seen_at"] is None else f"last seen {when(values['last_seen_at'])}"
    expiry = values["certificate_expires_at"]
    lines = [values["id"], values["state"], *(["silenced"] if values["silenced"] else [])]
    lines.append(f"online in {', '.join(values['online'])}" if values["online"] else seen)
    if values["disabled_at"] is not None:
        lines.append(f"disabled {when(values['disabled_at'])} {values['disabled_because']}".strip())
    if values["state"] == "enrolled" and expiry is not None:
        lines.append(f"certificate until {when(expiry)}")
    if values["ended_at"] is not None:
        lines.append(f"since {when(values['ended_at'])} {values['ended_because']}".strip())
    return "\t".join(lines)


def _token_line(token: dict[str, Any]) -> str:
    meant = f"for {token['device']}" if token["device"] else "for any id"
    if token["replaces"]:
        meant = f"replaces {token['device']}"
    used = token["used_at"]
    ended = f"used by {token['used_by']} {when(used)}" if used else f"until {when(token['expires_at'])}"
    return f"{token['id']}\t{token['state']}\t{meant}\t{ended}"
