"""FedMD-CG's server half against hand-worked numbers: shares, the divergence and crossed terms."""

import pytest
import torch

from fedcg.learning.aggregation import crossed_distillation as crossed
from fedcg.learning.aggregation.distillation import SHARED, Distillation, draw_bank, teacher_logits, uniform
from fedcg.learning.method import Aggregator, RoundContext, Update
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.learning.training.losses import Divergence
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import merged, teacher_pairs


def test_label_shares_and_distribution_come_from_counts() -> None:
    # class 0: 1 of 4 and 3 of 4; class 1: 3 of 3 and 0 of 3; class 2: nobody
    counts = [(1, 3, 0), (3, 0, 0)]
    assert crossed.label_shares(counts).tolist() == [[0.25, 1.0, 0.0], [0.75, 0.0, 0.0]]
    assert crossed.label_distribution(counts).tolist() == pytest.approx([4 / 7, 3 / 7, 0.0])


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


def aggregator_of(settings: Distillation, ctx: RoundContext) -> Aggregator:
    return crossed.crossed_aggregator(settings, Divergence(), ctx, MemorySpill())


def test_a_round_publishes_the_label_distribution_of_its_counts_which_every_client_must_report() -> None:
    ctx, _ = teacher_pairs(1)
    parts = {part: initial_parts(ctx.spec, b"x")[part] for part in SHARED}
    updates = {"a": Update("a", parts, 4, (4, 0, 0)), "b": Update("b", parts, 4, (0, 3, 1))}
    settings = Distillation(2, 6, 1e-3, 0.0)
    assert merged(aggregator_of(settings, ctx), updates).label_distribution == pytest.approx((0.5, 0.375, 0.125))
    with pytest.raises(ValueError, match="missing from quiet"):
        aggregator_of(settings, ctx).finish({"quiet": lambda: Update("quiet", parts, 4)})
