"""Enrolment of a device: the token's text, the requests and answers over HTTPS, and the signed statements.

Both sides use this module. It imports neither the listener (coordinator) nor the device's side (edge_client).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
import json
import re
from typing import Annotated, Literal

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from fedcg.wire.errors import MalformedError, problem_in
from fedcg.wire.messages.schemas import Identifier, Nonce, Sha256, Signature

PresetName = Literal["mosquitto", "aws-iot", "azure-event-grid", "emqx"]
"""Brokers and services with known limits (`transfer.windows`)."""
TOKEN_PREFIX = "fcg2_"  # noqa: S105 - the mark of a token's text, not a secret
SECRET_BYTES = 32
CHECK_BYTES = 4
MAX_TOKEN_CHARS = 2048
MAX_BODY_BYTES = 16 * 1024
"""Bound on a request and on an answer; both hold at most two certificates."""
AUTHORITY_PATH = "/v1/authority"
ENROL_PATH = "/v1/enrol"
RENEW_PATH = "/v1/renew"
_ENROL_DOMAIN = "fedcg/1 enrolment"
_ANSWER_DOMAIN = "fedcg/1 enrolment answer"
_RENEW_DOMAIN = "fedcg/1 renewal"

TokenId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Pem = Annotated[str, Field(min_length=1, max_length=6000)]
PORT = "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
URL_PATTERN = rf"^https://(\[[0-9A-Fa-f:.]{{2,45}}\]|[A-Za-z0-9._-]{{1,253}})(:({PORT}))?/?$"
Url = Annotated[str, Field(pattern=URL_PATTERN)]
_LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS_NAME = re.compile(rf"(?=.{{1,253}}\Z)(?![0-9.]+\Z){_LABEL}(\.{_LABEL})*")


def _host(text: str) -> str:
    with contextlib.suppress(ValueError):
        if "%" not in text:  # a zone is only valid on one machine
            return str(ipaddress.ip_address(text))
    if _DNS_NAME.fullmatch(text) is None:
        raise ValueError("must be a DNS name or an IP address, without scheme and port")
    return text


Host = Annotated[str, AfterValidator(_host)]
"""A DNS name, or an IP address in its shortest form."""


class _Strict(BaseModel, frozen=True, extra="forbid", strict=True):
    """Base of models without unknown fields and without type conversion."""


class Token(_Strict, populate_by_name=True, ser_json_bytes="hex", val_json_bytes="hex"):
    """A one-time permission to enrol.

    Attributes:
        id: the token's name in lists; not secret.
        secret: 32 random bytes; the coordinator keeps only their hash.
        authority: sha256 of the public key of the only trusted authority, in hex.
        coordinator: `message_key_digest` of the only coordinator that the device may join.
        url: where to enrol, if the operator included it.
        device: the only id that the token enrols, if it is bound to one.
    """

    id: TokenId
    secret: Annotated[bytes, Field(min_length=SECRET_BYTES, max_length=SECRET_BYTES, repr=False)]
    authority: Sha256 = Field(alias="ca")
    coordinator: Sha256 = Field(alias="key")
    url: Url | None = None
    device: Identifier | None = None

    @property
    def text(self) -> str:
        """The token's text for the operator to hand over: one word, with a checksum against typing errors and truncation."""
        body = self.model_dump_json(by_alias=True, exclude_none=True).encode()
        return TOKEN_PREFIX + base64.urlsafe_b64encode(_check_sum(body) + body).decode().rstrip("=")

    @staticmethod
    def parse(text: str) -> Token:
        """Read a token's text.

        Raises:
            MalformedError: it is not a token, or was truncated or mistyped. The message never contains any of it.
        """
        text = text.strip()
        if not text.startswith(TOKEN_PREFIX) or len(text) > MAX_TOKEN_CHARS:
            raise MalformedError(f"this is not an enrolment token: tokens start with {TOKEN_PREFIX}")
        encoded = text[len(TOKEN_PREFIX) :]
        raw = b""
        with contextlib.suppress(ValueError):
            raw = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        check, body = raw[:CHECK_BYTES], raw[CHECK_BYTES:]
        if check != _check_sum(body):
            raise MalformedError(
                "the enrolment token is cut off or mistyped: copy the whole word that `fedcg token create` printed"
            )
        try:
            return Token.model_validate_json(body)
        except ValidationError as error:
            field = problem_in(error).partition(":")[0]
            raise MalformedError(f"the enrolment token can't be used: {field} is wrong; ask for another") from None


