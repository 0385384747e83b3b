"""FedMD-CG's crossed data-free distillation on the server (eq. 10-12), with a cost that does not grow without bound in clients.

Notation: ρ_g = D(G), ρ_i = D_i(G_i), ρ_ig = D(G_i), ρ_gi = D_i(G), each a softmax over logits at one bank row (z, y);
τ_iy = n_i^y / Σ_j n_j^y. Teachers (D_i, G_i) are frozen and in eval mode: ρ_i is a constant row, G_i(z, y) a constant input;
in KL_3 the gradient passes THROUGH the frozen D_i into G.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedcg.learning.averaging import Merged, average_updates
from fedcg.learning.distillation import (
    SHARED,
    Bank,
    Distillation,
    Pair,
    draw_bank,
    load_pair,
    teacher_logits,
    train_student,
    uniform,
)
from fedcg.learning.loops import BLOCK_ROWS, generate
from fedcg.learning.losses import kl_rows, kl_student_mean_teacher
from fedcg.learning.method import Aggregate, RoundContext, ServerState, Spill, Update

EXPLORE = 0.05  # share of the arrival bank drawn uniformly, so that a class new in this round has rows to be weighted


class FrozenFeatures:
    """G_i(z, y) of a frozen generator at some bank rows, computed a block ahead, so that memory does not grow with the bank."""

    def __init__(self, generator: nn.Module, noise: torch.Tensor, labels: torch.Tensor) -> None:
        self._generator = generator
        self._noise = noise
        self._labels = labels
        self._start = 0
        self._block: torch.Tensor | None = None

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Features of rows start..stop, asked for in ascending order, [stop - start, *shape]."""
        if self._block is None or not self._start <= start <= stop <= self._start + len(self._block):
            ahead = slice(start, max(stop, start + BLOCK_ROWS))
            self._start, self._block = start, generate(self._generator, self._noise[ahead], self._labels[ahead])
        return self._block[start - self._start : stop - self._start]


@dataclass(frozen=True)
class Term:
    """One client's share of eq. 11: the n bank rows in which it has a say, ascending.

    Attributes:
        classifier: D_i, frozen.
        features: G_i(z, y) at these rows.
        index: [n] int64, rows of the bank.
        before: [bank rows + 1], how many of the n rows come before each row of the bank.
        log_teacher: [n, C] log ρ_i.
        weight: [n] τ_iy in exact mode, 1 in sampled mode.
    """

    classifier: nn.Module
    features: FrozenFeatures
    index: torch.Tensor
    before: Sequence[int]
    log_teacher: torch.Tensor
    weight: torch.Tensor

    def within(self, rows: slice) -> slice:
        """Where the bank's rows `rows` lie among the n."""
        return slice(self.before[rows.start], self.before[rows.stop])


def term_of(teacher: Pair, bank: Bank, log_teacher: torch.Tensor, weight: torch.Tensor, device: str) -> Term:
    """A client's term from its weight in every row of the bank ([rows]; 0 where it has no say)."""
    index = weight.nonzero().squeeze(1)
    before = [0, *(weight != 0).cumsum(0).tolist()]
    features = FrozenFeatures(teacher.generator, bank.noise[index].to(device), bank.labels[index].to(device))
    for pair_half in (teacher.generator, teacher.classifier):
        pair_half.eval().requires_grad_(False)  # noqa: FBT003 - torch's own signature
    chosen = weight[index].to(torch.float32).to(device)
    return Term(teacher.classifier, features, index.to(device), before, log_teacher[index].to(device), chosen)


