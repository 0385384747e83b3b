"""Checkpoints within a local round: a round whose process was killed resumes and ends with bit-identical results.

A stage of a method iterates over blocks of batches that depend only on the round's streams. A resumed round draws the
blocks before its checkpoint again without training on them. Before the first untrained block it restores all state that
steps change: networks, optimisers, sums of losses, torch's default generators and the streams that steps draw from.
Finished stages are not repeated.
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
    """A stateful object of a stage that is neither a network nor a torch optimiser."""

    def kept(self) -> Tensors:
        """The state, as tensors."""

    def restore(self, kept: Tensors) -> None:
        """Restore a state returned by `kept`."""


Kept = nn.Module | torch.optim.Optimizer | torch.Generator | Restorable


@dataclass
class RoundCheckpoint:
    """The checkpoints of one round attempt.

    Attributes:
        save: stores the state of all stages durably; raises only errors that should end the round.
        saved: the last stored state, in the format passed to `save`; empty for a new round.
        every_s: minimum seconds between two checkpoints.
        clock: monotonic seconds.
        prefix: of the names of stages.
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
        """The same checkpoints for training other than the round itself, whose stages have the same names."""
        return replace(self, prefix=f"{self.prefix}{prefix}-")

    def blocks(
        self, stage: str, kept: Mapping[str, Kept], source: Iterable[Block], device: str
    ) -> Iterator[tuple[Block, bool]]:
        """The blocks of a stage, each with whether to train on it: blocks before the checkpoint were already trained on.

        Anything else that draws from streams block by block must do so for every block.

        Args:
            stage: its name, unique in a round.
            kept: all state that its steps change, by name.
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
    """The moments and counts of an optimiser, by index of the weight and name."""
    weights = [weight for group in optimiser.param_groups for weight in group["params"]]
    return {
        f"{number}.{key}": value
        for number, weight in enumerate(weights)
        for key, value in optimiser.state.get(weight, {}).items()
        if isinstance(value, torch.Tensor)
    }


@torch.no_grad()
def restore_optimiser(optimiser: torch.optim.Optimizer, kept: Tensors) -> None:
    """Load a state from `optimiser_state` into an optimiser. Its existing tensors keep their memory."""
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
        # Not an f-string, which would write a `Part` by its member name (and by value on Python 3.10).
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
    """The states of torch's default generators, from which layers draw."""
    states = {f"{_RANDOM}/cpu": torch.random.get_rng_state()}
    if torch.device(device).type == "cuda":
        states[f"{_RANDOM}/cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random(saved: Tensors, device: str) -> None:
    torch.random.set_rng_state(saved[f"{_RANDOM}/cpu"])
    if f"{_RANDOM}/cuda" in saved:
        torch.cuda.set_rng_state(saved[f"{_RANDOM}/cuda"], device)
