"""The TLS listeners for devices beside a running service: who may fetch and put what, revocation in the handshake, lives of connections, and who waits for whom."""

import contextlib
import http.client
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from coordinator.http.device_api import MEMBER_S
from coordinator.members.enrolment import certificate_record
from coordinator.paths import CRL_NAME
from coordinator.pki.authority import write_revocations
from coordinator.rounds.records import DeviceState
from coordinator.service.service import Service
from edge_client.config import load_config
from edge_client.identity.credentials import load_keys, renew
from edge_client.identity.enrol import enrol
from edge_client.link.https_client import check_ready
from fedcg.wire.errors import TransportError
from fedcg.wire.messages.enrolment_messages import ENROL_PATH, RENEW_PATH, load_certificate
from fedcg.wire.messages.schemas import Carrier, Manifest, Outcome
from fedcg.wire.tls import ServerRole
from fedcg.wire.transfer.chunks import ARTIFACTS_PATH, READY_PATH, UPDATES_PATH, span_of
from tests.support.broker.brokers import DEVICES, HOST, Pki
from tests.support.coordinator.carriers import Answer, ask, carrying, connect
from tests.support.coordinator.enrolments import Desk
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.world import MakeWorld, RunningService, World
from tests.support.waiting import free_port, wait_until


@dataclass
class Bench:
    """A federation of a and b, whose updates the test itself puts."""

    world: World
    pki: Pki
    port: int
    ahead_s: float = 0.0
    service: Service = field(init=False)

    def clock(self) -> float:
        return time.monotonic() + self.ahead_s

    def device(self, name: str) -> FakeDevice:
        return self.world.devices[name]

    def announced(self, name: str) -> tuple[Manifest, bytes]:
        """The update that a device has announced and been granted."""
        device = self.device(name)
        wait_until(lambda: bool(device.asked_for), f"{name} is granted chunks")
        assert device.pending is not None
        return device.pending

    def ready(self, name: str) -> int:
        return ask(self.port, self.pki, name, READY_PATH).status

    def get(self, name: str, artifact: str, wanted: str | None = None) -> Answer:
        headers = {} if wanted is None else {"Range": wanted}
        return ask(self.port, self.pki, name, f"{ARTIFACTS_PATH}/{artifact}", headers=headers)

    def put(self, name: str, manifest: Manifest, data: bytes, first: int, count: int, **headers: str) -> Answer:
        span = span_of(manifest.artifact, first, count)
        given = {key.replace("_", "-"): value for key, value in headers.items()}
        wanted = {"Content-Range": span.content_range, **given}
        body = data[span.first : span.last + 1]
        return ask(self.port, self.pki, name, f"{UPDATES_PATH}/{manifest.artifact.id}", "PUT", body, wanted)

    def revoke(self, name: str) -> None:
        self.world.store.register.end_membership(name, DeviceState.REVOKED, "stolen", time.time())
        self.ahead_s += MEMBER_S

    def receipt(self, name: str) -> Outcome:
        wait_until(lambda: bool(self.device(name).receipts()), f"{name} has a receipt")
        return self.device(name).receipts()[-1].outcome


@pytest.fixture
def bench(tmp_path: Path, make_world: MakeWorld) -> Iterator[Bench]:
    world = make_world(1)
    for device in world.devices.values():
        device.carrier = Carrier.HTTPS
    made = Bench(world, Pki.create(tmp_path / "pki", ("coordinator", "observer", *DEVICES)), free_port())
    with RunningService(world, lambda service: carrying(made.pki.directory, made.port, service, made.clock)) as running:
        made.service = running.service
        world.start_devices()
        yield made


