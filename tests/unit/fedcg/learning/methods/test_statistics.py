"""What methods send in the part statistics, by hand: class prototypes, and sums of extractors' outputs on probe images."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fedcg.learning import probes
from fedcg.learning.aggregation.prototypes import HELD, PROTOTYPES, filled, merged_prototypes, prototypes_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.protected_round import protected_round
from fedcg.learning.method import (
    Aggregate,
    Callbacks,
    DivergedError,
    RoundContext,
    ServerState,
    Unmasking,
    Update,
    Weights,
)
from fedcg.learning.methods.fedprobe import align
from fedcg.learning.methods.fedproto import NearestPrototype, towards
from fedcg.learning.networks import feature_shape, load_part
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import ImageForm, NetworkChoice
from fedcg.learning.training.evaluation import evaluate
from fedcg.wire.artifacts.payload import beyond
from fedcg.wire.parts import Part
from tests.support.learning import learning_cases as cases
from tests.support.learning.networks import on_labels


class Brightness(nn.Module):
    """One feature: the mean of an image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((1, 2, 3)).view(-1, 1)


def prototypes_from(client: str, rows: list[float], held: list[int], counts: tuple[int, ...] | None) -> Update:
    statistics = {HELD: torch.tensor(held), PROTOTYPES: torch.tensor(rows).view(-1, 1)}
    return Update(client, {Part.STATISTICS: statistics}, 10, counts)


def merged(*updates: Update) -> dict[str, list[float]]:
    found = {one.client: one for one in updates}
    merge = merged_prototypes({name: partial(found.__getitem__, name) for name in found})
    return {name: tensor.flatten().tolist() for name, tensor in merge.items()}


def test_a_prototype_is_the_mean_feature_of_a_class_and_one_without_images_is_not_held() -> None:
    images = torch.tensor([0, 255, 255]).to(torch.uint8).view(3, 1, 1, 1).expand(3, 1, 16, 16)
    data = ImageSet(images, torch.tensor([0, 0, 2]), ("dark", "grey", "light"))
    found = prototypes_of(Brightness(), data, cases.quick_spec("fedproto"))
    # (0 - 0.5) / 0.25 = -2 and (1 - 0.5) / 0.25 = 2
    assert found[PROTOTYPES].flatten().tolist() == [0.0, 0.0, 2.0]
    assert found[HELD].tolist() == [1, 0, 1]


def test_prototypes_are_averaged_over_those_who_have_the_class_by_images_where_all_report_them() -> None:
    a, b = prototypes_from("a", [2.0, 0.0], [1, 0], (1, 0)), prototypes_from("b", [6.0, 8.0], [1, 1], (3, 5))
    assert merged(a, b) == {HELD: [1, 1], PROTOTYPES: [5.0, 8.0]}  # (1 * 2 + 3 * 6) / 4
    silent = prototypes_from("b", [6.0, 8.0], [1, 1], None)
    assert merged(a, silent) == {HELD: [1, 1], PROTOTYPES: [4.0, 8.0]}
    assert merged(a) == {HELD: [1, 0], PROTOTYPES: [2.0, 0.0]}


def test_a_client_keeps_others_prototypes_of_classes_it_has_no_images_of() -> None:
    ours = {HELD: torch.tensor([1, 0]), PROTOTYPES: torch.tensor([[2.0], [0.0]])}
    others = {HELD: torch.tensor([1, 1]), PROTOTYPES: torch.tensor([[9.0], [7.0]])}
    found = filled(ours, others)
    assert (found[HELD].tolist(), found[PROTOTYPES].flatten().tolist()) == ([1, 1], [2.0, 7.0])


def test_features_are_pulled_to_their_classs_prototype_alone_and_not_where_there_is_none() -> None:
    known = {HELD: torch.tensor([1, 0]), PROTOTYPES: torch.tensor([[1.0, 3.0], [5.0, 5.0]])}
    penalty = on_labels(towards(known, 0.5, "cpu"), [0, 1])
    features = torch.tensor([[2.0, 5.0], [0.0, 0.0]])
    # row 0: ((2 - 1)² + (5 - 3)²) / 2 = 2.5; row 1: no prototype; 0.5 * (2.5 + 0) / 2
    assert penalty(slice(None), features, features).item() == pytest.approx(0.625)


