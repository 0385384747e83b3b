"""Probe images, the sums of what extractors make of them, and extractors that are fitted to their mean."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from pydantic import ValidationError

from fedcg.learning.mechanisms.protected_round import downloaded_parts
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
from fedcg.learning.networks import load_part
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.probes import (
    MODULUS,
    OUTPUTS,
    WEIGHT,
    ProbeParams,
    WithProbeSums,
    counted,
    distance,
    fit,
    mean_outputs,
    outputs_on,
    probe_images,
    probe_inputs,
    residual,
)
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.simulation import Schedule, simulate
from fedcg.learning.spec import ImageForm, NetworkChoice
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import (
    bright_images,
    context,
    party_of,
    plan,
    same,
)

PHOTOS = ImageForm(mode="RGB", height=24, width=32, mean=(0.5,) * 3, std=(0.25,) * 3)
PARAMS = ProbeParams(probes=2, clip=4.0, scale=8, weight_cap=100)
RELU = NetworkChoice(split="lenet5_relu", noise_dim=8)
SPEC = complete_spec(plan("fedprobe", RELU, probes=4, align_steps=200, align_lr=3e-3))


def test_probes_are_the_same_for_the_same_secret_and_others_for_another() -> None:
    first, again, other = (probe_images(Streams(root).at("f"), 6, PHOTOS) for root in (b"one", b"one", b"two"))
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
    return Update(client, {Part.STATISTICS: counted(torch.tensor(outputs).view(2, 1), images, PARAMS)}, images)


class Nothing:
    """A server half that has nothing else to merge."""

    def add(self, update: Update) -> None:
        """Count nothing."""

    def finish(self, updates: object) -> tuple[Aggregate, ServerState]:
        """An empty aggregate."""
        return Aggregate({}), ServerState(Aggregate({}))


def summed(*updates: Update, params: ProbeParams = PARAMS) -> Weights:
    loaders = {one.client: partial(lambda one: one, one) for one in updates}
    return WithProbeSums(Nothing(), params).finish(loaders)[0].parts[Part.STATISTICS]


def test_outputs_add_up_to_their_mean_by_images_as_whole_numbers_that_are_cut_at_the_clip_and_the_cap() -> None:
    a, b = update("a", [1.0, 3.0], 10), update("b", [2.0, 9.0], 1000)
    told = b.parts[Part.STATISTICS]
    assert (told[WEIGHT].item(), told[OUTPUTS].flatten().tolist()) == (100, [2 * 8 * 100, 4 * 8 * 100])
    sums = summed(a, b)
    assert sums[WEIGHT].item() == 110
    mean = mean_outputs(sums, PARAMS)
    assert mean is not None
    assert mean.flatten().tolist() == pytest.approx([(1 * 10 + 2 * 100) / 110, (3 * 10 + 4 * 100) / 110])
    assert same(sums, summed(b, a))
    assert mean_outputs({OUTPUTS: torch.zeros(2, 1), WEIGHT: torch.tensor(0)}, PARAMS) is None


def test_sums_are_taken_modulo_2_to_the_32_so_that_masks_cancel() -> None:
    a, b = update("a", [1.0, 3.0], 10), update("b", [2.0, 4.0], 50)
    mask = torch.tensor([[3_000_000_000], [17]])
    for one, sign in ((a, 1), (b, -1)):
        told = one.parts[Part.STATISTICS]
        told[OUTPUTS] = (told[OUTPUTS] + sign * mask) % MODULUS  # type: ignore[index]
    assert same(summed(a, b), summed(update("a", [1.0, 3.0], 10), update("b", [2.0, 4.0], 50)))


def test_sums_that_could_be_wrong_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"most_clients · weight_cap · clip · scale = 2.15e"):
        ProbeParams(most_clients=64, weight_cap=1024, clip=32.0, scale=1024)
    with pytest.raises(DivergedError, match="3 clients, and sums are exact for 2: raise most_clients"):
        summed(*(update(name, [1.0, 1.0], 10) for name in "abc"), params=PARAMS.model_copy(update={"most_clients": 2}))
    heavy = update("a", [1.0, 1.0], 10)
    heavy.parts[Part.STATISTICS][WEIGHT].fill_(101)
    with pytest.raises(DivergedError, match="a: its weight 101 is not of 1 to 100"):
        summed(heavy, update("b", [1.0, 1.0], 10))
    with pytest.raises(DivergedError, match="the mean of outputs on the probes reaches 9, beyond 4"):
        mean_outputs({OUTPUTS: torch.full((2, 1), 9 * 8 * 5), WEIGHT: torch.tensor(5)}, PARAMS)


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
    inputs = probe_inputs(context(SPEC), 4)
    wanted = outputs_on(drifted(), inputs)
    own, steps = own_extractor(), list[int]()
    ctx = replace(context(SPEC), callbacks=Callbacks(lambda _phase, step, _steps: steps.append(step)))
    before, after = fit(own, inputs, wanted, 200, 3e-3, 0.05, ctx)
    assert 0.0 < after <= 0.05 < before
    assert 0 < len(steps) < 200
    assert float(residual(outputs_on(own, inputs), wanted)) == pytest.approx(after, rel=1e-4)
    assert fit(own, inputs, wanted, 200, 3e-3, 0.06, ctx) == pytest.approx((after, after))


def aggregate_of(outputs: torch.Tensor) -> Aggregate:
    initial, params = initial_parts(SPEC, b"cohort"), ProbeParams(probes=4)
    parts = get_method("fedprobe").init_server(SPEC, initial).aggregate.parts
    return Aggregate({**parts, Part.STATISTICS: counted(outputs, 50, params)})


def warned_context(said: list[str]) -> RoundContext:
    return replace(context(SPEC), callbacks=Callbacks(warn=said.append))


def test_a_round_goes_on_from_the_aligned_extractor() -> None:
    said: list[str] = []
    ctx, own = warned_context(said), initial_parts(SPEC, b"own")
    wanted = outputs_on(drifted(), probe_inputs(ctx, 4))
    aligned = align(own, aggregate_of(wanted), ctx)
    fitted = load_part(SPEC, Part.EXTRACTOR, aligned[Part.EXTRACTOR])
    assert float(residual(outputs_on(fitted, probe_inputs(ctx, 4)), wanted)) < 0.05
    method, data = get_method("fedprobe"), bright_images(24, 0)
    state = method.init_client(SPEC, own)
    with_probes = method.local_round(state, data, aggregate_of(wanted), ctx)
    begun = method.init_client(SPEC, {**own, **aligned})
    without = method.local_round(begun, data, aggregate_of(torch.zeros(4, wanted.shape[1])), ctx)
    assert "not believed" in said[0]  # all outputs alike are no extractor's
    assert same(with_probes.private.parts[Part.EXTRACTOR], without.private.parts[Part.EXTRACTOR])
    assert len(said) == 1


def test_the_model_that_a_download_makes_has_the_fitted_extractor_and_the_aggregates_classifier() -> None:
    ctx, own = context(SPEC), initial_parts(SPEC, b"own")
    inputs = probe_inputs(ctx, 4)
    wanted = outputs_on(drifted(), inputs)
    aggregate = aggregate_of(wanted)
    deployed = {**own, **downloaded_parts(own, aggregate, bright_images(24, 0), ctx)}
    before, after = (
        float(residual(outputs_on(load_part(SPEC, Part.EXTRACTOR, parts[Part.EXTRACTOR]), inputs), wanted))
        for parts in (own, deployed)
    )
    assert after < 0.05 < before
    assert same(deployed[Part.CLASSIFIER], aggregate.parts[Part.CLASSIFIER])


def test_a_round_warns_where_more_than_one_output_in_a_hundred_is_cut_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, data = get_method("fedprobe"), bright_images(24, 0)
    state = method.init_client(SPEC, initial_parts(SPEC, b"own"))

    def warnings(outputs: torch.Tensor) -> list[str]:
        said: list[str] = []
        monkeypatch.setattr("fedcg.learning.methods.fedprobe.outputs_on", lambda *_: outputs)
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
    near = outputs_on(own_extractor(), probe_inputs(ctx, 4))
    assert align(own, aggregate_of(near), ctx)
    assert said == []
    assert align(own, aggregate_of(torch.full_like(near, 16.0)), ctx) == {}
    beyond = aggregate_of(near)
    beyond.parts[Part.STATISTICS][OUTPUTS].mul_(1000)
    assert align(own, beyond, ctx) == {}
    text, other = said
    assert "beyond 16: it is not believed, and this round does without probes" in other
    assert text.startswith("the mean of outputs on the probes is not believed: it is ")
    assert "this round does without probes" in text


@pytest.mark.slow
def test_extractors_of_a_federation_agree_more_on_the_probes_than_without_them() -> None:
    def disagreement(align_steps: int, align_lr: float) -> float:
        quick = party_of("fedprobe", ("a", "b", "c"))
        spec = complete_spec(
            plan("fedprobe", RELU, epochs=4, lr=3e-3, probes=4, align_steps=align_steps, align_lr=align_lr)
        )
        party = replace(quick, spec=spec)
        now = simulate(party, Schedule(rounds=3))
        ctx = party.client_context("a", 3)
        inputs = probe_inputs(ctx, 4)
        found = torch.stack(
            [
                outputs_on(load_part(party.spec, Part.EXTRACTOR, state.parts[Part.EXTRACTOR]), inputs)
                for state in now.states.values()
            ]
        )
        assert int(now.aggregate.parts[Part.STATISTICS][WEIGHT]) > 0
        return float((found - found.mean(0)).square().mean() / found.mean(0).var())

    assert disagreement(200, 3e-3) < 0.8 * disagreement(1, 1e-12)


def test_masked_numbers_are_opened_for_exactly_the_clients_of_the_sum_and_else_there_is_no_mean() -> None:
    a, b, c = (update(name, [1.0, 3.0], images) for name, images in (("a", 10), ("b", 50), ("c", 7)))
    masks = {"a": torch.tensor([[4_000_000_000], [17]]), "b": torch.tensor([[9], [3_999_999_999]])}
    for one in (a, b):
        told = one.parts[Part.STATISTICS]
        told[OUTPUTS] = (told[OUTPUTS] + masks[one.client]) % MODULUS  # type: ignore[index]
    correction = -(masks["a"] + masks["b"]).flatten() % MODULUS
    loaders = {one.client: partial(lambda one: one, one) for one in (a, b, c)}

    said: list[str] = []

    def merged(unmasking: Unmasking, *clients: str) -> Weights:
        server = WithProbeSums(Nothing(), PARAMS, lambda: unmasking, said.append)
        return server.finish({name: loaders[name] for name in clients})[0].parts[Part.STATISTICS]

    weights = {"a": 10, "b": 50}
    found = merged(Unmasking(weights, correction), "a", "b", "c")  # c has no part in the sum
    assert same(found, summed(update("a", [1.0, 3.0], 10), update("b", [1.0, 3.0], 50)))
    assert mean_outputs(merged(Unmasking(weights, None), "a", "b", "c"), PARAMS) is None
    assert said == []  # why it was not opened is told where it should have been
    for unmasking, clients in (  # b's update is not merged, or tells another weight
        (Unmasking(weights, correction), ("a", "c")),
        (Unmasking({"a": 10, "b": 500}, correction), ("a", "b")),
    ):
        nothing = merged(unmasking, *clients)
        assert mean_outputs(nothing, PARAMS) is None
        assert not nothing[OUTPUTS].any()
        assert said.pop().endswith("or tell another weight than they announced: b")


def test_a_mean_is_as_far_away_as_in_variances_of_the_one_that_varies_more() -> None:
    own = torch.tensor([[0.0, 4.0], [4.0, 0.0]])  # a variance of 4
    assert distance(own, own) == 0.0
    half = own.mean(0) + 0.5 * (own - own.mean(0))  # as of backbones of four kinds
    assert distance(own, half) == distance(half, own) == 0.25
    assert distance(own, own.mean(0).expand(2, 2)) == math.inf  # all outputs alike
    assert distance(own, own + 4.0) == 4.0
    assert distance(own, 10.0 * own) == pytest.approx(1.62)
    assert not distance(own, own * float("nan")) <= 4.0
