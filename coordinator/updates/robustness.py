"""Limits how far one device's update may move a merge, by its distance from the base, its weight, and its step compared with the others'.

Updates too far from the base are rejected. Beyond a smaller limit they are scaled back. Their weight is at most a share of the total, and two
figures are evaluated: the length and the direction of the step. Torch-free arithmetic on values, without database or network. docs/research/hostile-devices.md
has the figures of honest and hostile updates, and the attacks that this does and does not stop.
"""

import statistics
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from coordinator.config import Action, RobustnessSettings
from coordinator.errors import ValidationError
from fedcg.values import Value
from fedcg.wire.artifacts.artifacts import Base
from fedcg.wire.artifacts.payload import Array, PartArrays
from fedcg.wire.parts import Part

NORM_BOUND = 1e5
"""Largest L2 norm of a part without a base, or with a base of zeros; networks of this size have 10 to 1,000."""
DISTANCE_BOUND = 10.0
"""An update is rejected if its distance from the base exceeds this multiple of the larger of the base's norm and the last round's median
distance. Honest updates stayed below 2 (docs/research/hostile-devices.md)."""
SMALL_NORM = 1.0
"""Least norm assumed for a part's base."""
MIN_MEDIAN = 3
"""Least updates for a median: with fewer, a majority of honest updates does not determine it."""
SKETCH_NUMBERS = 4096
"""Length of a sketch: the error of a cosine of two sketches is about 1 / sqrt(4096), 0.016."""
ALIKE = 0.6
"""If the median cosine of steps is at least this, the rule's bound applies: devices still learn the same things. Honest steps stayed within
0.24 of such a median; with less in common, a device with other classes was 0.5 below it."""
FAR = 1.8
"""Below `ALIKE`, the bound is multiplied by this: converged steps are near orthogonal (median -0.2 to 0.5). There, honest steps were up to 0.50
below the median, and those with shuffled labels 0.58. If one of three steps is flipped, the median is about 0 and the flipped one -0.8."""
OPPOSITE, COMMON = -0.1, 0.4
"""A step with a median cosine to the others below the first value counteracts them, if the median is at least the second."""
MIN_OPPOSED = 5
"""With fewer updates, a step's median cosine is one of three, or the mean of two, so a single other device changes it."""
NEEDED = "kept because the round needs it"
_STATISTICS = ("running_mean", "running_var")  # of batch norm: they depend on the data, not on a gradient

OUTPUT = "output"
"""The classifier's last matrix by itself: weights with exchanged classes differ from honest ones only there."""

Sketches = Mapping[str, NDArray[np.float64]]
"""By name of a part, or `OUTPUT`."""

Distances = Mapping[Part, float]


class Yardstick(Value):
    """Measures the updates of a round.

    Attributes:
        base: the decoded aggregate that they started from.
        typical: per part, the median distance of the updates merged in the last closed attempt; empty in the first round.
    """

    base: Base
    typical: Distances

    @cached_property
    def bounds(self) -> Distances:
        """Per part of the base, the distance above which an update is rejected.

        Statistics are computed again in every round and have no near base, so the bounds of their layout apply.
        """
        norms = {part: _norm(arrays, {}) for part, arrays in self.base.parts.items() if part is not Part.STATISTICS}
        # All zeros are placeholders for weights that only devices can draw; complete ones arrive in the first round.
        return {
            part: DISTANCE_BOUND * max(norm, SMALL_NORM, self.typical.get(part, 0.0)) if norm else NORM_BOUND
            for part, norm in norms.items()
        }

    def distances(self, parts: PartArrays) -> dict[Part, float]:
        """The L2 distance of each part from the base; its norm if the base does not have the part."""
        return {part: _norm(arrays, self.base.parts.get(part, {})) for part, arrays in parts.items()}

    def check(self, client: str, distances: Distances) -> None:
        """Reject an update that is too far from the base.

        Raises:
            ValidationError: names the part.
        """
        for part, distance in distances.items():
            bound = self.bounds.get(part, NORM_BOUND)
            if not distance <= bound:
                reason = f"the distance of its {part.value} from the round's base is {distance:.3g}; the bound is {bound:.3g}"
                raise ValidationError(client, reason)


