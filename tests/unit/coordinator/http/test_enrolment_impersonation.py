"""Somebody on the path with a certificate of the coordinator's own authority: what a box still refuses, over real TLS."""

import json
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from coordinator.paths import BROKER_NAME
from coordinator.pki import authority as pki
from coordinator.pki.authority import CA_NAME, create_ca, credential_of, issue
from coordinator.pki.signing_keys import rotate_key
from edge_client.errors import EnrolError
from edge_client.identity.enrol import enrol
from edge_client.link.https_client import check_ready
from fedcg.wire.errors import TransportError
from fedcg.wire.messages.enrolment_messages import ENROL_PATH
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.transport.mqtt import probe
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles
from tests.support.broker.brokers import HOST
from tests.support.coordinator.enrolments import Desk, Pretender, json_of

Change = Callable[[dict[str, Any]], dict[str, Any]]


def between(desk: Desk, role: str, change: Change) -> Pretender:
    """Somebody with the certificate and key of one server, who passes requests on to the true one and alters the answers."""
    authority = desk.authority

    def respond(request: bytes) -> bytes:
        body = json.dumps(json_of(request)).encode()
        asked = Request(desk.url + ENROL_PATH, body, {"Content-Type": "application/json"})  # noqa: S310 - https, on loopback
        with urlopen(asked, context=ssl.create_default_context(cafile=str(authority)), timeout=20) as answer:  # noqa: S310
            return json.dumps(change(json.loads(answer.read()))).encode()

    return Pretender(authority.read_bytes(), credential_of(desk.home.pki, role), respond)


def test_the_brokers_key_can_not_play_the_enrolment_listener(desk: Desk, tmp_path: Path) -> None:
    """Before the role was checked the secret arrived, and the box pinned the key of the one in between."""
    theirs, token = SigningKey.generate().public.hex, desk.token("line-4")
    with (
        between(desk, BROKER_NAME, lambda answer: {**answer, "coordinator_key": theirs}) as thief,
        pytest.raises(EnrolError, match=r"of the server 'broker'.*'enrolment' is expected.*Nothing secret was sent"),
    ):
        enrol(token, tmp_path / "box", url=thief.url)
    assert token.secret.hex().encode() not in thief.heard
    assert b"POST" not in thief.heard
    assert not (tmp_path / "box" / "coordinator.pub").exists()
    assert desk.store.devices() == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"coordinator_key": "5" * 64}, "another message key than the token"),
        ({"broker_host": "evil.example"}, "not signed by the coordinator for this request"),
        ({"carrier_url": "https://evil.example:8445"}, "not signed by the coordinator for this request"),
        ({"federation": "other"}, "not signed by the coordinator for this request"),
        ({"signature": None}, "not signed by the coordinator for this request"),
    ],
)
def test_even_the_enrolment_listeners_own_key_can_not_alter_the_answer(
    desk: Desk, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with between(desk, "enrolment", lambda answer: {**answer, **changes}) as thief:
        with pytest.raises(EnrolError, match=why):
            enrol(desk.token("line-4"), tmp_path / "box", url=thief.url)
        assert not (tmp_path / "box" / "agent.toml").exists()
        assert not (tmp_path / "box" / "coordinator.pub").exists()


def test_an_answer_to_an_earlier_request_of_the_same_box_is_refused(desk: Desk, tmp_path: Path) -> None:
    """The keys are the same when a box asks again, so only the nonce tells the two requests apart."""
    answers: list[dict[str, Any]] = []

    def first_again(answer: dict[str, Any]) -> dict[str, Any]:
        answers.append(answer)
        return answers[0]

    token, out = desk.token("line-4"), tmp_path / "box"
    with between(desk, "enrolment", first_again) as thief:
        enrol(token, out, url=thief.url)
        (out / "agent.toml").unlink()
        (out / "coordinator.pub").unlink()
        with pytest.raises(EnrolError, match="not signed by the coordinator for this request"):
            enrol(token, out, url=thief.url)
    assert len(answers) == 2


def test_a_token_of_before_a_rotation_pins_no_key_of_after_it(desk: Desk, tmp_path: Path) -> None:
    token = desk.token("line-4")
    rotate_key(desk.home, desk.store, desk.clock())
    with pytest.raises(EnrolError, match="the operator revoked the token"):
        enrol(token, tmp_path / "box")
    enrol(desk.token("line-4"), tmp_path / "box")


@pytest.mark.parametrize(
    ("own", "shown", "why"),
    [
        ("other", "other", "another authority"),
        ("other", "true", "not what the authority vouches for"),
        ("a device of the true", "true", "not what the authority vouches for"),
    ],
)
def test_an_intercepted_first_contact_is_refused_and_the_secret_is_not_sent(
    desk: Desk, tmp_path: Path, own: str, shown: str, why: str
) -> None:
    """The one in between has a certificate for the right address: of an authority of its own, or that of an enrolled device."""
    create_ca(tmp_path / "other")
    other, device = issue(tmp_path / "other", "between", server=True), issue(desk.home.pki, "127.0.0.1")
    authority = desk.authority if shown == "true" else credential_of(tmp_path / "other", CA_NAME).certificate
    token = desk.token("line-4")
    with (
        Pretender(authority.read_bytes(), other if own == "other" else device) as between,
        pytest.raises(EnrolError, match=why),
    ):
        enrol(token, tmp_path / "box", url=between.url)
    assert between.heard.startswith(b"GET /v1/authority")
    assert b"POST" not in between.heard
    assert token.secret.hex().encode() not in between.heard
    assert not (tmp_path / "box" / "agent.toml").exists()


def test_a_pretender_hears_the_secret_where_nobody_checks_it(desk: Desk, tmp_path: Path) -> None:
    """The tests above would notice: with a certificate of the true authority the request does arrive."""
    own = issue(desk.home.pki, "enrolment", server=True)
    token = desk.token("line-4")
    with Pretender(desk.authority.read_bytes(), own) as true, pytest.raises(EnrolError, match="not of this protocol"):
        enrol(token, tmp_path / "box", url=true.url)
    sent = json_of(bytes(true.heard))
    assert sent["secret"] == token.secret.hex()
    assert b"PRIVATE" not in true.heard


def test_a_box_takes_no_other_server_of_the_coordinator_for_the_broker_or_the_carrier(
    desk: Desk, tmp_path: Path
) -> None:
    own = issue(desk.home.pki, "line-4")
    tls = TlsFiles(desk.authority, own.certificate, own.key)
    with between(desk, "enrolment", dict) as other:
        port = urlsplit(other.url).port or 0
        with pytest.raises(TransportError, match="of the server 'enrolment', and 'broker' is expected"):
            probe(MqttConfig(HOST, port, "line-4", tls=tls), timeout_s=20)
        with pytest.raises(ssl.SSLError, match="of the server 'enrolment', and 'carrier' is expected"):
            check_ready(other.url, tls)
    assert not other.heard


def test_a_broker_under_an_authority_that_no_coordinator_made_may_have_any_name(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pki, "AUTHORITY_NAME", "Cloud Root")
    authority = create_ca(tmp_path / "cloud").certificate
    server, own = issue(tmp_path / "cloud", "endpoint", server=True), issue(tmp_path / "cloud", "line-4")
    context = TlsFiles(authority, own.certificate, own.key).context()
    with (
        Pretender(b"", server) as cloud,
        socket.create_connection((HOST, urlsplit(cloud.url).port or 0), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=HOST) as secured,
    ):
        assert secured.version() == "TLSv1.3"
