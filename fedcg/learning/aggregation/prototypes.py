"""Class prototypes as the part `statistics`: the mean features of a client's images by class, and which classes it has.

The NUMBER of images per class is not included: it is the report field `label_counts`, which a device may refuse.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Aggregate, ServerState, Spill, Update
from fedcg.learning.networks.assembly import feature_shape, split_of
from fedcg.learning.spec import FederationSpec, NetworkSpec
from fedcg.learning.training.batches import extract_features
from fedcg.wire.parts import TensorLayout

HELD, PROTOTYPES = "held", "prototypes"
_HIGHEST = 1e4


def prototype_layout(spec: NetworkSpec) -> tuple[TensorLayout, ...]:
    """`held` [C], 1 for a class with images, and `prototypes` [C, D], 0 for one without; a feature has D numbers."""
    classes, size = len(spec.classes), math.prod(feature_shape(spec))
    low, high = (min(max(bound, -_HIGHEST), _HIGHEST) for bound in split_of(spec).feature_range.bounds)
    return (
        TensorLayout(name=HELD, dtype="int64", shape=(classes,), low=0.0, high=1.0),
        TensorLayout(name=PROTOTYPES, dtype="float32", shape=(classes, size), low=low, high=high),
    )


def prototypes_of(extractor: nn.Module, data: ImageSet, spec: FederationSpec) -> dict[str, torch.Tensor]:
    """A client's own statistics, on the CPU; `extractor` is left in evaluation mode."""
    features = extract_features(extractor, data.images, spec).flatten(1).cpu()
    ours = nn.functional.one_hot(data.labels.cpu(), spec.class_count).float()
    counts = ours.sum(0)
    return {HELD: (counts > 0).long(), PROTOTYPES: ours.T @ features / counts.clamp(min=1)[:, None]}


class FinishOnlyAggregator:
    """A server half that does all work in `finish` and keeps no state except its aggregate.

    Args:
        spill: records which clients sent an update.
        merge: updates by client -> the aggregate.
    """

    def __init__(self, spill: Spill, merge: Callable[[Mapping[str, Callable[[], Update]]], Aggregate]) -> None:
        self._spill, self._merge = spill, merge

    def add(self, update: Update) -> None:
        """Record that the client sent an update."""
        if not self._spill.has(update.client):
            self._spill.put(update.client, {})

    def finish(self, updates: Mapping[str, Callable[[], Update]]) -> tuple[Aggregate, ServerState]:
        """Merge all updates at once."""
        aggregate = self._merge(updates)
        return aggregate, ServerState(aggregate)
