"""What frozen teachers give on one batch of FedMD-CG's crossed distillation (eq. 11), and crossed losses made of it.

Notation: ρ_g = D(G), ρ_i = D_i(G_i), ρ_ig = D(G_i), ρ_gi = D_i(G), each a softmax (at the divergence's temperature) over logits at one bank row (z, y). Teachers
(D_i, G_i) are frozen and in eval mode: ρ_i is a constant row, G_i(z, y) a constant input; in KL_3 the gradient passes THROUGH the
frozen D_i into G.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedcg.learning.aggregation.distillation import Bank, Pair
from fedcg.learning.training.batches import generate
from fedcg.learning.training.losses import Divergence


@dataclass(frozen=True)
class TeacherRows:
    """One client's part in eq. 11 on n rows of a batch.

    Attributes:
        classify: D_i, frozen: features [n, *shape] -> logits [n, C]; lets gradients through to its input.
        position: [n] int64, which rows of the batch.
        features: [n, *shape] G_i(z, y) at these rows.
        log_teacher: [n, C] log ρ_i.
        weight: [n] τ_iy where every client counts, 1 where one was drawn by τ.
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
        outputs: of the clients that take part in eq. 11.
        student: D; runs once over the features of all teachers for KL_2 (classifiers treat rows independently).
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
    """One client that counts on every row of a label it has; its features are made a block of the bank ahead.

    Args:
        teacher: frozen here.
        bank: shared with all other teachers.
        log_teacher: [rows, C] log ρ_i over the bank.
        weight: [rows] τ_iy; 0 where the client has no part.
        block_rows: rows of the bank to make features for at once, so that memory does not grow with the bank.
        device: of the teacher.
    """

    def __init__(
        self, teacher: Pair, bank: Bank, log_teacher: torch.Tensor, weight: torch.Tensor, block_rows: int, device: str
    ) -> None:
        for half in (teacher.generator, teacher.classifier):
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
        """Its output on some rows of the bank; None where it has no part."""
        if not self._block.start <= rows.start <= rows.stop <= self._block.stop:
            self._make(slice(rows.start, max(rows.stop, rows.start + self._block_rows)))
        first, last = torch.searchsorted(self._index, torch.tensor([rows.start, rows.stop])).tolist()
        if first == last:
            return None
        index = self._index[first:last]
        return TeacherRows(
            classify=self._teacher.classifier,
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
            self._features = generate(self._teacher.generator, noise.to(self._device), labels.to(self._device))


def outputs_of(teachers: Sequence[FrozenTeacher], rows: slice) -> list[TeacherRows]:
    """Eq. 11 as printed: every client, weighted by τ_iy; on some rows of the bank, in client-id order."""
    return [output for teacher in teachers if (output := teacher.on(rows)) is not None]
