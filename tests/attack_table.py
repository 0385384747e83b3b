"""What one attacker among four clients costs the three honest ones, with and without the coordinator's defence; by seeded streams.

`python -m tests.attack_table` prints the table of docs/security.md. The clients and the server run the method's own functions; the
defence is the coordinator's own code: validation, the bound of the distance, clipping, the cap of the weight.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from coordinator.config import RobustnessSettings
from coordinator.errors import ValidationError
from coordinator.updates.robustness import Distances, Yardstick, clipped, given_weights, limits_of, medians_of, over
from coordinator.updates.validation import Expected, validate_update
from experiments.data.client_datasets import build_cohort
from experiments.data.deal import DealOptions
from experiments.data.open import open_source
from experiments.data.partition_shares import Partition
from fedcg.learning.method import Aggregate, LocalResult, SharedResult, Weights
from fedcg.learning.networks.initial_weights import complete_spec
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.runners import SerialRunner
from fedcg.learning.simulation.simulation import simulated_rounds
from fedcg.learning.simulation.state import Schedule, Simulation
from fedcg.learning.simulation.tasks import LocalOutcome, LocalTask
from fedcg.learning.spec import FederationSpec, plan_from_mapping
from fedcg.learning.tensor_conversion import to_arrays, to_weights
from fedcg.learning.training.evaluation import evaluate
from fedcg.wire.artifacts.artifacts import Base, pack
from fedcg.wire.artifacts.tensors import PartArrays
from fedcg.wire.parts import Part, Report, ReportField
from tests.support.coordinator.toy_artifacts import update_header
from tests.support.learning.learning_cases import roots_from_seed

BASE = "0" * 64
SETTINGS = RobustnessSettings()
Parts = Mapping[Part, Weights]
Attack = Callable[[LocalResult, Parts], LocalResult]


def flipped(times: float) -> Attack:
    """The step that training took, the other way round and `times` as far."""

    def attack(result: LocalResult, base: Parts) -> LocalResult:
        return _shared(
            result,
            {
                part: {
                    name: _moved(base[part][name], tensor, -times, name) if tensor.is_floating_point() else tensor
                    for name, tensor in weights.items()
                }
                for part, weights in result.shared.parts.items()
            },
        )

    return attack


def constant(result: LocalResult, base: Parts) -> LocalResult:
    """A classifier whose last layer names class 0, whatever it sees."""
    classifier = dict(result.shared.parts[Part.CLASSIFIER])
    weight, bias = list(classifier)[-2:]
    classifier[weight] = torch.zeros_like(classifier[weight])
    classifier[bias] = torch.zeros_like(classifier[bias]).index_fill(0, torch.tensor([0]), 50.0)
    return _shared(result, {**result.shared.parts, Part.CLASSIFIER: classifier})


def boasting(result: LocalResult, base: Parts) -> LocalResult:
    """An honest update that claims 10^9 examples."""
    return replace(result, report=result.report.model_copy(update={"examples": 10**9}))


ATTACKS: Mapping[str, Attack | None] = {
    "nobody attacks": None,
    "sign-flipped x 1": flipped(1.0),
    "sign-flipped x 10": flipped(10.0),
    "constant class": constant,
    "10^9 examples": boasting,
}


def _shared(result: LocalResult, parts: Parts) -> LocalResult:
    return replace(result, shared=SharedResult(parts))


def _moved(start: torch.Tensor, end: torch.Tensor, share: float, name: str) -> torch.Tensor:
    moved = start + share * (end - start)
    return moved.clamp(min=0.0) if name.endswith("running_var") else moved


@dataclass
class AttackedRunner(SerialRunner):
    """Trains every client; the last one's result is what the attack makes of it, and all pass the defence where there is one."""

    attack: Attack | None
    is_defended: bool

    def __post_init__(self) -> None:
        super().__init__()
        self._typical: Distances = {}

    def local(self, tasks: Sequence[LocalTask], aggregate: Aggregate) -> Iterator[LocalOutcome]:
        outcomes = {outcome.client: self._told(outcome) for outcome in super().local(tasks, aggregate)}
        attacker = max(outcomes)
        if self.attack is not None:
            result = outcomes[attacker].result
            assert result is not None
            outcomes[attacker] = replace(outcomes[attacker], result=self.attack(result, aggregate.parts))
        return iter((self._defended(outcomes, aggregate) if self.is_defended else outcomes).values())

    def _told(self, outcome: LocalOutcome) -> LocalOutcome:
        assert outcome.result is not None, outcome.failure
        report = Report(examples=outcome.result.report.examples)
        return replace(outcome, result=replace(outcome.result, report=report))

    def _defended(self, outcomes: Mapping[str, LocalOutcome], aggregate: Aggregate) -> dict[str, LocalOutcome]:
        spec = self._started.spec
        yardstick = Yardstick(Base(BASE, to_arrays(aggregate.parts)), self._typical)
        passed, decoded, distances = dict(outcomes), {}, {}
        for client, outcome in outcomes.items():
            assert outcome.result is not None
            try:
                decoded[client] = _validated(spec, client, outcome.result, yardstick.base)
                measured = yardstick.distances(decoded[client])
                yardstick.check(client, measured)
                distances[client] = measured
            except ValidationError as error:
                passed[client] = replace(outcome, result=None, failure=error.reason)
        medians = medians_of(list(distances.values()))
        limits = limits_of(self._typical or medians, SETTINGS.clip_medians)
        self._typical = medians
        for client, row in distances.items():
            result = outcomes[client].result
            assert result is not None
            kept = to_weights(clipped(decoded[client], yardstick.base.parts, over(row, limits)))
            passed[client] = replace(passed[client], result=_shared(result, kept))
        results = {client: outcome.result for client, outcome in passed.items() if outcome.result is not None}
        weights = given_weights({client: each.report.examples or 1 for client, each in results.items()}, SETTINGS)
        for client, result in results.items():
            passed[client] = replace(passed[client], result=replace(result, report=Report(examples=weights[client])))
        return passed


