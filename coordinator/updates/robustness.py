"""How far one device's update may move a merge: its distance from the base, its weight, and the outlier of several.

Torch-free arithmetic on values; it knows no database and no network. docs/security.md lists the attacks that it stops and those that it does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coordinator.config import RobustnessSettings
from coordinator.errors import ValidationError
from fedcg.wire.artifacts.artifacts import Base
from fedcg.wire.artifacts.tensors import Array, PartArrays
from fedcg.wire.parts import Part

NORM_BOUND = 1e5
"""Largest L2 norm of a part that has no base: networks of this size have 10 to 1,000."""
DISTANCE_BOUND = 10.0
"""An update farther from the base than so many times its norm, and the last round's median distance, is rejected; honest
ones stayed below 2 times (docs/security.md)."""
SMALL_NORM = 1.0
"""A part whose base has a smaller norm (it may start at 0) is measured as if it had this one."""
MIN_MEDIAN = 3
"""A median of fewer updates is not that of a majority of honest ones."""

Distances = Mapping[Part, float]


@dataclass(frozen=True)
class Yardstick:
    """The measure for the updates of a round.

    Attributes:
        base: the aggregate that they started from, decoded.
        typical: per part, the median distance of the updates merged in the last closed attempt; empty in the first round.
    """

    base: Base
    typical: Distances

    @cached_property
    def bounds(self) -> Distances:
        """Per part of the base, the distance from which on an update is rejected.

        Statistics are computed anew in every round, near no base: the bounds of their layout hold for them.
        """
        return {
            part: DISTANCE_BOUND * max(_norm(arrays, {}), SMALL_NORM, self.typical.get(part, 0.0))
            for part, arrays in self.base.parts.items()
            if part is not Part.STATISTICS
        }

    def distances(self, parts: PartArrays) -> dict[Part, float]:
        """The L2 distance of each part from the base; its norm where the base does not have the part."""
        return {part: _norm(arrays, self.base.parts.get(part, {})) for part, arrays in parts.items()}

    def check(self, client: str, distances: Distances) -> None:
        """Refuse an update that is too far away to be merged.

        Raises:
            ValidationError: names the part.
        """
        for part, distance in distances.items():
            bound = self.bounds.get(part, NORM_BOUND)
            if not distance <= bound:
                reason = f"its {part.value} is {distance:.3g} away from the round's base; the bound is {bound:.3g}"
                raise ValidationError(client, reason)


def limits_of(typical: Distances, medians: float) -> dict[Part, float]:
    """Per part, the distance that an update keeps: a multiple of the last round's median distance."""
    return {part: medians * distance for part, distance in typical.items() if distance > 0}


def medians_of(updates: Collection[Distances]) -> dict[Part, float]:
    """The median distance of each part; empty for fewer than `MIN_MEDIAN` updates."""
    parts = sorted(set().union(*updates)) if len(updates) >= MIN_MEDIAN else ()
    return {part: statistics.median_low(row[part] for row in updates) for part in parts}


def over(distances: Distances, limits: Distances) -> dict[Part, float]:
    """The share that is left of each part's distance where it is beyond its limit."""
    return {part: limits[part] / distances[part] for part in limits if distances.get(part, 0.0) > limits[part]}


def clipped(parts: PartArrays, base: PartArrays, shares: Mapping[Part, float]) -> PartArrays:
    """An update with some parts' difference to the base scaled down; batch norm's counters stay as they are."""
    kept = dict(parts)
    for part, share in shares.items():
        origin = base.get(part, {})
        kept[part] = {
            name: _towards(array, origin.get(name, np.float32(0)), share) if array.dtype.kind == "f" else array
            for name, array in parts[part].items()
        }
    return kept


def outlier(updates: Mapping[str, Distances]) -> str:
    """The client whose update is farthest from the base, in medians of the part in which it is farthest, where there are any."""
    medians = medians_of(updates.values())

    def farness(client: str) -> float:
        return max((row / (medians.get(part) or 1.0) for part, row in updates[client].items()), default=0.0)

    return max(sorted(updates), key=farness)


def given_weights(reported: Mapping[str, int], settings: RobustnessSettings) -> dict[str, int]:
    """How many examples each client counts for in a merge.

    A client that the operator's `examples` names counts for that many. Any other counts for the number that it reported, at most
    `weight_medians` times the median, and for at most the share `max_share` of all.
    """
    if not reported:
        return {}
    weights = {client: settings.examples.get(client, count) for client, count in reported.items()}
    bound = int(settings.weight_medians * statistics.median_low(weights.values()))
    capped = reported.keys() - settings.examples.keys()
    weights |= {client: min(weights[client], bound) for client in capped}
    most = _share_bound(sorted(weights.values(), reverse=True), settings.max_share)
    return weights | {client: max(1, min(weights[client], most)) for client in capped}


def _share_bound(weights: list[int], share: float) -> int:
    """The largest weight that is at most `share` of all when larger ones are cut to it; `weights` descend."""
    for cut, weight in enumerate(weights):
        if share * cut >= 1.0:
            break
        bound = share * sum(weights[cut:]) / (1.0 - share * cut)
        if weight <= bound:
            return weights[0] if cut == 0 else int(bound)
    return weights[-1]


def _norm(arrays: Mapping[str, Array], origin: Mapping[str, Array]) -> float:
    """L2 norm of the floating-point tensors' difference to `origin`'s of the same names.

    Integers are batch norm's counters of batches: they grow for as long as a federation runs, and nothing computes with them.
    """
    differences = (
        np.subtract(array, origin.get(name, np.float32(0)), dtype=np.float64)
        for name, array in arrays.items()
        if array.dtype.kind == "f"
    )
    return float(np.sqrt(sum(float(np.vdot(difference, difference)) for difference in differences)))


def _towards(array: Array, origin: Array | np.float32, share: float) -> Array:
    return np.asarray(origin + share * np.subtract(array, origin, dtype=np.float64), dtype=np.float32)
