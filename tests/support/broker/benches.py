"""One bench per broker: connects clients under their identities, and cuts and mends single links."""

import asyncio
import ssl
import threading
from typing import Protocol

from coordinator.pki.authority import credential_of, server_context
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles
from fedcg.wire.transport.mqtt_config import Protocol as MqttVersion
from fedcg.wire.transport.transport import Will
from tests.support.broker.brokers import HOST, Client, Intruder, Pki
from tests.support.broker.memory import Action, MemoryBroker, MemoryTransport
from tests.support.broker.throttle import Throttle
from tests.support.waiting import free_port, wait_until


class Bench(Protocol):
    """What the contract suite needs of a broker."""

    def connect(self, identity: str, will: Will | None = None, *, intrudes: bool = False) -> Client: ...
    def cut(self, identity: str) -> None: ...
    def mend(self, identity: str) -> None: ...
    def close(self) -> None: ...


class MemoryBench:
    def __init__(self, topics: Topics) -> None:
        def rules(identity: str, action: Action, topic: str) -> bool:
            return topics.may_publish(identity, topic) if action == "publish" else topics.may_read(identity, topic)

        self._broker = MemoryBroker(rules)
        self._clients: list[Client] = []

    def connect(self, identity: str, will: Will | None = None, *, intrudes: bool = False) -> Client:
        self._clients.append(Client(MemoryTransport(self._broker, identity, will)))
        return self._clients[-1]

    def cut(self, identity: str) -> None:
        self._broker.drop(identity)

    def mend(self, identity: str) -> None:
        self._broker.restore(identity)

    def close(self) -> None:
        for client in self._clients:
            client.transport.close()


class MqttBench:
    """Each client reaches the broker through a relay of its own, so that its link can be cut alone."""

    def __init__(self, port: int, pki: Pki, version: MqttVersion) -> None:
        self._port = port
        self._pki = pki
        self._version = version
        self._relays: dict[str, Throttle] = {}
        self._clients: list[Client] = []

    def connect(self, identity: str, will: Will | None = None, *, intrudes: bool = False) -> Client:
        relay = self._relays.setdefault(identity, Throttle(self._port))
        tls: TlsFiles = self._pki.tls(identity)
        config = MqttConfig(HOST, relay.port, identity, tls=tls, protocol=self._version)
        self._clients.append(Client((Intruder if intrudes else MqttTransport)(config, will)))
        return self._clients[-1]

    def cut(self, identity: str) -> None:
        self._relays[identity].cut()

    def mend(self, identity: str) -> None:
        self._relays[identity].mend()

    def close(self) -> None:
        for client in self._clients:
            client.transport.close()
        for relay in self._relays.values():
            relay.close()


class AmqttServer:
    """The embedded broker on a thread of its own."""

    def __init__(self, pki: Pki) -> None:
        self.port = free_port()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(pki),), daemon=True)
        self._thread.start()
        wait_until(self._ready.is_set, "amqtt is ready")

    async def _serve(self, pki: Pki) -> None:
        from coordinator.broker.amqtt_broker import serve_amqtt

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        tls = server_context(pki.directory, credential_of(pki.directory, "broker"), ssl.CERT_REQUIRED)
        await serve_amqtt(self.port, tls, self._ready.set, self._stop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
