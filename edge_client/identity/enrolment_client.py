"""HTTPS client for the coordinator's enrolment listener, with the standard library. Trusts one authority, never the system's."""

import http.client
import ssl
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from pydantic import BaseModel, ValidationError

from edge_client.errors import ClockError, EnrolError, LateAnswerError, NotAcceptedError
from fedcg.wire.errors import MalformedError
from fedcg.wire.messages.enrolment_messages import (
    AUTHORITY_PATH,
    MAX_BODY_BYTES,
    Refusal,
    certificate_key_digest,
    load_certificate,
)
from fedcg.wire.tls import MOST_CLOCK_OFF_S, ServerRole, clock_difference, expect_role, explain_dates

TIMEOUT_S = 20.0
AnswerT = TypeVar("AnswerT", bound=BaseModel)


def fetch_authority(url: str, digest: str) -> tuple[x509.Certificate, float | None]:
    """Fetch the expected authority's certificate from `url`, and how many seconds this machine's clock is ahead of the server's.

    Only the request is sent, on an unverified connection. The answer is accepted only if its public key is the expected one. An attacker who
    relays the true certificate gains nothing, because the next connection is verified against it. The seconds are None if the answer has no
    `Date`.

    Raises:
        EnrolError: no answer, or an answer from another authority.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    status, body, date = _exchange(url, "GET", AUTHORITY_PATH, None, context)
    try:
        authority = load_certificate(body)
        found = certificate_key_digest(authority)
    except MalformedError as error:
        raise EnrolError(f"{url} returned no authority (status {status}): is this the enrolment URL?") from error
    if found != digest:
        raise NotAcceptedError(
            f"{url} uses another authority than expected (key {found[:16]}..., expected {digest[:16]}...). The "
            "secret was not sent. Either the URL is wrong, or the connection is intercepted: ask the operator"
        )
    with suppress(ValueError):
        return authority, time.time() - parsedate_to_datetime(date or "").timestamp()
    return authority, None


def check_clock(ahead_s: float | None, advice: str) -> None:
    """Check that the clocks are close enough for a new certificate to be valid here.

    Raises:
        ClockError: they are not; with both times and the advice.
    """
    if ahead_s is not None and abs(ahead_s) > MOST_CLOCK_OFF_S:
        raise ClockError(f"{clock_difference(ahead_s)}. {advice}")


def trusting(authority: x509.Certificate) -> ssl.SSLContext:
    """A TLS 1.3 context that trusts only this authority, checks names, and accepts only the enrolment listener's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority.public_bytes(Encoding.PEM).decode())
    expect_role(context, ServerRole.ENROLMENT)
    return context


def ask(url: str, path: str, request: BaseModel, answer: type[AnswerT], context: ssl.SSLContext) -> AnswerT:
    """Send a request and read its answer.

    Raises:
        EnrolError: no answer, the connection is not trusted, the request was refused, or the answer is malformed.
    """
    status, body, _ = _exchange(url, "POST", path, request.model_dump_json().encode(), context)
    try:
        if status != http.client.OK:
            raise NotAcceptedError(f"the coordinator refused: {Refusal.model_validate_json(body).error}")
        return answer.model_validate_json(body)
    except ValidationError as error:
        raise EnrolError(f"{url}{path} answered {status} with an invalid response for this protocol") from error


def _exchange(
    url: str, method: str, path: str, body: bytes | None, context: ssl.SSLContext
) -> tuple[int, bytes, str | None]:
    """Send a request. Returns status, body and date of the answer."""
    place = urlsplit(url)
    if place.scheme != "https" or place.hostname is None or place.path not in ("", "/") or place.query:
        raise EnrolError(f"--url {url}: write https://HOST:PORT")
    try:
        connection = http.client.HTTPSConnection(place.hostname, place.port, timeout=TIMEOUT_S, context=context)
    except (ValueError, http.client.InvalidURL) as error:
        raise EnrolError(f"--url {url}: {error}") from error
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", "Connection": "close"})
        response = connection.getresponse()
        status, data, date = response.status, response.read(MAX_BODY_BYTES + 1), response.getheader("Date")
    except ssl.SSLCertVerificationError as error:
        cause = explain_dates(error) or f"{error.verify_message}. Check the URL, or the connection may be intercepted"
        raise NotAcceptedError(f"the certificate of {url} is not valid: {cause}. Nothing secret was sent") from error
    except TimeoutError as error:
        raise LateAnswerError(f"no answer from {url}: {_cause(error)}") from error
    except (OSError, http.client.HTTPException) as error:
        raise NotAcceptedError(f"no answer from {url}: {_cause(error)}") from error
    finally:
        connection.close()
    if len(data) > MAX_BODY_BYTES:
        raise EnrolError(f"{url}{path} answered with more than {MAX_BODY_BYTES} bytes")
    return status, data, date


def _cause(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: is the coordinator running, with a port under [enrolment]?"
    if isinstance(error, ssl.SSLError) and "CERTIFICATE" in str(error).upper():
        return f"it does not accept this device's certificate (expired, revoked, or from another authority): {error}"
    if isinstance(error, ConnectionError | ssl.SSLEOFError):
        return "it closed the connection: this device's certificate may be expired or revoked, or the coordinator overloaded"
    if isinstance(error, TimeoutError):
        return "it took too long: check address, route and firewalls"
    return str(error) or type(error).__name__