def limits_of(typical: Distances, medians: float) -> dict[Part, float]:
    """Per part, the distance to which updates are clipped: a multiple of the last round's median distance."""
    return {part: medians * distance for part, distance in typical.items() if distance > 0}


def medians_of(updates: Collection[Distances]) -> dict[Part, float]:
    """The median distance of each part; empty for fewer than `MIN_MEDIAN` updates."""
    parts = sorted(set().union(*updates)) if len(updates) >= MIN_MEDIAN else ()
    return {part: statistics.median_low(row[part] for row in updates) for part in parts}


def over(distances: Distances, limits: Distances) -> dict[Part, float]:
    """For each part beyond its limit, the share of its distance to keep."""
    return {part: limits[part] / distances[part] for part in limits if distances.get(part, 0.0) > limits[part]}


def clipped(parts: PartArrays, base: PartArrays, shares: Mapping[Part, float]) -> PartArrays:
    """An update with some parts' difference to the base scaled down; batch norm's counters don't change."""
    kept = dict(parts)
    for part, share in shares.items():
        origin = base.get(part, {})
        kept[part] = {
            name: _towards(array, origin.get(name, np.float32(0)), share) if array.dtype.kind == "f" else array
            for name, array in parts[part].items()
        }
    return kept


def outlier(updates: Mapping[str, Distances]) -> str:
    """The client whose update is farthest from the base; measured in medians, if available, of its farthest part."""
    medians = medians_of(updates.values())

    def farness(client: str) -> float:
        return max((row / (medians.get(part) or 1.0) for part, row in updates[client].items()), default=0.0)

    return max(sorted(updates), key=farness)


def given_weights(reported: Mapping[str, int], settings: RobustnessSettings) -> dict[str, int]:
    """The weight of each client in a merge, in examples.

    Clients in the operator's `examples` have that weight. All others have their reported number, at most `weight_medians` times the
    median and at most the share `max_share` of the total.
    """
    if not reported:
        return {}
    weights = {client: settings.examples.get(client, count) for client, count in reported.items()}
    bound = int(settings.weight_medians * statistics.median_low(weights.values()))
    capped = reported.keys() - settings.examples.keys()
    weights |= {client: min(weights[client], bound) for client in capped}
    most = _share_bound(sorted(weights.values(), reverse=True), settings.max_share)
    return weights | {client: max(1, min(weights[client], most)) for client in capped}


class Movement(Value):
    """Distance and direction in which one update moves the base.

    Attributes:
        distances: L2 distance of each part from the round's base.
        sketches: for each part with a base, its step in `SKETCH_NUMBERS` numbers.
    """

    distances: Distances
    sketches: Sketches


class Figures(Value):
    """One update compared with the others of its attempt; None if there are too few others.

    Attributes:
        norm: its distance from the base in medians of the attempt, for its farthest part.
        direction: the median cosine of its step to each other step, in [-1, 1], for the part where it is farthest below the attempt's
            median; `typical_direction` is that median.
    """

    norm: float | None = None
    direction: float | None = None
    typical_direction: float | None = None

    def as_json(self) -> dict[str, float]:
        """The available figures, rounded to four digits."""
        return {name: round(value, 4) for name, value in asdict(self).items() if value is not None}


