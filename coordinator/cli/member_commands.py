"""Commands about membership: `fedcg token` and `fedcg device`.

Exit codes: 0 done, 1 failed while running, 2 bad input. Heavy imports happen inside the commands.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.shared_options import AsJson, Directory, print_result, store_of

if TYPE_CHECKING:
    from coordinator.paths import Home
    from coordinator.rounds.records import DeviceRecord, TokenRecord
    from coordinator.storage.store import Store
    from fedcg.event_log import EventLog

JoinedFederation = Annotated[
    str | None,
    typer.Option("--federation", help="The federation that the device joins; needed where there are several."),
]
token_app = typer.Typer(help="Make, list and revoke the one-time tokens that devices enrol with.", no_args_is_help=True)
device_app = typer.Typer(
    help="List, show and revoke devices; make bundles for sites without a network.", no_args_is_help=True
)


@token_app.command("create")
def token_create(
    directory: Directory,
    device: Annotated[
        str | None, typer.Option("--device", help="The only id that it enrols; else the device chooses.")
    ] = None,
    replaces: Annotated[
        str | None,
        typer.Option("--replaces", help="Put a new device in the place of this device and revoke the old one."),
    ] = None,
    hours: Annotated[float, typer.Option(help="For how long it can be used, at most 2160.")] = 24.0,
    url: Annotated[
        str | None,
        typer.Option(help="URL under which devices reach the enrolment listener, if not the one in coordinator.toml."),
    ] = None,
    federation: JoinedFederation = None,
    as_json: AsJson = False,
) -> None:
    """Make a one-time token for a device; it is shown once, and holds the digest of this coordinator's authority."""
    from coordinator.members.tokens import create_token

    with store_of(directory) as (home, store):
        now = time.time()
        token = create_token(
            home, store, now, device=device, replaces=replaces, hours=hours, url=url, federation=federation
        )
        expires_at = now + hours * 3600
        _event_log(home).write("token_created", token=token.id, client=token.device or "", until=expires_at)
    values = {
        "token": token.text,
        "id": token.id,
        "device": token.device,
        "replaces": replaces,
        "url": token.url,
        "expires_at": expires_at,
    }
    named = "" if token.device else " --device ID"
    text = (
        f"{token.text}\n\nOn the device, until {_when(expires_at)}, once:\n"
        f"  fedcg enrol --token -{named} --out DIR --data IMAGES      # then paste the token and press Enter\n"
        "Whoever has the token can enrol a device: hand it over as you would a password."
    )
    print_result(values, text, as_json=as_json)


@token_app.command("list")
def token_list(directory: Directory, as_json: AsJson = False) -> None:
    """List all tokens; their secrets are not known to the coordinator."""
    now = time.time()
    with store_of(directory) as (_, store):
        tokens = store.register.tokens()
    lines = [_token_line(token, now) for token in tokens] or ["no tokens yet; make one with `fedcg token create`"]
    print_result([_token_values(token, now) for token in tokens], "\n".join(lines), as_json=as_json)


@token_app.command("revoke")
def token_revoke(
    token: Annotated[str, typer.Argument(help="Its id, as `fedcg token list` shows it.")],
    directory: Directory,
    as_json: AsJson = False,
) -> None:
    """Make a token that was not used yet unusable."""
    from coordinator.members.tokens import revoke_token

    with store_of(directory) as (home, store):
        revoke_token(store, token, time.time())
        _event_log(home).write("token_revoked", token=token)
    print_result({"id": token, "state": "revoked"}, f"token {token} is revoked.", as_json=as_json)


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

    with store_of(directory) as (home, store), home.changing_members():
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
def device_list(directory: Directory, as_json: AsJson = False) -> None:
    """List all devices, also those that were revoked or left."""
    with store_of(directory) as (home, store):
        described = [_device_values(home, store, device) for device in store.devices()]
    lines = [_device_line(values) for values in described] or ["no devices yet; see `fedcg token create`"]
    print_result(described, "\n".join(lines), as_json=as_json)


