"""The training of extractor and classifier with DP-SGD where a client asks for it, else as ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from fedcg.learning.data.image_folder import normalise
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.dp_sgd import (
    poisson_batches,
    private_step_count,
    private_steps,
    sampling_rate,
)
from fedcg.learning.method import RoundContext, TrainingParams
from fedcg.learning.networks.layers.layer_randomness import seeded_layers
from fedcg.learning.privacy import DpSgdSettings
from fedcg.learning.round_checkpoint import Kept, stage_blocks
from fedcg.learning.training.augmentation import Augmenter
from fedcg.learning.training.losses import LossMeter, cross_entropy
from fedcg.learning.training.moving_average import MovingAverage
from fedcg.learning.training.optimisers import task_optimiser
from fedcg.learning.training.training_loop import (
    BLOCK_ROWS,
    AfterStep,
    Block,
    Penalty,
    PenaltyMaker,
    dropped,
    no_penalty,
    nothing,
    train_classifier,
)


def train_task(
    extractor: nn.Module,
    classifier: nn.Module,
    data: ImageSet,
    params: TrainingParams,
    ctx: RoundContext,
    penalty: PenaltyMaker = no_penalty,
    after_step: AfterStep = nothing,
    average: MovingAverage | None = None,
) -> float:
    """`train_classifier`, or with `dp_sgd` the same objective by private steps.

    Raises:
        DataError: there are no images.
        DivergedError: the loss is not finite or exploded.
    """
    if ctx.privacy.dp_sgd is None:
        return train_classifier(extractor, classifier, data, params, ctx, penalty, after_step, average)
    settings = ctx.privacy.dp_sgd
    return train_classifier_privately(extractor, classifier, data, params, ctx, settings, penalty, after_step, average)


def train_classifier_privately(
    extractor: nn.Module,
    classifier: nn.Module,
    data: ImageSet,
    params: TrainingParams,
    ctx: RoundContext,
    settings: DpSgdSettings,
    penalty: PenaltyMaker = no_penalty,
    after_step: AfterStep = nothing,
    average: MovingAverage | None = None,
) -> float:
    """Train extractor and classifier with one clip over the gradients of both; arguments as of `train_classifier`.

    A penalty whose row j depends on image j alone is part of that image's loss, and clipped with it; one on weights depends on no
    image and is added after the noise.
    """
    extractor.train()
    classifier.train()
    rate, steps = private_rate(data, params), private_step_count(params, len(data))
    optimiser = task_optimiser([*extractor.parameters(), *classifier.parameters()], params)
    streams = ctx.streams.at("classify")
    augmenter, order = Augmenter(ctx.spec, streams), streams.generator("order")
    meter = LossMeter("classification", ctx.device)
    seed = ctx.streams.at("privacy").seed("classify")
    with (
        seeded_layers(ctx, "classify"),
        private_steps([extractor, classifier], optimiser, settings, rate * len(data), seed) as private,
    ):
        kept: dict[str, Kept] = {"extractor": extractor, "classifier": classifier, "optimiser": optimiser}
        kept |= {} if average is None else {"average": average}
        batches = enumerate(poisson_batches(len(data), rate, steps, order), 1)
        keeper = ctx if after_step is nothing else replace(ctx, checkpoint=None)
        kept_batches = stage_blocks(keeper, "classify", batches, **kept, loss=meter, noise=private.noise)
        for (done, index), is_new in kept_batches:
            if len(index):
                raw = data.rows(index.to(data.labels.device))
                block = Block(normalise(augmenter.draw(len(index)).apply(raw.images), ctx.spec.image), raw.labels)
                extra = penalty(block)
            if not is_new:
                continue
            if len(index):
                losses = _Losses(extractor, classifier, block, extra, ctx.privacy.dropout)
                private.step(len(index), losses.of_images, losses.of_weights)
                meter.add(losses.task)
            else:
                private.step(0)
            after_step()
            if average is not None:
                average()
            ctx.progress("classify", done, steps)
            if done == steps or done % checked_every(params) == 0:
                meter.check()
    return meter.latest


def private_rate(data: ImageSet, params: TrainingParams) -> float:
    """The probability with which each image is in a batch.

    Raises:
        DataError: there are no images.
    """
    if not len(data):
        raise DataError("no images to train on")
    return sampling_rate(len(data), params.batch_size)


def checked_every(params: TrainingParams) -> int:
    """After how many steps a loss is looked at, as after a block of ordinary batches."""
    return max(1, BLOCK_ROWS // params.batch_size)


class _Losses:
    """The two losses of a step: what depends on images, row by row, and a penalty on weights, which depends on none."""

    def __init__(
        self, extractor: nn.Module, classifier: nn.Module, block: Block, penalty: Penalty | None, dropout: float
    ) -> None:
        self._extract, self._classify = extractor, classifier
        self._block, self._penalty, self._dropout = block, penalty, dropout
        self.task = torch.zeros(())

    def of_images(self) -> torch.Tensor:
        """Mean over the batch; keeps the mean cross-entropy in `task`."""
        features = self._extract(self._block.images)
        logits = self._classify(dropped(features, self._dropout))
        loss = cross_entropy(logits, self._block.labels)
        self.task = loss.detach()
        if self._penalty is None or not self._penalty.of_rows:
            return loss
        return loss + self._penalty(slice(None), features, logits)

    @property
    def of_weights(self) -> Callable[[], torch.Tensor] | None:
        """The penalty on weights, where there is one."""
        penalty = self._penalty
        if penalty is None or penalty.of_rows:
            return None
        nothing = torch.empty(0)
        return lambda: penalty(slice(None), nothing, nothing)
