"""The laws every method keeps, and what each local half does, stage by stage."""

from __future__ import annotations

import math
from itertools import permutations
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from fedcg.learning.aggregation.averaging import average_updates
from fedcg.learning.errors import DataError, UnknownMethodError
from fedcg.learning.method import Aggregate, DivergedError, LabelCounts, LocalResult, TrainingParams
from fedcg.learning.methods import fedcg, fedmd_cg
from fedcg.learning.networks import load_part
from fedcg.learning.networks.initial_weights import initial_parts, shadow_spec
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.simulation.simulation import update_of
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.learning.spec import ParameterValue
from fedcg.learning.training.augmentation import Augmenter
from fedcg.learning.training.losses import paired_labels
from fedcg.learning.training.training_loop import (
    Block,
    FeatureSource,
    Penalty,
    extract_features,
    index_blocks,
    steps_of,
    train_classifier,
)
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import bright_images, context, quick_spec, same

METHODS = method_names()


def one_round(name: str, seed: int = 0, round_number: int = 2, **params: ParameterValue) -> LocalResult:
    spec = quick_spec(name, augment_flip=True, **params)
    method, initial = get_method(name), initial_parts(spec, b"cohort")
    incoming = method.init_server(spec, initial).aggregate
    ctx = context(spec, round_number, f"device {seed}".encode())
    return method.local_round(method.init_client(spec, initial), bright_images(25 + 6 * seed, seed), incoming, ctx)


def all_tensors(result: LocalResult) -> dict[str, torch.Tensor]:
    both = {"shared": result.shared.parts, "private": result.private.parts}
    return {f"{half}/{p.value}/{n}": t for half, parts in both.items() for p, w in parts.items() for n, t in w.items()}


