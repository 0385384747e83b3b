"""One short conversation with the coordinator by a program that is not the agent: hello and welcome, and perhaps a goodbye."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from importlib.metadata import version

from edge_client.agent import AgentKeys
from edge_client.cohort import mark_of
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
        _converse(_Conversation(config, keys, transport, memory, leaves=True), transport, timeout_s, clock)
    except NoAnswerError as error:
        raise EnrolError(
            f"the coordinator did not confirm within {timeout_s:g} s ({error}). Nothing was erased. Try again, let the operator "
            f"run `fedcg device revoke {config.device}`, or use --without-coordinator"
        ) from error


def greet(
    config: AgentConfig,
    keys: AgentKeys,
    transport: Transport,
    memory: Remembered,
    cohort: bytes | None,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Open a session and end it at once: the answer shows that the broker takes and delivers this device's messages.

    Args:
        config: of a device whose agent does not run.
        keys: its keys.
        transport: not started yet.
        memory: what the device remembers of the coordinator; nothing is saved.
        cohort: its cohort secret, or None.
        timeout_s: how long to wait.
        clock: monotonic seconds.

    Returns:
        What the coordinator answered.

    Raises:
        NoAnswerError: says how far it came.
    """
    mark = None if cohort is None else mark_of(cohort, config.federation)
    conversation = _Conversation(config, keys, transport, memory, cohort=mark)
    _converse(conversation, transport, timeout_s, clock)
    return conversation.answer


def _converse(conversation: _Conversation, transport: Transport, timeout_s: float, clock: Callable[[], float]) -> None:
    """Speak until the conversation is over.

    Raises:
        NoAnswerError: it is not over in time.
    """
    inbox: queue.Queue[Delivery | bool] = queue.Queue(INBOX_MAX)
    conversation.subscribe()
    transport.start(_offer(inbox), _offer(inbox))
    deadline, say_at = clock() + timeout_s, float("inf")
    try:
        while clock() < deadline:
            item: Delivery | bool | None = None
            with contextlib.suppress(queue.Empty):
                item = inbox.get(timeout=max(0.0, min(0.25, deadline - clock())))
            if isinstance(item, Delivery):
                if conversation.hear(item):
                    return
                say_at = min(say_at, clock()) if conversation.is_welcome else say_at
            elif item is not None:
                conversation.link_changed()
                say_at = clock() if item else float("inf")
            if clock() >= say_at:
                conversation.say()
                say_at = clock() + REPEAT_S
    finally:
        conversation.end()
        transport.close()
    raise NoAnswerError(getattr(transport, "last_error", None) or conversation.progress)


class _Conversation:
    """Hello and welcome; then leave and left, when the device leaves."""

    def __init__(
        self,
        config: AgentConfig,
        keys: AgentKeys,
        transport: Transport,
        memory: Remembered,
        *,
        leaves: bool = False,
        cohort: str | None = None,
    ) -> None:
        self._leaves = leaves
        self._seen: CoordinatorStatus | None = None
        self.answer = ""
        self._config = config
        self._memory = memory
        self._epoch = memory.order.highest[0]
        self._handshake = Handshake(config.federation, config.device, version("fedcg-edge"), cohort)
        self._outgoing = Outgoing(config.federation, config.device, keys.signing, transport, self._handshake)

    def subscribe(self) -> None:
        """Ask for everything that a device reads but chunks."""
        self._outgoing.subscribe(chunks=False)

    def end(self) -> None:
        """A device that was greeted and does not go on is not there any more."""
        if not self._leaves:
            self._outgoing.status(online=False)

    @property
    def progress(self) -> str:
        """How far it came without an answer, with the likely cause."""
        if self._seen is None:
            return (
                "the broker took the connection and delivers nothing to this device: it is missing in the broker's access list, it "
                "was revoked, or the coordinator has never run"
            )
        if not self._seen.online:
            return "the coordinator does not run; its last status says so"
        return (
            "the coordinator runs and does not answer this device: its messages are not delivered (access list), or it was "
            "revoked or enrolled anew with other keys"
        )

    @property
    def is_welcome(self) -> bool:
        """Whether a session stands."""
        return self._handshake.is_open

    def link_changed(self) -> None:
        """A session ends with its link."""
        self._handshake.close()

    def say(self) -> None:
        """What is to be said now: goodbye in a session, else hello."""
        if not self._handshake.is_open:
            self._outgoing.hello(self._epoch)
            return
        self._outgoing.send(
            Leave(
                federation=self._config.federation,
                sender=self._config.device,
                recipient=COORDINATOR,
                epoch=self._epoch,
            )
        )

    def hear(self, delivery: Delivery) -> bool:
        """Whether a delivery confirms; what is not of the coordinator, or of another session, changes nothing."""
        with contextlib.suppress(WireError):
            if delivery.topic == Topics(self._config.federation).keys:
                self._memory.follow(delivery.payload)
                return False
            message = open_envelope(delivery.payload, lambda name: self._memory.key if name == COORDINATOR else None)
            if isinstance(message, CoordinatorStatus):
                self._seen = message
            elif delivery.topic == Topics(self._config.federation).down_control(self._config.device):
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
            self.answer = f"the coordinator answers; protocol version {message.version}"
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