class Verdict(Value):
    """The rules' verdict on an update: the strictest action that applies, and the reasons."""

    action: Action | None = None
    reasons: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The action and its reasons, for operator and owner; "" if the update is not odd."""
        return f"{_CONSEQUENCES[self.action]}: {'; '.join(self.reasons)}" if self.action else ""


def movement_of(parts: PartArrays, yardstick: Yardstick, trained: Collection[Part], seed: int) -> Movement:
    """Measure one update.

    Args:
        parts: the update's decoded parts, as sent by the device.
        yardstick: the yardstick with the round's base.
        trained: the parts that devices train from the base.
        seed: see `sketches_of`.
    """
    base = {part: arrays for part, arrays in yardstick.base.parts.items() if part in trained}
    return Movement(yardstick.distances(parts), sketches_of(parts, base, seed))


def sketches_of(parts: PartArrays, base: PartArrays, seed: int) -> dict[str, NDArray[np.float64]]:
    """The step of each part from the base, compressed so that cosines of steps change by a few hundredths at most.

    Each number is added, with a random sign, to one of `SKETCH_NUMBERS` sums at random.

    Args:
        parts: the update's decoded parts; those that the base lacks have no step.
        base: the aggregate that the round started from.
        seed: seed of the signs and sums; the same for all updates of an attempt, and secret, so that no device can construct a step with
            another's sketch.
    """
    found: dict[str, NDArray[np.float64]] = {}
    for part, origin in sorted(base.items()):
        weights = {name: array for name, array in parts.get(part, {}).items() if _is_weight(name, array)}
        groups = {part.value: list(weights)}
        if part is Part.CLASSIFIER:
            groups[OUTPUT] = [name for name, array in weights.items() if array.ndim >= 2][-1:]
        for group, names in groups.items():
            steps = [np.subtract(weights[name], origin[name], dtype=np.float64).ravel() for name in names]
            if steps:
                found[group] = _sketch(np.concatenate(steps), np.random.default_rng([seed, len(found)]))
    return found


def figures_of(updates: Mapping[str, Movement]) -> dict[str, Figures]:
    """The figures of each update, by client; `updates` are all updates to merge."""
    medians = medians_of([each.distances for each in updates.values()])
    directions = _directions({client: each.sketches for client, each in updates.items()})
    found = {}
    for client, each in updates.items():
        farthest = max((each.distances[part] / median for part, median in medians.items() if median > 0), default=None)
        found[client] = Figures(farthest, *directions.get(client, (None, None)))
    return found


def verdicts_of(figures: Mapping[str, Figures], settings: RobustnessSettings, quorum: int) -> dict[str, Verdict]:
    """The verdicts of the operator's rules on the updates to merge.

    Args:
        figures: figures by client.
        settings: the rules.
        quorum: with fewer updates, the attempt would fail. If quarantine leaves fewer, `below_quorum` decides.
    """
    found = {client: verdict_of(each, settings, len(figures)) for client, each in figures.items()}
    odd = {client for client, verdict in found.items() if verdict.action == "quarantine"}
    if settings.below_quorum == "fail" or len(found) - len(odd) >= quorum:
        return found
    instead = settings.below_quorum
    return found | {
        client: replace(found[client], action=instead, reasons=(*found[client].reasons, NEEDED)) for client in odd
    }


def verdict_of(figures: Figures, settings: RobustnessSettings, updates: int) -> Verdict:
    """The verdict of the operator's rules on one of `updates` updates."""
    found: list[tuple[Action, str]] = []
    if figures.norm is not None and figures.norm > settings.norm.bound:
        odd = f"its step is {figures.norm:.3g} times as long as the median (at most {settings.norm.bound:g})"
        found.append((settings.norm.action, odd))
    if figures.direction is not None and figures.typical_direction is not None:
        least = _least_cosine(figures.typical_direction, settings.direction.bound, updates)
        if figures.direction < least:
            shown = f"cosine {figures.direction:.2f}, median {figures.typical_direction:.2f}, at least {least:.2f}"
            found.append((settings.direction.action, f"its step points away from the others' ({shown})"))
    if not found:
        return Verdict()
    return Verdict(max((action for action, _ in found), key=_SEVERITY.index), tuple(reason for _, reason in found))


