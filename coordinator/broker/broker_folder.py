"""The folder from which `fedcg broker run` starts Mosquitto on any machine, and the message with the lists of devices.

It contains the authority's certificate without its key, the broker's certificate and key, those of the program that updates the
lists, the latest lists, and the address. The folder can be moved: Mosquitto's configuration has absolute paths, but is written at each
start. The coordinator publishes the lists retained. Each message contains all lists, so the latest one is enough.
Doesn't use the database: its packages are not installed on a broker's machine.
"""

import os
import stat
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Literal

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, Field, ValidationError

from coordinator.config import LOOPBACK_HOSTS, Port
from coordinator.errors import BrokerError
from coordinator.paths import BROKER_NAME, CRL_NAME, Home
from coordinator.pki.authority import CA_NAME, credential_of, issue, server_credential
from fedcg.errors import NOT_FOUND
from fedcg.files import READABLE, replace_durably
from fedcg.wire.errors import problem_in
from fedcg.wire.messages.topics import LISTS_READER, Topics, lists_acl
from fedcg.wire.tls import SET_CLOCK, clock_time

MAX_BYTES = 1_900_000
"""Largest message, within the broker's packet limit. 1,000 devices with names of 63 letters and 1,000 revocations take 135 KB."""
Name = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9-]{0,62}$")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Message(BaseModel, frozen=True, extra="forbid", strict=True):
    version: Literal[1] = 1


class Lists(_Message):
    """The lists that the broker must apply.

    Attributes:
        federations: ids of all federations.
        devices: ids of devices that may connect and are not silenced.
        observers: identities that may read everything.
        revocations: PEM of the revocation list; its date determines the order of messages.
        revoked: ids of revoked devices; in a session opened before, they may still read that they are revoked.
    """

    federations: Annotated[tuple[Name, ...], Field(max_length=1000)]
    devices: Annotated[tuple[Name, ...], Field(max_length=25_000)]
    observers: Annotated[tuple[Name, ...], Field(max_length=100)]
    revocations: Annotated[str, Field(max_length=MAX_BYTES)]
    revoked: Annotated[tuple[Name, ...], Field(max_length=25_000)] = ()

    def access_list(self) -> str:
        """Mosquitto's access list: one `user` section per identity; all others have no access."""
        identities = sorted(self.devices), sorted(self.observers), sorted(self.revoked)
        return "\n".join([lists_acl(), *(Topics(each).mosquitto_acl(*identities) for each in self.federations)])


class Applied(_Message):
    """The response to `Lists`.

    Attributes:
        lists: sha256 of the message.
        problem: why they were not applied; empty if they were.
    """

    lists: Digest
    problem: Annotated[str, Field(max_length=500)] = ""


class OlderListsError(BrokerError):
    """The lists are older than those in use."""


def parse_lists(payload: bytes, authority: bytes, applied: bytes) -> Lists:
    """Parse and check lists from the broker.

    Args:
        payload: the message.
        authority: PEM of the certificate whose key must have signed the revocation list.
        applied: PEM of the revocation list that is in use.

    Raises:
        BrokerError: not such a message, or from another authority.
        OlderListsError: older than the lists in use.
    """
    if len(payload) > MAX_BYTES:
        raise BrokerError(f"the lists have {len(payload)} bytes; the limit is {MAX_BYTES}")
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
        raise OlderListsError(
            "the lists are older than those in use. If this error repeats, run `fedcg deploy mosquitto` again"
        )
    return lists


ACL_NAME = "acl"
ADDRESS_NAME = "broker.json"
DATA_NAME = "data"
CONFIG_NAME = "mosquitto.conf"


class Address(BaseModel, frozen=True, extra="forbid", strict=True):
    """The broker's address for devices and the coordinator; `broker.json`."""

    version: int = 1
    host: str
    port: Port


def write_folder(home: Home, folder: Path, lists: Lists) -> None:
    """Write a broker's folder, or update it; its `data` stays.

    Raises:
        BrokerError: the folder can't be written.
    """
    broker = home.config().broker
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
        server = server_credential(home.pki, BROKER_NAME, broker.host)
        for source in (credential_of(home.pki, CA_NAME).certificate, server.certificate, server.key):
            replace_durably(folder / source.name, source.read_bytes())
        issue(home.pki, LISTS_READER, target=folder)
        write_lists(folder, lists)
        replace_durably(folder / ADDRESS_NAME, Address(host=broker.host, port=broker.port).model_dump_json(), READABLE)
    except OSError as error:
        raise BrokerError(f"can't write a broker's folder to {folder}: {error}") from error


def write_lists(folder: Path, lists: Lists) -> None:
    """Replace the lists, in this order, so that a revoked device can't reconnect."""
    replace_durably(folder / CRL_NAME, lists.revocations)
    replace_durably(folder / ACL_NAME, lists.access_list())


def read_address(folder: Path) -> Address:
    """The address of a folder's broker.

    Raises:
        BrokerError: there is no such folder (code 7), or it has another version.
    """
    path = folder / ADDRESS_NAME
    try:
        address = Address.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise BrokerError(
            f"{folder} is neither a coordinator's directory nor a broker's folder; `fedcg deploy mosquitto` writes one",
            exit_code=NOT_FOUND,
        ) from error
    except (OSError, ValidationError) as error:
        raise BrokerError(f"{path} is damaged or can't be read; run `fedcg deploy mosquitto` again") from error
    if address.version != 1:
        raise BrokerError(f"{path} has version {address.version}, but this program reads version 1: upgrade it")
    return address


def check_dates(folder: Path) -> None:
    """Check that Mosquitto won't refuse all connections because of the revocation list's dates.

    Raises:
        BrokerError: by this machine's clock, it would.
    """
    path, now = folder / CRL_NAME, datetime.now(timezone.utc)
    try:
        revocations = x509.load_pem_x509_crl(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BrokerError(f"{path} can't be used: {error}; run `fedcg deploy mosquitto` again") from error
    begin, end = revocations.last_update_utc, revocations.next_update_utc or now
    if not begin <= now <= end:
        raise BrokerError(
            f"{path} is valid from {clock_time(begin)} to {clock_time(end)}, but this machine's clock shows {clock_time(now)}: Mosquitto "
            f"would refuse all connections. {SET_CLOCK.capitalize()}; if it is right, run `fedcg deploy mosquitto` again and copy the folder"
        )


def write_config(folder: Path) -> Path:
    """Write mosquitto.conf with the current paths into a broker's folder, and create its folder for Mosquitto's data.

    Returns:
        The file.

    Raises:
        BrokerError: it is not a broker's folder.
    """
    address, folder = read_address(folder), folder.resolve()
    (folder / DATA_NAME).mkdir(exist_ok=True, mode=stat.S_IRWXU)
    server = credential_of(folder, BROKER_NAME)
    template = files("coordinator.broker").joinpath(f"{CONFIG_NAME}.template").read_text(encoding="utf-8")
    text = Template(template).substitute(
        listener=f"{address.port} 127.0.0.1" if address.host in LOOPBACK_HOSTS else str(address.port),
        ca=credential_of(folder, CA_NAME).certificate,
        certificate=server.certificate,
        key=server.key,
        acl=folder / ACL_NAME,
        crl=folder / CRL_NAME,
        persistence=folder / DATA_NAME,
        extra="user root" if os.geteuid() == 0 else "",  # a separate user could not read the folder
    )
    replace_durably(folder / CONFIG_NAME, text, READABLE)
    return folder / CONFIG_NAME
