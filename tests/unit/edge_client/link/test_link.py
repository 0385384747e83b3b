"""The link to the coordinator: a device follows its new key and no forged one, and carries artifacts over HTTPS."""

import contextlib
import errno
import http.client
import json
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from edge_client import config as edge_config
from edge_client.cli.doctor.checks import examine
from edge_client.config import TlsSection
from edge_client.errors import ConfigError
from edge_client.link import https_client
from edge_client.link.artifact_transfer import Downloads
from edge_client.link.coordinator_link import CoordinatorTrust
from edge_client.link.https_client import Direction, Line
from edge_client.session.signals import Wanted
from edge_client.store.private_store import PrivateStore
from fedcg.agent_config import render_agent_config
from fedcg.wire.errors import WireError
from fedcg.wire.messages.envelopes import PinnedKey, SigningKey, make_link, seal
from fedcg.wire.messages.schemas import COORDINATOR, EVERYONE, ArtifactRef, Carrier, Hello, KeyChain, KeyLink
from fedcg.wire.transport.mqtt_config import TlsFiles
from tests.support.broker.brokers import HOST, Pki
from tests.support.edge.world import DEVICE, FEDERATION, World, make_config
from tests.support.waiting import free_port, wait_until

KEYS = [SigningKey.generate() for _ in range(4)]
LINKS = tuple(make_link(FEDERATION, n + 1, 1, KEYS[n], KEYS[n + 1].public) for n in range(3))


def chain(links: tuple[KeyLink, ...]) -> KeyChain:
    return KeyChain(federation=FEDERATION, sender=COORDINATOR, recipient=EVERYONE, epoch=1, links=links)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.coordinator.key = KEYS[0]
    made.enrolled_key = KEYS[0].public
    yield made
    made.close()


def rotate(world: World, number: int, links: tuple[KeyLink, ...] | None = None) -> None:
    """As the real coordinator: the chain first, then everything else anew, signed with the new key."""
    coordinator = world.coordinator
    coordinator.key = KEYS[number]
    coordinator.publish(coordinator.topics.keys, chain(links or LINKS[:number]), retain=True)
    coordinator.come_online()


def pinned(world: World) -> PinnedKey:
    return PrivateStore(world.config.store).pinned_key(KEYS[0].public)


def refusals(world: World) -> list[str]:
    return [str(event["detail"]) for event in world.events("refused")]


def following(world: World, number: int) -> None:
    """The agent is connected, and has followed the coordinator to a later key."""
    world.connect()
    rotate(world, number)
    wait_until(lambda: bool(world.events("coordinator_key")), "the key is followed")


def test_a_device_that_was_off_for_two_rotations_hears_what_it_refused_at_first(world: World) -> None:
    """The retained offer comes before the chain: it is refused, then asked for again."""
    coordinator = world.coordinator
    world.start_agent()
    world.stop_agent()
    rotate(world, 2)
    coordinator.offer(world.spec, world.aggregate(), 1)
    subscribed: list[str] = []
    agent_topics = [coordinator.topics.offer, coordinator.topics.coordinator, coordinator.topics.keys]
    send = world.broker.send_retained

    def in_the_worst_order(transport: object, topic_filter: str) -> None:
        subscribed.append(topic_filter)
        if topic_filter == coordinator.topics.keys and subscribed.count(topic_filter) == 1:
            for topic in agent_topics:
                send(transport, topic)  # type: ignore[arg-type]
        elif topic_filter not in agent_topics or subscribed.count(topic_filter) > 1:
            send(transport, topic_filter)  # type: ignore[arg-type]

    world.broker.send_retained = in_the_worst_order  # type: ignore[method-assign]
    world.start_agent()
    coordinator.wait(Hello)
    coordinator.work_until(lambda: bool(world.events("offer")), "the offer is heard in the end")
    assert any("not signed by it" in refusal for refusal in refusals(world))
    assert pinned(world) == PinnedKey(KEYS[2].public, 2)


def test_after_a_rotation_the_old_key_is_refused_also_by_a_restarted_agent(world: World) -> None:
    coordinator = world.coordinator
    following(world, 1)
    for _ in range(2):
        known = len(refusals(world))
        coordinator.key = KEYS[0]
        coordinator.epoch += 1
        coordinator.come_online()
        wait_until(lambda: len(refusals(world)) > known, "the old key is refused")  # noqa: B023
        assert "not signed by it" in refusals(world)[-1]
        assert pinned(world) == PinnedKey(KEYS[1].public, 1)
        world.stop_agent()
        coordinator.key = KEYS[1]
        coordinator.come_online()
        world.start_agent()
        coordinator.wait(Hello)  # what comes from now on is no message that the broker kept


