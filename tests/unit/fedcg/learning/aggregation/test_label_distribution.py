"""A label that no client of a round knows is not distilled, when all of them reported."""

import pytest
import torch
from torch import nn

from fedcg.learning.aggregation import distillation
from fedcg.learning.aggregation.distillation import (
    Distillation,
    EnsembleAggregator,
    Pair,
    label_probabilities,
    row_weights,
)
from fedcg.learning.method import Update
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import context, quick_spec
from tests.support.learning.stub_networks import Answer


def test_labels_that_nobody_has_get_no_probability_and_the_others_share_it() -> None:
    assert label_probabilities([(3, 0, 0, 1), (1, 0, 2, 0)], 4).tolist() == pytest.approx([1 / 3, 0.0, 1 / 3, 1 / 3])
    assert row_weights([(3, 0), (1, 0)], 2, torch.tensor([0, 1, 1, 0])).tolist() == [2.0, 0.0, 0.0, 2.0]


def test_one_client_that_does_not_report_keeps_every_label() -> None:
    assert label_probabilities([(3, 0), None], 2).tolist() == [0.5, 0.5]
    assert row_weights([None], 2, torch.tensor([0, 1])).tolist() == [1.0, 1.0]


def test_with_all_labels_known_every_row_weighs_exactly_one_whatever_the_number_of_classes() -> None:
    for classes in (3, 7, 10, 49):
        counts = [tuple([1] * classes)]
        assert row_weights(counts, classes, torch.arange(classes)).tolist() == [1.0] * classes


def test_no_image_at_all_says_nothing_of_labels() -> None:
    assert label_probabilities([(0, 0)], 2).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("reported", "expected"), [(True, (0.48, 0.48, 0.04)), (False, (0.64, 0.3267, 0.0333))])
def test_fedcg_distils_only_labels_that_somebody_knows_when_all_of_them_reported(
    monkeypatch: pytest.MonkeyPatch, *, reported: bool, expected: tuple[float, ...]
) -> None:
    # One answer for all rows settles, under KL(teacher ‖ student), at the mean of the teacher's answers to the labels that count:
    # of labels 0 and 1 ((0.92 + 0.04) / 2, the same, 0.04); of all three with 0.96 in front: (1.92 / 3, 0.98 / 3, 0.1 / 3).
    answers = torch.tensor([[0.92, 0.04, 0.04], [0.04, 0.92, 0.04], [0.96, 0.02, 0.02]])
    student = Answer(0.0, 0.0, 0.0)
    monkeypatch.setattr(distillation, "load_pair", lambda parts, ctx: Pair(student, nn.Identity()))
    monkeypatch.setattr(Pair, "weights", lambda self: {})
    spec = quick_spec("fedcg")
    spill = MemorySpill()
    merge = EnsembleAggregator(Distillation(600, 4, 0.02, 0.0), context(spec), spill)
    merge.bank.labels.copy_(torch.arange(2400) % 3)
    spill.put("a", {"logits": answers.log()[merge.bank.labels]})
    parts = {part: {"w": torch.zeros(1)} for part in (Part.GENERATOR, Part.CLASSIFIER)}
    update = Update("a", parts, 4, (2, 2, 0) if reported else None)
    merge.finish({"a": lambda: update})
    assert student.value.detach().softmax(0).tolist() == pytest.approx(expected, abs=0.03)
