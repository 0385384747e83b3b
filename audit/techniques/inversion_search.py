"""The searches of gradient inversion: pixels whose gradient (or features) come out as the observed ones. Sees no truth.

Every distance is relative to the observed numbers' own size (divided by |g|²), and a search divides it by its value at a grey image:
a raw loss of 1e-7 would end L-BFGS at its start, and a prior's weight would mean something else for every network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

from audit.evidence import WholeModel
from audit.techniques.gradients import BatchGradient, gradient, linear_inputs

_STEP = 0.1  # Adam's, in pixels (Geiping 2020); a tenth of it after 3/8, 5/8 and 7/8 of the steps
_TINY = 1e-8

Objective = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(pixels [N, C, H, W], labels [N] or probabilities [N, classes]) -> scalar."""


class Start(str, Enum):
    """Where a search starts."""

    NOISE = "noise"
    GREY = "grey"


@dataclass(frozen=True)
class Search:
    """How pixels are searched.

    Attributes:
        steps: iterations of L-BFGS (strong Wolfe line search), or of Adam with signed gradients.
        start: N(0, 1) noise or grey; noise is drawn anew for each of the restarts.
        prior: weight of the total variation against a distance of 1 at grey; above 0, pixels also stay in [0, 1].
        soft_labels: labels are searched together with the pixels (DLG) instead of known (iDLG).
    """

    steps: int
    start: Start
    prior: float = 0.0
    restarts: int = 1
    soft_labels: bool = False
    signed_adam: bool = False


@dataclass(frozen=True)
class Found:
    """The best of a search's restarts, by the attacker's own loss.

    Attributes:
        pixels: [N, C, H, W], clamped to [0, 1].
        diverged: share of the restarts whose loss was not finite, or above that of their start.
    """

    pixels: torch.Tensor
    loss: float
    diverged: float


