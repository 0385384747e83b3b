"""The gradient of one batch at the round's start, as a server would see it: closed forms for its content, and searches for pixels with the observed gradient or features.

Does not use the truth.

A real update of many epochs is a sum of such gradients along a path: `weight_difference`. A gradient reveals its
labels. For a single image it also reveals the exact input of the first linear layer: that layer computes W h + b, so
∂L/∂W = δ hᵀ and ∂L/∂b = δ, and their quotient is h (Geiping 2020, proposition 3.1). Every distance of a search is
relative to the size of the observed numbers (divided by |g|²), and a search divides it by its value at a grey image. A
raw loss of 1e-7 would end L-BFGS at its start, and a prior's weight would differ in meaning between networks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import nn

from audit.evidence import Extractor, View, WholeModel, networks
from audit.techniques.image_decoder import PrincipalComponents
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.networks import build_part, feature_shape
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value
from fedcg.wire.parts import Part

_TINY = 1e-12
Gradients = tuple[torch.Tensor, ...]


class BatchGradient(Value):
    """The gradient of the mean cross-entropy of one batch, of the parts that the method sends.

    Attributes:
        parts: the parts, in this order; `values`: gradients in the order of their parameters.
        rows: number of images in the batch.
    """

    parts: tuple[Part, ...]
    values: Gradients
    rows: int


def parameters_of(model: WholeModel, parts: Sequence[Part]) -> list[nn.Parameter]:
    """Return the gradient's parameters, in its order."""
    nets = {Part.EXTRACTOR: model.extractor, Part.CLASSIFIER: model.classifier}
    return [parameter for part in parts for parameter in nets[part].parameters()]


def gradient(
    model: WholeModel, pixels: torch.Tensor, labels: torch.Tensor, parts: Sequence[Part], *, create_graph: bool = False
) -> Gradients:
    """Return ∇θ of the mean cross-entropy (∇L_cls in FedCG eq. 7).

    Args:
        model: the model.
        pixels: [N, C, H, W] in [0, 1].
        labels: [N] int64, or [N, classes] probabilities.
        parts: θ: extractor and classifier for a whole model (FedAvg), the classifier alone (FedSplit, FedCG).
        create_graph: whether the result will be differentiated again.
    """
    loss = nn.functional.cross_entropy(model.logits(pixels), labels)
    return torch.autograd.grad(loss, parameters_of(model, parts), create_graph=create_graph)


def batch_gradient(
    spec: FederationSpec,
    model: Mapping[Part, Weights],
    pixels: torch.Tensor,
    labels: torch.Tensor,
    parts: Sequence[Part],
) -> BatchGradient:
    """Return the gradient that the device would send for a batch after one step, with its true model."""
    true = networks.whole_model(spec, model)
    found = gradient(true, pixels, labels, parts)
    return BatchGradient(tuple(parts), tuple(value.detach() for value in found), len(labels))


def with_noise(seen: BatchGradient, deviation: float, stream: torch.Generator) -> BatchGradient:
    """Return the gradient with Gaussian noise on every number (FedAvg with noise in FedCG table 2)."""
    values = tuple(value + deviation * torch.randn(value.shape, generator=stream) for value in seen.values)
    return BatchGradient(seen.parts, values, seen.rows)


def weight_difference(before: Weights, after: Weights) -> dict[str, torch.Tensor]:
    """Return after - before of every floating tensor, by name: the sum of many steps."""
    return {name: after[name] - before[name] for name in before if before[name].is_floating_point()}


def attacker_model(
    view: View, source: Extractor, streams: Streams, epochs: int, revealed: ImageSet | None = None
) -> WholeModel:
    """Return the model of an attacker who observes gradients at the round's start: an extractor and the aggregate's classifier.

    Args:
        view: of the attacker; `SENT` uses the extractor of the aggregate.
        source: the extractor's origin.
        streams: for random weights.
        epochs: for training a surrogate.
        revealed: features [N, *feature_shape] that gradients of single images revealed, with labels; a surrogate also
            fits the mean of each class.
    """
    return networks.assembled(replace(view, update=view.before.parts), source, streams, epochs, revealed)