@pytest.mark.parametrize("name", METHODS)
def test_a_local_round_repeats_bit_for_bit_whatever_the_global_random_state(name: str) -> None:
    torch.manual_seed(1)
    first = one_round(name)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = one_round(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(all_tensors(first), all_tensors(second))
    assert first.report == second.report


@pytest.mark.parametrize("name", METHODS)
def test_shared_and_private_results_hold_what_the_method_says_in_storage_of_their_own(name: str) -> None:
    method, result = get_method(name), one_round(name)
    assert frozenset(result.shared.parts) == method.shared_up
    assert frozenset(result.private.parts) == method.parts
    places = [tensor.data_ptr() for tensor in all_tensors(result).values() if tensor.numel()]
    assert len(set(places)) == len(places)
    assert result.report.examples == 25
    assert (result.report.label_counts is not None) == (method.label_counts is not LabelCounts.NEVER)


@pytest.mark.parametrize("name", METHODS)
def test_a_local_round_changes_neither_its_state_nor_the_aggregate_nor_the_data(name: str) -> None:
    spec = quick_spec(name)
    method, initial, data = get_method(name), initial_parts(spec, b"cohort"), bright_images(24, 0)
    state, incoming = method.init_client(spec, initial), method.init_server(spec, initial).aggregate
    images = data.images.clone()
    result = method.local_round(state, data, incoming, context(spec))
    untouched = initial_parts(spec, b"cohort")
    assert all(same(weights, untouched[part]) for part, weights in state.parts.items())
    assert all(same(weights, untouched[part]) for part, weights in incoming.parts.items())
    assert torch.equal(data.images, images)
    assert not any(
        same(result.private.parts[part], untouched[part]) for part in method.shared_up | method.private_parts
    )


@pytest.mark.parametrize(
    ("name", "params"),
    [(name, {}) for name in METHODS]
    + [("fedmd_cg", {"aggregation": kind}) for kind in ("average", "kd")]
    + [("fedcg", {"aggregation": kind}) for kind in ("average", "crossed_kd")]
    + [("fedmd_cg", {"bank": "arrival"}), ("fedmd_cg", {"exact_clients": 1})],
)
def test_the_order_of_arrival_and_a_restart_never_change_the_aggregate(
    name: str, params: dict[str, ParameterValue]
) -> None:
    spec, method = quick_spec(name, **params), get_method(name)
    server = method.init_server(spec, initial_parts(spec, b"cohort"))
    updates = {f"c{seed}": update_of(f"c{seed}", one_round(name, seed)) for seed in range(3)}
    outcomes = []
    for arrived in [*permutations(updates), ("c1",)]:
        merge = method.aggregator(server, context(spec, root=b"coordinator"), MemorySpill())
        for client in arrived:
            merge.add(updates[client])
            merge.add(updates[client])
        loaders = {client: (lambda client=client: updates[client]) for client in reversed(arrived)}
        loaders |= {client: (lambda client=client: updates[client]) for client in updates}
        outcomes.append(merge.finish(loaders)[0])
    for other in outcomes[1:]:
        assert other.label_distribution == outcomes[0].label_distribution
        assert all(same(weights, outcomes[0].parts[part]) for part, weights in other.parts.items())
    assert frozenset(outcomes[0].parts) == method.shared_down


@pytest.mark.parametrize("name", METHODS)
def test_a_loss_that_is_not_finite_ends_the_round(name: str) -> None:
    with pytest.raises(DivergedError, match="still stands"):
        one_round(name, optimiser="sgd", lr=1e12)


@pytest.mark.parametrize("name", METHODS)
def test_one_image_is_not_enough(name: str) -> None:
    spec, method = quick_spec(name), get_method(name)
    initial = initial_parts(spec, b"cohort")
    with pytest.raises(DataError, match="at least 2"):
        method.local_round(method.init_client(spec, initial), bright_images(1, 0), None, context(spec))


def test_an_unknown_method_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(UnknownMethodError, match=r"local.*Did you mean 'fedcg'"):
        get_method("fedgc")


@pytest.mark.parametrize("name", ["fedcg", "fedmd_cg"])
def test_in_the_first_round_a_client_trains_exactly_as_its_shadow(name: str) -> None:
    result = one_round(name, round_number=1)
    spec = shadow_spec(quick_spec(name, augment_flip=True))
    local = get_method("local")
    state = local.init_client(spec, initial_parts(spec, b"cohort"))
    alone = local.local_round(state, bright_images(25, 0), None, context(spec, 1, b"device 0"))
    for part in (Part.EXTRACTOR, Part.CLASSIFIER):
        assert same(result.private.parts[part], alone.private.parts[part])


def test_steps_override_epochs_and_an_odd_last_batch_counts() -> None:
    assert steps_of(TrainingParams(epochs=3, batch_size=8), 25) == 9  # 24 of 25 rows: a last batch of one is dropped
    assert steps_of(TrainingParams(epochs=3, batch_size=8), 26) == 12
    assert steps_of(TrainingParams(epochs=3, batch_size=8, steps=5), 26) == 5
    blocks = list(index_blocks(26, 8, 6, torch.Generator().manual_seed(0)))
    assert [len(block) for block in blocks] == [26, 16]


def test_fedcg_loads_both_shared_parts_and_fedmd_cg_only_the_classifier() -> None:
    for name, changed in (("fedcg", True), ("fedmd_cg", False)):
        spec = quick_spec(name, gan_lr=1e-12) if name == "fedcg" else quick_spec(name, generator_lr=1e-12)
        method, initial = get_method(name), initial_parts(spec, b"cohort")
        other = initial_parts(spec.model_copy(update={"seed": 99}), b"cohort")
        incoming = Aggregate({part: other[part] for part in (Part.GENERATOR, Part.CLASSIFIER)})
        result = method.local_round(method.init_client(spec, initial), bright_images(24, 0), incoming, context(spec))
        key = "body.0.weight"
        source = other if changed else initial
        assert torch.allclose(result.private.parts[Part.GENERATOR][key], source[Part.GENERATOR][key], atol=1e-6)
        moved = result.private.parts[Part.CLASSIFIER]["1.weight"] - other[Part.CLASSIFIER]["1.weight"]
        assert moved.abs().max().item() < 0.02


def taught(name: str, round_number: int, incoming: Aggregate, **params: ParameterValue) -> LocalResult:
    spec = quick_spec(name, **params)
    method, initial = get_method(name), initial_parts(spec, b"cohort")
    return method.local_round(
        method.init_client(spec, initial), bright_images(24, 0), incoming, context(spec, round_number)
    )


@pytest.mark.parametrize(
    ("name", "params"),
    [("fedcg", {}), ("fedmd_cg", {"lambda1": 0.0, "lambda3": 0.0}), ("fedmd_cg", {"lambda2": 0.0, "lambda3": 0.0})],
)
def test_the_downloaded_generator_teaches_from_the_second_round_on(
    name: str, params: dict[str, ParameterValue]
) -> None:
    spec = quick_spec(name)
    one, other = (initial_parts(spec.model_copy(update={"seed": seed}), b"cohort") for seed in (5, 99))
    even = (1 / 3, 1 / 3, 1 / 3)
    incoming = [
        Aggregate({Part.CLASSIFIER: one[Part.CLASSIFIER], Part.GENERATOR: source[Part.GENERATOR]}, even)
        for source in (one, other)
    ]
    for round_number, expected in ((1, True), (2, False)):
        first, second = (taught(name, round_number, some, **params).private.parts for some in incoming)
        for part in (Part.EXTRACTOR, Part.CLASSIFIER):
            assert same(first[part], second[part]) == expected


def test_fedmd_cg_replays_the_label_distribution_that_came_down() -> None:
    initial = initial_parts(quick_spec("fedmd_cg"), b"cohort")
    down = {part: initial[part] for part in (Part.GENERATOR, Part.CLASSIFIER)}
    for replay, expected in ((0.0, True), (1.0, False)):
        first, second = (
            taught("fedmd_cg", 2, Aggregate(down, published), lambda1=replay).private.parts[Part.CLASSIFIER]
            for published in ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0))
        )
        assert same(first, second) == expected


