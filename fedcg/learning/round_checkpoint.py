"""Checkpoints inside a local round, so that a round whose process was killed goes on and ends in the same bits.

A stage of a method goes over blocks of batches that follow from the round's streams alone. A round that goes on draws the blocks before
its checkpoint again, takes no step on them, and restores all that steps have changed before the first block that was not trained on: networks,
optimisers, sums of losses, torch's default generators, streams that steps draw from. Stages that were finished are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

Block = TypeVar("Block")
Tensors = Mapping[str, torch.Tensor]
_PROGRESS = "progress"
_RANDOM = "random"


@runtime_checkable
class Restorable(Protocol):
    """An object of a stage with a state of its own that is neither a network nor an optimiser of torch."""

    def kept(self) -> Tensors:
        """Its state, as tensors."""

    def restore(self, kept: Tensors) -> None:
        """Take a state that `kept` returned."""


Kept = nn.Module | torch.optim.Optimizer | torch.Generator | Restorable


@dataclass
class RoundCheckpoint:
    """The checkpoints of one round attempt.

    Attributes:
        save: makes the state of all stages durable; raises nothing that should not end the round.
        saved: the state that was made durable last, in the form that `save` gets; empty for a round that begins.
        every_s: seconds between two checkpoints at least.
        clock: monotonic seconds.
        prefix: before the names of stages.
    """

    save: Callable[[Tensors], None]
    saved: Tensors
    every_s: float
    clock: Callable[[], float]
    prefix: str = ""
    _finished: dict[str, torch.Tensor] = field(default_factory=dict)
    _saved_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._saved_at = self.clock()

    def named(self, prefix: str) -> RoundCheckpoint:
        """The same checkpoints for training beside the round itself, whose stages have the same names."""
        return replace(self, prefix=f"{self.prefix}{prefix}-")

    def blocks(
        self, stage: str, kept: Mapping[str, Kept], source: Iterable[Block], device: str
    ) -> Iterator[tuple[Block, bool]]:
        """The blocks of a stage, each with whether it is to be trained on; a block that is not was trained on before a checkpoint.

        What else draws from streams block by block must do so for every block.

        Args:
            stage: its name, of which a round has one.
            kept: all that its steps change, by name.
            source: the blocks, a function of the round's streams alone.
            device: torch device string of the stage.
        """
        name = f"{self.prefix}{stage}"
        saved = {key[len(name) + 1 :]: one for key, one in self.saved.items() if key.startswith(f"{name}/")}
        done, is_finished = saved[_PROGRESS].tolist() if saved else (0, 0)
        lasting = {key: one for key, one in kept.items() if not isinstance(one, torch.optim.Optimizer)}
        if is_finished:
            _restore(lasting, saved)
        else:
            number = -1
            for number, block in enumerate(source):
                if saved and number == done:
                    _restore(kept, saved)
                    _set_random(saved, device)
                yield block, number >= done
                if number >= done and self.clock() - self._saved_at >= self.every_s:
                    state = {**_state(kept), **_random(device), _PROGRESS: torch.tensor([number + 1, 0])}
                    self.save({**self._finished, **{f"{name}/{key}": one for key, one in state.items()}})
                    self._saved_at = self.clock()
            if saved and number + 1 == done:
                _restore(kept, saved)
        state = {**_state(lasting), _PROGRESS: torch.tensor([0, 1])}
        self._finished.update({f"{name}/{key}": one for key, one in state.items()})


def optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The moments and counts of an optimiser, by the number of their weight and their name."""
    weights = [weight for group in optimiser.param_groups for weight in group["params"]]
    return {
        f"{number}.{key}": value
        for number, weight in enumerate(weights)
        for key, value in optimiser.state.get(weight, {}).items()
        if isinstance(value, torch.Tensor)
    }


@torch.no_grad()
def restore_optimiser(optimiser: torch.optim.Optimizer, kept: Tensors) -> None:
    """Give an optimiser a state of `optimiser_state`; tensors that it has stay where they are."""
    weights = [weight for group in optimiser.param_groups for weight in group["params"]]
    for name, value in kept.items():
        number, key = name.split(".", 1)
        weight = weights[int(number)]
        state = optimiser.state[weight]
        if key not in state:
            state[key] = torch.empty_like(weight) if value.shape == weight.shape else value.to(weight.device)
        state[key].copy_(value)


def _state(kept: Mapping[str, Kept]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, one in kept.items():
        if isinstance(one, nn.Module):
            state = one.state_dict()
        elif isinstance(one, Restorable):
            state = dict(one.kept())
        elif isinstance(one, torch.Generator):
            state = {"state": one.get_state()}
        else:
            state = optimiser_state(one)
        # Not an f-string: it would write the member's name for a `Part` (and Python 3.10 its value).
        tensors |= {name + "/" + key: value.detach().cpu().clone().contiguous() for key, value in state.items()}
    return tensors


def _restore(kept: Mapping[str, Kept], saved: Tensors) -> None:
    for name, one in kept.items():
        state = {key[len(name) + 1 :]: value for key, value in saved.items() if key.startswith(name + "/")}
        if isinstance(one, nn.Module):
            one.load_state_dict(state)
        elif isinstance(one, Restorable):
            one.restore(state)
        elif not state:
            continue
        elif isinstance(one, torch.Generator):
            one.set_state(state["state"])
        else:
            restore_optimiser(one, state)


def _random(device: str) -> dict[str, torch.Tensor]:
    """The states of torch's default generators, which layers draw from."""
    states = {f"{_RANDOM}/cpu": torch.random.get_rng_state()}
    if torch.device(device).type == "cuda":
        states[f"{_RANDOM}/cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random(saved: Tensors, device: str) -> None:
    torch.random.set_rng_state(saved[f"{_RANDOM}/cpu"])
    if f"{_RANDOM}/cuda" in saved:
        torch.cuda.set_rng_state(saved[f"{_RANDOM}/cuda"], device)
