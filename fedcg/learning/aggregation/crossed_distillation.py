"""FedMD-CG's crossed data-free distillation on the server (alg. 1 lines 20-24, eq. 10-12), at a bounded cost per client.

Sums and draws are computed while updates arrive: the average of weights, eq. 10's mean teacher (a row's label is known,
and so is n_i^y of an update), and the one client per batch and label for eq. 11. The order of arrival has no effect:
sums are exact (`ExactSum`), draws are races (`ClientSampling`).

Eq. 11 of FedMD-CG at a cost that does not grow with clients: for every batch and label ONE client is drawn i ~ τ(·, y).

In a batch all rows of a label share the drawn client, so a step needs at most one client classifier per label of the
batch. The expectation over draws is eq. 11 itself: each row's client is drawn with probability τ_iy, and eq. 11 is a
sum over rows (which rows share a draw changes only the variance).

Clients are drawn as they arrive, in any order, by a race: client i has time E / n_i^y for (batch, label), with E ~
Exp(1) from its own stream. The lowest time wins, with probability n_i^y / Σ_j n_j^y = τ_iy (the minimum of exponentials
with rates n_i^y). So only the leader's rows are stored. Labels that are equal modulo `HEATS` share one E. Each label's
odds stay τ, but clients with similar labels tend to win all of them together, so a batch of many labels needs few
classifiers.

Notation: ρ_g = D(G), ρ_i = D_i(G_i), ρ_ig = D(G_i), ρ_gi = D_i(G), each a softmax (at the divergence's temperature) over logits at one bank row (z, y). Teachers
(D_i, G_i) are frozen and in eval mode: ρ_i is a constant row, G_i(z, y) a constant input; in KL_3 the gradient passes THROUGH the
frozen D_i into G.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.func import functional_call

from fedcg.learning.aggregation.averaging import AverageAggregator, ExactSum, Merged, Updates
from fedcg.learning.aggregation.distillation import (
    LOGITS,
    SHARED,
    Bank,
    Distillation,
    Pair,
    draw_bank,
    generator_blocks,
    load_pair,
    teacher_logits,
    train_student,
    uniform,
)
from fedcg.learning.method import Aggregate, RoundContext, ServerState, Spill, Update
from fedcg.learning.networks import load_part
from fedcg.learning.seeds import Streams
from fedcg.learning.training.batches import BLOCK_ROWS, generate
from fedcg.learning.training.losses import Divergence
from fedcg.learning.training.stage import Nets, Tensors
from fedcg.wire.parts import Part


@dataclass(frozen=True)
class TeacherRows:
    """One client's contribution to eq. 11 on n rows of a batch.

    Attributes:
        classify: D_i, frozen: features [n, *shape] -> logits [n, C]; lets gradients through to its input.
        position: [n] int64, which rows of the batch.
        features: [n, *shape] G_i(z, y) at these rows.
        log_teacher: [n, C] log ρ_i.
        weight: [n] τ_iy if every client counts, 1 if one was drawn by τ.
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


HEATS = 4  # classifiers per batch if clients are similar; with fewer, a step would depend on one client's output
ClassifierOf = Callable[[str], Callable[[torch.Tensor], torch.Tensor]]


