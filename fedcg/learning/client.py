"""A participant of a federation, as defined by the user's program: network, data and classes.

The same value is used in simulations (`fedcg.simulate`) and on devices.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import nn

from fedcg.input_form import InputForm, TensorForm
from fedcg.learning.data.array_files import ArrayData, LabelledImages
from fedcg.learning.data.datasets import read_dataset
from fedcg.learning.data.frames import Table
from fedcg.learning.data.image_folder import normalise, placed, split_by_hash
from fedcg.learning.errors import DataError, NetworkError
from fedcg.learning.image_set import FileEntry, ImageSet
from fedcg.learning.networks.assembly import layout_of
from fedcg.learning.networks.cut import Halves
from fedcg.learning.networks.layers import built
from fedcg.learning.networks.splits import FeatureRange, Split
from fedcg.learning.networks.task import Task, Trainer
from fedcg.learning.simulation.party import ClientData
from fedcg.learning.spec import PROGRAM, TRAINER, Features, Layer, NetworkChoice
from fedcg.wire.parts import Part, TensorLayout

_SHARES = {"train": 0.9, "val": 0.1}
_TRACED = 64
_WIDE = 8.0
"""Standard deviation of the random inputs that probe for features beyond those of the data."""


@dataclass(frozen=True, eq=False)
class Client:
    """One participant of a federation.

    Attributes:
        model: `fedcg.split(net, after="features")`, or `fedcg.Split(extractor, classifier)`.
        train: training data: a torch Dataset of (x, y), two arrays (inputs, labels), `fedcg.table` or `fedcg.signals`,
            or rows with an input and a label. A tenth, split by content, is used for validation. x is uint8 (scaled to
            [0, 1]) or any number (as float32), all of one shape.
        classes: names of the classes; a label y is an index into them.
        test: test data of the same form; None: the validation samples.
        name: of the site, for tables and files; empty: client-1 and so on, by position in the list.
        trainer: for tasks other than classification: trains and evaluates `model`, a whole network, on its own data.
            Leave out `train`, `test` and `classes`.
        example: one input of the network, [*shape], used for its export; only with a trainer.
        mean, std: for normalising inputs, one number per index of x's first dimension; empty: no normalisation.
    """

    model: Halves | nn.Module
    train: Any = None
    classes: Sequence[str] = ()
    test: Any = None
    name: str = ""
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    trainer: Trainer | None = None
    example: Any = None

    def __post_init__(self) -> None:
        """Check the model.

        Raises:
            NetworkError: the model is not split in two or is only built at its first call, or the fields are
                inconsistent.
        """
        if self.trainer is not None:
            if not isinstance(self.trainer, Trainer) or not isinstance(self.model, nn.Module):
                raise NetworkError("trainer must extend fedcg.Trainer, and model must be a whole torch.nn.Module")
            if self.example is None or self.train is not None or self.classes:
                raise NetworkError(
                    "with a trainer, set example to one input of the network, and leave train, test and classes out: the trainer has the data"
                )
            modules = list(self.model.named_modules())
        elif isinstance(self.model, Halves):
            if self.train is None or len(self.classes) < 2:
                raise NetworkError("set train, and two or more classes; for other tasks, set a trainer")
            columns = [list(part.columns.items()) for part in (self.train, self.test) if isinstance(part, Table)]
            if columns[1:] not in ([], columns[:1]):
                raise NetworkError("test and train must have the same columns in the same order")
            modules = [*self.model.extractor.named_modules(), *self.model.classifier.named_modules()]
            private = {id(one) for one in self.model.extractor.parameters()}
            if tied := [name for name, one in self.model.classifier.named_parameters() if id(one) in private]:
                raise NetworkError(
                    f"model: {tied[0]} of the classifier is also a parameter of the extractor, which stays private: untie them"
                )
        else:
            raise NetworkError(
                f"model is a {type(self.model).__name__}: use fedcg.split(net, after=...) or fedcg.Split(extractor, classifier)"
            )
        if lazy := [name for name, one in modules if isinstance(one, nn.modules.lazy.LazyModuleMixin)]:
            raise NetworkError(f"model: {lazy[0]} is only built at its first call: run the network before the split")

    def data(self, name: str) -> ClientData:
        """The client's samples, read into memory.

        Raises:
            DataError: names the client, the sample and the problem.
        """
        if (task := self.own_task(name)) is not None:
            return ClientData(*task.held())
        rows = read_dataset(self.train, self.classes, f"client {name}: train")
        blocks = getattr(self.train, "blocks", ())
        digests = [
            FileEntry(str(row), placed(ImageSet(rows.images[row], rows.labels[row], ()).digest(), blocks, row), 0)
            for row in range(len(rows))
        ]
        parts = split_by_hash(digests, _SHARES)
        train, val = (rows.rows([int(entry.path) for entry in parts[part]]) for part in ("train", "val"))
        if len(train) < 2 or not len(val):
            raise DataError(
                f"client {name}: train splits into {len(train)} samples for training and {len(val)} for validation, of {len(rows)} "
                "(copies and overlapping windows stay together): add more, different samples"
            )
        test = val if self.test is None else read_dataset(self.test, self.classes, f"client {name}: test")
        if test.images.shape[1:] != train.images.shape[1:] or test.images.dtype != train.images.dtype:
            raise DataError(f"client {name}: samples of test and train differ in shape or type")
        return ClientData(train, val, test)

    def arrays(self, name: str) -> ArrayData:
        """The client's samples as a device reads them from a source: `train`, and `test` if set.

        Raises:
            DataError: names the client, the sample and the problem.
        """

        def read(part: str, data: Any) -> LabelledImages:
            rows = read_dataset(data, self.classes, f"client {name}: {part}")
            return LabelledImages(rows.images.numpy(), rows.labels.numpy(), Path(name), getattr(data, "blocks", ()))

        return ArrayData(read("train", self.train), None if self.test is None else read("test", self.test))

    def own_task(self, name: str) -> Task | None:
        """The task of the client's trainer; None without a trainer."""
        return None if self.trainer is None else Task(name, cast(nn.Module, self.model), self.trainer)

    def as_started_by(self, first: Client, choice: NetworkChoice, name: str) -> NetworkChoice:
        """The networks of the first client, with this client's trainer."""
        task = replace(first, trainer=self.trainer).own_task(name)
        return choice if task is None else choice.bound(task.split(), task)

    def form(self, images: torch.Tensor | NDArray[Any]) -> TensorForm:
        """The form of the inputs [N, *shape]; with a trainer, of its example."""
        if self.example is not None:
            images = torch.as_tensor(self.example)[None]
            images = images if images.dtype == torch.uint8 else images.to(torch.float32)
        shape, dtype = tuple(images.shape[1:]), str(images.dtype).removeprefix("torch.")
        return TensorForm.model_validate(
            {
                "kind": "tensor",
                "shape": shape,
                "dtype": dtype,
                "mean": tuple(self.mean or ()),
                "std": tuple(self.std or ()),
            }
        )

    def network(self, data: ClientData, **chosen: Any) -> NetworkChoice:
        """The network as named in a spec, with its code bound to it.

        Args:
            data: the client's samples; some are run through the network.
            chosen: other fields of the choice, e.g. generator.

        Raises:
            NetworkError: the network can't run on them, or does not return logits of its classes.
        """
        if (task := self.own_task(self.name)) is not None:
            task.check_example(
                normalise(torch.zeros(2, *self.form(data.train.images).shape), self.form(data.train.images))
            )
            return NetworkChoice(**self._stated(task), **chosen).bound(task.split(), task)
        halves, form = self.model, self.form(data.train.images)
        assert isinstance(halves, Halves)
        samples = normalise(data.train.images[:_TRACED], form)
        features, logits = _traced(halves, samples)
        if logits.shape != (len(samples), len(self.classes)):
            raise NetworkError(
                f"the network returns {list(logits.shape[1:])} per input, not one logit for each of {len(self.classes)} classes"
            )
        wide, _ = _traced(halves, torch.randn(samples.shape, generator=torch.Generator().manual_seed(0)) * _WIDE)
        reach = FeatureRange.around(torch.cat([features, wide]))
        made = Features(shape=tuple(features.shape[1:]), range=reach.value)
        choice = NetworkChoice(features=made, **self._stated(None, features), **chosen)
        return choice.bound(self._split(choice))

    def bound(self, choice: NetworkChoice, form: InputForm, name: str) -> NetworkChoice:
        """A federation's choice of networks with this program's code bound to it. The code must match the choice.

        Raises:
            NetworkError: names what differs.
        """
        task, features = self.own_task(name), torch.zeros(0)
        if isinstance(self.model, Halves):
            features, _ = _traced(self.model, torch.zeros(1, *form.tensor_shape))
        for stated, ours in self._stated(task, features).items():
            if (theirs := getattr(choice, stated)) != ours:
                raise NetworkError(
                    f"the federation's network differs from this program's: network.{stated} has {_first_other(theirs, ours)}"
                )
        return choice.bound(self._split(choice)) if task is None else choice.bound(task.split(), task)

    def _stated(self, task: Task | None, features: torch.Tensor | None = None) -> dict[str, Any]:
        """The spec's fields of the network other than its features, on which the classifier is tried."""
        if task is not None:
            stored = {part: layout_of(weights) for part, weights in task.parts().items()}
            return {"split": TRAINER, "extractor": stored[Part.EXTRACTOR], "head": stored[Part.CLASSIFIER]}
        halves = self.model
        assert isinstance(halves, Halves)
        assert features is not None
        layers = _as_data(halves, features)
        head = None if layers else _stored(halves.classifier)
        return {"split": PROGRAM, "extractor": _stored(halves.extractor), "classifier": layers, "head": head}

    def _split(self, choice: NetworkChoice) -> Split:
        assert choice.features is not None
        layers, halves = choice.classifier, self.model
        assert isinstance(halves, Halves)
        return Split(
            functools.partial(_copied, halves.extractor),
            functools.partial(_copied, halves.classifier) if layers is None else functools.partial(_built, layers),
            FeatureRange(choice.features.range),
            initialises_itself=True,
            draws_classifier=layers is not None,
            features=choice.features.shape,
        )


