"""The lists of devices that a broker applies, as one message: who takes part, and which certificates are revoked.

Made by the coordinator, published retained, and applied by the program that runs the broker, which may be on another machine. Each
message holds everything, so the latest one is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.errors import BrokerError
from fedcg.wire.errors import problem_in
from fedcg.wire.messages.topics import Topics, lists_acl

MAX_BYTES = 1_900_000
"""Of one message: within the broker's largest packet. 1,000 devices with names of 63 letters and 1,000 revocations take 135 KB."""
Name = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9-]{0,62}$")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = 1


class Lists(_Message):
    """What the broker has to apply.

    Attributes:
        federations: ids.
        devices: ids of those that may connect and are not silenced.
        observers: identities that may read everything.
        revocations: PEM of the revocation list; its date orders messages.
        revoked: ids of devices that may still read that they are revoked, in a session from before.
    """

    federations: Annotated[tuple[Name, ...], Field(max_length=1000)]
    devices: Annotated[tuple[Name, ...], Field(max_length=25_000)]
    observers: Annotated[tuple[Name, ...], Field(max_length=100)]
    revocations: Annotated[str, Field(max_length=MAX_BYTES)]
    revoked: Annotated[tuple[Name, ...], Field(max_length=25_000)] = ()

    def access_list(self) -> str:
        """Mosquitto's access list."""
        return access_list(self.federations, self.devices, self.observers, self.revoked)


class Applied(_Message):
    """The answer to `Lists`.

    Attributes:
        lists: sha256 of the message.
        problem: why they were not applied; empty when they were.
    """

    lists: Digest
    problem: Annotated[str, Field(max_length=500)] = ""


def access_list(
    federations: Sequence[str], devices: Iterable[str], observers: Iterable[str], revoked: Iterable[str] = ()
) -> str:
    """Mosquitto's access list: one `user` section per identity, nothing for anybody else."""
    identities = sorted(devices), sorted(observers), sorted(revoked)
    return "\n".join([lists_acl(), *(Topics(federation).mosquitto_acl(*identities) for federation in federations)])


def parse_lists(payload: bytes, authority: bytes, applied: bytes) -> Lists:
    """Lists from the broker, checked.

    Args:
        payload: the message.
        authority: PEM of the certificate whose key must have signed the revocation list.
        applied: PEM of the revocation list that is in use.

    Raises:
        BrokerError: not such a message, of another authority, or older than what is in use.
    """
    if len(payload) > MAX_BYTES:
        raise BrokerError(f"the lists have {len(payload)} bytes; at most {MAX_BYTES} are taken")
    try:
        lists = Lists.model_validate_json(payload)
        lists.access_list()
        revocations = x509.load_pem_x509_crl(lists.revocations.encode())
    except ValidationError as error:
        raise BrokerError(f"not lists of devices: {problem_in(error)}") from error
    except ValueError as error:
        raise BrokerError(f"not lists of devices: {error}") from error
    key = x509.load_pem_x509_certificate(authority).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not revocations.is_signature_valid(key):
        raise BrokerError(
            "the revocation list is not signed by this broker's authority; run `fedcg deploy mosquitto` again"
        )
    if revocations.last_update_utc < x509.load_pem_x509_crl(applied).last_update_utc:
        raise BrokerError(
            "the lists are older than those in use. If this is in the log again and again, run `fedcg deploy mosquitto` again"
        )
    return lists
