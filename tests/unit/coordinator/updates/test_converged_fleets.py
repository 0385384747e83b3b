"""Converged devices: their steps are near orthogonal, and the whole decision about them leaves every one in."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.config import RobustnessSettings
from coordinator.updates.robustness import (
    Distances,
    Verdict,
    Yardstick,
    figures_of,
    medians_of,
    movement_of,
    verdicts_of,
)
from fedcg.wire.artifacts.artifacts import Base
from fedcg.wire.artifacts.payload import Array, PartArrays
from fedcg.wire.parts import Part

ROUNDS, BURN_IN = 200, 60
SHAPES = {
    Part.CLASSIFIER: {"hidden.weight": (16, 24), "hidden.bias": (16,), "out.weight": (10, 16), "out.bias": (10,)},
    Part.GENERATOR: {"0.weight": (24, 16), "0.bias": (24,)},
}
NUMBERS = sum(int(np.prod(shape)) for tensors in SHAPES.values() for shape in tensors.values())


def parts_of(weights: NDArray[np.float64]) -> PartArrays:
    """The weights as the parts of an update."""
    found: dict[Part, dict[str, Array]] = {}
    at = 0
    for part, tensors in SHAPES.items():
        found[part] = {}
        for name, shape in tensors.items():
            size = int(np.prod(shape))
            found[part][name] = weights[at : at + size].reshape(shape).astype(np.float32)
            at += size
    return found


def converged_rounds(
    devices: int, spread: float, random: np.random.Generator
) -> Iterator[tuple[PartArrays, list[PartArrays]]]:
    """(base, updates) of each round after convergence: averaging on quadratic losses with gradient noise.

    Each device's optimum is `spread` away from the common one in every number. A local round moves a weight with the curvature h by
    1 - exp(-3 h p) of its way to the device's optimum, and noise moves it as far as it does in equilibrium. Curvatures lie between 0.01
    and 1; p is between 0.5 and 2, since a device with four times the images takes four times the steps.
    """
    curvature = np.exp(random.uniform(np.log(0.01), 0.0, NUMBERS))
    pulled = 1.0 - np.exp(-3.0 * np.outer(random.uniform(0.5, 2.0, devices), curvature))
    noise = 0.1 * np.sqrt(1.0 - (1.0 - pulled) ** 2)
    optima = random.normal(size=NUMBERS) + spread * random.normal(size=(devices, NUMBERS))
    base = optima.mean(axis=0)
    for number in range(BURN_IN + ROUNDS):
        updates = base + pulled * (optima - base) + noise * random.normal(size=optima.shape)
        if number >= BURN_IN:
            yield parts_of(base), [parts_of(update) for update in updates]
        base = updates.mean(axis=0)


def odd_ones(devices: int, seed: int, spread: float) -> list[Verdict]:
    """What the default rules find odd about honest devices in `ROUNDS` rounds, all of which the rounds need."""
    random = np.random.default_rng([seed, devices])
    typical: Distances = {}
    found: list[Verdict] = []
    for base, updates in converged_rounds(devices, spread, random):
        yardstick, seen = Yardstick(Base("0" * 64, base), typical), {}
        for number, parts in enumerate(updates):
            seen[f"d{number}"] = movement_of(parts, yardstick, SHAPES, seed)
            yardstick.check(f"d{number}", seen[f"d{number}"].distances)
        found += verdicts_of(figures_of(seen), RobustnessSettings(), devices).values()
        typical = medians_of([each.distances for each in seen.values()])
    return [verdict for verdict in found if verdict != Verdict()]


@pytest.mark.parametrize(
    ("devices", "spread"),
    [
        (3, 0.1),
        (5, 0.0),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 0.0), (4, 0.1), (8, 0.1), (20, 0.0), (50, 0.1))),
    ],
)
def test_no_honest_device_is_odd_in_200_rounds_after_convergence(devices: int, spread: float) -> None:
    assert odd_ones(devices, 1, spread) == []