def _stored(extractor: nn.Module) -> tuple[TensorLayout, ...] | None:
    """The tensors of an extractor; None where it has none.

    Raises:
        NetworkError: a tensor's type can't be stored.
    """
    tensors = extractor.state_dict()
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.int64):
            raise NetworkError(f"the extractor has {name} of type {tensor.dtype}; only float32 and int64 can be stored")
    return layout_of(tensors) or None


def _first_other(theirs: Any, ours: Any) -> str:
    """The first difference between two names, or two lists of tensors or layers."""
    sides = [(one,) if isinstance(one, str) else one or () for one in (theirs, ours)]
    pairs = ([_told(one) for one in pair] for pair in itertools.zip_longest(*sides))
    return next(f"{one} there and {other} here" for one, other in pairs if one != other)


def _told(one: object) -> str:
    return f"{one.name} {list(one.shape)}" if isinstance(one, TensorLayout) else "none" if one is None else str(one)


def _copied(module: nn.Module, *_: object) -> nn.Module:
    return copy.deepcopy(module)


def _built(layers: tuple[Layer, ...], *_: object) -> nn.Module:
    return built(layers)


@torch.no_grad()
def _traced(halves: Halves, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and logits of inputs, in eval mode. The modules are not changed."""
    extractor, classifier = (copy.deepcopy(one).eval() for one in (halves.extractor, halves.classifier))
    try:
        features = extractor(inputs)
    except Exception as error:
        raise NetworkError(
            f"the extractor can't run on {list(inputs.shape)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(features, torch.Tensor) or features.dtype != torch.float32 or features.ndim < 2:
        is_tensor = isinstance(features, torch.Tensor)
        found = f"{features.dtype} {list(features.shape)}" if is_tensor else type(features).__name__
        raise NetworkError(f"the extractor returns {found}, not a float32 tensor [B, ...] of features")
    try:
        return features, classifier(features)
    except Exception as error:
        raise NetworkError(
            f"the classifier can't run on features {list(features.shape)}: {type(error).__name__}: {error}"
        ) from error


@torch.no_grad()
def _as_data(halves: Halves, features: torch.Tensor) -> tuple[Layer, ...] | None:
    """The classifier as data, if its layers reproduce its logits; None otherwise."""
    layers = halves.layers()
    if not layers or not all(weight.requires_grad for weight in halves.classifier.parameters()):
        return None  # frozen tensors keep their weights
    own = copy.deepcopy(halves.classifier).eval()
    again = built(layers).eval()
    tensors, names = own.state_dict().values(), again.state_dict()
    if [one.shape for one in tensors] != [one.shape for one in names.values()]:
        return None
    again.load_state_dict(dict(zip(names, tensors, strict=True)))
    return layers if torch.allclose(again(features), own(features), rtol=1e-4, atol=1e-5) else None
