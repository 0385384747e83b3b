"""The other side of `fedcg bench transport`: the same chunks from paho to paho, with a window and nothing else.

No envelope, no hash, no disk: what a link, a broker and paho with its own thread give to the plainest program.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from fedcg.wire.errors import TransportError
from fedcg.wire.transport.mqtt_config import MqttConfig
from fedcg.wire.transport.mqtt_link import send_at_once

READY_S = 15.0
STALL_S = 60.0
OnMessage = Callable[[str, bytes], None]


def connect(config: MqttConfig, subscribe: str, on_message: OnMessage, in_flight: int) -> paho.Client:
    """A connected client with its loop on paho's own thread.

    Raises:
        TransportError: no connection in time.
    """
    ready = threading.Event()
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id=config.identity, protocol=MQTTProtocolVersion.MQTTv5)
    client.max_inflight_messages_set(in_flight)
    if config.tls is not None:
        client.tls_set_context(config.tls.context())
    client.on_socket_open = send_at_once  # as ours: else each artifact waits 40 ms for a delayed ACK

    def connected(*_: Any) -> None:
        client.subscribe(subscribe, 1)

    client.on_connect = connected
    client.on_subscribe = lambda *_: ready.set()
    client.on_message = lambda _client, _data, message: on_message(message.topic, bytes(message.payload))
    client.connect(config.host, config.port)
    client.loop_start()
    if not ready.wait(READY_S):
        raise TransportError(f"no connection to the broker at {config.address} within {READY_S} s")
    return client


class PlainReceiver:
    """Counts each sender's chunks and sends it the count: after every half window, and at the end of each artifact.

    Args:
        config: the broker.
        subscribe: filter for all senders' chunks.
        acks: the topic to send the count on, by the topic of the chunks.
        chunks: of one artifact.
        window: chunks that one sender may be ahead.
    """

    def __init__(self, config: MqttConfig, subscribe: str, acks: dict[str, str], chunks: int, window: int) -> None:
        self._acks = acks
        self._chunks = chunks
        self._every = max(1, window // 2)
        self._held: dict[str, list[bytes]] = {topic: [] for topic in acks}
        self._client = connect(config, subscribe, self._take, window)

    def close(self) -> None:
        """Disconnect."""
        self._client.disconnect()
        self._client.loop_stop()

    def _take(self, topic: str, payload: bytes) -> None:
        held = self._held[topic]
        held.append(payload)
        if len(held) % self._every == 0 or len(held) == self._chunks:
            self._client.publish(self._acks[topic], len(held).to_bytes(4, "big"), 1)
        if len(held) == self._chunks:
            b"".join(held)
            held.clear()


class PlainSender:
    """Sends artifacts one after the other, at most a window of chunks ahead of the acknowledged count."""

    def __init__(self, config: MqttConfig, chunks_on: str, acks_on: str, window: int) -> None:
        self._chunks_on = chunks_on
        self._window = window
        self._counted = 0
        self._changed = threading.Condition()
        self._client = connect(config, acks_on, self._take, window)

    def send(self, data: bytes, chunk_bytes: int) -> None:
        """Send one artifact and wait until all of it was counted.

        Raises:
            TransportError: nothing was counted for a long time.
        """
        self._counted = 0
        pieces = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
        for index, piece in enumerate(pieces):
            self._wait_for(index + 1 - self._window)
            self._client.publish(self._chunks_on, piece, 1)
        self._wait_for(len(pieces))

    def close(self) -> None:
        """Disconnect."""
        self._client.disconnect()
        self._client.loop_stop()

    def _wait_for(self, count: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._counted >= count, STALL_S):
                raise TransportError("the plain receiver does not answer")

    def _take(self, _topic: str, payload: bytes) -> None:
        with self._changed:
            self._counted = int.from_bytes(payload, "big")
            self._changed.notify()


def run_plain_receiver(
    config: MqttConfig, subscribe: str, acks: dict[str, str], chunks: int, window: int, pipe: Any
) -> None:
    """A process of its own: receive until the other end of the pipe sends something."""
    receiver = PlainReceiver(config, subscribe, acks, chunks, window)
    pipe.send("ready")
    pipe.recv()
    receiver.close()


@dataclass(frozen=True)
class PlainParty:
    """One sender: its connection and topics."""

    mqtt: MqttConfig
    chunks_on: str
    acks_on: str


def run_plain_senders(
    parties: tuple[PlainParty, ...], payloads: tuple[bytes, ...], chunk_bytes: int, window: int, pipe: Any
) -> None:
    """A process of its own: each sender sends all payloads at a signal; gives the seconds it took."""
    senders = [PlainSender(party.mqtt, party.chunks_on, party.acks_on, window) for party in parties]

    def work(sender: PlainSender) -> None:
        for payload in payloads:
            sender.send(payload, chunk_bytes)

    pipe.send("ready")
    pipe.recv()
    began = time.perf_counter()
    with ThreadPoolExecutor(len(senders)) as pool:
        list(pool.map(work, senders))
    pipe.send(time.perf_counter() - began)
    for sender in senders:
        sender.close()
