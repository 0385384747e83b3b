"""amqtt with its leaks closed: who may publish, subscribe and receive is asked of our rules at every step.

Overrides private methods of amqtt 0.12.1 and refuses to start where they are gone. Connections come from `amqtt_broker`.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from amqtt.broker import Broker
from amqtt.contexts import Action, BaseContext
from amqtt.mqtt.disconnect import DisconnectPacket
from amqtt.plugins.base import BaseAuthPlugin, BaseTopicPlugin
from amqtt.session import Session

Rules = Callable[[str, str, str], bool]
"""allowed(identity, action, topic); action is "publish", "subscribe" or "receive"."""

LISTENER = "default"

log = logging.getLogger(__name__)


def common_name(tls: ssl.SSLObject | None) -> str | None:
    """The CN of the verified peer certificate; None without a certificate or without exactly one CN."""
    certificate = tls.getpeercert() if tls is not None else None
    if not certificate:
        return None
    subject: Any = certificate.get("subject", ())
    names = [value for rdn in subject for key, value in rdn if key == "commonName"]
    return names[0] if len(names) == 1 and names[0] else None


def serial_number(tls: ssl.SSLObject | None) -> int:
    """The serial number of the verified peer certificate; 0, which none has, without one."""
    certificate = tls.getpeercert() if tls is not None else None
    return int(str(certificate["serialNumber"]), 16) if certificate else 0


def permits(rules: Rules, device: str | None, action: str, topic: str | None) -> bool:
    """Ask the rules; anything unclear, and any error in them, is a refusal."""
    if not device or not topic:
        return False
    try:
        return rules(device, action, topic) is True
    except Exception:
        log.exception("topic rules failed for %s %s %s", device, action, topic)
        return False


def will_permitted(rules: Rules, device: str | None, topic: str | None) -> bool:
    """A will is a publish: no wildcards, no $ topics, and the rules must allow it."""
    if not topic or topic.startswith("$") or "#" in topic or "+" in topic:
        return False
    return permits(rules, device, Action.PUBLISH.value, topic)


class DevicePlugin(BaseAuthPlugin, BaseTopicPlugin):  # type: ignore[misc]
    """amqtt's view of the rules: the certificate's CN is the client id, and the rules decide on topics."""

    @dataclass
    class Config:
        """Options, filled by amqtt from the value next to the plugin's dotted path."""

        rules: Any  # a Rules; dacite, which checks these types, is not asked to check a callable

    def __init__(self, context: BaseContext) -> None:
        super().__init__(context)
        self.rules: Rules = context.config.rules

    async def authenticate(self, *, session: Session) -> bool:
        """Whether the certificate's common name is the client id, and its will is allowed."""
        device = common_name(session.ssl_object)
        if device is None or device != session.client_id:
            return False
        return not session.will_flag or will_permitted(self.rules, device, session.will_topic)

    async def topic_filtering(
        self, *, session: Session | None = None, topic: str | None = None, action: Action | None = None
    ) -> bool:
        """Whether the rules allow this client this action on this topic."""
        if session is None or action is None:
            return False
        return permits(self.rules, session.client_id, action.value, topic)

    async def on_mqtt_packet_received(self, *, packet: Any, session: Session | None = None) -> None:
        """Forget the will of a client that says goodbye."""
        # amqtt sends the will of a client whose DISCONNECT comes before amqtt began to wait for it
        if session is not None and isinstance(packet, DisconnectPacket):
            session.will_flag = False


class DeviceBroker(Broker):  # type: ignore[misc]
    """amqtt's broker with its leaks of retained messages closed.

    Overrides two private methods of amqtt 0.12.1: pin the version, and let a test prove that they are still called.
    """

    def __init__(self, rules: Rules) -> None:
        for name in ("_topic_filtering", "_publish_retained_messages_for_subscription", "_delete_session"):
            if not hasattr(Broker, name):  # fail closed: without these the leaks would be back
                raise RuntimeError(f"this amqtt has no Broker.{name}; amqtt 0.12.1 is needed")
        self._rules = rules
        self._just_subscribed: set[tuple[str | None, str]] = set()
        self._deliveries: set[asyncio.Task[Any]] = set()
        super().__init__(
            {
                # "external": amqtt opens no socket, connections are handed to it by external_connected()
                "listeners": {LISTENER: {"type": "external"}},
                # an explicit table: the default one allows anonymous clients and loads a deprecated plugin
                "plugins": {f"{DevicePlugin.__module__}.{DevicePlugin.__qualname__}": {"rules": rules}},
            }
        )

    async def _topic_filtering(self, session: Session, topic: str, action: Action) -> bool:
        # Without suspending: amqtt asks this while it iterates over its subscriptions, and a client that subscribes
        # meanwhile would end the iteration with an error and lose the message for everybody after it.
        return permits(self._rules, session.client_id, action.value, topic)

    async def add_subscription(self, subscription: tuple[str, int], session: Session) -> int:
        """Remember who has just subscribed to what, for retained messages."""
        code: int = await super().add_subscription(subscription, session)
        if code != 0x80:
            self._just_subscribed.add((session.client_id, subscription[0]))
        return code

    async def _publish_retained_messages_for_subscription(
        self, subscription: tuple[str, int], session: Session
    ) -> None:
        # amqtt calls this after a SUBSCRIBE, and on connect for every subscription of every client: only the first
        # is right. Tasks instead of waiting, for the reason given in _topic_filtering.
        topic_filter, qos = subscription
        fresh = (session.client_id, topic_filter)
        if fresh not in self._just_subscribed:
            return
        self._just_subscribed.discard(fresh)
        handler = self._get_handler(session)
        if handler is None:
            return
        for topic, kept in list(self.retained_messages.items()):
            if self._matches(topic, topic_filter) and permits(
                self._rules, session.client_id, Action.RECEIVE.value, topic
            ):
                task = asyncio.ensure_future(
                    handler.mqtt_publish(topic, kept.data, min(qos, kept.qos or 0), retain=True)
                )
                self._deliveries.add(task)
                task.add_done_callback(self._delivered)

    def _delivered(self, task: asyncio.Task[Any]) -> None:
        self._deliveries.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.info("a retained message was not delivered: %r", task.exception())

    async def end_session(self, client_id: str) -> None:
        """After a connection ended: mark it so in any case, and forget a clean session at once.

        amqtt leaves a session "connected" when it closes a connection for an invalid topic, and keeps clean sessions
        for up to a second, in which a client that wants a durable session would inherit the clean one.
        """
        session = self.sessions.get(client_id, (None, None))[0]
        if session is None:
            return
        session.transitions.disconnect()
        if session.clean_session:
            await self._delete_session(client_id)
