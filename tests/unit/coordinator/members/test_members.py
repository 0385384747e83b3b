"""Devices that stop being members while the service runs: no round waits for them, and their messages are refused."""

import time
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path

import pytest
from cryptography import x509

from coordinator.facts.known import Known
from coordinator.facts.problems import open_problems
from coordinator.pki.authority import create_ca, issue, write_revocations
from coordinator.rounds.engine import Phase
from coordinator.rounds.records import CertificateRecord, DeviceState, FederationStatus, ParticipantState, TokenRecord
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.messages.schemas import Invite, RoundAttempt
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.coordinator.world import MakeWorld, RunningService, World
from tests.support.waiting import wait_until

KEY = (FEDERATION, RoundAttempt(2, 1))


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    made = make_world(clients=("a", "b", "c"))
    for device in made.devices.values():
        device.silent = True
    return made


def waiting_for_c(world: World, running: RunningService) -> None:
    """Round 2 is open with all three, and only c has not delivered."""
    for name in ("a", "b"):
        world.devices[name].start()
    wait_until(lambda: running.service.state.phase is Phase.COLLECTING, "round 1 is open")
    world.devices["c"].start()
    wait_until(lambda: len(running.service.state.online) == 3, "all are online")
    for name in ("a", "b"):
        world.devices[name].silent = False
        world.devices[name].act()
    wait_until(lambda: running.service.state.round == 2 and running.service.state.outstanding == {"c"}, "c is missing")


def known_of(world: World) -> Known:
    return Known(world.store, lambda record: world.spec, world.root)


def revoke(world: World, device: str) -> None:
    assert world.store.register.end_membership(device, DeviceState.REVOKED, "stolen", time.time())


def test_an_open_round_does_not_wait_for_a_revoked_device(world: World) -> None:
    with RunningService(world) as running:
        waiting_for_c(world, running)
        revoke(world, "c")
        assert world.wait_event("departed")["client"] == "c"
        world.wait_event("finished")
        assert world.events("distilling")[-1]["clients"] == ["a", "b"]
    stored = {person.client: person.state for person in world.store.participants(*KEY)}
    assert stored["c"] is ParticipantState.DECLINED


def test_a_device_that_another_box_replaces_in_a_round_is_dropped_from_it_and_did_neither_decline_nor_fail(
    world: World,
) -> None:
    token = TokenRecord("t", "0" * 64, "c", replaces=True, created_at=1.0, expires_at=2.0)
    now = time.time()
    certificate = CertificateRecord("1f", "c", now, now + 86_400, None, "")
    with RunningService(world) as running:
        waiting_for_c(world, running)
        world.store.register.add_token(token)
        world.store.register.admit(token, "", SigningKey.generate().public.hex, certificate, time.time())
        world.wait_event("departed")
        world.wait_event("finished")
    world.store.set_status(FEDERATION, FederationStatus.RUNNING, "")
    (problem,) = (each for each in open_problems(known_of(world)) if each.device == "c")
    assert (problem.kind, problem.what) == (
        "dropped",
        f"dropped in round 2 of {FEDERATION}: another box replaces it",
    )
    assert problem.remedy.startswith("Nothing is broken")


def test_a_revoked_devices_messages_are_refused_and_it_is_not_invited_any_more(world: World) -> None:
    with RunningService(world) as running:
        waiting_for_c(world, running)
        revoke(world, "c")
        wait_until(lambda: "c" not in running.service.state.online, "it is gone")
        invites, refused = len(world.devices["c"].of(Invite)), running.service.refusals.get("forged", 0)
        world.devices["c"].hello()
        wait_until(lambda: running.service.refusals.get("forged", 0) > refused, "its hello is refused")
        assert "c" not in running.service.state.online
        assert len(world.devices["c"].of(Invite)) == invites


def test_who_departed_while_no_coordinator_ran_holds_up_no_round_afterwards(world: World) -> None:
    with RunningService(world) as running:
        waiting_for_c(world, running)
        running.stop()
    revoke(world, "c")
    with RunningService(world):
        world.wait_event("finished")
        assert world.events("distilling")[-1]["clients"] == ["a", "b"]


def test_every_revocation_list_is_newer_than_the_one_before_and_outlives_nobody_but_the_authority(
    tmp_path: Path,
) -> None:
    create_ca(tmp_path)
    leaf = x509.load_pem_x509_certificate(issue(tmp_path, "a").certificate.read_bytes())
    ca = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    now = datetime.now(timezone.utc)
    lists = [
        x509.load_pem_x509_crl(write_revocations(tmp_path, serials, now=now).read_bytes())
        for serials in ((), [(leaf.serial_number, now)], ())
    ]
    assert [len(list(known)) for known in lists] == [0, 1, 0]
    assert lists[1].get_revoked_certificate_by_serial_number(leaf.serial_number) is not None
    for earlier, later in pairwise(lists):
        assert later.last_update_utc - earlier.last_update_utc >= timedelta(seconds=1)
    for known in lists:
        assert known.is_signature_valid(ca.public_key())  # type: ignore[arg-type]
        assert known.next_update_utc == ca.not_valid_after_utc
