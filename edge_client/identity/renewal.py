"""Renews a device's certificate: with the current one on the connection, the message key's signature, and a new key each time."""

from __future__ import annotations

import fcntl
import random
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from edge_client.config import AgentConfig, TlsSection
from edge_client.errors import ClockError, EnrolError
from edge_client.identity.credentials import (
    RENEW_AT,
    TlsKey,
    check_issued,
    is_due,
    life_of,
    read_certificate,
    replace_pair,
    settle_pair,
)
from edge_client.identity.enrolment_client import ask, check_clock, fetch_authority, trusting
from fedcg.event_log import EventLog
from fedcg.wire.messages.enrolment_messages import (
    RENEW_PATH,
    RenewAnswer,
    RenewRequest,
    certificate_key_digest,
    renewal_statement,
)
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.tls import SET_CLOCK
from fedcg.worker_process import repeating

LOOK_AGAIN = timedelta(hours=6)
"""Longest time between two checks: a device's clock may jump."""
TRY_AGAIN = timedelta(hours=1)
TRIES_PER_LIFE = 50


def renew(config: AgentConfig, signing: SigningKey, clock: Callable[[], datetime] | None = None) -> x509.Certificate:
    """Get the next certificate, with a new key, and put both in place of the current pair.

    Args:
        config: of the device.
        signing: its message key.
        clock: do it only if the certificate is due by it: the agent of another federation may have renewed it a moment ago.

    Returns:
        The certificate that is in place now.

    Raises:
        EnrolError: its message names the next step; the current pair stays. A `ClockError` where the clocks differ too much.
        OSError: there is no place for a new pair.
    """
    if config.tls is None or config.enrolment.url is None:
        raise EnrolError(
            f"agent.toml of {config.device} names no `url` under [enrolment]: ask the operator for a new bundle instead"
        )
    with _alone(config.tls):
        settle_pair(config.tls.cert, config.tls.key)
        if clock is not None and not is_due(current := read_certificate(config.tls.cert), clock()):
            return current
        authority, url = read_certificate(config.tls.ca), config.enrolment.url.rstrip("/")
        _, ahead_s = fetch_authority(url, certificate_key_digest(authority))
        check_clock(ahead_s, f"{SET_CLOCK.capitalize()}; the agent then renews by itself when it is time")
        context = trusting(authority)
        try:
            context.load_cert_chain(config.tls.cert, config.tls.key)
        except (OSError, ssl.SSLError) as error:
            raise EnrolError(f"{config.tls.cert} and {config.tls.key} can't be used: {error}") from error
        key = TlsKey.generate()
        request = RenewRequest(
            device=config.device,
            request=key.request(config.device),
            proof=signing.sign(renewal_statement(config.device, key.digest)).hex(),
        )
        answer = ask(url, RENEW_PATH, request, RenewAnswer, context)
        certificate = check_issued(answer.certificate, authority, config.device, key)
        replace_pair(config.tls.cert, config.tls.key, certificate.public_bytes(Encoding.PEM), key.pem())
    return certificate


def settle(tls: TlsSection) -> None:
    """Finish, or undo, a replacement of certificate and key that was interrupted; one that is under way is waited for."""
    if any(tls.cert.parent.glob("*.next")):
        with _alone(tls):
            settle_pair(tls.cert, tls.key)


class Renewer:
    """Renews in time, beside a running agent, on a thread of its own.

    Args:
        config: of the device.
        signing: its message key.
        events: the event log.
        renewed: called after every renewal, also one by the agent of another federation; must only enqueue.
        clock: the current time, aware.
    """

    def __init__(
        self,
        config: AgentConfig,
        signing: SigningKey,
        events: EventLog,
        renewed: Callable[[], None],
        clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._config = config
        self._signing = signing
        self._events = events
        self._renewed = renewed
        self._clock = clock
        self._serial: int | None = None
        self._is_clock_named = False

    def running(self) -> AbstractContextManager[None]:
        """Renew for as long as the context lasts; does nothing for a device without a URL to renew at."""
        tls = self._config.tls
        if tls is None or self._config.enrolment.url is None:
            return nullcontext()
        return repeating("renewal", lambda: self._next(tls))

    def _next(self, tls: TlsSection) -> float:
        """Look once; the seconds until the next time."""
        try:
            pause_s = self._look(tls).total_seconds()
            self._is_clock_named = False
        except (EnrolError, OSError) as error:
            pause_s = self._failed(tls, error).total_seconds()
        return pause_s * (
            0.9 + 0.2 * random.random()
        )  # devices that were enrolled together don't renew together for ever

    def _look(self, tls: TlsSection) -> timedelta:
        """Renew when it is due; returns how long to wait before the next check."""
        certificate = read_certificate(tls.cert)
        if self._serial is None:
            self._serial = certificate.serial_number
        if is_due(certificate, self._clock()):
            certificate = renew(self._config, self._signing, self._clock)
        if certificate.serial_number != self._serial:
            self._serial = certificate.serial_number
            self._events.write("certificate_renewed", until=certificate.not_valid_after_utc.timestamp())
            self._renewed()
        due_at = certificate.not_valid_after_utc - life_of(certificate) * RENEW_AT
        return max(timedelta(seconds=1), min(LOOK_AGAIN, due_at - self._clock()))

    def _failed(self, tls: TlsSection, error: Exception) -> timedelta:
        was_named, self._is_clock_named = self._is_clock_named, isinstance(error, ClockError)
        if not (was_named and self._is_clock_named):
            self._events.write("renewal_failed", detail=str(error))
        try:
            return min(TRY_AGAIN, life_of(read_certificate(tls.cert)) / TRIES_PER_LIFE)
        except (EnrolError, OSError):
            return TRY_AGAIN


@contextmanager
def _alone(tls: TlsSection) -> Iterator[None]:
    """Hold the lock that keeps a renewal by hand and the agent's own apart."""
    with tls.cert.with_name(".renewal.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
