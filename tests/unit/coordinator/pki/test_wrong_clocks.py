"""A coordinator that ran once with a wrong clock: what it issued then is put right at its next start."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.broker.broker_folder import check_dates
from coordinator.cli.opening import create_home
from coordinator.config import CoordinatorConfig
from coordinator.errors import BrokerError, HomeError
from coordinator.paths import CRL_NAME, Home
from coordinator.pki import authority as pki
from coordinator.pki.authority import credential_of, issue, renew_clients, server_credential, write_revocations
from tests.support.coordinator.homes import call

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


def test_a_list_made_after_its_file_was_deleted_is_newer_than_those_before(home: Home) -> None:
    earlier = x509.load_pem_x509_crl(write_revocations(home.pki, ()).read_bytes())
    home.revocations.unlink()
    later = x509.load_pem_x509_crl(write_revocations(home.pki, (), now=now() + timedelta(minutes=1)).read_bytes())
    assert later.last_update_utc > earlier.last_update_utc


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


@pytest.mark.parametrize("command", [("coordinator", "run"), ("broker", "run"), ("broker", "run", "--broker", "amqtt")])
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
    with pytest.raises(HomeError, match="ended at"):
        pki.check_pki(home.pki)
    code, output = call(*command, "--dir", home.root)
    assert code == 2, output
    for words in (
        f"ended at {end:%Y-%m-%d %H:%M} UTC",
        f"shows {later:%Y-%m-%d %H:%M}",
        "timedatectl set-ntp true",
        "init",
    ):
        assert words in output.replace("\n", " "), output
