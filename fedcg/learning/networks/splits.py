"""Splits: networks cut into a private extractor and a public classifier, built in or found by entry point.

Users' splits are tested before training.

`lenet5` is FedCG's backbone as in its authors' code (facts in the paper's README): sigmoid after average pooling, so a
feature of a 32x32 image is 16x5x5 in (0, 1). `lenet5_relu` is the same cut with ReLU and max pooling: features >= 0.
`lenet5_wide` is `lenet5_relu` with twice as many channels: 32x5x5 features. `cnn_bn` is the network that FedMD-CG's
authors call LeNet: two strided 3x3 convolutions with batch norm, and a classifier of two linear layers without an
activation between them; 32x2x2 features of a 32x32 image.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum

import torch
from torch import nn

from fedcg.learning.errors import ExtensionError, NetworkError
from fedcg.learning.networks.fast_layers import AveragedConv2d, MaxedConv2d
from fedcg.learning.networks.layers import built
from fedcg.learning.networks.randomness import lent_generators
from fedcg.learning.registry import imported
from fedcg.learning.spec import PROGRAM, TRAINER, NetworkChoice
from fedcg.learning.split_names import own_target
from fedcg.values import Value


class FeatureRange(str, Enum):
    """The interval of an extractor's features. It determines the generator's last activation."""

    UNIT = "unit"
    NON_NEGATIVE = "non_negative"
    REAL = "real"

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and upper bound of features."""
        return (-math.inf if self is FeatureRange.REAL else 0.0, 1.0 if self is FeatureRange.UNIT else math.inf)

    @classmethod
    def around(cls, features: torch.Tensor) -> FeatureRange:
        """The narrowest range that contains some features."""
        low, high = features.min().item(), features.max().item()
        return next(one for one in cls if one.bounds[0] <= low and high <= one.bounds[1])


class Split(Value):
    """A named split.

    Attributes:
        extractor: size of an input's first dimension (an image's channels) -> module from [B, C, ...] to features.
        classifier: (feature shape, classes) -> module from features to [B, classes] logits.
        feature_range: the range of features.
        smallest_side: minimum height and width of an image, and minimum size of other dimensions after the first.
        fill: sets an extractor's constants, which its state lacks, and with a stream also the initial values of its
            state; None: no constants, and `draw_weights` sets the initial values.
        image_generator, image_discriminator: image channels -> modules on whole images, for methods that need them; or
            None.
        initialises_itself: whether modules set their own initial values. Others are built without values and filled by
            `draw_weights`. Always set for users' splits.
        draws_classifier: whether `draw_weights` still fills the classifier, which has only standard layers.
        features: shape of one input's features if the spec has it; None: found by a dry run.
    """

    extractor: Callable[[int], nn.Module]
    classifier: Callable[[tuple[int, ...], int], nn.Module]
    feature_range: FeatureRange
    smallest_side: int = 1
    initialises_itself: bool = False
    draws_classifier: bool = False
    features: tuple[int, ...] | None = None
    fill: Callable[[nn.Module, torch.Generator | None], None] | None = None
    image_generator: Callable[[int], nn.Module] | None = None
    image_discriminator: Callable[[int], nn.Module] | None = None


