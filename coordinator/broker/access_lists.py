"""Access to the broker and its topics: writes the access list and the revocation list, and makes brokers read them."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from datetime import datetime, timezone
from pathlib import Path

from coordinator.broker.deployed_mosquitto import PID_FILE, refresh_lists
from coordinator.broker.mosquitto import ACL_NAME, access_list
from coordinator.paths import Home
from coordinator.pki.authority import observers_of, write_revocations
from coordinator.storage.store import Store
from fedcg.files import replace_durably

RELOAD_BY_HAND = (
    "No broker of this coordinator runs on this machine. If yours is on another one: copy `acl` and `crl.pem` of the folder of "
    "`fedcg deploy mosquitto` there after every change of devices, and send it SIGHUP."
)
BROKER_COMMAND = "mosquitto"
PID_NAME = "broker.pid"
SILENCED_NAME = "silenced.json"

log = logging.getLogger(__name__)


def refresh_access(home: Home) -> None:
    """Write revocation list and access list from the database, in this order: a revoked device must not come back."""
    silenced = silenced_in(home)
    with closing(Store.of(home)) as store:
        federations = [record.id for record in store.federations()]
        devices = [device.id for device in store.members() if device.id not in silenced]
        revoked = store.register.revoked_certificates(time.time())
    serials = [
        (int(record.serial, 16), datetime.fromtimestamp(record.revoked_at or 0.0, timezone.utc)) for record in revoked
    ]
    write_revocations(home.pki, serials)
    replace_durably(home.broker / ACL_NAME, access_list(federations, devices, observers_of(home)))


def silence(home: Home, devices: Collection[str]) -> bool:
    """Leave exactly these devices out of every access list from now on; returns what `publish_access` does."""
    with home.changing_members():
        replace_durably(home.broker / SILENCED_NAME, json.dumps(sorted(devices)))
        return publish_access(home)


def silenced_in(home: Home) -> list[str]:
    """The devices that are left out; none where the file can't be read: a device that goes on flooding is silenced again."""
    try:
        return list(json.loads((home.broker / SILENCED_NAME).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return []


def publish_access(home: Home) -> bool:
    """`refresh_access`, and make every Mosquitto on this machine that reads the lists read them again.

    Returns:
        False when none was reached.
    """
    refresh_access(home)
    refresh_lists(home)
    return reload_brokers(home)


def reload_brokers(home: Home) -> bool:
    """Make the home's brokers on this machine read their lists again; False when none was reached."""
    reloaded = [_reload(broker) for broker in running_brokers(home)]
    return any(reloaded)


def running_brokers(home: Home) -> list[int]:
    """Process ids of the home's brokers on this machine: the one of `fedcg broker run`, and the operator's own Mosquitto.

    A file with a process id outlives its process, and the system gives the id to others: so the process itself is examined.
    """
    own = home.broker / PID_NAME
    return _process_of(own, lambda pid: _has_open(pid, own)) + _process_of(home.broker / PID_FILE, _is_mosquitto)


def _reload(broker: int) -> bool:
    try:
        os.kill(broker, signal.SIGHUP)
    except OSError as error:
        log.warning("the broker, process %d, was not made to read its lists again: %s", broker, error)
        return False
    return True


def _process_of(pid_file: Path, is_broker: Callable[[int], bool]) -> list[int]:
    try:
        pid = int(pid_file.read_text(encoding="ascii"))
        return [pid] if is_broker(pid) else []
    except (OSError, ValueError):
        return []


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process has a file open, as a broker has the one that it holds locked."""
    for opened in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile
            if opened.samefile(path):
                return True
    return False


def _is_mosquitto(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == BROKER_COMMAND