def lacks_closed_form(spec: FederationSpec) -> str | None:
    """Return why labels and features do not follow from a gradient; None if they do."""
    linear = [layer for layer in build_part(spec, Part.CLASSIFIER).modules() if isinstance(layer, nn.Linear)]
    if linear and all(layer.bias is not None for layer in linear):
        return None
    return f"the classifier of {spec.network.split} has no linear layers with a bias, whose gradients would reveal labels and features"


def revealed_labels(seen: BatchGradient) -> torch.Tensor:
    """Return the labels of a batch, [rows] int64, from the gradient of the last bias (iDLG: Zhao 2020, eq. 3-4).

    That gradient is the mean of softmax - onehot: for one image only the label's number is negative. In a batch each
    image in turn takes the smallest number, and its share 1/rows is added back.
    """
    left, found = seen.values[-1].clone(), []
    for _ in range(seen.rows):
        found.append(int(left.argmin()))
        left[found[-1]] += 1 / seen.rows
    return torch.tensor(found)


def linear_inputs(model: WholeModel, pixels: torch.Tensor) -> torch.Tensor:
    """Return the input of the classifier's first linear layer, [N, D]; in LeNet5, the extractor's features."""
    caught: list[torch.Tensor] = []
    hook = _first_linear(model).register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].flatten(1)))
    try:
        model.logits(pixels)
    finally:
        hook.remove()
    return caught[0]


def standardised(features: torch.Tensor, spec: FederationSpec, least: float = 0.0) -> torch.Tensor:
    """Scale inputs of the first linear layer [N, D] to mean 0 and deviation 1 per map of each image; without maps, per image.

    This keeps the positions where a map is bright, which extractors with a common start share; they do not share levels
    and spreads.

    Args:
        features: [N, D].
        spec: of the federation.
        least: share of the maps' mean variance that is added to each variance, so that noise in a constant map stays small.
    """
    shape = feature_shape(spec)
    maps = shape[0] if math.prod(shape) == features.shape[1] > shape[0] else 1
    split = features.unflatten(1, (maps, -1))
    spread = split.var(dim=2, keepdim=True, unbiased=False) + _TINY
    level = split.mean(dim=2, keepdim=True)
    result: torch.Tensor = ((split - level) / (spread + least * spread.mean(1, keepdim=True)).sqrt()).flatten(1)
    return result


def revealed_features(model: WholeModel, seen: BatchGradient) -> torch.Tensor:
    """Return the input [D] of the first linear layer for a single image: h = (∂L/∂W)ᵀ δ / |δ|², δ = ∂L/∂b.

    Args:
        model: any model of the federation; only its layout matters.
        seen: the gradient of a single image.
    """
    weight = _first_linear(model).weight
    at = next(at for at, one in enumerate(parameters_of(model, seen.parts)) if one is weight)
    slope, delta = seen.values[at], seen.values[at + 1]
    return slope.T @ delta / delta.square().sum()


def _first_linear(model: WholeModel) -> nn.Linear:
    return next(layer for layer in model.classifier.modules() if isinstance(layer, nn.Linear))


_STEP = 0.1  # Adam's rate, in pixels (Geiping 2020); divided by ten after 3/8, 5/8 and 7/8 of the steps
_LEAST_SIZE = 1e-8