def merge_weights(
    reported: Mapping[str, int], verdicts: Mapping[str, Verdict], settings: RobustnessSettings
) -> dict[str, int]:
    """The weight of each client in a merge (`given_weights`), without those in quarantine."""
    kept = {client: count for client, count in reported.items() if verdicts[client].action != "quarantine"}
    weights = given_weights(kept, settings)
    lighter = {client for client in kept if verdicts[client].action == "down-weight"}
    return weights | {client: max(1, round(settings.down_weight * weights[client])) for client in lighter}


def is_tolerated(sentence: str) -> bool:
    """Whether an odd update with this `Verdict.sentence` is merged unchanged because the operator chose `warn`, not because a round needs it."""
    return sentence.startswith(_CONSEQUENCES["warn"]) and not sentence.endswith(NEEDED)


_CONSEQUENCES: Mapping[Action, str] = {
    "warn": "merged anyway",
    "down-weight": "down-weighted",
    "quarantine": "not merged (quarantine)",
}
_SEVERITY: tuple[Action, ...] = tuple(_CONSEQUENCES)  # mildest first


def _least_cosine(typical: float, bound: float, updates: int) -> float:
    """The least median cosine of a step that is not odd, in an attempt with this median cosine."""
    least = typical - (bound if typical >= ALIKE else FAR * bound)
    return max(OPPOSITE, least) if typical >= COMMON and updates >= MIN_OPPOSED else least


def _is_weight(name: str, array: Array) -> bool:
    return array.dtype.kind == "f" and name.rpartition(".")[2] not in _STATISTICS


def _sketch(step: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
    places = random.integers(2 * SKETCH_NUMBERS, size=len(step))
    sums = np.bincount(places, weights=step, minlength=2 * SKETCH_NUMBERS)
    return np.asarray(sums[:SKETCH_NUMBERS] - sums[SKETCH_NUMBERS:])


def _directions(sketches: Mapping[str, Sketches]) -> dict[str, tuple[float, float]]:
    """By client, (its median cosine to the other steps, the clients' median of it) for the part farthest below; {} for too few clients."""
    clients = sorted(sketches)
    found: dict[str, tuple[float, float]] = {}
    if len(clients) < MIN_MEDIAN:
        return found
    for group in sorted(set.intersection(*(set(each) for each in sketches.values()))):
        steps = np.stack([sketches[client][group] for client in clients])
        steps /= np.maximum(np.linalg.norm(steps, axis=1, keepdims=True), np.finfo(np.float64).tiny)
        cosines = steps @ steps.T
        own = [float(np.median(np.delete(row, number))) for number, row in enumerate(cosines)]
        typical = statistics.median_low(own)
        for client, cosine in zip(clients, own, strict=True):
            known = found.get(client)
            if known is None or cosine - typical < known[0] - known[1]:
                found[client] = (cosine, typical)
    return found


def _share_bound(weights: list[int], share: float) -> int:
    """The largest weight that is at most `share` of the total if larger ones are cut to it; `weights` descend."""
    for cut, weight in enumerate(weights):
        if share * cut >= 1.0:
            break
        bound = share * sum(weights[cut:]) / (1.0 - share * cut)
        if weight <= bound:
            return weights[0] if cut == 0 else int(bound)
    return weights[-1]


def _norm(arrays: Mapping[str, Array], origin: Mapping[str, Array]) -> float:
    """L2 norm of the floating-point tensors' difference to those of `origin` with the same names.

    Integers are batch norm's counters of batches: they grow during a federation and are not used in computations.
    """
    differences = (
        np.subtract(array, origin.get(name, np.float32(0)), dtype=np.float64)
        for name, array in arrays.items()
        if array.dtype.kind == "f"
    )
    return float(np.sqrt(sum(float(np.vdot(difference, difference)) for difference in differences)))


def _towards(array: Array, origin: Array | np.float32, share: float) -> Array:
    return np.asarray(origin + share * np.subtract(array, origin, dtype=np.float64), dtype=np.float32)
