"""The classification of several clients in lock step, their networks stacked: draws, losses and steps as one after the other.

Convolutions become grouped convolutions, linear layers batched matrix products. A batch smaller than the others is filled up with rows that weigh nothing; a client that has taken its last step is read off. Networks never see each other's rows, so that one which diverges leaves the others alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it  # noqa: N812 - the field's name for it
from torch import nn

from fedcg.learning.data.image_folder import normalise
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Callbacks, DivergedError, RoundContext, TrainingParams
from fedcg.learning.networks.fast_layers import AveragedConv2d, MaxedConv2d
from fedcg.learning.training.batches import BLOCK_ROWS, Augmentation, Augmenter, images_at_once, index_blocks, steps_of
from fedcg.learning.training.classification import CLASSIFY, TASK
from fedcg.learning.training.losses import LossMeter, check_loss
from fedcg.learning.training.optimisers import task_optimiser
from fedcg.learning.training.stage import Batches, Descent, Descents, Nets, Stage, Tensors, Trained, run_stage
from fedcg.wire.parts import Part

_Weights = Mapping[str, torch.Tensor]
_Layer = Callable[[nn.Module, torch.Tensor, _Weights], torch.Tensor]


def _convolved(rows: torch.Tensor, weights: _Weights) -> torch.Tensor:
    """[N, B, C, H, W] by N convolutions -> [B, N * outputs, H', W']."""
    networks, batch = rows.shape[:2]
    maps = rows.transpose(0, 1).reshape(batch, -1, *rows.shape[3:])
    convolved: torch.Tensor = F.conv2d(
        maps, weights["weight"].flatten(0, 1), weights["bias"].flatten(), groups=networks
    )
    return convolved


def _apart(maps: torch.Tensor, networks: int) -> torch.Tensor:
    """[B, N * C, H, W] -> [N, B, C, H, W], a view."""
    apart: torch.Tensor = maps.reshape(len(maps), networks, -1, *maps.shape[2:]).transpose(0, 1)
    return apart


def _averaged(_: nn.Module, rows: torch.Tensor, weights: _Weights) -> torch.Tensor:
    return _apart(F.avg_pool2d(_convolved(rows, weights), 2), len(rows))


def _maxed(_: nn.Module, rows: torch.Tensor, weights: _Weights) -> torch.Tensor:
    return _apart(F.max_pool2d(_convolved(rows, weights), 2), len(rows))


def _linear(_: nn.Module, rows: torch.Tensor, weights: _Weights) -> torch.Tensor:
    return torch.baddbmm(weights["bias"].unsqueeze(1), rows, weights["weight"].transpose(1, 2))


def _flat(_: nn.Module, rows: torch.Tensor, weights: _Weights) -> torch.Tensor:
    return rows.flatten(2)


def _as_it_is(layer: nn.Module, rows: torch.Tensor, weights: _Weights) -> torch.Tensor:
    applied: torch.Tensor = layer(rows)
    return applied


_LAYERS: Mapping[type[nn.Module], _Layer] = {
    AveragedConv2d: _averaged,
    MaxedConv2d: _maxed,
    nn.Linear: _linear,
    nn.Flatten: _flat,
    nn.Identity: _as_it_is,
    nn.ReLU: _as_it_is,
    nn.Sigmoid: _as_it_is,
}


def can_stack(*networks: nn.Module) -> bool:
    """Whether networks are chains of layers that `Stacked` knows."""
    return all(isinstance(network, nn.Sequential) and all(map(_is_known, network)) for network in networks)


def _is_known(layer: nn.Module) -> bool:
    return type(layer) in _LAYERS and getattr(layer, "bias", layer) is not None


class Stacked(nn.Module):
    """Networks of one architecture, with copies of their weights."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        """`networks`: on one device, and `can_stack`."""
        super().__init__()
        self._names = [name for name, _ in networks[0].named_parameters()]
        self.stacks = nn.ParameterList(
            torch.stack([network.get_parameter(name).detach() for network in networks]) for name in self._names
        )
        named = dict(zip(self._names, self.stacks, strict=True))
        # A tuple, so that the layers do not count as this module's own.
        self._chain = tuple(
            (layer, _LAYERS[type(layer)], {key: named[f"{at}.{key}"] for key, _ in layer.named_parameters()})
            for at, layer in networks[0].named_children()
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Each network on its rows: [N, B, ...] -> [N, B, ...]."""
        for layer, apply, weights in self._chain:
            rows = apply(layer, rows, weights)
        return rows

    def weights_of(self, at: int) -> dict[str, torch.Tensor]:
        """A copy of one network's weights, on the device."""
        return {name: stack[at].detach().clone() for name, stack in zip(self._names, self.stacks, strict=True)}


@dataclass(frozen=True)
class Learner:
    """One client of a stack.

    Attributes:
        extractor: trained in place, on the stack's device.
        classifier: likewise.
        data: training images, on that device.
        ctx: its streams; spec and device are those of all.
    """

    extractor: nn.Module
    classifier: nn.Module
    data: ImageSet
    ctx: RoundContext


@dataclass(frozen=True)
class _Draws:
    """Every batch of one client: which images, [steps, B] int64 (-1: filled up), how augmented ([steps, B, 3]), and how blocks divide them."""

    index: torch.Tensor
    choices: torch.Tensor
    blocks: tuple[int, ...]

    def padded(self, steps: int) -> _Draws:
        """The same with steps of nothing at the end."""
        more = (0, 0, 0, steps - len(self.index))
        return _Draws(F.pad(self.index, more, value=-1), F.pad(self.choices, (0, 0, *more)), self.blocks)


