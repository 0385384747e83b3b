"""FedDF (Lin et al., NeurIPS 2020), as in FedCG's tables: FedAvg, then ensemble distillation on unlabelled public images.

Algorithm 1 and eq. 1: the student starts from the average and minimises KL(σ(teachers' logits) ‖ σ(student's logits))
on public images. Deviations, with reasons: the teachers' logits are a data-size weighted SUM, as in FedCG eq. 5 (the
paper's AVGLOGITS is unweighted), iterations and batch are FedCG's (the paper: 10,000 of 128, a cosine schedule, early
stopping on a validation set, which a coordinator does not have), and the student is one homogeneous model.

A teacher in eval mode treats images independently: each runs ONCE over the distinct images that the round's batches
use, when its update arrives. The student's loop does not run it again. Each distinct image costs one row of C numbers
per client. A device participates only if its `allow_upload` lists the extractor.
"""

import torch
from torch import nn

from fedcg.learning.aggregation.averaging import Merged
from fedcg.learning.aggregation.distillation import Distillation, EnsembleParams, TaughtAverage, distillation
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.errors import DataError
from fedcg.learning.method import Aggregate, Parts, RoundContext, ServerState, Spill, Update
from fedcg.learning.methods._averaging import PERSONAL, averaging_method
from fedcg.learning.networks import load_part, weights_of
from fedcg.learning.seeds import Streams
from fedcg.learning.training.batches import images_at_once
from fedcg.learning.training.losses import kl_teacher_student
from fedcg.learning.training.stage import Nets, Tensors, run_stage
from fedcg.wire.parts import Part

# images per forward pass of a teacher; all activations of a backbone are in memory at once
_TEACHER_ROWS = 256


def public_order(images: int, rows: int, streams: Streams) -> torch.Tensor:
    """The public image of each row: shuffled epochs, cut after `rows`. [rows] int64 in [0, images)."""
    stream = streams.generator("public", "order")
    epochs = [torch.randperm(images, generator=stream) for _ in range(-(-rows // images))]
    return torch.cat(epochs)[:rows]


def public_of(ctx: RoundContext) -> torch.Tensor:
    """The public images, [N, C, H, W] uint8.

    Raises:
        DataError: there are no public images.
    """
    if ctx.public is None or not len(ctx.public):
        raise DataError(
            f"{ctx.spec.method} needs unlabelled public images: set a folder or an .npz file as "
            "aggregation.public_data in coordinator.toml, or pass --public-images to a simulation or demo"
        )
    return ctx.public


def aggregator(state: ServerState, ctx: RoundContext, spill: Spill) -> TaughtAverage:
    """The server half: average, then distil the ensemble of the round's clients into the average.

    Weights and logits [D, C] over the used public images are summed as updates arrive. After the last one only the
    student's loop remains.

    Raises:
        DataError: there are no public images.
    """
    params = EnsembleParams.model_validate(ctx.spec.params)
    settings, public = Distillation.of(params), public_of(ctx)
    # The distinct public images used, [D], and for each row of the loop its position among them, [rows].
    used, position = torch.unique(public_order(len(public), settings.rows, ctx.streams), return_inverse=True)

    def load(parts: Parts) -> dict[str, nn.Module]:
        halves = (Part.EXTRACTOR, Part.CLASSIFIER)
        return {part: load_part(ctx.spec, part, parts[part], ctx.device) for part in halves}

    @torch.no_grad()
    def teach(update: Update) -> torch.Tensor:
        extractor, classifier = (net.eval() for net in load(update.parts).values())
        logits: list[torch.Tensor] = []
        for some in used.split(ctx.machine.most_rows or _TEACHER_ROWS):
            images = normalise(public[some].to(ctx.device), ctx.spec.input)
            logits.append(classifier(extractor(images)).cpu())
            ctx.callbacks.progress("teacher", sum(map(len, logits)), len(used))
        return torch.cat(logits)

    def learn(merged: Merged, logits: torch.Tensor) -> Aggregate:
        student, target, rows_of = load(merged.parts), logits.to(ctx.device), position.to(ctx.device)
        images = public[used].to(ctx.device)

        def tensors_of(rows: slice) -> Tensors:
            return normalise(images[rows_of[rows]], ctx.spec.input), target[rows_of[rows]]

        def loss_of(nets: Nets, batch: Tensors) -> torch.Tensor:
            shown, taught = batch
            return kl_teacher_student(taught, nets[Part.CLASSIFIER](nets[Part.EXTRACTOR](shown)))

        at_once = images_at_once(ctx.spec.input)
        run_stage(distillation(student, loss_of, tensors_of, settings, at_once=at_once), ctx)
        return Aggregate({part: weights_of(student[part]) for part in sorted(PERSONAL)})

    return TaughtAverage(PERSONAL, teach, learn, spill, params.average, params.ensemble)


METHOD = averaging_method(
    "feddf",
    "FedDF: FedAvg, distilled on unlabelled public images",
    EnsembleParams,
    PERSONAL,
    aggregator=aggregator,
    needs_public=True,
)
