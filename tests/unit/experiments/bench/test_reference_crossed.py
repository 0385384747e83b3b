"""FedMD-CG's fast paths against its plain reference: same draws, same losses, same weights."""

import pytest
import torch
from torch import nn

from experiments.bench.reference_fedcg import plain, plain_networks
from fedcg.learning.aggregation.crossed_distillation import CrossedAggregator, Crossing, label_shares
from fedcg.learning.aggregation.distillation import Distillation, Pair, draw_bank, load_pair
from fedcg.learning.method import Aggregate, RoundContext, ServerState, Update
from fedcg.learning.methods import fedmd_cg
from fedcg.learning.networks import Networks, load_part, weights_of
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.learning.spec import NetworkChoice, ParameterValue
from fedcg.learning.training.batches import FeatureSource
from fedcg.learning.training.classification import train_classifier
from fedcg.learning.training.losses import Divergence
from fedcg.learning.training.stage import run_stage
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import context, merged, plan
from tests.support.learning.reference_fedmd_cg import classify, distil_crossed, train_generator
from tests.unit.experiments.bench.test_reference import (
    COLOUR,
    colour_images,
    doubles,
    furthest,
    in_double,
    mean_of,
    watched,
)

__all__ = ["doubles", "watched"]  # fixtures

PRINT: dict[str, ParameterValue] = {"diversity": "normalised"}
CODE: dict[str, ParameterValue] = {
    "diversity": "mean_squared",
    "divergence": "teacher_student",
    "temperature": 10.0,
    "lambda2": 0.1,
}
P_OF_Y = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def case(
    steps: int, params: dict[str, ParameterValue], split: str = "lenet5_relu", crop: int = 0
) -> tuple[RoundContext, Networks, Networks]:
    """A client's networks and a copy of them for the reference, in round 3 of 4."""
    choice = NetworkChoice(split=split, generator="mlp", noise_dim=8)
    quick = plan("fedmd_cg", choice, COLOUR, steps=steps, optimiser="sgd", lr=0.05, **params)
    spec = complete_spec(quick.model_copy(update={"augment_flip": True, "augment_crop": crop}))
    initial = initial_parts(spec, b"cohort")
    nets = Networks(
        **{part.value: load_part(spec, part, weights) for part, weights in initial.items()}, discriminator=nn.Identity()
    )
    return context(spec, round_number=3), nets, plain_networks(nets)


def params_of(ctx: RoundContext) -> fedmd_cg.FedmdCgParams:
    return fedmd_cg.FedmdCgParams.model_validate(ctx.spec.params)


@pytest.mark.parametrize(("params", "split", "crop"), [(PRINT, "lenet5_relu", 0), (CODE, "cnn_bn", 4)])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_classifier_takes_the_same_steps_as_the_reference(
    steps: int, params: dict[str, ParameterValue], split: str, crop: int, watched: dict[str, float]
) -> None:
    ctx, ours, theirs = case(steps, params, split, crop)
    data = colour_images(20)
    penalty = fedmd_cg.global_penalty(ours.generator, P_OF_Y, params_of(ctx), ctx)
    before = weights_of(ours.classifier)
    loss = train_classifier(ours.extractor, ours.classifier, data, params_of(ctx), ctx, penalty)
    expected = classify(theirs, data, P_OF_Y, params_of(ctx), ctx)
    assert len(expected) == steps
    assert watched["classification with penalties"] == mean_of(expected)
    assert 0 < loss < sum(expected) / steps  # ours reports the cross-entropy alone
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights_of(ours.classifier).items())
    assert furthest(ours.extractor, theirs.extractor) < 1e-5
    assert furthest(ours.classifier, theirs.classifier) < 1e-5


@pytest.mark.parametrize("params", [PRINT, CODE])
@pytest.mark.parametrize(("steps", "crop"), [(1, 0), (3, 0), (3, 4)])
def test_the_generator_takes_the_same_steps_as_the_reference(
    steps: int,
    crop: int,
    params: dict[str, ParameterValue],
    watched: dict[str, float],
    request: pytest.FixtureRequest,
) -> None:
    ctx, ours, theirs = case(steps, params, crop=crop)
    ours, theirs = in_double(ours), in_double(theirs)
    for nets in (ours, theirs):
        nets.classifier.double()
    request.getfixturevalue("doubles")
    data = colour_images(20)
    before = plain(ours.generator)
    source = FeatureSource(ours.extractor, data, ctx.spec, steps * 8)
    run_stage(fedmd_cg.imitation(ours.generator, ours.classifier, source, params_of(ctx), ctx), ctx)
    expected = train_generator(theirs, data, params_of(ctx), ctx)
    assert len(expected) == steps
    assert watched["generator"] == mean_of(expected)
    assert furthest(ours.generator, before) > 1e-5
    assert furthest(ours.generator, theirs.generator) < 1e-9


@pytest.mark.parametrize("divergence", [Divergence(), Divergence("teacher_student", 10.0)])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_crossed_student_takes_the_same_steps_as_the_reference(steps: int, divergence: Divergence) -> None:
    ctx, _, _ = case(1, PRINT)
    settings = Distillation(steps, 8, 3e-4, 1e-4)
    counts = ((4, 1, 5), (2, 6, 2))
    updates, teachers = {}, []
    for name, root, mine in (("a", b"one", counts[0]), ("b", b"two", counts[1])):
        parts = initial_parts(ctx.spec.model_copy(update={"seed": mine[0]}), root)
        shared = {part: parts[part] for part in (Part.GENERATOR, Part.CLASSIFIER)}
        updates[name] = Update(name, shared, sum(mine), mine)
        pair = load_pair(shared, ctx)
        teachers.append(Pair(plain(pair.generator), plain(pair.classifier)))
    state = ServerState(Aggregate({}))
    aggregator = CrossedAggregator(settings, Crossing("exact", 32, divergence), state, ctx, MemorySpill())
    aggregate = merged(aggregator, updates)
    p = torch.tensor(counts, dtype=torch.float64).sum(0) / 20
    bank = draw_bank(ctx.streams, settings.rows, 8, p)
    mean = {
        part: {name: (one + updates["b"].parts[part][name]) / 2 for name, one in updates["a"].parts[part].items()}
        for part in (Part.GENERATOR, Part.CLASSIFIER)
    }
    start = load_pair(mean, ctx)
    student = Pair(plain(start.generator), plain(start.classifier))
    losses = distil_crossed(student, teachers, label_shares(counts), bank, settings, divergence)
    assert len(losses) == steps
    ours = load_pair(aggregate.parts, ctx)
    assert furthest(start.classifier, student.classifier) > 1e-5
    # As in `test_one_step_of_the_gan_agrees_in_float32`: Adam follows the rounding where a gradient is nothing else.
    for fast, slow in ((ours.generator, student.generator), (ours.classifier, student.classifier)):
        gaps = torch.cat(
            [
                (tensor - other).abs().double().flatten()
                for tensor, other in zip(weights_of(fast).values(), weights_of(slow).values(), strict=True)
            ]
        )
        assert float((gaps > 1e-5).double().mean()) < 1e-3