def _draws(learner: Learner, params: TrainingParams) -> _Draws:
    spec, batch = learner.ctx.spec, params.batch_size
    streams = learner.ctx.streams.at(CLASSIFY)
    shuffle, augmenter = streams.generator("order"), Augmenter(spec, streams)
    steps = steps_of(params, len(learner.data))
    index, choices = [], []
    for block in index_blocks(len(learner.data), batch, steps, shuffle, images_at_once(spec.image)):
        missing = (0, -len(block) % batch)
        index.append(F.pad(block, missing, value=-1).view(-1, batch))
        choices.append(F.pad(augmenter.draw(len(block)).choices, (0, 0, *missing)).view(-1, batch, 3))
    return _Draws(torch.cat(index), torch.cat(choices), tuple(map(len, index)))


class _Curves(LossMeter):
    """Keeps the clients' losses of every step; one that diverges is that client's affair, and found at the end."""

    def __init__(self) -> None:
        super().__init__(CLASSIFY, "cpu")
        self.steps: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        """Keep the losses of a step, [N]."""
        self.steps.append(loss.clone())

    def check(self) -> float:
        """Nothing yet."""
        return 0.0


def train_classifiers(learners: Sequence[Learner], params: TrainingParams) -> list[float | DivergedError]:
    """`train_classifier` without a penalty for every client at once, in place.

    Args:
        learners: at least one; their networks are alike, and `can_stack`.
        params: epochs or steps, batch size, optimiser: of all.

    Returns:
        Per client its mean cross-entropy over the last block, or why its weights can't be used.
    """
    draws = [_draws(learner, params) for learner in learners]
    ends, taken, curves = [len(one.index) for one in draws], itertools.count(1), _Curves()
    extractor = Stacked([learner.extractor for learner in learners])
    classifier = Stacked([learner.classifier for learner in learners])

    def read_off() -> None:
        """Give each client that has taken its last step its weights."""
        step = next(taken)
        for at, learner in enumerate(learners):
            if ends[at] == step:
                learner.extractor.load_state_dict(extractor.weights_of(at))
                learner.classifier.load_state_dict(classifier.weights_of(at))

    ctx = replace(learners[0].ctx, checkpoint=None, callbacks=Callbacks())
    optimiser = task_optimiser([*extractor.parameters(), *classifier.parameters()], params)
    stage = Stage(
        name=CLASSIFY,
        losses=(CLASSIFY,),
        networks={Part.EXTRACTOR: extractor, Part.CLASSIFIER: classifier},
        trained={TASK: Trained((Part.EXTRACTOR, Part.CLASSIFIER), optimiser)},
        batches=_stacked_batches(learners, draws, ctx),
        step=_stacked_step,
        after=(read_off,),
        meter=lambda what, device: curves,
    )
    run_stage(stage, ctx)
    each = torch.stack(curves.steps).t().cpu()
    return [_last_mean(curve, one.blocks) for curve, one in zip(each, draws, strict=True)]


def _stacked_batches(learners: Sequence[Learner], draws: Sequence[_Draws], ctx: RoundContext) -> Batches:
    """Of a step: images [1, N, B, C, H, W], labels [1, N, B] and each row's share of its client's mean, [1, N, B]."""
    steps = max(len(one.index) for one in draws)
    index, choices = (
        torch.stack(column, dim=1).to(ctx.device)  # [steps, N, B, ...]
        for column in zip(*((one.index, one.choices) for one in (some.padded(steps) for some in draws)), strict=True)
    )
    images, labels = (torch.cat([getattr(learner.data, name) for learner in learners]) for name in ("images", "labels"))
    first = torch.tensor([0, *(len(learner.data) for learner in learners[:-1])]).cumsum(0).to(ctx.device).view(1, -1, 1)

    def blocks() -> Iterator[Tensors]:
        at_once = max(1, BLOCK_ROWS // index[0].numel())
        for some, chosen in zip(index.split(at_once), choices.split(at_once), strict=True):
            rows = (some.clamp(min=0) + first).flatten()
            pixels = normalise(Augmentation(ctx.spec, chosen.flatten(0, 2)).apply(images[rows]), ctx.spec.image)
            present = (some >= 0).to(pixels.dtype)
            shares = present / present.sum(dim=2, keepdim=True).clamp(min=1.0)
            yield pixels.unflatten(0, some.shape), labels[rows].view(some.shape), shares

    return Batches(blocks(), steps, size=1)


def _stacked_step(nets: Nets, batch: Tensors) -> Descents:
    """One step of all clients; tells their losses, [N]."""
    images, labels, shares = (tensor.squeeze(0) for tensor in batch)
    losses: list[torch.Tensor] = []

    def summed() -> torch.Tensor:
        logits = nets[Part.CLASSIFIER](nets[Part.EXTRACTOR](images))
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(shares)
        losses.append((each * shares).sum(dim=1))
        return losses[0].sum()

    yield Descent(TASK, summed)
    return losses


def _last_mean(curve: torch.Tensor, blocks: Sequence[int]) -> float | DivergedError:
    """Mean loss of a client's last block, when that of every block can be trusted."""
    means = curve[: sum(blocks)].split(list(blocks))
    try:
        return [check_loss(float(block.mean()), "classification") for block in means][-1]
    except DivergedError as error:
        return error
