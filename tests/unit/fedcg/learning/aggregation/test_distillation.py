"""The bank, the teachers' ensemble, the labels that somebody knows, and FedCG's student against hand-worked numbers."""

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import nn

from fedcg.learning.aggregation import distillation
from fedcg.learning.method import Update, Weights
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import context, quick_spec
from tests.support.learning.networks import Answer, Identity, pair, settled


def test_a_bank_repeats_from_its_streams_and_follows_the_label_distribution() -> None:
    streams = Streams(b"coordinator").at("f", 1, 1)
    bank = distillation.draw_bank(streams, 4000, 3, torch.tensor([0.25, 0.75, 0.0]))
    again = distillation.draw_bank(streams, 4000, 3, torch.tensor([0.25, 0.75, 0.0]))
    assert torch.equal(bank.noise, again.noise)
    assert torch.equal(bank.labels, again.labels)
    counts = torch.bincount(bank.labels, minlength=3)
    assert counts[2].item() == 0
    assert counts[0].item() == pytest.approx(1000, abs=120)
    assert bank.noise.std().item() == pytest.approx(1.0, abs=0.05)


SETTINGS = distillation.Distillation(iterations=600, batch=4, lr=0.02, weight_decay=0.0)


def update(client: str, examples: int = 1, counts: tuple[int, ...] = (1, 1, 1)) -> Update:
    parts: Mapping[Part, Weights] = {part: {"w": torch.zeros(1)} for part in distillation.SHARED}
    return Update(client, parts, examples, counts)


def test_fedcg_student_settles_at_the_ensemble_weighted_by_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    # sizes 1 and 3, logits (4, 0, 0) and (0, 4, 0): softmax (1, 3, 0) = (e, e^3, 1) / (e + e^3 + 1)
    # = (2.7183, 20.0855, 1) / 23.8038 = (0.1142, 0.8438, 0.0420); unweighted (0.4683, 0.4683, 0.0634)
    student, spill = pair(Answer(0.0, 0.0, 0.0), Identity()), MemorySpill()
    monkeypatch.setattr(distillation, "load_pair", lambda parts, ctx: student)
    for client, logits in (("a", [[4.0, 0, 0]]), ("b", [[0, 4.0, 0]])):
        spill.put(client, {"logits": torch.tensor(logits).repeat(2400, 1)})
    aggregator = distillation.ensemble_aggregator(SETTINGS, context(quick_spec("fedcg")), spill)
    aggregator.finish({client: partial(update, client, examples) for client, examples in (("a", 1), ("b", 3))})
    assert settled(student) == pytest.approx((0.1142, 0.8438, 0.0420), abs=0.02)


def test_labels_that_nobody_has_get_no_probability_and_the_others_share_it() -> None:
    assert distillation.label_probabilities([(3, 0, 0, 1), (1, 0, 2, 0)], 4).tolist() == pytest.approx(
        [1 / 3, 0.0, 1 / 3, 1 / 3]
    )
    assert distillation.row_weights([(3, 0), (1, 0)], 2, torch.tensor([0, 1, 1, 0])).tolist() == [2.0, 0.0, 0.0, 2.0]


def test_one_client_that_does_not_report_keeps_every_label() -> None:
    assert distillation.label_probabilities([(3, 0), None], 2).tolist() == [0.5, 0.5]
    assert distillation.row_weights([None], 2, torch.tensor([0, 1])).tolist() == [1.0, 1.0]


def test_with_all_labels_known_every_row_weighs_exactly_one_whatever_the_number_of_classes() -> None:
    for classes in (3, 7, 10, 49):
        counts = [tuple([1] * classes)]
        assert distillation.row_weights(counts, classes, torch.arange(classes)).tolist() == [1.0] * classes


def test_no_image_at_all_says_nothing_of_labels() -> None:
    assert distillation.label_probabilities([(0, 0)], 2).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("reported", "expected"), [(True, (0.48, 0.48, 0.04)), (False, (0.64, 0.3267, 0.0333))])
def test_fedcg_distils_only_labels_that_somebody_knows_when_all_of_them_reported(
    monkeypatch: pytest.MonkeyPatch, *, reported: bool, expected: tuple[float, ...]
) -> None:
    # One answer for all rows settles, under KL(teacher ‖ student), at the mean of the teacher's answers to the labels that count:
    # of labels 0 and 1 ((0.92 + 0.04) / 2, the same, 0.04); of all three with 0.96 in front: (1.92 / 3, 0.98 / 3, 0.1 / 3).
    answers = torch.tensor([[0.92, 0.04, 0.04], [0.04, 0.92, 0.04], [0.96, 0.02, 0.02]])
    student = Answer(0.0, 0.0, 0.0)
    monkeypatch.setattr(distillation, "load_pair", lambda parts, ctx: pair(student, nn.Identity()))
    spec = quick_spec("fedcg")
    spill = MemorySpill()
    labels = torch.arange(2400) % 3
    bank = distillation.Bank(torch.zeros(2400, spec.network.noise_dim), labels)
    monkeypatch.setattr(distillation, "draw_bank", lambda *_: bank)
    merge = distillation.ensemble_aggregator(distillation.Distillation(600, 4, 0.02, 0.0), context(spec), spill)
    spill.put("a", {"logits": answers.log()[labels]})
    parts = {part: {"w": torch.zeros(1)} for part in (Part.GENERATOR, Part.CLASSIFIER)}
    update = Update("a", parts, 4, (2, 2, 0) if reported else None)
    merge.finish({"a": lambda: update})
    assert student.value.detach().softmax(0).tolist() == pytest.approx(expected, abs=0.03)
