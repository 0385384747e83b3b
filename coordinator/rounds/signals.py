"""The events that the round engine takes and the commands that it returns, which `round_driver` carries out. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedcg.learning.spec import RoundPolicy
from fedcg.wire.messages.schemas import OfAttempt


class Event:
    """What happened."""


@dataclass(frozen=True)
class CameOnline(Event):
    """A client opened a session."""

    client: str


@dataclass(frozen=True)
class WentOffline(Event):
    """A client lost its link."""

    client: str


@dataclass(frozen=True)
class Departed(Event):
    """A client is no member any more (revoked, replaced by another machine, or it left); an update that it delivered before still counts."""

    client: str


@dataclass(frozen=True)
class Expected(Event):
    """The devices that may take part now: all that are enrolled."""

    clients: frozenset[str]


@dataclass(frozen=True)
class Barred(Event):
    """Clients that are not invited whoever else is there, and why."""

    clients: Mapping[str, str]


@dataclass(frozen=True)
class PolicyChanged(Event):
    """The operator changed the policy; the open attempt goes on by the new one."""

    policy: RoundPolicy


@dataclass(frozen=True)
class Paused(Event):
    """An operator paused the federation: the open attempt ends as it would, and no other one opens."""

    reason: str


@dataclass(frozen=True)
class Resumed(Event):
    """An operator resumed a paused or stalled federation; failed attempts are counted anew."""


@dataclass(frozen=True)
class Stopped(Event):
    """The federation ends now, with its last aggregate; the open attempt fails."""

    reason: str


@dataclass(frozen=True)
class LinkChanged(Event):
    """The coordinator's link to the broker came up or was lost, or its store of artifacts; without both no device can deliver."""

    up: bool
    what: str = "link to the broker"


@dataclass(frozen=True)
class Accepted(OfAttempt, Event):
    """A participant works on an update."""

    client: str


@dataclass(frozen=True)
class Approval(OfAttempt, Event):
    """Whether a participant's owner has approved the spec; without, it keeps its place and may accept later."""

    client: str
    given: bool


@dataclass(frozen=True)
class UpdateStored(OfAttempt, Event):
    """A valid update of a participant is durable; the aggregation worker reads `artifact`."""

    client: str
    artifact: str = ""


@dataclass(frozen=True)
class UpdateRefused(OfAttempt, Event):
    """A participant delivers nothing usable: it declined, or its update was rejected (`reason`), also after it was stored."""

    client: str
    reason: str = ""


@dataclass(frozen=True)
class Tick(Event):
    """Time went on."""


@dataclass(frozen=True)
class Restarted(Event):
    """The coordinator was restarted; `state` was rebuilt from the database and no client is online yet."""


@dataclass(frozen=True)
class AggregateStored(OfAttempt, Event):
    """The attempt's aggregate is durable and the attempt is closed in the database."""


@dataclass(frozen=True)
class AggregationFailed(OfAttempt, Event):
    """The attempt's updates could not be merged."""

    reason: str


@dataclass(frozen=True)
class OpenAttempt(OfAttempt):
    """Store the attempt, publish its offer, broadcast the aggregate."""

    participants: frozenset[str]
    deadline_at: float


@dataclass(frozen=True)
class ResumeAttempt(OfAttempt):
    """Publish the offer of an attempt that is stored already; its deadline may have moved."""

    deadline_at: float


@dataclass(frozen=True)
class MoveDeadline(OfAttempt):
    """Store another deadline of the open attempt; `reason` is for the operator, "" when there is nothing to look at."""

    deadline_at: float
    reason: str = ""


@dataclass(frozen=True)
class Invite(OfAttempt):
    """Ask a participant (again) for its update."""

    client: str


@dataclass(frozen=True)
class Distil(OfAttempt):
    """Merge the updates that are stored; these clients' at least."""

    clients: tuple[str, ...]


@dataclass(frozen=True)
class FailAttempt(OfAttempt):
    """Store that the attempt failed; the next one gets the next number.

    Attributes:
        first_attempt: the attempt that `max_attempts` is counted from now; one later when this one does not count.
    """

    reason: str
    first_attempt: int = 1


@dataclass(frozen=True)
class Stall:
    """Too many attempts failed: none opens until an operator resumes."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """Publish the final aggregate."""


Command = OpenAttempt | ResumeAttempt | MoveDeadline | Invite | Distil | FailAttempt | Stall | Finish
