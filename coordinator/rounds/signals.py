"""The events and commands of the round engine; `round_driver` executes the commands. Values only."""

from collections.abc import Mapping

from fedcg.learning.spec import RoundPolicy
from fedcg.values import Value
from fedcg.wire.messages.schemas import OfAttempt


class Event(Value):
    """An event of the round engine."""


class CameOnline(Event):
    """A client opened a session."""

    client: str


class WentOffline(Event):
    """A client lost its link."""

    client: str


class Departed(Event):
    """A client is no longer a member (revoked, replaced by another machine, or it left). An update that it delivered before still counts."""

    client: str


class Expected(Event):
    """The devices that may participate now: all enrolled ones."""

    clients: frozenset[str]


class Barred(Event):
    """Clients that are never invited, and why."""

    clients: Mapping[str, str]


class PolicyChanged(Event):
    """The operator changed the policy; the open attempt continues with the new one."""

    policy: RoundPolicy


class Paused(Event):
    """An operator paused the federation: the open attempt ends normally, and no other one opens."""

    reason: str


class Resumed(Event):
    """An operator resumed a paused or stalled federation; the count of failed attempts restarts."""


class Stopped(Event):
    """The federation ends now, with its last aggregate; the open attempt fails."""

    reason: str


class LinkChanged(Event):
    """The link to the broker, or the store of artifacts, became available or was lost; without both, devices can't deliver."""

    up: bool
    what: str = "link to the broker"


class Accepted(OfAttempt, Event):
    """A participant is working on an update."""

    client: str


class Approval(OfAttempt, Event):
    """Whether a participant's owner has approved the spec. Without approval, it keeps its place and may accept later."""

    client: str
    given: bool


class UpdateStored(OfAttempt, Event):
    """A participant's valid update is stored durably; the aggregation worker reads `artifact`."""

    client: str
    artifact: str = ""


class UpdateRefused(OfAttempt, Event):
    """A participant has no usable update: it declined, or its update was rejected (`reason`), possibly after it was stored."""

    client: str
    reason: str = ""


class Tick(Event):
    """Time has passed."""


class Restarted(Event):
    """The coordinator was restarted; `state` comes from the database, and no client is online yet."""


class AggregateStored(OfAttempt, Event):
    """The attempt's aggregate is stored durably, and the attempt is closed in the database."""


class AggregationFailed(OfAttempt, Event):
    """The attempt's updates could not be merged."""

    reason: str


class OpenAttempt(OfAttempt):
    """Store the attempt, publish its offer, and broadcast the aggregate."""

    participants: frozenset[str]
    deadline_at: float


class ResumeAttempt(OfAttempt):
    """Publish the offer of a stored attempt; its deadline may have changed."""

    deadline_at: float


class MoveDeadline(OfAttempt):
    """Store another deadline of the open attempt; `reason` is for the operator, "" if no action is needed."""

    deadline_at: float
    reason: str = ""


class Invite(OfAttempt):
    """Ask a participant (again) for its update."""

    client: str


class Distil(OfAttempt):
    """Merge the stored updates, at least those of these clients."""

    clients: tuple[str, ...]


class FailAttempt(OfAttempt):
    """Store the failure of the attempt; the next one gets the next number.

    Attributes:
        first_attempt: the attempt from which `max_attempts` is counted; the next one if this one does not count.
    """

    reason: str
    first_attempt: int = 1


class Stall(Value):
    """Too many attempts failed; no attempt opens until an operator resumes."""

    reason: str


class Finish(Value):
    """Publish the final aggregate."""


Command = OpenAttempt | ResumeAttempt | MoveDeadline | Invite | Distil | FailAttempt | Stall | Finish
