"""Checks and explanations of TLS clients beyond the certificate chain: the server's role, and wrong clocks behind refused dates.

One authority certifies all of a coordinator's servers, so a valid certificate alone does not show which server answers.
"""

import ssl
import time
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any

from fedcg.text_output import moment

AUTHORITY_NAME = "FedCG Edge CA"
"""Common name of every authority that a coordinator creates for itself."""


class ServerRole(str, Enum):
    """A coordinator's servers; the value is the common name in the server's certificate."""

    BROKER = "broker"
    ENROLMENT = "enrolment"
    CARRIER = "carrier"


class ServerRoleError(ssl.SSLCertVerificationError):
    """A certificate that the authority issued for another server."""

    def __init__(self, found: str | None, expected: ServerRole) -> None:
        super().__init__(f"it is for the server {found!r}, but {expected.value!r} is expected")
        self.verify_code = 0
        self.verify_message = self.args[0]


def expect_role(context: ssl.SSLContext, role: ServerRole) -> None:
    """Make every handshake of a client context fail unless the server's certificate has this role.

    A broker whose authority is not a coordinator's own, such as a cloud service, is exempt: the operator chooses it.

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


NOT_YET_VALID, HAS_EXPIRED = 9, 10  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL
SET_CLOCK = "set this machine's clock (timedatectl set-ntp true)"
# certificates are valid from an hour before they are issued (`coordinator.pki.authority.CLOCK_SLACK`)
MOST_CLOCK_OFF_S = 3600.0


def clock_time(now: datetime | None = None) -> str:
    """The time of this machine's clock, for messages to people."""
    return f"{now or datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"


def clock_difference(ahead_s: float) -> str:
    """How far this device's clock is ahead of or behind the coordinator's, with both times, for messages to people."""
    now, off = time.time(), timedelta(seconds=round(abs(ahead_s)))
    return (
        f"this device's clock is {off} {'ahead of' if ahead_s > 0 else 'behind'} the coordinator's: it shows {moment(now)}, the "
        f"coordinator's {moment(now - ahead_s)}"
    )


def explain_dates(error: ssl.SSLCertVerificationError) -> str | None:
    """Why a certificate was refused for its dates, and what to do; None if the dates are not the reason."""
    if error.verify_code == NOT_YET_VALID:
        return f"its certificate is not valid yet for this machine's clock, which shows {clock_time()}: {SET_CLOCK}"
    if error.verify_code == HAS_EXPIRED:
        return (
            f"its certificate has expired for this machine's clock, which shows {clock_time()}: {SET_CLOCK}, or renew that "
            "certificate if the clock is right"
        )
    return None