def test_the_nearest_prototype_answers_and_a_class_that_nobody_has_never_does() -> None:
    statistics = {HELD: torch.tensor([1, 1, 0]), PROTOTYPES: torch.tensor([[0.0], [4.0], [1.0]])}
    logits = NearestPrototype(Brightness(), statistics)(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1))
    assert logits.tolist() == [[-1.0, -9.0, -10.0], [-9.0, -1.0, -10.0]]


def test_a_model_of_prototypes_learns_and_is_evaluated_as_the_method_says() -> None:
    spec, data = cases.quick_spec("fedproto", epochs=8, lr=0.01), cases.bright_images(48, 0)
    trained = cases.local_round_of(spec, data).private.parts
    own = {part: trained[part] for part in (Part.EXTRACTOR, Part.STATISTICS)}
    assert evaluate(spec, own, data).accuracy > 0.8
    nobody = {**own, Part.STATISTICS: initial_parts(spec, b"cohort")[Part.STATISTICS]}
    assert evaluate(spec, nobody, data).accuracy < 0.5


def test_what_is_sent_stays_within_the_bounds_of_the_layout_with_noise_too() -> None:
    spec, method = cases.quick_spec("fedproto"), get_method("fedproto")
    initial = initial_parts(spec, b"cohort")
    state, aggregate = method.init_client(spec, initial), method.init_server(spec, initial).aggregate
    ctx = cases.context(spec)
    noisy = ctx.__class__(**{**ctx.__dict__, "privacy": PrivacySettings(update_noise=5.0)})
    sent = protected_round(method, state, cases.bright_images(24, 0), aggregate, noisy).shared.parts[Part.STATISTICS]
    layouts = {layout.name: layout for layout in spec.layouts[Part.STATISTICS]}
    assert (layouts[PROTOTYPES].low, layouts[HELD].high) == (0.0, 1.0)
    assert sent[PROTOTYPES].min() == 0.0
    assert sent[PROTOTYPES].max() > 5.0
    assert all(beyond(tensor.numpy(), layouts[name]) == "" for name, tensor in sent.items())
    assert {name: str(tensor.numpy().dtype) for name, tensor in sent.items()} == {
        one.name: one.dtype for one in layouts.values()
    }
    assert "below 0" in beyond(np.array([-0.1], dtype=np.float32), layouts[PROTOTYPES])
    assert "above 1" in beyond(np.array([2]), layouts[HELD])


def test_the_server_trains_fedghs_head_on_prototypes_with_their_classes() -> None:
    spec = cases.quick_spec("fedgh", server_steps=300, server_lr=0.01, weight_decay=0.0)
    method, initial = get_method("fedgh"), initial_parts(cases.quick_spec("fedgh"), b"cohort")
    size = spec.layouts[Part.STATISTICS][1].shape[1]
    rows = torch.eye(3, size)
    updates = {
        name: Update(
            name, {Part.STATISTICS: {HELD: torch.tensor(held), PROTOTYPES: rows * torch.tensor(held)[:, None]}}, 5
        )
        for name, held in (("a", [1, 1, 0]), ("b", [0, 1, 1]))
    }
    merge = method.aggregator(method.init_server(spec, initial), cases.context(spec), None)  # type: ignore[arg-type]
    aggregate, _ = merge.finish({name: partial(updates.__getitem__, name) for name in updates})
    assert set(aggregate.parts) == {Part.CLASSIFIER}
    head = load_part(spec, Part.CLASSIFIER, aggregate.parts[Part.CLASSIFIER]).eval()
    assert head(rows.view(-1, *feature_shape(spec))).argmax(1).tolist() == [0, 1, 2]


def test_a_client_without_an_aggregate_trains_on_its_own_prototypes() -> None:
    spec = cases.quick_spec("fedproto")
    initial = initial_parts(spec, b"cohort")
    first = cases.local_round_of(
        spec, cases.bright_images(24, 0), Aggregate({Part.STATISTICS: initial[Part.STATISTICS]})
    )
    method = get_method("fedproto")
    again = method.local_round(first.private, cases.bright_images(24, 0), None, cases.context(spec, 3))
    assert not torch.equal(
        again.shared.parts[Part.STATISTICS][PROTOTYPES], first.shared.parts[Part.STATISTICS][PROTOTYPES]
    )