@pytest.mark.parametrize(
    ("number", "attack", "signed_by", "why"),
    [
        (1, chain((make_link(FEDERATION, 2, 1, KEYS[3], KEYS[2].public),)), 2, "without the key that is pinned"),
        (1, chain((LINKS[1].model_copy(update={"epoch": 7}),)), 2, "not signed by the key that it replaces"),
        (1, chain((make_link("other", 2, 1, KEYS[1], KEYS[2].public),)), 2, "not signed by the key that it replaces"),
        (1, chain(LINKS[:1]).model_copy(update={"federation": "other"}), 2, "of federation 'other'"),
        (2, chain(LINKS[:1]), 1, "a replay"),
    ],
    ids=["another key's", "altered", "another federation's link", "another federation's chain", "an earlier one"],
)
def test_a_forged_or_replayed_chain_is_refused_counted_and_told_with_its_reason(
    world: World, number: int, attack: KeyChain, signed_by: int, why: str
) -> None:
    following(world, number)
    world.coordinator.publish(world.coordinator.topics.keys, attack, key=KEYS[signed_by])
    wait_until(lambda: any(why in refusal for refusal in refusals(world)), why)
    assert 0 not in [event["count"] for event in world.events("refused")]
    assert pinned(world) == PinnedKey(KEYS[number].public, number)


def remembered(root: Path, enrolled: SigningKey = KEYS[0]) -> CoordinatorTrust:
    return CoordinatorTrust(PrivateStore.open(root, FEDERATION, DEVICE), FEDERATION, enrolled.public)


def test_a_device_that_is_enrolled_anew_starts_from_the_key_that_came_with_it(tmp_path: Path) -> None:
    memory = remembered(tmp_path)
    memory.follow(seal(chain(LINKS[:1]), KEYS[1]))
    memory.save()
    fresh = remembered(tmp_path, enrolled=KEYS[3])
    assert fresh.key == KEYS[3].public
    with pytest.raises(WireError):
        fresh.follow(seal(chain(LINKS[:2]), KEYS[2]))
    assert fresh.follow(seal(chain(LINKS), KEYS[3])) is None
    assert remembered(tmp_path).key == KEYS[1].public  # the earlier pin stands until the new one is saved


REF = ArtifactRef(id="a" * 64, size=100_000, chunk_bytes=1000)
ENDLESS_BYTES = 200_000_000
OTHER = ArtifactRef(id="b" * 64, size=5_000, chunk_bytes=1000)


@dataclass
class Road:
    """What a direction uses and reports to: carries when it is let."""

    runs: list[tuple[str, int, int]] = field(default_factory=list)
    reports: list[Exception | None] = field(default_factory=list)
    error: Exception | None = None
    may_go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    closed: bool = False

    def carry(self, _line: object, source: str, first: int, count: int) -> None:
        self.runs.append((source, first, count))
        self.may_go.acquire()
        if self.error is not None:
            raise self.error

    def hang_up(self) -> None:
        self.may_go.release()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def road() -> Road:
    return Road()


@pytest.fixture
def direction(road: Road) -> Iterator[Direction[str]]:
    made: Direction[str] = Direction("up", cast(Line, road), road.carry, lambda _, error: road.reports.append(error))
    made.start()
    yield made
    made.close()
    assert road.closed


def test_an_artifact_is_not_taken_twice_and_places_that_it_does_not_have_are_left_out(
    direction: Direction[str], road: Road
) -> None:
    direction.add("x", REF, ((3, 1), (98, 1 << 20), (100, 5)))
    wait_until(lambda: road.runs == [("x", 3, 1)], "the first is under way")
    direction.add("x", REF, ((0, 9),))
    direction.add("y", OTHER, ((0, 1),))
    direction.add("z", OTHER, ((0, 1),))
    for _ in range(3):
        road.may_go.release()
    wait_until(lambda: not direction.is_busy, "all is carried")
    assert road.runs == [("x", 3, 1), ("x", 98, 2), ("y", 0, 1)]


def test_a_failure_forgets_the_artifact_and_it_can_be_asked_for_again(direction: Direction[str], road: Road) -> None:
    road.error = TimeoutError("nothing moves")
    direction.add("x", REF, ((0, 2), (10, 2)))
    road.may_go.release()
    wait_until(lambda: road.reports == [road.error], "the failure is reported")
    assert not direction.is_busy
    road.error = None
    direction.add("x", REF, ((0, 1),))
    road.may_go.release()
    wait_until(lambda: len(road.reports) == 2, "it is carried")
    assert (road.reports[-1], road.runs) == (None, [("x", 0, 2), ("x", 0, 1)])


def test_a_forgotten_artifact_that_waits_is_not_carried(direction: Direction[str], road: Road) -> None:
    direction.add("y", OTHER, ((0, 1),))
    wait_until(lambda: bool(road.runs), "it is under way")
    direction.add("x", REF, ((0, 1),))
    direction.forget(REF.id)
    road.may_go.release()
    wait_until(lambda: not direction.is_busy, "all is carried")
    assert road.runs == [("y", 0, 1)]


