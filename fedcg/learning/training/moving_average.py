"""The exponential moving average of a client's networks over the steps of a round: a further candidate for its personal model.

Never sent: what goes up is what the steps left. The average starts anew in every round, from the weights that the round starts with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from fedcg.learning.method import TrainingParams, Weights
from fedcg.learning.networks import weights_of
from fedcg.wire.parts import Part

EXTRA = "ema_"
"""Before a part's name, in `ClientState.extras`."""


class MovingAverage:
    """θ̄ ← d θ̄ + (1 - d) θ after every step, with d = min(decay, (1 + t) / (10 + t)) at step t; buffers as they are.

    Args:
        nets: as the round starts; averaged while they are trained in place.
        decay: in (0, 1).

    Attributes:
        means: the networks so far, by part.
    """

    def __init__(self, nets: Mapping[Part, nn.Module], decay: float) -> None:
        self._nets = dict(nets)
        self.means = {part: copy.deepcopy(net) for part, net in nets.items()}
        self._decay, self._steps = decay, torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def __call__(self) -> None:
        """A step is done."""
        self._steps += 1
        step = int(self._steps)
        kept = min(self._decay, (1 + step) / (10 + step))
        for part, net in self._nets.items():
            mean = self.means[part]
            for old, new in zip(mean.parameters(), net.parameters(), strict=True):
                old.lerp_(new, 1.0 - kept)
            for buffer, now in zip(mean.buffers(), net.buffers(), strict=True):
                buffer.copy_(now)

    def kept(self) -> dict[str, torch.Tensor]:
        """For a checkpoint."""
        found = {
            f"{part.value}/{name}": tensor for part, weights in self._weights() for name, tensor in weights.items()
        }
        return {**found, "steps": self._steps}

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        self._steps = kept["steps"].clone()
        for part, net in self.means.items():
            net.load_state_dict({name: kept[f"{part.value}/{name}"] for name in net.state_dict()})

    def extras(self) -> dict[str, Weights]:
        """For `ClientState.extras`."""
        return {EXTRA + part.value: weights for part, weights in self._weights()}

    def _weights(self) -> list[tuple[Part, Weights]]:
        return [(part, weights_of(net)) for part, net in self.means.items()]


def moving_average(
    nets: Mapping[Part, nn.Module],
    params: TrainingParams,
    parts: Iterable[Part] = (Part.EXTRACTOR, Part.CLASSIFIER),
) -> tuple[MovingAverage, ...]:
    """Of these parts, where the parameters ask for it; for `Stage.after`."""
    return (MovingAverage({part: nets[part] for part in parts}, params.ema),) if params.ema else ()


def average_extras(averages: Iterable[MovingAverage]) -> dict[str, Weights]:
    """For `ClientState.extras`."""
    return {name: weights for average in averages for name, weights in average.extras().items()}


def averaged_parts(extras: Mapping[str, Weights]) -> dict[Part, Weights] | None:
    """The averaged personal model among a client's extras; None without one."""
    found = {Part(name.removeprefix(EXTRA)): weights for name, weights in extras.items() if name.startswith(EXTRA)}
    return found or None
