"""Enrolment over real HTTPS: a real listener, the real client, impostors, and somebody on the path with a certificate of the coordinator's own authority."""

import http.client
import json
import os
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from coordinator.config import EnrolmentSettings
from coordinator.errors import EnrolmentError, HomeError
from coordinator.http import device_api as listeners
from coordinator.members.enrolment import enrol_line, ids_in, revoke_token
from coordinator.paths import BROKER_NAME, Home
from coordinator.pki import authority as pki
from coordinator.pki.authority import CA_NAME, create_ca, credential_of, issue
from coordinator.pki.signing_keys import rotate_key
from coordinator.token_buckets import Rate
from edge_client.config import load_config
from edge_client.errors import EnrolError
from edge_client.identity.credentials import TlsKey, load_keys
from edge_client.identity.enrol import Folder, enrol
from edge_client.identity.enrolment_client import ask
from edge_client.link.https_client import check_ready
from fedcg.listening import Caps, Connections
from fedcg.wire.errors import TransportError
from fedcg.wire.messages import enrolment_messages
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.transport.mqtt import probe
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles
from tests.support.broker.brokers import HOST
from tests.support.coordinator.enrolments import FEDERATION, Desk, Pretender, json_of, running_desk


def request_of(
    token: enrolment_messages.Token, device: str, tls: TlsKey, signing: SigningKey, **changes: Any
) -> enrolment_messages.EnrolRequest:
    proof = signing.sign(enrolment_messages.enrolment_statement(token.id, device, tls.digest, signing.public.hex)).hex()
    values: dict[str, Any] = {
        "token": token.id,
        "secret": token.secret.hex(),
        "device": device,
        "request": tls.request(device),
        "signing_key": signing.public.hex,
        "proof": proof,
        "nonce": "7" * 32,
    }
    return enrolment_messages.EnrolRequest(**{**values, **changes})


def send(desk: Desk, request: enrolment_messages.EnrolRequest) -> enrolment_messages.EnrolAnswer:
    return ask(desk.url, enrolment_messages.ENROL_PATH, request, enrolment_messages.EnrolAnswer, desk.context())


def raw(desk: Desk, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, Any]]:
    with closing(http.client.HTTPSConnection("127.0.0.1", desk.port, context=desk.context(), timeout=10)) as link:
        link.request(method, path, body)
        response = link.getresponse()
        return response.status, json.loads(response.read())


