"""Random numbers for layers that draw their own: dropout, stochastic depth, a user's `torch.rand`.

Such layers know one source only, torch's default generator of the device. Here it is lent to them for the length of a stage,
started from the stage's stream, and given back as it was: results follow from the streams alone, and no caller of this
program finds its global random state changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedcg.learning.method import RoundContext


@contextmanager
def seeded_layers(ctx: RoundContext, *purpose: object) -> Iterator[None]:
    """Within the block, layers that draw random numbers draw from the stream (`purpose`, "layers") of the round.

    Every stage that runs a network in train mode stands in such a block, whatever its layers are: a network of a user's own can
    draw anywhere in its forward pass. It costs a few microseconds a stage.
    """
    with lent_generators(ctx.streams.seed(*purpose, "layers"), ctx.device):
        yield


@contextmanager
def lent_generators(seed: int, device: str = "cpu") -> Iterator[None]:
    """Start torch's default generators, of the CPU and of `device`, from `seed`; restore their states afterwards.

    Not for two threads at once: the default generators belong to the whole process.
    """
    place = torch.device(device)
    lent = [torch.cuda.current_device() if place.index is None else place.index] if place.type == "cuda" else []
    with torch.random.fork_rng(devices=lent):
        # Not torch.manual_seed: it would seed every GPU, lent or not.
        torch.default_generator.manual_seed(seed)
        for index in lent:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
