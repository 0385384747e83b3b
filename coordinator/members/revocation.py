"""Ends a device's membership: database, revocation list, access list, and any session that it still has at the broker.

Even when the broker can't be reached, the coordinator forgets the device's message key: it refuses the device's messages, and no
round waits for them.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from coordinator.broker.access_lists import publish_access
from coordinator.errors import NotFoundError
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, credential_of, issue
from coordinator.rounds.records import DeviceState
from coordinator.storage.locks import changing_members
from coordinator.storage.store import Store
from fedcg.wire.errors import TransportError
from fedcg.wire.transport.mqtt import probe
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles, connection_name

EVICTION_LIFE = timedelta(minutes=10)
EVICTION_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Revoked:
    """A device that was cut off.

    Attributes:
        was_member: False when the device had been revoked, or had left, before.
        certificates: how many of its certificates are on the revocation list now.
        broker_reloaded: whether the broker has applied it; else the coordinator brings it there later.
    """

    id: str
    state: DeviceState
    was_member: bool
    certificates: int
    broker_reloaded: bool


def revoke(home: Home, store: Store, device: str, reason: str, now: float) -> Revoked:
    """Revoke a device: from now on it is refused everywhere. Revoking it again repeats the steps that failed.

    Raises:
        NotFoundError: there is no such device.
    """
    if store.device(device) is None:
        raise NotFoundError(f"there is no device {device[:80]!r}; `fedcg device list` has all")
    with changing_members(home):
        was_member = store.register.end_membership(device, DeviceState.REVOKED, reason, now)
        reloaded = publish_access(home)
        revoked = [record for record in store.register.revoked_certificates(now) if record.device == device]
    return Revoked(device, DeviceState.REVOKED, was_member, len(revoked), reloaded)


def evict(home: Home, device: str, public_key: str, federations: Collection[str]) -> bool:
    """End the sessions that a replaced device still has at the broker, by connecting under its name for a moment.

    An access list can't distinguish the old device from the new one, which has the same name; the revocation list keeps the old
    one from coming back.

    Args:
        home: the coordinator's directory.
        device: whose sessions.
        public_key: its message key before it was replaced, in hex.
        federations: in which it may have sessions.

    Returns:
        False when the broker could not be reached: then there is no session to end, or it ends with the broker.
    """
    broker = home.config().broker
    with tempfile.TemporaryDirectory(prefix="evict-", dir=home.root) as folder:
        own = issue(home.pki, device, life=EVICTION_LIFE, target=Path(folder))
        tls = TlsFiles(credential_of(home.pki, CA_NAME).certificate, own.certificate, own.key)
        try:
            for federation in federations:
                config = MqttConfig(
                    broker.host,
                    broker.port,
                    device,
                    tls=tls,
                    protocol=broker.protocol,
                    connection=connection_name(federation, bytes.fromhex(public_key)),
                )
                probe(config, EVICTION_TIMEOUT_S)
        except TransportError as error:
            log.warning("the session of the device that %s replaces was not ended: %s", device, error)
            return False
    return True
