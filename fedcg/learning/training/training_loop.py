"""The local training loop that every method shares: shuffled batches, optimisers, divergence, progress.

Order of steps is a function of the round's streams alone. Everything that does not depend on the step (augmentation,
normalisation, noise, a frozen network's outputs) is done for a whole block of batches at once; a step then only slices.
Optimisers are made afresh in every round (the papers leave it open): a device that missed rounds would bring stale moments.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

from fedcg.learning.data.image_folder import normalise, usable_rows
from fedcg.learning.errors import PrivacyError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.noisy_gradients import with_gradient_noise
from fedcg.learning.method import Method, RoundContext, TrainingParams
from fedcg.learning.networks.layers.layer_randomness import seeded_layers
from fedcg.learning.round_checkpoint import Kept, stage_blocks
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec, ImageForm
from fedcg.learning.training.augmentation import Augmentation, Augmenter
from fedcg.learning.training.cuda_graph import Step, graphed
from fedcg.learning.training.losses import LossMeter, cross_entropy
from fedcg.learning.training.moving_average import MovingAverage
from fedcg.learning.training.optimisers import task_optimiser
from fedcg.learning.training.precision import Network, in_precision

BLOCK_ROWS = 2048  # rows prepared at once: 25 MB of 3x32x32 float32
_SMALL_IMAGE = 32 * 32  # pixels of an image of which BLOCK_ROWS go at once; of larger ones fewer, in the same memory


@dataclass(frozen=True)
class Block:
    """Some consecutive batches, prepared together.

    Attributes:
        images: [R, C, H, W] float32, augmented and normalised.
        labels: [R] int64.
    """

    images: torch.Tensor
    labels: torch.Tensor


PenaltyLoss = Callable[..., torch.Tensor]
"""(features, logits, the batch's rows of every tensor of the penalty) -> scalar."""


@dataclass(frozen=True)
class Penalty:
    """What a method adds to the cross-entropy, for one block.

    Attributes:
        loss: the same function for every block. It refers to no tensor of a block but through its arguments: on a CUDA device
            a step is recorded once and replayed.
        rows: what it needs of the block beside features and logits, each [R, ...]: noise that was drawn, targets.
        of_rows: whether it is a mean over rows, row j of which depends on image j alone; a penalty on weights is not.
    """

    loss: PenaltyLoss
    rows: tuple[torch.Tensor, ...] = ()
    of_rows: bool = True

    def __call__(self, rows: slice, features: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The loss of one batch of the block."""
        return self.loss(features, logits, *(tensor[rows] for tensor in self.rows))


PenaltyMaker = Callable[[Block], Penalty | None]


AfterStep = Callable[[], None]


def nothing() -> None:
    """Nothing after a step."""


def no_penalty(block: Block) -> Penalty | None:
    """Nothing beside the cross-entropy."""
    return None


def with_downloaded_classifier(
    penalty: PenaltyMaker, classifier: nn.Module, weight: float, ctx: RoundContext
) -> PenaltyMaker:
    """A penalty, and `weight` times the cross-entropy through a frozen copy of the classifier as it was downloaded.

    Features that the others' classifier can read keep the clients' extractors alike. Not in the first round, whose classifier has learned
    nothing.

    Raises:
        PrivacyError: the other penalty is on weights, and DP-SGD clips the gradient of one of both kinds only.
    """
    if weight == 0.0 or ctx.round == 1:
        return penalty
    head = copy.deepcopy(classifier).eval().requires_grad_(False)  # noqa: FBT003 - torch's own signature

    def per_block(block: Block) -> Penalty:
        other = penalty(block)
        if other is not None and not other.of_rows and ctx.privacy.dp_sgd is not None:
            raise PrivacyError("aux can't be had with DP-SGD and a penalty on weights: set aux = 0")

        def loss(
            features: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, *rows: torch.Tensor
        ) -> torch.Tensor:
            through = weight * cross_entropy(head(features), labels)
            return through if other is None else through + other.loss(features, logits, *rows)

        return Penalty(loss, (block.labels, *(() if other is None else other.rows)))

    return per_block


def steps_of(params: TrainingParams, rows: int) -> int:
    """Local steps of one stage: `params.steps`, or those of `params.epochs` over `rows` rows."""
    if params.steps:
        return params.steps
    return params.epochs * math.ceil(usable_rows(rows, params.batch_size) / params.batch_size)


def paced(spec: FederationSpec, method: Method, share: float, rows: int) -> FederationSpec:
    """The spec with a share of its local steps over `rows` rows, at least one; for one round of one client."""
    if share == 1.0:
        return spec
    steps = math.ceil(share * steps_of(method.params_type.model_validate(spec.params), rows))
    return spec.model_copy(update={"params": {**spec.params, "steps": max(1, steps)}})


def images_at_once(form: ImageForm) -> int:
    """How many images are prepared, or run through a frozen extractor, at once: 2,048 of 32x32, 41 of 224x224."""
    return max(1, BLOCK_ROWS * _SMALL_IMAGE // max(form.height * form.width, _SMALL_IMAGE))


def index_blocks(
    rows: int, batch_size: int, steps: int, shuffle: torch.Generator, at_once: int = BLOCK_ROWS
) -> Iterator[torch.Tensor]:
    """Indices of exactly `steps` batches over shuffled epochs, in blocks of whole batches (an epoch's last may be smaller).

    Args:
        rows: how many rows there are.
        batch_size: rows of a batch.
        steps: how many batches.
        shuffle: the stream of the order.
        at_once: rows of a block, rounded down to whole batches, at least one.
    """
    usable = usable_rows(rows, batch_size)
    block_rows = max(1, at_once // batch_size) * batch_size
    done = 0
    while done < steps:
        order = torch.randperm(rows, generator=shuffle)[:usable]
        for block in order.split(block_rows):
            wanted = block[: (steps - done) * batch_size]
            if len(wanted):
                yield wanted
                done += math.ceil(len(wanted) / batch_size)


def slices(rows: int, batch_size: int) -> Iterator[slice]:
    """The batches of a block of `rows` rows."""
    return (slice(start, min(start + batch_size, rows)) for start in range(0, rows, batch_size))


def image_blocks(
    data: ImageSet, spec: FederationSpec, batch_size: int, steps: int, streams: Streams
) -> Iterator[Block]:
    """Blocks of prepared images; shuffle and augmentation come from `streams`."""
    shuffle, augmenter = streams.generator("order"), Augmenter(spec, streams)
    for index in index_blocks(len(data), batch_size, steps, shuffle, images_at_once(spec.image)):
        raw = data.rows(index.to(data.labels.device))
        images = augmenter.draw(len(index)).apply(raw.images)
        yield Block(normalise(images, spec.image), raw.labels)


def train_classifier(
    extractor: nn.Module,
    classifier: nn.Module,
    data: ImageSet,
    params: TrainingParams,
    ctx: RoundContext,
    penalty: PenaltyMaker = no_penalty,
    after_step: AfterStep = nothing,
    average: MovingAverage | None = None,
) -> float:
    """Train extractor and classifier on cross-entropy plus a method's penalty (FedCG alg. 1 lines 3-9; FedMD-CG lines 9-13).

    The order of images and their augmentation come from the stream "classify" whatever the method, so that a shadow without an
    aggregate sees the same batches.

    Args:
        extractor: trained in place.
        classifier: trained in place.
        data: the training images, on `ctx.device`.
        params: epochs or steps, batch size, optimiser.
        ctx: streams, device, progress.
        penalty: called per block; all penalties of a call are alike but for their rows.
        after_step: called after each optimiser step, the networks being as it left them. It may have a state of its own, so the stage has
            no checkpoints with one.
        average: of the networks, which follows every step.

    Returns:
        Mean cross-entropy over the last block.

    Raises:
        DivergedError: the loss is not finite or exploded.
    """
    extractor.train()
    classifier.train()
    optimiser = task_optimiser([*extractor.parameters(), *classifier.parameters()], params)
    optimiser = with_gradient_noise(optimiser, ctx, "classify")
    steps, done = steps_of(params, len(data)), 0
    task, whole = LossMeter("classification", ctx.device), LossMeter("classification with penalties", ctx.device)
    step: Step | None = None
    keeper = ctx if after_step is nothing else replace(ctx, checkpoint=None)
    with seeded_layers(ctx, "classify"):
        blocks = image_blocks(data, ctx.spec, params.batch_size, steps, ctx.streams.at("classify"))
        kept: dict[str, Kept] = {"extractor": extractor, "classifier": classifier, "optimiser": optimiser}
        kept |= {} if average is None else {"average": average}
        for block, is_new in stage_blocks(keeper, "classify", blocks, **kept, task=task, whole=whole):
            extra = penalty(block)
            inputs = (block.images, block.labels, *(() if extra is None else extra.rows))
            if step is None:
                extract, classify = (in_precision(network, ctx) for network in (extractor, classifier))
                plain = classification_step(
                    extract,
                    classify,
                    optimiser,
                    None if extra is None else extra.loss,
                    ctx.privacy.dropout,
                    ctx.most_rows,
                )
                step = graphed(plain, [extractor, classifier], [optimiser], steps if ctx.graphs else 0)
            if not is_new:
                done += len(list(slices(len(block.labels), params.batch_size)))
                continue
            for rows in slices(len(block.labels), params.batch_size):
                losses = step(*(tensor[rows] for tensor in inputs))
                task.add(losses[0])
                whole.add(losses[1])
                after_step()
                if average is not None:
                    average()
                done += 1
                ctx.progress("classify", done, steps)
            task.check()
            whole.check()
    return task.latest


def classification_step(
    extractor: Network,
    classifier: Network,
    optimiser: torch.optim.Optimizer,
    penalty: PenaltyLoss | None,
    dropout: float = 0.0,
    most_rows: int | None = None,
) -> Step:
    """One step on (images [B, ...], labels [B], the penalty's rows); returns [cross-entropy, that with the penalty].

    With `most_rows` a batch goes through the networks in pieces, whose gradients add up to that of the batch: a mean over rows is the mean of
    the pieces' by their sizes. Batch norm then sees pieces, and dropout draws for each.
    """

    def piece(share: float, images: torch.Tensor, labels: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
        features = extractor(images)
        logits = classifier(dropped(features, dropout))
        task = loss = cross_entropy(logits, labels)
        if penalty is not None:
            loss = task + penalty(features, logits, *beside)
        (loss if share == 1.0 else loss * share).backward()
        return torch.stack([task.detach(), loss.detach()])

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimiser.zero_grad()
        size = len(batch[1])
        cut = pieces(size, most_rows)
        if len(cut) == 1:
            losses = piece(1.0, *batch)
        else:
            shares = [(rows, (rows.stop - rows.start) / size) for rows in cut]
            found = [share * piece(share, *(tensor[rows] for tensor in batch)) for rows, share in shares]
            losses = torch.stack(found).sum(0)
        optimiser.step()
        return losses

    return step


def pieces(rows: int, most_rows: int | None) -> list[slice]:
    """A batch cut into near-equal pieces of at most `most_rows` rows; none has one row alone, which batch norm can't take."""
    count = 1 if most_rows is None else min(math.ceil(rows / most_rows), max(1, rows // 2))
    edges = [rows * at // count for at in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def dropped(features: torch.Tensor, share: float) -> torch.Tensor:
    """Features of which a share at random is 0, the others scaled up for it; draws as layers do (`seeded_layers`)."""
    return F.dropout(features, share) if share else features


@torch.no_grad()
def extract_features(
    extractor: nn.Module, images: torch.Tensor, spec: FederationSpec, *, flipped: bool = False
) -> torch.Tensor:
    """Features of images ([N, C, H, W] uint8) by a frozen extractor (eval mode), [N, *feature_shape]."""
    extractor.eval()
    at_once = min(images_at_once(spec.image), frozen_rows(images.device))
    blocks = (images.flip(-1) if flipped else images).split(at_once)
    return torch.cat([extractor(normalise(some, spec.image)) for some in blocks])


def frozen_rows(device: torch.device) -> int:
    """Rows that go through a frozen network at once: on a CPU its maps then stay in the cache (measured: 2,048 take 1.1 to 1.5 times as long)."""
    return 256 if device.type == "cpu" else BLOCK_ROWS


@torch.no_grad()
def generate(generator: nn.Module, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Features of a frozen generator (eval mode: rows don't see each other), [B, *feature_shape]."""
    generator.eval()
    rows = frozen_rows(noise.device)
    pairs = zip(noise.split(rows), labels.split(rows), strict=True)
    return torch.cat([generator(z, y) for z, y in pairs])


class FeatureSource:
    """Real features h = E(x) of a frozen extractor, each computed once: both mirror images of a photo where the spec flips.

    A stage that draws fewer rows than there are images, or windows of them, has features computed as they are drawn, block by block.
    """

    def __init__(self, extractor: nn.Module, data: ImageSet, spec: FederationSpec, draws: int | None = None) -> None:
        """`draws`: how many rows the stage will ask for in all; None: so many that all images are worth a pass."""
        self._extractor = extractor
        self._data = data
        self._spec = spec
        self.labels = data.labels
        sides = (False, True) if spec.augment_flip else (False,)
        self._sides = (
            tuple(extract_features(extractor, data.images, spec, flipped=side) for side in sides)
            if not spec.augment_crop and (draws is None or draws >= len(sides) * len(data))
            else ()
        )

    def rows(self, index: torch.Tensor, augmenter: Augmenter) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [R, ...] and labels [R] of some images, augmented at random where the spec asks for it."""
        index = index.to(self.labels.device)
        augmentation = augmenter.draw(len(index))
        if self._sides:
            return self._kept(index, augmentation), self.labels[index]
        images = augmentation.apply(self._data.images[index])
        return extract_features(self._extractor, images, self._spec), self.labels[index]

    def _kept(self, index: torch.Tensor, augmentation: Augmentation) -> torch.Tensor:
        features = self._sides[0][index]
        if len(self._sides) == 1:
            return features
        chosen = augmentation.mirrored.to(features.device).view(-1, *[1] * (features.ndim - 1))
        return torch.where(chosen, self._sides[1][index], features)


def feature_blocks(
    source: FeatureSource, params: TrainingParams, ctx: RoundContext
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Blocks of real features [R, ...], their labels [R] and noise [R, q] for the training of a generator.

    Order, augmentation and noise come from the stream "generate", whatever the method.
    """
    streams, rows = ctx.streams.at("generate"), len(source.labels)
    augmenter, order, stream = Augmenter(ctx.spec, streams), streams.generator("order"), streams.generator("noise")
    for index in index_blocks(rows, params.batch_size, steps_of(params, rows), order):
        real, labels = source.rows(index, augmenter)
        yield real, labels, torch.randn(len(labels), ctx.spec.network.noise_dim, generator=stream).to(ctx.device)
