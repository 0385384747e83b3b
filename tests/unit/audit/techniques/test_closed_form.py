"""Labels and features follow from gradients without a search."""

import torch

from audit.evidence.case import Extractor
from audit.measures import unit_pixels
from audit.techniques.gradients import (
    BatchGradient,
    attacker_model,
    batch_gradient,
    linear_inputs,
    revealed_features,
    revealed_labels,
    standardised,
)
from fedcg.wire.parts import Part
from tests.support.audit.cases import simulated_case


def of_bias(values: list[float], rows: int) -> BatchGradient:
    return BatchGradient((Part.CLASSIFIER,), (torch.tensor(values),), rows)


def test_the_label_of_one_image_is_the_negative_number_of_the_bias_gradient() -> None:
    # softmax (0.2, 0.3, 0.5) - onehot of class 1
    assert revealed_labels(of_bias([0.2, -0.7, 0.5], 1)).tolist() == [1]


def test_the_labels_of_a_batch_are_taken_off_one_by_one() -> None:
    # Mean softmax 1/3 each; labels 0, 0, 2, 2 of 4: 1/3 - 1/2, 1/3 - 0, 1/3 - 1/2.
    assert sorted(revealed_labels(of_bias([-1 / 6, 1 / 3, -1 / 6], 4)).tolist()) == [0, 0, 2, 2]


def test_the_classifiers_gradient_of_one_image_holds_its_features_exactly() -> None:
    case = simulated_case(method="fedsplit")
    true, train = case.model(), case.truth.train
    assert true is not None
    pixels = unit_pixels(train.images[:1])
    seen = batch_gradient(case.view.spec, true, pixels, train.labels[:1], (Part.CLASSIFIER,))
    given = attacker_model(case.view.with_private(case.truth.before or {}), Extractor.TRUE, case.streams, 1)
    wrong = attacker_model(case.view, Extractor.RANDOM, case.streams, 1)
    features = linear_inputs(given, pixels)[0]
    assert revealed_labels(seen).tolist() == train.labels[:1].tolist()
    # The attacker's own model only says where in the gradient the layer is.
    torch.testing.assert_close(revealed_features(wrong, seen), features, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(linear_inputs(wrong, pixels)[0], features, rtol=1e-2, atol=1e-2)


def test_standardised_maps_forget_level_and_spread_of_each_map() -> None:
    spec = simulated_case(method="fedsplit").view.spec
    features = torch.rand(2, 400)
    levels, spreads = torch.rand(16, 1), 1 + torch.rand(16, 1)
    moved = (features.view(2, 16, 25) * spreads + levels).flatten(1)
    torch.testing.assert_close(standardised(moved, spec), standardised(features, spec), rtol=1e-3, atol=1e-3)
    assert standardised(features, spec).view(2, 16, 25).mean(2).abs().max() < 1e-5