def _extractor_bn(channels: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((channels, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers)


def dense_classifier(
    *hidden: int, activation: Callable[[], nn.Module] | None = None
) -> Callable[[tuple[int, ...], int], nn.Module]:
    """The builder of a classifier of linear layers on flat features; `hidden` has the widths between them."""

    def build(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        before = math.prod(feature_shape)
        for after in hidden:
            layers += [nn.Linear(before, after), *([] if activation is None else [activation()])]
            before = after
        return nn.Sequential(*layers, nn.Linear(before, classes))

    return build


def _lenet(
    conv: type[AveragedConv2d | MaxedConv2d],
    activation: Callable[[], nn.Module],
    feature_range: FeatureRange,
    width: int = 1,
) -> Split:
    def extractor(channels: int) -> nn.Module:
        # The convolutions include pooling: max and ReLU commute, and ReLU then processes a quarter of the elements. The
        # identities keep the names of the layers after them.
        first, second = conv(channels, 6 * width, 5), conv(6 * width, 16 * width, 5)
        return nn.Sequential(first, nn.Identity(), activation(), second, nn.Identity(), activation())

    # Two 5x5 convolutions, each followed by halving: ((16 - 4) / 2 - 4) / 2 = 1.
    return Split(extractor, dense_classifier(120, 84, activation=activation), feature_range, 16)


SPLITS: Mapping[str, Split] = {
    "lenet5": _lenet(AveragedConv2d, nn.Sigmoid, FeatureRange.UNIT),
    "lenet5_relu": _lenet(MaxedConv2d, nn.ReLU, FeatureRange.NON_NEGATIVE),
    "lenet5_wide": _lenet(MaxedConv2d, nn.ReLU, FeatureRange.NON_NEGATIVE, 2),
    # A side is halved four times.
    "cnn_bn": Split(_extractor_bn, dense_classifier(128), FeatureRange.NON_NEGATIVE, 16),
}


def program_split(choice: NetworkChoice) -> Split:
    """The splits `program` and `trainer`: from this process's code, or else from the spec.

    Raises:
        NetworkError: the split is in neither; an extractor that is missing raises when called.
    """
    if isinstance(choice.program, Split):
        return choice.program
    if choice.split == TRAINER:
        return Split(_nowhere, _nowhere, FeatureRange.REAL, features=(1,))
    if choice.features is None:
        raise NetworkError(f"network.split = {PROGRAM} needs network.features: the output of the program's extractor")

    def classifier(_: tuple[int, ...], classes: int) -> nn.Module:
        if not choice.classifier:
            raise NetworkError(
                f"network.split = {PROGRAM}: its classifier is not a sequence of standard layers, so only the program has it; "
                "build it from torch.nn layers in nn.Sequential, or register the split as an entry point"
            )
        return built(choice.classifier)

    return Split(_nowhere, classifier, FeatureRange(choice.features.range), features=choice.features.shape)


def _nowhere(*_: object) -> nn.Module:
    raise NetworkError("this network is defined by the devices' program, which is not available here")


_ROWS = 3
_DTYPES = (torch.float32, torch.int64)
_NAME = re.compile(r"[A-Za-z0-9_.]{1,200}", re.ASCII)  # as in `TensorLayout`


def load_split(name: str) -> Split:
    """A user's split: a registered name, or a `module:function` that this machine allows.

    Raises:
        NetworkError: not allowed here, can't be imported, or is not a function that returns a `Split`.
    """
    return _imported(own_target(name))


@functools.cache
def _imported(target: str) -> Split:
    try:
        split = imported(target)()
    except ExtensionError as error:
        raise NetworkError(f"split {error}") from error
    except Exception as error:
        raise NetworkError(f"split {target}: {type(error).__name__}: {error}") from error
    if not isinstance(split, Split):
        raise NetworkError(f"split {target} must return a fedcg.learning.networks.Split, not a {type(split).__name__}")
    if not isinstance(split.feature_range, FeatureRange):
        raise NetworkError(f"split {target}: feature_range must be a FeatureRange, not {split.feature_range!r}")
    return replace(split, initialises_itself=True)


class Rehearsal(Value):
    """Inputs of a split's test: its name for messages, the shape of an input (images: channels, height, width), and C."""

    name: str
    shape: tuple[int, ...]
    classes: int

    def wrong(self, half: str, problem: str) -> NetworkError:
        """An error that names the split, the half and the problem."""
        return NetworkError(f"split {self.name}: the {half} {problem}")


@functools.cache
def rehearse(split: Split, asked: Rehearsal) -> None:
    """Test a user's split on a few random inputs, in eval and train mode, once per process and input shape.

    Raises:
        NetworkError: names the split, the half and the problem.
    """
    with lent_generators(0):
        images = torch.randn(_ROWS, *asked.shape)
        extractor = _built(asked, "extractor", lambda: split.extractor(asked.shape[0]))
        features = _output(asked, "extractor", extractor, images)
        _check_features(asked, features, split.feature_range)
        shape = tuple(features.shape[1:])
        if split.features not in (None, shape):
            raise asked.wrong(
                "extractor", f"returns features {list(shape)}, but the spec has {list(split.features or ())}"
            )
        classifier = _built(asked, "classifier", lambda: split.classifier(shape, asked.classes))
        if not list(classifier.parameters()):
            raise asked.wrong("classifier", "has no parameters to share")
        logits = _output(asked, "classifier", classifier, features)
        if logits.shape != (_ROWS, asked.classes):
            expected = f"[{_ROWS}, {asked.classes}]"
            raise asked.wrong("classifier", f"returns {list(logits.shape)} for {list(features.shape)}, not {expected}")
        _check_training(asked, extractor, classifier, images[:2])


def _built(asked: Rehearsal, half: str, build: Callable[[], nn.Module]) -> nn.Module:
    """Build one half. Its initial values must depend only on torch's default generator."""
    first, again = _seeded(asked, half, build), _seeded(asked, half, build)
    repeated = again.state_dict()
    for name, tensor in first.state_dict().items():
        if tensor.dtype not in _DTYPES:
            raise asked.wrong(half, f"has {name} of type {tensor.dtype}; only float32 and int64 can be stored and sent")
        if not bool(torch.isfinite(tensor).all()):
            raise asked.wrong(half, f"has initial values in {name} that are not finite")
        if not torch.equal(tensor, repeated[name]):
            raise asked.wrong(half, f"has different initial values in {name} at every build: draw them only with torch")
        if not _NAME.fullmatch(name):
            raise asked.wrong(half, f"has a tensor named {name!r}; names may have only letters, digits, _ and .")
    return first


def _seeded(asked: Rehearsal, half: str, build: Callable[[], nn.Module]) -> nn.Module:
    with lent_generators(1):
        try:
            module = build()
        except Exception as error:
            raise asked.wrong(half, f"can't be built: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise asked.wrong(half, f"is a {type(module).__name__}, not a torch.nn.Module")
    return module


@torch.no_grad()
def _output(asked: Rehearsal, half: str, module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The output of a half for a batch in eval mode."""
    module.eval()
    output = _run(asked, half, lambda: module(inputs))
    if not isinstance(output, torch.Tensor):
        raise asked.wrong(half, f"returns a {type(output).__name__}, not a tensor")
    if output.ndim < 2 or len(output) != len(inputs) or 0 in output.shape:
        raise asked.wrong(half, f"gives {list(output.shape)} for {list(inputs.shape)}; dimension 0 must be the batch")
    if output.dtype != torch.float32:
        raise asked.wrong(half, f"returns {output.dtype}, not float32")
    if not bool(torch.isfinite(output).all()):
        raise asked.wrong(half, "returns values that are not finite for random inputs")
    alone = _run(asked, half, lambda: module(inputs[:1]))
    if alone.shape != output[:1].shape or not torch.allclose(alone, output[:1], rtol=1e-3, atol=1e-4):
        raise asked.wrong(half, "returns different values for a row alone and in a batch, in eval mode")
    return output


def _check_features(asked: Rehearsal, features: torch.Tensor, feature_range: FeatureRange) -> None:
    low, high = features.min().item(), features.max().item()
    if low < feature_range.bounds[0] or high > feature_range.bounds[1]:
        raise asked.wrong(
            "extractor",
            f"returns features from {low:.3g} to {high:.3g}, but its feature_range is {feature_range.value}: "
            "end it in a sigmoid (unit) or a ReLU (non_negative), or declare the actual range",
        )


def _check_training(asked: Rehearsal, extractor: nn.Module, classifier: nn.Module, images: torch.Tensor) -> None:
    @torch.enable_grad()  # a process may evaluate a model before it trains one
    def step() -> torch.Tensor:
        loss: torch.Tensor = classifier.train()(extractor.train()(images)).square().mean()
        loss.backward()
        return loss

    _run(asked, "pair", step)


def _run(asked: Rehearsal, half: str, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    try:
        return call()
    except Exception as error:
        raise asked.wrong(half, f"can't run on a batch of random images: {type(error).__name__}: {error}") from error
