"""The classification of several clients in lock step, their networks stacked: draws, losses and steps as one after the other.

All of a stack take a step together. A batch smaller than the others is filled up with rows that weigh nothing; a client that has
taken its last step is read off, and the further steps of the stack in its place are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

from fedcg.learning.data.image_folder import normalise
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import DivergedError, RoundContext, TrainingParams
from fedcg.learning.networks.layers.stacked import Stacked
from fedcg.learning.training.augmentation import Augmentation, Augmenter
from fedcg.learning.training.batches import BLOCK_ROWS, images_at_once, index_blocks, steps_of
from fedcg.learning.training.cuda_graph import Step, graphed
from fedcg.learning.training.losses import check_loss
from fedcg.learning.training.optimisers import task_optimiser
from fedcg.learning.training.precision import in_precision


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
    streams = learner.ctx.streams.at("classify")
    shuffle, augmenter = streams.generator("order"), Augmenter(spec, streams)
    steps = steps_of(params, len(learner.data))
    index, choices = [], []
    for block in index_blocks(len(learner.data), batch, steps, shuffle, images_at_once(spec.image)):
        missing = (0, -len(block) % batch)
        index.append(F.pad(block, missing, value=-1).view(-1, batch))
        choices.append(F.pad(augmenter.draw(len(block)).choices, (0, 0, *missing)).view(-1, batch, 3))
    return _Draws(torch.cat(index), torch.cat(choices), tuple(map(len, index)))


def train_classifiers(learners: Sequence[Learner], params: TrainingParams) -> list[float | DivergedError]:
    """`train_classifier` without a penalty for every client at once, in place.

    Args:
        learners: at least one; their networks are alike, and `can_stack`.
        params: epochs or steps, batch size, optimiser: of all.

    Returns:
        Per client its mean cross-entropy over the last block, or why its weights can't be used.
    """
    spec, device = learners[0].ctx.spec, learners[0].ctx.device
    draws = [_draws(learner, params) for learner in learners]
    ends = [len(one.index) for one in draws]
    steps = max(ends)
    index, choices = (
        torch.stack(column, dim=1).to(device)  # [steps, N, B, ...]
        for column in zip(*((one.index, one.choices) for one in (some.padded(steps) for some in draws)), strict=True)
    )
    images, labels = (torch.cat([getattr(learner.data, name) for learner in learners]) for name in ("images", "labels"))
    first = torch.tensor([0, *(len(learner.data) for learner in learners[:-1])]).cumsum(0).to(device).view(1, -1, 1)
    extractor = Stacked([learner.extractor for learner in learners])
    classifier = Stacked([learner.classifier for learner in learners])
    step = _stacked_step(extractor, classifier, params, steps, learners[0].ctx)
    losses = []
    at_once = max(1, BLOCK_ROWS // index[0].numel())
    for start in range(0, steps, at_once):
        some = index[start : start + at_once]
        rows = (some.clamp(min=0) + first).flatten()
        augmentation = Augmentation(spec, choices[start : start + at_once].flatten(0, 2))
        pixels = normalise(augmentation.apply(images[rows]), spec.image).unflatten(0, some.shape)
        present = (some >= 0).to(pixels.dtype)
        shares = present / present.sum(dim=2, keepdim=True).clamp(min=1.0)
        for number, inputs in enumerate(zip(pixels, labels[rows].view(some.shape), shares, strict=True), start + 1):
            losses.append(step(*inputs).clone())
            for at, learner in enumerate(learners):
                if ends[at] == number:
                    learner.extractor.load_state_dict(extractor.weights_of(at))
                    learner.classifier.load_state_dict(classifier.weights_of(at))
    curves = torch.stack(losses).t().cpu()
    return [_last_mean(curve, one.blocks) for curve, one in zip(curves, draws, strict=True)]


def _stacked_step(
    extractor: Stacked, classifier: Stacked, params: TrainingParams, steps: int, ctx: RoundContext
) -> Step:
    """A step on images [N, B, ...], labels [N, B] and each row's share of its client's mean, [N, B]; returns losses [N]."""
    optimiser = task_optimiser([*extractor.parameters(), *classifier.parameters()], params)

    extract, classify = (in_precision(stack, ctx) for stack in (extractor, classifier))

    def step(images: torch.Tensor, labels: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        logits = classify(extract(images))
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(shares)
        losses = (each * shares).sum(dim=1)
        optimiser.zero_grad()
        losses.sum().backward()
        optimiser.step()
        return losses.detach()

    return graphed(step, [extractor, classifier], [optimiser], steps if ctx.graphs else 0)


def _last_mean(curve: torch.Tensor, blocks: Sequence[int]) -> float | DivergedError:
    """Mean loss of a client's last block, when that of every block can be trusted."""
    means = curve[: sum(blocks)].split(list(blocks))
    try:
        return [check_loss(float(block.mean()), "classification") for block in means][-1]
    except DivergedError as error:
        return error
