"""Who is on the other end of a TLS connection: which device its certificate names, and whether the register still knows it."""

from __future__ import annotations

from cryptography import x509
from fastapi import Request

PEER = "fedcg.peer"
"""Where a listener puts the DER form of the connection's certificate into the ASGI scope; None without one."""
HANG_UP = "fedcg.hang_up"
"""Where it puts what ends the connection at once."""


def peer_of(request: Request) -> x509.Certificate | None:
    """The certificate of the connection, verified by TLS; None when it showed none."""
    der = request.scope.get(PEER)
    return x509.load_der_x509_certificate(der) if isinstance(der, bytes) else None
