"""Errors of the wire, and a counter of refusals by `reason` that limits the lines of a flood in the event log.

WireError
├── MalformedError           bytes that the protocol does not allow                             malformed
│   ├── TooLargeError            a declared or real size above its bound                        too_large
│   ├── VersionError             a protocol version that this side does not support             version
│   ├── OtherDeviceError         a message of, or for, another device than its topic's          other_device
│   └── OtherFederationError     a message of another federation                                other_federation
├── CodecError               numbers that the chosen codec can't hold                           codec
├── SignatureError           a signature that does not verify, or an unknown sender             forged
├── OrderError               a message out of order                                             order
│   ├── ReplayError              one that was already accepted, or is older than the last one  replayed
│   ├── OldEpochError            one of a coordinator that lost its lease                       older_epoch
│   └── OtherSessionError        one of another session, or without any                         other_session
├── IntegrityError           content whose sha256 or layout is not the declared one             damaged
│   └── UnknownBaseError         a difference to an aggregate that is not available
├── SumError                 a sealed sum that must not or can't be opened                      sum
├── CapacityError            a limit of this side is reached; the other side retries later      capacity
└── TransportError           the link or the broker refused                                     transport
"""

import threading
from collections import Counter
from typing import ClassVar

from pydantic import ValidationError

from fedcg.errors import BAD_INPUT, NOT_CONNECTED, FedcgError
from fedcg.event_log import EventLog, log_text
from fedcg.text_output import wrong_value


def problem_in(error: ValidationError, inside: int = 0) -> str:
    """The problem of foreign content, in a text that contains no names or values of that content.

    Args:
        error: of its schema.
        inside: number of steps before the field names: 1 in a union, whose first step is the member's tag.
    """
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    steps, kind = first["loc"][inside:], first["type"]
    is_ours = len(steps) > (1 if kind == "extra_forbidden" else 0)
    where = [str(step) for step in steps[:1] + tuple(step for step in steps[1:] if isinstance(step, int))]
    text = "there is no such kind" if kind == "union_tag_invalid" else wrong_value(first)
    return f"{'.'.join(where) if is_ours else '(root)'}: {text}"


class WireError(FedcgError):
    """Base of everything the wire raises.

    Attributes:
        reason: one word, for counters.
    """

    reason: ClassVar[str] = "wire"


class MalformedError(WireError):
    """Bytes that the protocol does not allow."""

    reason = "malformed"
    exit_code = BAD_INPUT


class TooLargeError(MalformedError):
    """A declared or real size above its bound."""

    reason = "too_large"


class VersionError(MalformedError):
    """A protocol version that this side does not support."""

    reason = "version"


class OtherDeviceError(MalformedError):
    """A message of, or for, another device than its topic's."""

    reason = "other_device"


class OtherFederationError(MalformedError):
    """A message of another federation."""

    reason = "other_federation"


class CodecError(WireError):
    """Numbers that the chosen codec can't hold."""

    reason = "codec"


class SignatureError(WireError):
    """A signature that does not verify (forged, or altered on the way), or a sender that is not enrolled."""

    reason = "forged"


class OrderError(WireError):
    """A message out of order."""

    reason = "order"


class ReplayError(OrderError):
    """A message that was already accepted, or is older than the last accepted one."""

    reason = "replayed"


class OldEpochError(OrderError):
    """A message of a coordinator that lost its lease."""

    reason = "older_epoch"


class OtherSessionError(OrderError):
    """A message of another session, or without any."""

    reason = "other_session"


class IntegrityError(WireError):
    """Content whose digest or layout is not the declared one."""

    reason = "damaged"


class UnknownBaseError(IntegrityError):
    """A difference to an aggregate that is not available."""


class SumError(WireError):
    """A sealed sum that must not or can't be opened.

    Args:
        words: the message.
        why: a value of `SumObstacle`, if a device refuses for a reason that it may report.
    """

    reason = "sum"

    def __init__(self, words: object, why: str = "other") -> None:
        super().__init__(words)
        self.why = why


class CapacityError(WireError):
    """A limit of this side is reached; the other side retries later."""

    reason = "capacity"


class TransportError(WireError):
    """The link or the broker refused."""

    reason = "transport"
    exit_code = NOT_CONNECTED


# per reason and device; afterwards only each time the number has doubled, so that a flood does not fill the disk
ALWAYS_REPORTED = 50

_MAX_DETAIL = 200  # characters; topics and fields chosen by a sender can be long


class Refusals:
    """Counts refusals of one process, from any thread.

    Args:
        events: receives a line `refused {what, reason, detail, count}`; `count` is the number of refusals with that reason so
            far, and of that device if there are several.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()  # by device and reason

    @property
    def counts(self) -> dict[str, int]:
        """The number of refusals since the start, by reason."""
        totals: Counter[str] = Counter()
        with self._lock:
            for (_, reason), count in self._counts.items():
                totals[reason] += count
        return dict(totals)

    def of(self, device: str) -> int:
        """The number of a device's refusals since the start."""
        with self._lock:
            return sum(count for (name, _), count in self._counts.items() if name == device)

    def note(self, what: str, error: Exception, device: str = "") -> bool:
        """Count a refusal under the reason of its error; a refusal outside the wire counts under `what`.

        Args:
            what: the refused thing.
            error: the reason.
            device: the sender, if there are several. It must be a checked name: unchecked names would fill memory.

        Returns:
            Whether a line was written.
        """
        reason = error.reason if isinstance(error, WireError) else what
        with self._lock:
            self._counts[device, reason] += 1
            count = self._counts[device, reason]
        is_reported = count <= ALWAYS_REPORTED or count & (count - 1) == 0
        if is_reported:
            what, detail = (log_text(text, _MAX_DETAIL) for text in (what, str(error)))
            self._events.write("refused", what=what, reason=reason, detail=detail, count=count)
        return is_reported
