"""Data-free distillation on the server: the bank of (z, y), teacher passes, and FedCG's ensemble student (alg. 2, eq. 5-6).

Every bank row is drawn once and used once, in order. Teachers run over the bank in eval mode, in large batches, when
their update arrives. The student loop then needs no teacher. This is exact, because a teacher in eval mode treats rows
independently.

FedCG draws labels uniformly (algorithm 2 line 4). When EVERY client of a round reported its label counts, labels that
none of them has get probability 0 and the others equal probability, because no client of the round could teach them. If
any count is missing, all labels are used, as published.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping

import torch
from pydantic import Field
from torch import nn

from fedcg.learning import method as fl
from fedcg.learning.aggregation.averaging import AverageAggregator, Merged, Updates, combined
from fedcg.learning.networks import load_part, weights_of
from fedcg.learning.seeds import Streams
from fedcg.learning.training.batches import BLOCK_ROWS, frozen_rows, slices
from fedcg.learning.training.losses import kl_rows
from fedcg.learning.training.optimisers import adam
from fedcg.learning.training.stage import Batches, Descent, Descents, Nets, Stage, Tensors, Trained, run_stage
from fedcg.values import Value
from fedcg.wire.parts import Part

_PAIR = (Part.GENERATOR, Part.CLASSIFIER)
SHARED = frozenset(_PAIR)
Pair = Mapping[Part, nn.Module]
"""A generator and its classifier: one teacher, or the student."""
_CHECK_STEPS = 200
_STUDENT = "student"
LOGITS = "logits"  # name of a teacher's logits in its client's spilled tensors
FLAT = 0.99
"""A loss is flat if it exceeds this share of the lowest earlier one."""


class DistilledParams(fl.TrainingParams):
    """Parameters of methods with training on the server."""

    server_iterations: int = Field(default=2000, ge=1, description="training steps on the server")
    server_batch: int = Field(default=16, ge=2, description="batch size on the server")
    server_lr: float = Field(default=3e-4, gt=0, description="learning rate on the server")
    server_flat_steps: int = Field(
        default=0,
        ge=0,
        exclude_if=lambda steps: steps == 0,
        description="end the server's training if the mean loss over this many steps is less than 1 % below the best; 0: never",
    )


class EnsembleParams(DistilledParams):
    """Parameters of methods whose server averages, then trains on the ensemble of the clients' networks."""

    average: fl.Average = "mean"
    aux: fl.Aux = 0.0
    ensemble: fl.Taught = "sum"


class Distillation(Value):
    """Settings of a student loop. It ends early if `flat_steps` steps have not reduced the mean loss (0: never)."""

    iterations: int
    batch: int
    lr: float
    weight_decay: float
    flat_steps: int = 0

    @staticmethod
    def of(params: DistilledParams) -> Distillation:
        """The settings from a method's parameters."""
        steps, batch, lr = params.server_iterations, params.server_batch, params.server_lr
        return Distillation(steps, batch, lr, params.weight_decay, params.server_flat_steps)

    @property
    def rows(self) -> int:
        """Number of rows of the bank; each is used once."""
        return self.iterations * self.batch


class Bank(Value):
    """Inputs of the generators: z ~ N(0, I) as [rows, q] float32 and labels y as [rows] int64, on the CPU."""

    noise: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])


def draw_bank(streams: Streams, rows: int, noise_dim: int, label_probabilities: torch.Tensor) -> Bank:
    """Draw the bank of a round from the coordinator's streams.

    Args:
        streams: scoped to (federation, round, attempt).
        rows: iterations times batch.
        noise_dim: q.
        label_probabilities: [C], uniform in FedCG (alg. 2 line 4), p(y) in FedMD-CG.
    """
    noise = torch.randn(rows, noise_dim, generator=streams.generator("bank", "noise"))
    labels = torch.multinomial(
        label_probabilities, rows, replacement=True, generator=streams.generator("bank", "labels")
    )
    return Bank(noise, labels)


def uniform(classes: int) -> torch.Tensor:
    """[C] equal probabilities."""
    return torch.full((classes,), 1.0 / classes, dtype=torch.float64)


def label_probabilities(label_counts: Iterable[tuple[int, ...] | None], classes: int) -> torch.Tensor:
    """The distribution of labels: uniform over those that some client has, or over all if a client did not report its counts.

    Args:
        label_counts: n_i^y of every client of the round; None for one without a report.
        classes: C.

    Returns:
        [C] float64, sums to 1.
    """
    reported = list(label_counts)
    known = torch.ones(classes, dtype=torch.float64)
    if reported and None not in reported:
        known = (torch.tensor(reported, dtype=torch.float64).sum(dim=0) > 0).to(torch.float64)
    if not known.any():  # no client reports an image of any class, so labels are unknown
        known = torch.ones(classes, dtype=torch.float64)
    return known / known.sum()


