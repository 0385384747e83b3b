"""Moments of features, and the heads that are calibrated or solved from them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedcg.learning.aggregation.averaging import weighted_average
from fedcg.learning.heads.classifiers import calibrated, chosen_head, lda_head, linear_layer
from fedcg.learning.heads.moments import (
    COUNTS,
    MOMENT,
    SUMS,
    class_gaussians,
    feature_moments,
    moments_layout,
    moments_of,
)
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Callbacks, DivergedError, Weights
from fedcg.learning.networks import load_part
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.spec import NetworkChoice
from fedcg.wire.parts import Part
from tests.support.learning import learning_cases as cases
from tests.support.present import present


class TwoHalves(nn.Module):
    """Two features: the mean grey of the left and of the right half of an image, each doubled and 0 or more."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        left, right = images.split(images.shape[-1] // 2, dim=-1)
        return 2.0 * torch.stack([left.mean((1, 2, 3)), right.mean((1, 2, 3))], 1).clamp(min=0.0)


def drawn_features(rows: int, seed: int, size: int = 6, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Features >= 0 of Gaussian classes, and their labels."""
    stream = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (rows,), generator=stream)
    middle = torch.randn(classes, size, generator=torch.Generator().manual_seed(99)) + 2.0
    return (middle[labels] + 0.5 * torch.randn(rows, size, generator=stream)).clamp(min=0.0), labels


def test_moments_are_counts_sums_and_products_of_features_by_image() -> None:
    """Features (1, 2) and (3, 0) of class 0, (1, 1) of class 2: Σ h hᵀ = [[1+9+1, 2+0+1], [3, 4+0+1]], all of it by 3 images."""
    found = moments_of(torch.tensor([[1.0, 2.0], [3.0, 0.0], [1.0, 1.0]]), torch.tensor([0, 0, 2]), 3)
    assert torch.allclose(3 * found[COUNTS], torch.tensor([2.0, 0.0, 1.0]))
    assert torch.allclose(3 * found[SUMS], torch.tensor([[4.0, 2.0], [0.0, 0.0], [1.0, 1.0]]))
    assert torch.allclose(3 * found[MOMENT], torch.tensor([11.0, 3.0, 5.0]))


def test_mirror_images_count_where_the_spec_flips_and_fit_the_layout() -> None:
    """White (2) at the left and black (-2, cut to 0) at the right: (4, 0); mirrored (0, 4): half of each."""
    spec = cases.quick_spec("fedavg", augment_flip=True)
    image = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    image[..., :8] = 255
    found = feature_moments(TwoHalves(), ImageSet(image, torch.tensor([1]), cases.CLASSES), cases.context(spec))
    assert torch.allclose(found[SUMS][1], torch.tensor([2.0, 2.0]))
    assert torch.allclose(found[MOMENT], torch.tensor([8.0, 0.0, 8.0]))
    of_network = feature_moments(
        load_part(spec, Part.EXTRACTOR, initial_parts(spec, b"x")[Part.EXTRACTOR]),
        cases.bright_images(9, 0),
        cases.context(spec),
    )
    layouts = {one.name: one for one in moments_layout(spec)}
    assert {name: tuple(tensor.shape) for name, tensor in of_network.items()} == {
        name: one.shape for name, one in layouts.items()
    }
    for name, tensor in of_network.items():
        low, high = layouts[name].low, layouts[name].high
        assert present(low) <= float(tensor.min()) <= float(tensor.max()) <= present(high)


def test_features_above_the_clip_are_cut_and_the_owner_is_warned() -> None:
    spec = cases.quick_spec("fedavg")
    clipped = spec.model_copy(update={"params": {**spec.params, "clip": 1.5}})
    white = ImageSet(torch.full((4, 1, 16, 16), 255, dtype=torch.uint8), torch.tensor([0, 1, 2, 0]), cases.CLASSES)
    warnings: list[str] = []
    ctx = replace(cases.context(clipped), callbacks=Callbacks(warn=warnings.append))
    assert torch.allclose(feature_moments(TwoHalves(), white, ctx)[MOMENT], torch.full((3,), 1.5**2))
    (warning,) = warnings
    assert "100.0% of the features exceed 1.5" in warning
    assert "--set clip=N" in warning


def test_means_and_covariance_come_out_of_the_moments() -> None:
    features, labels = drawn_features(400, 0)
    found = present(class_gaussians(moments_of(features, labels, 3)))
    about = features.double() - found.means[labels]
    covariance = found.vectors * found.values @ found.vectors.T
    assert torch.allclose(covariance, about.T @ about / 400, atol=1e-5)
    assert torch.allclose(found.means[1], features[labels == 1].double().mean(0), atol=1e-5)
    assert found.present.tolist() == [0, 1, 2]


def test_moments_of_no_images_are_none_and_broken_ones_an_error() -> None:
    features, labels = drawn_features(30, 0)
    moments = moments_of(features, labels, 3)
    assert class_gaussians({name: torch.zeros_like(one) for name, one in moments.items()}) is None
    for broken in ({COUNTS: moments[COUNTS] * 2}, {MOMENT: moments[MOMENT] * torch.nan}):
        with pytest.raises(DivergedError, match="moments are of no images"):
            class_gaussians({**moments, **broken})


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 4), min_size=60, max_size=60), st.integers(0, 1000), st.sampled_from((0.1, 0.5, 0.9)))
def test_the_head_of_merged_moments_is_that_of_pooled_features_however_images_are_dealt(
    owners: list[int], seed: int, shrinkage: float
) -> None:
    features, labels = drawn_features(60, seed)
    owner = torch.tensor(owners)
    clients = [owner == one for one in set(owners)]
    merged = weighted_average((int(rows.sum()), moments_of(features[rows], labels[rows], 3)) for rows in clients)
    head = lda_head(present(class_gaussians(merged)), torch.full((3,), 1 / 3).log(), shrinkage, 1.0, "")
    pooled = pooled_head(features, labels, shrinkage)
    for name, tensor in head.items():
        assert torch.allclose(tensor.double(), pooled[name], rtol=1e-5, atol=1e-5 * float(pooled[name].abs().max()))


def pooled_head(features: torch.Tensor, labels: torch.Tensor, shrinkage: float) -> dict[str, torch.Tensor]:
    """The head from the features themselves, by the textbook."""
    rows = features.double()
    means = torch.stack([rows[labels == one].mean(0) for one in range(3)])
    about = rows - means[labels]
    covariance = about.T @ about / len(rows)
    size = len(covariance)
    shrunk = (1 - shrinkage) * covariance + shrinkage * covariance.trace() / size * torch.eye(size, dtype=torch.float64)
    middle = means - rows.mean(0)
    weight = torch.linalg.solve(shrunk, middle.T).T
    bias = -0.5 * (weight * middle).sum(1) - weight @ rows.mean(0) - torch.tensor(3.0).double().log()
    return {"weight": weight, "bias": bias}


def test_a_class_that_nobody_has_is_never_chosen_and_the_prior_of_a_box_moves_its_answers() -> None:
    features, labels = drawn_features(200, 1)
    labels = labels.clamp(max=1)
    classes = present(class_gaussians(moments_of(features, labels, 3)))
    even = lda_head(classes, torch.zeros(3), 0.5, 2.0, "")
    assert int((features @ even["weight"].T + even["bias"]).argmax(1).max()) == 1
    skewed = lda_head(classes, torch.tensor([2.0, 0.0, 9.0]), 0.5, 2.0, "")
    assert torch.equal(even["weight"], skewed["weight"])
    assert torch.allclose((skewed["bias"] - even["bias"])[:2], torch.tensor([2.0, 0.0]), atol=1e-4)


def test_validation_chooses_the_temperature_which_gives_the_prior_its_weight() -> None:
    features, labels = drawn_features(200, 2)
    classes = present(class_gaussians(moments_of(features, labels, 3)))
    prior = torch.tensor([1.0, 0.0, 0.0])
    cold, warm = (lda_head(classes, prior, 0.5, one, "1.") for one in (1.0, 8.0))
    assert torch.allclose(cold["1.weight"], 8.0 * warm["1.weight"])
    assert torch.allclose(cold["1.bias"] - prior, 8.0 * (warm["1.bias"] - prior), atol=1e-4)
    chosen = chosen_head(
        classes, prior, 0.5, "1.", lambda head: float((head["1.weight"] - warm["1.weight"]).abs().sum())
    )
    assert cases.same(chosen, warm)
    assert cases.same(chosen_head(classes, prior, 0.5, "1.", None), lda_head(classes, prior, 0.5, 4.0, "1."))


@pytest.mark.parametrize(("network", "layer"), [("lenet5_relu", ""), ("cnn_bn", ""), ("resnet18+project:8", "1.")])
def test_a_classifier_of_one_linear_layer_is_known_from_one_of_several(network: str, layer: str) -> None:
    image = cases.GREY.model_copy(update={"height": 32, "width": 32})
    assert linear_layer(cases.plan("fedavg", NetworkChoice(split=network), image)) == layer


def test_calibration_repeats_bit_for_bit_and_teaches_a_head_the_classes() -> None:
    spec = cases.quick_spec("fedavg")
    head = initial_parts(spec, b"x")[Part.CLASSIFIER]
    features, labels = drawn_features(300, 3, size=16)
    classes = present(class_gaussians(moments_of(features, labels, 3)))
    ctx = cases.context(spec)
    found = calibrated(head, classes, 1.0, ctx)
    assert cases.same(found, calibrated(head, classes, 3e-4, ctx))
    assert not cases.same(found, calibrated(head, classes, 1e-4, ctx))
    assert not cases.same(found, calibrated(head, classes, 1.0, replace(ctx, round=4)))

    def accuracy(weights: Weights) -> float:
        logits = load_part(spec, Part.CLASSIFIER, weights).eval()(features.view(-1, 16, 1, 1))
        return float((logits.argmax(1) == labels).float().mean())

    assert accuracy(head) < 0.7
    assert accuracy(found) > 0.95
