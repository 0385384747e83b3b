"""One short conversation with the coordinator by a program that is not the agent: hello and welcome, and perhaps a goodbye."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from importlib.metadata import version

from edge_client.agent import AgentKeys
from edge_client.config import AgentConfig
from edge_client.errors import EnrolError, NoAnswerError
from edge_client.handshake import Handshake
from edge_client.outgoing import Outgoing
from edge_client.remembered import Remembered
from fedcg.wire.errors import OldEpochError, OtherDeviceError, WireError
from fedcg.wire.messages import COORDINATOR, AnyMessage, CoordinatorStatus, Leave, Left, Refusal, Welcome
from fedcg.wire.signing import open_envelope
from fedcg.wire.topics import Topics
from fedcg.wire.transport import Delivery, Transport

REPEAT_S = 2.0
INBOX_MAX = 256
UNANSWERED = {  # by what the coordinator's retained status says, None where it does not come
    None: "the broker delivers nothing to this device: it is missing in the access list, or the coordinator has never run",
    False: "the coordinator does not run; its last status says so",
    True: "the coordinator runs and does not know this device: it was revoked or enrolled anew, or its access list is wrong",
}


def say_goodbye(
    config: AgentConfig,
    keys: AgentKeys,
    transport: Transport,
    memory: Remembered,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Open a session, send a signed `leave` in it, and wait for the signed `left`.

    Raises:
        EnrolError: no confirmation in time.
    """
    try:
        Conversation(config, keys, transport, memory, leaves=True).hold(timeout_s, clock)
    except NoAnswerError as error:
        raise EnrolError(
            f"the coordinator did not confirm within {timeout_s:g} s ({error}). Nothing was erased. Try again, let the operator "
            f"run `fedcg device revoke {config.device}`, or use --without-coordinator"
        ) from error


class Conversation:
    """Hello and welcome, which show that the broker delivers in both directions and the coordinator knows this device; then perhaps leave and left.

    Args:
        config: of a device whose agent does not run.
        keys: its keys.
        transport: not started yet.
        memory: what the device remembers of the coordinator; nothing is saved.
        cohort: mark of its cohort secret, None without one.
        leaves: whether it leaves the federation; else it is counted as offline again at the end.
    """

    def __init__(
        self,
        config: AgentConfig,
        keys: AgentKeys,
        transport: Transport,
        memory: Remembered,
        cohort: str | None = None,
        *,
        leaves: bool,
    ) -> None:
        self._config, self._transport, self._memory, self._leaves = config, transport, memory, leaves
        self._epoch = memory.order.highest[0]
        self._is_online: bool | None = None
        self._handshake = Handshake(config.federation, config.device, version("fedcg-edge"), cohort)
        self._outgoing = Outgoing(config.federation, config.device, keys.signing, transport, self._handshake)

    def hold(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Speak until the coordinator has answered.

        Raises:
            NoAnswerError: it has not in time; says how far the messages came.
        """
        inbox: queue.Queue[Delivery | bool] = queue.Queue(INBOX_MAX)
        self._outgoing.subscribe(chunks=False)
        self._transport.start(_offer(inbox), _offer(inbox))
        deadline, say_at = clock() + timeout_s, float("inf")
        try:
            while clock() < deadline:
                item: Delivery | bool | None = None
                with contextlib.suppress(queue.Empty):
                    item = inbox.get(timeout=max(0.0, min(0.25, deadline - clock())))
                if isinstance(item, Delivery):
                    if self._hear(item):
                        return
                    say_at = min(say_at, clock()) if self._handshake.is_open else say_at
                elif item is not None:
                    self._handshake.close()
                    say_at = clock() if item else float("inf")
                if clock() >= say_at:
                    self._say()
                    say_at = clock() + REPEAT_S
        finally:
            if not self._leaves:
                self._outgoing.status(online=False)
            self._transport.close()
        raise NoAnswerError(getattr(self._transport, "last_error", None) or UNANSWERED[self._is_online])

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
        topics = Topics(self._config.federation)
        with contextlib.suppress(WireError):
            if delivery.topic == topics.keys:
                self._memory.follow(delivery.payload)
                return False
            message = open_envelope(delivery.payload, lambda name: self._memory.key if name == COORDINATOR else None)
            if isinstance(message, CoordinatorStatus):
                self._is_online = message.online
            elif delivery.topic == topics.down_control(self._config.device):
                return self._is_over(message)
        return False

    def _is_over(self, message: AnyMessage) -> bool:
        if message.federation != self._config.federation or message.recipient != self._config.device:
            raise OtherDeviceError(f"a {message.kind} message for somebody else")
        if isinstance(message, Welcome):
            if message.epoch < self._epoch:
                raise OldEpochError(f"a welcome of epoch {message.epoch} after epoch {self._epoch}")
            self._handshake.welcome(message)
            self._epoch = message.epoch
            return not self._leaves
        if isinstance(message, Refusal):
            raise NoAnswerError(self._handshake.refusal(message))
        self._handshake.admit(message)
        return isinstance(message, Left)


def _offer(inbox: queue.Queue[Delivery | bool]) -> Callable[[Delivery | bool], None]:
    def put(item: Delivery | bool) -> None:
        with contextlib.suppress(queue.Full):  # both sides repeat what was not answered
            inbox.put_nowait(item)

    return put
