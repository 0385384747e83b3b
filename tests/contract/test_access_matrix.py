"""Who may connect, publish and read: every named case on a Mosquitto with the folder of `fedcg deploy mosquitto`.

Each refusal stands beside the same thing done rightly, on the same broker, so that none of them passes because nothing works.
"""

import itertools
import socket
import ssl
import string
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from coordinator.paths import BROKER_NAME
from coordinator.pki.authority import Credential, create_ca, credential_of, issue
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import connection_name
from fedcg.wire.transport.transport import Will
from tests.support.broker.broker_plant import FEDERATION, TOPICS, Plant, open_plant
from tests.support.broker.brokers import Client, Intruder
from tests.support.commands import run_fedcg
from tests.support.coordinator.homes import bundle, message_key
from tests.support.waiting import wait_until

pytestmark = pytest.mark.broker
ACCEPTED, NOT_AUTHORIZED = 0, 5
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def plant() -> Iterator[Plant]:
    with tempfile.TemporaryDirectory(prefix="fedcg-matrix-") as folder:
        Path(folder).chmod(0o755)  # pytest's own folders are closed to the user mosquitto
        with open_plant(Path(folder), "deployed") as made:
            made.command("device", "revoke", "c", "--reason", "stolen")
            yield made


# ------------------------------------------------------------------ who gets in


def greet(plant: Plant, context: ssl.SSLContext | None, client_id: str) -> int | None:
    """The broker's answer to an MQTT 3.1.1 CONNECT over this TLS, or None when it did not even answer."""
    name = client_id.encode()
    body = b"\x00\x04MQTT\x04\x02\x00\x3c" + struct.pack(">H", len(name)) + name
    try:
        with socket.create_connection(("127.0.0.1", plant.port), timeout=10) as plain:
            link = plain if context is None else context.wrap_socket(plain, server_hostname="127.0.0.1")
            with link:
                link.sendall(bytes([0x10, len(body)]) + body)
                answer = link.recv(4)
    except OSError:  # ssl.SSLError is one
        return None
    return answer[3] if len(answer) == 4 else None


