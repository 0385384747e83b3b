"""PPIDSG's local training: every loss by hand, who is moved by which, the pool, the rates, and that it learns."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedcg.learning.data.image_folder import normalise
from fedcg.learning.defences.params import EtcParams
from fedcg.learning.defences.scrambling import draw_keys, scrambling_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import RoundContext
from fedcg.learning.methods import ppidsg
from fedcg.learning.methods.ppidsg import (
    TRANSLATION_LOSSES,
    Encrypt,
    ImagePool,
    PpidsgParams,
    TranslationNetworks,
    discriminator_objective,
    generator_objective,
    rate_factor,
    translation,
)
from fedcg.learning.networks.image_networks import WIDTHS, Widths
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice
from fedcg.learning.training.stage import Batches, Tensors, run_stage
from tests.support.learning.image_translation import DIGITS, digit_images, networks_of
from tests.support.learning.learning_cases import CLASSES, bright_images

TINY = Widths(generator=2, residual=1, discriminator=2, extractor=2, hidden=(8, 4))
GREY = ImageForm(mode="L", height=16, width=16, mean=(0.5,), std=(0.5,))
SIZE = (1, 16, 16)
SCRAMBLE: Encrypt = scrambling_of(draw_keys(Streams(b"device"), SIZE), SIZE, EtcParams().order(1)).encrypt
NO_TERMS: dict[str, Any] = {"adversarial_weight": 0.0, "semantic_weight": 0.0, "classification_weight": 0.0}
PARTS = ("generator", "discriminator", "extractor", "classifier")


def context(round_number: int = 1, *, classes: tuple[str, ...] = CLASSES, flip: bool = False) -> RoundContext:
    spec = FederationSpec(
        federation="tests",
        classes=classes,
        image=GREY,
        network=NetworkChoice(),
        method="local",
        params={},
        rounds=50,
        seed=0,
        augment_flip=flip,
        upload=(),
        report=(),
        layouts={},
    )
    return RoundContext(spec, round_number, 1, Streams(b"device").at(round_number))


def quick(**changed: object) -> PpidsgParams:
    return PpidsgParams.model_validate({"steps": 2, "batch_size": 8, **changed})


def learn(
    nets: TranslationNetworks, data: ImageSet, encrypt: Encrypt, params: PpidsgParams, ctx: RoundContext
) -> dict[str, float]:
    """Train in place; the mean losses by name."""
    losses = run_stage(translation(nets, data, encrypt, params, ctx), ctx)
    return dict(zip(TRANSLATION_LOSSES, losses, strict=True))


def blocks(data: ImageSet, params: PpidsgParams, ctx: RoundContext) -> list[Tensors]:
    """What a round goes over."""
    return list(translation(networks_of(TINY, SIZE, len(CLASSES)), data, SCRAMBLE, params, ctx).batches.blocks)


def trained(
    data: ImageSet | None = None, ctx: RoundContext | None = None, **changed: object
) -> tuple[TranslationNetworks, dict[str, float]]:
    """Tiny networks, the same ones in every call, after a quick round."""
    nets = networks_of(TINY, SIZE, len(CLASSES))
    losses = learn(nets, data or bright_images(24, 0), SCRAMBLE, quick(**changed), ctx or context())
    return nets, losses


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def changed_weights(nets: TranslationNetworks) -> list[str]:
    """Which networks have other WEIGHTS than before their round; running statistics do not count."""
    before = networks_of(TINY, SIZE, len(CLASSES))
    return [
        name
        for name in PARTS
        if any(
            not torch.equal(one, other)
            for one, other in zip(getattr(nets, name).parameters(), getattr(before, name).parameters(), strict=True)
        )
    ]


def test_the_generators_loss_is_the_weighted_sum_of_three() -> None:
    scores = torch.tensor([[[[0.0, -math.log(3.0)]]]])  # D = 1/2 and 1/4: -log D = ln 2 and ln 4, mean 1.5 ln 2
    made, encrypted = torch.tensor([[[[0.5, -0.25]]]]), torch.tensor([[[[-0.5, 0.25]]]])  # |difference| 1 and 0.5: 0.75
    logits, labels = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([1])  # p = 3/4: -ln 0.75
    weights = {"adversarial_weight": 2.0, "semantic_weight": 3.0, "classification_weight": 5.0}
    objective = generator_objective(scores, made, encrypted, logits, labels, quick(**weights))
    assert objective.item() == pytest.approx(2 * 1.5 * math.log(2) + 3 * 0.75 + 5 * -math.log(0.75))
    # With squares: (0 - 1)² and (-ln 3 - 1)².
    squares = generator_objective(
        scores, made, encrypted, logits, labels, quick(**weights, adversarial="least_squares")
    )
    adversarial = (1.0 + (math.log(3) + 1) ** 2) / 2
    assert squares.item() == pytest.approx(2 * adversarial + 3 * 0.75 + 5 * -math.log(0.75))


def test_the_default_weights_are_one_one_and_two() -> None:
    params = PpidsgParams()
    assert (params.adversarial_weight, params.semantic_weight, params.classification_weight) == (1.0, 1.0, 2.0)


def test_the_discriminator_is_to_give_one_on_encrypted_and_zero_on_generated_images() -> None:
    real, fake = torch.tensor([[[[math.log(3.0)]]]]), torch.tensor([[[[math.log(4.0)]]]])
    # D = 3/4 on real, 4/5 on fake: -ln 3/4 - ln 1/5.
    assert discriminator_objective(real, fake, "logarithm").item() == pytest.approx(-math.log(0.75) - math.log(0.2))
    squares = (math.log(3) - 1) ** 2 + math.log(4) ** 2
    assert discriminator_objective(real, fake, "least_squares").item() == pytest.approx(squares)


def test_the_autoencoders_loss_is_a_mean_of_squares_over_the_pooled_images() -> None:
    # One step; the pool is empty, so that the images are G(x) as they were before the step.
    data, params = bright_images(8, 0), quick(steps=1)
    nets = networks_of(TINY, SIZE, len(CLASSES))
    for name in PARTS:
        getattr(nets, name).train()
    ((images, encrypted, labels),) = blocks(data, params, context())
    with torch.no_grad():
        made = nets.generator(images)
        # The generator's step runs the extractor too; its batch statistics, not its running ones, are in use here.
        restored = nets.extractor.restore(nets.extractor(made))
        expected = (restored - made).square().sum().item() / made.numel()
        cross_entropy = -nets.classifier(nets.extractor(made)).log_softmax(1)[torch.arange(8), labels].mean().item()
        distance = (made - encrypted).abs().mean().item()
        forged = F.softplus(-nets.discriminator(made)).mean().item()
        judged = F.softplus(-nets.discriminator(encrypted)).mean() + F.softplus(nets.discriminator(made)).mean()
    _, losses = trained(data, steps=1, lr=1e-12)  # the classifier's loss is taken after the extractor's step
    assert losses["restoration"] == pytest.approx(expected, rel=1e-5)
    assert losses["classification"] == pytest.approx(cross_entropy, rel=1e-5)
    assert losses["generator"] == pytest.approx(forged + distance + 2 * cross_entropy, rel=1e-5)
    assert losses["discriminator"] == pytest.approx(judged.item(), rel=1e-5)


def test_each_network_is_moved_by_its_own_loss_alone() -> None:
    data = bright_images(24, 0)
    other_labels = replace(data, labels=(data.labels + 1) % len(CLASSES))
    first, _ = trained(data, **NO_TERMS)
    assert changed_weights(first) == ["discriminator", "extractor", "classifier"]
    # Without the classification loss, labels reach the classifier and nothing else.
    second, _ = trained(other_labels, **NO_TERMS)
    assert [name for name in PARTS if not same(getattr(first, name), getattr(second, name))] == ["classifier"]
    third, _ = trained(other_labels, classification_weight=1.0)
    fourth, _ = trained(data, classification_weight=1.0)
    assert not same(third.generator, fourth.generator)
    # The encrypted images reach the generator through eq. 8 alone where D has no weight, and D always.
    nets = networks_of(TINY, SIZE, len(CLASSES))
    learn(nets, data, lambda images: 255 - images, quick(**NO_TERMS), context())
    assert [name for name in PARTS if not same(getattr(first, name), getattr(nets, name))] == ["discriminator"]


@pytest.mark.parametrize("term", ["adversarial_weight", "semantic_weight", "classification_weight"])
def test_every_term_moves_the_generator(term: str) -> None:
    assert "generator" in changed_weights(trained(**{**NO_TERMS, term: 1.0})[0])


def test_learning_rates_are_constant_at_first_and_then_fall_on_a_line() -> None:
    assert [rate_factor(round_number, 50, 20) for round_number in (1, 20, 21, 50, 60)] == pytest.approx(
        [1.0, 1.0, 30 / 31, 1 / 31, 1 / 31]
    )
    assert rate_factor(5, 5, 20) == 1.0


def test_optimisers_are_adam_for_the_gan_and_sgd_with_momentum_for_the_rest() -> None:
    nets = networks_of(TINY, SIZE, len(CLASSES))
    trained = translation(nets, bright_images(24, 0), SCRAMBLE, PpidsgParams(), context(50)).trained
    for name in ("generator", "discriminator"):
        group = trained[name].optimiser.param_groups[0]
        assert (group["betas"], group["weight_decay"]) == ((0.5, 0.999), 0.0)
        assert group["lr"] == pytest.approx(2e-4 / 31)
    for name in ("extractor", "classifier"):
        group = trained[name].optimiser.param_groups[0]
        assert (group["momentum"], group["weight_decay"]) == (0.9, 0.001)
        assert group["lr"] == pytest.approx(0.01 / 31)


def test_more_steps_of_the_generator_a_batch_are_taken() -> None:
    one, two = trained(steps=1)[0], trained(steps=1, generator_steps=2)[0]
    assert not same(one.generator, two.generator)


def numbered(start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(start, start + count)
    return labels.float().view(-1, 1, 1, 1), labels


def test_the_pool_exchanges_half_of_the_images_for_earlier_ones_with_their_labels() -> None:
    pool = ImagePool(10, torch.Generator().manual_seed(0))
    images, labels = numbered(0, 8)
    assert torch.equal(pool.exchange(images, labels)[1], labels)  # they fill it
    given: list[int] = []
    earlier = 0
    for start in range(8, 808, 8):
        images, labels = pool.exchange(*numbered(start, 8))
        assert torch.equal(images.flatten(), labels.float())
        assert labels.shape == (8,)
        given += labels.tolist()
        earlier += int((labels < start).sum())
    assert 300 < earlier < 400  # of 800; some of the exchanged ones are of the same batch
    later = [label for label in given if label >= 10]
    assert len(later) == len(set(later))  # but for the ten that filled it, an image comes back once,
    assert len(set(range(10, 808)) - set(later)) <= 10  # unless it is in the pool


class OneAnswer(ImagePool):
    """A pool that gives the same images and labels, whatever comes."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__(1, torch.Generator())
        self.answer = images, labels

    def exchange(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.answer


def test_extractor_classifier_and_discriminator_are_trained_on_pooled_images_and_their_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nets, twins = (networks_of(TINY, SIZE, len(CLASSES)) for _ in range(2))
    images, encrypted, pooled = (normalise(bright_images(6, seed).images, GREY) for seed in (1, 2, 3))
    labels, pooled_labels = torch.zeros(6, dtype=torch.int64), torch.full((6,), 2)
    monkeypatch.setattr(ppidsg, "ImagePool", lambda size, stream: OneAnswer(pooled, pooled_labels))
    stage = translation(nets, bright_images(6, 1), SCRAMBLE, quick(lr=1e-12), context())
    one_batch = replace(stage, batches=Batches([(images, encrypted, labels)], 1, None))
    _, restoration, classification, judged = run_stage(one_batch, context())
    with torch.no_grad():
        features = twins.extractor(pooled)
        assert restoration == pytest.approx(F.mse_loss(twins.extractor.restore(features), pooled).item())
        right = twins.classifier(features).log_softmax(1)[:, 2]
        assert classification == pytest.approx(-right.mean().item(), rel=1e-5)
        real, fake = twins.discriminator(encrypted), twins.discriminator(pooled)
        assert judged == pytest.approx(discriminator_objective(real, fake, "logarithm").item())


def test_a_round_has_a_pool_of_the_size_that_is_asked_for() -> None:
    assert not same(trained()[0].discriminator, trained(pool_images=0)[0].discriminator)


def test_without_a_pool_what_comes_is_given_back() -> None:
    images, labels = numbered(0, 5)
    given = ImagePool(0, torch.Generator()).exchange(images, labels)
    assert torch.equal(given[0], images)
    assert torch.equal(given[1], labels)


def test_what_is_encrypted_is_the_augmented_image() -> None:
    ctx, data = context(flip=True), bright_images(24, 0)
    ((images, encrypted, _),) = blocks(data, quick(steps=3), ctx)
    pixels = ((images + 1) * 127.5).round().to(torch.uint8)
    assert torch.equal(normalise(SCRAMBLE(pixels), GREY), encrypted)
    plain = {image.numpy().tobytes() for image in data.images}
    assert any(image.numpy().tobytes() not in plain for image in pixels)  # some are mirrored


def test_mechanisms_of_a_client_reach_the_training() -> None:
    plain, _ = trained()
    noisy, _ = trained(ctx=replace(context(), privacy=PrivacySettings(gradient_noise=0.1)))
    assert not same(plain.generator, noisy.generator)
    dropout = replace(context(), privacy=PrivacySettings(dropout=0.5))
    (dropping, _), (again, _) = trained(ctx=dropout), trained(ctx=dropout)
    assert not same(plain.classifier, dropping.classifier)
    assert same(again.classifier, dropping.classifier)


@pytest.mark.slow
def test_the_digits_are_learned_in_their_encrypted_form() -> None:
    train, test = digit_images(slice(0, 300), 16), digit_images(slice(300, 600), 16)
    nets = networks_of(WIDTHS["small"], SIZE, 10)
    target = normalise(SCRAMBLE(test.images), GREY)

    def figures() -> tuple[float, float]:
        """Accuracy on test images, and the generator's mean absolute distance to their encryption."""
        chain = nn.Sequential(nets.generator, nets.extractor, nets.classifier).eval()
        images = normalise(test.images, GREY)
        with torch.no_grad():
            correct = (chain(images).argmax(1) == test.labels).float().mean().item()
            return correct, F.l1_loss(nets.generator(images), target).item()

    accuracy, distance = figures()
    assert accuracy < 0.25
    params = PpidsgParams(epochs=8, batch_size=16, gan_lr=1e-3)
    learn(nets, train, SCRAMBLE, params, context(classes=DIGITS))
    learned, nearer = figures()
    assert learned > 0.5
    assert nearer < distance - 0.1
    with torch.no_grad():
        made = nets.generator(normalise(test.images, GREY))
    others = scrambling_of(draw_keys(Streams(b"another device"), SIZE), SIZE, EtcParams().order(1)).encrypt(test.images)
    assert F.l1_loss(made, normalise(others, GREY)).item() > nearer + 0.1
