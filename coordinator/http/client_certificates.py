"""Who is on the other end of a TLS connection: which device its certificate names, and whether the register still knows it."""

from __future__ import annotations

from cryptography import x509
from fastapi import Request

from coordinator.rounds.records import DeviceRecord, DeviceState
from coordinator.storage.store import Store
from fedcg.wire.messages.enrolment_messages import common_name

PEER = "fedcg.peer"
"""Where a listener puts the DER form of the connection's certificate into the ASGI scope; None without one."""
HANG_UP = "fedcg.hang_up"
"""Where it puts what ends the connection at once."""


def peer_of(request: Request) -> x509.Certificate | None:
    """The certificate of the connection, verified by TLS; None when it showed none."""
    der = request.scope.get(PEER)
    return x509.load_der_x509_certificate(der) if isinstance(der, bytes) else None


def member_of(store: Store, peer: x509.Certificate) -> DeviceRecord | None:
    """The device that a certificate names; None when it is no member (any more) or the certificate was revoked."""
    name = common_name(peer)
    known = None if name is None else store.device(name)
    shown = store.register.certificate(f"{peer.serial_number:x}")
    if known is None or known.state is not DeviceState.ENROLLED or (shown and shown.revoked_at is not None):
        return None
    return known