@device_app.command("show")
def device_show(
    device: Annotated[str, typer.Argument(help="Its id.")], directory: Directory, as_json: AsJson = False
) -> None:
    """Show one device: state, keys, certificates."""
    from coordinator.errors import EnrolmentError

    with store_of(directory) as (home, store):
        record = store.device(device)
        if record is None:
            raise EnrolmentError(f"there is no device {device!r}; `fedcg device list` shows all")
        values = _device_values(home, store, record)
        values["certificates"] = [
            {name: getattr(known, name) for name in ("serial", "issued_at", "expires_at", "revoked_at")}
            for known in store.register.certificates(device)
        ]
    lines = [_device_line(values), f"message key\t{record.public_key}", f"enrolled\t{_when(record.enrolled_at)}"]
    for known in values["certificates"]:
        ended = f", revoked {_when(known['revoked_at'])}" if known["revoked_at"] else ""
        lines.append(f"certificate\t{known['serial']}, until {_when(known['expires_at'])}{ended}")
    print_result(values, "\n".join(lines), as_json=as_json)


@device_app.command("revoke")
def device_revoke(
    device: Annotated[str, typer.Argument(help="Its id.")],
    directory: Directory,
    reason: Annotated[str, typer.Option(help="For the record, e.g. stolen.")] = "",
    as_json: AsJson = False,
) -> None:
    """Cut a device off: its certificates, its keys, and the session it may have now; no round waits for it."""
    from coordinator.broker.access_lists import NOT_APPLIED
    from coordinator.members.revocation import revoke

    with store_of(directory) as (home, store):
        done = revoke(home, store, device, reason, time.time())
        _event_log(home).write(
            "device_revoked",
            client=device,
            reason=reason,
            certificates=done.certificates,
            reloaded=done.broker_reloaded,
        )
    values = {
        "id": device,
        "state": "revoked",
        "was_member": done.was_member,
        "certificates": done.certificates,
        "broker_reloaded": done.broker_reloaded,
    }
    text = f"{device} is revoked: {done.certificates} certificates are on the revocation list."
    print_result(values, text if done.broker_reloaded else f"{text}\n{NOT_APPLIED}", as_json=as_json)


def _event_log(home: Home) -> EventLog:
    from fedcg.event_log import EventLog

    return EventLog(home.events_file, time.time)


def _device_values(home: Home, store: Store, device: DeviceRecord) -> dict[str, Any]:
    from coordinator.broker.access_lists import silenced_in

    expiries = [known.expires_at for known in store.register.certificates(device.id) if known.revoked_at is None]
    values = asdict(device)
    return {
        "reason": values.pop("ended_because"),
        "silenced": device.id in silenced_in(home),
        "certificate_expires_at": max(expiries, default=None),
        **values,
    }


def _device_line(values: dict[str, Any]) -> str:
    seen = "never seen" if values["last_seen_at"] is None else f"seen {_when(values['last_seen_at'])}"
    expiry = values["certificate_expires_at"]
    lines = [values["id"], values["state"], *(["silenced"] if values["silenced"] else []), seen]
    if values["state"] == "enrolled" and expiry is not None:
        lines.append(f"certificate until {_when(expiry)}")
    if values["ended_at"] is not None:
        lines.append(f"since {_when(values['ended_at'])} {values['reason']}".strip())
    return "\t".join(lines)


def _token_values(token: TokenRecord, now: float) -> dict[str, object]:
    shown = ("id", "device", "replaces", "created_at", "expires_at", "used_at", "used_by")
    return {"state": token.state(now).value, **{name: getattr(token, name) for name in shown}}


def _token_line(token: TokenRecord, now: float) -> str:
    meant = f"for {token.device}" if token.device else "for any id"
    if token.replaces:
        meant = f"replaces {token.device}"
    ended = f"used by {token.used_by} {_when(token.used_at)}" if token.used_at else f"until {_when(token.expires_at)}"
    return f"{token.id}\t{token.state(now).value}\t{meant}\t{ended}"


def _when(at: float) -> str:
    return time.strftime("%F %T", time.localtime(at))
