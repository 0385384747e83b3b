"""FedMD-CG's server half against hand-worked numbers: shares, the direction of the divergence, crossed terms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import nn

from fedcg.learning.aggregation import crossed_distillation as crossed
from fedcg.learning.aggregation.crossed_distillation import (
    CrossedAggregator,
    Crossing,
    FrozenTeacher,
    crossed_loss,
    label_distribution,
    label_shares,
    outputs_of,
)
from fedcg.learning.aggregation.distillation import (
    SHARED,
    Bank,
    Distillation,
    Pair,
    draw_bank,
    teacher_logits,
    train_student,
    uniform,
)
from fedcg.learning.method import Aggregate, RoundContext, ServerState, Update
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.learning.training.losses import Divergence
from fedcg.learning.training.stage import Nets
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import context, merged, quick_spec, teacher_pairs
from tests.support.learning.stub_networks import FIRST, GEOMETRIC, PATTERN, SECOND, Answer, Identity, settled

SETTINGS = Distillation(iterations=600, batch=4, lr=0.02, weight_decay=0.0)


def test_label_shares_and_distribution_come_from_counts() -> None:
    # class 0: 1 of 4 and 3 of 4; class 1: 3 of 3 and 0 of 3; class 2: nobody
    counts = [(1, 3, 0), (3, 0, 0)]
    assert label_shares(counts).tolist() == [[0.25, 1.0, 0.0], [0.75, 0.0, 0.0]]
    assert label_distribution(counts).tolist() == pytest.approx([4 / 7, 3 / 7, 0.0])


class Shift(nn.Module):
    """A classifier that adds a constant to the features."""

    def __init__(self, shift: Sequence[float]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(shift))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + self.shift


def test_fedmd_cg_student_settles_where_the_divergence_from_student_to_teacher_is_least() -> None:
    student = Pair(Answer(0.0, 0.0, 0.0), Identity())
    mean_log = PATTERN.repeat(600, 1)

    def loss_of(nets: Nets, features: torch.Tensor, logits: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return crossed_loss(features, logits, mean, [], nets[Part.CLASSIFIER], Divergence()).mean()

    bank = Bank(torch.zeros(2400, 1), torch.zeros(2400, dtype=torch.int64))
    train_student(student, bank, SETTINGS, context(quick_spec("fedcg")), loss_of, lambda rows: (mean_log[rows],))
    assert settled(student) == pytest.approx(GEOMETRIC, abs=0.02)


@torch.no_grad()
def crossed_by_hand(student: Pair, teachers: Sequence[Pair], bank: Bank, shares: torch.Tensor) -> list[float]:
    """Eq. 10-11 row by row, straight from the paper, with no algebra."""

    def kl(p: torch.Tensor, q: torch.Tensor) -> float:
        return float((p.softmax(0) * (p.softmax(0).log() - q.softmax(0).log())).sum())

    losses = []
    for row in range(len(bank)):
        z, y = bank.noise[row : row + 1], bank.labels[row : row + 1]
        total = 0.0
        for number, teacher in enumerate(teachers):
            tau = float(shares[number, int(y)])
            made, theirs = student.generator(z, y), teacher.generator(z, y)
            rho_i = teacher.classifier(theirs)[0]
            total += tau * kl(student.classifier(made)[0], rho_i)
            total += tau * kl(student.classifier(theirs)[0], rho_i)
            total += tau * kl(teacher.classifier(made)[0], rho_i)
        losses.append(total)
    return losses


def every_teacher(
    teachers: Sequence[Pair], bank: Bank, weights: torch.Tensor, ctx: RoundContext, block_rows: int = 2048
) -> list[FrozenTeacher]:
    logs = [teacher_logits(teacher, bank, ctx).log_softmax(1) for teacher in teachers]
    return [
        FrozenTeacher(teacher, bank, log, weight, block_rows, "cpu")
        for teacher, log, weight in zip(teachers, logs, weights, strict=True)
    ]


def test_the_crossed_loss_equals_the_papers_sums_row_by_row() -> None:
    ctx, (student, *teachers) = teacher_pairs(3)
    bank = draw_bank(Streams(b"c"), 12, ctx.spec.network.noise_dim, uniform(3))
    shares = label_shares([(1, 3, 0), (3, 0, 2)])
    mean_log = sum(
        shares[i][bank.labels].unsqueeze(1) * teacher_logits(teacher, bank, ctx).log_softmax(1).double()
        for i, teacher in enumerate(teachers)
    )
    assert isinstance(mean_log, torch.Tensor)
    everybody = every_teacher(teachers, bank, shares[:, bank.labels], ctx)
    got = []
    for rows in (slice(0, 6), slice(6, 12)):
        features = student.generator(bank.noise[rows], bank.labels[rows])
        logits = student.classifier(features)
        outputs = outputs_of(everybody, rows)
        got += crossed_loss(
            features, logits, mean_log.float()[rows], outputs, student.classifier, Divergence()
        ).tolist()
    assert got == pytest.approx(crossed_by_hand(student, teachers, bank, shares), rel=1e-3, abs=1e-6)


@torch.no_grad()
def test_in_the_authors_direction_two_students_differ_by_the_sums_of_their_divergences() -> None:
    # What eq. 10's mean leaves out does not depend on the student, so it is not in the difference.
    divergence = Divergence("teacher_student", 0.1)
    ctx, pairs = teacher_pairs(4)
    students, teachers = pairs[:2], pairs[2:]
    bank = draw_bank(Streams(b"c"), 6, ctx.spec.network.noise_dim, uniform(3))
    shares = label_shares([(1, 3, 0), (3, 0, 2)])[:, bank.labels]
    logs = [divergence.log_softmax(teacher_logits(teacher, bank, ctx)) for teacher in teachers]
    mean = (shares.unsqueeze(2) * torch.stack(logs).exp()).sum(0).float()
    frozen = [FrozenTeacher(*each, 6, "cpu") for each in zip(teachers, [bank] * 2, logs, shares, strict=True)]
    outputs = outputs_of(frozen, slice(0, 6))
    got, expected = [], []
    for student in students:
        features = student.generator(bank.noise, bank.labels)
        logits = student.classifier(features)
        got.append(crossed_loss(features, logits, mean, outputs, student.classifier, divergence))
        expected.append(torch.zeros(6))
        for teacher, log, tau in zip(teachers, logs, shares, strict=True):
            theirs = teacher.generator(bank.noise, bank.labels)
            for judged in (logits, student.classifier(theirs), teacher.classifier(features)):
                rows = log.exp() * (log - (judged / 0.1).log_softmax(1))
                expected[-1] += (tau * rows.sum(1)).float()
    assert (got[0] - got[1]).abs().max().item() > 1e-2
    assert torch.allclose(got[0] - got[1], expected[0] - expected[1], atol=1e-5)


def test_the_third_crossed_term_moves_the_generator_through_the_frozen_teacher() -> None:
    teacher = Pair(Answer(0.0, 0.0), Shift((0.5, 0.0)))
    bank = Bank(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    log_teacher = torch.tensor([[0.9, 0.1]]).log()
    outputs = outputs_of([FrozenTeacher(teacher, bank, log_teacher, torch.ones(1), 1, "cpu")], slice(0, 1))
    features = torch.zeros(1, 2, requires_grad=True)
    student = Identity()
    loss = crossed_loss(features, torch.zeros(1, 2), log_teacher, outputs, student, Divergence())
    # KL_1: (1/2, 1/2) from (0.9, 0.1) = 1/2 ln(0.5/0.9) + 1/2 ln(0.5/0.1) = 0.510826; KL_2: the same (teacher features are 0)
    # KL_3: softmax(0.5, 0) = (0.622459, 0.377541): 0.622459 ln(0.622459/0.9) + 0.377541 ln(0.377541/0.1) = 0.272055
    assert loss.item() == pytest.approx(0.510826 + 0.510826 + 0.272055, abs=1e-5)
    loss.sum().backward()
    assert features.grad is not None
    assert features.grad.abs().max().item() > 0.0
    assert all(parameter.grad is None for parameter in teacher.classifier.parameters())


def test_a_teachers_features_are_made_a_block_ahead_and_equal_those_made_at_once() -> None:
    ctx, (pair,) = teacher_pairs(1)
    bank = draw_bank(Streams(b"c"), 10, 8, uniform(3))
    weight = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    everybody = every_teacher([pair], bank, weight.unsqueeze(0), ctx, block_rows=4)
    pieces = [outputs_of(everybody, slice(start, min(start + 3, 10))) for start in range(0, 10, 3)]
    with torch.no_grad():
        expected = pair.generator(bank.noise, bank.labels)[weight > 0]
    made = torch.cat([outputs[0].features for outputs in pieces if outputs])
    assert torch.allclose(made, expected, atol=1e-6)
    assert torch.equal(torch.cat([outputs[0].weight for outputs in pieces if outputs]), weight[weight > 0])
    assert [outputs[0].position.tolist() if outputs else [] for outputs in pieces] == [[0, 2], [0, 1], [1, 2], [0]]


class PerLabel(nn.Module):
    """A generator that answers each label with its own given features, and remembers what it was asked for."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.features = rows
        self.asked = torch.zeros(len(rows), dtype=torch.int64)

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.asked += torch.bincount(labels, minlength=len(self.asked))
        return self.features[labels]


