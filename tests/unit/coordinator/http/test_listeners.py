"""The TLS listeners for boxes beside a running service: revocation in the handshake, lives of connections, and who waits for whom."""

import http.client
import ssl
import threading
from asyncio.sslproto import _SSLProtocolTransport
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from coordinator.http import device_api
from coordinator.http.device_api import hang_up
from coordinator.paths import CRL_NAME
from coordinator.pki.authority import write_revocations
from edge_client.config import load_config
from edge_client.identity.credentials import load_keys, renew
from edge_client.identity.enrol import enrol
from fedcg.wire.messages.enrolment_messages import ENROL_PATH, load_certificate
from fedcg.wire.messages.schemas import Carrier, Welcome
from fedcg.wire.tls import ServerRole
from fedcg.wire.transfer.chunks import READY_PATH
from tests.support.broker.brokers import DEVICES, Pki
from tests.support.coordinator.carriers import ask, carrying, connect
from tests.support.coordinator.enrolments import Desk
from tests.support.coordinator.world import MakeWorld, RunningService, World
from tests.support.waiting import free_port, wait_until

REFUSED = (ssl.SSLError, ConnectionError)


class Site:
    """A service of a and b with its carrier, and an authority of its own."""

    def __init__(self, root: Path, world: World) -> None:
        self.pki = Pki.create(root / "pki", ("coordinator", *DEVICES))
        self.world = world
        self.port = free_port()

    def ready(self, device: str) -> int:
        return ask(self.port, self.pki, device, READY_PATH).status


@pytest.fixture
def site(tmp_path: Path, make_world: MakeWorld) -> Iterator[Site]:
    made = Site(tmp_path, make_world(1))
    for device in made.world.devices.values():
        device.carrier = Carrier.HTTPS
    with RunningService(made.world, lambda service: carrying(made.pki.directory, made.port, service)):
        made.world.start_devices()
        yield made


def test_a_revoked_certificate_fails_in_the_handshake_as_soon_as_the_list_names_it(site: Site) -> None:
    assert [site.ready(name) for name in ("a", "b")] == [204, 204]
    serial = load_certificate(site.pki.tls("a").cert.read_bytes()).serial_number
    write_revocations(site.pki.directory, [(serial, datetime.now(timezone.utc))])
    with pytest.raises(REFUSED):
        site.ready("a")
    assert site.ready("b") == 204


def test_a_list_made_after_its_file_was_deleted_is_honoured_by_the_running_listener(site: Site) -> None:
    assert site.ready("a") == 204
    (site.pki.directory / CRL_NAME).unlink()
    serial = load_certificate(site.pki.tls("a").cert.read_bytes()).serial_number
    now = datetime.now(timezone.utc)
    write_revocations(site.pki.directory, [(serial, now)], now=now + timedelta(seconds=2))
    with pytest.raises(REFUSED):
        site.ready("a")
    assert site.ready("b") == 204


def test_nobody_gets_in_while_the_revocation_list_cannot_be_read(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    crl = site.pki.directory / CRL_NAME
    kept = crl.rename(crl.with_name("kept.pem"))
    for _ in range(3):
        with pytest.raises(REFUSED):
            site.ready("b")
    assert caplog.text.count("revocation list") == 1
    kept.rename(crl)
    assert site.ready("b") == 204


def test_no_session_is_resumed_because_that_would_skip_the_certificate(site: Site) -> None:
    connection = connect(site.port, site.pki.tls("a").context(ServerRole.CARRIER))
    connection.request("GET", READY_PATH)
    assert connection.getresponse().status == 204
    assert isinstance(connection.sock, ssl.SSLSocket)
    session = connection.sock.session
    connection.close()
    assert session is None or not session.has_ticket


def test_reads_of_the_carrier_that_hang_hold_up_no_round(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than asyncio has threads of its own; a hello is answered after a call of the database."""
    go = threading.Event()
    reading: list[None] = []

    def hang(*_: object) -> None:
        reading.append(None)
        go.wait()

    monkeypatch.setattr(device_api._MemberCheck, "_read", hang)
    held = [connect(site.port, site.pki.tls(name).context(ServerRole.CARRIER)) for name in ("a", "b") for _ in range(8)]
    for connection in held:
        connection.request("GET", READY_PATH)
    wait_until(lambda: len(reading) >= device_api.CARRIER_THREADS, "the carrier's threads hang")
    device = site.world.devices["a"]
    welcomes = len(device.of(Welcome))
    device.hello()
    try:
        wait_until(lambda: len(device.of(Welcome)) > welcomes, "the hello is answered")
    finally:
        go.set()
        for connection in held:
            connection.close()


def refused(desk: Desk, path: str, context: ssl.SSLContext) -> int:
    """The status of a request that says nothing."""
    connection = http.client.HTTPSConnection("127.0.0.1", desk.port, context=context)
    connection.request("POST", path, b"{}")
    status = connection.getresponse().status
    connection.close()
    return status


def test_refusals_of_strangers_delay_no_renewal_and_those_of_devices_are_limited_too(
    desk: Desk, tmp_path: Path
) -> None:
    enrol(desk.token("line-4"), tmp_path / "box")
    wait_until(lambda: refused(desk, ENROL_PATH, desk.context()) == 429, "strangers at this address have to wait")
    config = load_config(tmp_path / "box" / "agent.toml", {})
    renew(config, load_keys(config).signing)
    assert len(desk.events("certificate_renewed")) == 1
    assert config.tls is not None
    own = desk.context()
    own.load_cert_chain(config.tls.cert, config.tls.key)
    assert 429 in [refused(desk, "/v1/renew", own) for _ in range(21)]


def test_a_connection_that_closed_by_itself_a_moment_ago_is_hung_up_on_without_an_error() -> None:
    closed = _SSLProtocolTransport(None, None)  # type: ignore[arg-type]  # as asyncio leaves one
    hang_up(closed)
    assert closed.is_closing()
