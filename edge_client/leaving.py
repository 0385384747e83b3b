"""How a box leaves for good: a signed goodbye inside a session, the coordinator's confirmation, then the end of what is kept here."""

from __future__ import annotations

import contextlib
import queue
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from edge_client.agent import AgentKeys
from edge_client.config import AgentConfig
from edge_client.errors import EnrolError, StoreFormatError
from edge_client.handshake import Handshake
from edge_client.launch import load_keys, mqtt_config
from edge_client.outgoing import Outgoing, offline_will
from edge_client.private_store import PrivateStore
from edge_client.remembered import Remembered
from fedcg.files import fsync_path
from fedcg.wire.errors import OldEpochError, OtherDeviceError, WireError
from fedcg.wire.messages import COORDINATOR, AnyMessage, Leave, Left, Welcome
from fedcg.wire.mqtt import MqttTransport
from fedcg.wire.signing import open_envelope
from fedcg.wire.topics import Topics
from fedcg.wire.transport import Delivery, Transport

REPEAT_S = 2.0
INBOX_MAX = 256


@dataclass(frozen=True)
class Departure:
    """How leaving went.

    Attributes:
        confirmed: whether the coordinator said that the device is no member any more.
        erased: what was removed from this box.
    """

    confirmed: bool
    erased: tuple[Path, ...]


def leave(config: AgentConfig, *, erase: bool, tell: bool, timeout_s: float) -> Departure:
    """Leave the federation.

    Args:
        config: of this device.
        erase: afterwards remove the private store, keys and certificates.
        tell: tell the coordinator; nothing is erased unless it confirms.
        timeout_s: how long to wait for it.

    Raises:
        EnrolError: the coordinator did not confirm in time, or the images lie in the store; nothing was erased.
        StoreLockedError: an agent runs with this store.
        EdgeError: keys or store can't be used.
        WireError: the TLS files can't be used.
    """
    if not (config.store / "format.json").exists() and not tell:
        raise StoreFormatError(f"{config.store} holds no private store: there is nothing to leave behind")
    if erase:
        _check_images_are_elsewhere(config)
    store = PrivateStore.open(config.store, config.federation, config.device)
    with store.locked("lock"), store.locked("trainer.lock"):
        if tell:
            keys = load_keys(config)
            will = offline_will(config.federation, config.device, keys.signing)
            memory = Remembered(store, config.federation, keys.coordinator)
            say_goodbye(config, keys, MqttTransport(mqtt_config(config), will), memory, timeout_s)
        erased = _erase(config, store) if erase else ()
    return Departure(tell, erased)


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
    inbox: queue.Queue[Delivery | bool] = queue.Queue(INBOX_MAX)
    farewell = _Farewell(config, keys, transport, memory)
    topics = Topics(config.federation)
    for topic in (topics.keys, topics.down_control(config.device)):
        transport.subscribe(topic)
    transport.start(_offer(inbox), _offer(inbox))
    deadline, say_at = clock() + timeout_s, float("inf")
    try:
        while clock() < deadline:
            item: Delivery | bool | None = None
            with contextlib.suppress(queue.Empty):
                item = inbox.get(timeout=max(0.0, min(0.25, deadline - clock())))
            if isinstance(item, Delivery):
                if farewell.hear(item):
                    return
                say_at = min(say_at, clock()) if farewell.is_welcome else say_at
            elif item is not None:
                farewell.link_changed()
                say_at = clock() if item else float("inf")
            if clock() >= say_at:
                farewell.say()
                say_at = clock() + REPEAT_S
    finally:
        transport.close()
    reason = getattr(transport, "last_error", None) or "it did not answer"
    raise EnrolError(
        f"the coordinator did not confirm within {timeout_s:g} s ({reason}). Nothing was erased. Try again, let the operator run "
        f"`fedcg device revoke {config.device}`, or use --without-coordinator"
    )


class _Farewell:
    """The conversation: hello, welcome, leave, left."""

    def __init__(self, config: AgentConfig, keys: AgentKeys, transport: Transport, memory: Remembered) -> None:
        self._config = config
        self._memory = memory
        self._epoch = memory.order.highest[0]
        self._handshake = Handshake(config.federation, config.device, version("fedcg-edge"))
        self._outgoing = Outgoing(config.federation, config.device, keys.signing, transport, self._handshake)

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
            return self._is_confirmation(message)
        return False

    def _is_confirmation(self, message: AnyMessage) -> bool:
        if message.federation != self._config.federation or message.recipient != self._config.device:
            raise OtherDeviceError(f"a {message.kind} message for somebody else")
        if isinstance(message, Welcome):
            if message.epoch < self._epoch:
                raise OldEpochError(f"a welcome of epoch {message.epoch} after epoch {self._epoch}")
            self._handshake.welcome(message)
            self._epoch = message.epoch
            return False
        self._handshake.admit(message)
        return isinstance(message, Left)


def _offer(inbox: queue.Queue[Delivery | bool]) -> Callable[[Delivery | bool], None]:
    def put(item: Delivery | bool) -> None:
        with contextlib.suppress(queue.Full):  # both sides repeat what was not answered
            inbox.put_nowait(item)

    return put


def _check_images_are_elsewhere(config: AgentConfig) -> None:
    data, root = config.data.root.resolve(), config.store.resolve()
    if root in (data, *data.parents):
        raise EnrolError(f"the images in {data} lie in the private store {root}: move them first, nothing was erased")


def _erase(config: AgentConfig, store: PrivateStore) -> tuple[Path, ...]:
    """Remove keys and certificates first, then the private store, its format.json last; the images are not touched."""
    files = [config.keys.signing, config.keys.coordinator]
    if config.tls is not None:
        files += [config.tls.key, config.tls.cert, config.tls.ca]
        files += [*config.tls.cert.parent.glob("*.next"), config.tls.cert.with_name(".renewal.lock")]
    erased = [path for path in files if path.exists()]
    for path in erased:
        path.unlink()
        fsync_path(path.parent)
    for path in sorted(store.root.iterdir(), key=lambda path: path.name == "format.json"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    with contextlib.suppress(OSError):  # a service's state directory belongs to the system; empty is what matters
        store.root.rmdir()
    return (*erased, store.root)
