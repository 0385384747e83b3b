"""When the next attempt opens, whom it invites, and how much each of them is asked for.

Pure; part of the round engine. Time is unix time and passed in.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from fedcg.learning.spec import RoundPolicy
from fedcg.wire.messages.schemas import RoundAttempt

RETRY_MAX_S = 600.0
"""At most, however many attempts have failed."""
LEAST_SHARE = 0.25
"""Of the spec's local steps, however slow a device is: with fewer its update would be worth little."""
MAX_DOUBLINGS = 16  # of `retry_s`, so that no exponent overflows; the bound above is reached long before


def wanted_updates(policy: RoundPolicy, invited: int) -> int:
    """How many updates close an attempt to which so many clients were invited."""
    if policy.over_selection == 0.0:
        return invited
    return min(invited, max(policy.quorum, math.floor(invited / (1.0 + policy.over_selection) + 1e-9)))


def shares_of(policy: RoundPolicy, round_s: Mapping[str, float]) -> dict[str, float]:
    """The share of the spec's local steps that each client takes; none takes more than the spec asks for.

    With `equal-time` every client ends with the median one (of two, the faster), down to `LEAST_SHARE` of the steps.

    Args:
        policy: of the federation.
        round_s: how long the whole of the steps takes each client, in seconds.
    """
    if policy.pace == "equal-steps" or not round_s:
        return {}
    median_s = statistics.median_low(round_s.values())
    return {
        client: round(max(LEAST_SHARE, median_s / seconds), 4)
        for client, seconds in round_s.items()
        if seconds > median_s
    }


@dataclass(frozen=True)
class Opening:
    """What decides, beside the policy, when the next attempt opens and whom it invites.

    Attributes:
        gather_s: how long a round waits for further devices after the last one came; not at all when every device is online.
        retry_s: pause after a failed attempt; doubles with each failed attempt of the round, up to `RETRY_MAX_S`.
        selection_key: secret of the coordinator that the choice of clients follows from.
        expected: devices that may take part.
        most: most clients that were online at a time; one that comes and goes is not waited for again.
        grown_at: when so many were online first.
        failed_at: when the last attempt failed.
        down_since: when the link to the broker was lost; None while it stands.
    """

    gather_s: float = 0.0
    retry_s: float = 0.0
    selection_key: bytes = field(default=b"", repr=False)
    expected: frozenset[str] = frozenset()
    most: int = 0
    grown_at: float = 0.0
    failed_at: float = 0.0
    down_since: float | None = None

    def counting(self, online: int, now: float) -> Opening:
        """The same with so many clients online."""
        return replace(self, most=online, grown_at=now) if online > self.most else self

    def pause_s(self, failures: int) -> float:
        """How long to wait after so many failed attempts in a row."""
        return min(RETRY_MAX_S, self.retry_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS)) if failures > 0 else 0.0

    def is_due(self, online: frozenset[str], failures: int, now: float) -> bool:
        """Whether an attempt may open with the clients that are online, after so many failed ones."""
        is_gathered = self.expected <= online or _is_over(self.grown_at, self.gather_s, now)
        return self.down_since is None and is_gathered and _is_over(self.failed_at, self.pause_s(failures), now)

    def invited(self, policy: RoundPolicy, candidates: Collection[str], at: RoundAttempt) -> frozenset[str]:
        """The clients to invite: all candidates, or a part of them that changes with every attempt.

        Args:
            policy: of the federation.
            candidates: clients that could take part; at least the quorum.
            at: the attempt.
        """
        wanted = max(policy.quorum, math.ceil(policy.fraction * len(candidates) - 1e-9))
        if policy.max_clients is not None:
            wanted = min(wanted, max(policy.quorum, policy.max_clients))
        invited = math.ceil(wanted * (1.0 + policy.over_selection) - 1e-9)

        def lot(client: str) -> bytes:
            text = f"{at.round}|{at.attempt}|{client}".encode()
            return hashlib.blake2b(text, key=self.selection_key[:64]).digest()

        return frozenset(sorted(candidates, key=lot)[:invited])


def _is_over(since: float, seconds: float, now: float) -> bool:
    """Whether a wait is over; a clock that was set back ends it."""
    return not 0.0 <= now - since < seconds
