"""Moments of features as the part `statistics`: class counts, class sums and one second-moment matrix, as means over a client's images.

Their mean over clients, weighted by images, equals that of the cohort's pooled images under any data split.
"""

import math
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter
from torch import nn

from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import DivergedError, RoundContext, Weights
from fedcg.learning.networks.assembly import feature_shape, split_of
from fedcg.learning.spec import FederationSpec, NetworkSpec
from fedcg.learning.training.batches import extract_features
from fedcg.values import Value
from fedcg.wire.parts import TensorLayout

COUNTS, SUMS, MOMENT = "counts", "sums", "moment"
_MOST_CUT = 0.01
"""Share of features that may exceed the clip. A few outliers hardly move a mean."""
_LEAST_SHARE = 1e-6
"""A smaller share of a class is a rounding error."""


CLIP = 32.0
Clip = Annotated[float, Field(gt=0, le=1024, description="upper limit of features in moments")]


def feature_bounds(spec: NetworkSpec) -> tuple[float, float]:
    """The range to which features are clipped: the split's range, within ± the method's `clip`."""
    low, high = split_of(spec).feature_range.bounds
    clip = TypeAdapter[float](Clip).validate_python(spec.params.get("clip") or CLIP)
    return (max(low, -clip), high if high == 1.0 else clip)


def moments_layout(spec: NetworkSpec) -> tuple[TensorLayout, ...]:
    """`counts` [C], `sums` [C, D] and `moment` [D (D + 1) / 2], the upper triangle by rows; a feature has D numbers."""
    classes, size, (low, high) = len(spec.classes), math.prod(feature_shape(spec)), feature_bounds(spec)
    least, most = min(low * high, 0.0), max(low**2, high**2)
    return (
        TensorLayout(name=COUNTS, dtype="float32", shape=(classes,), low=0.0, high=1.0),
        TensorLayout(name=SUMS, dtype="float32", shape=(classes, size), low=low, high=high),
        TensorLayout(name=MOMENT, dtype="float32", shape=(size * (size + 1) // 2,), low=least, high=most),
    )


def feature_moments(extractor: nn.Module, data: ImageSet, ctx: RoundContext) -> dict[str, torch.Tensor]:
    """A client's moments over its images, and their mirror images if the spec flips, on the CPU.

    Args:
        extractor: on `ctx.device`; left in evaluation mode.
        data: the training images.
        ctx: the spec; the owner is warned if many features are clipped.
    """
    low, high = feature_bounds(ctx.spec)
    whole = features_of(extractor, data, ctx.spec, ctx.device)
    cut = whole.clamp(low, high)
    if (share := float((cut != whole).double().mean())) > _MOST_CUT:
        ctx.callbacks.warn(
            f"{share:.1%} of the features exceed {high:g} (highest {float(whole.abs().max()):.3g}) "
            "and are clipped to it, which biases the moments: plan with a higher clip (--set clip=N)"
        )
    labels = data.labels.cpu().repeat(len(whole) // max(1, len(data)))
    return moments_of(cut, labels, ctx.spec.class_count)


def features_of(extractor: nn.Module, data: ImageSet, spec: FederationSpec, device: str) -> torch.Tensor:
    """Features of all images, then of all mirror images if the spec flips, [R, D] float32 on the CPU."""
    sides = (False, True) if spec.augment_flip else (False,)
    images = data.images.to(device)
    return torch.cat([extract_features(extractor, images, spec, flipped=side).flatten(1).cpu() for side in sides])


def moments_of(features: torch.Tensor, labels: torch.Tensor, classes: int) -> dict[str, torch.Tensor]:
    """Moments of features [R, D] of images with these labels [R], divided by R."""
    rows = features.double()
    ours = nn.functional.one_hot(labels, classes).double()
    above = torch.triu_indices(rows.shape[1], rows.shape[1])
    moment = (rows.T @ rows)[above[0], above[1]]
    found = {COUNTS: ours.sum(0), SUMS: ours.T @ rows, MOMENT: moment}
    return {name: (total / len(rows)).float() for name, total in found.items()}


class ClassGaussians(Value):
    """Gaussians of classes with one covariance, float64 on the CPU.

    Attributes:
        shares: of images by class, [C], 0 for classes without images.
        means: [C, D], 0 for those classes.
        values: eigenvalues of the covariance within classes, [D], at least 0; `vectors` [D, D] are their eigenvectors, by columns.
    """

    shares: torch.Tensor
    means: torch.Tensor
    values: torch.Tensor
    vectors: torch.Tensor

    @property
    def present(self) -> torch.Tensor:
        """The classes with images, [K] int64."""
        return (self.shares > 0).nonzero().flatten()


def class_gaussians(moments: Weights) -> ClassGaussians | None:
    """The Gaussians of the classes from moments; None for the zero moments before the first sum.

    Raises:
        DivergedError: the moments are of no images.
    """
    counts, sums, above = (moments[name].cpu().double() for name in (COUNTS, SUMS, MOMENT))
    if not bool(counts.any()):
        return None
    finite = all(bool(one.isfinite().all()) for one in (counts, sums, above))
    if not finite or abs(float(counts.sum()) - 1.0) > 1e-3 or float(counts.min()) < -_LEAST_SHARE:
        raise DivergedError("the cohort's moments are of no images")
    shares = torch.where(counts > _LEAST_SHARE, counts, torch.zeros_like(counts))
    means = torch.where(shares[:, None] > 0, sums / shares.clamp(min=_LEAST_SHARE)[:, None], torch.zeros_like(sums))
    size = sums.shape[1]
    rows, columns = torch.triu_indices(size, size)
    moment = above.new_empty(size, size)
    moment[rows, columns] = moment[columns, rows] = above
    values, vectors = torch.linalg.eigh(moment - (means * shares[:, None]).T @ means)
    return ClassGaussians(shares, means, values.clamp(min=0.0), vectors)
