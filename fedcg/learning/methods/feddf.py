"""FedDF (Lin et al., NeurIPS 2020), as FedCG's tables run it: FedAvg, then ensemble distillation on unlabelled public images.

Algorithm 1 and eq. 1: the student starts from the average and minimises KL(σ(teachers' logits) ‖ σ(student's logits)) on public
images. Deviations, with reasons: the teachers' logits are a data-size weighted SUM, as in FedCG eq. 5 (the paper's AVGLOGITS is
unweighted), iterations and batch are FedCG's (the paper: 10,000 of 128, a cosine schedule, early stopping on a validation set
that a coordinator does not have), and the student is one homogeneous model.

A teacher in eval mode treats images independently: each runs ONCE over the distinct images that the round's batches use, when
its update arrives, and the student's loop never touches it. Each distinct image costs one row of C numbers a client.
A device takes part only when its `allow_upload` lists the extractor.
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import nn

from fedcg.learning.aggregation.averaging import Merged, Updates
from fedcg.learning.aggregation.distillation import Distillation, DistilledParams, TaughtAverage, distillation
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.errors import DataError
from fedcg.learning.method import Aggregate, Aux, Average, RoundContext, ServerState, Spill, Taught, Update, Weights
from fedcg.learning.methods._averaging import PERSONAL, averaging_method
from fedcg.learning.networks import load_part, weights_of
from fedcg.learning.seeds import Streams
from fedcg.learning.training.batches import images_at_once
from fedcg.learning.training.losses import kl_teacher_student
from fedcg.learning.training.stage import Nets, Tensors, run_stage
from fedcg.wire.parts import Part

# images in one forward of a teacher; a whole backbone's activations, not only features, live at once
_TEACHER_ROWS = 256


class FeddfParams(DistilledParams):
    """Parameters of FedDF; iterations and batch are those of FedCG's comparison."""

    average: Average = "mean"
    aux: Aux = 0.0
    ensemble: Taught = "sum"


def public_order(images: int, rows: int, streams: Streams) -> torch.Tensor:
    """Which public image stands in which row: shuffled epochs, cut after `rows`. [rows] int64 in [0, images)."""
    stream = streams.generator("public", "order")
    epochs = [torch.randperm(images, generator=stream) for _ in range(-(-rows // images))]
    return torch.cat(epochs)[:rows]


def public_of(ctx: RoundContext) -> torch.Tensor:
    """The public images, [N, C, H, W] uint8.

    Raises:
        DataError: there are none.
    """
    if ctx.public is None or not len(ctx.public):
        raise DataError(
            f"{ctx.spec.method} distils on unlabelled public images and has none: name a folder or an .npz file as "
            "aggregation.public_data in coordinator.toml, or give a simulation or a demo --public-images"
        )
    return ctx.public


class PublicEnsembleAggregator:
    """The server half: average, then distil the ensemble of the present clients into it.

    Weights and logits are summed as updates arrive; after the last one only the student's loop is left.

    Raises:
        DataError: there are no public images.
    """

    def __init__(self, state: ServerState, ctx: RoundContext, spill: Spill) -> None:
        params = FeddfParams.model_validate(ctx.spec.params)
        self._settings = Distillation.of(params)
        self._ctx = ctx
        self._public = public_of(ctx)
        self._taught = TaughtAverage(
            PERSONAL, self._teacher_logits, self._student, spill, params.average, params.ensemble
        )

    @cached_property
    def _batches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(distinct public images in use, [D]; position among them of every row of the loop, [rows])."""
        order = public_order(len(self._public), self._settings.rows, self._ctx.streams)
        used, position = torch.unique(order, return_inverse=True)
        return used, position

    def add(self, update: Update) -> None:
        """Teacher pass of one update over the public images in use; its logits [D, C] are spilled and counted."""
        self._taught.add(update)

    def finish(self, updates: Updates) -> tuple[Aggregate, ServerState]:
        """Minimise KL(ensemble ‖ student) over the public batches, in order, from the average of exactly these updates."""
        return self._taught.finish(updates)

    def _student(self, merged: Merged, logits: torch.Tensor) -> dict[Part, Weights]:
        student, target = self._load(merged.parts), logits.to(self._ctx.device)
        used, position = (rows.to(self._ctx.device) for rows in self._batches)
        images = self._public[used.cpu()].to(self._ctx.device)

        def tensors_of(rows: slice) -> Tensors:
            chosen = position[rows]
            return normalise(images[chosen], self._ctx.spec.input), target[chosen]

        def loss_of(nets: Nets, batch: Tensors) -> torch.Tensor:
            shown, taught = batch
            return kl_teacher_student(taught, nets[Part.CLASSIFIER](nets[Part.EXTRACTOR](shown)))

        at_once = images_at_once(self._ctx.spec.input)
        run_stage(distillation(student, loss_of, tensors_of, self._settings, self._ctx, at_once=at_once), self._ctx)
        return {part: weights_of(student[part]) for part in sorted(PERSONAL)}

    @torch.no_grad()
    def _teacher_logits(self, update: Update) -> torch.Tensor:
        extractor, classifier = (net.eval() for net in self._load(update.parts).values())
        used, logits = self._batches[0], []
        for some in used.split(self._ctx.machine.most_rows or _TEACHER_ROWS):
            images = normalise(self._public[some].to(self._ctx.device), self._ctx.spec.input)
            logits.append(classifier(extractor(images)).cpu())
            self._ctx.callbacks.progress("teacher", sum(map(len, logits)), len(used))
        return torch.cat(logits)

    def _load(self, parts: Mapping[Part, Weights]) -> dict[str, nn.Module]:
        halves = (Part.EXTRACTOR, Part.CLASSIFIER)
        return {part: load_part(self._ctx.spec, part, parts[part], self._ctx.device) for part in halves}


METHOD = averaging_method(
    "feddf",
    "FedDF: FedAvg, distilled on unlabelled public images",
    FeddfParams,
    PERSONAL,
    aggregator=PublicEnsembleAggregator,
    needs_public=True,
)