class Echo(nn.Module):
    """A generator whose three features all are the label it was asked for."""

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return labels.to(torch.float32).unsqueeze(1).expand(-1, 3)


def test_each_image_is_compared_with_a_generated_feature_of_its_own_label() -> None:
    labels = [2, 0, 1, 2, 2]
    features = Echo()(torch.zeros(5, 1), torch.tensor(labels))
    of_fedcg = fedcg.feature_penalty(Echo(), 1.0, context(quick_spec("fedcg")))(block(labels))
    params = fedmd_cg.FedmdCgParams(lambda1=0.0, lambda3=0.0)
    ctx, only_class_1 = context(quick_spec("fedmd_cg"), 3), torch.tensor([0.0, 1.0, 0.0])
    of_fedmd_cg = fedmd_cg.global_penalty(Echo(), Scale(), only_class_1, params, ctx)(block(labels))
    for penalty in (of_fedcg, of_fedmd_cg):
        assert penalty is not None
        for rows in (slice(0, 3), slice(3, 5)):
            assert penalty(rows, features[rows], torch.zeros(rows.stop - rows.start, 3)).item() == 0.0


def test_gamma_rises_from_zero_on_a_logistic_ramp() -> None:
    params = fedcg.FedcgParams()
    assert fedcg.gamma(1, params) == 0.0
    assert fedcg.gamma(26, params) == pytest.approx(2 / (1 + math.exp(-5)) - 1)  # 0.986614
    assert fedcg.gamma(51, params) == pytest.approx(0.999909, abs=1e-6)
    assert fedcg.gamma(500, params) == fedcg.gamma(51, params)
    assert fedcg.gamma(3, params.model_copy(update={"ramp_rounds": 2, "gamma_max": 0.5})) == pytest.approx(
        0.499955, abs=1e-6
    )


@pytest.mark.parametrize("name", ["fedcg", "fedmd_cg"])
def test_the_aggregations_are_the_average_and_two_distillations_of_it(name: str) -> None:
    updates = {f"c{seed}": update_of(f"c{seed}", one_round(name, seed)) for seed in range(2)}
    loaders = {client: (lambda client=client: updates[client]) for client in updates}
    average = average_updates(loaders, frozenset({Part.GENERATOR, Part.CLASSIFIER})).parts
    merged = {}
    for kind in ("average", "kd", "crossed_kd"):
        spec, method = quick_spec(name, aggregation=kind), get_method(name)
        server = method.init_server(spec, initial_parts(spec, b"cohort"))
        merge = method.aggregator(server, context(spec, root=b"coordinator"), MemorySpill())
        merged[kind] = merge.finish(loaders)[0].parts
    for part, weights in average.items():
        assert same(merged["average"][part], weights)
        assert not same(merged["kd"][part], weights)
        assert not same(merged["crossed_kd"][part], weights)
        assert not same(merged["crossed_kd"][part], merged["kd"][part])


