"""Updates of small simulated federations, as cases for an audit."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from audit.attacks.attack import Effort, get_attack
from audit.evidence import Case, Colluder, Truth, View, joined
from audit.measures import Outcome
from experiments.data.client_datasets import build_cohort
from experiments.settings import root_secret
from experiments.simulation.batch import RunSetting
from experiments.simulation.party_builder import party_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulated_rounds
from fedcg.learning.spec import plan_from_mapping
from fedcg.wire.parts import Part, Report

WHOLE_MODEL: dict[str, Any] = {"method": "fedavg", "data": "digits", "images_per_client": 200, "local_epochs": 4}
WITH_GENERATOR: dict[str, Any] = {"method": "fedcg", "data": "digits", "images_per_client": 200}
HELPED: dict[str, Any] = {"method": "fedprobe", "clients": 4, "images_per_client": 60, "helped": True}
TRANSLATING: dict[str, Any] = {
    "method": "ppidsg", "data": "digits", "images_per_client": 100, "network": "image_small", "image_size": 16,
    "local_epochs": 6, "clients": 2, "quick": False, "lr": 0.01,
}  # fmt: skip


@functools.lru_cache(maxsize=8)
def simulated_case(*, auxiliary: int = 300, client: str = "client-1", helped: bool = False, **setting: Any) -> Case:
    """The last round of a simulation, as an audit has it of one client.

    Args:
        auxiliary: images that no client holds, from the common test set.
        client: whose update.
        helped: another box of the cohort tells the attacker what it has.
        setting: of the run (`RunSetting`); small by default: 3 clients, 2 rounds, 100 images each, 2 epochs, digits, FedCG.
    """
    defaults = {
        "clients": 3,
        "rounds": 2,
        "images_per_client": 100,
        "local_epochs": 2,
        "quick": True,
        "partition": "iid",
    }
    run = RunSetting.model_validate({**defaults, **setting})
    source = run.source()
    spec = complete_spec(plan_from_mapping(run.plan(source)))
    party = party_of(run, spec, build_cohort(source, spec.image, run.deal()))
    before, after = _last_two(list(simulated_rounds(party, Schedule(shadow=False, evaluate_every=run.rounds))))
    method, data = get_method(spec.method), party.datasets[client]
    sent = {name: _some(state.parts, method.payload.up) for name, state in after.states.items()}
    assert party.common is not None
    view = View(
        spec,
        client,
        run.rounds,
        sent[client],
        before.aggregate,
        after.aggregate,
        {name: parts for name, parts in sent.items() if name != client},
        Report(examples=len(data.train)),
        _first(party.common, auxiliary),
        colluder=Colluder.of(spec, party.roots.cohort, after.aggregate, steps=100) if helped else None,
    )
    start, end = (_some(one.states[client].parts, method.payload.private) for one in (before, after))
    truth = Truth(data.train, joined(data.val, data.test), start, end, after.states[client].extras)
    return Case(view, truth, Streams(root_secret(run.seed, "audit")))


def _last_two(rounds: list[Simulation]) -> tuple[Simulation, Simulation]:
    assert len(rounds) >= 2, "an audit of round 1 would need the start as a simulation"
    return rounds[-2], rounds[-1]


def _some(parts: Mapping[Part, Weights], wanted: frozenset[Part]) -> dict[Part, Weights]:
    return {part: parts[part] for part in sorted(wanted)}


def _first(images: ImageSet, count: int) -> ImageSet:
    return images.rows(torch.arange(min(count, len(images))))


def carried_out(attack: str, case: Case, effort: Effort = Effort.QUICK) -> Outcome:
    """What an attack comes to on a case that lacks nothing."""
    found = get_attack(attack)
    assert found.lacks(case) is None
    return found.run(case, effort, lambda done, total: None)


@functools.lru_cache(maxsize=16)
def outcome_of(attack: str, **setting: Any) -> Outcome:
    """What a quick attack comes to on a `simulated_case` of this setting."""
    return carried_out(attack, simulated_case(**setting))
