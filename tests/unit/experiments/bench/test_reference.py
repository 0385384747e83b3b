"""The fast paths against the plain reference: same draws, same losses, same weights."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from experiments.bench.reference_fedcg import (
    classify,
    distil,
    plain,
    plain_networks,
    train_gan,
)
from fedcg.learning.aggregation.distillation import (
    Distillation,
    Ensemble,
    Pair,
    draw_bank,
    teacher_logits,
    train_student,
    uniform,
)
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import RoundContext
from fedcg.learning.methods import fedcg
from fedcg.learning.networks import NETWORKS, Networks, load_part, weights_of
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.spec import ImageForm, NetworkChoice
from fedcg.learning.training.batches import FeatureSource
from fedcg.learning.training.classification import train_classifier
from fedcg.learning.training.losses import LossMeter, kl_teacher_student
from fedcg.learning.training.stage import run_stage
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import CLASSES, context, plan

CHOICES = [("conv", "conv_published"), ("conv", "conv"), ("mlp", "mlp")]
STEPS = 3
STEPPED = [(*choice, steps, 0) for choice in CHOICES for steps in (1, STEPS)] + [("mlp", "mlp", STEPS, 4)]


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


def case(generator: str, discriminator: str, steps: int, crop: int = 0) -> tuple[RoundContext, Networks, Networks]:
    """A client's networks on features of 16x5x5, and a copy of them for the reference."""
    choice = NetworkChoice(split="lenet5", generator=generator, discriminator=discriminator, noise_dim=8)
    quick = plan("fedcg", choice, COLOUR, steps=steps, discriminator_passes="separate")
    spec = complete_spec(quick.model_copy(update={"augment_flip": True, "augment_crop": crop}))
    initial = initial_parts(spec, b"cohort")
    nets = Networks(**{part.value: load_part(spec, part, initial[part]) for part in NETWORKS})
    return context(spec, round_number=3), nets, plain_networks(nets)


def in_double(nets: Networks) -> Networks:
    return Networks(InDouble(nets.extractor), nets.classifier, nets.generator.double(), nets.discriminator.double())


def furthest(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of any two weights, running statistics or singular vectors."""
    return float(differences(ours, theirs).max())


def weights_by_our_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of a plain network, by the names they have in the network it is a copy of."""
    renamed = {
        "parametrizations.weight.original": "weight",
        "parametrizations.weight.0._u": "vectors.left",
        "parametrizations.weight.0._v": "vectors.right",
    }
    result = {}
    for name, tensor in module.state_dict().items():
        for theirs, ours in renamed.items():
            name = name.replace(theirs, ours)
        result[name] = tensor
    return result


def differences(ours: nn.Module, theirs: nn.Module) -> torch.Tensor:
    plain_weights, mine = weights_by_our_names(theirs), weights_of(ours)
    assert mine.keys() == plain_weights.keys()
    return torch.cat([(mine[name] - plain_weights[name]).abs().double().flatten() for name in mine])


def params_of(ctx: RoundContext) -> fedcg.FedcgParams:
    return fedcg.FedcgParams.model_validate(ctx.spec.params)


@pytest.mark.parametrize(("steps", "crop"), [(1, 0), (STEPS, 0), (STEPS, 4)])
def test_classification_with_the_feature_loss_takes_the_same_steps_as_the_reference(
    steps: int, crop: int, watched: dict[str, float]
) -> None:
    ctx, ours, theirs = case("conv", "conv_published", steps, crop)
    data = colour_images(20)
    assert fedcg.gamma(ctx.round, params_of(ctx)) > 0.5
    penalty = fedcg.feature_penalty(ours.generator, fedcg.gamma(ctx.round, params_of(ctx)), ctx)
    before = weights_of(ours.extractor)
    loss = train_classifier(ours.extractor, ours.classifier, data, params_of(ctx), ctx, penalty)
    expected = classify(theirs, data, params_of(ctx), ctx)
    assert len(expected) == steps
    assert watched["classification with penalties"] == mean_of(expected)
    assert 0 < loss < sum(expected) / steps  # ours reports the cross-entropy alone
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights_of(ours.extractor).items())
    assert furthest(ours.extractor, theirs.extractor) < 1e-5
    assert furthest(ours.classifier, theirs.classifier) < 1e-5


