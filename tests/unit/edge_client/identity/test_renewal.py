"""Renewal over real mutual TLS; and that no interruption leaves a certificate and a key that do not fit."""

import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509

from coordinator.members.membership import RENEWALS_AT_ONCE
from coordinator.paths import Home
from coordinator.pki.authority import create_ca, credential_of, issue
from coordinator.rounds.records import DeviceState
from edge_client.cli.doctor.checks import examine
from edge_client.config import AgentConfig, load_config
from edge_client.errors import EnrolError
from edge_client.identity import credentials, enrolment_client
from edge_client.identity.credentials import (
    Renewer,
    TlsKey,
    is_due,
    load_keys,
    read_checked,
    renew,
    replace_pair,
    settle_pair,
)
from edge_client.identity.enrol import enrol
from edge_client.identity.enrolment_client import ask, trusting
from fedcg.event_log import EventLog, read_events
from fedcg.wire.messages import enrolment_messages
from fedcg.wire.messages.envelopes import SigningKey
from tests.support.coordinator.enrolments import Desk, running_desk
from tests.support.present import present
from tests.support.waiting import wait_until


@pytest.fixture
def device(desk: Desk, tmp_path: Path) -> AgentConfig:
    enrol(desk.token("line-4"), tmp_path / "box")
    return load_config(tmp_path / "box" / "agent.toml", {})


def certificate_of(config: AgentConfig) -> x509.Certificate:
    return enrolment_messages.load_certificate(present(config.tls).cert.read_bytes())


def fits(config: AgentConfig) -> bool:
    return (
        enrolment_messages.certificate_key_digest(certificate_of(config)) == TlsKey.load(present(config.tls).key).digest
    )