def test_the_ramp_of_fedmd_cg_is_a_power_of_the_rounds_behind() -> None:
    assert fedmd_cg.ramp(1, 4, 1.0) == 0.0
    assert fedmd_cg.ramp(3, 4, 1.0) == 0.5
    assert fedmd_cg.ramp(3, 4, 2.0) == 0.25


def test_generated_rows_come_in_pairs_of_one_label() -> None:
    assert paired_labels(torch.tensor([3, 1, 2, 0])).tolist() == [3, 1, 3, 1]
    odd = paired_labels(torch.tensor([3, 1, 2, 0, 4]))
    assert odd.tolist() == [3, 1, 3, 1, 2]


class Answer(nn.Module):
    """A generator that answers every request with the same features; with a parameter, so that it can be trained."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(values))

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.value.expand(len(labels), -1)


class Scale(nn.Module):
    """A classifier whose logits are its one weight times the features."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features * self.weight


def block(labels: list[int]) -> Block:
    return Block(torch.zeros(len(labels), 1, 16, 16), torch.tensor(labels))


def test_the_feature_penalty_of_fedcg_is_gamma_times_the_mean_square() -> None:
    penalty = fedcg.feature_penalty(Answer(0.0, 2.0), 0.5, context(quick_spec("fedcg")))(block([0, 1]))
    assert penalty is not None
    features = torch.tensor([[1.0, 2.0], [3.0, 2.0]], requires_grad=True)
    value = penalty(slice(0, 2), features, torch.zeros(2, 3))
    assert value.item() == pytest.approx(0.5 * (1 + 9) / 4)
    value.backward()
    assert features.grad is not None


LN3 = math.log(3.0)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        # replay: generated logits (0, 0) of a class drawn from p(y): ln 2
        ((1.0, 0.0, 0.0), math.log(2.0)),
        # feature mean square of (ln 3, 0) from (0, 0): ln(3)^2 / 2
        ((0.0, 1.0, 0.0), LN3**2 / 2),
        # KL(real || generated) of (3/4, 1/4) from (1/2, 1/2) = 0.130812; the other direction would be 0.143841
        ((0.0, 0.0, 1.0), 0.130812),
    ],
)
def test_each_global_penalty_of_fedmd_cg_has_its_hand_worked_value(
    weights: tuple[float, float, float], expected: float
) -> None:
    # round 3 of 4: the ramp is 1/2
    spec = quick_spec("fedmd_cg")
    params = fedmd_cg.FedmdCgParams(lambda1=weights[0], lambda2=weights[1], lambda3=weights[2])
    make = fedmd_cg.global_penalty(Answer(0.0, 0.0), Scale(), torch.tensor([0.5, 0.5]), params, context(spec, 3))
    penalty = make(block([0, 1]))
    assert penalty is not None
    real = torch.tensor([[LN3, 0.0], [LN3, 0.0]])
    assert penalty(slice(0, 2), real, real).item() == pytest.approx(0.5 * expected, abs=1e-6)


def test_the_generated_branch_of_equation_2_is_a_detached_teacher() -> None:
    params = fedmd_cg.FedmdCgParams(lambda1=0.0, lambda2=0.0)
    classifier = Scale()
    spec = quick_spec("fedmd_cg")
    penalty = fedmd_cg.global_penalty(Answer(1.0, 0.0), classifier, torch.tensor([0.5, 0.5]), params, context(spec, 3))(
        block([0, 1])
    )
    assert penalty is not None
    penalty(slice(0, 2), torch.zeros(2, 2), torch.zeros(2, 2, requires_grad=True)).backward()
    # The replayed rows share its pass, so there may be a gradient, but of zero.
    assert classifier.weight.grad is None or classifier.weight.grad.item() == 0.0


class StillSource:
    """Real features that are given, instead of an extractor's."""

    def __init__(self, features: torch.Tensor) -> None:
        self.plain = features
        self.labels = torch.zeros(len(features), dtype=torch.int64)

    def rows(self, index: torch.Tensor, augmenter: Augmenter) -> tuple[torch.Tensor, torch.Tensor]:
        return self.plain[index], self.labels[index]


