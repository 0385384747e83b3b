"""Clipping, noise, pruning and noisy counts against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_client.config import PolicySection
from edge_client.firewall import _allowed_report
from fedcg.learning.mechanisms.protected_round import noisy_counts, pruned, reduced_update
from fedcg.learning.method import Weights
from fedcg.learning.privacy import OFF, PrivacySettings
from fedcg.learning.training.optimisers import NoisyOptimiser
from fedcg.wire.parts import Part, Report, ReportField
from tests.support.learning.learning_cases import quick_spec, same_parts

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


@given(
    st.lists(st.integers(0, 50), min_size=3, max_size=3).filter(any),
    st.floats(0.1, 30.0),
    st.integers(0, 1000),
)
def test_noisy_counts_pass_the_firewall(counts: list[int], scale: float, seed: int) -> None:
    report = Report(examples=sum(counts), label_counts=tuple(counts), loss=0.5)
    noisy = noisy_counts(report, scale, stream(seed))
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
    # A step of plain descent at rate 1 from 0 on a gradient of 2 goes to -(2 + noise).
    weight = torch.nn.Parameter(torch.zeros(20_000))
    optimiser = NoisyOptimiser(torch.optim.SGD([weight], lr=1.0), 0.1, stream(4))
    optimiser.zero_grad()
    (2.0 * weight.sum()).backward()
    optimiser.step()
    moved = weight.detach()
    assert float(moved.mean()) == pytest.approx(-2.0, abs=0.01)
    assert float(moved.std()) == pytest.approx(0.1, rel=0.03)