def row_weights(label_counts: Iterable[tuple[int, ...] | None], classes: int, labels: torch.Tensor) -> torch.Tensor:
    """Importance weights that turn uniformly drawn labels into `label_probabilities`.

    Args:
        label_counts: as in `label_probabilities`.
        classes: C.
        labels: [rows] int64, drawn uniformly.

    Returns:
        [rows] float32: C / K for K known labels, 0 for an unknown one; exactly 1 when all are known.
    """
    return (label_probabilities(label_counts, classes) * classes).to(torch.float32)[labels]


def load_pair(parts: fl.Parts, ctx: fl.RoundContext) -> Pair:
    """Generator and classifier with copies of these weights, on the round's device."""
    return {part: load_part(ctx.spec, part, parts[part], ctx.device) for part in _PAIR}


@torch.no_grad()
def teacher_logits(teacher: Pair, bank: Bank, ctx: fl.RoundContext) -> torch.Tensor:
    """A teacher's logits C_i(G_i(z, y)) over the whole bank in eval mode, [rows, C] on the CPU.

    The blocks of rows are always the same, because the grouping of rows affects the last digits.

    Args:
        teacher: generator and classifier, on `ctx.device`.
        bank: inputs of the generator.
        ctx: device, progress.
    """
    (generator, classifier), logits = (teacher[part].eval() for part in _PAIR), []
    for rows in slices(len(bank), ctx.machine.most_rows or frozen_rows(torch.device(ctx.device))):
        features = generator(bank.noise[rows].to(ctx.device), bank.labels[rows].to(ctx.device))
        logits.append(classifier(features).cpu())
        ctx.callbacks.progress("teacher", rows.stop, len(bank))
    return torch.cat(logits)


BankLoss = Callable[[Nets, Tensors], torch.Tensor]
"""(networks by name, a batch's tensors) -> the loss; it uses only tensors from its arguments."""


