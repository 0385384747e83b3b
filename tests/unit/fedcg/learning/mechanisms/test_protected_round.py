"""Mechanisms of a client: how they are asked for, clipping, noise and counts by hand, and the label distribution that stays home."""

import math
import subprocess
import sys
from dataclasses import replace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from edge_client.config import PolicySection
from edge_client.firewall import _allowed_report
from fedcg.learning.errors import PrivacyError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms import protected_round as balance
from fedcg.learning.mechanisms.protected_round import (
    last_bias,
    log_prior,
    neutral_parts,
    noisy_counts,
    personal_parts,
    protected_round,
    pruned,
    reduced_update,
)
from fedcg.learning.method import Aggregate, LocalResult, RoundContext, Weights
from fedcg.learning.methods import fedcg
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.privacy import OFF, PrivacySettings, parse_mechanisms
from fedcg.learning.registry import get_method
from fedcg.learning.training.batches import FeatureSource
from fedcg.learning.training.optimisers import add_gradient_noise
from fedcg.learning.training.stage import run_stage
from fedcg.wire.parts import Part, Report, ReportField
from tests.support.learning.learning_cases import bright_images, context, local_round_of, quick_spec, same_parts
from tests.support.learning.networks import GivenFeatures, LinearJudge

Parts = dict[Part, Weights]


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parts_of(classifier: list[float], generator: list[float], batches: int = 7) -> Parts:
    return {
        Part.CLASSIFIER: {"weight": torch.tensor(classifier)},
        Part.GENERATOR: {"weight": torch.tensor(generator), "num_batches_tracked": torch.tensor(batches)},
    }


BASE = parts_of([10.0, 20.0], [-1.0], 5)


def test_the_distance_of_all_parts_together_is_clipped() -> None:
    # Differences (3, 0), (4): norm 5, so that a clip of 1 leaves a fifth of each.
    clipped = reduced_update(parts_of([13.0, 20.0], [3.0]), BASE, PrivacySettings(update_clip=1.0), stream())
    assert clipped[Part.CLASSIFIER]["weight"].tolist() == pytest.approx([10.6, 20.0])
    assert clipped[Part.GENERATOR]["weight"].tolist() == pytest.approx([-0.2])
    assert int(clipped[Part.GENERATOR]["num_batches_tracked"]) == 7
    wide = reduced_update(parts_of([13.0, 20.0], [3.0]), BASE, PrivacySettings(update_clip=5.1), stream())
    assert wide[Part.CLASSIFIER]["weight"].tolist() == [13.0, 20.0]


def test_an_update_equal_to_its_aggregate_can_be_clipped() -> None:
    assert same_parts(reduced_update(BASE, BASE, PrivacySettings(update_clip=1.0), stream()), BASE)


def test_the_smallest_numbers_of_a_difference_become_zero() -> None:
    assert pruned(torch.tensor([[0.5, -3.0], [-0.1, 2.0]]), 0.5).tolist() == [[0.0, -3.0], [0.0, 2.0]]
    assert pruned(torch.tensor([1.0, 2.0, 3.0]), 0.3).tolist() == [1.0, 2.0, 3.0]  # floor(0.9) numbers
    sent = reduced_update(parts_of([13.0, 19.0], [3.0]), BASE, PrivacySettings(prune=0.5), stream())
    assert sent[Part.CLASSIFIER]["weight"].tolist() == [13.0, 20.0]
    assert sent[Part.GENERATOR]["weight"].tolist() == [3.0]


def test_noise_on_an_update_has_the_deviation_asked_for_and_its_own_stream() -> None:
    base: Parts = {Part.CLASSIFIER: {"weight": torch.zeros(20_000)}}
    privacy = PrivacySettings(update_noise=0.25)
    noisy = reduced_update(base, base, privacy, stream(1))[Part.CLASSIFIER]["weight"]
    assert float(noisy.std()) == pytest.approx(0.25, rel=0.03)
    assert float(noisy.mean()) == pytest.approx(0.0, abs=0.01)
    assert torch.equal(noisy, reduced_update(base, base, privacy, stream(1))[Part.CLASSIFIER]["weight"])
    assert not torch.equal(noisy, reduced_update(base, base, privacy, stream(2))[Part.CLASSIFIER]["weight"])


