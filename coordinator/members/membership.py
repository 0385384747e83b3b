"""The membership of devices: enrolment by token, renewal of certificates, revocation, and ending sessions at the broker.

Synchronous; independent of HTTP and its limits.

Every refusal has two texts: the response to the device, and the reason in the event log for the operator. A revoked device is refused even if the broker can't be reached, since the coordinator drops its message key.
"""

import hashlib
import logging
import tempfile
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.broker.access_lists import NOT_APPLIED, publish_access
from coordinator.config import CoordinatorConfig
from coordinator.errors import RefusedError
from coordinator.members.enrolment import certificate_record, is_secret_of, problem_with_new
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, broker_config, certify, credential_of, issue
from coordinator.pki.signing_keys import load_signing_identity
from coordinator.rounds.records import CertificateRecord, DeviceRecord, DeviceState, TokenRecord, TokenState
from coordinator.storage.locks import changing_members
from coordinator.storage.store import Store
from fedcg.event_log import EventLog
from fedcg.values import Value
from fedcg.wire.errors import TransportError
from fedcg.wire.messages.enrolment_messages import (
    EnrolAnswer,
    EnrolRequest,
    RenewAnswer,
    RenewRequest,
    answer_statement,
    common_name,
    enrolment_statement,
    key_digest,
    renewal_statement,
)
from fedcg.wire.messages.envelopes import VerifyKey
from fedcg.wire.transport.mqtt import probe
from fedcg.wire.transport.mqtt_config import connection_name

log = logging.getLogger(__name__)

REPEAT_S = 900.0
"""How long the same device with the same keys gets the same response again, in case its connection broke after the token was used."""
RENEWALS_AT_ONCE = 6
"""Most unexpired certificates of one device; more are refused until one expires or an operator revokes the device."""


class Admission(Value):
    """Grants or refuses enrolments and renewals.

    Attributes:
        home: the coordinator's directory.
        store: its database.
        config: its configuration.
        events: the event log.
        clock: unix time.
    """

    home: Home
    store: Store
    config: CoordinatorConfig
    events: EventLog
    clock: Callable[[], float] = time.time

    def authority(self) -> bytes:
        """The authority's public certificate as PEM."""
        return credential_of(self.home.pki, CA_NAME).certificate.read_bytes()

    def enrol(self, request: EnrolRequest) -> EnrolAnswer:
        """Enrol a device.

        Raises:
            RefusedError: with the response to the device.
        """
        with changing_members(self.home):
            now = self.clock()
            token = self.store.register.token(request.token)
            if token is None or not is_secret_of(token, bytes.fromhex(request.secret)):
                reason = "the token: unknown id" if token is None else f"token {token.id}: wrong secret"
                raise RefusedError("the token is not valid on this coordinator", reason)
            key = _requested_key(request.request, request.device)
            purpose = _purpose(request, key)
            earlier = self._earlier(token, purpose, now)
            if earlier is None:
                _check_token(token, request.device, now)
                _check_proof(request, key)
                earlier = self._admit(token, request, key, purpose, now)
            return self._answer(request, earlier, token.federation or self.store.federations()[0].id)

    def renew(self, peer: x509.Certificate | None, request: RenewRequest) -> RenewAnswer:
        """Issue a device's next certificate.

        Args:
            peer: the connection's client certificate, verified by TLS; None without one.
            request: the device's request.

        Raises:
            RefusedError: with the response to the device.
        """
        with changing_members(self.home):
            now = self.clock()
            device = self._identified(peer, request)
            key = _requested_key(request.request, request.device)
            if not _verifies(device, request.proof, renewal_statement(request.device, key_digest(key))):
                raise RefusedError("the request is not signed by the device's message key")
            alive = [
                record
                for record in self.store.register.certificates(request.device)
                if record.revoked_at is None and record.expires_at > now
            ]
            if len(alive) >= RENEWALS_AT_ONCE:
                raise RefusedError(f"the device already has {len(alive)} valid certificates; it renews too often")
            record = self._certify(request.device, key, now)
            self.store.register.add_certificate(record)
        self.events.write("certificate_renewed", client=request.device, serial=record.serial, until=record.expires_at)
        return RenewAnswer(certificate=record.pem)

    def _earlier(self, token: TokenRecord, purpose: str, now: float) -> CertificateRecord | None:
        is_repeated = token.used_for == purpose and token.used_at is not None and now < token.used_at + REPEAT_S
        if not is_repeated or token.serial is None:
            return None
        known = self.store.register.certificate(token.serial)
        return known if known is not None and known.revoked_at is None else None

    def _admit(
        self, token: TokenRecord, request: EnrolRequest, key: ec.EllipticCurvePublicKey, purpose: str, now: float
    ) -> CertificateRecord:
        device = request.device
        if not token.replaces and (problem := problem_with_new(self.store, device)):
            raise RefusedError(problem)
        record = self._certify(device, key, now)
        earlier = self.store.device(device)
        self.store.register.admit(token, purpose, request.signing_key, record, now)
        reloaded = publish_access(self.home)
        if not reloaded:
            log.warning("%s enrolled. %s", device, NOT_APPLIED)
        if earlier is not None:
            evict(self.home, device, earlier.public_key, [record.id for record in self.store.federations()])
        about = {"client": device, "token": token.id, "serial": record.serial}
        self.events.write("device_enrolled", **about, replaced=token.replaces, reloaded=reloaded)
        return record

    def _certify(self, device: str, key: ec.EllipticCurvePublicKey, now: float) -> CertificateRecord:
        life = timedelta(days=self.config.enrolment.certificate_days)
        return certificate_record(device, certify(self.home.pki, device, key, life), now)

    def _identified(self, peer: x509.Certificate | None, request: RenewRequest) -> str:
        """The message key of the device with the connection's certificate."""
        if peer is None:
            raise RefusedError("a renewal requires the device's current certificate for the connection")
        if common_name(peer) != request.device:
            raise RefusedError("the connection's certificate belongs to another device")
        known = member_of(self.store, peer)
        if known is None:
            raise RefusedError("the device is no longer enrolled; ask the operator for a new token")
        return known.public_key

    def _answer(self, request: EnrolRequest, certificate: CertificateRecord, federation: str) -> EnrolAnswer:
        key = load_signing_identity(self.home, self.store).key
        answer = EnrolAnswer(
            device=request.device,
            federation=federation,
            certificate=certificate.pem,
            authority=self.authority().decode(),
            coordinator_key=key.public.hex,
            broker_host=self.config.broker.host,
            broker_port=self.config.broker.port,
            broker_preset=self.config.broker.preset,
            carrier_url=self.config.url_of(self.config.carrier),
        )
        return answer.model_copy(update={"signature": key.sign(answer_statement(request, answer)).hex()})


