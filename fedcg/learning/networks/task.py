"""A user's own task: a network, its private tensors, and code that trains and evaluates it instead of the built-in stages.

As with any split, the network's tensors are in two parts: the private ones (extractor), and the rest (classifier). If a
trainer keeps none private, the first part holds the first tensor.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from fedcg.errors import told
from fedcg.learning.errors import NetworkError, ProgramError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks.splits import FeatureRange, Split
from fedcg.values import Value
from fedcg.wire.parts import Part

if TYPE_CHECKING:
    from fedcg.learning.method import Parts

Kind = Literal["train", "validation", "test"]


class TrainerContext(Value):
    """A round's settings for a trainer.

    Attributes:
        round: counted from 1.
        epochs: passes over the data, from the plan's parameters; `batch_size` and `lr` likewise.
        device: of the model's tensors, a torch device string.
        progress: call it with (done, total). Optimiser steps also count as signs of life.
    """

    round: int
    epochs: int
    batch_size: int
    lr: float
    device: str
    progress: Callable[[int, int], None]
    _mu: float = 0.0
    _start: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def penalty(self, model: nn.Module) -> torch.Tensor:
        """FedProx's term (eq. 2) to add to the loss: μ/2 · ‖w - w_start‖² over trained parameters; 0 with other methods."""
        if not self._mu:
            return torch.zeros((), device=self.device)
        moved = [
            (now - self._start[name]).square().sum() for name, now in model.named_parameters() if now.requires_grad
        ]
        return self._mu / 2.0 * torch.stack(moved).sum()


class Trainer(ABC):
    """How one participant trains and evaluates a network, for any task and any loop.

    Each round uses a copy of it (`copy.copy`) and a new model, so attributes set by `train` are lost.

    Attributes:
        private: patterns of names in `model.state_dict()`, such as "backbone.*". These tensors never leave the device.
        metric: name of the metric that selects the best model, from 0 to 1, higher is better (R², mean IoU, F1). Values
            below 0 count as 0.
        examples: number of training examples, the participant's weight in averages.
    """

    private: Sequence[str] = ()
    metric: str = "score"
    examples: int = 1

    @abstractmethod
    def train(self, model: nn.Module, context: TrainerContext) -> None:
        """Train the model in place. The round seeds torch's random numbers."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Metrics of a model on validation data. The model is in eval mode, without gradients."""

    def test(self, model: nn.Module) -> Mapping[str, float]:
        """Metrics on held-out data, for information; by default those of validation."""
        return self.evaluate(model)


class Held(ImageSet):
    """A placeholder for the data of a trainer, which holds its own: as many empty rows as examples."""

    kind: Kind = "train"


