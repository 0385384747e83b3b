"""The fast paths of FedCG and FedMD-CG against their plain references: same draws, same losses, same weights."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fedcg.learning.aggregation import distillation
from fedcg.learning.aggregation.averaging import weighted_average
from fedcg.learning.aggregation.crossed_distillation import crossed_aggregator, label_shares
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import RoundContext, Update
from fedcg.learning.methods import fedcg, fedmd_cg
from fedcg.learning.networks import NETWORKS, load_part, weights_of
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.learning.spec import FederationPlan, ImageForm, NetworkChoice, ParameterValue
from fedcg.learning.training.batches import FeatureSource
from fedcg.learning.training.classification import train_classifier
from fedcg.learning.training.losses import Divergence, LossMeter, kl_teacher_student
from fedcg.learning.training.stage import run_stage
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import CLASSES, context, merged, plan
from tests.support.learning.reference_fedcg import Networks, classify, distil, train_gan
from tests.support.learning.reference_fedmd_cg import classify as classify_crossed
from tests.support.learning.reference_fedmd_cg import distil_crossed, train_generator

CHOICES = [("conv", "conv_published"), ("conv", "conv"), ("mlp", "mlp")]
STEPS = 3
STEPPED = [(*choice, steps, 0) for choice in CHOICES for steps in (1, STEPS)] + [("mlp", "mlp", STEPS, 4)]


Params = dict[str, ParameterValue]
COLOUR = ImageForm(mode="RGB", height=32, width=32, mean=(0.5,) * 3, std=(0.25,) * 3)


class InDouble(nn.Module):
    """An extractor that computes in float64 whatever the images come as."""

    def __init__(self, extractor: nn.Module) -> None:
        super().__init__()
        self.inner = extractor.double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.inner(images.double())
        return features


@pytest.fixture
def doubles() -> Iterator[None]:
    """Draws and constants in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """By the name of a stage its mean loss, as our training watches it for divergence; every case is one block of batches."""
    check, means = LossMeter.check, {}

    def noted(meter: LossMeter) -> float:
        means[meter._what] = check(meter)
        return means[meter._what]

    monkeypatch.setattr(LossMeter, "check", noted)
    return means


def mean_of(losses: list[float]) -> object:
    """The mean of the reference's losses, to compare with."""
    return pytest.approx(sum(losses) / len(losses), abs=1e-5)


def colour_images(count: int) -> ImageSet:
    stream = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=stream, dtype=torch.uint8)
    return ImageSet(images, torch.arange(count) % len(CLASSES), CLASSES)


Case = tuple[RoundContext, Networks, Networks]


def case_of(quick: FederationPlan, crop: int) -> Case:
    """Round 3 of 4, a client's networks, and a copy of them for the reference."""
    spec = complete_spec(quick.model_copy(update={"augment_flip": True, "augment_crop": crop}))
    initial = initial_parts(spec, b"cohort")
    nets = {part: load_part(spec, part, initial[part]) for part in NETWORKS if part in initial}
    return context(spec, round_number=3), nets, copy.deepcopy(nets)


def case(generator: str, discriminator: str, steps: int, crop: int = 0) -> Case:
    """Of FedCG, on features of 16x5x5."""
    choice = NetworkChoice(split="lenet5", generator=generator, discriminator=discriminator, noise_dim=8)
    return case_of(plan("fedcg", choice, COLOUR, steps=steps, discriminator_passes="separate"), crop)


def crossed_case(steps: int, params: Params, split: str = "lenet5_relu", crop: int = 0) -> Case:
    """Of FedMD-CG."""
    choice = NetworkChoice(split=split, generator="mlp", noise_dim=8)
    return case_of(plan("fedmd_cg", choice, COLOUR, steps=steps, optimiser="sgd", lr=0.05, **params), crop)


def in_double(nets: Networks) -> Networks:
    doubled = {part: net.double() for part, net in nets.items()}
    return {**doubled, Part.EXTRACTOR: InDouble(nets[Part.EXTRACTOR])}