def gradient_distance(model: WholeModel, seen: BatchGradient) -> Objective:
    """‖∇L(x) - ∇L(x̃)‖² / ‖∇L(x)‖² (DLG: Zhu 2019, eq. 4; FedCG eq. 7)."""
    size = sum(float(one.square().sum()) for one in seen.values) + _TINY**2

    def distance(pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = gradient(model, pixels, labels, seen.parts, create_graph=True)
        pairs = zip(found, seen.values, strict=True)
        return torch.stack([(mine - theirs).square().sum() for mine, theirs in pairs]).sum() / size

    return distance


def cosine_distance(model: WholeModel, seen: BatchGradient) -> Objective:
    """1 - cosine of both gradients (Geiping 2020, eq. 4); their lengths do not matter."""
    theirs = torch.cat([one.flatten() for one in seen.values])

    def distance(pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = gradient(model, pixels, labels, seen.parts, create_graph=True)
        mine = torch.cat([one.flatten() for one in found])
        return 1 - torch.nn.functional.cosine_similarity(mine, theirs, dim=0)

    return distance


def feature_distance(model: WholeModel, features: torch.Tensor) -> Objective:
    """‖h - h(x̃)‖² / ‖h‖² of the first linear layer's input [N, D]: stronger than its gradient, which is a product with h."""
    size = features.square().sum() + _TINY
    return lambda pixels, labels: (linear_inputs(model, pixels) - features).square().sum() / size


def with_statistics(distance: Objective, model: WholeModel, wanted: torch.Tensor) -> Objective:
    """FedCG eq. 8: beside the distance, channel means and deviations of Ẽ(x̃) against those of generated features, α = 1.

    The equation has the variance of one and the deviation of the other: read as the same statistic, the deviation.

    Args:
        distance: of the gradients.
        model: with Ẽ.
        wanted: `channel_statistics` of generated features.
    """

    def both(pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return distance(pixels, labels) + (channel_statistics(model.features(pixels)) - wanted).square().sum()

    return both


def channel_statistics(features: torch.Tensor) -> torch.Tensor:
    """Means and standard deviations over images and positions, [2, channels], of features [N, channels, ...]."""
    flat = features.flatten(2) if features.dim() > 2 else features.unsqueeze(2)
    spread = flat.var(dim=(0, 2), unbiased=False)
    return torch.stack([flat.mean(dim=(0, 2)), (spread + _TINY).sqrt()])


def total_variation(pixels: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of neighbours, across and down (Geiping 2020, eq. 4)."""
    return pixels.diff(dim=-1).abs().mean() + pixels.diff(dim=-2).abs().mean()


def search(
    objective: Objective,
    labels: torch.Tensor,
    form: tuple[int, int, int],
    classes: int,
    how: Search,
    stream: torch.Generator,
) -> Found:
    """Pixels that make an objective small.

    Args:
        objective: it.
        labels: [N] int64; only its length counts where labels are searched.
        form: (C, H, W).
        classes: in all.
        how: the search.
        stream: for starts.
    """
    grey = torch.full((len(labels), *form), 0.5)
    unit = objective(grey, labels).detach().item() + _TINY**2

    def loss(pixels: torch.Tensor, guessed: torch.Tensor) -> torch.Tensor:
        right = guessed.softmax(1) if how.soft_labels else labels
        return objective(pixels, right) / unit + how.prior * total_variation(pixels)

    runs = []
    for _ in range(how.restarts):
        pixels = torch.randn(grey.shape, generator=stream) if how.start is Start.NOISE else grey
        pixels = pixels.clamp(0, 1) if how.prior else pixels
        guessed = torch.randn(len(labels), classes, generator=stream) if how.soft_labels else torch.empty(0)
        first = loss(pixels, guessed).detach().item()
        found, last = (_signed_adam if how.signed_adam else _lbfgs)(loss, pixels, guessed, how)
        runs.append(Found(found.clamp(0, 1), last, float(not (np.isfinite(last) and last <= first))))
    best = min(runs, key=lambda run: run.loss if np.isfinite(run.loss) else np.inf)
    return replace(best, diverged=sum(run.diverged for run in runs) / len(runs))


def _lbfgs(loss: Objective, pixels: torch.Tensor, guessed: torch.Tensor, how: Search) -> tuple[torch.Tensor, float]:
    """L-BFGS-B: its line search satisfies the strong Wolfe conditions, and its bounds are the prior's."""
    count = pixels.numel()

    def unpacked(point: NDArray[np.float64]) -> list[torch.Tensor]:
        whole = torch.from_numpy(point.astype(np.float32))
        return [whole[:count].view(pixels.shape), whole[count:].view(guessed.shape)]

    def value_and_slope(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        places = [one.requires_grad_() for one in unpacked(point)]
        value = loss(places[0], places[1])
        slopes = torch.autograd.grad(value, places, materialize_grads=True)
        return float(value.detach()), torch.cat([one.flatten() for one in slopes]).double().numpy()

    bounds = [(0.0, 1.0) if how.prior else (None, None)] * count + [(None, None)] * guessed.numel()
    options = {"maxiter": how.steps, "maxfun": 2 * how.steps, "maxcor": 20, "ftol": 1e-14, "gtol": 1e-12}
    begun = torch.cat([pixels.flatten(), guessed.flatten()]).double().numpy()
    found = minimize(value_and_slope, begun, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return unpacked(found.x)[0], float(found.fun)


def _signed_adam(
    loss: Objective, pixels: torch.Tensor, guessed: torch.Tensor, how: Search
) -> tuple[torch.Tensor, float]:
    """Adam on the signs of the gradient, pixels clamped after each step where there is a prior (Geiping 2020, §5)."""
    places = [pixels.clone().requires_grad_(), guessed.clone().requires_grad_()]
    optimiser = torch.optim.Adam(places, lr=_STEP)
    drops = [how.steps * eighths // 8 for eighths in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, drops, gamma=0.1)
    for _ in range(how.steps):
        slopes = torch.autograd.grad(loss(places[0], places[1]), places, materialize_grads=True)
        for place, slope in zip(places, slopes, strict=True):
            place.grad = slope.sign()
        optimiser.step()
        schedule.step()
        if how.prior:
            places[0].data.clamp_(0, 1)
    return places[0].detach(), float(loss(places[0], places[1]).detach())
