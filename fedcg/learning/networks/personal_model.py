"""The model that a client uses and serves: of its method's making, or the classifier on the extractor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from fedcg.learning.networks.assembly import load_part
from fedcg.learning.registry import get_method
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

if TYPE_CHECKING:
    from fedcg.learning.method import Weights


class ExtractorAndClassifier(nn.Module):
    """Images [B, C, H, W] float32, normalised, to logits [B, classes]."""

    def __init__(self, extractor: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor
        self.classifier = classifier

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The classifier's logits of the extractor's features."""
        logits: torch.Tensor = self.classifier(self.extractor(images))
        return logits


def personal_model(
    spec: FederationSpec, parts: Mapping[Part, Weights], device: str = "cpu", before: nn.Module | None = None
) -> nn.Module:
    """A client's model in evaluation mode, with a copy of the weights.

    Args:
        spec: names the method.
        parts: the method's `personal` ones; others are ignored.
        device: torch device string.
        before: what real images go through first, normalised ones in and out (a data defence's input layer).

    Returns:
        From images [B, C, H, W] float32, normalised, to logits [B, classes].

    Raises:
        NetworkError: weights that do not fit the spec's networks.
    """
    method = get_method(spec.method)
    if method.personal.predict is not None:
        model = method.personal.predict(spec, parts)
    else:
        nets = (load_part(spec, part, parts[part], device) for part in (Part.EXTRACTOR, Part.CLASSIFIER))
        model = ExtractorAndClassifier(*nets)
    return (model if before is None else nn.Sequential(before, model)).to(device).eval()


def personal_parts(spec: FederationSpec, parts: Mapping[Part, Weights]) -> dict[Part, Weights]:
    """Those that the client's model is made of."""
    return {part: parts[part] for part in sorted(get_method(spec.method).personal.parts)}
