"""Devices that are revoked, replaced or silenced, on a real Mosquitto: what each change does to live sessions there.

One broker runs from the coordinator's directory, the other from a folder of `fedcg deploy mosquitto` that was moved away from where it was written.
"""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import pytest

from coordinator.broker.access_lists import PENDING_NAME, PENDING_S, publish_access, silence
from coordinator.cli.opening import create_home
from coordinator.config import BrokerSettings, CoordinatorConfig
from coordinator.members.membership import evict, revoke
from coordinator.pki.authority import write_revocations
from coordinator.rounds.records import DeviceState
from coordinator.storage.locks import changing_members
from coordinator.storage.store import Store
from fedcg.wire.transport.mqtt import MqttTransport
from tests.support.broker.broker_plant import FEDERATION, TOPICS, Plant, open_plant
from tests.support.broker.brokers import Client
from tests.support.commands import data_of
from tests.support.coordinator.homes import message_key
from tests.support.waiting import free_port, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]
RETRIES = 4
IN_A_ROW = 5
WITHIN_S = 30.0
_NUMBERS = itertools.count()


IN_ITS_DIRECTORY = pytest.mark.parametrize("plant", ["run"], indirect=True)


@pytest.fixture
def plant(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Plant]:
    kind = getattr(request, "param", "deployed")
    with open_plant(tmp_path, kind) as made:
        yield made
        assert (made.home.broker / "acl").exists() is (kind == "run")


def is_cut_off(coordinator: Client, device: Client, honest: Client, number: int, *, may_read: bool) -> bool:
    """Whether, on its live session, nothing of A is delivered and nothing is delivered to it, while B exchanges messages.

    With `may_read` it is still told things on its own topic: that it is revoked.
    """
    word = f"word {number}".encode()
    if device.links[-1:] == [True]:
        device.transport.publish(TOPICS.up_control("a"), word)
    coordinator.transport.publish(TOPICS.down_control("a"), word)
    of_b = f"b {word.decode()}".encode()
    honest.transport.publish(TOPICS.up_control("b"), of_b)
    coordinator.transport.publish(TOPICS.down_control("b"), of_b)
    coordinator.await_payload(TOPICS.up_control("b"), of_b)
    honest.await_payload(TOPICS.down_control("b"), of_b)
    told = [] if may_read else device.payloads(TOPICS.down_control("a"))
    return word not in coordinator.payloads(TOPICS.up_control("a")) + told


def wait_cut_off(
    coordinator: Client, device: Client, honest: Client, *, expected: bool = True, may_read: bool = False
) -> None:
    """Wait until `IN_A_ROW` exchanges agree."""
    agreed, end = 0, time.monotonic() + WITHIN_S
    while agreed < IN_A_ROW:
        is_so = is_cut_off(coordinator, device, honest, next(_NUMBERS), may_read=may_read) is expected
        agreed = agreed + 1 if is_so else 0
        assert time.monotonic() < end, f"A is still {'heard' if expected else 'cut off'}"


def is_refused(plant: Plant, name: str) -> bool:
    """Whether a device's certificate opens no session, in several tries."""
    client = plant.connect(name, wait=False)
    transport = client.transport
    assert isinstance(transport, MqttTransport)
    wait_until(lambda: bool(client.links) or transport.attempts >= RETRIES, "an answer")
    transport.close()
    return client.links == []


def revoked(plant: Plant) -> None:
    told = data_of(plant.command("device", "revoke", "a", "--reason", "stolen", "--json"))
    assert told["broker_reloaded"] is True


def left(plant: Plant) -> None:
    with closing(Store(plant.home.database)) as store:
        assert store.register.end_membership("a", DeviceState.LEFT, "it left", time.time())
    with changing_members(plant.home):
        assert publish_access(plant.home)


def silenced(plant: Plant) -> None:
    assert silence(plant.home, ["a"])


@pytest.mark.slow
@pytest.mark.parametrize("change", [revoked, left, silenced])
def test_a_live_session_is_cut_off_even_after_the_broker_died(plant: Plant, change: Callable[[Plant], None]) -> None:
    coordinator, bad, good = (plant.connect(name) for name in ("coordinator", "a", "b"))
    wait_cut_off(coordinator, bad, good, expected=False)
    change(plant)
    wait_cut_off(coordinator, bad, good, may_read=change is revoked)
    assert good.links == coordinator.links == [True]

    assert plant.broker is not None
    plant.broker.send_signal(signal.SIGKILL)  # Mosquitto ends with the program beside it
    plant.broker.wait()
    away = plant.home.root.rename(plant.root / "away")
    plant.start_broker()
    away.rename(plant.home.root)
    coordinator.await_link(2)
    good.await_link(2)
    wait_cut_off(coordinator, bad, good)
    if change is silenced:
        assert silence(plant.home, [])
        bad.await_link(2)
        wait_cut_off(coordinator, bad, good, expected=False)
    else:
        assert bad.links == [True, False]
        assert is_refused(plant, "a")


@IN_ITS_DIRECTORY
def test_a_revoked_device_is_silenced_and_never_comes_back_while_others_go_on(plant: Plant) -> None:
    coordinator, bad, good = (plant.connect(name) for name in ("coordinator", "a", "b"))
    wait_cut_off(coordinator, bad, good, expected=False)
    revoked(plant)
    wait_cut_off(coordinator, bad, good, may_read=True)
    bad.transport.close()
    assert is_refused(plant, "a")
    assert good.links == coordinator.links == [True]