def test_an_aggregate_is_fetched_whole_and_by_range(bench: Bench) -> None:
    base, name = bench.world.base, bench.world.base_id
    whole = bench.get("a", name)
    assert (whole.status, whole.body) == (200, base)
    part = bench.get("b", name, "bytes=100-299")
    assert (part.status, part.headers["Content-Range"]) == (206, f"bytes 100-299/{len(base)}")
    assert part.body == base[100:300]
    for end in ("", len(base) + 1000):
        rest = bench.get("a", name, f"bytes={len(base) - 7}-{end}")
        assert (rest.status, rest.body) == (206, base[-7:])
    beyond = bench.get("a", name, f"bytes={len(base)}-")
    assert (beyond.status, beyond.headers["Content-Range"]) == (416, f"bytes */{len(base)}")
    for wrong in ("bytes=-5", "bytes=9-3", "bytes=0-1,5-6", "lines=0-1", "bytes=0-" + "9" * 40):
        assert bench.get("a", name, wrong).status == 400, wrong


def test_updates_and_files_are_not_fetched(bench: Bench) -> None:
    manifest, data = bench.announced("b")
    assert bench.put("b", manifest, data, 0, manifest.artifact.chunks).status == 204
    bench.world.wait_event("update_stored")
    for name in ("a", "b"):
        assert bench.get(name, manifest.artifact.id).status == 404
    assert bench.get("a", "0" * 64).status == 404
    assert ask(bench.port, bench.pki, "a", f"{ARTIFACTS_PATH}/../database.sqlite").status in (404, 422)
    assert ask(bench.port, bench.pki, "a", f"{UPDATES_PATH}/{manifest.artifact.id}").status == 405


def test_an_update_put_in_pieces_is_counted_once(bench: Bench) -> None:
    manifest, data = bench.announced("a")
    chunks = manifest.artifact.chunks
    assert bench.put("a", manifest, data, 3, chunks - 3).status == 204
    assert bench.put("a", manifest, data, 3, 2).status == 204  # again: harmless
    assert bench.put("a", manifest, data, 0, 3).status == 204
    assert bench.receipt("a") is Outcome.ACCEPTED
    assert bench.put("a", manifest, data, 0, chunks).status == 404  # nothing is under way any more
    stored = bench.world.wait_event("update_stored")
    assert (stored["client"], stored["received"]) == ("a", chunks)
    assert len(bench.world.events("update_stored")) == 1
    assert bench.world.artifacts.get(manifest.artifact.id) == data


def test_a_device_cannot_put_an_update_as_another(bench: Bench) -> None:
    manifest, data = bench.announced("b")
    bench.announced("a")
    assert bench.put("a", manifest, b"x" * len(data), 0, manifest.artifact.chunks).status == 404
    assert bench.put("b", manifest, data, 0, manifest.artifact.chunks).status == 204
    assert bench.receipt("b") is Outcome.ACCEPTED
    assert bench.world.wait_event("update_stored")["received"] == manifest.artifact.chunks