def furthest(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of any two weights, running statistics or singular vectors."""
    return float(differences(ours, theirs).max())


def differences(ours: nn.Module, theirs: nn.Module) -> torch.Tensor:
    mine, others = weights_of(ours), weights_of(theirs)
    return torch.cat([(mine[name] - others[name]).abs().double().flatten() for name in mine])


def params_of(ctx: RoundContext) -> fedcg.FedcgParams:
    return fedcg.FedcgParams.model_validate(ctx.spec.params)


def assert_same_classification(
    ours: Networks, theirs: Networks, loss: float, expected: list[float], watched: dict[str, float]
) -> None:
    """Ours reports the cross-entropy alone."""
    assert watched["classification with penalties"] == mean_of(expected)
    assert 0 < loss < sum(expected) / len(expected)
    assert furthest(ours[Part.EXTRACTOR], theirs[Part.EXTRACTOR]) < 1e-5
    assert furthest(ours[Part.CLASSIFIER], theirs[Part.CLASSIFIER]) < 1e-5


@pytest.mark.parametrize(("steps", "crop"), [(1, 0), (STEPS, 0), (STEPS, 4)])
def test_classification_with_the_feature_loss_takes_the_same_steps_as_the_reference(
    steps: int, crop: int, watched: dict[str, float]
) -> None:
    ctx, ours, theirs = case("conv", "conv_published", steps, crop)
    data = colour_images(20)
    assert fedcg.gamma(ctx.round, params_of(ctx)) > 0.5
    penalty = fedcg.feature_penalty(ours[Part.GENERATOR], fedcg.gamma(ctx.round, params_of(ctx)), ctx)
    before = weights_of(ours[Part.EXTRACTOR])
    loss = train_classifier(ours[Part.EXTRACTOR], ours[Part.CLASSIFIER], data, params_of(ctx), ctx, penalty)
    expected = classify(theirs, data, params_of(ctx), ctx)
    assert len(expected) == steps
    assert_same_classification(ours, theirs, loss, expected, watched)
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights_of(ours[Part.EXTRACTOR]).items())


def train_our_gan(nets: Networks, ctx: RoundContext) -> None:
    source = FeatureSource(nets[Part.EXTRACTOR], colour_images(20), ctx.spec)
    run_stage(fedcg.adversarial(nets[Part.GENERATOR], nets[Part.DISCRIMINATOR], source, params_of(ctx), ctx), ctx)


@pytest.mark.parametrize(("generator", "discriminator", "steps", "crop"), STEPPED)
def test_the_gan_takes_the_same_steps_as_the_reference(
    generator: str, discriminator: str, steps: int, crop: int, watched: dict[str, float], request: pytest.FixtureRequest
) -> None:
    # In float64, so that a difference is one in the maths, not in the order of additions.
    ctx, ours, theirs = case(generator, discriminator, steps, crop)
    ours, theirs = in_double(ours), in_double(theirs)
    request.getfixturevalue("doubles")
    before = copy.deepcopy(ours[Part.GENERATOR])
    train_our_gan(ours, ctx)
    expected = train_gan(theirs, colour_images(20), params_of(ctx), ctx)
    assert watched["generator and discriminator"] == mean_of(expected)
    assert furthest(ours[Part.GENERATOR], before) > 1e-5
    assert furthest(ours[Part.GENERATOR], theirs[Part.GENERATOR]) < 1e-9
    assert furthest(ours[Part.DISCRIMINATOR], theirs[Part.DISCRIMINATOR]) < 1e-9


@pytest.mark.parametrize("kind", ["conv", "mlp"])
@pytest.mark.parametrize("steps", [1, STEPS])
def test_the_student_takes_the_same_steps_as_the_reference(kind: str, steps: int, watched: dict[str, float]) -> None:
    ctx, student, theirs = case(kind, "mlp", 1)
    settings = distillation.Distillation(steps, 8, 3e-4, 1e-4)
    bank = distillation.draw_bank(ctx.streams, settings.rows, 8, distillation.uniform(3))
    teachers, logits = [], []
    for examples, root in ((10, b"one"), (30, b"two")):
        teacher = distillation.load_pair(initial_parts(ctx.spec.model_copy(update={"seed": examples}), root), ctx)
        logits.append((examples, {"logits": distillation.teacher_logits(teacher, bank, ctx)}))
        teachers.append((examples / 40, copy.deepcopy(teacher)))
    target = weighted_average(logits)["logits"]
    distillation.train_student(
        student,
        bank,
        settings,
        ctx,
        lambda nets, features, logits, taught: kl_teacher_student(taught, logits),
        lambda rows: (target[rows],),
    )
    losses = distil(theirs, teachers, bank, settings)
    assert len(losses) == steps
    assert watched["distillation"] == mean_of(losses)
    assert furthest(student[Part.GENERATOR], theirs[Part.GENERATOR]) < 1e-5
    assert furthest(student[Part.CLASSIFIER], theirs[Part.CLASSIFIER]) < 1e-5


PRINT: Params = {"diversity": "normalised"}
CODE: Params = {"diversity": "mean_squared", "divergence": "teacher_student", "temperature": 10.0, "lambda2": 0.1}
P_OF_Y = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def crossed_params_of(ctx: RoundContext) -> fedmd_cg.FedmdCgParams:
    return fedmd_cg.FedmdCgParams.model_validate(ctx.spec.params)


@pytest.mark.parametrize(("params", "split", "crop"), [(PRINT, "lenet5_relu", 0), (CODE, "cnn_bn", 4)])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_classifier_takes_the_same_steps_as_the_reference(
    steps: int, params: Params, split: str, crop: int, watched: dict[str, float]
) -> None:
    ctx, ours, theirs = crossed_case(steps, params, split, crop)
    data = colour_images(20)
    penalty = fedmd_cg.global_penalty(ours[Part.GENERATOR], P_OF_Y, crossed_params_of(ctx), ctx)
    before = weights_of(ours[Part.CLASSIFIER])
    loss = train_classifier(ours[Part.EXTRACTOR], ours[Part.CLASSIFIER], data, crossed_params_of(ctx), ctx, penalty)
    expected = classify_crossed(theirs, data, P_OF_Y, crossed_params_of(ctx), ctx)
    assert len(expected) == steps
    assert_same_classification(ours, theirs, loss, expected, watched)
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights_of(ours[Part.CLASSIFIER]).items())


@pytest.mark.parametrize("params", [PRINT, CODE])
@pytest.mark.parametrize(("steps", "crop"), [(1, 0), (3, 0), (3, 4)])
def test_the_generator_takes_the_same_steps_as_the_reference(
    steps: int, crop: int, params: Params, watched: dict[str, float], request: pytest.FixtureRequest
) -> None:
    ctx, ours, theirs = crossed_case(steps, params, crop=crop)
    ours, theirs = in_double(ours), in_double(theirs)
    request.getfixturevalue("doubles")
    data = colour_images(20)
    before = copy.deepcopy(ours[Part.GENERATOR])
    source = FeatureSource(ours[Part.EXTRACTOR], data, ctx.spec, steps * 8)
    run_stage(fedmd_cg.imitation(ours[Part.GENERATOR], ours[Part.CLASSIFIER], source, crossed_params_of(ctx), ctx), ctx)
    expected = train_generator(theirs, data, crossed_params_of(ctx), ctx)
    assert len(expected) == steps
    assert watched["generator"] == mean_of(expected)
    assert furthest(ours[Part.GENERATOR], before) > 1e-5
    assert furthest(ours[Part.GENERATOR], theirs[Part.GENERATOR]) < 1e-9


@pytest.mark.parametrize("divergence", [Divergence(), Divergence("teacher_student", 10.0)])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_crossed_student_takes_the_same_steps_as_the_reference(steps: int, divergence: Divergence) -> None:
    ctx, _, _ = crossed_case(1, PRINT)
    settings = distillation.Distillation(steps, 8, 3e-4, 1e-4)
    counts = ((4, 1, 5), (2, 6, 2))
    updates, teachers = {}, []
    for name, root, mine in (("a", b"one", counts[0]), ("b", b"two", counts[1])):
        parts = initial_parts(ctx.spec.model_copy(update={"seed": mine[0]}), root)
        shared = {part: parts[part] for part in (Part.GENERATOR, Part.CLASSIFIER)}
        updates[name] = Update(name, shared, sum(mine), mine)
        teachers.append(distillation.load_pair(shared, ctx))
    aggregate = merged(crossed_aggregator(settings, divergence, ctx, MemorySpill()), updates)
    bank = distillation.draw_bank(ctx.streams, settings.rows, 8, torch.tensor(counts, dtype=torch.float64).sum(0) / 20)
    mean = {
        part: {name: (one + updates["b"].parts[part][name]) / 2 for name, one in updates["a"].parts[part].items()}
        for part in (Part.GENERATOR, Part.CLASSIFIER)
    }
    start = distillation.load_pair(mean, ctx)
    student = copy.deepcopy(start)
    assert len(distil_crossed(student, teachers, label_shares(counts), bank, settings, divergence)) == steps
    ours = distillation.load_pair(aggregate.parts, ctx)
    assert furthest(start[Part.CLASSIFIER], student[Part.CLASSIFIER]) > 1e-5
    # Adam's first step is lr · g / (|g| + 1e-8): where a gradient is 0 but for rounding, its direction is rounding too.
    for part in (Part.GENERATOR, Part.CLASSIFIER):
        assert float((differences(ours[part], student[part]) > 1e-5).double().mean()) < 1e-3