PHOTOS = ImageForm(mode="RGB", height=24, width=32, mean=(0.5,) * 3, std=(0.25,) * 3)
PARAMS = probes.ProbeParams(probes=2, clip=4.0, scale=8, weight_cap=100)
RELU = NetworkChoice(split="lenet5_relu", noise_dim=8)
SPEC = complete_spec(cases.plan("fedprobe", RELU, probes=4, align_steps=200, align_lr=3e-3))


def test_probes_are_the_same_for_the_same_secret_and_others_for_another() -> None:
    first, again, other = (probes.probe_images(Streams(root).at("f"), 6, PHOTOS) for root in (b"one", b"one", b"two"))
    assert (first.shape, first.dtype) == ((6, 3, 24, 32), torch.uint8)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({image.numpy().tobytes() for image in first}) == 6
    # Edges and smooth surfaces, as of photographs: neighbours are alike, but not everywhere, and the whole range is used.
    steps = (first[..., 1:].int() - first[..., :-1].int()).abs().flatten()
    assert steps.float().median() < 10
    assert (steps > 60).float().mean() > 0.01
    assert first.float().std() > 40


def update(client: str, outputs: list[float], images: int) -> Update:
    return Update(client, {Part.STATISTICS: probes.counted(torch.tensor(outputs).view(2, 1), images, PARAMS)}, images)


class Nothing:
    """A server half that has nothing else to merge."""

    def add(self, update: Update) -> None:
        """Count nothing."""

    def finish(self, updates: object) -> tuple[Aggregate, ServerState]:
        """An empty aggregate."""
        return Aggregate({}), ServerState(Aggregate({}))


def summed(*updates: Update, params: probes.ProbeParams = PARAMS) -> Weights:
    loaders = {one.client: partial(lambda one: one, one) for one in updates}
    return probes.WithProbeSums(Nothing(), params).finish(loaders)[0].parts[Part.STATISTICS]


def test_outputs_add_up_to_their_mean_by_images_as_whole_numbers_that_are_cut_at_the_clip_and_the_cap() -> None:
    a, b = update("a", [1.0, 3.0], 10), update("b", [2.0, 9.0], 1000)
    told = b.parts[Part.STATISTICS]
    assert (told[probes.WEIGHT].item(), told[probes.OUTPUTS].flatten().tolist()) == (100, [2 * 8 * 100, 4 * 8 * 100])
    sums = summed(a, b)
    assert sums[probes.WEIGHT].item() == 110
    mean = probes.mean_outputs(sums, PARAMS)
    assert mean is not None
    assert mean.flatten().tolist() == pytest.approx([(1 * 10 + 2 * 100) / 110, (3 * 10 + 4 * 100) / 110])
    assert cases.same(sums, summed(b, a))
    assert probes.mean_outputs({probes.OUTPUTS: torch.zeros(2, 1), probes.WEIGHT: torch.tensor(0)}, PARAMS) is None


def test_sums_are_taken_modulo_2_to_the_32_so_that_masks_cancel() -> None:
    a, b = update("a", [1.0, 3.0], 10), update("b", [2.0, 4.0], 50)
    mask = torch.tensor([[3_000_000_000], [17]])
    for one, sign in ((a, 1), (b, -1)):
        told = one.parts[Part.STATISTICS]
        told[probes.OUTPUTS] = (told[probes.OUTPUTS] + sign * mask) % probes.MODULUS  # type: ignore[index]
    assert cases.same(summed(a, b), summed(update("a", [1.0, 3.0], 10), update("b", [2.0, 4.0], 50)))