def member_of(store: Store, peer: x509.Certificate) -> DeviceRecord | None:
    """The device of a certificate; None if it is not or no longer a member, or if the certificate was revoked."""
    name = common_name(peer)
    known = None if name is None else store.device(name)
    shown = store.register.certificate(f"{peer.serial_number:x}")
    if known is None or known.state is not DeviceState.ENROLLED or (shown and shown.revoked_at is not None):
        return None
    return known


def _check_token(token: TokenRecord, device: str, now: float) -> None:
    state = token.state(now)
    if state is not TokenState.OPEN:
        reason = {
            TokenState.USED: f"the token was already used by device {token.used_by!r}",
            TokenState.REVOKED: "the operator revoked the token",
            TokenState.EXPIRED: "the token has expired",
        }[state]
        raise RefusedError(f"{reason}; ask the operator for a new one", f"token {token.id}: {reason}")
    if token.device is not None and token.device != device:
        raise RefusedError(f"the token is for device {token.device!r} only", f"token {token.id} used for {device!r}")


def _check_proof(request: EnrolRequest, key: ec.EllipticCurvePublicKey) -> None:
    statement = enrolment_statement(request.token, request.device, key_digest(key), request.signing_key)
    if not _verifies(request.signing_key, request.proof, statement):
        raise RefusedError("the request is not signed by its message key")


def _verifies(key: str, signature: str, statement: bytes) -> bool:
    return VerifyKey.from_hex(key).verifies(bytes.fromhex(signature), statement)


def _requested_key(pem: str, device: str) -> ec.EllipticCurvePublicKey:
    """The key of a certificate request. Only its key and name are used, and the name must be the device's."""
    try:
        request = x509.load_pem_x509_csr(pem.encode())
        is_signed = request.is_signature_valid
    except ValueError as error:
        raise RefusedError("the certificate request can't be read") from error
    key = request.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RefusedError("the certificate request's key is not a P-256 key")
    if not is_signed or common_name(request) != device:
        raise RefusedError(f"the certificate request is not signed, or not for {device!r}")
    return key


def _purpose(request: EnrolRequest, key: ec.EllipticCurvePublicKey) -> str:
    """Digest of device and keys: the same if a device repeats its request, even with different bytes."""
    return hashlib.sha256(f"{request.device}\0{key_digest(key)}\0{request.signing_key}".encode()).hexdigest()


EVICTION_LIFE = timedelta(minutes=10)
EVICTION_TIMEOUT_S = 5.0


class Revoked(Value):
    """The result of a revocation.

    Attributes:
        was_member: False if the device had already been revoked or had left.
        certificates: number of its certificates on the revocation list.
        broker_reloaded: whether the broker has applied it; otherwise the coordinator publishes it later.
    """

    id: str
    state: DeviceState
    was_member: bool
    certificates: int
    broker_reloaded: bool


def revoke(home: Home, store: Store, device: str, reason: str, now: float) -> Revoked:
    """Revoke a device: it is refused everywhere from now on. Revoking it again repeats steps that failed."""
    with changing_members(home):
        was_member = store.register.end_membership(device, DeviceState.REVOKED, reason, now)
        reloaded = publish_access(home)
        revoked = [record for record in store.register.revoked_certificates(now) if record.device == device]
    return Revoked(device, DeviceState.REVOKED, was_member, len(revoked), reloaded)


def evict(home: Home, device: str, public_key: str, federations: Collection[str]) -> bool:
    """End a replaced device's sessions at the broker by connecting briefly under its name.

    An access list can't distinguish the old device from the new one, which has the same name. The revocation list stops the old one
    from reconnecting.

    Args:
        home: the coordinator's directory.
        device: id of the device.
        public_key: its message key before the replacement, in hex.
        federations: the federations in which it may have sessions.

    Returns:
        False if the broker could not be reached: then there is no session, or it ends with the broker.
    """
    with tempfile.TemporaryDirectory(prefix="evict-", dir=home.root) as folder:
        own = issue(home.pki, device, life=EVICTION_LIFE, target=Path(folder))
        try:
            for federation in federations:
                connection = connection_name(federation, bytes.fromhex(public_key))
                probe(broker_config(home, device, own, connection), EVICTION_TIMEOUT_S)
        except TransportError as error:
            log.warning("could not end the session of the device that %s replaces: %s", device, error)
            return False
    return True
