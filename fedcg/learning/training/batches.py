"""The inputs of a stage: order of batches, augmentation, prepared images, features of a frozen extractor.

The order depends only on the round's streams. Crops come from the stream "crop", flips from "flip", each drawn only if
the spec asks for it. Everything that does not depend on the step (augmentation, normalisation, noise, a frozen
network's outputs) is computed for a whole block of batches at once. A step only slices it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

from fedcg.learning.data.image_folder import normalise, usable_rows
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.dp_sgd import poisson_batches, private_step_count, sampling_rate
from fedcg.learning.method import Method, RoundContext, TrainingParams
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec, InputForm
from fedcg.learning.training.stage import Batches, Tensors
from fedcg.values import Value


class Augmentation(Value):
    """The augmentation of R images: a crop of the padded image, then an optional flip.

    Attributes:
        spec: whether to crop and to mirror.
        choices: [R, 3] int64, per image the crop's top and left in 0..2 * `augment_crop`, and 1 to flip it; 0 if the
            spec does not ask for it.
    """

    spec: FederationSpec
    choices: torch.Tensor

    def __getitem__(self, rows: slice) -> Augmentation:
        """The augmentation of some of the images."""
        return Augmentation(self.spec, self.choices[rows])

    @property
    def mirrored(self) -> torch.Tensor:
        """Which images are flipped, [R] bool."""
        return self.choices[:, 2] > 0

    def apply(self, images: torch.Tensor) -> torch.Tensor:
        """Augment images before normalisation. Crops are black (0) outside the image.

        Args:
            images: [R, C, H, W] uint8, on any device.

        Returns:
            [R, C, H, W] uint8, on the same.
        """
        top, left, mirrored = self.choices.to(images.device).unbind(1)
        if self.spec.augment_crop:
            height, width = images.shape[2:]
            padded = F.pad(images, (self.spec.augment_crop,) * 4)
            windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [R, C, tops, lefts, H, W], a view
            images = windows[torch.arange(len(images), device=images.device), :, top, left]
        if self.spec.augment_flip:
            images = torch.where(mirrored.view(-1, 1, 1, 1) > 0, images.flip(-1), images)
        return images


class Augmenter:
    """Draws the augmentation of consecutive blocks of images."""

    def __init__(self, spec: FederationSpec, streams: Streams) -> None:
        self._spec = spec
        self._crop, self._flip = streams.generator("crop"), streams.generator("flip")

    def draw(self, rows: int) -> Augmentation:
        """The augmentation of the next `rows` images: crops are uniform, and half of the images are flipped."""
        choices = torch.zeros(rows, 3, dtype=torch.int64)
        if self._spec.augment_crop:
            choices[:, :2] = torch.randint(2 * self._spec.augment_crop + 1, (rows, 2), generator=self._crop)
        if self._spec.augment_flip:
            choices[:, 2] = torch.rand(rows, generator=self._flip) < 0.5
        return Augmentation(self._spec, choices)


BLOCK_ROWS = 2048  # rows prepared at once: 25 MB of 3x32x32 float32
_SMALL_IMAGE = 32 * 32  # pixels of an image for which a block has BLOCK_ROWS; larger images use fewer rows


def steps_of(params: TrainingParams, rows: int) -> int:
    """Local steps of one stage: `params.steps`, or the number in `params.epochs` over `rows` rows."""
    if params.steps:
        return params.steps
    return params.epochs * math.ceil(usable_rows(rows, params.batch_size) / params.batch_size)


def paced(spec: FederationSpec, method: Method, share: float, rows: int) -> FederationSpec:
    """The spec with a share of its local steps over `rows` rows, at least one; for one round of one client."""
    if share == 1.0:
        return spec
    steps = math.ceil(share * steps_of(method.params_type.model_validate(spec.params), rows))
    return spec.model_copy(update={"params": {**spec.params, "steps": max(1, steps)}})


def images_at_once(form: InputForm) -> int:
    """How many inputs to prepare, or run through a frozen extractor, at once: 2,048 images of 32x32, 41 of 224x224."""
    numbers = math.prod(form.tensor_shape)
    size = max(numbers // form.channels, numbers // 3)  # three channels are usual
    return max(1, BLOCK_ROWS * _SMALL_IMAGE // max(size, _SMALL_IMAGE))


def index_blocks(
    rows: int, batch_size: int, steps: int, shuffle: torch.Generator, at_once: int = BLOCK_ROWS
) -> Iterator[torch.Tensor]:
    """Indices of exactly `steps` batches over shuffled epochs, in blocks of whole batches (an epoch's last may be smaller).

    Args:
        rows: number of rows.
        batch_size: rows of a batch.
        steps: number of batches.
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


def local_steps(params: TrainingParams, rows: int, ctx: RoundContext) -> int:
    """Steps of one stage over a client's rows, with DP-SGD or without."""
    return steps_of(params, rows) if ctx.privacy.dp_sgd is None else private_step_count(params, rows)


def local_batches(
    purpose: str,
    count: int,
    params: TrainingParams,
    ctx: RoundContext,
    of_images: Callable[[torch.Tensor], Tensors],
    beside: Callable[[int], Tensors] = lambda rows: (),
    at_once: int = BLOCK_ROWS,
) -> Batches:
    """A client's batches: shuffled epochs, or with DP-SGD each image in each batch with equal probability.

    Args:
        purpose: the stage, whose stream "order" determines the batches.
        count: images.
        params: epochs or steps, batch size.
        ctx: streams, privacy.
        of_images: (indices [R] int64) -> tensors of these images.
        beside: (rows) -> tensors that belong to no image, such as noise; with DP-SGD always for the nominal batch size.
        at_once: rows of a block.

    Raises:
        DataError: there are no images.
    """
    order, size = ctx.streams.generator(purpose, "order"), params.batch_size
    steps = local_steps(params, count, ctx)
    if ctx.privacy.dp_sgd is None:
        blocks = index_blocks(count, size, steps, order, at_once)
        return Batches(((*of_images(index), *beside(len(index))) for index in blocks), steps, size)
    if not count:
        raise DataError("no images to train on")
    rate = sampling_rate(count, size)
    drawn = ((*of_images(index), *beside(size)) for index in poisson_batches(count, rate, steps, order))
    return Batches(drawn, steps, None, rate * count, max(1, BLOCK_ROWS // size))


def image_tensors(
    data: ImageSet, spec: FederationSpec, augmenter: Augmenter
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(indices) -> inputs [R, *tensor_shape] float32, augmented and normalised, and labels [R]."""

    def of_images(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raw = data.rows(index.to(data.labels.device))
        return normalise(augmenter.draw(len(index)).apply(raw.images), spec.input), raw.labels

    return of_images


@torch.no_grad()
def extract_features(
    extractor: nn.Module, images: torch.Tensor, spec: FederationSpec, *, flipped: bool = False
) -> torch.Tensor:
    """Features of inputs ([N, *tensor_shape] uint8 or float32) by a frozen extractor (eval mode), [N, *feature_shape]."""
    extractor.eval()
    at_once = min(images_at_once(spec.input), frozen_rows(images.device))
    blocks = (images.flip(-1) if flipped else images).split(at_once)
    return torch.cat([extractor(normalise(some, spec.input)) for some in blocks])


def frozen_rows(device: torch.device) -> int:
    """Rows per pass of a frozen network. On a CPU its maps then stay in the cache (2,048 rows take 1.1 to 1.5 times as long)."""
    return 256 if device.type == "cpu" else BLOCK_ROWS


@torch.no_grad()
def generate(generator: nn.Module, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Features of a frozen generator (eval mode: rows are independent), [B, *feature_shape]."""
    generator.eval()
    rows = frozen_rows(noise.device)
    pairs = zip(noise.split(rows), labels.split(rows), strict=True)
    return torch.cat([generator(z, y) for z, y in pairs])


class FeatureSource:
    """Real features h = E(x) of a frozen extractor, each computed once, for both mirror images if the spec flips.

    If a stage draws fewer rows than there are images, or draws crops, features are computed block by block as they are
    drawn.
    """

    def __init__(self, extractor: nn.Module, data: ImageSet, spec: FederationSpec, draws: int | None = None) -> None:
        """`draws`: total rows that the stage will draw; None: enough to justify a pass over all images."""
        self._extractor = extractor
        self._data = data
        self._spec = spec
        self.labels = data.labels
        sides = (False, True) if spec.augment_flip else (False,)
        is_worth_it = not spec.augment_crop and (draws is None or draws >= len(sides) * len(data))
        features = (extract_features(extractor, data.images, spec, flipped=side) for side in sides)
        self._sides = tuple(features) if is_worth_it else ()

    def rows(self, index: torch.Tensor, augmenter: Augmenter) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [R, ...] and labels [R] of some images, randomly augmented if the spec asks for it."""
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


def feature_batches(
    source: FeatureSource,
    params: TrainingParams,
    ctx: RoundContext,
    labels_too: bool = False,
    target: Callable[[torch.Tensor, torch.Tensor], Tensors] | None = None,
) -> Batches:
    """Batches of real features [R, ...], their labels [R], `target`'s tensors of the features, and noise [R, q].

    With every method, order, augmentation, noise and labels come from the stream "generate".

    Args:
        source: source of the features.
        params: epochs or steps, batch size.
        ctx: streams.
        labels_too: whether to add labels [R] after the noise, drawn uniformly from all classes.
        target: (features, labels) -> further tensors.
    """
    streams = ctx.streams.at("generate")
    augmenter, noise, asked = Augmenter(ctx.spec, streams), streams.generator("noise"), streams.generator("asked")

    def of_images(index: torch.Tensor) -> Tensors:
        real, labels = source.rows(index, augmenter)
        return (real, labels, *(() if target is None else target(real, labels)))

    def beside(rows: int) -> Tensors:
        z = torch.randn(rows, ctx.spec.network.noise_dim, generator=noise).to(ctx.device)
        if not labels_too:
            return (z,)
        return z, torch.randint(ctx.spec.class_count, (rows,), generator=asked).to(ctx.device)

    return local_batches("generate", len(source.labels), params, ctx, of_images, beside)
