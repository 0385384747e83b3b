"""Which server a certificate of the coordinator's authority is for, and TLS clients that accept no other.

One authority certifies all of a coordinator's servers, so a valid certificate alone does not show which one answers: the
common name does. Without this the key of one server would do for every other.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from enum import Enum
from typing import Any

AUTHORITY_NAME = "FedCG Edge CA"
"""Common name of every authority that a coordinator makes for itself."""


class ServerRole(str, Enum):
    """A coordinator's servers; the value is the common name in the server's certificate."""

    BROKER = "broker"
    ENROLMENT = "enrolment"
    CARRIER = "carrier"


class ServerRoleError(ssl.SSLCertVerificationError):
    """A certificate that the authority made for another server."""

    def __init__(self, found: str | None, expected: ServerRole) -> None:
        super().__init__(f"it is of the server {found!r}, and {expected.value!r} is expected")
        self.verify_code = 0
        self.verify_message = self.args[0]


def expect_role(context: ssl.SSLContext, role: ServerRole) -> None:
    """Make every handshake of a client context fail unless the server shows the certificate of this role.

    A broker under another authority than a coordinator's own, such as a cloud service, is exempt: its operator names it.

    Args:
        context: must verify the server's certificate.
        role: of the server.
    """

    class RoleSocket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            try:
                super().do_handshake(block)
                _check_role(dict(self.getpeercert() or {}), role)
            except BaseException:
                self.close()  # paho would leave it open
                raise

    context.sslsocket_class = RoleSocket


def _check_role(certificate: dict[str, Any], role: ServerRole) -> None:
    found = _common_name(certificate.get("subject", ()))
    is_exempt = role is ServerRole.BROKER and _common_name(certificate.get("issuer", ())) != AUTHORITY_NAME
    if found != role.value and not is_exempt:
        raise ServerRoleError(found, role)


def _common_name(name: Iterable[Iterable[tuple[str, str]]]) -> str | None:
    return next((value for part in name for key, value in part if key == "commonName"), None)