def test_an_altered_byte_is_refused_by_its_sha256_and_the_true_bytes_still_count(bench: Bench) -> None:
    manifest, data = bench.announced("a")
    altered = bytearray(data)
    altered[len(data) // 2] ^= 1
    refused = bench.put("a", manifest, bytes(altered), 0, manifest.artifact.chunks)
    assert refused.status == 422
    assert b"sha256" in refused.body
    bench.device("a").asked_for.clear()
    wait_until(lambda: bool(bench.device("a").asked_for), "it is granted again")
    assert bench.put("a", manifest, data, 0, manifest.artifact.chunks).status == 204
    assert bench.receipt("a") is Outcome.ACCEPTED


def test_bodies_that_are_not_what_their_headers_say_take_nothing(bench: Bench) -> None:
    manifest, data = bench.announced("a")
    size, chunk = manifest.artifact.size, manifest.artifact.chunk_bytes
    for wrong in (
        f"bytes 0-{chunk - 1}/{size + 1}",  # of another size
        f"bytes 1-{chunk}/{size}",  # not at a chunk's place
        f"bytes 0-{chunk - 2}/{size}",  # a part of a chunk
        "bytes 0-10/*",
        f"bytes 0-{size}/{size}",
        "",
    ):
        assert bench.put("a", manifest, data, 0, 1, Content_Range=wrong).status == 400, wrong
    assert bench.put("a", manifest, data, 0, 1, Content_Range=f"bytes 0-9/{1 << 39}").status == 413
    longer = bench.put("a", manifest, data, 0, 3, Content_Range=span_of(manifest.artifact, 0, 2).content_range)
    assert longer.status == 400
    assert bench.put("a", manifest, data, 0, manifest.artifact.chunks).status == 204
    assert bench.world.wait_event("update_stored")["repeated"] == 0  # nothing of the others had counted


def test_nobody_gets_in_without_a_certificate_of_the_authority_or_with_older_tls(bench: Bench, tmp_path: Path) -> None:
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.load_verify_locations(bench.pki.ca)
    foreign = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    foreign.load_verify_locations(bench.pki.ca)
    stranger = Pki.create(tmp_path / "foreign", ("a",)).tls("a")
    foreign.load_cert_chain(stranger.cert, stranger.key)
    older = bench.pki.tls("a").context(ServerRole.CARRIER)
    older.minimum_version = older.maximum_version = ssl.TLSVersion.TLSv1_2
    for context in (anonymous, foreign, older):
        with pytest.raises(REFUSED):
            status_of(connect(bench.port, context))


def status_of(connection: http.client.HTTPSConnection, method: str = "GET", path: str = READY_PATH) -> int:
    with contextlib.closing(connection):
        connection.request(method, path, b"{}" if method == "POST" else None)
        return connection.getresponse().status


def test_a_certificate_of_no_registered_device_is_refused_and_logged(bench: Bench) -> None:
    assert bench.ready("a") == 204
    for identity in ("c", "observer", "coordinator"):
        assert bench.ready(identity) == 403
        assert ask(bench.port, bench.pki, identity, f"{ARTIFACTS_PATH}/{bench.world.base_id}").status == 403
    logged = bench.world.events("carrier_refused")
    assert [event["certificate"] for event in logged] == ["c"]  # the others within the same ten seconds
    with pytest.raises(TransportError, match=r"refused \(403\): this certificate does not belong to a present member"):
        check_ready(f"https://{HOST}:{bench.port}", bench.pki.tls("c"))


def test_a_revoked_device_can_neither_fetch_nor_put(bench: Bench) -> None:
    manifest, data = bench.announced("a")
    assert bench.put("a", manifest, data, 0, 2).status == 204
    bench.revoke("a")
    assert bench.get("a", bench.world.base_id).status == 403
    assert bench.put("a", manifest, data, 2, manifest.artifact.chunks).status == 403
    assert bench.get("b", bench.world.base_id).status == 200


def test_the_certificate_of_a_replaced_box_is_refused_although_the_new_one_has_its_name(bench: Bench) -> None:
    assert bench.ready("a") == 204
    old = load_certificate(bench.pki.tls("a").cert.read_bytes())
    record = replace(certificate_record("a", old, time.time()), revoked_at=time.time())
    bench.world.store.register.add_certificate(record)
    bench.ahead_s += MEMBER_S
    assert bench.ready("a") == 403


def test_revocation_ends_a_fetch_that_is_under_way(bench: Bench) -> None:
    name = bench.world.artifacts.put(bytes(48_000_000))
    bench.service.published.allow(name)
    connection = connect(bench.port, bench.pki.tls("a").context(ServerRole.CARRIER))
    connection.request("GET", f"{ARTIFACTS_PATH}/{name}")
    response = connection.getresponse()
    assert response.read(1000) == bytes(1000)
    bench.revoke("a")
    with pytest.raises((http.client.IncompleteRead, OSError)):
        response.read()
    connection.close()


def test_a_device_has_a_few_requests_at_once_and_others_are_not_held_up(bench: Bench) -> None:
    manifest, _ = bench.announced("a")
    span = span_of(manifest.artifact, 0, 1)
    held = []
    for _ in range(4):
        connection = connect(bench.port, bench.pki.tls("a").context(ServerRole.CARRIER))
        connection.putrequest("PUT", f"{UPDATES_PATH}/{manifest.artifact.id}")
        connection.putheader("Content-Range", span.content_range)
        connection.putheader("Content-Length", str(span.length))
        connection.endheaders()
        held.append(connection)
    wait_until(lambda: bench.get("a", bench.world.base_id).status == 429, "the fifth is refused")
    assert bench.get("b", bench.world.base_id).status == 200
    for connection in held:
        connection.close()
    wait_until(lambda: bench.get("a", bench.world.base_id).status == 200, "there is room again")


@pytest.mark.parametrize(
    ("carriers", "is_broadcast"), [((Carrier.HTTPS, Carrier.HTTPS), False), ((Carrier.HTTPS, Carrier.MQTT), True)]
)
def test_an_aggregate_is_broadcast_only_when_somebody_listens(
    make_world: MakeWorld, carriers: tuple[Carrier, Carrier], is_broadcast: bool
) -> None:
    world = make_world(1)
    for device, carrier in zip(world.devices.values(), carriers, strict=True):
        device.carrier = carrier
    with RunningService(world):
        world.start_devices()
        a = world.devices["a"]
        wait_until(lambda: bool(a.asked_for), "a has what it needs and is granted chunks of its update")
        assert (a.topics.aggregate in a.received_on) == is_broadcast


REFUSED = (ssl.SSLError, ConnectionError)


@pytest.mark.parametrize("was_deleted", [False, True])
def test_a_revoked_certificate_fails_in_the_handshake_once_a_list_names_it(bench: Bench, was_deleted: bool) -> None:
    """Also where the file was deleted before, and the new list knows of none before it."""
    assert [bench.ready(name) for name in ("a", "b")] == [204, 204]
    now = datetime.now(timezone.utc)
    if was_deleted:
        (bench.pki.directory / CRL_NAME).unlink()
    serial = load_certificate(bench.pki.tls("a").cert.read_bytes()).serial_number
    write_revocations(bench.pki.directory, [(serial, now)], now=now + timedelta(seconds=2 * was_deleted))
    with pytest.raises(REFUSED):
        bench.ready("a")
    assert bench.ready("b") == 204


def test_nobody_gets_in_while_the_revocation_list_is_unreadable(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    crl = bench.pki.directory / CRL_NAME
    kept = crl.rename(crl.with_name("kept.pem"))
    for _ in range(3):
        with pytest.raises(REFUSED):
            bench.ready("b")
    assert caplog.text.count("revocation list") == 1
    kept.rename(crl)
    assert bench.ready("b") == 204


def test_no_session_is_resumed_because_that_would_skip_the_certificate(bench: Bench) -> None:
    connection = connect(bench.port, bench.pki.tls("a").context(ServerRole.CARRIER))
    connection.request("GET", READY_PATH)
    assert connection.getresponse().status == 204
    assert isinstance(connection.sock, ssl.SSLSocket)
    session = connection.sock.session
    connection.close()
    assert session is None or not session.has_ticket


def test_strangers_refusals_delay_no_renewal_and_those_of_devices_are_limited_too(desk: Desk, tmp_path: Path) -> None:
    enrol(desk.token("line-4"), tmp_path / "box")
    answers = [status_of(connect(desk.port, desk.context()), "POST", ENROL_PATH) for _ in range(21)]
    assert set(answers) == {422, 429}, "strangers at this address have to wait"
    assert len(desk.events("enrolment_refused")) == answers.count(422)
    assert desk.events("enrolment_limited")
    config = load_config(tmp_path / "box" / "agent.toml", {})
    renew(config, load_keys(config).signing)
    assert len(desk.events("certificate_renewed")) == 1
    assert config.tls is not None
    own = desk.context()
    own.load_cert_chain(config.tls.cert, config.tls.key)
    assert 429 in [status_of(connect(desk.port, own), "POST", RENEW_PATH) for _ in range(21)]