@dataclass(frozen=True, eq=False)
class Task:
    """A network with its trainer.

    Attributes:
        name: name of the participant, for messages.
        net: the network with its initial weights.
    """

    name: str
    net: nn.Module
    trainer: Trainer

    def held(self) -> tuple[Held, Held, Held]:
        """Placeholders for its training, validation and test data."""
        count = self.trainer.examples
        if not isinstance(count, int) or not 2 <= count <= 1 << 30:
            raise ProgramError(
                f"client {self.name}: Trainer.examples is {count!r}: set the number of training examples, 2 or more"
            )
        kinds: tuple[Kind, Kind, Kind] = ("train", "validation", "test")
        train, val, test = (
            Held(torch.zeros(rows, 1, dtype=torch.uint8), torch.zeros(rows, dtype=torch.int64), (), kind)
            for rows, kind in zip((count, 1, 1), kinds, strict=True)
        )
        return train, val, test

    def parts(self, net: nn.Module | None = None) -> dict[Part, dict[str, torch.Tensor]]:
        """Copies of the tensors of the network, or of a trained one, on the CPU.

        Raises:
            ProgramError: a pattern of `private` matches no tensor, no tensor is left to share, or a tensor can't be
                stored.
        """
        tensors = {name: one.detach().to("cpu", copy=True) for name, one in (net or self.net).state_dict().items()}
        where = f"client {self.name}: "
        for name, tensor in tensors.items():
            if tensor.dtype not in (torch.float32, torch.int64):
                raise ProgramError(f"{where}{name} is {tensor.dtype}; only float32 and int64 can be stored")
        if isinstance(self.trainer.private, str):
            raise ProgramError(f"{where}Trainer.private is a text: use a list of patterns, [{self.trainer.private!r}]")
        private: set[str] = set()
        for pattern in self.trainer.private:
            found = fnmatch.filter(tensors, pattern)
            if not found:
                raise ProgramError(
                    f"{where}Trainer.private = {pattern!r} matches no tensor; the tensors are {', '.join(list(tensors)[:6])}"
                )
            private |= set(found)
        private = private or set(list(tensors)[:1])  # all tensors are then shared
        if private == tensors.keys():
            raise ProgramError(
                f"{where}Trainer.private matches all tensors, so none is left to share; match fewer, or use method local"
            )
        owners: dict[int, str] = {}
        for name, parameter in (net or self.net).named_parameters(remove_duplicate=False):
            other = owners.setdefault(id(parameter), name)
            if (other in private) != (name in private):
                raise ProgramError(
                    f"{where}{other} and {name} are one tensor, but Trainer.private matches only one: match both, or untie them"
                )
        return {
            Part.EXTRACTOR: {name: one for name, one in tensors.items() if name in private},
            Part.CLASSIFIER: {name: one for name, one in tensors.items() if name not in private},
        }

    def split(self) -> Split:
        """The two parts as modules that only hold tensors."""
        parts = self.parts()
        extractor, classifier = (functools.partial(_bag, parts[part]) for part in (Part.EXTRACTOR, Part.CLASSIFIER))
        return Split(extractor, classifier, FeatureRange.REAL, initialises_itself=True, features=(1,))

    def model(self, parts: Parts, device: str = "cpu") -> nn.Module:
        """A copy of the network with these weights."""
        net = copy.deepcopy(self.net)
        try:
            net.load_state_dict({**parts[Part.EXTRACTOR], **parts[Part.CLASSIFIER]})
        except RuntimeError as error:
            raise NetworkError(f"client {self.name}: the weights do not fit its network: {error}") from error
        return net.to(device)

    def check_example(self, inputs: torch.Tensor) -> None:
        """Check that the network accepts inputs like the participant's example, [B, *shape], and returns one tensor.

        Raises:
            NetworkError: it does not.
        """
        try:
            with torch.no_grad():
                made = copy.deepcopy(self.net).eval()(inputs)
        except Exception as error:
            raise NetworkError(
                f"client {self.name}: the network can't run on inputs like example, {list(inputs.shape)}: {error}"
            ) from error
        if not isinstance(made, torch.Tensor) or made.shape[:1] != inputs.shape[:1]:
            raise NetworkError(
                f"client {self.name}: the network must return one tensor [B, ...] for a batch; wrap it if it does not"
            )

    def figure(self, model: nn.Module, kind: Kind) -> float:
        """The trainer's metric for a model, in [0, 1].

        Raises:
            ProgramError: its code raises, or the metric is missing or invalid.
        """
        trainer, name = self.trainer, "test" if kind == "test" else "evaluate"
        try:
            with torch.no_grad():
                found = getattr(trainer, name)(model.eval())
        except Exception as error:
            raise ProgramError(f"client {self.name}: Trainer.{name} failed: {told(error)}") from error
        try:
            number = float(found[trainer.metric])
        except (TypeError, KeyError, ValueError, IndexError, RuntimeError):
            number = math.nan
        if not math.isfinite(number) or number > 1.0 + 1e-6:
            raise ProgramError(
                f"client {self.name}: Trainer.{name} must return {{{trainer.metric!r}: a number up to 1, higher is better}}, not {found!r:.200}"
            )
        return min(1.0, max(0.0, number))


def _bag(tensors: Mapping[str, torch.Tensor], *_: object) -> nn.Module:
    """A module with these tensors under their names."""
    bag = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        holder = bag
        for piece in path:
            if piece not in holder._modules:  # noqa: SLF001 - no public way
                holder.add_module(piece, nn.Module())
            holder = holder.get_submodule(piece)
        holder.register_buffer(last, tensor.clone())
    return bag
