"""FedProx (Li et al., MLSys 2020): FedAvg with clients kept close to the global model.

Eq. 2: each client minimises h(w) = F(w) + μ/2 · ‖w - w_global‖², over all shared parameters (BatchNorm's buffers are
statistics, not parameters). Deviations: as in `fedavg`; every client takes all its steps, so there is no γ-inexact
solution (definition 2). A device participates only if its `allow_upload` lists the extractor.
"""

import copy
from collections.abc import Mapping

import torch
from pydantic import Field
from torch import nn

from fedcg.learning.method import RoundContext
from fedcg.learning.methods._averaging import PERSONAL, MomentumParams, averaging_method
from fedcg.learning.training.classification import Penalty
from fedcg.learning.training.stage import Nets
from fedcg.wire.parts import Part


class FedproxParams(MomentumParams):
    """Parameters of FedProx."""

    mu: float = Field(default=0.01, ge=0, description="weight of the proximal term; the paper tried 0.001 to 1")


def proximal(nets: Mapping[Part, nn.Module], params: FedproxParams, ctx: RoundContext) -> Penalty | None:
    """μ/2 · ‖w - w_global‖², the sum of squares over all parameters; w_global = the networks' current weights."""
    if params.mu == 0.0:
        return None

    def loss(nets: Nets, features: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        pairs = [(nets[part], nets[f"start {part.value}"]) for part in sorted(PERSONAL)]
        moved = [
            (now - then).square().sum()
            for current, start in pairs
            for now, then in zip(current.parameters(), start.parameters(), strict=True)
        ]
        return params.mu / 2.0 * torch.stack(moved).sum()

    start = {f"start {part.value}": copy.deepcopy(nets[part]).requires_grad_(False) for part in PERSONAL}  # noqa: FBT003 - torch's own signature
    return Penalty(loss, networks=start, of_rows=False)


METHOD = averaging_method("fedprox", "FedAvg with a proximal term", FedproxParams, PERSONAL, penalty_of=proximal)