class Counting(Identity):
    """Logits = features; counts the rows of eq. 11's third divergence: those through which a gradient passes."""

    def __init__(self) -> None:
        super().__init__()
        self.third = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.third += len(features) if features.requires_grad else 0
        return super().forward(features)


class Tally(Identity):
    """What drawn classifiers run as: like Counting, for the weight `w` that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.third = {1.0: 0, 2.0: 0}

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.third[self.w.item()] += len(features) if features.requires_grad else 0
        return super().forward(features)


@dataclass(frozen=True)
class StubRound:
    """A FedMD-CG round of two clients a and b; each teacher says given log-probabilities for each label."""

    student: Pair
    teachers: tuple[Pair, Pair]
    tally: Tally
    rows: int

    @property
    def judged(self) -> list[int]:
        """Rows that the classifiers of a and b judged, each loaded for good or for one batch."""
        return [
            cast("Counting", teacher.classifier).third + drawn
            for teacher, drawn in zip(self.teachers, self.tally.third.values(), strict=True)
        ]

    @property
    def asked(self) -> list[float]:
        """Share of each label among the rows that the first teacher was asked for."""
        labels = cast("PerLabel", self.teachers[0].generator).asked
        return (labels / labels.sum()).tolist()


def stub_round(
    monkeypatch: pytest.MonkeyPatch,
    outputs: Sequence[torch.Tensor],
    counts: Sequence[tuple[int, ...]],
    *,
    bank: str = "exact",
    exact_clients: int = 32,
    last: tuple[float, ...] = (1 / 3, 1 / 3, 1 / 3),
) -> StubRound:
    teachers = (Pair(PerLabel(outputs[0]), Counting()), Pair(PerLabel(outputs[1]), Counting()))
    student, settings = (
        Pair(Answer(0.0, 0.0, 0.0), Identity()),
        Distillation(iterations=400, batch=64, lr=0.02, weight_decay=0.0),
    )
    loaded = {1.0: teachers[0], 2.0: teachers[1]}
    monkeypatch.setattr(
        crossed, "load_pair", lambda parts, ctx: loaded.get(parts[Part.CLASSIFIER]["w"].item(), student)
    )
    tally = Tally().requires_grad_(requires_grad=False)
    monkeypatch.setattr(crossed, "load_part", lambda *_: tally)
    monkeypatch.setattr(Pair, "weights", lambda self: {})
    updates = {
        name: Update(name, {part: {"w": torch.tensor([tag])} for part in SHARED}, sum(mine), mine)
        for name, tag, mine in (("a", 1.0, counts[0]), ("b", 2.0, counts[1]))
    }
    crossing, state = Crossing(bank, exact_clients, Divergence()), ServerState(Aggregate({}, last))
    merged(CrossedAggregator(settings, crossing, state, context(quick_spec("fedcg")), MemorySpill()), updates)
    return StubRound(student, teachers, tally, settings.rows)


@pytest.mark.parametrize("bank", ["exact", "arrival", "auto"])
@pytest.mark.parametrize("exact_clients", [1, 2])
def test_every_crossed_term_weights_a_client_by_its_share_of_the_label(
    monkeypatch: pytest.MonkeyPatch, bank: str, exact_clients: int
) -> None:
    # Client a has 3 of 4 images of every class and says FIRST, b has the rest and says SECOND. Every classifier is the identity,
    # so eq. 10 and the third divergence both settle at FIRST^(3/4) SECOND^(1/4), normalised.
    outputs = [torch.tensor([one] * 3).log() for one in (FIRST, SECOND)]
    done = stub_round(monkeypatch, outputs, [(3, 3, 3), (1, 1, 1)], bank=bank, exact_clients=exact_clients)
    assert settled(done.student) == pytest.approx(GEOMETRIC, abs=0.04)
    # Two clients: exact up to a bound of two (each teacher judges every row), one client per batch and label above it.
    if exact_clients == 2:
        assert done.judged == [done.rows, done.rows]
    else:
        assert sum(done.judged) == done.rows
        assert done.judged[0] / done.rows == pytest.approx(0.75, abs=0.04)


@pytest.mark.parametrize("bank", ["exact", "arrival"])
def test_a_round_weighs_labels_as_its_clients_have_them_whatever_was_published_last(
    monkeypatch: pytest.MonkeyPatch, bank: str
) -> None:
    # Both teachers say FIRST for class 0 and SECOND for class 1, and p(y) = (3/4, 1/4, 0): the geometric mean again. The bank of
    # arrival is drawn from nearly the opposite, (0.11, 0.87, 0.02): unweighted the student would settle close to SECOND.
    outputs = torch.tensor([FIRST, SECOND, (0.01, 0.01, 0.98)]).log()
    done = stub_round(monkeypatch, [outputs, outputs], [(4, 1, 0), (2, 1, 0)], bank=bank, last=(0.1, 0.9, 0.0))
    assert settled(done.student) == pytest.approx(GEOMETRIC, abs=0.04)
    drawn_from = (0.75, 0.25, 0.0) if bank == "exact" else (0.1117, 0.8717, 0.0167)
    assert done.asked == pytest.approx(drawn_from, abs=0.02)
    assert (done.asked[2] > 0.0) == (bank == "arrival")


@pytest.mark.parametrize("bank", ["exact", "arrival"])
def test_the_published_label_distribution_is_that_of_this_rounds_counts(bank: str) -> None:
    ctx, _ = teacher_pairs(1)
    parts = {part: initial_parts(ctx.spec, b"x")[part] for part in SHARED}
    updates = {"a": Update("a", parts, 4, (4, 0, 0)), "b": Update("b", parts, 4, (0, 3, 1))}
    crossing, state = Crossing(bank, 32, Divergence()), ServerState(Aggregate(parts, (1.0, 0.0, 0.0)))
    aggregator = CrossedAggregator(Distillation(2, 6, 1e-3, 0.0), crossing, state, ctx, MemorySpill())
    aggregate = merged(aggregator, updates)
    assert aggregate.label_distribution == pytest.approx((0.5, 0.375, 0.125))


def test_rows_of_an_arrival_bank_weigh_as_much_as_their_label_does_now() -> None:
    weights = crossed.importance(torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5]), torch.tensor([0, 1, 1]))
    assert weights.tolist() == [1.5, 0.5, 0.5]


def test_fedmd_cg_refuses_a_client_that_does_not_report_its_label_counts() -> None:
    ctx, _ = teacher_pairs(1)
    parts = {part: initial_parts(ctx.spec, b"x")[part] for part in SHARED}
    incomplete = Update("quiet", parts, 4)
    crossing, state = Crossing("exact", 32, Divergence()), ServerState(Aggregate(parts))
    aggregator = CrossedAggregator(Distillation(2, 6, 1e-3, 0.0), crossing, state, ctx, MemorySpill())
    with pytest.raises(ValueError, match="none from quiet"):
        aggregator.finish({"quiet": lambda: incomplete})