@IN_ITS_DIRECTORY
def test_two_revocations_in_one_second_both_hold(plant: Plant) -> None:
    with closing(Store(plant.home.database)) as store:
        for name in ("a", "b"):
            plant.connect(name)
            assert revoke(plant.home, store, name, "", time.time()).broker_reloaded
    for name in ("a", "b"):  # who comes in the moment between the signal and the reload still gets in, silenced
        wait_until(partial(is_refused, plant, name), f"the broker has read its lists and refuses {name}", WITHIN_S)


def test_a_start_with_a_clock_a_day_fast_locks_nobody_out_afterwards(plant: Plant) -> None:
    write_revocations(plant.home.pki, (), now=datetime.now(timezone.utc) + timedelta(days=1))
    with changing_members(plant.home):
        assert publish_access(plant.home)
    plant.connect("coordinator")
    plant.connect("b")
    plant.command("device", "revoke", "a", "--reason", "stolen")
    assert is_refused(plant, "a")


def test_a_device_that_is_added_works_at_once_and_one_that_is_replaced_is_out(plant: Plant) -> None:
    plant.command("device", "add", "d", "--out", str(plant.home.root.parent / "bundles"))
    coordinator, new, good = (plant.connect(name) for name in ("coordinator", "d", "b"))
    new.transport.publish(TOPICS.up_control("d"), b"hello")
    coordinator.await_payload(TOPICS.up_control("d"), b"hello")

    old = plant.connect("a")
    key = message_key(plant.home, "a")
    with closing(Store(plant.home.database)) as store:
        revoke(plant.home, store, "a", "replaced", time.time())
    assert evict(plant.home, "a", key, [FEDERATION])
    wait_until(lambda: False in old.links, "its session ends, although another one may have its name")
    assert is_refused(plant, "a")
    assert good.links == [True]


def test_no_device_can_take_the_place_of_what_carries_the_lists(plant: Plant) -> None:
    takers = [plant.client(name, shown="a").start().await_link() for name in ("lists-reader", "lists-writer")]
    for devices in (["c"], []):
        assert silence(plant.home, devices), "the broker has applied the lists"
    assert [taker.links for taker in takers] == [[True], [True]]
    assert "already connected" not in plant.log("broker")


@contextmanager
def running_coordinator(plant: Plant) -> Iterator[subprocess.Popen[bytes]]:
    with (plant.root / "coordinator.log").open("ab") as log:
        command = [sys.executable, "-m", "fedcg", "coordinator", "run", "--dir", str(plant.home.root)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_try_that_failed_is_repeated_while_the_link_stands(plant: Plant) -> None:
    """As when a command was killed before the broker had the lists, or was too slow for them."""
    config = plant.home.config_file
    config.write_text(config.read_text().replace("port = 8440", f"port = {free_port()}"))
    with running_coordinator(plant):
        pending = plant.home.broker / PENDING_NAME
        wait_until(lambda: "link" in _events(plant) and not pending.exists(), "it has its link and its lists", 60)
        # With the lock, as a command has it: else lists that are under way, made before the revocation, would remove the mark.
        with changing_members(plant.home), closing(Store(plant.home.database)) as store:
            assert store.register.end_membership("a", DeviceState.REVOKED, "stolen", time.time())
            pending.touch()
            tried_at = time.time() - PENDING_S
            os.utime(pending, (tried_at, tried_at))
        wait_until(lambda: not section_of(plant, "a"), "the lists arrive", 60)
        wait_until(lambda: not pending.exists(), "nothing is left to do", 60)


def section_of(plant: Plant, name: str) -> bool:
    """Whether a device may write; one that is revoked may read that it is."""
    assert plant.folder is not None
    lines = (plant.folder / "acl").read_text().splitlines()
    return any(line.startswith("topic write") and f"/devices/{name}/" in line for line in lines)


@pytest.mark.slow
def test_what_the_broker_missed_reaches_it_with_the_coordinators_next_link(plant: Plant) -> None:
    """Revoked while the broker is down, with a coordinator that runs on, and with one that was killed meanwhile."""
    config = plant.home.config_file
    config.write_text(config.read_text().replace("port = 8440", f"port = {free_port()}"))
    for name, is_killed in (("a", False), ("c", True)):
        with running_coordinator(plant) as coordinator:
            wait_until(lambda: "link" in _events(plant) and section_of(plant, "b"), "it has its link", 60)
            plant.end_broker()
            assert data_of(plant.command("device", "revoke", name, "--json"))["broker_reloaded"] is False
            if is_killed:
                coordinator.kill()
                coordinator.wait()
            plant.start_broker()
            if not is_killed:
                wait_until(lambda: not section_of(plant, name), "the lists arrive", 60)  # noqa: B023
        if is_killed:
            assert section_of(plant, name)  # nothing has brought them yet
            with running_coordinator(plant):
                wait_until(lambda: not section_of(plant, name), "the lists arrive", 60)  # noqa: B023
        assert is_refused(plant, name)


def _events(plant: Plant) -> str:
    return plant.home.events_file.read_text() if plant.home.events_file.exists() else ""


def test_no_broker_means_no_session_to_end(tmp_path: Path) -> None:
    home = create_home(tmp_path / "home", CoordinatorConfig(broker=BrokerSettings(port=free_port())))
    assert not evict(home, "a", "aa" * 32, [FEDERATION])
    assert list(home.root.glob("evict-*")) == []
