"""What only a real broker shows: certificates, revocation, protocol versions, limits, restarts."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from coordinator.pki.authority import issue
from fedcg.wire.errors import TransportError
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transport import mqtt
from fedcg.wire.transport.mqtt import MqttConfig, MqttTransport, TlsFiles, probe
from fedcg.wire.transport.mqtt_config import Protocol
from fedcg.wire.transport.transport import Will
from tests.conftest import StartMosquitto
from tests.support.broker.broker_packets import CONNECT, connack, scripted_broker
from tests.support.broker.brokers import DEADLINE_S, DEVICES, HOST, Client, Pki, RunningMosquitto, acl_for, mqtt_client
from tests.support.broker.throttle import Throttle
from tests.support.waiting import wait_until

TOPICS = Topics("links")


@pytest.fixture
def broker(mosquitto: StartMosquitto) -> RunningMosquitto:
    return mosquitto(acl_for(TOPICS.federation))


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    opened: list[Client] = []
    yield opened
    for client in opened:
        client.transport.close()


@pytest.mark.broker
def test_auto_takes_mqtt_5_where_it_is_spoken(broker: RunningMosquitto) -> None:
    assert probe(broker.config("a", "auto")) == "5"


def probed(protocol: Protocol) -> str:
    """What a probe finds at a broker that refuses MQTT 5 and grants 3.1.1."""
    with scripted_broker() as old, ThreadPoolExecutor(1) as threads:
        probing = threads.submit(probe, old.config(protocol))
        peer = old.accept()
        peer.expect(CONNECT)
        peer.send(connack("3.1.1", 1))
        if protocol == "auto":
            old.welcome("3.1.1")
        return probing.result(DEADLINE_S)


def test_auto_falls_back_to_3_1_1_where_5_is_refused() -> None:
    assert probed("auto") == "3.1.1"


def test_asking_for_5_where_only_3_1_1_is_spoken_is_explained() -> None:
    with pytest.raises(TransportError, match="protocol version"):
        probed("5")


@pytest.mark.broker
def test_a_certificate_of_another_authority_is_refused_and_the_causes_are_told(
    broker: RunningMosquitto, pki: Pki, tmp_path: Path
) -> None:
    stranger = Pki.create(tmp_path / "stranger", ("a",)).tls("a")
    tls = TlsFiles(pki.ca, stranger.cert, stranger.key)
    with pytest.raises(TransportError, match="another CA, expired, revoked"):
        probe(MqttConfig(HOST, broker.port, "a", tls=tls, protocol="5"))


@pytest.mark.broker
def test_a_broker_under_another_name_is_not_trusted(broker: RunningMosquitto, pki: Pki) -> None:
    relay = Throttle(broker.port, host="127.0.0.2")
    with pytest.raises(TransportError, match=re.escape("name 127.0.0.2")):
        probe(MqttConfig("127.0.0.2", relay.port, "a", tls=pki.tls("a"), protocol="5"))
    relay.close()


@pytest.mark.broker
def test_a_client_that_a_namesake_threw_out_comes_back(broker: RunningMosquitto, clients: list[Client]) -> None:
    first, second = mqtt_client(broker.config("a")), mqtt_client(broker.config("a"))
    clients += [first, second]
    first.start().await_link()
    second.start().await_link()
    wait_until(lambda: first.links[:2] == [True, False], "the first is thrown out")
    first.await_link(2)
    wait_until(lambda: second.links[:2] == [True, False], "the second is thrown out in turn")


def test_closing_does_not_wait_for_a_broker_that_never_answers(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt, "DRAIN_S", 0.1)
    monkeypatch.setattr(mqtt, "CLOSE_S", 0.1)
    with socket.create_server((HOST, 0)) as mute:
        client = mqtt_client(
            MqttConfig(HOST, mute.getsockname()[1], "a", tls=pki.tls("a"), protocol="5", keepalive_s=600)
        )
        client.start()
        accepted, _ = mute.accept()
        closing = threading.Thread(target=client.transport.close, daemon=True)
        closing.start()
        wait_until(lambda: not closing.is_alive(), "close returns")
        accepted.close()
    wait_until(lambda: "mqtt-a" not in [thread.name for thread in threading.enumerate()], "the thread ends too")


@pytest.mark.broker
def test_a_renewed_certificate_is_used_by_the_next_connection_without_a_will_and_without_losing_a_message(
    broker: RunningMosquitto, pki: Pki, clients: list[Client], tmp_path: Path
) -> None:
    own = pki.tls("a")
    files = TlsFiles(own.ca, tmp_path / "a.pem", tmp_path / "a.key")
    files.cert.write_bytes(own.cert.read_bytes())
    files.key.write_bytes(own.key.read_bytes())
    listener = mqtt_client(broker.config("observer"))
    listener.transport.subscribe(TOPICS.everything())
    device = mqtt_client(
        MqttConfig(HOST, broker.port, "a", tls=files, protocol="5"), Will(TOPICS.status("a"), b"vanished")
    )
    clients += [listener, device]
    listener.start().await_link()
    device.start().await_link()
    issue(pki.directory, "a", life=timedelta(days=1), target=tmp_path)  # the same file names, another pair
    assert files.cert.read_bytes() != own.cert.read_bytes()
    device.transport.publish(TOPICS.up_control("a"), b"before")
    assert isinstance(device.transport, MqttTransport)
    device.transport.reconnect()
    device.await_link(2)
    device.transport.publish(TOPICS.up_control("a"), b"after")
    for word in (b"before", b"after"):
        listener.await_payload(TOPICS.up_control("a"), word)
    assert listener.payloads(TOPICS.status("a")) == []
    assert device.links == [True, False, True]

    files.key.write_bytes(own.key.read_bytes())  # a key that does not fit
    device.transport.reconnect()
    wait_until(lambda: "damaged" in (device.transport.last_error or ""), "the error is kept")  # type: ignore[attr-defined]
    files.cert.write_bytes(own.cert.read_bytes())
    device.await_link(3)


@pytest.mark.broker
@pytest.mark.parametrize("leave", [MqttTransport.close, MqttTransport.reconnect])
def test_who_leaves_while_much_comes_in_leaves_no_will(
    broker: RunningMosquitto,
    clients: list[Client],
    leave: Callable[[MqttTransport], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mqtt, "BACKOFF_FIRST_S", 0.01)
    listener, coordinator = mqtt_client(broker.config("observer")), mqtt_client(broker.config("coordinator"))
    clients += [listener, coordinator]
    listener.transport.subscribe(TOPICS.status("+"))
    listener.start().await_link()
    coordinator.start().await_link()
    is_over = threading.Event()
    flood = threading.Thread(target=_flood, args=(coordinator, is_over), daemon=True)
    flood.start()
    for name in DEVICES * 3:
        device = mqtt_client(broker.config(name), Will(TOPICS.status(name), b"vanished", retain=False))
        device.transport.subscribe(TOPICS.offer)
        clients.append(device.start())
        wait_until(lambda: len(device.deliveries) > 5, "much comes in")  # noqa: B023 - it is over before the next
        assert isinstance(device.transport, MqttTransport)
        leave(device.transport)
        device.await_link(1 if leave is MqttTransport.close else 2)
        device.transport.close()
    is_over.set()
    flood.join()
    for name in DEVICES:  # a will comes before what the same device says later
        device = mqtt_client(broker.config(name)).start().await_link()
        clients.append(device)
        device.transport.publish(TOPICS.status(name), b"here")
        listener.await_payload(TOPICS.status(name), b"here")
    assert {delivery.payload for delivery in listener.deliveries} == {b"here"}


def _flood(client: Client, is_over: threading.Event) -> None:
    while not is_over.is_set():
        while client.transport.backlog.messages < 500:
            client.transport.publish(TOPICS.offer, bytes(60_000), qos=0)
        is_over.wait(0.001)