def context_with(
    plant: Plant, own: Credential | None, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = newest
    context.load_verify_locations(plant.ca)
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def bundled(plant: Plant, name: str) -> Credential:
    files = plant.tls(name)
    return Credential(files.cert, files.key)


def of_a_foreign_authority(plant: Plant, folder: Path) -> Credential:
    create_ca(folder)
    return issue(folder, "a")


def expired(plant: Plant, folder: Path) -> Credential:
    for name in ("ca.pem", "ca.key"):
        (folder / name).write_bytes((plant.home.pki / name).read_bytes())
    return issue(
        folder, "a", now=datetime.now(timezone.utc) - timedelta(days=30), life=timedelta(days=1), target=folder
    )


SHOWN: dict[str, Callable[[Plant, Path], Credential | None]] = {
    "the right certificate": lambda plant, _: bundled(plant, "a"),
    "no certificate": lambda *_: None,
    "foreign CA": of_a_foreign_authority,
    "expired": expired,
    "revoked": lambda plant, _: bundled(plant, "c"),
    "the broker's own certificate": lambda plant, _: credential_of(plant.home.pki, BROKER_NAME),
}


@pytest.mark.parametrize("case", SHOWN)
def test_only_a_valid_certificate_of_the_authority_gets_in(plant: Plant, tmp_path: Path, case: str) -> None:
    own = SHOWN[case](plant, tmp_path)
    name = "c" if case == "revoked" else BROKER_NAME if "broker" in case else "a"
    answer = greet(plant, context_with(plant, own), name)
    assert (answer == ACCEPTED) == (case == "the right certificate"), f"{case}: CONNACK {answer}"


def test_tls_1_2_and_plain_text_are_refused(plant: Plant) -> None:
    own = bundled(plant, "a")
    assert greet(plant, context_with(plant, own), "a") == ACCEPTED
    assert greet(plant, context_with(plant, own, ssl.TLSVersion.TLSv1_2), "a") is None
    assert greet(plant, None, "a") is None


# ------------------------------------------------------------------ who publishes and receives what


@dataclass
class Scene:
    """A, the honest B, the coordinator and an observer of everything."""

    plant: Plant
    intruder: Client
    victim: Client
    coordinator: Client
    observer: Client

    def fence(self) -> None:
        """Wait until a message published now has reached the intruder and the observer: earlier ones have arrived, or never will."""
        mark = unique("fence")
        self.coordinator.transport.publish(TOPICS.offer, mark)
        for client in (self.intruder, self.observer):
            client.await_payload(TOPICS.offer, mark)


def unique(text: str) -> bytes:
    return f"{text} {next(_NUMBERS)}".encode()


@pytest.fixture
def scene(plant: Plant) -> Iterator[Scene]:
    clients = [
        plant.client("a", TOPICS.offer, *EAVESDROPPED, kind=Intruder),
        plant.client("b", TOPICS.down_control("b"), TOPICS.down_chunk("b"), TOPICS.offer),
        plant.client("coordinator", TOPICS.up_control("+"), TOPICS.up_chunk("+"), TOPICS.status("+")),
        plant.client("observer", TOPICS.everything()),
    ]
    for client in clients:
        client.start().await_link()
    yield Scene(plant, *clients)
    plant.close_clients()


EAVESDROPPED = (
    *(TOPICS.down_control("b"), TOPICS.down_chunk("b"), TOPICS.up_control("b"), TOPICS.status("b")),
    TOPICS.down_control("b").replace("/b/", "/+/"),
    *("#", TOPICS.everything(), "+/+/+/+/+/+/+"),
    f"$share/group/{TOPICS.down_control('b')}",
)
SPOKEN_AS_B = (TOPICS.up_control("b"), TOPICS.up_chunk("b"), TOPICS.status("b"))
SPOKEN_AS_COORDINATOR = (
    *(TOPICS.offer, TOPICS.coordinator, TOPICS.keys, TOPICS.aggregate),
    *(TOPICS.down_control("b"), TOPICS.down_chunk("b")),
)


def test_a_receives_nothing_of_b_by_any_filter_and_b_receives_it(scene: Scene) -> None:
    secrets: list[bytes] = []
    for topic in (TOPICS.down_control("b"), TOPICS.down_chunk("b")):
        secrets.append(unique("for b"))
        scene.coordinator.transport.publish(topic, secrets[-1])
        scene.victim.await_payload(topic, secrets[-1])
    for topic in SPOKEN_AS_B:
        secrets.append(unique("by b"))
        scene.victim.transport.publish(topic, secrets[-1], retain=True)
        scene.coordinator.await_payload(topic, secrets[-1])
        scene.observer.await_payload(topic, secrets[-1])
    scene.fence()
    assert {delivery.payload for delivery in scene.intruder.deliveries}.isdisjoint(secrets)
    scene.intruder.transport.close()
    # neither are retained messages delivered
    late = scene.plant.client("a", TOPICS.offer, *EAVESDROPPED, kind=Intruder)
    scene.intruder = late.start().await_link()
    scene.fence()
    assert {delivery.payload for delivery in late.deliveries}.isdisjoint(secrets)


@pytest.mark.parametrize("what", ["B", "the coordinator"])
def test_what_a_publishes_in_anothers_name_reaches_no_subscriber(scene: Scene, what: str) -> None:
    theirs, rightful = (SPOKEN_AS_B, scene.victim) if what == "B" else (SPOKEN_AS_COORDINATOR, scene.coordinator)
    for topic in theirs:
        forged, genuine = unique("forged"), unique("genuine")
        for qos, retain in itertools.product((0, 1), (False, True)):
            scene.intruder.transport.publish(topic, forged, qos=qos, retain=retain)
        own = unique("its own")  # after the forged ones on the same connection, so those were handled when it comes
        scene.intruder.transport.publish(TOPICS.up_control("a"), own)
        scene.observer.await_payload(TOPICS.up_control("a"), own)
        rightful.transport.publish(topic, genuine)
        scene.observer.await_payload(topic, genuine)
        assert forged not in scene.observer.payloads(topic), topic


def test_a_certificate_of_a_with_the_client_id_of_b_gets_nothing_of_b_and_leaves_b_alone(scene: Scene) -> None:
    plant = scene.plant
    assert greet(plant, context_with(plant, bundled(plant, "a")), "b") in (NOT_AUTHORIZED, ACCEPTED)
    thief = plant.client("b", TOPICS.down_control("b"), shown="a", kind=Intruder).start()
    assert isinstance(thief.transport, MqttTransport)
    transport = thief.transport
    wait_until(lambda: transport.attempts > 1 or True in thief.links, "it was refused, or let in under its own name")
    secret = unique("for b")
    scene.coordinator.transport.publish(TOPICS.down_control("b"), secret)
    scene.victim.await_payload(TOPICS.down_control("b"), secret)
    scene.victim.transport.publish(TOPICS.up_control("b"), secret)
    scene.coordinator.await_payload(TOPICS.up_control("b"), secret)
    assert scene.victim.links == [True]
    assert thief.deliveries == []


def test_nothing_on_a_boxs_card_of_the_cohort_cuts_it_off_and_its_message_key_would(scene: Scene) -> None:
    plant, own = scene.plant, bundled(scene.plant, "a")

    def connect_as_b(word: str) -> None:
        secret = bytes.fromhex(word) if len(word) % 2 == 0 and set(word) <= set(string.hexdigits) else word.encode()
        greet(plant, context_with(plant, own), f"b.{connection_name(FEDERATION, secret)}")

    card = run_fedcg("cohort", "card", "--config", bundle(plant.home, "b") / "agent.toml").stdout.split()
    for word in card:
        connect_as_b(word)
    words = unique("for b")
    scene.coordinator.transport.publish(TOPICS.down_control("b"), words)
    scene.victim.await_payload(TOPICS.down_control("b"), words)
    assert scene.victim.links == [True]
    connect_as_b(message_key(plant.home, "b"))
    wait_until(lambda: False in scene.victim.links, "who has the message key cuts it off")


def test_a_will_in_anothers_name_is_not_published_and_ones_own_is(scene: Scene) -> None:
    scene.intruder.transport.close()
    for topic, arrives in ((TOPICS.status("b"), False), (TOPICS.status("a"), True)):
        words = unique("gone")
        dying = scene.plant.client("a", will=Will(topic, words)).start()
        transport = dying.transport
        assert isinstance(transport, MqttTransport)
        wait_until(lambda: True in dying.links or transport.attempts > 1, "it is let in or refused")  # noqa: B023
        usurper = scene.plant.client("a", TOPICS.offer).start().await_link()  # takes its place: the will is due
        scene.intruder = usurper
        if arrives:
            scene.observer.await_payload(topic, words)
        scene.fence()
        assert (words in scene.observer.payloads(topic)) == arrives
        dying.transport.close()
        usurper.transport.close()


def test_the_access_list_has_a_section_per_device_and_a_revoked_one_may_read_no_more_than_that(plant: Plant) -> None:
    assert plant.folder is not None
    lines = (plant.folder / "acl").read_text().splitlines()
    assert [line for line in lines if line.startswith("user ")] == [
        f"user {name}" for name in ("lists-writer", "lists-reader", "coordinator", "observer", "a", "b", "c")
    ]  # c is revoked
    assert lines[lines.index("user c") + 1 :] == [f"topic read {TOPICS.down_control('c')}"]