def test_sums_that_could_be_wrong_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"most_clients · weight_cap · clip · scale = 2.15e"):
        probes.ProbeParams(most_clients=64, weight_cap=1024, clip=32.0, scale=1024)
    with pytest.raises(DivergedError, match="3 clients, and sums are exact for 2: raise most_clients"):
        summed(*(update(name, [1.0, 1.0], 10) for name in "abc"), params=PARAMS.model_copy(update={"most_clients": 2}))
    heavy = update("a", [1.0, 1.0], 10)
    heavy.parts[Part.STATISTICS][probes.WEIGHT].fill_(101)
    with pytest.raises(DivergedError, match="a: its weight 101 is not of 1 to 100"):
        summed(heavy, update("b", [1.0, 1.0], 10))
    with pytest.raises(DivergedError, match="the mean of outputs on the probes reaches 9, beyond 4"):
        probes.mean_outputs({probes.OUTPUTS: torch.full((2, 1), 9 * 8 * 5), probes.WEIGHT: torch.tensor(5)}, PARAMS)


def own_extractor() -> torch.nn.Module:
    return load_part(SPEC, Part.EXTRACTOR, initial_parts(SPEC, b"own")[Part.EXTRACTOR])


def drifted() -> torch.nn.Module:
    """An extractor that had the same start and went another way."""
    stream, found = torch.Generator().manual_seed(0), own_extractor()
    with torch.no_grad():
        for weight in found.parameters():
            weight.add_(0.5 * weight.abs().mean() * torch.randn(weight.shape, generator=stream))
    return found


def test_an_extractor_is_fitted_to_outputs_of_another_and_stops_where_it_is_asked_to() -> None:
    inputs = probes.probe_inputs(cases.context(SPEC), 4)
    wanted = probes.outputs_on(drifted(), inputs)
    own, steps = own_extractor(), list[int]()
    ctx = replace(cases.context(SPEC), callbacks=Callbacks(lambda _phase, step, _steps: steps.append(step)))
    before, after = probes.fit(own, inputs, wanted, 200, 3e-3, 0.05, ctx)
    assert 0.0 < after <= 0.05 < before
    assert 0 < len(steps) < 200
    assert float(probes.residual(probes.outputs_on(own, inputs), wanted)) == pytest.approx(after, rel=1e-4)
    assert probes.fit(own, inputs, wanted, 200, 3e-3, 0.06, ctx) == pytest.approx((after, after))


def aggregate_of(outputs: torch.Tensor) -> Aggregate:
    initial, params = initial_parts(SPEC, b"cohort"), probes.ProbeParams(probes=4)
    parts = get_method("fedprobe").init_server(SPEC, initial).aggregate.parts
    return Aggregate({**parts, Part.STATISTICS: probes.counted(outputs, 50, params)})


def warned_context(said: list[str]) -> RoundContext:
    return replace(cases.context(SPEC), callbacks=Callbacks(warn=said.append))


def test_a_round_goes_on_from_the_aligned_extractor() -> None:
    said: list[str] = []
    ctx, own = warned_context(said), initial_parts(SPEC, b"own")
    wanted = probes.outputs_on(drifted(), probes.probe_inputs(ctx, 4))
    aligned = align(own, aggregate_of(wanted), ctx)
    fitted = load_part(SPEC, Part.EXTRACTOR, aligned[Part.EXTRACTOR])
    assert float(probes.residual(probes.outputs_on(fitted, probes.probe_inputs(ctx, 4)), wanted)) < 0.05
    method, data = get_method("fedprobe"), cases.bright_images(24, 0)
    state = method.init_client(SPEC, own)
    with_probes = method.local_round(state, data, aggregate_of(wanted), ctx)
    begun = method.init_client(SPEC, {**own, **aligned})
    without = method.local_round(begun, data, aggregate_of(torch.zeros(4, wanted.shape[1])), ctx)
    assert "not believed" in said[0]  # all outputs alike are no extractor's
    assert cases.same(with_probes.private.parts[Part.EXTRACTOR], without.private.parts[Part.EXTRACTOR])
    assert len(said) == 1


