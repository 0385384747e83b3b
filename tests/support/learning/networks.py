"""Networks for tests: outputs that can be computed by hand, networks on whole images, and a small timm network in a file."""

from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from experiments.data.source import read_digits
from fedcg.learning.aggregation.distillation import Pair
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks.assembly import allocated
from fedcg.learning.networks.image_networks import Widths, image_discriminator, image_generator, image_split
from fedcg.learning.networks.randomness import draw_weights, lent_generators
from fedcg.learning.networks.timm_backbones import timm_library
from fedcg.learning.spec import FederationPlan, ImageForm, NetworkChoice, ParameterValue
from fedcg.learning.split_names import weights_digest
from fedcg.learning.training.batches import Augmenter
from fedcg.learning.training.classification import Penalty
from fedcg.wire.parts import Part

FIRST, SECOND = (0.9, 0.05, 0.05), (0.1, 0.45, 0.45)
# A student that must answer three rows of FIRST and one of SECOND with one distribution settles under KL(teacher || student) at the
# arithmetic mean: 3/4 FIRST + 1/4 SECOND.
ARITHMETIC = (0.7, 0.15, 0.15)


class Answer(nn.Module):
    """A generator that returns the same features for every request, or row by row; with a parameter, so that it can be trained."""

    def __init__(self, *values: float | tuple[float, ...]) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(values))

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, q], [B] -> [B, features]."""
        return self.value.expand(len(labels), -1)


class Scale(nn.Module):
    """A classifier whose logits are its single weight times the features."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(factor))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[B, C] -> [B, C]."""
        return self.weight * features


class Identity(nn.Module):
    """A classifier whose logits are the features, with an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[B, C] -> [B, C]."""
        return features + 0.0 * self.unused


class LinearJudge(nn.Module):
    """A discriminator that is linear in two features and ignores labels."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, 2], [B] -> [B]."""
        score: torch.Tensor = self.line(features).squeeze(1)
        return score


def pair(generator: nn.Module, classifier: nn.Module) -> Pair:
    """A teacher, or a student."""
    return {Part.GENERATOR: generator, Part.CLASSIFIER: classifier}


def settled(student: Pair) -> list[float]:
    """Return the probabilities of a student with a single answer."""
    logits: torch.Tensor = student[Part.GENERATOR](torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    return logits.softmax(1)[0].tolist()


class GivenFeatures:
    """Given real features instead of an extractor's; replaces a `FeatureSource`."""

    def __init__(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> None:
        self.features = features
        self.labels = torch.zeros(len(features), dtype=torch.int64) if labels is None else labels

    def rows(self, index: torch.Tensor, augmenter: Augmenter) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features and labels of some rows."""
        return self.features[index], self.labels[index]


PenaltyOfRows = Callable[[slice, torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows of a block, features, logits) -> the penalty."""


def drawn(penalty: Penalty | None, labels: list[int]) -> tuple[torch.Tensor, ...]:
    """Return a penalty's draws for a block of black images with these labels."""
    assert penalty is not None
    return penalty.draw(torch.zeros(len(labels), 1, 16, 16), torch.tensor(labels))


def on_labels(penalty: Penalty | None, labels: list[int], **trained: nn.Module) -> PenaltyOfRows:
    """Return a penalty on rows of a block of black images with these labels.

    Args:
        penalty: draws once, for the block.
        labels: labels of the block.
        **trained: networks that the stage trains, by name.
    """
    assert penalty is not None
    rows_of, loss, networks = drawn(penalty, labels), penalty.loss, {**penalty.networks, **trained}
    return lambda rows, features, logits: loss(networks, features, logits, *(tensor[rows] for tensor in rows_of))


DIGITS = tuple("0123456789")


def built(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a module as from `assembly`: on the meta device, then filled from one stream."""
    with torch.device("meta"):
        module = make()
    module = allocated(module, "cpu")
    draw_weights(module, torch.Generator().manual_seed(seed))
    return module


def networks_of(widths: Widths, size: tuple[int, int, int], classes: int, seed: int = 0) -> dict[str, nn.Module]:
    """Return all four networks for images of one size (channels, height, width)."""
    channels, height, width = size
    split, shape = image_split(widths), (2 * widths.extractor, height // 4, width // 4)
    return {
        "generator": built(lambda: image_generator(channels, widths), seed),
        "discriminator": built(lambda: image_discriminator(channels, widths), seed + 1),
        "extractor": built(lambda: split.extractor(channels), seed + 2),
        "classifier": built(lambda: split.classifier(shape, classes), seed + 3),
    }


def digit_images(rows: slice, side: int) -> ImageSet:
    """Return some of the 1,797 digits in random order, side x side grey."""
    scans, labels = read_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[rows]
    pixels = torch.from_numpy(scans)[order].unsqueeze(1).float()
    enlarged = F.interpolate(pixels, size=(side, side), mode="bilinear").round().to(torch.uint8)
    return ImageSet(enlarged, torch.from_numpy(labels)[order], DIGITS)


TIMM = "test_efficientnet"
SPLIT = f"timm:{TIMM}+project:16"
IMAGENET = ImageForm(mode="RGB", height=64, width=64, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
CLASSES = ("dark", "grey", "light")


def tiny_network() -> nn.Module:
    """Return the network with ImageNet's classes, the same at every call; its running statistics come from random images."""
    with lent_generators(3), torch.no_grad():
        network: nn.Module = timm_library().create_model(TIMM, pretrained=False)
        for _ in range(20):
            network.train()(torch.randn(8, 3, 64, 64))
    return network.eval()


def write_tiny_weights(folder: Path) -> Path:
    """Write the network's weights to a file for `--weights FOLDER`."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{TIMM}.safetensors"
    safetensors.torch.save_file(tiny_network().state_dict(), path)
    return path


def tiny_plan(
    method: str, weights: Path | None, freeze: str = "all", split: str = SPLIT, **params: ParameterValue
) -> FederationPlan:
    """Return a plan of a quick federation with this network."""
    pinned = None if weights is None else weights_digest(weights)
    return FederationPlan(
        federation="tiny",
        classes=CLASSES,
        input=IMAGENET,
        network=NetworkChoice(split=split, weights=pinned, freeze=freeze, noise_dim=8),
        method=method,
        params={"epochs": 1, "batch_size": 8, **params},
        rounds=2,
    )
