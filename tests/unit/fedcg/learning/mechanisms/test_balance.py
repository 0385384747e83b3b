"""The label distribution stays out of the classifier that is sent, and in the one that is used."""

import math
from typing import cast

import pytest
import torch
from torch import nn

from fedcg.learning.errors import PrivacyError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms import protected_round as balance
from fedcg.learning.mechanisms.protected_round import (
    last_bias,
    log_prior,
    neutral_parts,
    personal_parts,
    protected_round,
)
from fedcg.learning.method import Aggregate, LocalResult, RoundContext
from fedcg.learning.methods import fedcg
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.registry import get_method
from fedcg.learning.training.batches import FeatureSource
from fedcg.learning.training.stage import run_stage
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import bright_images, context, quick_spec, same_parts
from tests.support.learning.stub_networks import GivenFeatures

LOGITS = PrivacySettings(balance="logits")
BIAS = "5.bias"  # of lenet5_relu's classifier


def unbalanced(images: int = 24) -> ImageSet:
    """Images of the first two classes, three quarters of them of the first."""
    every = bright_images(4 * images, 0)
    first, second = ((every.labels == label).nonzero().flatten() for label in (0, 1))
    return every.rows(torch.cat([first[: 3 * images // 4], second[: images // 4]]))


def round_of(name: str, privacy: PrivacySettings, data: ImageSet) -> tuple[LocalResult, Aggregate, RoundContext]:
    spec, method = quick_spec(name), get_method(name)
    initial = initial_parts(spec, b"cohort")
    aggregate = method.init_server(spec, initial).aggregate
    ctx = RoundContext(spec, 2, 1, context(spec).streams, privacy=privacy)
    return protected_round(method, method.init_client(spec, initial), data, aggregate, ctx), aggregate, ctx


def test_the_prior_counts_one_image_more_of_each_class() -> None:
    assert log_prior((3, 0, 1)).tolist() == pytest.approx([math.log(4 / 7), math.log(1 / 7), math.log(2 / 7)])


@pytest.mark.parametrize("name", ["fedcg", "fedavg", "fedsplit", "fedgen", "fedmd_cg"])
def test_with_logit_adjustment_only_the_kept_classifier_has_the_prior(name: str) -> None:
    data = unbalanced()
    result, aggregate, ctx = round_of(name, LOGITS, data)
    kept, sent = result.private.parts[Part.CLASSIFIER], result.shared.parts[Part.CLASSIFIER]
    assert torch.allclose(kept[BIAS] - sent[BIAS], log_prior(data.label_counts()), atol=1e-6)
    assert all(torch.equal(kept[key], sent[key]) for key in kept if key != BIAS)
    # The next round starts from the aggregate with the prior, and so its training sees what the personal model is.
    start = personal_parts(aggregate.parts, data, ctx)
    assert torch.allclose(
        start[Part.CLASSIFIER][BIAS] - aggregate.parts[Part.CLASSIFIER][BIAS], log_prior(data.label_counts())
    )
    assert torch.allclose(neutral_parts(result.private.parts, data, ctx)[Part.CLASSIFIER][BIAS], sent[BIAS], atol=1e-6)


def test_the_sent_classifier_leans_less_to_frequent_labels_and_the_kept_one_as_before() -> None:
    data = unbalanced()
    plain, _, _ = round_of("fedavg", PrivacySettings(), data)
    adjusted, _, _ = round_of("fedavg", LOGITS, data)
    leaning = plain.shared.parts[Part.CLASSIFIER][BIAS]
    sent = adjusted.shared.parts[Part.CLASSIFIER][BIAS]
    kept = adjusted.private.parts[Part.CLASSIFIER][BIAS]
    spread = [float(bias[0] - bias[2]) for bias in (sent, leaning, kept)]
    assert spread[0] < spread[1] < spread[2]


@pytest.mark.parametrize("name", ["fedper", "local"])
def test_a_method_that_keeps_its_classifier_is_not_changed(name: str) -> None:
    plain, _, _ = round_of(name, PrivacySettings(), unbalanced())
    for privacy in (LOGITS, PrivacySettings(balance="bias")):
        result, _, ctx = round_of(name, privacy, unbalanced())
        assert same_parts(result.private.parts, plain.private.parts)
        assert same_parts(result.shared.parts, plain.shared.parts)
        assert neutral_parts(result.private.parts, unbalanced(), ctx) is result.private.parts


def test_a_removed_bias_is_sent_as_it_came() -> None:
    plain, aggregate, _ = round_of("fedcg", PrivacySettings(), unbalanced())
    result, _, _ = round_of("fedcg", PrivacySettings(balance="bias"), unbalanced())
    sent = result.shared.parts[Part.CLASSIFIER]
    assert torch.equal(sent[BIAS], aggregate.parts[Part.CLASSIFIER][BIAS])
    assert not torch.equal(plain.shared.parts[Part.CLASSIFIER][BIAS], sent[BIAS])
    assert all(torch.equal(sent[key], plain.shared.parts[Part.CLASSIFIER][key]) for key in sent if key != BIAS)
    assert same_parts(result.private.parts, plain.private.parts)


class Asked(nn.Module):
    """A generator that keeps the labels it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(2))
        self.labels: list[int] = []

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.labels += labels.tolist()
        return self.value + noise[:, :2]


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.line(features).squeeze(1)
        return out


@pytest.mark.parametrize(
    ("privacy", "classes"),
    [
        (PrivacySettings(), {0}),
        (LOGITS, {0, 1, 2}),
        (PrivacySettings.model_validate({"dp_sgd": {"noise_multiplier": 1.0}}), {0, 1, 2}),
    ],
)
def test_the_generator_asks_for_all_labels_alike_where_they_are_to_stay_secret(
    privacy: PrivacySettings, classes: set[int]
) -> None:
    spec, generator = quick_spec("fedcg"), Asked()
    ctx = RoundContext(spec, 2, 1, context(spec).streams, privacy=privacy)
    source = cast("FeatureSource", GivenFeatures(torch.zeros(40, 2)))  # all of class 0
    params = fedcg.FedcgParams.model_validate({**spec.params, "epochs": 8})
    run_stage(fedcg.adversarial(generator, Sum(), source, params, ctx), ctx)
    counts = torch.bincount(torch.tensor(generator.labels), minlength=3)
    assert {label for label in range(3) if counts[label]} == classes
    if len(classes) == 3:
        assert float(counts.min() / counts.max()) > 0.6


def test_a_classifier_without_a_last_bias_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = quick_spec("fedavg")
    assert last_bias(spec) == BIAS
    for ending in (nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(4, 7)):
        chain = nn.Sequential(nn.Linear(4, 4), ending)
        monkeypatch.setattr(balance, "skeleton", lambda spec, part, chain=chain: chain)
        with pytest.raises(PrivacyError, match=r"network\.split = lenet5_relu"):
            last_bias(spec)
