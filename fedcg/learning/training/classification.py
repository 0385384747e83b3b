"""The stage of every method: extractor and classifier on cross-entropy plus a method's penalty."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import field

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

from fedcg.learning.errors import PrivacyError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import RoundContext, TrainingParams
from fedcg.learning.training.batches import Augmenter, image_tensors, images_at_once, local_batches
from fedcg.learning.training.losses import cross_entropy
from fedcg.learning.training.optimisers import task_optimiser
from fedcg.learning.training.stage import AfterStep, Descent, Descents, Nets, Stage, Step, Tensors, Trained, run_stage
from fedcg.values import Value
from fedcg.wire.parts import Part

CLASSIFY = "classify"
TASK = "task"
"""The optimiser of extractor and classifier."""
_LOSSES = ("classification", "classification with penalties")

PenaltyLoss = Callable[..., torch.Tensor]
"""(networks by name, features, logits, the batch's rows of every drawn tensor) -> scalar."""


class Penalty(Value):
    """A term that a method adds to the cross-entropy.

    Attributes:
        loss: uses only tensors from its arguments.
        draw: (images [R, C, H, W] float32, labels [R]) of a block -> inputs of the loss, each [R, ...]: noise, targets.
        networks: further, frozen networks of the loss, by name.
        of_rows: whether it is a mean over rows of which row j depends only on image j; not so for a penalty on weights.
    """

    loss: PenaltyLoss
    draw: Callable[[torch.Tensor, torch.Tensor], Tensors] = lambda images, labels: ()
    networks: Mapping[str, nn.Module] = field(default_factory=dict)
    of_rows: bool = True


def train_classifier(
    extractor: nn.Module,
    classifier: nn.Module,
    data: ImageSet,
    params: TrainingParams,
    ctx: RoundContext,
    penalty: Penalty | None = None,
    after: tuple[AfterStep, ...] = (),
) -> float:
    """Train extractor and classifier on cross-entropy plus a method's penalty (FedCG alg. 1 lines 3-9; FedMD-CG lines 9-13).

    The order of images and their augmentation come from the stream "classify" with every method, so that a local-only
    model sees the same batches. With DP-SGD one clip covers the gradients of both networks.

    Args:
        extractor: trained in place.
        classifier: trained in place.
        data: the training images, on `ctx.device`.
        params: epochs or steps, batch size, optimiser.
        ctx: streams, device, privacy.
        penalty: added to the cross-entropy.
        after: called after each step, such as a moving average.

    Returns:
        Mean cross-entropy over the last block.

    Raises:
        DataError: there are too few images.
        DivergedError: the loss is not finite or exploded.
    """
    networks: dict[str, nn.Module] = {Part.EXTRACTOR: extractor, Part.CLASSIFIER: classifier}
    of_images = image_tensors(data, ctx.spec, Augmenter(ctx.spec, ctx.streams.at(CLASSIFY)))

    def tensors(index: torch.Tensor) -> Tensors:
        images, labels = of_images(index)
        return (images, labels, *(() if penalty is None else penalty.draw(images, labels)))

    optimiser = task_optimiser([*extractor.parameters(), *classifier.parameters()], params)
    stage = Stage(
        name=CLASSIFY,
        losses=_LOSSES,
        networks=networks | dict({} if penalty is None else penalty.networks),
        trained={TASK: Trained((Part.EXTRACTOR, Part.CLASSIFIER), optimiser)},
        batches=local_batches(CLASSIFY, len(data), params, ctx, tensors, at_once=images_at_once(ctx.spec.input)),
        step=_step_of(penalty, ctx.privacy.dropout),
        after=after,
    )
    return run_stage(stage, ctx)[0]


def _step_of(penalty: Penalty | None, dropout: float) -> Step:
    def step(nets: Nets, batch: Tensors) -> Descents:
        images, labels, *beside = batch
        task: list[torch.Tensor] = []

        def of_rows() -> torch.Tensor:
            features = nets[Part.EXTRACTOR](images)
            logits = nets[Part.CLASSIFIER](dropped(features, dropout))
            task.append(cross_entropy(logits, labels))
            if penalty is None or not penalty.of_rows:
                return task[0]
            return task[0] + penalty.loss(nets, features, logits, *beside)

        def of_weights() -> torch.Tensor:
            assert penalty is not None
            nothing = images.new_empty(0)
            return penalty.loss(nets, nothing, nothing, *beside)

        rest = None if penalty is None or penalty.of_rows else of_weights
        whole = yield Descent(TASK, of_rows, rest)
        return (task[0], whole) if task and whole is not None else None

    return step


def with_downloaded_classifier(
    penalty: Penalty | None, classifier: nn.Module, weight: float, ctx: RoundContext
) -> Penalty | None:
    """Add to a penalty `weight` times the cross-entropy through a frozen copy of the downloaded classifier.

    Features that fit the shared classifier keep the clients' extractors similar. Not used in the first round, whose
    classifier is untrained.

    Raises:
        PrivacyError: the other penalty is on weights, and DP-SGD can clip only one of the two kinds.
    """
    if weight == 0.0 or ctx.round == 1:
        return penalty
    if penalty is not None and not penalty.of_rows and ctx.privacy.dp_sgd is not None:
        raise PrivacyError("aux is not supported with DP-SGD and a penalty on weights: set aux = 0")
    other = penalty

    def loss(
        nets: Nets, features: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, *rows: torch.Tensor
    ) -> torch.Tensor:
        through = weight * cross_entropy(nets["downloaded"](features), labels)
        return through if other is None else through + other.loss(nets, features, logits, *rows)

    def draw(images: torch.Tensor, labels: torch.Tensor) -> Tensors:
        return (labels, *(() if other is None else other.draw(images, labels)))

    frozen = {"downloaded": copy.deepcopy(classifier).requires_grad_(False)}  # noqa: FBT003 - torch's own signature
    return Penalty(loss, draw, frozen | dict({} if other is None else other.networks))


def dropped(features: torch.Tensor, share: float) -> torch.Tensor:
    """Dropout: set a random share of features to 0 and scale up the others; draws like layers (`seeded_layers`)."""
    return F.dropout(features, share) if share else features
