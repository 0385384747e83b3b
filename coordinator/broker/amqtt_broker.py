"""An MQTT 3.1.1 broker in this process (amqtt 0.12.1), for demos on a machine without Mosquitto; identities by certificate.

It listens on loopback, requires client certificates, and applies the rules of `Topics` at every step. It reads neither the lists of
devices nor the revocation list: deployments use Mosquitto. Overrides private methods of amqtt and refuses to start without them.
"""

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from amqtt.broker import Broker
from amqtt.contexts import Action
from amqtt.mqtt.disconnect import DisconnectPacket
from amqtt.plugins.base import BaseAuthPlugin, BaseTopicPlugin
from amqtt.session import Session

from fedcg.wire.messages.topics import Topics

OVERRIDDEN = ("_create_ssl_context", "_topic_filtering", "_publish_retained_messages_for_subscription")

log = logging.getLogger(__name__)


def identity_of(client_id: str | None) -> str:
    """The identity of a connection: the part of its client id before the dot."""
    return (client_id or "").partition(".")[0]


def is_allowed(client_id: str | None, action: Action, topic: str | None) -> bool:
    """Whether a connection may publish on, subscribe to or receive a topic, in any federation."""
    identity = identity_of(client_id)
    if not identity or not topic:
        return False
    try:
        topics = Topics(topic.split("/")[2])
    except (IndexError, ValueError):
        return False
    if action is Action.PUBLISH:
        return topics.may_publish(identity, topic)
    return topics.may_read(identity, topic)


class CertificatePlugin(BaseAuthPlugin, BaseTopicPlugin):  # type: ignore[misc]
    """Authenticates clients by the common name of their certificates."""

    @dataclass
    class Config:
        """amqtt requires this class; it has no settings."""

    async def authenticate(self, *, session: Session) -> bool:
        """Whether the certificate's common name is the connection's identity, and its will is allowed."""
        subject: Any = session.ssl_object.getpeercert().get("subject", ())
        if identity_of(session.client_id) not in [
            value for names in subject for key, value in names if key == "commonName"
        ]:
            return False
        return not session.will_flag or is_allowed(session.client_id, Action.PUBLISH, session.will_topic)

    async def topic_filtering(
        self, *, session: Session | None = None, topic: str | None = None, action: Action | None = None
    ) -> bool:
        """Whether this client may perform this action on this topic."""
        return session is not None and action is not None and is_allowed(session.client_id, action, topic)

    async def on_mqtt_packet_received(self, *, packet: Any, session: Session | None = None) -> None:
        """Drop the will of a client that disconnects: amqtt sends it if DISCONNECT arrives before amqtt waits for it."""
        if session is not None and isinstance(packet, DisconnectPacket):
            session.will_flag = False


class DemoBroker(Broker):  # type: ignore[misc]
    """amqtt with required certificates, and with retained messages only for clients that have just subscribed.

    Args:
        port: port on loopback.
        tls: the server's TLS context.
    """

    def __init__(self, port: int, tls: ssl.SSLContext) -> None:
        missing = [name for name in OVERRIDDEN if not hasattr(Broker, name)]
        if missing:
            raise RuntimeError(f"this amqtt has no Broker.{missing[0]}; install amqtt 0.12.1")
        self._tls = tls
        self._just_subscribed: set[tuple[str | None, str]] = set()
        self._deliveries: set[asyncio.Task[Any]] = set()
        super().__init__(
            {
                "listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{port}", "ssl": True}},
                "plugins": {f"{CertificatePlugin.__module__}.{CertificatePlugin.__qualname__}": {}},
            }
        )

    def _create_ssl_context(self, _listener: Any) -> ssl.SSLContext:  # amqtt's own does not require a certificate
        return self._tls

    async def _topic_filtering(self, session: Session, topic: str, action: Action) -> bool:
        # Must not suspend: amqtt calls this while it iterates over its subscriptions, and a client that subscribes
        # meanwhile would end the iteration with an error and lose the message for all later subscribers.
        return is_allowed(session.client_id, action, topic)

    async def add_subscription(self, subscription: tuple[str, int], session: Session) -> int:
        """Record which client has just subscribed to which topics, for retained messages."""
        code: int = await super().add_subscription(subscription, session)
        if code != 0x80:
            self._just_subscribed.add((session.client_id, subscription[0]))
        return code

    async def _publish_retained_messages_for_subscription(
        self, subscription: tuple[str, int], session: Session
    ) -> None:
        # amqtt calls this after a SUBSCRIBE, and on connect for every subscription of every client: only the first
        # is right. Uses tasks instead of waiting, for the reason in _topic_filtering.
        topic_filter, qos = subscription
        fresh = (session.client_id, topic_filter)
        handler = self._get_handler(session)
        if fresh not in self._just_subscribed or handler is None:
            return
        self._just_subscribed.discard(fresh)
        for topic, kept in list(self.retained_messages.items()):
            if self._matches(topic, topic_filter) and is_allowed(session.client_id, Action.RECEIVE, topic):
                sending = handler.mqtt_publish(topic, kept.data, min(qos, kept.qos or 0), retain=True)
                delivery = asyncio.ensure_future(sending)
                self._deliveries.add(delivery)
                delivery.add_done_callback(self._deliveries.discard)


async def serve_amqtt(port: int, tls: ssl.SSLContext, ready: Callable[[], None], stop: asyncio.Event) -> None:
    """Serve on 127.0.0.1 until `stop` is set; calls `ready` once connections are accepted."""
    broker = DemoBroker(port, tls)
    await broker.start()
    try:
        ready()
        await stop.wait()
    finally:
        await broker.shutdown()


def run_amqtt(port: int, tls: ssl.SSLContext, ready: Callable[[], None]) -> None:
    """Serve on 127.0.0.1 until SIGINT or SIGTERM."""

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve_amqtt(port, tls, ready, stop)

    asyncio.run(main())
