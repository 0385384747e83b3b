"""Messages about a clock that is wrong: TLS is the first to fail on one, as certificates have dates."""

from __future__ import annotations

import ssl
import time
from datetime import datetime, timedelta, timezone

from fedcg.text_output import moment

NOT_YET_VALID, HAS_EXPIRED = 9, 10  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL
SET_CLOCK = "set this machine's clock (timedatectl set-ntp true)"
MOST_CLOCK_OFF_S = (
    3600.0  # certificates are valid from an hour before they are made (`coordinator.pki.authority.CLOCK_SLACK`)
)


def clock_time(now: datetime | None = None) -> str:
    """The time of this machine's clock, for messages to people."""
    return f"{now or datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"


def clock_difference(ahead_s: float) -> str:
    """How far this box's clock is ahead of the coordinator's, or behind it, with both times, for messages to people."""
    now, off = time.time(), timedelta(seconds=round(abs(ahead_s)))
    return (
        f"this box's clock is {off} {'ahead of' if ahead_s > 0 else 'behind'} the coordinator's: it shows {moment(now)}, the "
        f"coordinator's {moment(now - ahead_s)}"
    )


def explain_dates(error: ssl.SSLCertVerificationError) -> str | None:
    """Why a certificate was refused for its dates, and what to do; None where the dates are not the reason."""
    if error.verify_code == NOT_YET_VALID:
        return f"its certificate is not valid yet for this machine's clock, which shows {clock_time()}: {SET_CLOCK}"
    if error.verify_code == HAS_EXPIRED:
        return (
            f"its certificate has expired for this machine's clock, which shows {clock_time()}: {SET_CLOCK}, or have that "
            "certificate renewed if the clock is right"
        )
    return None