def test_a_round_warns_where_more_than_one_output_in_a_hundred_is_cut_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, data = get_method("fedprobe"), cases.bright_images(24, 0)
    state = method.init_client(SPEC, initial_parts(SPEC, b"own"))

    def warnings(outputs: torch.Tensor) -> list[str]:
        said: list[str] = []
        monkeypatch.setattr("fedcg.learning.probes.outputs_on", lambda *_: outputs)
        method.local_round(state, data, None, warned_context(said))
        return said

    outputs = torch.full((10, 10), 2.0)
    outputs[0, 0] = 40.0
    assert warnings(outputs) == []
    outputs[0, 1] = -3.0
    (text,) = warnings(outputs)
    assert text.startswith("2.0% of the outputs on the probes lie outside [0, 16] (lowest -3, highest 40) and are cut")
    assert "--set clip=N" in text


def test_a_mean_that_no_extractor_is_near_to_is_not_believed_and_the_round_says_so() -> None:
    said: list[str] = []
    ctx, own = warned_context(said), initial_parts(SPEC, b"own")
    near = probes.outputs_on(own_extractor(), probes.probe_inputs(ctx, 4))
    assert align(own, aggregate_of(near), ctx)
    assert said == []
    assert align(own, aggregate_of(torch.full_like(near, 16.0)), ctx) == {}
    beyond = aggregate_of(near)
    beyond.parts[Part.STATISTICS][probes.OUTPUTS].mul_(1000)
    assert align(own, beyond, ctx) == {}
    text, other = said
    assert "beyond 16: it is not believed, and this round does without probes" in other
    assert text.startswith("the mean of outputs on the probes is not believed: it is ")
    assert "this round does without probes" in text


def test_masked_numbers_are_opened_for_exactly_the_clients_of_the_sum_and_else_there_is_no_mean() -> None:
    a, b, c = (update(name, [1.0, 3.0], images) for name, images in (("a", 10), ("b", 50), ("c", 7)))
    masks = {"a": torch.tensor([[4_000_000_000], [17]]), "b": torch.tensor([[9], [3_999_999_999]])}
    for one in (a, b):
        told = one.parts[Part.STATISTICS]
        told[probes.OUTPUTS] = (told[probes.OUTPUTS] + masks[one.client]) % probes.MODULUS  # type: ignore[index]
    correction = -(masks["a"] + masks["b"]).flatten() % probes.MODULUS
    loaders = {one.client: partial(lambda one: one, one) for one in (a, b, c)}

    said: list[str] = []

    def merged(unmasking: Unmasking, *clients: str) -> Weights:
        server = probes.WithProbeSums(Nothing(), PARAMS, lambda: unmasking, said.append)
        return server.finish({name: loaders[name] for name in clients})[0].parts[Part.STATISTICS]

    weights = {"a": 10, "b": 50}
    found = merged(Unmasking(weights, correction), "a", "b", "c")  # c has no part in the sum
    assert cases.same(found, summed(update("a", [1.0, 3.0], 10), update("b", [1.0, 3.0], 50)))
    assert probes.mean_outputs(merged(Unmasking(weights, None), "a", "b", "c"), PARAMS) is None
    assert said == []  # why it was not opened is told where it should have been
    for unmasking, clients in (  # b's update is not merged, or tells another weight
        (Unmasking(weights, correction), ("a", "c")),
        (Unmasking({"a": 10, "b": 500}, correction), ("a", "b")),
    ):
        nothing = merged(unmasking, *clients)
        assert probes.mean_outputs(nothing, PARAMS) is None
        assert not nothing[probes.OUTPUTS].any()
        assert said.pop().endswith("or tell another weight than they announced: b")


def test_a_mean_is_as_far_away_as_in_variances_of_the_one_that_varies_more() -> None:
    own = torch.tensor([[0.0, 4.0], [4.0, 0.0]])  # a variance of 4
    assert probes.distance(own, own) == 0.0
    half = own.mean(0) + 0.5 * (own - own.mean(0))  # as of backbones of four kinds
    assert probes.distance(own, half) == probes.distance(half, own) == 0.25
    assert probes.distance(own, own.mean(0).expand(2, 2)) == math.inf  # all outputs alike
    assert probes.distance(own, own + 4.0) == 4.0
    assert probes.distance(own, 10.0 * own) == pytest.approx(1.62)
    assert not probes.distance(own, own * float("nan")) <= 4.0
