"""One short conversation with the coordinator by a program that is not the agent: hello and welcome, and perhaps a goodbye."""

from __future__ import annotations

import contextlib
import queue
import time
from importlib.metadata import version

from edge_client.config import AgentConfig
from edge_client.errors import NoAnswerError
from edge_client.identity.keys import AgentKeys
from edge_client.messaging.coordinator_trust import CoordinatorTrust
from edge_client.messaging.handshake import Handshake
from edge_client.messaging.message_checks import Incoming
from edge_client.messaging.publisher import Outgoing
from edge_client.session.events import CoordinatorSeen, TurnedAway, Welcomed
from edge_client.store.cohort_secret import mark_in
from edge_client.store.private_store import PrivateStore
from edge_client.transfer.downloads import Downloads
from fedcg.wire.errors import WireError
from fedcg.wire.messages.messages import COORDINATOR, Leave, Left
from fedcg.wire.transport.transport import Delivery, Transport

REPEAT_S = 2.0
INBOX_MAX = 256
UNANSWERED = {  # by what the coordinator's retained status says, None where it does not come
    None: "the broker delivers nothing to this device: it is missing in the access list, or the coordinator has never run",
    False: "the coordinator does not run; its last status says so",
    True: "the coordinator runs and does not know this device: it was revoked or enrolled anew, or its access list is wrong",
}


class Conversation:
    """Hello and welcome, which show that the broker delivers in both directions and the coordinator knows this device; then perhaps leave and left.

    Args:
        config: of a device whose agent does not run.
        keys: its keys.
        store: its private store; nothing is saved in it.
        transport: not started yet.
        leaves: whether it leaves the federation; else it is counted as offline again at the end.
    """

    def __init__(
        self, config: AgentConfig, keys: AgentKeys, store: PrivateStore, transport: Transport, *, leaves: bool
    ) -> None:
        self._config, self._transport, self._leaves = config, transport, leaves
        memory = CoordinatorTrust(store, config.federation, keys.coordinator)
        self._epoch = memory.order.highest[0]
        self._is_online: bool | None = None
        self._inbox: queue.Queue[Delivery | bool] = queue.Queue(INBOX_MAX)
        mark = mark_in(store, config.federation)
        self._handshake = Handshake(config.federation, config.device, version("fedcg-edge"), mark)
        self._outgoing = Outgoing(config.federation, config.device, keys.signing, transport, self._handshake)
        downloads = Downloads(store.partials)
        self._incoming = Incoming(config.federation, config.device, memory, self._handshake, downloads)

    def hold(self, timeout_s: float) -> None:
        """Speak until the coordinator has answered.

        Raises:
            NoAnswerError: it has not in time; says how far the messages came.
        """
        self._outgoing.subscribe(chunks=False)
        self._transport.start(self._heard, self._heard)
        deadline, say_at = time.monotonic() + timeout_s, float("inf")
        try:
            while time.monotonic() < deadline:
                item: Delivery | bool | None = None
                with contextlib.suppress(queue.Empty):
                    item = self._inbox.get(timeout=max(0.0, min(0.25, deadline - time.monotonic())))
                if isinstance(item, Delivery):
                    if self._hear(item):
                        return
                    say_at = min(say_at, time.monotonic()) if self._handshake.is_open else say_at
                elif item is not None:
                    self._handshake.close()
                    say_at = time.monotonic() if item else float("inf")
                if time.monotonic() >= say_at:
                    self._say()
                    say_at = time.monotonic() + REPEAT_S
        finally:
            if not self._leaves:
                self._outgoing.status(online=False)
            self._transport.close()
        raise NoAnswerError(getattr(self._transport, "last_error", None) or UNANSWERED[self._is_online])

    def _heard(self, item: Delivery | bool) -> None:
        with contextlib.suppress(queue.Full):  # both sides repeat what was not answered
            self._inbox.put_nowait(item)

    def _say(self) -> None:
        """What is to be said now: goodbye in a session, else hello."""
        if not self._handshake.is_open:
            self._outgoing.hello(self._epoch)
            return
        own = self._config
        self._outgoing.send(
            Leave(federation=own.federation, sender=own.device, recipient=COORDINATOR, epoch=self._epoch)
        )

    def _hear(self, delivery: Delivery) -> bool:
        """Whether a delivery ends the conversation; what is not of the coordinator, or of another session, changes nothing."""
        with contextlib.suppress(WireError):
            meaning = self._incoming.open(delivery, time.monotonic())
            if isinstance(meaning, TurnedAway):
                raise NoAnswerError(meaning.reason)
            if isinstance(meaning, CoordinatorSeen):
                self._is_online = meaning.online
            elif isinstance(meaning, Welcomed):
                self._epoch = meaning.epoch
                return not self._leaves
            return isinstance(meaning, Left)
        return False
