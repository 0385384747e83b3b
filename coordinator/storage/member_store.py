"""Queries about access: enrolment tokens, certificates and memberships of devices; operators' API tokens, with the idempotency keys of requests.

Part of the store: same database, same rules (one transaction per method, durable when it returns).
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

from sqlalchemy import Update, delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from coordinator.errors import EnrolmentError
from coordinator.rounds.records import ApiTokenRecord, CertificateRecord, DeviceState, TokenRecord
from coordinator.storage import schema


class MemberStore(schema.Queries):
    """Tokens, certificates and memberships in the coordinator's database."""

    # Tokens

    def add_tokens(self, tokens: Sequence[TokenRecord]) -> None:
        """Store new tokens."""
        self._write(*(insert(schema.tokens).values(**asdict(token)) for token in tokens))

    def tokens(self) -> list[TokenRecord]:
        """All tokens, oldest first."""
        query = select(schema.tokens).order_by(schema.tokens.c.created_at, schema.tokens.c.id)
        return self._all(TokenRecord, query)

    def token(self, token: str) -> TokenRecord | None:
        """One token."""
        return self._one(TokenRecord, select(schema.tokens).filter_by(id=token))

    def revoke_token(self, token: str, now: float) -> None:
        """Revoke an unused token."""
        self._write(update(schema.tokens).filter_by(id=token, used_at=None).values(revoked_at=now))

    # Labels

    def labels(self, device: str | None = None) -> Mapping[str, list[str]]:
        """The sorted labels of each device, or of one; empty for devices without labels."""
        query, found = select(schema.labels).order_by(schema.labels.c.label), defaultdict(list)
        for row in self._rows(query if device is None else query.filter_by(device=device)):
            found[row.device].append(row.label)
        return found

    def describe(self, device: str, labels: Collection[str], texts: Mapping[str, str]) -> None:
        """Replace a device's labels, and those of its texts `site` and `note` that are given."""
        table = schema.labels
        added = [insert(table).values(device=device, label=label) for label in labels]
        changed = [update(schema.devices).filter_by(id=device).values(**texts)] if texts else []
        self._write(delete(table).filter_by(device=device), *added, *changed)

    # Certificates

    def certificate(self, serial: str) -> CertificateRecord | None:
        """One certificate."""
        return self._one(CertificateRecord, select(schema.certificates).filter_by(serial=serial))

    def certificates(self, device: str | None = None) -> list[CertificateRecord]:
        """All certificates, or those of one device; oldest first."""
        query = select(schema.certificates).order_by(schema.certificates.c.issued_at, schema.certificates.c.serial)
        if device is not None:
            query = query.filter_by(device=device)
        return self._all(CertificateRecord, query)

    def add_certificate(self, certificate: CertificateRecord) -> None:
        """Store a certificate before it is issued."""
        self._write(insert(schema.certificates).values(**asdict(certificate)))

    def revoked_certificates(self, now: float) -> list[CertificateRecord]:
        """The revoked certificates that have not expired, for the revocation list."""
        table = schema.certificates
        query = select(table).where(table.c.revoked_at.is_not(None), table.c.expires_at > now)
        return self._all(CertificateRecord, query.order_by(table.c.revoked_at, table.c.serial))

    def revoked_devices(self, now: float) -> dict[str, str]:
        """The public keys of revoked devices with an unexpired certificate."""
        devices, certificates = schema.devices, schema.certificates
        is_current = certificates.c.expires_at > now
        query = select(devices.c.id, devices.c.public_key).join(certificates, certificates.c.device == devices.c.id)
        query = query.where(devices.c.state == DeviceState.REVOKED.value, is_current).distinct().order_by(devices.c.id)
        return dict(map(tuple, self._rows(query)))

    # Memberships

    def admit(
        self, token: TokenRecord, used_for: str, public_key: str, certificate: CertificateRecord, now: float
    ) -> None:
        """Use a token and enrol its device. A replaced device loses its keys and certificates in the same transaction.

        Args:
            token: the valid token that was presented.
            used_for: digest of the device's request.
            public_key: its message key, in hex.
            certificate: its first certificate.
            now: unix time.

        Raises:
            EnrolmentError: the token was used or revoked in the meantime, or the id is in use; nothing was changed.
        """
        device, serial = certificate.device, certificate.serial
        tokens, devices = schema.tokens, schema.devices
        fresh = {"last_seen_at": None, "agent": None, "state": DeviceState.ENROLLED.value, "ended_at": None}
        fresh |= {"site": token.site} if token.site else {}
        values = {"public_key": public_key, "enrolled_at": now, "ended_because": "", **fresh}
        with self._counted() as connection:
            open_token = update(tokens).filter_by(id=token.id, used_at=None, revoked_at=None)
            used = open_token.values(used_at=now, used_by=device, used_for=used_for, serial=serial)
            if connection.execute(used).rowcount != 1:
                raise EnrolmentError("the token was already used")
            known = connection.execute(select(devices.c.id).filter_by(id=device)).first()
            if known is None:
                connection.execute(insert(devices).values(id=device, **values))
            elif token.replaces:
                connection.execute(_revocation(device, now))
                connection.execute(update(devices).filter_by(id=device).values(**values))
            else:
                raise EnrolmentError(f"device {device!r} already exists")
            connection.execute(insert(schema.certificates).values(**asdict(certificate)))
            had = {row.label for row in connection.execute(select(schema.labels).filter_by(device=device))}
            for label in {*token.labels.split()} - had:
                connection.execute(insert(schema.labels).values(device=device, label=label))

    def end_membership(self, device: str, state: DeviceState, reason: str, now: float) -> bool:
        """Revoke a device with all its certificates, or record that it left; False if it was no longer a member."""
        member = update(schema.devices).filter_by(id=device, state=DeviceState.ENROLLED.value)
        ended = member.values(state=state.value, ended_at=now, ended_because=reason[:300])
        with self._counted() as connection:
            changed = connection.execute(ended).rowcount == 1
            connection.execute(_revocation(device, now))
        return changed