Objective = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(pixels [N, C, H, W], labels [N] or probabilities [N, classes]) -> scalar."""


class Start(str, Enum):
    """The start of a search."""

    NOISE = "noise"
    GREY = "grey"
    CLASS = "the mean auxiliary image of the class, in principal components"


class Search(Value):
    """The settings of a search for pixels.

    Attributes:
        steps: iterations of L-BFGS (strong Wolfe line search), or of Adam with signed gradients.
        start: N(0, 1) noise, drawn again for each restart, or grey: a search over pixels. `CLASS` is a search over the
            coefficients of the principal components of auxiliary images, which are ~ N(0, 1) for such images.
        prior: weight of the total variation, relative to a distance of 1 at grey; above 0, pixels also stay in [0, 1].
            For `CLASS`, weight of an image's sum of squared coefficients, -2 log of their density.
        soft_labels: whether labels are searched together with the pixels (DLG) instead of known (iDLG).
    """

    steps: int
    start: Start
    prior: float = 0.0
    restarts: int = 1
    soft_labels: bool = False
    signed_adam: bool = False

    @property
    def is_bounded(self) -> bool:
        """Whether what is searched are pixels that stay in [0, 1]."""
        return bool(self.prior) and self.start is not Start.CLASS


class Found(Value):
    """The best restart of a search, by the attacker's own loss.

    Attributes:
        pixels: [N, C, H, W], clamped to [0, 1].
        diverged: share of the restarts whose loss was not finite, or above its initial value.
    """

    pixels: torch.Tensor
    loss: float
    diverged: float


def gradient_distance(model: WholeModel, seen: BatchGradient) -> Objective:
    """‖∇L(x) - ∇L(x̃)‖² / ‖∇L(x)‖² (DLG: Zhu 2019, eq. 4; FedCG eq. 7)."""
    size = sum(float(one.square().sum()) for one in seen.values) + _LEAST_SIZE**2

    def distance(pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = gradient(model, pixels, labels, seen.parts, create_graph=True)
        pairs = zip(found, seen.values, strict=True)
        return torch.stack([(mine - theirs).square().sum() for mine, theirs in pairs]).sum() / size

    return distance


def cosine_distance(model: WholeModel, seen: BatchGradient) -> Objective:
    """Return 1 - cosine of both gradients (Geiping 2020, eq. 4); their lengths do not matter."""
    theirs = torch.cat([one.flatten() for one in seen.values])

    def distance(pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = gradient(model, pixels, labels, seen.parts, create_graph=True)
        mine = torch.cat([one.flatten() for one in found])
        return 1 - torch.nn.functional.cosine_similarity(mine, theirs, dim=0)

    return distance


def feature_distance(model: WholeModel, features: torch.Tensor) -> Objective:
    """Return the mean of ‖h - h(x̃)‖² / ‖h‖² of the first linear layer's inputs [N, D]: stronger than its gradient, which is a product with h."""
    sizes = features.square().sum(1) + _LEAST_SIZE
    return lambda pixels, labels: ((linear_inputs(model, pixels) - features).square().sum(1) / sizes).mean()


def feature_angle(model: WholeModel, features: torch.Tensor) -> Objective:
    """Return 1 - cosine of h and h(x̃), the first linear layer's inputs [N, D]: a surrogate's features differ in scale."""
    similarity = torch.nn.functional.cosine_similarity
    return lambda pixels, labels: 1 - similarity(linear_inputs(model, pixels), features).mean()