@pytest.mark.parametrize(("generator", "discriminator", "steps", "crop"), STEPPED)
def test_the_gan_takes_the_same_steps_as_the_reference(
    generator: str,
    discriminator: str,
    steps: int,
    crop: int,
    watched: dict[str, float],
    request: pytest.FixtureRequest,
) -> None:
    # In float64, so that a difference is one in the maths, not in the order of additions.
    ctx, ours, theirs = case(generator, discriminator, steps, crop)
    ours, theirs = in_double(ours), in_double(theirs)
    request.getfixturevalue("doubles")
    data = colour_images(20)
    before = plain(ours.generator)
    source = FeatureSource(ours.extractor, data, ctx.spec)
    run_stage(fedcg.adversarial(ours.generator, ours.discriminator, source, params_of(ctx), ctx), ctx)
    expected = train_gan(theirs, data, params_of(ctx), ctx)
    assert watched["generator and discriminator"] == mean_of(expected)
    assert furthest(ours.generator, before) > 1e-5
    assert furthest(ours.generator, theirs.generator) < 1e-9
    assert furthest(ours.discriminator, theirs.discriminator) < 1e-9


@pytest.mark.parametrize(("generator", "discriminator"), CHOICES)
def test_one_step_of_the_gan_agrees_in_float32(generator: str, discriminator: str) -> None:
    # Adam's first step is lr · g / (|g| + 1e-8): where a gradient is 0 but for rounding, its direction is rounding too. That is
    # less than one weight in ten thousand; all others agree within 1e-5.
    ctx, ours, theirs = case(generator, discriminator, 1)
    with torch.no_grad():  # features that differ from image to image as a trained extractor's do
        for weight in (*ours.extractor.parameters(), *theirs.extractor.parameters()):
            weight.mul_(5.0)
    data = colour_images(20)
    source = FeatureSource(ours.extractor, data, ctx.spec)
    run_stage(fedcg.adversarial(ours.generator, ours.discriminator, source, params_of(ctx), ctx), ctx)
    train_gan(theirs, data, params_of(ctx), ctx)
    for mine, plain_one in ((ours.generator, theirs.generator), (ours.discriminator, theirs.discriminator)):
        off = differences(mine, plain_one)
        assert float((off > 1e-5).double().mean()) < 1e-4
        assert float(off.max()) <= 2 * params_of(ctx).gan_lr


@pytest.mark.parametrize("kind", ["conv", "mlp"])
@pytest.mark.parametrize("steps", [1, STEPS])
def test_the_student_takes_the_same_steps_as_the_reference(kind: str, steps: int, watched: dict[str, float]) -> None:
    ctx, student, theirs = case(kind, "mlp", 1)
    settings = Distillation(steps, 8, 3e-4, 1e-4)
    bank = draw_bank(ctx.streams, settings.rows, 8, uniform(3))
    teachers = []
    ensemble = Ensemble()
    for examples, root in ((10, b"one"), (30, b"two")):
        initial = initial_parts(ctx.spec.model_copy(update={"seed": examples}), root)
        teacher = Pair(*(load_part(ctx.spec, part, initial[part]) for part in (Part.GENERATOR, Part.CLASSIFIER)))
        ensemble.add(examples, teacher_logits(teacher, bank, ctx))
        teachers.append((examples / 40, Pair(plain(teacher.generator), plain(teacher.classifier))))
    target = ensemble.logits()
    train_student(
        Pair(student.generator, student.classifier),
        bank,
        settings,
        ctx,
        lambda nets, features, logits, taught: kl_teacher_student(taught, logits),
        lambda rows: (target[rows],),
    )
    losses = distil(Pair(theirs.generator, theirs.classifier), teachers, bank, settings)
    assert len(losses) == steps
    assert watched["distillation"] == mean_of(losses)
    assert furthest(student.generator, theirs.generator) < 1e-5
    assert furthest(student.classifier, theirs.classifier) < 1e-5
