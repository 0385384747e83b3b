"""FedMD-CG's server half against hand-worked numbers: shares, the divergence and crossed terms."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fedcg.learning.aggregation import crossed_distillation as crossed
from fedcg.learning.aggregation.distillation import (
    SHARED,
    Bank,
    Distillation,
    draw_bank,
    teacher_logits,
    train_student,
    uniform,
)
from fedcg.learning.method import RoundContext, Update
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.learning.training.losses import Divergence
from fedcg.learning.training.stage import Nets
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import context, merged, quick_spec, teacher_pairs
from tests.support.learning.networks import FIRST, GEOMETRIC, PATTERN, SECOND, Answer, Identity, pair, settled

SETTINGS = Distillation(iterations=600, batch=4, lr=0.02, weight_decay=0.0)


def test_label_shares_and_distribution_come_from_counts() -> None:
    # class 0: 1 of 4 and 3 of 4; class 1: 3 of 3 and 0 of 3; class 2: nobody
    counts = [(1, 3, 0), (3, 0, 0)]
    assert crossed.label_shares(counts).tolist() == [[0.25, 1.0, 0.0], [0.75, 0.0, 0.0]]
    assert crossed.label_distribution(counts).tolist() == pytest.approx([4 / 7, 3 / 7, 0.0])


class Shift(nn.Module):
    """A classifier that adds a constant to the features."""

    def __init__(self, shift: Sequence[float]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(shift))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + self.shift


def test_fedmd_cg_student_settles_where_the_divergence_from_student_to_teacher_is_least() -> None:
    student = pair(Answer(0.0, 0.0, 0.0), Identity())
    mean_log = PATTERN.repeat(600, 1)

    def loss_of(nets: Nets, features: torch.Tensor, logits: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return crossed.crossed_loss(features, logits, mean, [], nets[Part.CLASSIFIER], Divergence()).mean()

    bank = Bank(torch.zeros(2400, 1), torch.zeros(2400, dtype=torch.int64))
    train_student(student, bank, SETTINGS, context(quick_spec("fedcg")), loss_of, lambda rows: (mean_log[rows],))
    assert settled(student) == pytest.approx(GEOMETRIC, abs=0.02)


def test_the_third_crossed_term_moves_the_generator_through_the_frozen_teacher() -> None:
    teacher = pair(Answer(0.0, 0.0), Shift((0.5, 0.0)))
    bank = Bank(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    log_teacher = torch.tensor([[0.9, 0.1]]).log()
    outputs = crossed.outputs_of(
        [crossed.FrozenTeacher(teacher, bank, log_teacher, torch.ones(1), 1, "cpu")], slice(0, 1)
    )
    features = torch.zeros(1, 2, requires_grad=True)
    student = Identity()
    loss = crossed.crossed_loss(features, torch.zeros(1, 2), log_teacher, outputs, student, Divergence())
    # KL_1: (1/2, 1/2) from (0.9, 0.1) = 1/2 ln(0.5/0.9) + 1/2 ln(0.5/0.1) = 0.510826; KL_2: the same (teacher features are 0)
    # KL_3: softmax(0.5, 0) = (0.622459, 0.377541): 0.622459 ln(0.622459/0.9) + 0.377541 ln(0.377541/0.1) = 0.272055
    assert loss.item() == pytest.approx(0.510826 + 0.510826 + 0.272055, abs=1e-5)
    loss.sum().backward()
    assert features.grad is not None
    assert features.grad.abs().max().item() > 0.0
    assert all(parameter.grad is None for parameter in teacher[Part.CLASSIFIER].parameters())


def test_a_teachers_features_are_made_a_block_ahead_and_equal_those_made_at_once() -> None:
    ctx, (teacher,) = teacher_pairs(1)
    bank = draw_bank(Streams(b"c"), 10, 8, uniform(3))
    weight = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    log_teacher = teacher_logits(teacher, bank, ctx).log_softmax(1)
    everybody = [crossed.FrozenTeacher(teacher, bank, log_teacher, weight, 4, "cpu")]
    pieces = [crossed.outputs_of(everybody, slice(start, min(start + 3, 10))) for start in range(0, 10, 3)]
    with torch.no_grad():
        expected = teacher[Part.GENERATOR](bank.noise, bank.labels)[weight > 0]
    assert torch.allclose(torch.cat([outputs[0].features for outputs in pieces if outputs]), expected, atol=1e-6)
    assert torch.equal(torch.cat([outputs[0].weight for outputs in pieces if outputs]), weight[weight > 0])
    assert [outputs[0].position.tolist() if outputs else [] for outputs in pieces] == [[0, 2], [0, 1], [1, 2], [0]]


class PerLabel(nn.Module):
    """A generator that answers each label with its own given features."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.features = rows

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.features[labels]


def aggregator_of(settings: Distillation, ctx: RoundContext) -> crossed.CrossedAggregator:
    return crossed.CrossedAggregator(settings, Divergence(), ctx, MemorySpill())


@pytest.mark.parametrize(
    ("answers", "counts"),
    [
        # Client a has 3 of 4 images of every class and says FIRST, b has the rest and says SECOND. Every classifier is the identity,
        # so eq. 10 and the third divergence both settle at FIRST^(3/4) SECOND^(1/4), normalised.
        (((FIRST,) * 3, (SECOND,) * 3), ((3, 3, 3), (1, 1, 1))),
        # Both teachers say FIRST for class 0 and SECOND for class 1, and p(y) = (3/4, 1/4, 0): the geometric mean again.
        (((FIRST, SECOND, (0.01, 0.01, 0.98)),) * 2, ((4, 1, 0), (2, 1, 0))),
    ],
)
def test_crossed_terms_weight_clients_by_their_shares_of_a_label_and_labels_by_the_rounds_counts(
    monkeypatch: pytest.MonkeyPatch, answers: Any, counts: tuple[tuple[int, ...], ...]
) -> None:
    student = pair(Answer(0.0, 0.0, 0.0), Identity())
    loaded = {float(at): pair(PerLabel(torch.tensor(rows).log()), Identity()) for at, rows in enumerate(answers, 1)}
    monkeypatch.setattr(
        crossed, "load_pair", lambda parts, ctx: loaded.get(parts[Part.CLASSIFIER]["unused"].item(), student)
    )
    updates = {
        name: Update(name, {part: {"unused": torch.tensor([tag])} for part in SHARED}, sum(mine), mine)
        for name, tag, mine in (("a", 1.0, counts[0]), ("b", 2.0, counts[1]))
    }
    settings = Distillation(iterations=400, batch=64, lr=0.02, weight_decay=0.0)
    merged(aggregator_of(settings, context(quick_spec("fedcg"))), updates)
    assert settled(student) == pytest.approx(GEOMETRIC, abs=0.04)


def test_a_round_publishes_the_label_distribution_of_its_counts_which_every_client_must_report() -> None:
    ctx, _ = teacher_pairs(1)
    parts = {part: initial_parts(ctx.spec, b"x")[part] for part in SHARED}
    updates = {"a": Update("a", parts, 4, (4, 0, 0)), "b": Update("b", parts, 4, (0, 3, 1))}
    settings = Distillation(2, 6, 1e-3, 0.0)
    assert merged(aggregator_of(settings, ctx), updates).label_distribution == pytest.approx((0.5, 0.375, 0.125))
    with pytest.raises(ValueError, match="missing from quiet"):
        aggregator_of(settings, ctx).finish({"quiet": lambda: Update("quiet", parts, 4)})