def with_statistics(distance: Objective, model: WholeModel, wanted: torch.Tensor) -> Objective:
    """Return FedCG eq. 8: the distance plus the difference of channel means and deviations of Ẽ(x̃) from those of generated features, α = 1.

    The equation mixes the variance of one with the deviation of the other; here both are deviations.

    Args:
        distance: the distance of the gradients.
        model: contains Ẽ.
        wanted: `channel_statistics` of generated features.
    """

    def both(pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return distance(pixels, labels) + (channel_statistics(model.features(pixels)) - wanted).square().sum()

    return both


def channel_statistics(features: torch.Tensor) -> torch.Tensor:
    """Return means and standard deviations over images and positions, [2, channels], of features [N, channels, ...]."""
    flat = features.flatten(2) if features.dim() > 2 else features.unsqueeze(2)
    spread = flat.var(dim=(0, 2), unbiased=False)
    return torch.stack([flat.mean(dim=(0, 2)), (spread + _LEAST_SIZE).sqrt()])


def total_variation(pixels: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute difference of neighbours, across and down (Geiping 2020, eq. 4)."""
    return pixels.diff(dim=-1).abs().mean() + pixels.diff(dim=-2).abs().mean()


def search(
    objective: Objective,
    labels: torch.Tensor,
    form: tuple[int, int, int],
    classes: int,
    how: Search,
    stream: torch.Generator,
    space: PrincipalComponents | None = None,
) -> Found:
    """Search pixels that minimise an objective.

    Args:
        objective: the function to minimise.
        labels: [N] int64; only the length is used if labels are searched.
        form: (C, H, W).
        classes: number of classes.
        how: the settings of the search.
        stream: for the starts.
        space: of images of the same kind; needed by `CLASS`.
    """
    grey = torch.full((len(labels), *form), 0.5)
    unit = objective(grey, labels).detach().item() + _LEAST_SIZE**2

    space = space if how.start is Start.CLASS else None

    def loss(place: torch.Tensor, guessed: torch.Tensor) -> torch.Tensor:
        right = guessed.softmax(1) if how.soft_labels else labels
        pixels = place if space is None else space.pixels(place)
        size = total_variation(pixels) if space is None else place.square().sum() / len(place)
        return objective(pixels, right) / unit + how.prior * size

    runs = []
    for _ in range(how.restarts):
        pixels = torch.randn(grey.shape, generator=stream) if how.start is Start.NOISE else grey
        pixels = pixels.clamp(0, 1) if how.is_bounded else pixels
        pixels = pixels if space is None else space.class_means(labels)
        guessed = torch.randn(len(labels), classes, generator=stream) if how.soft_labels else torch.empty(0)
        first = loss(pixels, guessed).detach().item()
        found, last = (_signed_adam if how.signed_adam else _lbfgs)(loss, pixels, guessed, how)
        found = found if space is None else space.pixels(found)
        runs.append(Found(found.clamp(0, 1), last, float(not (np.isfinite(last) and last <= first))))
    best = min(runs, key=lambda run: run.loss if np.isfinite(run.loss) else np.inf)
    return replace(best, diverged=sum(run.diverged for run in runs) / len(runs))


def _lbfgs(loss: Objective, pixels: torch.Tensor, guessed: torch.Tensor, how: Search) -> tuple[torch.Tensor, float]:
    """Minimise with L-BFGS-B: its line search satisfies the strong Wolfe conditions, and its bounds are the prior's."""
    count = pixels.numel()

    def unpacked(point: NDArray[np.float64]) -> list[torch.Tensor]:
        whole = torch.from_numpy(point.astype(np.float32))
        return [whole[:count].view(pixels.shape), whole[count:].view(guessed.shape)]

    def value_and_slope(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        places = [one.requires_grad_() for one in unpacked(point)]
        value = loss(places[0], places[1])
        slopes = torch.autograd.grad(value, places, materialize_grads=True)
        return float(value.detach()), torch.cat([one.flatten() for one in slopes]).double().numpy()

    bounds = [(0.0, 1.0) if how.is_bounded else (None, None)] * count + [(None, None)] * guessed.numel()
    options = {"maxiter": how.steps, "maxfun": 2 * how.steps, "maxcor": 20, "ftol": 1e-14, "gtol": 1e-12}
    begun = torch.cat([pixels.flatten(), guessed.flatten()]).double().numpy()
    found = minimize(value_and_slope, begun, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return unpacked(found.x)[0], float(found.fun)


def _signed_adam(
    loss: Objective, pixels: torch.Tensor, guessed: torch.Tensor, how: Search
) -> tuple[torch.Tensor, float]:
    """Minimise with Adam on the signs of the gradient; with a prior, pixels are clamped after each step (Geiping 2020, §5)."""
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
        if how.is_bounded:
            places[0].data.clamp_(0, 1)
    return places[0].detach(), float(loss(places[0], places[1]).detach())