def test_one_step_makes_a_device_that_is_ready_to_run_and_whose_keys_never_left(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "box"
    enrolled = enrol(desk.token("line-4", labels=("north", "pilot"), site="hall 3"), out, data="/images")
    assert (enrolled.device, enrolled.federation) == ("line-4", FEDERATION)
    config = load_config(out / "agent.toml", {})
    assert (config.device, config.federation, config.data.root) == ("line-4", FEDERATION, Path("/images"))
    assert (config.broker.host, config.broker.port, config.enrolment.url) == ("127.0.0.1", 8883, desk.url)
    keys = load_keys(config)
    assert keys.coordinator == SigningKey.load(desk.home.signing_key).public
    certificate = enrolment_messages.load_certificate((out / "tls" / "device.pem").read_bytes())
    certificate.verify_directly_issued_by(enrolment_messages.load_certificate(desk.authority.read_bytes()))
    assert certificate.subject.rfc4514_string() == "CN=line-4"
    assert 29 <= (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days <= 31
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE((out / "tls").stat().st_mode) == 0o700
    for secret in (out / "signing.key", out / "tls" / "device.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    known = desk.store.device("line-4")
    assert known is not None
    assert (known.public_key, known.site) == (keys.signing.public.hex, "hall 3")
    assert desk.store.register.labels("line-4")["line-4"] == ["north", "pilot"]
    (event,) = desk.events("device_enrolled")
    assert (event["client"], event["reloaded"]) == ("line-4", False)  # no broker runs here


@pytest.mark.parametrize("setting", ["", "ignoreboth"])
def test_the_line_for_a_shell_enrols_and_leaves_no_token_in_the_history(
    desk: Desk, tmp_path: Path, setting: str
) -> None:
    program, history = tmp_path / "bin" / "fedcg", tmp_path / "history"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fedcg "$@"\n')
    program.chmod(0o755)
    (tmp_path / "my images").mkdir()
    token = desk.token()
    line = enrol_line(token, FEDERATION, str(tmp_path / "my images"))
    named = line.replace("$(uname -n ", "$(echo Line.4 ")  # the name of the machine that runs the test may be no id
    assert named != line
    variables = {"PATH": f"{program.parent}:{os.environ['PATH']}", "HISTFILE": str(history), "HISTCONTROL": setting}
    typed, environment = f"echo before\n{named}\nexit\n", {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    shell = ["setsid", "bash", "--norc", "-i"]
    session = subprocess.run(shell, input=typed, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert "Enrolled as line-4" in session.stdout, session.stdout + session.stderr
    assert load_config(tmp_path / FEDERATION / "agent.toml", {}).data.root == tmp_path / "my images"
    assert history.read_text().split("\n") == ["echo before", "exit", ""]
    again = subprocess.run(["bash", "-c", named], env=environment, cwd=tmp_path, capture_output=True)
    assert again.returncode != 0, "the token was used"


@pytest.mark.parametrize("devices", ["a-1..a-201", "a-2..a-1", "a-1..b-2", "a-1..a-9999999", "..", ""])
def test_a_range_of_ids_has_one_beginning_and_a_bound(devices: str) -> None:
    assert ids_in("cam08..cam10") == ["cam08", "cam09", "cam10"]
    assert len(ids_in("line-1..line-200")) == 200
    with pytest.raises(EnrolmentError, match="range of at most 200 ids"):
        ids_in(devices)


def test_the_coordinator_keeps_no_secret_of_a_token(desk: Desk) -> None:
    token = desk.token("line-4")
    kept = b"".join(path.read_bytes() for path in desk.home.root.glob("database.sqlite*"))
    assert token.id.encode() in kept
    for form in (token.secret, token.secret.hex().encode(), token.text.encode()):
        assert form not in kept


def test_a_used_token_is_refused_for_other_keys_and_nothing_changes(desk: Desk, tmp_path: Path) -> None:
    token = desk.token()
    enrol(token, tmp_path / "first", device="line-4")
    before = desk.store.device("line-4")
    for device in ("line-4", "line-5"):
        with pytest.raises(EnrolError, match="already used by device 'line-4'"):
            enrol(token, tmp_path / f"second-{device}", device=device)
    assert desk.store.device("line-4") == before
    assert desk.store.device("line-5") is None
    assert len(desk.store.register.certificates()) == 1
    assert [event["reason"] for event in desk.events("enrolment_refused")] == [
        f"token {token.id}: the token was already used by device 'line-4'"
    ] * 2


def test_a_replayed_request_changes_nothing_and_gives_only_the_certificate_of_the_same_keys(desk: Desk) -> None:
    token, tls, signing = desk.token("line-4"), TlsKey.generate(), SigningKey.generate()
    request = request_of(token, "line-4", tls, signing)
    first = send(desk, request)
    assert send(desk, request) == first
    again = send(desk, request_of(token, "line-4", tls, signing))
    assert again.model_copy(update={"signature": first.signature}) == first
    assert len(desk.store.register.certificates()) == len(desk.events("device_enrolled")) == 1
    desk.ahead_s = 1000.0
    with pytest.raises(EnrolError, match="already used"):
        send(desk, request)


def test_after_a_lost_answer_the_same_command_finishes_the_enrolment(desk: Desk, tmp_path: Path) -> None:
    token, out = desk.token("line-4"), tmp_path / "box"
    enrol(token, out)
    (out / "agent.toml").unlink()
    for lost in ("tls/device.pem", "tls/ca.pem", "coordinator.pub"):
        (out / lost).unlink()
    assert enrol(token, out).config.exists()
    assert len(desk.store.register.certificates("line-4")) == 1


def test_an_expired_a_revoked_and_a_guessed_token_are_refused_with_their_reason(desk: Desk, tmp_path: Path) -> None:
    expired, revoked, known = desk.token("a", hours=0.5), desk.token("b", hours=100.0), desk.token("c", hours=100.0)
    desk.ahead_s = 1801.0
    revoke_token(desk.store, revoked.id, desk.clock())
    guessed = known.model_copy(update={"secret": b"g" * 32, "device": "c"})
    for token, why in (
        (expired, "expired"),
        (revoked, "the operator revoked"),
        (guessed, "not valid on this coordinator"),
        (known.model_copy(update={"id": "f" * 16, "device": "c"}), "not valid on this coordinator"),
    ):
        with pytest.raises(EnrolError, match=why):
            enrol(token, tmp_path / token.id / why.split()[0])
    assert desk.store.devices() == []
    assert [event["reason"].split(": ")[1] for event in desk.events("enrolment_refused")] == [
        "the token has expired",
        "the operator revoked the token",
        "wrong secret",
        "unknown id",
    ]
    assert {event["address"] for event in desk.events("enrolment_refused")} == {"127.0.0.1"}


def test_the_log_of_a_request_without_a_token_holds_nothing_of_what_it_says(desk: Desk) -> None:
    evil = "x\n2026-11-26 06:00:00 [info] FORGED\x1b[2J"
    valid = {"token": "0" * 16, "secret": "0" * 64, "device": "forged-name", "request": "x", "signing_key": "0" * 64}
    for content in ({evil: 1}, {**valid, "proof": "0" * 128, evil: 1}, {**valid, "proof": "0" * 128}):
        raw(desk, "POST", enrolment_messages.ENROL_PATH, json.dumps(content).encode())
    refused = desk.events("enrolment_refused")
    assert len(refused) == 3
    assert "forged" not in json.dumps(refused).lower()


def test_a_token_enrols_only_the_device_that_it_is_bound_to(desk: Desk, tmp_path: Path) -> None:
    token = desk.token("line-4")
    with pytest.raises(EnrolError, match="for device 'line-4' only"):
        enrol(token, tmp_path / "box", device="line-5")
    request = request_of(token, "line-5", TlsKey.generate(), SigningKey.generate())
    with pytest.raises(EnrolError, match="for device 'line-4' only"):
        send(desk, request)
    assert desk.store.devices() == []


def test_an_id_that_is_taken_or_reserved_is_refused_and_the_token_stays_good(desk: Desk, tmp_path: Path) -> None:
    enrol(desk.token(), tmp_path / "first", device="line-4")
    token = desk.token()
    with pytest.raises(EnrolError, match="device 'line-4' already exists"):
        enrol(token, tmp_path / "second", device="line-4")
    reserved = request_of(token, "coordinator", TlsKey.generate(), SigningKey.generate())
    with pytest.raises(EnrolError, match="reserved"):
        send(desk, reserved)
    enrol(token, tmp_path / "third", device="line-5")


def rsa_request(device: str) -> str:
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, device)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def test_keys_must_be_shown_to_be_the_boxs_own(desk: Desk) -> None:
    token, tls, signing = desk.token("line-4"), TlsKey.generate(), SigningKey.generate()
    for changes, why in (
        ({"signing_key": SigningKey.generate().public.hex}, "not signed by its message key"),
        ({"request": TlsKey.generate().request("line-4")}, "not signed by its message key"),
        ({"request": tls.request("line-5")}, "not signed, or not for 'line-4'"),
        ({"request": rsa_request("line-4")}, "not a P-256 key"),
        ({"request": "no request"}, "can't be read"),
    ):
        with pytest.raises(EnrolError, match=why):
            send(desk, request_of(token, "line-4", tls, signing, **changes))
    assert desk.store.devices() == []


def test_requests_are_bounded_and_strict(home: Home) -> None:
    with running_desk(home, per_address=Rate(100, 1.0)) as desk:
        good = request_of(desk.token("line-4"), "line-4", TlsKey.generate(), SigningKey.generate())
        values = json.loads(good.model_dump_json())
        assert (
            raw(desk, "POST", enrolment_messages.ENROL_PATH, b"{" + b" " * enrolment_messages.MAX_BODY_BYTES)[0] == 413
        )
        wrong: tuple[object, ...] = (
            {**values, "extra": 1},
            {**values, "device": 4},
            {**values, "secret": "short"},
            {**values, "device": "../x"},
            [],
        )
        for changed in wrong:
            status, answer = raw(desk, "POST", enrolment_messages.ENROL_PATH, json.dumps(changed).encode())
            assert status == 422
            assert good.secret not in json.dumps(answer)
        assert raw(desk, "POST", enrolment_messages.ENROL_PATH, b"not json")[0] == 422
        assert raw(desk, "GET", "/api/v1/devices", None)[0] == 404
        assert raw(desk, "GET", "/openapi.json", None)[0] == 404
        assert desk.store.devices() == []


def test_of_boxes_that_show_one_token_at_once_exactly_one_gets_in(desk: Desk, tmp_path: Path) -> None:
    token = desk.token()

    def attempt(number: int) -> str:
        try:
            return enrol(token, tmp_path / f"box-{number}", device=f"line-{number}").device
        except EnrolError as error:
            return str(error)

    with ThreadPoolExecutor(4) as boxes:
        outcomes = list(boxes.map(attempt, range(4)))
    admitted = [device.id for device in desk.store.devices()]
    assert len(admitted) == 1
    assert sorted(outcome for outcome in outcomes if outcome.startswith("line-")) == admitted
    assert sum(f"already used by device '{admitted[0]}'" in outcome for outcome in outcomes) == 3


def test_a_port_that_is_taken_is_reported_with_the_setting(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = EnrolmentSettings(port=other.getsockname()[1])
        with (
            pytest.raises(HomeError, match=r"the port under \[enrolment\]"),
            listeners.listening("enrolment", settings, "127.0.0.1", Connections(Caps(8, 8))),
        ):
            pass


def test_a_folder_that_holds_a_device_or_other_things_is_left_alone(desk: Desk, tmp_path: Path) -> None:
    enrol(desk.token("a"), tmp_path / "box")
    before = {path: path.read_bytes() for path in (tmp_path / "box").rglob("*") if path.is_file()}
    with pytest.raises(EnrolError, match="already contains a device"):
        enrol(desk.token("b"), tmp_path / "box")
    assert {path: path.read_bytes() for path in (tmp_path / "box").rglob("*") if path.is_file()} == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(EnrolError, match=r"thesis\.tex"):
        enrol(desk.token("b"), tmp_path / "full")
    assert Folder(tmp_path / "full").signing_key.exists() is False


def test_a_coordinator_that_is_not_there_and_a_url_that_is_none_are_reported(home: Home, tmp_path: Path) -> None:
    with running_desk(home) as desk:
        token = desk.token("a")
    with pytest.raises(EnrolError, match="connection refused: is the coordinator running"):
        enrol(token, tmp_path / "box")
    for url in ("http://127.0.0.1:1", "127.0.0.1:1", "https://127.0.0.1:1/path", "https://127.0.0.1:high"):
        with pytest.raises(EnrolError, match="--url"):
            enrol(token, tmp_path / "box", url=url)


Change = Callable[[dict[str, Any]], dict[str, Any]]


def between(desk: Desk, role: str, change: Change) -> Pretender:
    """Somebody with the certificate and key of one server, who passes requests on to the true one and alters the answers."""
    authority = desk.authority

    def respond(request: bytes) -> bytes:
        body = json.dumps(json_of(request)).encode()
        asked = Request(desk.url + enrolment_messages.ENROL_PATH, body, {"Content-Type": "application/json"})  # noqa: S310 - https, on loopback
        with urlopen(asked, context=ssl.create_default_context(cafile=str(authority)), timeout=20) as answer:  # noqa: S310
            return json.dumps(change(json.loads(answer.read()))).encode()

    return Pretender(authority.read_bytes(), credential_of(desk.home.pki, role), respond)


def test_the_brokers_key_can_not_play_the_enrolment_listener(desk: Desk, tmp_path: Path) -> None:
    """Before the role was checked the secret arrived, and the box pinned the key of the one in between."""
    theirs, token = SigningKey.generate().public.hex, desk.token("line-4")
    with (
        between(desk, BROKER_NAME, lambda answer: {**answer, "coordinator_key": theirs}) as thief,
        pytest.raises(EnrolError, match=r"for the server 'broker'.*'enrolment' is expected.*Nothing secret was sent"),
    ):
        enrol(token, tmp_path / "box", url=thief.url)
    assert token.secret.hex().encode() not in thief.heard
    assert b"POST" not in thief.heard
    assert not (tmp_path / "box" / "coordinator.pub").exists()
    assert desk.store.devices() == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"coordinator_key": "5" * 64}, "a different message key than the token"),
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
        ("other", "true", "the certificate of .* is not valid"),
        ("a device of the true", "true", "the certificate of .* is not valid"),
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


def test_a_box_takes_no_other_server_of_the_coordinator_for_broker_or_carrier(desk: Desk, tmp_path: Path) -> None:
    own = issue(desk.home.pki, "line-4")
    tls = TlsFiles(desk.authority, own.certificate, own.key)
    with between(desk, "enrolment", dict) as other:
        port = urlsplit(other.url).port or 0
        with pytest.raises(TransportError, match="for the server 'enrolment', but 'broker' is expected"):
            probe(MqttConfig(HOST, port, "line-4", tls=tls), timeout_s=20)
        with pytest.raises(ssl.SSLError, match="for the server 'enrolment', but 'carrier' is expected"):
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
