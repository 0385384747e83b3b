"""The bank, the teachers' ensemble and FedCG's student against hand-worked numbers."""

import math
from collections.abc import Mapping
from functools import partial

import pytest
import torch

from fedcg.learning.aggregation import distillation
from fedcg.learning.aggregation.distillation import (
    SHARED,
    Bank,
    Distillation,
    Ensemble,
    EnsembleAggregator,
    Pair,
    draw_bank,
    train_student,
    uniform,
)
from fedcg.learning.method import DivergedError, Update, Weights
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import context, quick_spec, teacher_pairs
from tests.support.learning.stub_networks import ARITHMETIC, PATTERN, Answer, Identity, settled


def test_the_ensemble_is_a_data_size_weighted_sum_of_logits() -> None:
    # sizes 1 and 3: (1/4) (4, 0) + (3/4) (0, 4) = (1, 3)
    ensemble = Ensemble()
    ensemble.add(1, torch.tensor([[4.0, 0.0]]))
    ensemble.add(3, torch.tensor([[0.0, 4.0]]))
    assert ensemble.logits().tolist() == [[1.0, 3.0]]


def test_a_bank_repeats_from_its_streams_and_follows_the_label_distribution() -> None:
    streams = Streams(b"coordinator").at("f", 1, 1)
    bank = draw_bank(streams, 4000, 3, torch.tensor([0.25, 0.75, 0.0]))
    again = draw_bank(streams, 4000, 3, torch.tensor([0.25, 0.75, 0.0]))
    assert torch.equal(bank.noise, again.noise)
    assert torch.equal(bank.labels, again.labels)
    counts = torch.bincount(bank.labels, minlength=3)
    assert counts[2].item() == 0
    assert counts[0].item() == pytest.approx(1000, abs=120)
    assert bank.noise.std().item() == pytest.approx(1.0, abs=0.05)


def nothing_beside(rows: slice) -> tuple[torch.Tensor, ...]:
    return ()


SETTINGS = Distillation(iterations=600, batch=4, lr=0.02, weight_decay=0.0)


def update(client: str, examples: int = 1, counts: tuple[int, ...] = (1, 1, 1)) -> Update:
    parts: Mapping[Part, Weights] = {part: {"w": torch.zeros(1)} for part in SHARED}
    return Update(client, parts, examples, counts)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"a": (1, PATTERN.repeat(600, 1))}, ARITHMETIC),
        # sizes 1 and 3, logits (4, 0, 0) and (0, 4, 0): softmax (1, 3, 0) = (e, e^3, 1) / (e + e^3 + 1)
        # = (2.7183, 20.0855, 1) / 23.8038 = (0.1142, 0.8438, 0.0420); unweighted (0.4683, 0.4683, 0.0634)
        (
            {
                "a": (1, torch.tensor([[4.0, 0, 0]]).repeat(2400, 1)),
                "b": (3, torch.tensor([[0, 4.0, 0]]).repeat(2400, 1)),
            },
            (0.1142, 0.8438, 0.0420),
        ),
    ],
    ids=["the direction of the divergence", "weights by examples"],
)
def test_fedcg_student_settles_where_the_divergence_from_the_weighted_ensemble_is_least(
    monkeypatch: pytest.MonkeyPatch, outputs: Mapping[str, tuple[int, torch.Tensor]], expected: tuple[float, ...]
) -> None:
    student, spill = Pair(Answer(0.0, 0.0, 0.0), Identity()), MemorySpill()
    monkeypatch.setattr(distillation, "load_pair", lambda parts, ctx: student)
    monkeypatch.setattr(Pair, "weights", lambda self: {})
    for client, (_, logits) in outputs.items():
        spill.put(client, {"logits": logits})
    aggregator = EnsembleAggregator(SETTINGS, context(quick_spec("fedcg")), spill)
    aggregator.finish({client: partial(update, client, examples) for client, (examples, _) in outputs.items()})
    assert settled(student) == pytest.approx(expected, abs=0.02)


def test_both_networks_of_a_student_are_trained_and_its_batch_norm_sees_its_own_batches() -> None:
    ctx, (student,) = teacher_pairs(1)
    before = student.weights()
    bank = draw_bank(Streams(b"c"), 12, ctx.spec.network.noise_dim, uniform(3))
    after = train_student(
        student,
        bank,
        Distillation(2, 6, 1e-2, 0.0),
        ctx,
        lambda nets, features, logits: logits.square().mean(),
        nothing_beside,
    )
    for part, name in (
        (Part.GENERATOR, "body.0.weight"),
        (Part.GENERATOR, "body.1.running_mean"),
        (Part.CLASSIFIER, "1.weight"),
    ):
        assert not torch.equal(before[part][name], after[part][name])
    assert after[Part.GENERATOR]["body.1.num_batches_tracked"].item() == 2


def test_a_student_that_explodes_is_not_returned() -> None:
    student = Pair(Answer(0.0, 0.0, 0.0), Identity())
    bank = Bank(torch.zeros(8, 1), torch.zeros(8, dtype=torch.int64))
    with pytest.raises(DivergedError, match="nan"):
        train_student(
            student,
            bank,
            Distillation(2, 4, 0.1, 0.0),
            context(quick_spec("fedcg")),
            lambda nets, features, logits: logits.sum() * math.nan,
            nothing_beside,
        )