class Talkative(BaseHTTPRequestHandler):
    """Answers `/small` with a few bytes and everything else with very many; `sent` has what each answer came to."""

    protocol_version = "HTTP/1.1"
    connections: ClassVar[list[object]] = []
    sent: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        size = 10 if self.path == "/small" else ENDLESS_BYTES
        self.connections.append(self.client_address)
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        sent = 0
        with contextlib.suppress(OSError):
            while sent < size:
                sent += self.wfile.write(bytes(min(size - sent, 1_000_000)))
        self.close_connection = sent < size
        self.sent.append(sent)

    def log_message(self, *_: object) -> None:
        pass


class PlainLine(Line):
    """A line without TLS."""

    def _connect(self) -> http.client.HTTPSConnection:
        if self._connection is None:
            self._connection = cast(http.client.HTTPSConnection, http.client.HTTPConnection(self._host, self._port))
        return self._connection


@pytest.mark.parametrize(("path", "connections"), [("/small", 1), ("/large", 2)])
def test_an_answer_without_end_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, connections: int
) -> None:
    monkeypatch.setattr(https_client, "READY_PATH", path)
    Talkative.connections.clear()
    Talkative.sent.clear()
    with ThreadingHTTPServer((HOST, 0), Talkative) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        line = PlainLine(f"https://{HOST}:{server.server_port}", TlsFiles(tmp_path, tmp_path, tmp_path))
        for _ in range(2):
            line.ready()
        wait_until(lambda: len(Talkative.sent) == 2, "both answers ended")
        line.close()
        server.shutdown()
    assert max(Talkative.sent) < ENDLESS_BYTES
    assert len(set(Talkative.connections)) == connections


def test_https_is_switched_on_with_one_word_and_needs_an_address(tmp_path: Path) -> None:
    path, url = tmp_path / "agent.toml", "https://coordinator.example:8445"
    place: dict[str, Any] = {"host": HOST, "port": 1, "preset": "mosquitto"}
    path.write_text(render_agent_config(FEDERATION, DEVICE, **place, carrier_url=None))
    assert edge_config.load_config(path, {}).carrier is Carrier.MQTT
    for name, value, why in (
        ("CARRIER", "https", "carrier_url"),
        ("CARRIER", "pigeon", "carrier"),
        ("CARRIER_URL", "http://plain:1", "carrier_url"),
    ):
        with pytest.raises(ConfigError, match=why):
            edge_config.load_config(path, {f"FEDCG_AGENT_{name}": value})
    text = render_agent_config(FEDERATION, DEVICE, **place, carrier_url=url)
    path.write_text(text.replace('carrier = "mqtt"', 'carrier = "https"'))
    config = edge_config.load_config(path, {})
    assert (config.carrier, config.carrier_url) == (Carrier.HTTPS, url)


def test_a_download_that_is_wanted_no_more_leaves_no_file(tmp_path: Path) -> None:
    downloads = Downloads(PrivateStore.open(tmp_path, FEDERATION, DEVICE).partials)
    downloads.want((Wanted("aggregate", REF, 0.0),), 0.0)
    assert [ref for ref, _ in downloads.needs(0.0)] == [REF]
    assert any(REF.id in path.name for path in tmp_path.rglob("*"))
    downloads.want((), 1.0)
    assert not downloads.are_pending
    assert not any(REF.id in path.name for path in tmp_path.rglob("*"))


def test_doctor_says_which_carrier_works(tmp_path: Path, pki: Pki) -> None:
    def finding(config: edge_config.AgentConfig) -> tuple[str, str]:
        found = next(item for item in examine(config, datetime.now(timezone.utc)) if item.check == "carrier")
        return found.state, found.detail + found.advice

    assert finding(make_config(tmp_path)) == ("ok", "artifacts are sent over the broker")
    tls, url = pki.tls("a"), f"https://{HOST}:{free_port()}"
    update = {"carrier": Carrier.HTTPS, "carrier_url": url, "tls": TlsSection(ca=tls.ca, cert=tls.cert, key=tls.key)}
    state, told = finding(make_config(tmp_path).model_copy(update=update))
    assert state == "failed"
    assert "[carrier] in coordinator.toml" in told


def test_the_pin_is_for_its_owner_only_and_a_cut_in_the_middle_of_writing_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = remembered(tmp_path)
    memory.follow(seal(chain(LINKS[:1]), KEYS[1]))
    memory.save()
    kept = tmp_path / "coordinator.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert json.loads(kept.read_text())["key"] == KEYS[1].public.hex
    memory.follow(seal(chain(LINKS[:2]), KEYS[2]))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "cut")))
        with pytest.raises(OSError, match="cut"):
            memory.save()
    assert memory.key == KEYS[2].public  # it counts in this process all the same
    again = remembered(tmp_path)
    assert again.key == KEYS[1].public
    assert again.follow(seal(chain(LINKS[:2]), KEYS[2])) == PinnedKey(KEYS[2].public, 2)
    memory.save()
    assert remembered(tmp_path).key == KEYS[2].public