class EnrolRequest(_Strict):
    """A machine's request to become a device.

    Attributes:
        token: id of the token.
        secret: its secret, in hex.
        device: the requested id.
        request: PKCS #10 request for the TLS certificate, PEM, signed by the new P-256 key, CN = `device`.
        signing_key: public half of the new Ed25519 key, in hex.
        proof: its signature over `enrolment_statement`.
        nonce: random, used only for this request.
    """

    token: TokenId
    secret: Sha256 = Field(repr=False)
    device: Identifier
    request: Pem
    signing_key: Sha256
    proof: Signature
    nonce: Nonce


class EnrolAnswer(_Strict):
    """The certificate and settings of a new device; `signature` is by the coordinator's message key, over `answer_statement`."""

    device: Identifier
    federation: Identifier
    certificate: Pem
    authority: Pem
    coordinator_key: Sha256
    broker_host: Host
    broker_port: Annotated[int, Field(ge=1, le=65535)]
    broker_preset: PresetName
    carrier_url: Url | None = None
    signature: Signature | None = None


class RenewRequest(_Strict):
    """A device's request for its next certificate, over mutual TLS with its current one; its message key signs the proof."""

    device: Identifier
    request: Pem
    proof: Signature


class RenewAnswer(_Strict):
    """The next certificate."""

    certificate: Pem


class Refusal(_Strict):
    """Why a request was refused, for the person at the device."""

    error: Annotated[str, Field(max_length=600)]


def enrolment_statement(token: str, device: str, tls_key: str, signing_key: str) -> bytes:
    """The statement that the new message key signs, so that a device can only register its own key.

    Args:
        token: id of the token.
        device: the requested id.
        tls_key: `key_digest` of the P-256 key in the request.
        signing_key: the Ed25519 key itself, in hex.
    """
    return f"{_ENROL_DOMAIN}\0{token}\0{device}\0{tls_key}\0{signing_key}".encode()


def answer_statement(request: EnrolRequest, answer: EnrolAnswer) -> bytes:
    """The statement that the coordinator signs: its whole answer and the request, so that an answer is valid for one request only."""
    values = [request.model_dump(mode="json"), answer.model_dump(mode="json", exclude={"signature"})]
    return f"{_ANSWER_DOMAIN}\0{json.dumps(values, sort_keys=True)}".encode()


def message_key_digest(key: str) -> str:
    """The sha256 of a message key, both in hex; a token contains the digest of its coordinator's key."""
    return hashlib.sha256(bytes.fromhex(key)).hexdigest()


def renewal_statement(device: str, tls_key: str) -> bytes:
    """The statement that the message key signs for the next TLS key: a stolen TLS key alone can't renew a certificate."""
    return f"{_RENEW_DOMAIN}\0{device}\0{tls_key}".encode()


def key_digest(key: ec.EllipticCurvePublicKey) -> str:
    """The sha256 of a public key's DER form, in hex."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def certificate_key_digest(certificate: x509.Certificate) -> str:
    """`key_digest` of a certificate's key.

    Raises:
        MalformedError: not an elliptic-curve key, the only kind that this program creates.
    """
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise MalformedError("the certificate's key is not an elliptic-curve key")
    return key_digest(key)


def load_certificate(pem: str | bytes) -> x509.Certificate:
    """A certificate in PEM form.

    Raises:
        MalformedError: it is not a certificate in PEM form.
    """
    try:
        return x509.load_pem_x509_certificate(pem.encode() if isinstance(pem, str) else pem)
    except ValueError as error:
        raise MalformedError("this is not a certificate in PEM form") from error


def common_name(certificate: x509.Certificate | x509.CertificateSigningRequest) -> str | None:
    """The common name of a certificate or request; None unless it has exactly one."""
    names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(names[0].value) if len(names) == 1 else None


def _check_sum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:CHECK_BYTES]