def test_equation_5_trains_the_generator_by_the_divergence_from_generated_to_real() -> None:
    # Three rows of (0.9, 0.05, 0.05) and one of (0.1, 0.45, 0.45), one answer for all: KL(generated || real) settles at the
    # geometric mean (0.75, 0.125, 0.125); the reversed direction at the arithmetic mean (0.7, 0.15, 0.15).
    logits = torch.tensor([[0.9, 0.05, 0.05]] * 3 + [[0.1, 0.45, 0.45]]).log()
    params = fedmd_cg.FedmdCgParams(
        steps=600, batch_size=4, generator_lr=0.02, weight_decay=0.0, lambda4=0.0, lambda5=0.0, lambda6=0.0
    )
    generator = Answer(0.0, 0.0, 0.0)
    source = cast("FeatureSource", StillSource(logits))
    fedmd_cg.train_generator(generator, Scale(), source, params, context(quick_spec("fedmd_cg")))
    assert generator.value.softmax(0).tolist() == pytest.approx([0.75, 0.125, 0.125], abs=0.02)


def settled_answer(**weights: float) -> list[float]:
    """What a generator with one answer learns from real features (2, 0) and (0, 0) of class 0, under eq. 9 with these λ."""
    values = {"lambda4": 0.0, "lambda5": 0.0, "lambda6": 0.0, **weights}
    params = fedmd_cg.FedmdCgParams(steps=400, batch_size=2, generator_lr=0.05, weight_decay=0.0, **values)
    generator = Answer(5.0, 5.0)
    source = cast("FeatureSource", StillSource(torch.tensor([[2.0, 0.0], [0.0, 0.0]])))
    fedmd_cg.train_generator(generator, Scale(), source, params, context(quick_spec("fedmd_cg")))
    made: list[float] = generator.value.detach().tolist()
    return made


def test_equation_5_pulls_generated_features_to_the_mean_of_the_real_ones() -> None:
    # The divergence alone fixes only the difference of the two logits; with the mean square the answer itself becomes (1, 0).
    assert settled_answer(lambda4=100.0) == pytest.approx([1.0, 0.0], abs=0.05)


def test_equation_6_raises_the_asked_class_above_what_the_divergence_asks_for() -> None:
    alone, asked = settled_answer(), settled_answer(lambda5=1.0)
    assert alone[0] - alone[1] == pytest.approx(1.0, abs=0.1)
    assert asked[0] - asked[1] > alone[0] - alone[1] + 0.5


class Table(nn.Module):
    """A generator with one answer per label."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = nn.Parameter(torch.zeros(3, 3))

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.answers[labels]


class MixedSource(StillSource):
    """Real features of three classes."""

    def __init__(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__(features)
        self.labels = labels


def test_a_generator_of_fedmd_cg_learns_each_class_from_that_classs_features() -> None:
    real = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0], [-1.0, -1.0, 2.0]])
    source = cast("FeatureSource", MixedSource(real.repeat(4, 1), torch.arange(12) % 3))
    params = fedmd_cg.FedmdCgParams(
        steps=200, batch_size=4, generator_lr=0.05, weight_decay=0.0, lambda5=0.0, lambda6=0.0
    )
    generator = Table()
    fedmd_cg.train_generator(generator, Scale(), source, params, context(quick_spec("fedmd_cg")))
    assert torch.allclose(generator.answers.detach(), real, atol=0.05)


class Linear(nn.Module):
    """A generator that maps the noise linearly: its features spread as its weight is large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 2), 0.1))

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return noise @ self.weight


def test_the_diversity_term_of_fedmd_cg_opens_the_generator() -> None:
    def spread(lambda6: float) -> float:
        generator = Linear()
        params = fedmd_cg.FedmdCgParams(steps=60, batch_size=8, generator_lr=0.02, lambda6=lambda6)
        real = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
        source = cast("FeatureSource", StillSource(real))
        fedmd_cg.train_generator(generator, Scale(), source, params, context(quick_spec("fedmd_cg")))
        return float(generator.weight.detach().norm())

    assert spread(10.0) > 2 * spread(0.0)


