"""Lists of devices from the network: what is applied, and what is refused with its reason."""

import json
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from coordinator.broker.access_lists import end_silences, publish_lists, refresh_access
from coordinator.broker.broker_folder import MAX_BYTES, Lists, parse_lists, write_config, write_folder
from coordinator.cli.opening import create_home
from coordinator.config import BrokerSettings, CoordinatorConfig
from coordinator.errors import BrokerError
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, create_ca, credential_of, write_revocations
from coordinator.storage.store import Store
from fedcg.find_mosquitto import find_mosquitto
from fedcg.wire.errors import TransportError
from tests.support.waiting import free_port, wait_until

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = create_home(tmp_path / "home", CoordinatorConfig(broker=BrokerSettings(port=free_port())))
    Store(made.database).close()
    return made


def authority(home: Home) -> bytes:
    return credential_of(home.pki, CA_NAME).certificate.read_bytes()


def test_the_latest_lists_are_taken_and_taken_again(home: Home) -> None:
    lists = refresh_access(home)
    payload = lists.model_dump_json().encode()
    for _ in range(2):  # the retained message comes again after every reconnect
        assert parse_lists(payload, authority(home), lists.revocations.encode()) == lists


def test_earlier_lists_than_those_in_use_are_refused(home: Home) -> None:
    """A broker that lost its last minutes in a crash delivers an earlier message."""
    earlier, later = refresh_access(home), refresh_access(home)
    with pytest.raises(BrokerError, match="older than those in use"):
        parse_lists(earlier.model_dump_json().encode(), authority(home), later.revocations.encode())


def test_a_revocation_list_of_another_authority_is_refused(home: Home, tmp_path: Path) -> None:
    lists = refresh_access(home)
    create_ca(tmp_path / "other")
    foreign = write_revocations(tmp_path / "other", [(7, datetime.now(timezone.utc))]).read_text()
    payload = lists.model_copy(update={"revocations": foreign}).model_dump_json().encode()
    with pytest.raises(BrokerError, match=r"not signed by this broker's authority.*deploy mosquitto"):
        parse_lists(payload, authority(home), lists.revocations.encode())


BROKEN: dict[str, Change] = {
    "version": lambda fields: fields.update(version=2),
    "device": lambda fields: fields.update(device=["a"]),
    "devices.0": lambda fields: fields.update(devices=["a\nuser mallory\ntopic readwrite #"]),
    "observers.0": lambda fields: fields.update(observers=["observer-\nuser mallory"]),
    "observer 'a'": lambda fields: fields.update(observers=["a"]),
    "reserved": lambda fields: fields.update(devices=["coordinator"]),
    "federations.0": lambda fields: fields.update(federations=["+"]),
    "revocations": lambda fields: fields.pop("revocations"),
    "PEM": lambda fields: fields.update(revocations="none"),
}


@pytest.mark.parametrize("why", BROKEN)
def test_anything_else_is_refused_by_name(home: Home, why: str) -> None:
    lists = refresh_access(home)
    fields = {**json.loads(lists.model_dump_json()), "federations": ["casting"]}
    BROKEN[why](fields)
    with pytest.raises(BrokerError, match="not lists of devices") as refused:
        parse_lists(json.dumps(fields).encode(), authority(home), lists.revocations.encode())
    assert why in str(refused.value)


def test_lists_over_the_limit_are_refused_unread(home: Home) -> None:
    with pytest.raises(BrokerError, match=str(MAX_BYTES)):
        parse_lists(b"[" * (MAX_BYTES + 1), authority(home), b"")


def test_a_thousand_devices_and_revocations_fit_many_times(home: Home) -> None:
    names = tuple(f"{number:04}" + "x" * 59 for number in range(1000))
    serials = [(2**158 + number, datetime.now(timezone.utc)) for number in range(1000)]
    revocations = write_revocations(home.pki, serials).read_text()
    lists = Lists(federations=("casting",), devices=names, observers=(), revocations=revocations)
    assert len(lists.model_dump_json()) < MAX_BYTES / 10


def test_no_broker_is_reported_at_once(home: Home) -> None:
    with pytest.raises(TransportError, match="nobody listens there"):
        publish_lists(home, refresh_access(home), timeout_s=60.0)
    assert not list(home.root.glob("lists-*"))


@pytest.mark.broker
def test_a_mosquitto_without_the_program_beside_it_is_reported_with_the_remedy(home: Home) -> None:
    mosquitto = find_mosquitto()
    assert mosquitto is not None
    end_silences(home)
    write_folder(home, home.broker, refresh_access(home))
    command = [str(mosquitto.binary), "-c", str(write_config(home.broker))]
    process = subprocess.Popen(command, env=mosquitto.environment(), stderr=subprocess.DEVNULL)

    def is_refused_with_the_remedy() -> bool:
        with pytest.raises((BrokerError, TransportError)) as refused:
            publish_lists(home, refresh_access(home), timeout_s=1.0)
        return "`fedcg broker run`" in str(refused.value)

    try:
        began = time.monotonic()
        wait_until(is_refused_with_the_remedy, "it is up, and applies nothing")
        assert time.monotonic() - began < 60
    finally:
        process.kill()
        process.wait()
