"""The authority with wrong clocks, and the rotation of the message key, killed at any point."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.broker.broker_folder import check_dates
from coordinator.cli.opening import create_home
from coordinator.config import CoordinatorConfig
from coordinator.errors import BrokerError, HomeError, PlanError
from coordinator.members.enrolment import make_bundles
from coordinator.paths import CRL_NAME, Home
from coordinator.pki import authority as pki
from coordinator.pki.authority import credential_of, issue, renew_clients, server_credential, write_revocations
from coordinator.pki.signing_keys import SigningIdentity, key_file, load_signing_identity, rotate_key
from coordinator.storage.store import Store
from edge_client.identity.enrol import enrol
from fedcg.wire.messages.envelopes import PinnedKey, SigningKey, VerifyKey, make_link, open_envelope, open_key_chain
from fedcg.wire.messages.schemas import COORDINATOR
from fedcg.wire.messages.topics import Topics
from tests.support.commands import data_of, run_fedcg, succeeds
from tests.support.coordinator.enrolments import open_home, running_desk
from tests.support.coordinator.homes import call
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.coordinator.world import MakeWorld, RunningService
from tests.support.raising import raising
from tests.support.waiting import wait_until


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Home, Store]]:
    """A home before any rotation."""
    made = open_home(tmp_path / "rotating")
    with closing(Store(made.database)) as store:
        yield made, store


def test_a_rotation_makes_a_key_that_the_old_one_signs_and_keeps_the_old_one(opened: tuple[Home, Store]) -> None:
    home, store = opened
    first = load_signing_identity(home, store)
    links = [rotate_key(home, store, 1.0), rotate_key(home, store, 2.0)]
    now = load_signing_identity(home, store)
    assert now.links == tuple(links)
    assert [link.serial for link in links] == [1, 2]
    assert (links[0].old, links[0].new) == (first.key.public.hex, links[1].old)
    assert now.key.public.hex == links[1].new
    assert SigningKey.load(home.signing_key).public == first.key.public
    for serial in (1, 2):
        assert stat.S_IMODE(key_file(home, serial).stat().st_mode) == 0o600


class CutError(BaseException):
    """Stands for the end of the process."""


def test_killed_before_the_commit_the_old_key_counts_and_the_next_try_uses_the_same_file(
    opened: tuple[Home, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, store = opened
    first = load_signing_identity(home, store)

    with monkeypatch.context() as patched:
        patched.setattr(store, "add_key_links", raising(CutError))
        with pytest.raises(CutError):
            rotate_key(home, store, 1.0)
    assert load_signing_identity(home, store).key.public == first.key.public
    left = SigningKey.load(key_file(home, 1)).public
    assert rotate_key(home, store, 2.0).new == left.hex
    assert load_signing_identity(home, store).key.public == left


def test_killed_while_the_key_was_written_the_torn_file_is_replaced(opened: tuple[Home, Store]) -> None:
    home, store = opened
    key_file(home, 1).write_bytes(home.signing_key.read_bytes()[:40])
    link = rotate_key(home, store, 1.0)
    assert load_signing_identity(home, store).key.public.hex == link.new


def test_a_directory_without_the_key_that_devices_know_says_what_to_do(opened: tuple[Home, Store]) -> None:
    home, store = opened
    rotate_key(home, store, 1.0)
    path = key_file(home, 1)
    path.unlink()
    with pytest.raises(HomeError, match=r"restore .*signing-1\.key from a backup"):
        load_signing_identity(home, store)
    SigningKey.generate().save(path)
    with pytest.raises(HomeError, match="not the key that devices have pinned"):
        load_signing_identity(home, store)


def test_new_boxes_get_the_current_key_by_bundle_and_by_token(opened: tuple[Home, Store], tmp_path: Path) -> None:
    home, store = opened
    link = rotate_key(home, store, 1.0)
    bundles = make_bundles(home, store, ["line-8"], tmp_path, 2.0, "casting")
    assert VerifyKey.load_all(bundles["line-8"] / "coordinator.pub")[0].hex == link.new
    with running_desk(home) as desk:
        box = enrol(desk.token("line-9"), tmp_path / "box")
        assert VerifyKey.load_all(box.config.parent / "coordinator.pub")[0].hex == link.new


def test_the_command_tells_what_it_did_and_refuses_where_nobody_knows_the_key(
    opened: tuple[Home, Store], tmp_path: Path
) -> None:
    home, store = opened
    told = data_of(succeeds("coordinator", "rotate-key", "--dir", str(home.root), "--json"))
    assert (told["serial"], told["key"]) == (1, load_signing_identity(home, store).key.public.hex)
    empty = create_home(tmp_path / "empty", CoordinatorConfig())
    result = run_fedcg("coordinator", "rotate-key", "--dir", str(empty.root))
    assert result.exit_code == 2
    with closing(Store(empty.database)) as fresh, pytest.raises(PlanError, match="no federation yet"):
        rotate_key(empty, fresh, 1.0)


def test_a_running_coordinator_publishes_the_new_key_and_leaves_a_will_signed_by_it(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.service.service.REFRESH_S", 0.1)
    world, topics, sent = make_world(), Topics(FEDERATION), dict[str, bytes]()
    old, new = world.key, SigningKey.generate()
    world.broker.record = lambda _identity, topic, payload: sent.update({topic: payload})
    with RunningService(world):
        world.signing_identity = SigningIdentity(new, (make_link(FEDERATION, 1, 1, old, new.public),))
        world.wait_event("key_rotated")
        assert open_key_chain(sent[topics.keys], FEDERATION, PinnedKey(old.public)) == PinnedKey(new.public, 1)
        sent.clear()
        world.broker.drop(COORDINATOR)  # the broker publishes its will
        wait_until(lambda: topics.coordinator in sent, "the will")
        assert open_envelope(sent[topics.coordinator], lambda _: new.public).kind == "coordinator_status"


DAY = timedelta(days=1)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return create_home(tmp_path / "home", CoordinatorConfig(), observers=("observer",))


def now() -> datetime:
    return datetime.now(timezone.utc)


def certificate(home: Home, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(credential_of(home.pki, name).certificate.read_bytes())


def dated(home: Home, at: datetime) -> None:
    """Put a revocation list with this date, which no clock could give one now, into the home."""
    key = serialization.load_pem_private_key(credential_of(home.pki, "ca").key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    made = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(certificate(home, "ca").subject)
        .last_update(at)
        .next_update(certificate(home, "ca").not_valid_after_utc)
        .add_extension(x509.CRLNumber(7), critical=False)
        .sign(key, hashes.SHA256())
    )
    home.revocations.write_bytes(made.public_bytes(serialization.Encoding.PEM))


@pytest.mark.parametrize("ahead", [timedelta(0), DAY, timedelta(days=3649)], ids=["right", "a day", "ten years"])
def test_no_clock_dates_a_revocation_list_in_the_future(home: Home, ahead: timedelta) -> None:
    made = x509.load_pem_x509_crl(write_revocations(home.pki, (), now=now() + ahead).read_bytes())
    assert made.last_update_utc < now() - timedelta(minutes=30)
    assert made.next_update_utc == certificate(home, "ca").not_valid_after_utc


def test_every_revocation_list_is_newer_than_the_one_before_also_after_its_file_was_deleted(home: Home) -> None:
    def made(serials: Iterable[tuple[int, datetime]], at: datetime) -> x509.CertificateRevocationList:
        return x509.load_pem_x509_crl(write_revocations(home.pki, serials, now=at).read_bytes())

    start, serial, authority = now(), certificate(home, "coordinator").serial_number, certificate(home, "ca")
    lists = [made(serials, start) for serials in ((), [(serial, start)], ())]
    home.revocations.unlink()
    lists.append(made((), start + timedelta(minutes=1)))
    assert [len(list(known)) for known in lists] == [0, 1, 0, 0]
    assert lists[1].get_revoked_certificate_by_serial_number(serial) is not None
    for earlier, later in pairwise(lists):
        assert later.last_update_utc - earlier.last_update_utc >= timedelta(seconds=1)
    for known in lists:
        assert known.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
        assert known.next_update_utc == authority.not_valid_after_utc


def test_a_list_from_the_future_is_put_right_by_the_next_and_refused_by_the_broker_by_name(home: Home) -> None:
    dated(home, now() + DAY)
    folder = home.pki  # as in a broker's folder, the authority's certificate lies beside the list
    with pytest.raises(
        BrokerError, match=rf"{folder / CRL_NAME} is valid from .*timedatectl.*`fedcg deploy mosquitto`"
    ):
        check_dates(folder)
    made = x509.load_pem_x509_crl(write_revocations(home.pki, ()).read_bytes())
    assert made.last_update_utc < now()
    assert made.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number == 8
    check_dates(folder)


@pytest.mark.parametrize("off", [DAY, -timedelta(days=1100)], ids=["fast", "slow"])
def test_a_certificate_that_a_wrong_clock_dated_is_valid_when_the_clock_is_right(home: Home, off: timedelta) -> None:
    for name in ("broker", "coordinator"):
        issue(home.pki, name, server=name == "broker", now=now() + off)
        made = certificate(home, name)
        assert made.not_valid_before_utc == certificate(home, "ca").not_valid_before_utc
        assert made.not_valid_after_utc > now() + timedelta(days=820)
        server_credential(home.pki, "broker", "127.0.0.1")
        renew_clients(home)
        assert certificate(home, name) == made


def test_certificates_that_run_out_are_replaced_and_clients_keep_their_key(home: Home) -> None:
    for name in ("broker", "coordinator", "observer"):
        issue(home.pki, name, server=name == "broker", life=pki.RENEW_BEFORE / 2)
    before = {name: certificate(home, name) for name in ("broker", "coordinator", "observer")}
    keys = {name: credential_of(home.pki, name).key.read_bytes() for name in ("coordinator", "observer")}
    server_credential(home.pki, "broker", "127.0.0.1")
    renew_clients(home)
    for name, old in before.items():
        new = certificate(home, name)
        assert new.serial_number != old.serial_number, name
        assert new.not_valid_before_utc <= now() < new.not_valid_after_utc - timedelta(days=800)
        assert new.subject == old.subject
    assert keys == {name: credential_of(home.pki, name).key.read_bytes() for name in keys}
    pki.check_pki(home.pki)
    kept = {name: certificate(home, name) for name in before}
    server_credential(home.pki, "broker", "127.0.0.1")
    renew_clients(home)
    assert kept == {name: certificate(home, name) for name in before}


@pytest.mark.parametrize("command", [("coordinator", "run"), ("broker", "run")])
def test_after_the_authoritys_end_nothing_starts_and_the_message_names_end_clock_and_remedy(
    home: Home, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    end = certificate(home, "ca").not_valid_after_utc
    later = end + DAY

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Clock:
            return cls.fromtimestamp(later.timestamp(), timezone.utc)

    monkeypatch.setattr(pki, "datetime", Clock)
    with pytest.raises(HomeError, match="expired at"):
        pki.check_pki(home.pki)
    code, output = call(*command, "--dir", home.root)
    assert code == 2, output
    for words in (f"expired at {end:%F %H:%M} UTC", f"shows {later:%F %H:%M}", "timedatectl set-ntp true", "init"):
        assert words in output.replace("\n", " "), output
