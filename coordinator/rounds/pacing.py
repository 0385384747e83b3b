"""When the next attempt may open: the operator's policy, the times that it goes by, and the events that change them.

Pure; part of the round engine. Time is unix time and passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedcg.wire.messages.messages import OfAttempt

RETRY_MAX_S = 600.0
"""At most, however many attempts have failed."""
MAX_DOUBLINGS = 16  # of `retry_s`, so that no exponent overflows; the bound above is reached long before


@dataclass(frozen=True)
class Policy:
    """The operator's policy for rounds.

    Attributes:
        rounds: how many rounds the federation has.
        min_clients: quorum; a round opens with at least so many and closes with at least so many updates.
        max_attempts: failed attempts of one round before the federation is paused.
        deadline_s: how long an attempt collects, from when the quorum has accepted.
        gather_s: how long a round waits for further devices after the last one came; not at all when every device is online.
        retry_s: pause after a failed attempt; doubles with each failed attempt of the round, up to `RETRY_MAX_S`.
    """

    rounds: int
    min_clients: int
    max_attempts: int
    deadline_s: float
    gather_s: float = 0.0
    retry_s: float = 0.0

    def pause_s(self, failures: int) -> float:
        """How long to wait after so many failed attempts in a row."""
        return min(RETRY_MAX_S, self.retry_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS)) if failures > 0 else 0.0


@dataclass(frozen=True)
class Expected:
    """The devices that may take part now: all that are enrolled."""

    clients: frozenset[str]


@dataclass(frozen=True)
class LinkChanged:
    """The coordinator's link to the broker came up or was lost, or its store of artifacts; without both no device can deliver."""

    up: bool
    what: str = "link to the broker"


@dataclass(frozen=True)
class Accepted(OfAttempt):
    """A participant works on an update."""

    client: str


@dataclass(frozen=True)
class Pace:
    """The times that an attempt's opening goes by.

    Attributes:
        expected: devices that may take part.
        most: most clients that were online at a time; one that comes and goes is not waited for again.
        grown_at: when so many were online first.
        failed_at: when the last attempt failed.
        down_since: when the link to the broker was lost; None while it stands.
    """

    expected: frozenset[str] = frozenset()
    most: int = 0
    grown_at: float = 0.0
    failed_at: float = 0.0
    down_since: float | None = None

    def counting(self, online: int, now: float) -> Pace:
        """The same with so many clients online."""
        return replace(self, most=online, grown_at=now) if online > self.most else self

    def may_open(self, online: frozenset[str], policy: Policy, failures: int, now: float) -> bool:
        """Whether an attempt may open with these clients, after so many failed ones."""
        if self.down_since is not None or len(online) < policy.min_clients:
            return False
        is_gathered = self.expected <= online or _is_over(self.grown_at, policy.gather_s, now)
        return is_gathered and _is_over(self.failed_at, policy.pause_s(failures), now)


def _is_over(since: float, seconds: float, now: float) -> bool:
    """Whether a wait is over; a clock that was set back ends it."""
    return not 0.0 <= now - since < seconds
