"""The stages that every method runs in a round, each caught as it begins, to be run again alone."""

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from fedcg.learning.method import Machine, RoundContext
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.round_checkpoint import Restorable, Tensors
from fedcg.learning.simulation.simulation import update_of
from fedcg.learning.spec import ParameterValue
from fedcg.learning.training.stage import Batches, Stage, run_stage
from tests.support.learning.learning_cases import (
    aggregator_of,
    bright_images,
    context,
    local_round_of,
    merged,
    usual_plan,
)

VARIANTS: Mapping[str, tuple[str, dict[str, ParameterValue], dict[str, ParameterValue]]] = {
    "fedavg on lenet5": ("fedavg", {"optimiser": "sgd", "lr": 0.01}, {"split": "lenet5"}),
    "fedprox with aux": ("fedprox", {"aux": 1.0}, {}),
    "fedcg of mlp": ("fedcg", {"aux": 1.0, "aggregation": "crossed_kd"}, {"generator": "mlp", "discriminator": "mlp"}),
    "fedcg of conv": ("fedcg", {}, {"generator": "conv_small", "discriminator": "conv"}),
    "fedcg in two passes": (
        "fedcg",
        {"discriminator_passes": "separate"},
        {"generator": "mlp", "discriminator": "conv_published"},
    ),
    "fedmd_cg as published": ("fedmd_cg", {"diversity": "published_2", "aggregation": "kd"}, {}),
    "fedmd_cg of draws": ("fedmd_cg", {"diversity": "mean_squared", "exact_clients": 1}, {}),
}
CASES = [*method_names(), *(pytest.param(case, marks=pytest.mark.slow) for case in VARIANTS)]
"""Every method that is installed, with its example's networks, and what a few parameters and networks change."""


@dataclass(frozen=True)
class Caught:
    """A stage as it was about to run, all its blocks made, each of at most two batches."""

    stage: Stage
    ctx: RoundContext
    others: Mapping[str, Tensors]

    def again(self) -> Stage:
        """The stage from its beginning, with networks and optimisers of its own; nothing is called after its steps."""
        networks, twins = copy.deepcopy(dict(self.stage.networks)), dict[torch.Tensor, torch.Tensor]()
        for name, network in self.stage.networks.items():
            twins.update(zip(network.parameters(), networks[name].parameters(), strict=True))
        trained = {
            name: replace(one, optimiser=fresh(one.optimiser, twins)) for name, one in self.stage.trained.items()
        }
        for name, one in self.stage.kept.items():
            if isinstance(one, Restorable):
                one.restore(copied(self.others[name]))
        return replace(self.stage, networks=networks, trained=trained, after=())


def fresh(optimiser: torch.optim.Optimizer, twins: Mapping[torch.Tensor, torch.Tensor]) -> torch.optim.Optimizer:
    """A new optimiser like a new one, of other weights."""
    (group,) = optimiser.param_groups
    settings = {name: value for name, value in group.items() if name != "params"}
    make: Callable[..., torch.optim.Optimizer] = type(optimiser)
    return make([twins[weight] for weight in group["params"]], **settings)


def copied(tensors: Tensors) -> Tensors:
    """The same in storage of its own."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


@cache
def stages_of(case: str, device: str = "cpu") -> tuple[Caught, ...]:
    """The stages of a client's third round, and of the server after two clients."""
    name, params, network = VARIANTS.get(case, (case, {}, {}))
    plan = usual_plan(name, **{"steps": 5, **params})  # of 8, 8, 8, 2 and 8 rows
    plan = plan.model_copy(update={"network": plan.network.model_copy(update=network), "augment_flip": True})
    spec, found = complete_spec(plan), dict[str, Caught]()

    def caught(stage: Stage, ctx: RoundContext) -> tuple[float, ...]:
        stage = replace(stage, batches=cut_finely(stage.batches))
        others = {name: copied(one.kept()) for name, one in stage.kept.items() if isinstance(one, Restorable)}
        one = Caught(stage, ctx, others)
        found.setdefault(stage.name, replace(one, stage=one.again()))
        return run_stage(stage, ctx)

    incoming = get_method(name).init_server(spec, initial_parts(spec, b"cohort")).aggregate
    updates = {}
    with pytest.MonkeyPatch.context() as patch:
        for module in list(sys.modules.values()):
            if module.__name__ != __name__ and vars(module).get("run_stage") is run_stage:
                patch.setattr(module, "run_stage", caught)
        for client, images in (("a", 26), ("b", 20)):
            ctx = replace(context(spec, 3, client.encode()), machine=Machine(device))
            result = local_round_of(spec, bright_images(images, images, form=spec.image), incoming, ctx)
            updates[client] = update_of(client, result)
        merged(aggregator_of(spec, replace(context(spec, 3, b"coordinator"), machine=Machine(device))), updates)
    return tuple(found.values())


def cut_finely(batches: Batches) -> Batches:
    """The same batches in blocks of at most two, all of them made."""
    blocks = []
    for block in batches.blocks:
        cuts = batches.cut(block)
        for first in range(0, len(cuts), 2):
            rows = slice(cuts[first].start, cuts[first : first + 2][-1].stop)
            blocks.append(tuple(tensor[rows].clone() for tensor in block))
    return replace(batches, blocks=blocks)
