"""Messages for certificates whose dates contradict this machine's clock: TLS is the first to fail on a wrong clock."""

from __future__ import annotations

import ssl
from datetime import datetime, timezone

NOT_YET_VALID, HAS_EXPIRED = 9, 10  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL
SET_CLOCK = "set this machine's clock (timedatectl set-ntp true)"


def clock_time(now: datetime | None = None) -> str:
    """The time of this machine's clock, for messages to people."""
    return f"{now or datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"


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
