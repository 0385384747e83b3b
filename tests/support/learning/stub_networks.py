"""Networks whose outputs can be worked out by hand."""

from collections.abc import Callable

import torch
from torch import nn

from fedcg.learning.aggregation.distillation import Pair
from fedcg.learning.training.batches import Augmenter
from fedcg.learning.training.classification import Penalty

FIRST, SECOND = (0.9, 0.05, 0.05), (0.1, 0.45, 0.45)
# A student that must answer three rows of FIRST and one of SECOND with one distribution settles
#   under KL(teacher || student) at the arithmetic mean: 3/4 FIRST + 1/4 SECOND = (0.7, 0.15, 0.15);
#   under KL(student || teacher) at the normalised geometric mean: 0.9^0.75 * 0.1^0.25 = 0.51962 and
#   0.05^0.75 * 0.45^0.25 = 0.08660 (twice), over their sum 0.69282: (0.75, 0.125, 0.125).
ARITHMETIC, GEOMETRIC = (0.7, 0.15, 0.15), (0.75, 0.125, 0.125)
PATTERN = torch.tensor([FIRST, FIRST, FIRST, SECOND]).log()


class Answer(nn.Module):
    """A generator that answers every request with the same features; with a parameter, so that it can be trained."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(values))

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, q], [B] -> [B, features]."""
        return self.value.expand(len(labels), -1)


class Scale(nn.Module):
    """A classifier whose logits are its one weight times the features."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(factor))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[B, C] -> [B, C]."""
        return self.weight * features


class Identity(nn.Module):
    """A classifier whose logits are the features, with a parameter that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[B, C] -> [B, C]."""
        return features + 0.0 * self.unused


def settled(student: Pair) -> list[float]:
    """The probabilities that a student with one answer has come to."""
    logits: torch.Tensor = student.generator(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    return logits.softmax(1)[0].tolist()


class GivenFeatures:
    """Real features that are given, instead of an extractor's; stands for a `FeatureSource`."""

    def __init__(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> None:
        self.features = features
        self.labels = torch.zeros(len(features), dtype=torch.int64) if labels is None else labels

    def rows(self, index: torch.Tensor, augmenter: Augmenter) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and labels of some rows."""
        return self.features[index], self.labels[index]


PenaltyOfRows = Callable[[slice, torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows of a block, features, logits) -> the penalty."""


def drawn(penalty: Penalty | None, labels: list[int]) -> tuple[torch.Tensor, ...]:
    """What a penalty draws for a block of black images with these labels."""
    assert penalty is not None
    return penalty.draw(torch.zeros(len(labels), 1, 16, 16), torch.tensor(labels))


def on_labels(penalty: Penalty | None, labels: list[int], **trained: nn.Module) -> PenaltyOfRows:
    """A penalty on rows of a block of black images with these labels.

    Args:
        penalty: draws once, for the block.
        labels: of the block.
        **trained: networks that the stage trains, by name.
    """
    assert penalty is not None
    rows_of, loss, networks = drawn(penalty, labels), penalty.loss, {**penalty.networks, **trained}
    return lambda rows, features, logits: loss(networks, features, logits, *(tensor[rows] for tensor in rows_of))
