"""What a federation gave to each client or took from it: points of its deployed model over its local-only one (negative transfer)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

from experiments.papers.records import ClientRecord

_NORMAL_95 = 1.96


@dataclass(frozen=True)
class Gain:
    """One client of one run, in percentage points.

    Attributes:
        points: the deployed model's accuracy minus the local-only one's, on the common test images, else on the client's own.
        margin: half of the 95 % interval, from the number of images. The models see the same images, which the interval does not
            use: it is too wide rather than too narrow.
    """

    points: float
    margin: float


@dataclass(frozen=True)
class Transfer:
    """The clients of a row, over all its seeds.

    Attributes:
        worst: the client that gained least.
        clients: how many are compared.
        below: how many are below their local-only model; `beyond` of them by more than the margin.
        lost: mean points of those that are below; 0 without any.
    """

    worst: Gain
    clients: int
    below: int
    beyond: int
    lost: float


def transfer_of(clients: Iterable[ClientRecord]) -> Transfer | None:
    """What came of some clients; None where no record has both models."""
    gains = [gain for client in clients if (gain := _gain(client)) is not None]
    return _over(gains) if gains else None


def _over(gains: Sequence[Gain]) -> Transfer:
    below = [gain for gain in gains if gain.points < 0]
    return Transfer(
        worst=min(gains, key=lambda gain: gain.points),
        clients=len(gains),
        below=len(below),
        beyond=sum(gain.points < -gain.margin for gain in below),
        lost=fmean([gain.points for gain in below] or [0.0]),
    )


def _gain(client: ClientRecord) -> Gain | None:
    deployed, local, images = client.accuracy_common_deployed, client.accuracy_common_local, client.common_images
    if deployed is None or local is None:
        deployed, local, images = client.accuracy_deployed, client.accuracy_local, client.test_images
    if deployed is None or local is None or not images:
        return None
    variance = (deployed * (1 - deployed) + local * (1 - local)) / images
    return Gain(100 * (deployed - local), 100 * _NORMAL_95 * sqrt(variance))
