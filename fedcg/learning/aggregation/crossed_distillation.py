"""FedMD-CG's crossed data-free distillation on the server (alg. 1 lines 20-24, eq. 10-12).

Labels of the bank come from p(y) of this round, known only after all updates have arrived. The average of weights is
computed while they arrive, the teachers run at the end.

Notation: ρ_g = D(G), ρ_i = D_i(G_i), ρ_ig = D(G_i), ρ_gi = D_i(G), each a softmax (at the divergence's temperature) over logits at one bank row (z, y). Teachers
(D_i, G_i) are frozen and in eval mode: ρ_i is a constant row, G_i(z, y) a constant input; in KL_3 the gradient passes THROUGH the
frozen D_i into G.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fedcg.learning.aggregation.averaging import AverageAggregator, ExactSum, Merged, Updates
from fedcg.learning.aggregation.distillation import (
    SHARED,
    Bank,
    Distillation,
    Pair,
    draw_bank,
    load_pair,
    teacher_logits,
    train_student,
)
from fedcg.learning.method import Aggregate, RoundContext, ServerState, Spill
from fedcg.learning.training.batches import BLOCK_ROWS, generate
from fedcg.learning.training.losses import Divergence
from fedcg.learning.training.stage import Nets, Tensors
from fedcg.values import Value
from fedcg.wire.parts import Part


class TeacherRows(Value):
    """One client's contribution to eq. 11 on n rows of a batch.

    Attributes:
        classify: D_i, frozen: features [n, *shape] -> logits [n, C]; lets gradients through to its input.
        position: [n] int64, which rows of the batch.
        features: [n, *shape] G_i(z, y) at these rows.
        log_teacher: [n, C] log ρ_i.
        weight: [n] τ_iy.
    """

    classify: Callable[[torch.Tensor], torch.Tensor]
    position: torch.Tensor
    features: torch.Tensor
    log_teacher: torch.Tensor
    weight: torch.Tensor


def crossed_loss(
    features: torch.Tensor,
    logits: torch.Tensor,
    mean: torch.Tensor,
    outputs: Sequence[TeacherRows],
    student: nn.Module,
    divergence: Divergence,
) -> torch.Tensor:
    """KL_1 + KL_2 + KL_3 per row of a batch (eq. 10-12), [B].

    Args:
        features: G(z, y), with gradient.
        logits: D(G(z, y)).
        mean: [B, C] Σ_i τ_iy times the divergence's summand of ρ_i, for eq. 10.
        outputs: of the clients that contribute to eq. 11.
        student: D; one pass over the features of all teachers for KL_2 (classifiers treat rows independently).
        divergence: of student and teacher.
    """
    loss = divergence.rows_of_mean(logits, mean)
    if not outputs:
        return loss
    position = torch.cat([output.position for output in outputs])
    target = torch.cat([output.log_teacher for output in outputs])
    weight = torch.cat([output.weight for output in outputs])
    ours = student(torch.cat([output.features for output in outputs]))
    theirs = torch.cat([output.classify(features[output.position]) for output in outputs])
    second, third = (divergence.rows(both, target) for both in (ours, theirs))
    return loss.index_add(0, position, weight * (second + third))


class FrozenTeacher:
    """A client that counts on every row of its labels. Its features are generated in advance for a block of the bank.

    Args:
        teacher: generator and classifier, frozen here.
        bank: shared by all teachers.
        log_teacher: [rows, C] log ρ_i over the bank.
        weight: [rows] τ_iy; 0 if the client does not count.
        block_rows: rows of the bank for which features are generated at once, so memory does not grow with the bank.
        device: of the teacher.
    """

    def __init__(
        self, teacher: Pair, bank: Bank, log_teacher: torch.Tensor, weight: torch.Tensor, block_rows: int, device: str
    ) -> None:
        for half in teacher.values():
            half.eval().requires_grad_(False)  # noqa: FBT003 - torch's own signature
        self._teacher = teacher
        self._bank = bank
        self._log_teacher = log_teacher
        self._weight = weight.to(torch.float32)
        self._block_rows = block_rows
        self._device = device
        self._block = slice(0, 0)
        self._index = torch.zeros(0, dtype=torch.int64)
        self._features = torch.zeros(0)

    def on(self, rows: slice) -> TeacherRows | None:
        """Its output on some rows of the bank; None if it does not count there."""
        if not self._block.start <= rows.start <= rows.stop <= self._block.stop:
            self._make(slice(rows.start, max(rows.stop, rows.start + self._block_rows)))
        first, last = torch.searchsorted(self._index, torch.tensor([rows.start, rows.stop])).tolist()
        if first == last:
            return None
        index = self._index[first:last]
        return TeacherRows(
            classify=self._teacher[Part.CLASSIFIER],
            position=(index - rows.start).to(self._device),
            features=self._features[first:last],
            log_teacher=self._log_teacher[index].to(self._device),
            weight=self._weight[index].to(self._device),
        )

    def _make(self, block: slice) -> None:
        self._block = block
        self._index = self._weight[block].nonzero().squeeze(1) + block.start
        if len(self._index):
            noise, labels = self._bank.noise[self._index], self._bank.labels[self._index]
            self._features = generate(self._teacher[Part.GENERATOR], noise.to(self._device), labels.to(self._device))


def outputs_of(teachers: Sequence[FrozenTeacher], rows: slice) -> list[TeacherRows]:
    """Eq. 11 as printed: every client, weighted by τ_iy; on some rows of the bank, in client-id order."""
    return [output for teacher in teachers if (output := teacher.on(rows)) is not None]


def label_shares(counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """τ_iy = n_i^y / Σ_j n_j^y, [N, C] float64; 0 for a label that no client has."""
    matrix = torch.tensor(counts, dtype=torch.float64)
    return matrix / matrix.sum(dim=0).clamp(min=1.0)


def label_distribution(counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """p(y) ∝ Σ_i n_i^y, [C] float64."""
    totals = torch.tensor(counts, dtype=torch.float64).sum(dim=0)
    return totals / totals.sum()


def counts_of(merged: Merged) -> list[tuple[int, ...]]:
    """Label counts of all clients in id order.

    Raises:
        ValueError: a client that did not report its label counts.
    """
    missing = [client for client in merged.examples if client not in merged.label_counts]
    if missing:
        raise ValueError(f"FedMD-CG needs every client's label counts; missing from {', '.join(missing)}")
    return [merged.label_counts[client] for client in merged.examples]


def crossed_aggregator(
    settings: Distillation, divergence: Divergence, ctx: RoundContext, spill: Spill
) -> AverageAggregator:
    """FedMD-CG alg. 1 lines 20-24: average by n_i, minimise eq. 12 over a bank of this round's labels, publish p(y).

    Args:
        settings: of the student's training.
        divergence: of eq. 10 and 11.
        ctx: streams, spec, device.
        spill: the round's rows.
    """

    def distilled(merged: Merged, updates: Updates) -> ServerState:
        counts = counts_of(merged)
        p = label_distribution(counts)
        bank = draw_bank(ctx.streams, settings.rows, ctx.spec.network.noise_dim, p)
        mean, teachers = teachers_of(updates, bank, counts)
        student = load_pair(merged.parts, ctx)

        def loss_of(
            nets: Nets, features: torch.Tensor, logits: torch.Tensor, taught: torch.Tensor, at: torch.Tensor
        ) -> torch.Tensor:
            others = outputs_of(teachers, slice(int(at[0]), int(at[-1]) + 1))
            return crossed_loss(features, logits, taught, others, nets[Part.CLASSIFIER], divergence).mean()

        def beside(rows: slice) -> Tensors:
            return mean[rows], torch.arange(rows.start, rows.stop)

        parts = train_student(student, bank, settings, ctx, loss_of, beside, is_pure=False)
        return ServerState(Aggregate(parts, tuple(p.tolist())))

    def teachers_of(
        updates: Updates, bank: Bank, counts: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, list[FrozenTeacher]]:
        """Eq. 10's mean, Σ_i τ_iy times the divergence's summand of ρ_i, [rows, C] float32, and all teachers in client-id order."""
        total, teachers = ExactSum(), []
        matrix, shares = torch.tensor(counts, dtype=torch.float64), label_shares(counts)
        block_rows = max(settings.batch, (ctx.machine.most_rows or BLOCK_ROWS) // len(updates))
        for number, client in enumerate(sorted(updates)):
            teacher, weight = load_pair(updates[client]().parts, ctx), shares[number][bank.labels]
            log_teacher = divergence.log_softmax(teacher_logits(teacher, bank, ctx))
            total.add(divergence.summand(log_teacher), matrix[number][bank.labels].unsqueeze(1))
            teachers.append(FrozenTeacher(teacher, bank, log_teacher, weight, block_rows, ctx.device))
        mean = total.value() / matrix.sum(dim=0).clamp(min=1.0)[bank.labels].unsqueeze(1)
        return mean.to(torch.float32).to(ctx.device), teachers

    return AverageAggregator(SHARED, spill, then=distilled)
