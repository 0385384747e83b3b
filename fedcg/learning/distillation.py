"""Data-free distillation on the server: the bank of (z, y), teacher passes, and FedCG's ensemble student (alg. 2, eq. 5-6).

Every bank row is drawn once, used once, in order. Teachers run over it in eval mode, in large batches, when their update
arrives; the student loop then never touches a teacher. That is exact: a teacher in eval mode treats rows independently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedcg.learning.averaging import average_updates
from fedcg.learning.layer_noise import seeded_layers
from fedcg.learning.loops import BLOCK_ROWS, LossMeter, adam, slices
from fedcg.learning.losses import kl_teacher_student
from fedcg.learning.method import Aggregate, RoundContext, ServerState, Spill, Update, Weights
from fedcg.learning.networks import load_part, weights_of
from fedcg.learning.seeds import Streams
from fedcg.wire.parts import Part

SHARED = frozenset({Part.GENERATOR, Part.CLASSIFIER})
_CHECK_STEPS = 200


@dataclass(frozen=True)
class Distillation:
    """Settings of a student loop."""

    iterations: int
    batch: int
    lr: float
    weight_decay: float

    @property
    def rows(self) -> int:
        """Rows of the bank: each one is used once."""
        return self.iterations * self.batch


@dataclass(frozen=True)
class Bank:
    """Inputs of the generators: z ~ N(0, I) as [rows, q] float32 and labels y as [rows] int64, on the CPU."""

    noise: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])


@dataclass(frozen=True)
class Pair:
    """A generator and the classifier that reads it: one teacher, or the student."""

    generator: nn.Module
    classifier: nn.Module

    def weights(self) -> dict[Part, Weights]:
        """Copies of both parts' tensors."""
        return {Part.GENERATOR: weights_of(self.generator), Part.CLASSIFIER: weights_of(self.classifier)}


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


def load_pair(parts: Mapping[Part, Weights], ctx: RoundContext) -> Pair:
    """Generator and classifier with copies of these weights, on the round's device."""
    return Pair(
        *(load_part(ctx.spec, part, parts[part], ctx.device) for part in (Part.GENERATOR, Part.CLASSIFIER)),
    )


@torch.no_grad()
def teacher_logits(teacher: Pair, bank: Bank, ctx: RoundContext) -> torch.Tensor:
    """A teacher's logits C_i(G_i(z, y)) over the whole bank in eval mode, [rows, C] on the CPU."""
    teacher.generator.eval()
    teacher.classifier.eval()
    done, rows = 0, []
    for noise, labels in zip(bank.noise.split(BLOCK_ROWS), bank.labels.split(BLOCK_ROWS), strict=True):
        rows.append(teacher.classifier(teacher.generator(noise.to(ctx.device), labels.to(ctx.device))).cpu())
        done += len(labels)
        ctx.progress("teacher", done, len(bank))
    return torch.cat(rows)


def ensemble_logits(clients: Iterator[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """FedCG eq. 5 before its softmax: Σ_i |X_i| / Σ_j |X_j| · C_i(G_i(y, z)), [rows, C], streamed over (|X_i|, logits)."""
    total, logits = 0, torch.zeros(())
    for examples, rows in clients:
        total += examples
        logits = logits + rows.to(torch.float64) * examples
    return (logits / total).to(torch.float32)


StudentLoss = Callable[[slice, torch.Tensor, torch.Tensor], torch.Tensor]


def distil(
    modules: Sequence[nn.Module],
    loss_at: Callable[[slice], torch.Tensor],
    rows: int,
    settings: Distillation,
    ctx: RoundContext,
) -> None:
    """Train some modules together, in train mode, with Adam: one step per batch of rows, in order.

    Args:
        modules: trained in place.
        loss_at: loss of the bank's (or public set's) rows in a slice.
        rows: how many rows there are.
        settings: batch, learning rate, weight decay.
        ctx: device, progress.

    Raises:
        DivergedError: the loss is not finite or exploded.
    """
    for module in modules:
        module.train()
    weights = [parameter for module in modules for parameter in module.parameters()]
    optimiser = adam(weights, settings.lr, settings.weight_decay)
    meter = LossMeter("distillation", ctx.device)
    with seeded_layers(ctx, "distil"):
        for step, some in enumerate(slices(rows, settings.batch), start=1):
            loss = loss_at(some)
            meter.add(loss)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if step % _CHECK_STEPS == 0:
                meter.check()
            ctx.progress("distil", step, settings.iterations)
    meter.check()


def train_student(
    student: Pair, bank: Bank, settings: Distillation, ctx: RoundContext, loss_of: StudentLoss
) -> dict[Part, Weights]:
    """Train generator and classifier together over the bank.

    Args:
        student: trained in place; starts from the average of the clients.
        bank: one batch of rows per iteration, in order.
        settings: batch, learning rate, weight decay.
        ctx: device, progress.
        loss_of: (rows of the bank, generated features, student logits) -> loss.

    Returns:
        The student's weights, copied.

    Raises:
        DivergedError: the loss is not finite or exploded.
    """
    noise, labels = bank.noise.to(ctx.device), bank.labels.to(ctx.device)

    def loss_at(rows: slice) -> torch.Tensor:
        features = student.generator(noise[rows], labels[rows])
        return loss_of(rows, features, student.classifier(features))

    distil([student.generator, student.classifier], loss_at, len(bank), settings, ctx)
    return student.weights()


class EnsembleAggregator:
    """FedCG alg. 2: average by data size, then minimise KL(ensemble ‖ student) over the bank."""

    def __init__(self, settings: Distillation, ctx: RoundContext, spill: Spill) -> None:
        self._settings = settings
        self._ctx = ctx
        self._spill = spill
        self._bank: Bank | None = None

    @property
    def bank(self) -> Bank:
        """The round's bank, drawn when first asked for."""
        if self._bank is None:
            spec = self._ctx.spec
            probabilities = uniform(spec.class_count)
            self._bank = draw_bank(self._ctx.streams, self._settings.rows, spec.network.noise_dim, probabilities)
        return self._bank

    def add(self, update: Update) -> None:
        """Teacher pass of one update over the bank; its logits are spilled."""
        if not self._spill.has(update.client):
            logits = teacher_logits(load_pair(update.parts, self._ctx), self.bank, self._ctx)
            self._spill.put(update.client, {"logits": logits})

    def finish(self, updates: Mapping[str, Callable[[], Update]]) -> tuple[Aggregate, ServerState]:
        """Average, then distil the ensemble of all updates into the average."""
        for client in sorted(updates):
            if not self._spill.has(client):
                self.add(updates[client]())
        merged = average_updates(updates, SHARED)
        teachers = ((examples, self._spill.get(client)["logits"]) for client, examples in merged.examples.items())
        target = ensemble_logits(teachers).to(self._ctx.device)

        def loss_of(rows: slice, features: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return kl_teacher_student(target[rows], logits)

        student = load_pair(merged.parts, self._ctx)
        aggregate = Aggregate(train_student(student, self.bank, self._settings, self._ctx, loss_of))
        return aggregate, ServerState(aggregate)