class Undecided(nn.Module):
    """A discriminator that cannot tell anything apart, so that only the diversity term moves the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 0.0 * features.sum(dim=1) + self.bias


def test_the_mode_seeking_term_opens_the_generator_of_fedcg() -> None:
    def spread(diversity: float) -> float:
        generator = Linear()
        params = fedcg.FedcgParams(steps=60, batch_size=8, gan_lr=0.01, diversity=diversity, weight_decay=0.0)
        source = cast("FeatureSource", StillSource(torch.zeros(16, 2)))
        fedcg.train_gan(generator, Undecided(), source, params, context(quick_spec("fedcg")))
        return float(generator.weight.detach().norm())

    assert spread(1.0) > spread(0.0) + 0.5


def test_the_replayed_classes_follow_the_published_label_distribution() -> None:
    # Only class 1 is left in the federation: replay asks for it alone, whatever the batch holds. Logits (0, ln 3) give class 1
    # a probability of 3/4: ln(4/3), where class 0 would cost ln 4.
    params = fedmd_cg.FedmdCgParams(lambda2=0.0, lambda3=0.0)
    spec = quick_spec("fedmd_cg")
    make = fedmd_cg.global_penalty(Answer(0.0, LN3), Scale(), torch.tensor([0.0, 1.0]), params, context(spec, 3))
    penalty = make(block([0, 0]))
    assert penalty is not None
    logits = torch.zeros(2, 2)
    assert penalty(slice(0, 2), logits, logits).item() == pytest.approx(0.5 * math.log(4 / 3), abs=1e-6)


def test_a_penalty_is_minimised_beside_the_cross_entropy() -> None:
    spec = quick_spec("local", epochs=5, lr=1e-2)
    ctx, data = context(spec), bright_images(24, 0)
    sizes = []
    for weight in (0.0, 10.0):
        parts = initial_parts(spec, b"cohort")
        extractor, classifier = (load_part(spec, part, parts[part]) for part in (Part.EXTRACTOR, Part.CLASSIFIER))

        def shrink(_: Block, weight: float = weight) -> Penalty:
            return Penalty(lambda features, logits: weight * features.square().mean())

        train_classifier(extractor, classifier, data, TrainingParams.model_validate(spec.params), ctx, shrink)
        sizes.append(float(extract_features(extractor, data.images, spec).square().mean()))
    assert sizes[1] < 0.5 * sizes[0]


def test_the_class_scale_is_the_distance_of_two_real_features() -> None:
    # class 0: dimensions (0, 2) and (0, 4): variances 2 and 8: sqrt(2 * 10); class 1: one image, the floor
    features = torch.tensor([[0.0, 0.0], [2.0, 4.0], [1.0, 1.0]])
    scale = fedmd_cg.class_scale(features, torch.tensor([0, 0, 1]), 3)
    assert scale.tolist() == pytest.approx([math.sqrt(20.0), 1e-3, 1e-3])


def test_the_two_gan_networks_pull_in_opposite_directions() -> None:
    spec = quick_spec("fedcg", epochs=30, gan_lr=2e-2, diversity=0.0)
    ctx = context(spec)

    class Judge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 1)

        def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.line(features).squeeze(1)
            return out

    real = torch.zeros(16, 2)
    generator, judge = Answer(1.0, 1.0), Judge()
    with torch.no_grad():
        judge.line.weight.zero_()
        judge.line.bias.zero_()
    params = fedcg.FedcgParams.model_validate({**spec.params, "epochs": 10, "weight_decay": 0.0})
    fedcg.train_gan(generator, judge, cast("FeatureSource", StillSource(real)), params, ctx)
    made = generator.value.detach()
    zeros = torch.zeros(1, dtype=torch.int64)
    assert judge(real[:1], zeros).item() > judge(made.unsqueeze(0), zeros).item()
    assert made.max().item() < 0.9
    assert all(parameter.requires_grad for parameter in judge.parameters())


def test_progress_tells_every_phase_of_a_round() -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    spec = quick_spec("fedcg")
    method, initial = get_method("fedcg"), initial_parts(spec, b"cohort")
    ctx = context(spec)
    ctx = SimpleNamespace(
        **{**vars(ctx), "progress": lambda phase, step, steps: seen.setdefault(phase, []).append((step, steps))}
    )  # type: ignore[assignment]
    state, incoming = method.init_client(spec, initial), method.init_server(spec, initial)
    result = method.local_round(state, bright_images(24, 0), incoming.aggregate, ctx)
    merge = method.aggregator(incoming, ctx, MemorySpill())
    merge.add(update_of("a", result))
    merge.finish({"a": lambda: update_of("a", result)})
    assert set(seen) == {"classify", "generate", "teacher", "distil"}
    assert all(steps[-1][0] == steps[-1][1] for steps in seen.values())
