"""The interface between sessions and brokers: a small Protocol. `mqtt` implements it, and tests have an in-process implementation.

A transport carries bytes between topics. It must not know envelopes, artifacts or rounds. Its callbacks only enqueue: no work is done
on a transport's thread.
"""

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from fedcg.values import Value


class Delivery(Value):
    """One message from the broker."""

    topic: str
    payload: bytes
    retained: bool


class Will(Value):
    """The message that the broker publishes (QoS 1) when this client vanishes."""

    topic: str
    payload: bytes
    retain: bool = True


class Publication(Protocol):
    """One publish, for a caller that follows its progress."""

    @property
    def is_under_way(self) -> bool:
        """Queued, or sent and not acknowledged. Publishing the same again would send it twice."""


class Backlog(Value):
    """Published messages that are not delivered yet: queued, or sent at QoS 1 and not acknowledged."""

    messages: int = 0
    bytes: int = 0


OnDelivery = Callable[[Delivery], None]
OnLink = Callable[[bool], None]
ArgumentT = TypeVar("ArgumentT")
_LOG = logging.getLogger(__name__)


def call_out(callback: Callable[[ArgumentT], None], argument: ArgumentT) -> None:
    """Call a user's callback from a transport's thread, which must survive all exceptions of the callback."""
    try:
        callback(argument)
    except Exception:  # noqa: BLE001 - the outermost frame of a transport's thread; logged with its traceback
        _LOG.exception("a transport's callback failed; its event is lost")


class Transport(Protocol):
    """Publish and subscribe, at least once for QoS 1, at most once for QoS 0.

    Laws (the contract suite proves them on every broker):
      * a QoS 1 publish while connected reaches every live subscriber that may read the topic;
      * a subscriber receives the retained message of a topic right after subscribing, with `retained` set;
      * subscriptions survive a reconnect without a new call of `subscribe`;
      * `on_link(True)` follows every successful (re)connect, once the subscriptions are granted; `on_link(False)` follows a loss;
      * if a broker has a too small packet limit, refuses a subscription or acknowledges nothing, the link is dropped and
        retried with backoff;
      * if a broker reports that it refuses a publish, the link stays up and `is_refused` is set until a publish is accepted;
      * callbacks run on the transport's own thread and must only enqueue.
    """

    is_refused: bool
    """Whether the broker refused the last publish: this client may not write to that topic."""

    def start(self, on_delivery: OnDelivery, on_link: OnLink) -> None:
        """Connect in the background and keep connecting, with backoff, until `close`."""

    def subscribe(self, topic: str, qos: int = 1) -> None:
        """Subscribe to a topic filter, now and after every reconnect."""

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> Publication:
        """Publish bytes; never blocks on the network. From any thread.

        Raises:
            TransportError: not connected, the outgoing queue is full, or the payload is over `max_payload`.
        """

    def change_will(self, will: Will) -> None:
        """Replace the will. This reconnects without triggering the old will."""

    def be_patient(self, retry_s: float) -> None:
        """Drop the link, if there is one, and from now on wait at least this many seconds before each attempt; 0 ends that."""

    @property
    def backlog(self) -> Backlog:
        """The messages that wait to leave. A caller that sends a lot waits until there are few."""

    @property
    def max_payload(self) -> int:
        """Largest payload in bytes that this link takes (the broker's maximum packet minus the header)."""

    def close(self) -> None:
        """Disconnect without triggering the will, and stop the background thread."""