class ClientSampling:
    """The races of one bank, and the rows of their leaders.

    Args:
        bank: the bank.
        batch: rows of a batch; batches are consecutive.
        classes: C.
        streams: the coordinator's, scoped to (federation, round, attempt).
    """

    def __init__(self, bank: Bank, batch: int, classes: int, streams: Streams) -> None:
        self._streams = streams
        self._race = torch.arange(len(bank)) // batch * classes + bank.labels
        self._labels = torch.arange(int(self._race.max()) + 1) % classes
        self._heat = torch.arange(len(self._labels)) // classes * HEATS + self._labels % HEATS
        self._best = torch.full((len(self._labels),), torch.inf, dtype=torch.float64)
        self._clients: list[str] = []
        self._leader = torch.full((len(self._labels),), -1)
        self._features: torch.Tensor | None = None
        self._log_teacher: torch.Tensor | None = None

    def enter(self, client: str, counts: torch.Tensor) -> torch.Tensor:
        """Enter a client in every race and return the rows of the bank that it now leads.

        Args:
            client: id of a client that was not entered before.
            counts: [C] float64, n_i^y.

        Returns:
            [n] int64, ascending; `keep` these rows before the next client enters.
        """
        stream = self._streams.generator("bank", "race", client)
        efforts = torch.empty(int(self._heat.max()) + 1, dtype=torch.float64).exponential_(generator=stream)
        seconds = efforts[self._heat] / counts[self._labels]
        leads = seconds < self._best
        for race in ((seconds == self._best) & seconds.isfinite()).nonzero().squeeze(1).tolist():
            leads[race] = client < self._clients[int(self._leader[race])]
        self._best = torch.where(leads, seconds, self._best)
        self._leader[leads] = len(self._clients)
        self._clients.append(client)
        return leads[self._race].nonzero().squeeze(1)

    def keep(self, rows: torch.Tensor, features: torch.Tensor, log_teacher: torch.Tensor) -> None:
        """Store the leader's outputs for some rows.

        Args:
            rows: [n] int64.
            features: [n, *shape] G_i(z, y).
            log_teacher: [n, C] log ρ_i.
        """
        if self._features is None or self._log_teacher is None:
            self._features = torch.zeros(len(self._race), *features.shape[1:])
            self._log_teacher = torch.zeros(len(self._race), log_teacher.shape[1])
        self._features[rows], self._log_teacher[rows] = features.cpu(), log_teacher.cpu()

    def outputs(self, rows: slice, classifier_of: ClassifierOf, device: str) -> list[TeacherRows]:
        """The winners' outputs on one batch, in client-id order, each of weight 1."""
        if self._features is None or self._log_teacher is None:
            return []
        leaders = self._leader[self._race[rows]]
        names = {self._clients[number]: number for number in leaders.unique().tolist() if number >= 0}
        found = []
        for client, number in sorted(names.items()):
            position = (leaders == number).nonzero().squeeze(1)
            index = position + rows.start
            found.append(
                TeacherRows(
                    classify=classifier_of(client),
                    position=position.to(device),
                    features=self._features[index].to(device),
                    log_teacher=self._log_teacher[index].to(device),
                    weight=torch.ones(len(index), device=device),
                )
            )
        return found


EXPLORE = 0.05  # share of the arrival bank drawn uniformly, so that classes new in this round have rows
_CLASSIFIER = "classifier/"  # prefix of a client's classifier in its spilled tensors


