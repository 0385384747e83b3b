"""What a member of a cohort finds out of a box that takes part in every second round, from the opened means alone.

The figures of docs/privacy.md: `pytest -s tests/unit/experiments/simulation/test_differences_of_means.py`.
"""

import sys
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest
import torch

from experiments.simulation.batch import RunSetting
from experiments.simulation.party_builder import simulated_party
from fedcg.learning.method import Aggregate, Weights
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.registry import get_method
from fedcg.wire.parts import Part

CLIENTS, ROUNDS, DIFFERENCES = 6, 14, 6
Vector = npt.NDArray[np.float64]


def flat(parts: Mapping[Part, Weights]) -> Vector:
    """All weights, the bias of the last layer at the end."""
    return np.concatenate(
        [w.double().flatten().numpy() for p in (Part.EXTRACTOR, Part.CLASSIFIER) for w in parts[p].values()]
    )


def cosine(one: Vector, other: Vector) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def estimated(partition: str, seed: int) -> tuple[list[Vector], list[dict[str, Vector]], float]:
    """How far a coming and going box's weights are estimated from the others', how far all really are, and its labels' correlation."""
    setting = RunSetting(
        clients=CLIENTS,
        partition=partition,
        method="fedavg",
        rounds=ROUNDS,
        local_epochs=2,
        images_per_client=200,
        seed=seed,
        quick=True,
    )
    party, method = simulated_party(setting, setting.source()), get_method("fedavg")
    initial = initial_parts(party.spec, party.roots.cohort)
    *stays, comes = sorted(party.datasets)
    states = {name: method.init_client(party.spec, initial) for name in (*stays, comes)}
    mean: dict[Part, Weights] = {part: initial[part] for part in (Part.EXTRACTOR, Part.CLASSIFIER)}
    sums, weights = [], []
    for number in range(1, ROUNDS + 1):
        sent = {}
        for name in (*stays, comes)[: CLIENTS if number % 2 else -1]:
            done = method.local_round(
                states[name], party.datasets[name].train, Aggregate(mean), party.client_context(name, number)
            )
            states[name], sent[name] = done.private, done.shared.parts
        mean = {p: {w: torch.stack([one[p][w] for one in sent.values()]).mean(0) for w in mean[p]} for p in mean}
        weights.append({name: flat(parts) for name, parts in sent.items()})
        sums.append(np.sum(list(weights[-1].values()), axis=0))
    turns = range(2, ROUNDS - 1, 2)
    guesses = [sums[t] - (sums[t - 1] + sums[t + 1]) / 2 - (sums[t - 1] + sums[t + 1]) / 2 / len(stays) for t in turns]
    others = [sum(weights[t][name] for name in stays) / len(stays) for t in turns]
    truths = [{name: weights[t][name] - other for name in weights[t]} for t, other in zip(turns, others, strict=True)]
    shares = {
        name: np.array(party.datasets[name].train.label_counts()) / len(party.datasets[name].train) for name in states
    }
    unlike = shares[comes] - np.mean([shares[name] for name in stays], axis=0)
    return guesses, truths, float(np.corrcoef(guesses[0][-10:], unlike)[0, 1])


@pytest.mark.slow
@pytest.mark.parametrize(("partition", "least"), [("iid", 0.2), ("dirichlet:0.3", 0.4)])
def test_means_with_and_without_a_box_point_to_its_weights_and_to_no_other_box(partition: str, least: float) -> None:
    own, labels = [], []
    for seed in (0, 1, 2):
        guesses, truths, correlation = estimated(partition, seed)
        *stays, comes = truths[0]
        labels.append(correlation)
        for count in (1, 2, DIFFERENCES):
            guess = np.mean(guesses[:count], axis=0)
            found = {
                name: cosine(guess, np.mean([truth[name] for truth in truths[:count]], axis=0)) for name in truths[0]
            }
            own.append(found[comes])
        assert own[-1] > least
        assert own[-1] > 1.5 * max(abs(found[name]) for name in stays)
    found_in = np.round(own, 2).reshape(3, 3).tolist()
    sys.stdout.write(
        f"{partition}: cosines after 1, 2, {DIFFERENCES} absences {found_in}, label shares {np.round(labels, 2)}\n"
    )
    if partition != "iid":
        assert np.mean(labels) > 0.5
