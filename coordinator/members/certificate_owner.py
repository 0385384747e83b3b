"""Which device a certificate names, and whether the register still lists it."""

from __future__ import annotations

from cryptography import x509

from coordinator.rounds.records import DeviceRecord, DeviceState
from coordinator.storage.store import Store
from fedcg.wire.messages.enrolment_messages import common_name


def member_of(store: Store, peer: x509.Certificate) -> DeviceRecord | None:
    """The device that a certificate names; None when it is no member (any more) or the certificate was revoked."""
    name = common_name(peer)
    known = None if name is None else store.device(name)
    shown = store.register.certificate(f"{peer.serial_number:x}")
    if known is None or known.state is not DeviceState.ENROLLED or (shown and shown.revoked_at is not None):
        return None
    return known