def label_shares(counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """τ_iy = n_i^y / Σ_j n_j^y, [N, C] float64; 0 for a label that no client has."""
    matrix = torch.tensor(counts, dtype=torch.float64)
    return matrix / matrix.sum(dim=0).clamp(min=1.0)


def label_distribution(counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """p(y) ∝ Σ_i n_i^y, [C] float64."""
    totals = torch.tensor(counts, dtype=torch.float64).sum(dim=0)
    return totals / totals.sum()


def importance(p: torch.Tensor, q: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Importance weights p(y) / q(y) of rows drawn from q. [C], [C], [rows] -> [rows] float32."""
    return (p / q)[labels].to(torch.float32)


def counts_of(merged: Merged) -> list[tuple[int, ...]]:
    """Label counts of all clients in id order.

    Raises:
        ValueError: a client that did not report its label counts.
    """
    missing = [client for client in merged.examples if client not in merged.label_counts]
    if missing:
        raise ValueError(f"FedMD-CG needs every client's label counts; missing from {', '.join(missing)}")
    return [merged.label_counts[client] for client in merged.examples]


@dataclass(frozen=True)
class Crossing:
    """Settings of crossed distillation.

    Attributes:
        bank: "exact", "arrival" or "auto": see `CrossedAggregator`.
        exact_clients: with more, eq. 11 draws one client per batch and label.
        divergence: of eq. 10 and 11.
    """

    bank: str
    exact_clients: int
    divergence: Divergence


class TaughtBank:
    """A bank drawn from q(y), and the outputs of the clients added so far.

    Args:
        bank: rows (z, y).
        q: [C] float64, the distribution of the labels.
        batch: rows of a student step.
        ctx: streams, spec, device.
        divergence: determines the averaged summand of a teacher and the temperature.
        sampling: whether to draw the client that counts in eq. 11; not needed if all count.
    """

    def __init__(
        self, bank: Bank, q: torch.Tensor, batch: int, ctx: RoundContext, divergence: Divergence, *, sampling: bool
    ) -> None:
        self.bank = bank
        self.q = q
        self.clients: set[str] = set()
        self._ctx = ctx
        self._divergence = divergence
        self._sum = ExactSum()
        self._totals = torch.zeros(ctx.spec.class_count, dtype=torch.float64)
        self._sampling = ClientSampling(bank, batch, ctx.spec.class_count, ctx.streams) if sampling else None
        self._skeleton: torch.nn.Module | None = None

    def add(self, update: Update, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Count one client: add its output for eq. 10, and enter it in the races for eq. 11.

        Args:
            update: with label counts.
            logits: [rows, C], if its teacher pass is already done.

        Returns:
            Its logits over the bank, [rows, C].

        Raises:
            ValueError: no label counts.
            DivergedError: a logit is not finite.
        """
        if update.label_counts is None:
            raise ValueError(f"FedMD-CG needs every client's label counts; missing from {update.client}")
        counts = torch.tensor(update.label_counts, dtype=torch.float64)
        led = self._sampling.enter(update.client, counts) if self._sampling else torch.zeros(0, dtype=torch.int64)
        led_features: list[torch.Tensor] = []

        def watch(rows: slice, features: torch.Tensor) -> None:
            first, last = torch.searchsorted(led, torch.tensor([rows.start, rows.stop])).tolist()
            led_features.append(features[(led[first:last] - rows.start).to(features.device)].cpu())

        if logits is None:
            logits = teacher_logits(load_pair(update.parts, self._ctx), self.bank, self._ctx, watch)
        elif len(led):
            # taught by an earlier worker: the rows that it leads are recomputed in the same blocks
            teacher = load_pair(update.parts, self._ctx)
            for rows, features in generator_blocks(teacher, self.bank, self._ctx):
                watch(rows, features)
        log_teacher = self._divergence.log_softmax(logits)
        self._sum.add(self._divergence.summand(log_teacher), counts[self.bank.labels].unsqueeze(1))
        self._totals += counts
        if self._sampling and len(led):
            self._sampling.keep(led, torch.cat(led_features), log_teacher[led])
        self.clients.add(update.client)
        return logits

    def mean(self) -> torch.Tensor:
        """Σ_i τ_iy times the summand of ρ_i (`Divergence.summand`), [rows, C] float32; 0 for a label that no client has."""
        totals = self._totals[self.bank.labels].clamp(min=1.0).unsqueeze(1)
        return (self._sum.value() / totals).to(torch.float32)

    def drawn(self, rows: slice, spill: Spill) -> list[TeacherRows]:
        """Outputs of the clients drawn for one batch. Their classifiers are loaded from the spill one batch at a time."""

        def classifier_of(client: str) -> Callable[[torch.Tensor], torch.Tensor]:
            kept = spill.get(client)
            weights = {
                name.removeprefix(_CLASSIFIER): tensor.to(self._ctx.device)
                for name, tensor in kept.items()
                if name.startswith(_CLASSIFIER)
            }
            if self._skeleton is None:
                self._skeleton = load_part(self._ctx.spec, Part.CLASSIFIER, weights, self._ctx.device).eval()
                self._skeleton.requires_grad_(False)  # noqa: FBT003 - torch's own signature
            skeleton = self._skeleton

            def classify(features: torch.Tensor) -> torch.Tensor:
                logits: torch.Tensor = functional_call(skeleton, weights, (features,))
                return logits

            return classify

        return self._sampling.outputs(rows, classifier_of, self._ctx.device) if self._sampling else []


class CrossedAggregator:
    """FedMD-CG alg. 1 lines 20-24: average by n_i, then minimise eq. 12 over the bank.

    Labels come from p(y) of THIS round, known only after all updates have arrived. `bank="exact"` draws the bank at
    `finish` and runs the teachers then. `bank="arrival"` draws labels from q, 95 % the last published p(y) and 5 %
    uniform, runs each teacher when its update arrives, and weights every row by p(y) / q(y) at `finish`: the same
    expectation. `bank="auto"` is exact up to `exact_clients` clients and of arrival above. As the number is not known
    in advance, it runs teachers on arrival.

    Eq. 11 is exact up to `exact_clients` clients; above, each label of a batch draws ONE client i ~ τ(·, y) (see
    `ClientSampling`): the same expectation, at a cost per row that is independent of the number of clients.
    """

    def __init__(
        self, settings: Distillation, crossing: Crossing, state: ServerState, ctx: RoundContext, spill: Spill
    ) -> None:
        self._settings = settings
        self._crossing = crossing
        self._ctx = ctx
        self._spill = spill
        known, even = state.aggregate.label_distribution, uniform(ctx.spec.class_count)
        last = even if known is None else torch.tensor(known, dtype=torch.float64)
        self._q = (1.0 - EXPLORE) * last / last.sum() + EXPLORE * even
        self._average = AverageAggregator(SHARED, spill)
        self._arrival = None if crossing.bank == "exact" else self._open(self._q, sampling=True)

    def _open(self, q: torch.Tensor, *, sampling: bool) -> TaughtBank:
        bank = draw_bank(self._ctx.streams, self._settings.rows, self._ctx.spec.network.noise_dim, q)
        return TaughtBank(bank, q, self._settings.batch, self._ctx, self._crossing.divergence, sampling=sampling)

    def add(self, update: Update) -> None:
        """Add one update to the average, and run its teacher over the arrival bank, if there is one."""
        if self._arrival is not None:
            self._teach(update, self._arrival)
        self._average.add(update)

    def _teach(self, update: Update, taught_bank: TaughtBank) -> None:
        """One client's logits over the arrival bank; stored in the spill, so that another worker can resume."""
        if update.client in taught_bank.clients:
            return
        known = self._spill.get(update.client) if self._spill.has(update.client) else {}
        logits = taught_bank.add(update, known.get(LOGITS))
        if LOGITS not in known:
            self._keep(update, logits)

    def _keep(self, update: Update, logits: torch.Tensor) -> None:
        classifier = {_CLASSIFIER + name: tensor for name, tensor in update.parts[Part.CLASSIFIER].items()}
        self._spill.put(update.client, {LOGITS: logits, **classifier})

    def finish(self, updates: Updates) -> tuple[Aggregate, ServerState]:
        """Average, run crossed distillation, publish p(y).

        Raises:
            ValueError: an update without label counts.
        """
        few = len(updates) <= self._crossing.exact_clients
        arrival = None if few and self._crossing.bank == "auto" else self._arrival
        taught_bank = None if arrival is None else self._settled(arrival, updates)
        merged = self._average.settle(updates)
        counts = counts_of(merged)
        p, shares = label_distribution(counts), label_shares(counts)
        if taught_bank is None:
            taught_bank = self._open(p, sampling=not few)
        outputs = self._outputs(updates, taught_bank, shares, few=few, taught=arrival is not None)
        divergence, mean = self._crossing.divergence, taught_bank.mean().to(self._ctx.device)
        row_weights = importance(p, taught_bank.q, taught_bank.bank.labels).to(self._ctx.device)
        student = load_pair(merged.parts, self._ctx)

        def loss_of(
            nets: Nets,
            features: torch.Tensor,
            logits: torch.Tensor,
            taught: torch.Tensor,
            weight: torch.Tensor,
            at: torch.Tensor,
        ) -> torch.Tensor:
            others = outputs(slice(int(at[0]), int(at[-1]) + 1))
            losses = crossed_loss(features, logits, taught, others, nets[Part.CLASSIFIER], divergence)
            return (weight * losses).mean()

        def beside(rows: slice) -> Tensors:
            return mean[rows], row_weights[rows], torch.arange(rows.start, rows.stop)

        bank = taught_bank.bank
        parts = train_student(student, bank, self._settings, self._ctx, loss_of, beside, is_pure=False)
        aggregate = Aggregate(parts, tuple(p.tolist()))
        return aggregate, ServerState(aggregate)

    def _settled(self, arrival: TaughtBank, updates: Updates) -> TaughtBank:
        """The arrival bank, taught by exactly these clients."""
        if not arrival.clients <= updates.keys():
            arrival = self._arrival = self._open(self._q, sampling=True)
        for client in sorted(updates.keys() - arrival.clients):
            self._teach(updates[client](), arrival)
        return arrival

    def _outputs(
        self, updates: Updates, taught_bank: TaughtBank, shares: torch.Tensor, *, few: bool, taught: bool
    ) -> Callable[[slice], list[TeacherRows]]:
        """Eq. 11's outputs, batch by batch: of every client up to `exact_clients`, of drawn ones above."""
        teachers = []
        for number, client in enumerate(sorted(updates) if few or not taught else ()):
            update = updates[client]()
            logits = self._spill.get(client)[LOGITS] if taught else taught_bank.add(update)
            if not few:
                self._keep(update, logits)
                continue
            weight = shares[number][taught_bank.bank.labels]
            block_rows = max(self._settings.batch, (self._ctx.machine.most_rows or BLOCK_ROWS) // len(updates))
            teacher, log_teacher = load_pair(update.parts, self._ctx), self._crossing.divergence.log_softmax(logits)
            teachers.append(FrozenTeacher(teacher, taught_bank.bank, log_teacher, weight, block_rows, self._ctx.device))
        if few:
            return partial(outputs_of, teachers)
        return lambda rows: taught_bank.drawn(rows, self._spill)
