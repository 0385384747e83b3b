"""FedProx (Li et al., MLSys 2020): FedAvg whose clients stay near the global model.

Eq. 2: each client minimises h(w) = F(w) + μ/2 · ‖w - w_global‖², over all shared parameters (BatchNorm's buffers are statistics,
not parameters). Deviations: as in `fedavg`; every client does all its steps, there is no γ-inexact solution (definition 2).
A device takes part only when its `allow_upload` lists the extractor.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import nn

from fedcg.learning.method import MomentumParams, RoundContext
from fedcg.learning.methods._averaging import PERSONAL, averaging_method
from fedcg.learning.training.training_loop import Block, Penalty, PenaltyMaker
from fedcg.wire.parts import Part


class FedproxParams(MomentumParams):
    """Parameters of FedProx."""

    mu: float = Field(default=0.01, ge=0, description="weight of the proximal term; the paper tried 0.001 to 1")


def proximal(nets: Mapping[Part, nn.Module], params: FedproxParams, ctx: RoundContext) -> PenaltyMaker:
    """μ/2 · ‖w - w_global‖², the sum of squares over all parameters; w_global = the networks as they are now."""
    now = [parameter for part in sorted(PERSONAL) for parameter in nets[part].parameters()]
    start = [parameter.detach().clone() for parameter in now]

    def loss(features: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        moved = [(current - then).square().sum() for current, then in zip(now, start, strict=True)]
        return params.mu / 2.0 * torch.stack(moved).sum()

    def per_block(block: Block) -> Penalty | None:
        return Penalty(loss, of_rows=False) if params.mu > 0.0 else None

    return per_block


METHOD = averaging_method(
    "fedprox",
    "FedProx: FedAvg with a proximal term",
    FedproxParams,
    PERSONAL,
    penalty_of=proximal,
)
