"""Splits: a network cut into a private extractor and a public classifier.

`lenet5` is FedCG's backbone as its authors' code has it (facts in the paper's README): sigmoid after average pooling, so a
feature of a 32x32 image is 16x5x5 in (0, 1). `lenet5_relu` is the same cut with ReLU and max pooling: features >= 0.
`lenet5_wide` is `lenet5_relu` with twice as many channels: 32x5x5 features.
`cnn_bn` is what FedMD-CG's authors run under the name of LeNet: two strided 3x3 convolutions with batch norm, and a classifier of
two linear layers with nothing between them; 32x2x2 features of a 32x32 image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from fedcg.learning.networks.layers.pooled import AveragedConv2d, MaxedConv2d


class FeatureRange(str, Enum):
    """The interval that an extractor's features lie in; the generator's last activation follows it."""

    UNIT = "unit"
    NON_NEGATIVE = "non_negative"


@dataclass(frozen=True)
class Split:
    """A named split.

    Attributes:
        extractor: image channels -> module taking [B, C, H, W] to features.
        classifier: (feature shape, classes) -> module taking features to [B, classes] logits.
        feature_range: where features lie.
        smallest_side: the least height and width of an image.
        fill: puts into an extractor what its state lacks (constants), and with a stream also the initial values of its state; None:
            there are no constants, and `draw_weights` gives the initial values.
        image_generator, image_discriminator: image channels -> modules on whole images, for methods that need them; None: there are none.
        initialises_itself: the modules come with initial values of their own, as their author wrote them; the others are made
            without values and filled by `draw_weights`. Set for the user's own splits, whatever they set.
    """

    extractor: Callable[[int], nn.Module]
    classifier: Callable[[tuple[int, ...], int], nn.Module]
    feature_range: FeatureRange
    smallest_side: int = 1
    initialises_itself: bool = False
    fill: Callable[[nn.Module, torch.Generator | None], None] | None = None
    image_generator: Callable[[int], nn.Module] | None = None
    image_discriminator: Callable[[int], nn.Module] | None = None


def _extractor_sigmoid(channels: int) -> nn.Module:
    # The convolutions pool as well; the identities keep the names that the layers after them always had.
    first, second = AveragedConv2d(channels, 6, 5), AveragedConv2d(6, 16, 5)
    return nn.Sequential(first, nn.Identity(), nn.Sigmoid(), second, nn.Identity(), nn.Sigmoid())


def _extractor_relu(width: int) -> Callable[[int], nn.Module]:
    def build(channels: int) -> nn.Module:
        # Pooling before the activation: max and ReLU commute, and ReLU then works on a quarter of the elements.
        first, second = MaxedConv2d(channels, 6 * width, 5), MaxedConv2d(6 * width, 16 * width, 5)
        return nn.Sequential(first, nn.Identity(), nn.ReLU(), second, nn.Identity(), nn.ReLU())

    return build


def _classifier(activation: Callable[[], nn.Module]) -> Callable[[tuple[int, ...], int], nn.Module]:
    def build(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(feature_shape), 120),
            activation(),
            nn.Linear(120, 84),
            activation(),
            nn.Linear(84, classes),
        )

    return build


def _extractor_bn(channels: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((channels, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers)


def _classifier_linear(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(feature_shape), 128), nn.Linear(128, classes))


# Two 5x5 convolutions, each followed by halving: ((16 - 4) / 2 - 4) / 2 = 1.
SPLITS: Mapping[str, Split] = {
    "lenet5": Split(_extractor_sigmoid, _classifier(nn.Sigmoid), FeatureRange.UNIT, 16),
    "lenet5_relu": Split(_extractor_relu(1), _classifier(nn.ReLU), FeatureRange.NON_NEGATIVE, 16),
    "lenet5_wide": Split(_extractor_relu(2), _classifier(nn.ReLU), FeatureRange.NON_NEGATIVE, 16),
    # Four halvings of a side.
    "cnn_bn": Split(_extractor_bn, _classifier_linear, FeatureRange.NON_NEGATIVE, 16),
}
