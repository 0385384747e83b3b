"""The commands `fedcg token` and `fedcg device`. Heavy imports happen inside the commands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordinator.cli.shared_options import Directory, Reason, asks, store_of
from fedcg.errors import BadInputError
from fedcg.terminal import Result, command
from fedcg.text_output import moment, seconds_of, table

if TYPE_CHECKING:
    from coordinator.cli.client import Client

JoinedFederation = Annotated[
    str | None, typer.Option("--federation", help="Federation that the device joins; required if there are several.")
]
Device = Annotated[str, typer.Argument(help="Device id.")]
token_app = typer.Typer(help="Create, list and revoke one-time enrolment tokens.", no_args_is_help=True)
device_app = typer.Typer(
    help="List, show, disable and revoke devices; create bundles for sites without a network.", no_args_is_help=True
)


@asks(token_app, "create")
def token_create(
    client: Client,
    device: Annotated[
        str | None, typer.Option(help="Id, or a range such as line-1..line-20; by default the device chooses its id.")
    ] = None,
    replaces: Annotated[str | None, typer.Option(help="Device to replace; the old one is revoked.")] = None,
    span: Annotated[
        str, typer.Option("--for", metavar="SPAN", help="How long it is valid: 30m, 2h or 3d, at most 90d.")
    ] = "24h",
    enrolment_url: Annotated[
        str | None,
        typer.Option(help="URL at which devices reach the enrolment listener, if not the one in coordinator.toml."),
    ] = None,
    federation: JoinedFederation = None,
    label: Annotated[list[str] | None, typer.Option(help="Label that the device gets. May be repeated.")] = None,
    site: Annotated[str, typer.Option(help="Site that the device gets.")] = "",
) -> Result:
    """Create a one-time enrolment token. It is shown once, and contains the digest of this coordinator's authority.

    For a range of devices, this prints one token for each as CSV: device, token, and a line for the device's shell.

    Example: fedcg token create --device line-4 --for 2h
    """
    from coordinator.members.enrolment import MAX_TOKEN_HOURS, tokens_csv

    hours = seconds_of(span, "--for", f"{MAX_TOKEN_HOURS / 24:g}d") / 3600
    if not hours:
        raise BadInputError(f"--for {span}: choose more than 0")
    about: dict[str, Any] = {"labels": label or [], "site": site, "hours": hours, "url": enrolment_url}
    wanted = about | {"device": device, "replaces": replaces, "federation": federation}
    if device is not None and ".." in device:
        made = client.change("POST", "/enrolment-tokens/batch", wanted)
        return made, tokens_csv(made).rstrip()
    made = client.change("POST", "/enrolment-tokens", wanted)
    named = "" if made["device"] else " --device ID"
    return made, (
        f"{made['token']}\n\nAnyone with this token can enrol a device. Treat it like a password.\n"
        f"Next: on the device, once, before {moment(made['expires_at'])}:\n"
        f"  fedcg enrol --token -{named} --out DIR --data IMAGES      # then paste the token and press Enter\n"
        f"Or, as one line that deletes itself from bash's history:\n{made['line']}"
    )


@asks(token_app, "list")
def token_list(client: Client) -> Result:
    """List all enrolment tokens, with the steps that their devices have reached. Their secrets are not stored.

    Example: fedcg token list
    """
    found = client.all("/enrolment-tokens")
    columns = ("id", "state", "device", "replacement", "expires", "used", "missing step")
    return found, table(columns, map(_token_row, found), "No tokens yet.\nNext: fedcg token create")


@asks(token_app, "revoke")
def token_revoke(
    client: Client, token: Annotated[str, typer.Argument(help="Token id, from `fedcg token list`.")]
) -> Result:
    """Revoke an unused enrolment token.

    Example: fedcg token revoke 3f9c21d07a54
    """
    return client.change("DELETE", f"/enrolment-tokens/{token}"), f"token {token} is revoked."


@command(device_app, "add")
def device_add(
    ids: Annotated[list[str], typer.Argument(help="Ids: lower-case letters, digits, dashes.")],
    directory: Directory,
    out: Annotated[Path, typer.Option("--out", help="Folder for the bundles: OUT/ID.")],
    federation: JoinedFederation = None,
) -> Result:
    """Enrol devices that can't reach the coordinator. Each gets a bundle with certificate, keys and agent.toml, to be carried by hand.

    For devices that reach the coordinator, use `fedcg token create` here and `fedcg enrol` there.

    Example: fedcg device add line-4 line-5 --out bundles
    """
    from coordinator.broker.access_lists import NOT_APPLIED, publish_access
    from coordinator.members.enrolment import federation_to_join, make_bundles
    from coordinator.storage.locks import changing_members

    with store_of(directory) as (home, store), changing_members(home):
        bundles = make_bundles(home, store, ids, out, time.time(), federation_to_join(store, federation))
        reloaded = publish_access(home)
    devices = {device: str(path) for device, path in bundles.items()}
    lines = [f"{device}: {path}" for device, path in devices.items()]
    lines += [*([] if reloaded else [NOT_APPLIED]), "The bundles contain private keys. Transfer them securely."]
    lines.append("Next: on each device, in its bundle: fedcg doctor --config agent.toml")
    return {"devices": devices, "broker_reloaded": reloaded}, "\n".join(lines)


@asks(device_app, "list")
def device_list(
    client: Client,
    search: Annotated[
        str, typer.Option(help="Only devices with this text in id, version, site, note, hardware, a label or a remark.")
    ] = "",
    state: Annotated[
        Literal["enrolled", "online", "offline", "disabled", "revoked", "left"] | None,
        typer.Option(help="Only devices in this state. `enrolled`: all that were not revoked and have not left."),
    ] = None,
    label: Annotated[str, typer.Option(help="Only devices with this label.")] = "",
    site: Annotated[str, typer.Option(help="Only devices at this site.")] = "",
    federation: Annotated[str, typer.Option(help="Only devices that take part in this federation.")] = "",
    sort: Annotated[Literal["id", "enrolled_at", "last_seen_at"], typer.Option(help="Sort order.")] = "id",
) -> Result:
    """List all devices, including those that were revoked or left.

    Example: fedcg device list --state offline --label north
    """
    chosen = {"state" if state == "enrolled" else "standing": state}
    found = client.all("/devices", search=search, sort=sort, label=label, site=site, federation=federation, **chosen)
    return found, _devices(found)


@asks(device_app, "show")
def device_show(client: Client, device: Device) -> Result:
    """Show the state, keys and certificates of a device.

    Example: fedcg device show line-4
    """
    values = client.get(f"/devices/{device}")
    lines = [_devices([values]), "", f"enrolled     {moment(values['enrolled_at'])}"]
    lines += [f"{name:<12} {values[name]}" for name in ("agent", "note", "hardware", "images") if values[name]]
    lines.append(f"message key  {values['public_key']}")
    lines += [f"odd update   {federation}, {what}" for federation, what in values["odd"].items()]
    lines += [f"{one['state']:<12} {one['what']}. {one['remedy']}" for one in values["findings"] or ()]
    for known in values["certificates"]:
        ended = f", revoked {moment(known['revoked_at'])}" if known["revoked_at"] else ""
        lines.append(f"certificate  {known['serial']}, until {moment(known['expires_at'])}{ended}")
    return values, "\n".join(lines)


@asks(device_app, "disable")
def device_disable(client: Client, device: Device, reason: Reason = "") -> Result:
    """Stop inviting a device to rounds until it is enabled again. It stays enrolled.

    Example: fedcg device disable line-4 --reason "camera is being replaced"
    """
    values = client.change("POST", f"/devices/{device}/disable", {"reason": reason})
    return values, f"{_devices([values])}\nNext: to invite it again, fedcg device enable {device}"


@asks(device_app, "enable")
def device_enable(client: Client, device: Device) -> Result:
    """Invite a disabled device again.

    Example: fedcg device enable line-4
    """
    values = client.change("POST", f"/devices/{device}/enable")
    return values, _devices([values])


@asks(device_app, "set")
def device_set(
    client: Client,
    device: Device,
    label: Annotated[list[str] | None, typer.Option(help="Label to add: a-z, 0-9 and dashes. May be repeated.")] = None,
    remove_label: Annotated[list[str] | None, typer.Option(help="Label to remove. May be repeated.")] = None,
    site: Annotated[str | None, typer.Option(help='Where it is; "" deletes it.')] = None,
    note: Annotated[str | None, typer.Option(help='Anything else, on one line; "" deletes it.')] = None,
) -> Result:
    """Change the labels, site and note of a device. They never reach the device.

    Example: fedcg device set line-4 --label north --site "hall 3"
    """
    wanted = {"add_labels": label or [], "remove_labels": remove_label or [], "site": site, "note": note}
    values = client.change("PATCH", f"/devices/{device}", wanted)
    return values, _devices([values])


@asks(device_app, "readmit")
def device_readmit(client: Client, device: Device) -> Result:
    """Invite a device again that is left out of rounds after repeated failures; they no longer count.

    Example: fedcg device readmit line-4
    """
    values = client.change("POST", f"/devices/{device}/readmit")
    return values, _devices([values])


@asks(device_app, "revoke")
def device_revoke(client: Client, device: Device, reason: Reason = "") -> Result:
    """Revoke a device: its certificates, its keys and any open session. No round waits for it.

    Example: fedcg device revoke line-4 --reason stolen
    """
    from coordinator.broker.access_lists import NOT_APPLIED

    done = client.change("POST", f"/devices/{device}/revoke", {"reason": reason})
    text = f"{device} is revoked. Certificates on the revocation list: {done['certificates']}."
    applied = "" if done["broker_reloaded"] else f"\n{NOT_APPLIED}"
    kept = "If it has a cohort secret, it keeps it: replace the secret on the other devices, starting with `fedcg cohort renew` on one."
    following = f"Next: to replace it with a new machine, fedcg token create --replaces {device}"
    return done, f"{text}{applied}\n{kept}\n{following}"


def _devices(found: Sequence[dict[str, Any]]) -> str:
    columns = ("device", "state", "online in", "last seen", "certificate until", "site", "labels", "remarks")
    return table(
        columns, map(_device_row, found), "No matching devices.\nNext: fedcg device list for all, or fedcg token create"
    )


def _device_row(values: dict[str, Any]) -> tuple[object, ...]:
    seen, expiry = values["last_seen_at"], values["certificate_expires_at"]
    remarks = [text for name, text in (("silenced", "silenced"), ("is_behind", "older agent")) if values[name]]
    for name, word in (("disabled", "disabled "), ("ended", "since ")):
        if values[f"{name}_at"] is not None:
            remarks.append(f"{word}{moment(values[f'{name}_at'])} {values[f'{name}_because']}".strip())
    return (
        values["id"],
        values["standing"],
        ", ".join(values["online"]),
        "now" if values["online"] else "never" if seen is None else moment(seen),
        moment(expiry) if values["state"] == "enrolled" and expiry is not None else "",
        values["site"],
        " ".join(values["labels"]),
        "; ".join(remarks),
    )


def _token_row(token: dict[str, Any]) -> tuple[object, ...]:
    used = f"{moment(token['used_at'])} by {token['used_by']}" if token["used_at"] else ""
    replaces = "yes" if token["replaces"] else "no"
    step = next((each["name"] for each in token["steps"] if each["state"] != "done"), "")
    return token["id"], token["state"], token["device"] or "any", replaces, moment(token["expires_at"]), used, step
