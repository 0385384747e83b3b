"""The seam between sessions and brokers: a small Protocol; `mqtt` implements it, and tests have a twin in one process.

A transport carries bytes between topics. It knows nothing of envelopes, artifacts or rounds, and its callbacks only
enqueue: nothing is ever computed on a transport's thread.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class Delivery:
    """One message as it came from the broker."""

    topic: str
    payload: bytes
    retained: bool


@dataclass(frozen=True)
class Will:
    """The message that the broker publishes (QoS 1) when this client vanishes."""

    topic: str
    payload: bytes
    retain: bool = True


class Publication(Protocol):
    """One publish, for a caller that follows its progress."""

    @property
    def is_under_way(self) -> bool:
        """Queued, or sent and not acknowledged: sending the same once more would put it on the link twice."""


@dataclass(frozen=True)
class Backlog:
    """The messages that were published and have not left: queued, or sent at QoS 1 and not acknowledged."""

    messages: int = 0
    bytes: int = 0


OnDelivery = Callable[[Delivery], None]
OnLink = Callable[[bool], None]
ArgumentT = TypeVar("ArgumentT")
_LOG = logging.getLogger(__name__)


def call_out(callback: Callable[[ArgumentT], None], argument: ArgumentT) -> None:
    """Call a user's callback from a transport's thread, which must survive every exception of the callback."""
    try:
        callback(argument)
    except Exception:  # noqa: BLE001 - the outermost frame of a transport's thread; logged with its traceback
        _LOG.exception("a transport's callback failed; the event that it was given is lost")


class Transport(Protocol):
    """Publish and subscribe, at least once for QoS 1, at most once for QoS 0.

    Laws (the contract suite proves them on every broker):
      * a QoS 1 publish made while connected reaches every live subscriber that is allowed to read the topic;
      * a subscriber gets the retained message of a topic right after it subscribed, with `retained` set;
      * subscriptions survive a reconnect without a new call of `subscribe`;
      * `on_link(True)` comes after every successful (re)connect, once the subscriptions are granted; `on_link(False)` after a loss;
      * a link on which a broker takes too small packets, does not grant a subscription or acknowledges nothing is given up, and
        tried again with backoff;
      * a publish that is refused, by a broker that answers so, leaves the link up and sets `is_refused`, until one is let through;
      * callbacks run on the transport's own thread and must only enqueue.
    """

    is_refused: bool
    """Whether the broker did not let the last publish through: this client may not write there."""

    def start(self, on_delivery: OnDelivery, on_link: OnLink) -> None:
        """Connect in the background and keep connecting, with backoff, until `close`."""

    def subscribe(self, topic: str, qos: int = 1) -> None:
        """Subscribe to a topic filter, now and after every reconnect."""

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> Publication:
        """Hand bytes to the broker; never blocks on the network. From any thread.

        Raises:
            TransportError: not connected, the outgoing queue is full, or the payload is over `max_payload`.
        """

    def change_will(self, will: Will) -> None:
        """Replace the will; this connects anew, without triggering the old one."""

    def be_patient(self, retry_s: float) -> None:
        """Give up the link, if there is one, and from now on let at least so many seconds pass before each new try; 0 ends that."""

    @property
    def backlog(self) -> Backlog:
        """The messages that wait to leave; a caller that sends much waits until they are few."""

    @property
    def max_payload(self) -> int:
        """Largest payload in bytes that this link takes (the broker's maximum packet minus the header)."""

    def close(self) -> None:
        """Disconnect without triggering the will, and stop the background thread."""
