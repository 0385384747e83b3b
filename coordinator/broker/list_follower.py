"""Beside a broker: applies the lists of devices that the coordinator publishes on it. Needs no access to the coordinator's directory."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.broker.broker_folder import read_address, write_lists
from coordinator.broker.lists import Applied, parse_lists
from coordinator.errors import BrokerError
from coordinator.paths import CRL_NAME
from coordinator.pki.authority import CA_NAME, credential_of
from fedcg.wire.errors import TransportError
from fedcg.wire.messages.topics import LISTS, LISTS_APPLIED, LISTS_READER
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles, connection_name
from fedcg.wire.transport.transport import Delivery

log = logging.getLogger(__name__)


@contextmanager
def following(folder: Path, reload: Callable[[], None]) -> Iterator[None]:
    """Apply every list that comes, and answer whether it was applied; the retained one comes after every reconnect.

    Args:
        folder: the broker's.
        reload: makes the broker read its lists again.

    Raises:
        BrokerError: it is no broker's folder.
        TransportError: its certificates can't be used.
    """
    address = read_address(folder)
    authority = credential_of(folder, CA_NAME).certificate
    own = credential_of(folder, LISTS_READER)
    tls = TlsFiles(authority, own.certificate, own.key)
    connection = connection_name(LISTS, own.key.read_bytes())  # no device can take its client id and end its session
    transport = MqttTransport(MqttConfig(address.host, address.port, LISTS_READER, tls=tls, connection=connection))

    def apply(delivery: Delivery) -> None:
        problem = ""
        try:
            lists = parse_lists(delivery.payload, authority.read_bytes(), (folder / CRL_NAME).read_bytes())
            write_lists(folder, lists)
            reload()
        except (BrokerError, OSError, ValueError) as error:
            problem = str(error)[:500]
            log.error("the lists of devices were not applied: %s", problem)  # noqa: TRY400 - the reason is enough
        answer = Applied(lists=hashlib.sha256(delivery.payload).hexdigest(), problem=problem)
        try:
            transport.publish(LISTS_APPLIED, answer.model_dump_json().encode())
        except TransportError as error:
            log.warning("the answer to the lists could not be sent; they come again with the link: %s", error)

    transport.subscribe(LISTS)
    transport.start(apply, lambda _up: None)
    try:
        yield
    finally:
        transport.close()