def test_noise_never_makes_a_variance_negative() -> None:
    base: Parts = {Part.GENERATOR: {"1.running_var": torch.full((500,), 0.1), "1.running_mean": torch.zeros(500)}}
    noisy = reduced_update(base, base, PrivacySettings(update_noise=1.0), stream())[Part.GENERATOR]
    assert float(noisy["1.running_var"].min()) == 0.0
    assert float(noisy["1.running_mean"].min()) < 0.0


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20))
def test_what_is_off_gives_back_the_very_same_update(numbers: list[float]) -> None:
    update: Parts = {Part.CLASSIFIER: {"weight": torch.tensor(numbers)}}
    base: Parts = {Part.CLASSIFIER: {"weight": torch.ones(len(numbers))}}
    assert reduced_update(update, base, OFF, stream()) is update


@given(st.lists(st.integers(0, 50), min_size=3, max_size=3).filter(any), st.floats(0.1, 30.0), st.integers(0, 1000))
def test_noisy_counts_pass_the_firewall(counts: list[int], scale: float, seed: int) -> None:
    noisy = noisy_counts(Report(examples=sum(counts), label_counts=tuple(counts), loss=0.5), scale, stream(seed))
    assert noisy.label_counts is not None
    assert min(noisy.label_counts) >= 0
    assert sum(noisy.label_counts) == noisy.examples
    policy = PolicySection(allow_report=frozenset({ReportField.EXAMPLES, ReportField.LABEL_COUNTS}))
    allowed = _allowed_report(noisy, quick_spec("fedmd_cg"), policy, "box")
    assert (allowed.label_counts, allowed.examples) == (noisy.label_counts, noisy.examples)


def test_count_noise_is_discrete_laplace() -> None:
    # P(k) = (1 - a) / (1 + a) * a^|k| with a = exp(-1 / scale); at scale 2: a = 0.60653, P(0) = 0.24492, variance 2a / (1 - a)^2.
    scale, a = 2.0, math.exp(-0.5)
    report = Report(examples=20_000_000, label_counts=(1000,) * 20_000)
    noisy = noisy_counts(report, scale, stream(3)).label_counts
    assert noisy is not None
    added = torch.tensor(noisy) - 1000
    assert float((added == 0).double().mean()) == pytest.approx((1 - a) / (1 + a), abs=0.01)
    assert float((added == 2).double().mean()) == pytest.approx((1 - a) / (1 + a) * a**2, abs=0.01)
    assert float(added.double().var()) == pytest.approx(2 * a / (1 - a) ** 2, rel=0.05)


def test_a_report_without_counts_keeps_its_examples() -> None:
    report = Report(examples=12, loss=0.5)
    assert noisy_counts(report, 3.0, stream()) is report


def test_a_gradients_noise_has_the_deviation_asked_for() -> None:
    weight = torch.nn.Parameter(torch.zeros(20_000))
    (2.0 * weight.sum()).backward()
    add_gradient_noise(torch.optim.SGD([weight], lr=1.0), 0.1, stream(4))
    assert weight.grad is not None
    assert float(weight.grad.mean()) == pytest.approx(2.0, abs=0.01)
    assert float(weight.grad.std()) == pytest.approx(0.1, rel=0.03)


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


@pytest.mark.parametrize("name", ["fedper", "local"])
def test_a_method_that_keeps_its_classifier_is_not_changed(name: str) -> None:
    plain, _, _ = round_of(name, PrivacySettings(), unbalanced())
    for privacy in (LOGITS, PrivacySettings(balance="bias")):
        result, _, ctx = round_of(name, privacy, unbalanced())
        assert same_parts(result.private.parts, plain.private.parts)
        assert same_parts(result.shared.parts, plain.shared.parts)
        assert neutral_parts(result.private.parts, unbalanced(), ctx) is result.private.parts


def test_a_removed_bias_and_a_clipped_update_are_sent_as_they_came_and_the_client_keeps_its_own() -> None:
    plain, aggregate, _ = round_of("fedcg", PrivacySettings(), unbalanced())
    result, _, _ = round_of("fedcg", PrivacySettings(balance="bias"), unbalanced())
    sent = result.shared.parts[Part.CLASSIFIER]
    assert torch.equal(sent[BIAS], aggregate.parts[Part.CLASSIFIER][BIAS])
    assert not torch.equal(plain.shared.parts[Part.CLASSIFIER][BIAS], sent[BIAS])
    assert all(torch.equal(sent[key], plain.shared.parts[Part.CLASSIFIER][key]) for key in sent if key != BIAS)
    clipped, _, _ = round_of("fedcg", PrivacySettings(update_clip=1e-9), unbalanced())
    assert torch.allclose(clipped.shared.parts[Part.CLASSIFIER][BIAS], aggregate.parts[Part.CLASSIFIER][BIAS])
    for kept in (result, clipped):
        assert same_parts(kept.private.parts, plain.private.parts)


