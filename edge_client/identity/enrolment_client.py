"""HTTPS to the coordinator's enrolment listener, with the standard library. Trusts one authority, never the system's."""

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
    """The certificate of the authority that is expected behind `url`, and the seconds by which this box's clock is ahead there.

    Only the request is sent, on a connection that verifies no certificate; the answer counts only when its public key is the
    expected one. An attacker who relays the true certificate gains nothing: the next connection is verified against it. The
    seconds are None where the answer has no `Date`.

    Raises:
        EnrolError: no answer, or an answer of another authority.
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
        raise EnrolError(f"{url} does not show an authority (status {status}): is this the enrolment URL?") from error
    if found != digest:
        raise NotAcceptedError(
            f"{url} belongs to another authority than the token's (key {found[:16]}..., expected {digest[:16]}...). The "
            "secret was not sent. Either the URL is wrong, or somebody is in between: ask the operator"
        )
    with suppress(ValueError):
        return authority, time.time() - parsedate_to_datetime(date or "").timestamp()
    return authority, None


def check_clock(ahead_s: float | None, advice: str) -> None:
    """Check that a certificate of the coordinator would be valid here, by the difference of the clocks.

    Raises:
        ClockError: it would not; with both times and the advice.
    """
    if ahead_s is not None and abs(ahead_s) > MOST_CLOCK_OFF_S:
        raise ClockError(f"{clock_difference(ahead_s)}. {advice}")


def trusting(authority: x509.Certificate) -> ssl.SSLContext:
    """A TLS 1.3 context that trusts this authority alone, checks names, and accepts the enrolment listener's certificate only."""
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
        raise EnrolError(f"{url}{path} answered {status} with something that is not of this protocol") from error


def _exchange(
    url: str, method: str, path: str, body: bytes | None, context: ssl.SSLContext
) -> tuple[int, bytes, str | None]:
    """Status, body and date of an answer."""
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
        cause = explain_dates(error) or f"{error.verify_message}. Check the URL; else somebody is in between"
        raise NotAcceptedError(
            f"{url} is not what the authority vouches for: {cause}. Nothing secret was sent"
        ) from error
    except TimeoutError as error:
        raise LateAnswerError(f"no answer from {url}: {_cause(error)}") from error
    except (OSError, http.client.HTTPException) as error:
        raise NotAcceptedError(f"no answer from {url}: {_cause(error)}") from error
    finally:
        connection.close()
    if len(data) > MAX_BODY_BYTES:
        raise EnrolError(f"{url}{path} answers with more than {MAX_BODY_BYTES} bytes")
    return status, data, date


def _cause(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there: does the coordinator run, with a port under [enrolment]?"
    if isinstance(error, ssl.SSLError) and "CERTIFICATE" in str(error).upper():
        return f"it does not accept this device's certificate (expired, revoked, or of another authority): {error}"
    if isinstance(error, ConnectionError | ssl.SSLEOFError):
        return "it ended the connection: perhaps this device's certificate is expired or revoked, or the coordinator is overloaded"
    if isinstance(error, TimeoutError):
        return "it took too long: check address, route and firewalls"
    return str(error) or type(error).__name__
