"""Access lists of the broker: creates them from the database and publishes them to the program that runs the broker.

Uses a separate connection, which stays open until the lists are applied.
"""

import hashlib
import json
import logging
import queue
import tempfile
import time
from collections.abc import Collection
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from pydantic import ValidationError

from coordinator.broker.broker_folder import Applied, Lists
from coordinator.errors import BrokerError
from coordinator.paths import Home
from coordinator.pki.authority import broker_config, issue, observers_of, write_revocations
from coordinator.storage.locks import changing_members
from coordinator.storage.store import Store
from fedcg.files import replace_durably
from fedcg.wire.errors import TransportError
from fedcg.wire.messages.topics import LISTS, LISTS_APPLIED, LISTS_WRITER
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MAX_INBOUND, MqttConfig, connection_name
from fedcg.wire.transport.transport import Delivery

CERTIFICATE_LIFE = timedelta(days=1)
TIMEOUT_S = 5.0


def publish_lists(home: Home, lists: Lists, timeout_s: float = TIMEOUT_S) -> None:
    """Publish the lists, retained, and wait until the program that runs the broker has applied them.

    Call it with `changing_members` held: only one connection at a time may use this identity.

    Raises:
        BrokerError: they are not applied yet, with the reason and the next step.
        TransportError: the broker can't be reached.
    """
    with tempfile.TemporaryDirectory(prefix="lists-", dir=home.root) as folder:
        own = issue(home.pki, LISTS_WRITER, life=CERTIFICATE_LIFE, target=Path(folder))
        config = broker_config(home, LISTS_WRITER, own, connection_name(LISTS, home.secret()))
        _exchange(replace(config, assumed_max_packet=MAX_INBOUND), lists.model_dump_json().encode(), timeout_s)


def _exchange(config: MqttConfig, payload: bytes, timeout_s: float) -> None:
    """Publish one message and wait for its response."""
    transport = MqttTransport(config, retry_log_level=logging.DEBUG)  # the caller reports the reason
    digest = hashlib.sha256(payload).hexdigest()
    answers: queue.SimpleQueue[Applied] = queue.SimpleQueue()

    def delivered(delivery: Delivery) -> None:
        try:
            answer = Applied.model_validate_json(delivery.payload)
        except ValidationError:
            return  # from another version; wait until the timeout
        if answer.lists == digest:
            answers.put(answer)

    deadline = time.monotonic() + timeout_s
    transport.subscribe(LISTS_APPLIED)
    transport.start(delivered, lambda _up: None)
    try:
        transport.wait_linked(timeout_s)
        transport.publish(LISTS, payload, retain=True)
        answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise BrokerError(
            f"the broker at {config.address} has received the lists but has not applied them: start Mosquitto with "
            "`fedcg broker run` in the folder of `fedcg deploy mosquitto`; if it already runs this way, see its log"
        ) from None
    finally:
        transport.close()
    if answer.problem:
        raise BrokerError(f"the broker at {config.address} did not apply the lists: {answer.problem}")


NOT_APPLIED = (
    "The broker has not applied the new lists of devices; see the warning for the reason. A running coordinator publishes them once "
    "it reaches the broker, otherwise at its next start. Until then the broker uses the earlier lists."
)
SILENCED_NAME = "silenced.json"
PENDING_NAME = "lists-pending"
"""Exists in a home's broker folder while new lists are not applied; its date is that of the last try."""
PENDING_S = 60.0

log = logging.getLogger(__name__)


def refresh_access(home: Home) -> Lists:
    """Create the lists from the database, and write the revocation list of the coordinator's listeners."""
    silenced = silenced_in(home)
    with closing(Store.of(home)) as store:
        federations = tuple(record.id for record in store.federations())
        devices = tuple(sorted(device.id for device in store.members() if device.id not in silenced))
        revoked = store.register.revoked_certificates(time.time())
        told = tuple(store.register.revoked_devices(time.time()))
    serials = [
        (int(record.serial, 16), datetime.fromtimestamp(record.revoked_at or 0.0, timezone.utc)) for record in revoked
    ]
    revocations = write_revocations(home.pki, serials).read_text(encoding="ascii")
    observers = tuple(observers_of(home))
    return Lists(federations=federations, devices=devices, observers=observers, revocations=revocations, revoked=told)


def end_silences(home: Home) -> None:
    """At a coordinator's start: unsilence all devices and create the lists again; they are published once it reaches its broker."""
    with changing_members(home):
        replace_durably(home.broker / SILENCED_NAME, json.dumps([]))
        refresh_access(home)


def silence(home: Home, devices: Collection[str]) -> bool:
    """Exclude exactly these devices from every access list from now on; returns as `publish_access`."""
    with changing_members(home):
        replace_durably(home.broker / SILENCED_NAME, json.dumps(sorted(devices)))
        return publish_access(home)


def silenced_in(home: Home) -> list[str]:
    """The silenced devices; none if the file can't be read. A device that continues flooding is silenced again."""
    try:
        return list(json.loads((home.broker / SILENCED_NAME).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return []


def publish_access(home: Home) -> bool:
    """Run `refresh_access` and publish the lists to the broker. Call it with `changing_members` held.

    Returns:
        False if the broker has not applied them; the log has the reason.
    """
    pending = home.broker / PENDING_NAME
    pending.touch()
    lists = refresh_access(home)
    try:
        publish_lists(home, lists)
    except (BrokerError, TransportError) as error:
        log.warning("the running coordinator will publish the new lists of devices later: %s", error)
        return False
    pending.unlink(missing_ok=True)
    return True


def are_lists_pending(home: Home) -> bool:
    """Whether the last try to publish lists, in any process, failed or was interrupted at least `PENDING_S` ago."""
    try:
        return time.time() - (home.broker / PENDING_NAME).stat().st_mtime >= PENDING_S
    except FileNotFoundError:
        return False