def label_shares(counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """τ_iy = n_i^y / Σ_j n_j^y, [N, C] float64; 0 for a label that no client has."""
    matrix = torch.tensor(counts, dtype=torch.float64)
    return matrix / matrix.sum(dim=0).clamp(min=1.0)


def label_distribution(counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """p(y) ∝ Σ_i n_i^y, [C] float64."""
    totals = torch.tensor(counts, dtype=torch.float64).sum(dim=0)
    return totals / totals.sum()


def crossed_loss(
    rows: slice,
    features: torch.Tensor,
    logits: torch.Tensor,
    mean_log: torch.Tensor,
    terms: Sequence[Term],
    student: nn.Module,
) -> torch.Tensor:
    """KL_1 + KL_2 + KL_3 per row (eq. 10-12), [B].

    Args:
        rows: rows of the bank.
        features: G(z, y) of these rows, with gradient.
        logits: D(G(z, y)).
        mean_log: [bank rows, C] Σ_i τ_iy log ρ_i, for eq. 10.
        terms: one per client that takes part in eq. 11.
        student: D; runs once over the features of all teachers for KL_2 (classifiers treat rows independently).
    """
    loss = kl_student_mean_teacher(logits, mean_log[rows])
    here = [(term, some) for term in terms if (some := term.within(rows)).stop > some.start]
    if not here:
        return loss
    position = torch.cat([term.index[some] for term, some in here]) - rows.start
    target = torch.cat([term.log_teacher[some] for term, some in here])
    weight = torch.cat([term.weight[some] for term, some in here])
    ours = student(torch.cat([term.features.rows(some.start, some.stop) for term, some in here]))
    theirs = torch.cat([term.classifier(features[term.index[some] - rows.start]) for term, some in here])
    second, third = (kl_rows(both.log_softmax(1), target) for both in (ours, theirs))
    return loss.index_add(0, position, weight * (second + third))


class CrossedAggregator:
    """FedMD-CG alg. 1 lines 20-24: average by n_i, then minimise eq. 12 over the bank.

    Labels come from p(y) of THIS round, known only when all updates are in. `bank="exact"` draws it at `finish` and runs the
    teachers then. `bank="arrival"` draws labels from q, 95 % the last published p(y) and 5 % uniform, runs each teacher when its
    update arrives, and weights every row by p(y) / q(y) at `finish`: the same expectation.

    Eq. 11 is exact up to `exact_clients` clients; above, each row draws ONE client i ~ τ(·, y) for both of its terms: the same
    expectation, at a cost per row that does not depend on the number of clients.
    """

    def __init__(
        self, settings: Distillation, bank: str, exact_clients: int, state: ServerState, ctx: RoundContext, spill: Spill
    ) -> None:
        self._settings = settings
        self._exact_clients = exact_clients
        self._ctx = ctx
        self._spill = spill
        self._drawn: tuple[Bank, torch.Tensor] | None = None
        if bank == "arrival":
            known = state.aggregate.label_distribution
            last = uniform(ctx.spec.class_count) if known is None else torch.tensor(known, dtype=torch.float64)
            self._drawn = self._draw((1.0 - EXPLORE) * last / last.sum() + EXPLORE * uniform(ctx.spec.class_count))

    def _draw(self, q: torch.Tensor) -> tuple[Bank, torch.Tensor]:
        return draw_bank(self._ctx.streams, self._settings.rows, self._ctx.spec.network.noise_dim, q), q

    def add(self, update: Update) -> None:
        """Teacher pass of one update over the arrival bank; with an exact bank, only a note that the client answered."""
        if self._spill.has(update.client):
            return
        if self._drawn is None:
            self._spill.put(update.client, {"examples": torch.tensor(update.examples)})
        else:
            logits = teacher_logits(load_pair(update.parts, self._ctx), self._drawn[0], self._ctx)
            self._spill.put(update.client, {"logits": logits})

    def finish(self, updates: Mapping[str, Callable[[], Update]]) -> tuple[Aggregate, ServerState]:
        """Average, distil crosswise, publish p(y).

        Raises:
            ValueError: an update without label counts.
        """
        merged = average_updates(updates, SHARED)
        counts = counts_of(merged)
        p, shares = label_distribution(counts), label_shares(counts)
        bank, q = self._drawn or self._draw(p)
        mean_log, terms = self._teach(updates, bank, shares)
        row_weights = importance(p, q, bank.labels).to(self._ctx.device)
        student = load_pair(merged.parts, self._ctx)

        def loss_of(rows: slice, features: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return (
                row_weights[rows] * crossed_loss(rows, features, logits, mean_log, terms, student.classifier)
            ).mean()

        parts = train_student(student, bank, self._settings, self._ctx, loss_of)
        aggregate = Aggregate(parts, tuple(p.tolist()))
        return aggregate, ServerState(aggregate)

    def _teach(
        self, updates: Mapping[str, Callable[[], Update]], bank: Bank, shares: torch.Tensor
    ) -> tuple[torch.Tensor, list[Term]]:
        """Σ_i τ_iy log ρ_i, and the terms of eq. 11, one teacher at a time."""
        device, clients = self._ctx.device, sorted(updates)
        weights = self._row_weights(shares, bank)
        mean_log = torch.zeros(len(bank), self._ctx.spec.class_count, dtype=torch.float64)
        terms = []
        for number, client in enumerate(clients):
            update = updates[client]()
            teacher = load_pair(update.parts, self._ctx)
            if self._drawn is None:
                logits = teacher_logits(teacher, bank, self._ctx)
            else:
                self.add(update)
                logits = self._spill.get(client)["logits"]
            log_teacher = logits.log_softmax(1)
            mean_log += shares[number][bank.labels].unsqueeze(1) * log_teacher
            terms.append(term_of(teacher, bank, log_teacher, weights[number], device))
        return mean_log.to(torch.float32).to(device), terms

    def _row_weights(self, shares: torch.Tensor, bank: Bank) -> torch.Tensor:
        """Weight of each client in each row of eq. 11, [N, rows]."""
        exact = shares[:, bank.labels]
        if shares.shape[0] <= self._exact_clients:
            return exact
        return sample_clients(exact, self._ctx.streams.generator("bank", "clients"))


def sample_clients(shares: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """ONE client per row, drawn i ~ τ(·, y) and given weight 1: eq. 11 in expectation. [N, rows] -> [N, rows] float64."""
    # A label that nobody has carries importance 0 (p(y) = 0), but multinomial wants a positive row: any client will do.
    odds = torch.where(shares.sum(dim=0, keepdim=True) > 0, shares, 1.0).t()
    drawn = torch.multinomial(odds, 1, generator=generator).squeeze(1)
    return nn.functional.one_hot(drawn, shares.shape[0]).t().to(torch.float64)


def importance(p: torch.Tensor, q: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """p(y) / q(y) of each row: what makes rows drawn from q count as drawn from p. [C], [C], [rows] -> [rows] float32."""
    return (p / q)[labels].to(torch.float32)


def counts_of(merged: Merged) -> list[tuple[int, ...]]:
    """Label counts of all clients in id order.

    Raises:
        ValueError: a client that did not tell its label counts.
    """
    silent = [client for client in merged.examples if client not in merged.label_counts]
    if silent:
        raise ValueError(f"FedMD-CG needs every client's label counts; none from {', '.join(silent)}")
    return [merged.label_counts[client] for client in merged.examples]