class Asked(nn.Module):
    """A generator that keeps the labels it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(2))
        self.labels: list[int] = []

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.labels += labels.tolist()
        return self.value + noise[:, :2]


@pytest.mark.parametrize(
    ("privacy", "classes"),
    [
        (PrivacySettings(), {0}),
        (LOGITS, {0, 1, 2}),
        (PrivacySettings.model_validate({"dp_sgd": {"noise_multiplier": 1.0}}), {0, 1, 2}),
    ],
)
def test_generators_ask_for_all_labels_alike_where_they_are_secret(privacy: PrivacySettings, classes: set[int]) -> None:
    spec, generator = quick_spec("fedcg"), Asked()
    ctx = RoundContext(spec, 2, 1, context(spec).streams, privacy=privacy)
    source = cast("FeatureSource", GivenFeatures(torch.zeros(40, 2)))  # all of class 0
    params = fedcg.FedcgParams.model_validate({**spec.params, "epochs": 8})
    run_stage(fedcg.adversarial(generator, LinearJudge(), source, params, ctx), ctx)
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


def test_settings_are_read_from_pairs_and_name_a_run() -> None:
    found = parse_mechanisms(["update_clip=1", "dp_sgd.noise_multiplier=1.1", "balance=bias"])
    assert (found.update_clip, found.balance) == (1.0, "bias")
    assert found.dp_sgd is not None
    assert (found.dp_sgd.noise_multiplier, found.dp_sgd.clip, found.dp_sgd.budget_epsilon) == (1.1, 1.0, None)
    assert found.label == "update_clip=1.0-balance=bias-dp_sgd.noise_multiplier=1.1"
    assert (parse_mechanisms([]), OFF.label, OFF.is_on, found.is_on) == (OFF, "", False, True)


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        (["dp_sgd.=1"], "dp_sgd.KEY=VALUE"),
        (["clip=1"], r"--mechanism clip: there is no such setting \((known: |did you mean `)update_clip.*dp_sgd"),
        (["dp_sgd.sigma=1"], "--mechanism dp_sgd.sigma: there is no such setting .known: noise_multiplier, "),
        (["dp_sgd.clip=2"], "--mechanism dp_sgd.noise_multiplier: is missing"),
        (["prune=1"], "--mechanism prune: .*less than 1"),
        (["update_clip=0", "dropout=-1"], "--mechanism update_clip: .*; --mechanism dropout: "),
        (["dp_sgd.noise_multiplier=1", "gradient_noise=1"], "leave gradient_noise out"),
        (["dp_sgd.noise_multiplier=1", "balance=logits"], "exact label distribution"),
    ],
)
def test_bad_settings_are_refused_by_name(pairs: list[str], reason: str) -> None:
    with pytest.raises(PrivacyError, match=reason):
        parse_mechanisms(pairs)


def test_settings_refuse_unknown_fields_and_need_no_torch() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        PrivacySettings.model_validate({"updateclip": 1})
    code = "import sys, fedcg.learning.privacy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_mechanisms_a_round_is_the_methods_own() -> None:
    spec, method, data = quick_spec("local"), get_method("local"), bright_images(8, 0)
    state, own = method.init_client(spec, initial_parts(spec, b"cohort")), local_round_of(spec, data)
    done = protected_round(replace(method, local_round=lambda *given: own), state, data, None, context(spec))
    assert (done.private, done.report, done.shared) == (own.private, own.report, own.shared)
    assert done.private is own.private


def test_batch_norms_counters_do_not_tell_the_number_of_images() -> None:
    spec, method, data = quick_spec("fedcg"), get_method("fedcg"), bright_images(8, 0)
    state = method.init_client(spec, initial_parts(spec, b"cohort"))
    done = protected_round(method, state, data, Aggregate(dict(state.parts)), context(spec))
    name = "body.1.num_batches_tracked"
    assert int(done.private.parts[Part.GENERATOR][name]) > int(done.shared.parts[Part.GENERATOR][name]) == 0
