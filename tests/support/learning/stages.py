"""The stages of every method in a round, each captured to be run again separately, and a CUDA graph's behaviour on the CPU."""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fedcg.learning.method import Machine, RoundContext
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.round_checkpoint import Restorable, Tensors
from fedcg.learning.simulation.simulation import update_of
from fedcg.learning.spec import ParameterValue
from fedcg.learning.training import cuda_graph
from fedcg.learning.training.stage import Batches, Stage, run_stage
from tests.support.learning import learning_cases as cases

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
    "fedmd_cg as in its code": ("fedmd_cg", {"diversity": "mean_squared"}, {}),
}
CASES = [*method_names(), *(pytest.param(case, marks=pytest.mark.slow) for case in VARIANTS)]
"""Every installed method, with its example's networks, and variants with other parameters and networks."""


@dataclass(frozen=True)
class Caught:
    """A stage just before it runs, with all its blocks, each of at most two batches."""

    stage: Stage
    ctx: RoundContext
    others: Mapping[str, Tensors]

    def again(self) -> Stage:
        """Return the stage from its start, with its own networks and optimisers, and without calls after its steps."""
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
    """Return a new optimiser like the given one, for other weights."""
    (group,) = optimiser.param_groups
    settings = {name: value for name, value in group.items() if name != "params"}
    make: Callable[..., torch.optim.Optimizer] = type(optimiser)
    return make([twins[weight] for weight in group["params"]], **settings)


def copied(tensors: Tensors) -> Tensors:
    """Return a copy with its own storage."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


@cache
def stages_of(case: str, device: str = "cpu") -> tuple[Caught, ...]:
    """Return the stages of a client's third round, and of the server after two clients."""
    name, params, network = VARIANTS.get(case, (case, {}, {}))
    plan = cases.usual_plan(name, **{"steps": 5, **params})  # of 8, 8, 8, 2 and 8 rows
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
            if getattr(module, "__name__", "") != __name__ and vars(module).get("run_stage") is run_stage:
                patch.setattr(module, "run_stage", caught)
        for client, images in (("a", 26), ("b", 20)):
            ctx = replace(cases.context(spec, 3, client.encode()), machine=Machine(device))
            result = cases.local_round_of(spec, cases.bright_images(images, images, form=spec.image), incoming, ctx)
            updates[client] = update_of(client, result)
        cases.merged(
            cases.aggregator_of(spec, replace(cases.context(spec, 3, b"coordinator"), machine=Machine(device))), updates
        )
    return tuple(found.values())


def cut_finely(batches: Batches) -> Batches:
    """Return the same batches in blocks of at most two, all created."""
    blocks = []
    for block in batches.blocks:
        cuts = batches.cut(block)
        for first in range(0, len(cuts), 2):
            rows = slice(cuts[first].start, cuts[first : first + 2][-1].stop)
            blocks.append(tuple(tensor[rows].clone() for tensor in block))
    return replace(batches, blocks=blocks)


# Operations that block the host or determine another result's shape: forbidden while a CUDA graph is captured.
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero")


class ReplayedStep:
    """Replaces `cuda_graph.GraphedStep`."""

    made = 0
    eager = 0

    def __init__(
        self, step: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], rewind: Callable[[], None]
    ) -> None:
        type(self).made += 1
        self._step = step
        self._inputs = [tensor.clone() for tensor in inputs]
        step(*self._inputs)
        with _Recording() as recording:
            self._result = step(*self._inputs).detach()
        self._calls = recording.calls
        rewind()

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Replay on these inputs; run normally for other shapes."""
        if any(mine.shape != given.shape for mine, given in zip(self._inputs, inputs, strict=True)):
            type(self).eager += 1
            return self._step(*inputs)
        with torch.no_grad():
            for mine, given in zip(self._inputs, inputs, strict=True):
                mine.copy_(given)
            for call, args, kwargs, before in self._calls:
                again = call(*tree_map(_alias, args), **tree_map(_alias, kwargs))
                for then, now in zip(before, tree_leaves(again), strict=True):
                    if isinstance(then, torch.Tensor) and then.data_ptr() != now.data_ptr():
                        then.copy_(now)
        return self._result


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _WAITING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        call = (func, tree_map(_alias, args), tree_map(_alias, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.calls.append((*call, tree_leaves(tree_map(_alias, result))))
        return result


def _alias(value: object) -> object:
    """Return the same memory as a separate tensor: an operation such as `squeeze_` changes a tensor's shape but not its memory."""
    return value.detach() if isinstance(value, torch.Tensor) else value


@contextmanager
def replays() -> Iterator[None]:
    """Steps are recorded and replayed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graph, "LEAST_STEPS", 1)
        patch.setattr(cuda_graph, "on_cuda", lambda _: True)
        patch.setattr(cuda_graph, "GraphedStep", ReplayedStep)
        patch.setattr(ReplayedStep, "made", 0)
        patch.setattr(ReplayedStep, "eager", 0)
        yield