def _revocation(device: str, now: float) -> Update:
    """Revokes a device's remaining certificates."""
    return update(schema.certificates).filter_by(device=device, revoked_at=None).values(revoked_at=now)


USED_EVERY_S = 60.0
"""Least seconds between updates of a token's last use."""
KEEP_KEYS_S = 86_400.0


class ApiStore(schema.Queries):
    """API tokens, and the idempotency keys of requests, in the coordinator's database."""

    def add_token(self, token: ApiTokenRecord) -> None:
        """Store a new token."""
        self._write(insert(schema.api_tokens).values(**asdict(token)))

    def tokens(self) -> list[ApiTokenRecord]:
        """All tokens, oldest first."""
        table = schema.api_tokens
        return self._all(ApiTokenRecord, select(table).order_by(table.c.created_at, table.c.id))

    def token(self, token: str) -> ApiTokenRecord | None:
        """One token."""
        return self._one(ApiTokenRecord, select(schema.api_tokens).filter_by(id=token))

    def revoke_token(self, token: str, now: float) -> None:
        """Revoke a token; if already revoked, its time does not change."""
        self._write(update(schema.api_tokens).filter_by(id=token, revoked_at=None).values(revoked_at=now))

    def used_token(self, token: ApiTokenRecord, now: float) -> None:
        """Store a token's use, unless one was stored less than a minute ago."""
        if token.last_used_at is not None and now - token.last_used_at < USED_EVERY_S:
            return
        table, before = schema.api_tokens, now - USED_EVERY_S
        is_due = or_(table.c.last_used_at.is_(None), table.c.last_used_at <= before)
        self._write(update(table).where(table.c.id == token.id, is_due).values(last_used_at=now))

    def use_key(self, token: str, key: str, now: float) -> bool:
        """Record the idempotency key of a token's request; False if a request of the last day used it.

        Args:
            token: id of the token; keys of different tokens are independent.
            key: key in the request.
            now: unix time.
        """
        table = schema.used_keys
        try:
            with self._engine.begin() as connection:
                connection.execute(delete(table).where(table.c.used_at < now - KEEP_KEYS_S))
                connection.execute(insert(table).values(token=token, key=key, used_at=now))
        except IntegrityError:
            return False
        return True

    def free_key(self, token: str, key: str) -> None:
        """Allow a key again, since its request changed nothing."""
        self._write(delete(schema.used_keys).filter_by(token=token, key=key))
