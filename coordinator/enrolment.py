"""Enrols devices: all ids are checked before anything is written, then each gets its bundle and its place in the register."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coordinator.errors import EnrolmentError
from coordinator.home import Home
from coordinator.provision.bundle import make_bundle
from coordinator.store import Store
from fedcg.wire.topics import check_device_id


def enrol(home: Home, store: Store, ids: Sequence[str], out: Path, now: float) -> dict[str, Path]:
    """Make a bundle per device and register its public key.

    Args:
        home: the coordinator's directory.
        store: its database.
        ids: new devices.
        out: bundles go to `out/<id>`.
        now: unix time.

    Returns:
        Where each bundle is.

    Raises:
        EnrolmentError: an id that can't be used, is taken or named twice, or no federation to join; nothing was written.
    """
    federations = store.federations()
    if not federations:
        raise EnrolmentError("there is no federation to join yet; open one with `fedcg federation create`")
    _check(store, ids, out)
    bundles: dict[str, Path] = {}
    for device in ids:
        key = make_bundle(home, federations[0].id, device, out)
        store.add_device(device, key.hex, now)
        bundles[device] = out / device
    return bundles


def _check(store: Store, ids: Sequence[str], out: Path) -> None:
    problems: list[str] = []
    for device in ids:
        try:
            check_device_id(device)
        except ValueError as error:
            problems.append(str(error))
            continue
        if store.device(device) is not None:
            problems.append(f"there is a device {device!r} already; choose another id")
        if (out / device).exists():
            problems.append(f"{out / device} exists; remove it or choose another --out")
    problems += [f"{device!r} is named twice" for device in sorted(set(ids)) if ids.count(device) > 1]
    if problems:
        raise EnrolmentError("\n".join(problems))