def distillation(
    networks: Mapping[str, nn.Module],
    loss_of: BankLoss,
    tensors_of: Callable[[slice], Tensors],
    settings: Distillation,
    *,
    frozen: Mapping[str, nn.Module] | None = None,
    at_once: int = BLOCK_ROWS,
    is_pure: bool = True,
) -> Stage:
    """The stage that trains some networks together with Adam, one step per batch of rows, in order.

    Args:
        networks: trained in place.
        loss_of: the loss of one batch.
        tensors_of: (rows of the bank, or of a public set) -> their tensors, each [R, ...].
        settings: batches, learning rate, weight decay, early stopping.
        frozen: networks that the loss uses unchanged, by name.
        at_once: rows of a block.
        is_pure: as of `Stage`.
    """

    def step(nets: Nets, batch: Tensors) -> Descents:
        loss = yield Descent(_STUDENT, rest=lambda: loss_of(nets, batch))
        assert loss is not None
        return (loss,)

    block_rows = max(1, at_once // settings.batch) * settings.batch
    weights = [parameter for network in networks.values() for parameter in network.parameters()]
    optimiser = adam(weights, settings.lr, settings.weight_decay)
    blocks = (tensors_of(rows) for rows in slices(settings.rows, block_rows))
    return Stage(
        name="distil",
        losses=("distillation",),
        networks={**networks, **(frozen or {})},
        trained={_STUDENT: Trained(tuple(networks), optimiser, sees_images=False)},
        batches=Batches(blocks, settings.iterations, settings.batch, check_every=settings.flat_steps or _CHECK_STEPS),
        step=step,
        is_pure=is_pure,
        until=lambda mean, least: settings.flat_steps > 0 and mean > FLAT * least,
    )


def train_student(
    student: Pair,
    bank: Bank,
    settings: Distillation,
    ctx: fl.RoundContext,
    loss_of: Callable[..., torch.Tensor],
    beside: Callable[[slice], Tensors],
    *,
    is_pure: bool = True,
) -> dict[Part, fl.Weights]:
    """Train generator and classifier together over the bank.

    Args:
        student: trained in place, starting from the average of the clients.
        bank: one batch of rows per iteration, in order.
        settings: batch, learning rate, weight decay.
        ctx: device, progress.
        loss_of: (networks by name, generated features, student logits, the batch's tensors of `beside`) -> loss.
        beside: (rows of the bank) -> further tensors [R, ...] on the device, such as targets.
        is_pure: as of `Stage`.

    Returns:
        The student's weights, copied.

    Raises:
        DivergedError: the loss is not finite or exploded.
    """
    noise, labels = bank.noise.to(ctx.device), bank.labels.to(ctx.device)

    def loss_at(nets: Nets, batch: Tensors) -> torch.Tensor:
        z, y, *targets = batch
        features = nets[Part.GENERATOR](z, y)
        return loss_of(nets, features, nets[Part.CLASSIFIER](features), *targets)

    def tensors_of(rows: slice) -> Tensors:
        return noise[rows], labels[rows], *beside(rows)

    networks: dict[str, nn.Module] = {part: student[part] for part in _PAIR}
    run_stage(distillation(networks, loss_at, tensors_of, settings, is_pure=is_pure), ctx)
    return {part: weights_of(student[part]) for part in _PAIR}


class TaughtAverage:
    """The average of updates and the ensemble of their teachers' logits, updated as updates arrive, and the student of both.

    A sum is FedCG eq. 5 before its softmax: Σ_i |X_i| / Σ_j |X_j| · C_i(G_i(y, z)), exact in any order of clients.

    Args:
        parts: parts to average.
        teach: (update) -> logits [rows, C] over the student's training rows; called once, then spilled.
        learn: (the average, the ensemble's logits) -> the aggregate, with the student's weights.
        spill: stores the logits, and the weights for averages other than the mean.
        average: how weights are combined.
        ensemble: how logits are combined.
    """

    def __init__(
        self,
        parts: frozenset[Part],
        teach: Callable[[fl.Update], torch.Tensor],
        learn: Callable[[Merged, torch.Tensor], fl.Aggregate],
        spill: fl.Spill,
        average: fl.Combination = "mean",
        ensemble: fl.Taught = "sum",
    ) -> None:
        self._learn, self._spill, self._how = learn, spill, ensemble
        self._spreads: dict[str, float] = {}
        self._average = AverageAggregator(
            parts, spill, average, lambda update: {LOGITS: teach(update)}, self._summed_logits
        )

    def _summed_logits(self, client: str) -> fl.Weights:
        logits = self._spill.get(client)[LOGITS]
        if self._how == "standardised":
            spread = self._spreads[client] = _spread(logits)
            logits = logits.to(torch.float64) / spread
        return {LOGITS: logits}

    def add(self, update: fl.Update) -> None:
        """Count an update. Repeated calls have no effect."""
        self._average.add(update)

    def settle(self, updates: Updates) -> tuple[Merged, torch.Tensor]:
        """The average of exactly these updates, and the ensemble's logits, [rows, C] float32."""
        merged = self._average.settle(updates)
        logits = merged.beside[LOGITS].to(torch.float32)
        if self._how == "sum":
            return merged, logits
        if self._how == "standardised":
            return merged, logits * statistics.median_low(self._spreads[client] for client in updates)
        robust = combined(self._spill, updates, LOGITS, self._how, lambda rows: rows.to(torch.float64).log_softmax(1))
        return merged, robust.to(torch.float32)

    def finish(self, updates: Updates) -> tuple[fl.Aggregate, fl.ServerState]:
        """The student trained on the ensemble of exactly these updates."""
        aggregate = self._learn(*self.settle(updates))
        return aggregate, fl.ServerState(aggregate)


def _spread(logits: torch.Tensor) -> float:
    """The standard deviation of a teacher's logits about each row's mean; 1 if all are equal.

    Raises:
        DivergedError: a logit is not finite.
    """
    centred = logits.to(torch.float64) - logits.to(torch.float64).mean(dim=1, keepdim=True)
    spread = float(centred.square().mean().sqrt())
    if not math.isfinite(spread):
        raise fl.DivergedError("a weight or an output of an update is not finite")
    return spread or 1.0


def ensemble_aggregator(
    settings: Distillation,
    ctx: fl.RoundContext,
    spill: fl.Spill,
    average: fl.Combination = "mean",
    ensemble: fl.Taught = "sum",
    labels_of: Callable[[Merged], tuple[float, ...] | None] = lambda merged: None,
) -> TaughtAverage:
    """FedCG alg. 2: average by data size, then minimise KL(ensemble ‖ student) over the bank.

    When all clients reported their label counts, rows of a label that none of them has get weight 0 (`row_weights`).
    Weights and logits are summed as updates arrive, so only the student's loop remains after the last one.
    """
    classes = ctx.spec.class_count
    bank = draw_bank(ctx.streams, settings.rows, ctx.spec.network.noise_dim, uniform(classes))

    def teach(update: fl.Update) -> torch.Tensor:
        return teacher_logits(load_pair(update.parts, ctx), bank, ctx)

    def learn(merged: Merged, logits: torch.Tensor) -> fl.Aggregate:
        target = logits.log_softmax(1).to(ctx.device)
        counts = [merged.label_counts.get(client) for client in merged.examples]
        weights = row_weights(counts, classes, bank.labels).to(ctx.device)

        def loss_of(
            nets: Nets, features: torch.Tensor, logits: torch.Tensor, taught: torch.Tensor, weight: torch.Tensor
        ) -> torch.Tensor:
            return (weight * kl_rows(taught, logits.log_softmax(1))).mean()

        student = load_pair(merged.parts, ctx)
        parts = train_student(student, bank, settings, ctx, loss_of, lambda rows: (target[rows], weights[rows]))
        return fl.Aggregate(parts, labels_of(merged))

    return TaughtAverage(SHARED, teach, learn, spill, average, ensemble)