def _validated(spec: FederationSpec, client: str, result: LocalResult, base: Base) -> PartArrays:
    header = update_header(spec, 1, 1, client, BASE, report=result.report)
    data = pack(header, to_arrays(result.shared.parts), spec.codec)
    return validate_update(data, spec, Expected(spec.federation, 1, 1, client, BASE), base).parts


def party(method: str, partition: str, rounds: int, epochs: int, seed: int) -> Party:
    """Four clients with scikit-learn's digits."""
    source = open_source("digits")
    plan = {
        "federation": "attacked",
        "classes": list(source.classes),
        "method": method,
        "rounds": rounds,
        "seed": seed,
        "min_clients": 2,
        "codec": "f32",
        "aggregate_codec": "f32",
        "image": {"mode": "L", "height": 28, "width": 28, "mean": [0.5], "std": [0.5]},
        "network": {"split": "lenet5_relu", "generator": "mlp", "discriminator": "mlp", "noise_dim": 32},
        "params": {"epochs": epochs, **({"server_iterations": 200} if method == "fedcg" else {})},
    }
    spec = complete_spec(plan_from_mapping(plan))
    spec = spec.model_copy(update={"report": (ReportField.EXAMPLES,)})
    cohort = build_cohort(source, spec.image, DealOptions(4, Partition.parse(partition), seed))
    return Party(spec, cohort.clients, roots_from_seed(seed, tuple(sorted(cohort.clients))), cohort.common)


def downloaded(here: Party, now: Simulation) -> float:
    """Mean accuracy, on the common test set, of the honest clients' models with the last aggregate loaded, in percent."""
    assert here.common is not None
    honest = sorted(now.states)[:-1]
    found = [evaluate(here.spec, {**now.states[name].parts, **now.aggregate.parts}, here.common) for name in honest]
    return 100.0 * sum(each.accuracy for each in found) / len(found)


def attacked(here: Party, attack: Attack | None, *, is_defended: bool) -> float:
    """`downloaded` after all rounds."""
    runner = AttackedRunner(attack, is_defended)
    *_, last = simulated_rounds(here, Schedule(shadow=False, evaluate_every=1000), runner=runner)
    return downloaded(here, last)


def _lines(method: str, partition: str, rounds: int, epochs: int, seeds: Sequence[int]) -> Iterator[str]:
    yield "| the fourth client | without the defence | with it |"
    yield "|---|---|---|"
    for name, attack in ATTACKS.items():
        cells = []
        for is_defended in (False, True):
            found = [
                attacked(party(method, partition, rounds, epochs, seed), attack, is_defended=is_defended)
                for seed in seeds
            ]
            cells.append(" / ".join(f"{each:.1f}" for each in found))
        yield f"| {name} | {cells[0]} | {cells[1]} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="fedcg")
    parser.add_argument("--partition", default="iid", help="iid or dirichlet:OMEGA")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for line in _lines(chosen.method, chosen.partition, chosen.rounds, chosen.epochs, chosen.seeds):
        print(line, flush=True)  # noqa: T201 - it is a command