def days_ahead(days: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(days=days)


def test_a_renewal_brings_a_new_key_and_a_later_end_under_the_same_name(desk: Desk, device: AgentConfig) -> None:
    before = certificate_of(device)
    renewed = renew(device, load_keys(device).signing)
    assert certificate_of(device) == renewed
    assert fits(device)
    assert enrolment_messages.certificate_key_digest(renewed) != enrolment_messages.certificate_key_digest(before)
    assert renewed.subject == before.subject
    assert renewed.not_valid_after_utc >= before.not_valid_after_utc
    assert stat.S_IMODE(present(device.tls).key.stat().st_mode) == 0o600
    assert [event["client"] for event in desk.events("certificate_renewed")] == ["line-4"]
    known = desk.store.register.certificates("line-4")
    assert [entry.revoked_at for entry in known] == [None, None]  # the answer might have been lost
    renew(device, load_keys(device).signing)


def test_a_revoked_device_renews_nothing_and_its_files_stay(desk: Desk, device: AgentConfig) -> None:
    before = certificate_of(device)
    desk.store.register.end_membership("line-4", DeviceState.REVOKED, "stolen", 1.0)
    with pytest.raises(EnrolError, match="no longer enrolled"):
        renew(device, load_keys(device).signing)
    assert certificate_of(device) == before
    assert fits(device)
    assert [event["client"] for event in desk.events("renewal_refused")] == ["line-4"]


def test_a_stolen_tls_key_alone_renews_nothing(desk: Desk, device: AgentConfig) -> None:
    with pytest.raises(EnrolError, match="not signed by the device's message key"):
        renew(device, SigningKey.generate())
    assert len(desk.store.register.certificates("line-4")) == 1


def test_a_message_key_alone_and_another_devices_certificate_renew_nothing(
    desk: Desk, device: AgentConfig, tmp_path: Path
) -> None:
    signing, key = load_keys(device).signing, TlsKey.generate()
    proof = signing.sign(enrolment_messages.renewal_statement("line-4", key.digest)).hex()
    request = enrolment_messages.RenewRequest(device="line-4", request=key.request("line-4"), proof=proof)
    authority = enrolment_messages.load_certificate(credential_of(desk.home.pki, "ca").certificate.read_bytes())
    with pytest.raises(EnrolError, match="requires the device's current certificate"):
        ask(desk.url, enrolment_messages.RENEW_PATH, request, enrolment_messages.RenewAnswer, trusting(authority))
    other = issue(desk.home.pki, "line-5", life=timedelta(days=1), target=tmp_path)
    context = trusting(authority)
    context.load_cert_chain(other.certificate, other.key)
    with pytest.raises(EnrolError, match="belongs to another device"):
        ask(desk.url, enrolment_messages.RENEW_PATH, request, enrolment_messages.RenewAnswer, context)
    assert len(desk.store.register.certificates("line-4")) == 1


def test_a_device_can_not_collect_certificates(desk: Desk, device: AgentConfig) -> None:
    signing = load_keys(device).signing
    for _ in range(RENEWALS_AT_ONCE - 1):
        renew(device, signing)
    with pytest.raises(EnrolError, match="renews too often"):
        renew(device, signing)
    assert fits(device)


def test_a_device_without_a_place_to_renew_is_told_so(device: AgentConfig) -> None:
    bundle = device.model_copy(update={"enrolment": device.enrolment.model_copy(update={"url": None})})
    with pytest.raises(EnrolError, match="ask the operator"):
        renew(bundle, load_keys(device).signing)


# ------------------------------------------------------------------ interruptions


class _PowerCutError(Exception):
    pass


@pytest.mark.parametrize("survived", range(12))
def test_a_replacement_that_is_cut_off_anywhere_leaves_the_old_or_the_new_pair_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    """Every rename and every deletion may be the last thing that happened."""
    create_ca(tmp_path / "pki")
    issued = [issue(tmp_path / "pki", name) for name in ("old", "new")]
    old, new = ((one.certificate.read_bytes(), one.key.read_bytes()) for one in issued)
    left = survived
    certificate, key = tmp_path / "tls" / "device.pem", tmp_path / "tls" / "device.key"
    certificate.parent.mkdir()
    certificate.write_bytes(old[0])
    key.write_bytes(old[1])

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _PowerCutError

    replace, unlink = Path.replace, Path.unlink

    def counted_replace(self: Path, target: Path) -> Path:
        count()
        return replace(self, target)

    def counted_unlink(self: Path, missing_ok: bool = False) -> None:
        count()
        unlink(self, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", counted_replace)
        patched.setattr(Path, "unlink", counted_unlink)
        is_done = False
        with suppress(_PowerCutError):
            replace_pair(certificate, key, *new)
            is_done = True
    settle_pair(certificate, key)
    assert (read_checked(certificate), read_checked(key)) in ([new] if is_done else [old, new])
    assert {path for path in certificate.parent.iterdir() if not path.name.startswith(".")} == {certificate, key}


# ------------------------------------------------------------------ in time, by itself


def test_a_certificate_is_due_in_the_last_third_of_its_life(device: AgentConfig) -> None:
    certificate = certificate_of(device)
    assert not is_due(certificate, days_ahead(19.5))
    assert is_due(certificate, days_ahead(20.5))
    key = load_keys(device).signing
    assert renew(device, key, lambda: days_ahead(19.5)) == certificate, "another federation's agent has renewed it"


def renewer(config: AgentConfig, clock: Callable[[], datetime], renewed: threading.Event) -> Renewer:
    config.store.mkdir(parents=True, exist_ok=True)
    events = EventLog(config.store / "events.jsonl", lambda: 0.0)
    return Renewer(config, load_keys(config).signing, events, renewed.set, clock=clock)


def reported(config: AgentConfig, name: str) -> list[str]:
    return [str(event.get("detail")) for event in read_events(config.store / "events.jsonl") if event["event"] == name]


def test_a_renewal_that_fails_is_written_down_and_tried_again(home: Home, tmp_path: Path) -> None:
    with running_desk(home) as desk:
        enrol(desk.token("line-4"), tmp_path / "box")
    config, told = load_config(tmp_path / "box" / "agent.toml", {}), threading.Event()
    with renewer(config, lambda: days_ahead(25), told).running():
        wait_until(lambda: bool(reported(config, "renewal_failed")), "it is written down")
    assert not told.is_set()
    assert fits(config)


def test_a_clock_that_is_far_off_renews_nothing_and_is_named_once_until_it_is_right(
    desk: Desk, device: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, off_s, looks = threading.Event(), 40 * 86_400.0, 0

    def shown() -> float:
        nonlocal looks
        looks += 1
        return datetime.now(timezone.utc).timestamp() + off_s

    monkeypatch.setattr(enrolment_client, "time", SimpleNamespace(time=shown))
    monkeypatch.setattr(credentials, "TRY_AGAIN", timedelta(milliseconds=20))
    with renewer(device, lambda: days_ahead(29), told).running():
        wait_until(lambda: looks >= 4, "it compared the clocks again and again")
        (failed,) = reported(device, "renewal_failed")
        assert "ahead of the coordinator's" in failed
        assert "timedatectl set-ntp true" in failed
        assert len(desk.store.register.certificates("line-4")) == 1
        off_s = 0.0
        assert told.wait(20)


def test_the_doctor_tells_when_the_certificate_ends_and_when_its_renewal_is_overdue(device: AgentConfig) -> None:
    until = f"{certificate_of(device).not_valid_after_utc:%Y-%m-%d}"
    for days, state, told in (
        (1, "ok", until),
        (20.5, "ok", until),
        (25, "warning", "fedcg agent renew"),
        (31, "failed", "--replaces"),
    ):
        (found,) = examine(device, days_ahead(days), ("certificate",))
        assert (found.state, told in found.detail + found.advice) == (state, True), found
