"""Who takes part in a federation, as a program of the user's own states it: the network, its data, its classes.

The same value is simulated (`fedcg.simulate`) and run on a device.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedcg.input_form import TensorForm
from fedcg.learning.data.datasets import read_dataset
from fedcg.learning.data.image_folder import normalise, split_by_hash
from fedcg.learning.errors import DataError, NetworkError
from fedcg.learning.image_set import FileEntry, ImageSet
from fedcg.learning.networks.cut import Halves
from fedcg.learning.networks.layers import built
from fedcg.learning.networks.splits import FeatureRange, Split
from fedcg.learning.simulation.party import ClientData
from fedcg.learning.spec import PROGRAM, Features, Layer, NetworkChoice

_SHARES = {"train": 0.9, "val": 0.1}
_TRACED = 64
_WIDE = 8.0
"""Deviation of random inputs that look for features beyond those of the data."""


@dataclass(frozen=True, eq=False)
class Client:
    """One participant.

    Attributes:
        model: `fedcg.split(net, after="features")`, or `fedcg.Split(extractor, classifier)`.
        train: what it trains on: a torch Dataset of (x, y), two arrays (inputs, labels), or rows with an input and a label; a tenth of it,
            by content, chooses the best model (validation). x is uint8, then scaled to [0, 1], or any number, as float32; all of one shape.
        classes: names of the classes; a label y is an index into them.
        test: what its models are measured on, of the same form; None: its validation samples.
        name: of the site, for tables and files; empty: its place in the list, client-1 and so on.
        mean, std: inputs are normalised by these, a number for each index of x's first dimension; empty: they are not.
    """

    model: Halves
    train: Any
    classes: Sequence[str]
    test: Any = None
    name: str = ""
    mean: Sequence[float] = ()
    std: Sequence[float] = ()

    def __post_init__(self) -> None:
        """Check the model.

        Raises:
            NetworkError: it is not cut in two, or built at its first call.
        """
        if not isinstance(halves := self.model, Halves):
            raise NetworkError(
                f"model is a {type(halves).__name__}: give fedcg.split(net, after=...) or fedcg.Split(extractor, classifier)"
            )
        modules = [*halves.extractor.named_modules(), *halves.classifier.named_modules()]
        if lazy := [name for name, one in modules if isinstance(one, nn.modules.lazy.LazyModuleMixin)]:
            raise NetworkError(f"model: {lazy[0]} is built at its first call: run the network once before it is cut")

    def data(self, name: str) -> ClientData:
        """Its samples, read into memory.

        Raises:
            DataError: names the client, the sample and what is wrong with it.
        """
        rows = read_dataset(self.train, self.classes, f"client {name}: train")
        digests = [
            FileEntry(str(row), ImageSet(rows.images[row], rows.labels[row], ()).digest(), 0)
            for row in range(len(rows))
        ]
        parts = split_by_hash(digests, _SHARES)
        train, val = (rows.rows([int(entry.path) for entry in parts[part]]) for part in ("train", "val"))
        if len(train) < 2 or not len(val):
            raise DataError(
                f"client {name}: of {len(rows)} samples of train {len(train)} are to train on and {len(val)} to validate with "
                "(copies stay together): give it more, and different ones"
            )
        test = val if self.test is None else read_dataset(self.test, self.classes, f"client {name}: test")
        if test.images.shape[1:] != train.images.shape[1:] or test.images.dtype != train.images.dtype:
            raise DataError(f"client {name}: samples of test and train have other shapes or types")
        return ClientData(train, val, test)

    def form(self, data: ClientData) -> TensorForm:
        """The form of its inputs."""
        shape, dtype = tuple(data.train.images.shape[1:]), str(data.train.images.dtype).removeprefix("torch.")
        return TensorForm.model_validate(
            {"kind": "tensor", "shape": shape, "dtype": dtype, "mean": tuple(self.mean), "std": tuple(self.std)}
        )

    def network(self, data: ClientData, **chosen: Any) -> NetworkChoice:
        """Its network as a spec names it, with the code bound to it.

        Args:
            data: its samples; some are sent through the network.
            chosen: other fields of the choice, e.g. generator.

        Raises:
            NetworkError: the network can't run on them, or makes something else than logits of its classes.
        """
        halves, form = self.model, self.form(data)
        samples = normalise(data.train.images[:_TRACED], form)
        features, logits = _traced(halves, samples)
        if logits.shape != (len(samples), len(self.classes)):
            raise NetworkError(
                f"the network makes {list(logits.shape[1:])} of an input, not one number for each of {len(self.classes)} classes"
            )
        wide, _ = _traced(halves, torch.randn(samples.shape, generator=torch.Generator().manual_seed(0)) * _WIDE)
        reach = FeatureRange.around(torch.cat([features, wide]))
        layers = _as_data(halves, features)
        shape = tuple(features.shape[1:])
        own = Split(
            functools.partial(_copied, halves.extractor),
            functools.partial(_copied, halves.classifier) if layers is None else functools.partial(_built, layers),
            reach,
            initialises_itself=True,
            draws_classifier=layers is not None,
            features=shape,
        )
        choice = NetworkChoice(
            split=PROGRAM, features=Features(shape=shape, range=reach.value), classifier=layers, **chosen
        )
        return choice.bound(own)


def _copied(module: nn.Module, *_: object) -> nn.Module:
    return copy.deepcopy(module)


def _built(layers: tuple[Layer, ...], *_: object) -> nn.Module:
    return built(layers)


@torch.no_grad()
def _traced(halves: Halves, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and logits of inputs, in eval mode; the modules stay as they are."""
    extractor, classifier = (copy.deepcopy(one).eval() for one in (halves.extractor, halves.classifier))
    try:
        features = extractor(inputs)
    except Exception as error:
        raise NetworkError(
            f"the extractor can't run on {list(inputs.shape)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(features, torch.Tensor) or features.dtype != torch.float32 or features.ndim < 2:
        found = (
            f"{features.dtype} {list(features.shape)}"
            if isinstance(features, torch.Tensor)
            else type(features).__name__
        )
        raise NetworkError(f"the extractor makes {found}, not a float32 tensor [B, ...] of features")
    try:
        return features, classifier(features)
    except Exception as error:
        raise NetworkError(
            f"the classifier can't run on features {list(features.shape)}: {type(error).__name__}: {error}"
        ) from error


@torch.no_grad()
def _as_data(halves: Halves, features: torch.Tensor) -> tuple[Layer, ...] | None:
    """The classifier as data, where the layers that it is made of give its own logits; None where it has none."""
    layers = halves.layers()
    if not layers or not all(weight.requires_grad for weight in halves.classifier.parameters()):
        return None  # what is frozen keeps its weights
    own = copy.deepcopy(halves.classifier).eval()
    again = built(layers).eval()
    tensors, names = own.state_dict().values(), again.state_dict()
    if [one.shape for one in tensors] != [one.shape for one in names.values()]:
        return None
    again.load_state_dict(dict(zip(names, tensors, strict=True)))
    return layers if torch.allclose(again(features), own(features), rtol=1e-4, atol=1e-5) else None
