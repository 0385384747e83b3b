"""PPIDSG: its losses by hand, each network moved by its own, and as a method whose keys stay with the box."""

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from edge_client.config import PolicySection
from edge_client.firewall import check_spec
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.defences.params import EtcParams
from fedcg.learning.defences.scrambling import draw_keys, scrambling_of
from fedcg.learning.errors import NetworkError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import ClientState, LocalResult, RoundContext
from fedcg.learning.methods import ppidsg
from fedcg.learning.networks.assembly import personal_model
from fedcg.learning.networks.image_networks import ImageAutoencoder, Widths
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationPlan, ImageForm
from fedcg.learning.training.evaluation import evaluate
from fedcg.learning.training.stage import Batches, Nets, Tensors, run_stage
from fedcg.wire.messages.schemas import DeclineReason
from fedcg.wire.parts import Part
from tests.support.learning import learning_cases as cases
from tests.support.learning.networks import networks_of

TINY = Widths(generator=2, residual=1, discriminator=2, extractor=2, hidden=(8, 4))
SQUARE = ImageForm(mode="L", height=16, width=16, mean=(0.5,), std=(0.5,))
SIZE = (1, 16, 16)
SCRAMBLE: ppidsg.Encrypt = scrambling_of(draw_keys(Streams(b"device"), SIZE), SIZE, EtcParams().order(1)).encrypt
NO_TERMS: dict[str, Any] = {"adversarial_weight": 0.0, "semantic_weight": 0.0, "classification_weight": 0.0}
PARTS = ("generator", "discriminator", "extractor", "classifier")


def round_context(round_number: int = 1, *, flip: bool = False) -> RoundContext:
    return cases.context(cases.quick_spec("ppidsg", augment_flip=flip).model_copy(update={"rounds": 50}), round_number)


def quick(**changed: object) -> ppidsg.PpidsgParams:
    return ppidsg.PpidsgParams.model_validate({"steps": 2, "batch_size": 8, **changed})


def learn(
    nets: Nets, data: ImageSet, encrypt: ppidsg.Encrypt, params: ppidsg.PpidsgParams, ctx: RoundContext
) -> dict[str, float]:
    """Train in place; the mean losses by name."""
    losses = run_stage(ppidsg.translation(nets, data, encrypt, params, ctx), ctx)
    return dict(zip(ppidsg.TRANSLATION_LOSSES, losses, strict=True))


def blocks(data: ImageSet, params: ppidsg.PpidsgParams, ctx: RoundContext) -> list[Tensors]:
    """What a round goes over."""
    return list(
        ppidsg.translation(networks_of(TINY, SIZE, len(cases.CLASSES)), data, SCRAMBLE, params, ctx).batches.blocks
    )


def quick_round(
    data: ImageSet | None = None, ctx: RoundContext | None = None, **changed: object
) -> tuple[Nets, dict[str, float]]:
    """Tiny networks, the same ones in every call, after a quick round."""
    nets = networks_of(TINY, SIZE, len(cases.CLASSES))
    losses = learn(nets, data or cases.bright_images(24, 0), SCRAMBLE, quick(**changed), ctx or round_context())
    return nets, losses


def same_state(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def changed_weights(nets: Nets) -> list[str]:
    """Which networks have other WEIGHTS than before their round; running statistics do not count."""
    before = networks_of(TINY, SIZE, len(cases.CLASSES))
    pairs = {name: zip(nets[name].parameters(), before[name].parameters(), strict=True) for name in PARTS}
    return [name for name in PARTS if not all(torch.equal(one, other) for one, other in pairs[name])]


def test_the_generators_loss_is_the_weighted_sum_of_three() -> None:
    scores = torch.tensor([[[[0.0, -math.log(3.0)]]]])  # D = 1/2 and 1/4: -log D = ln 2 and ln 4, mean 1.5 ln 2
    made, encrypted = torch.tensor([[[[0.5, -0.25]]]]), torch.tensor([[[[-0.5, 0.25]]]])  # |difference| 1 and 0.5: 0.75
    logits, labels = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([1])  # p = 3/4: -ln 0.75
    weights = {"adversarial_weight": 2.0, "semantic_weight": 3.0, "classification_weight": 5.0}
    objective = ppidsg.generator_objective(scores, made, encrypted, logits, labels, quick(**weights))
    assert objective.item() == pytest.approx(2 * 1.5 * math.log(2) + 3 * 0.75 + 5 * -math.log(0.75))
    # With squares: (0 - 1)² and (-ln 3 - 1)².
    squared = quick(**weights, adversarial="least_squares")
    squares = ppidsg.generator_objective(scores, made, encrypted, logits, labels, squared)
    adversarial = (1.0 + (math.log(3) + 1) ** 2) / 2
    assert squares.item() == pytest.approx(2 * adversarial + 3 * 0.75 + 5 * -math.log(0.75))


def test_the_discriminator_is_to_give_one_on_encrypted_and_zero_on_generated_images() -> None:
    real, fake = torch.tensor([[[[math.log(3.0)]]]]), torch.tensor([[[[math.log(4.0)]]]])
    # D = 3/4 on real, 4/5 on fake: -ln 3/4 - ln 1/5.
    logarithms = -math.log(0.75) - math.log(0.2)
    assert ppidsg.discriminator_objective(real, fake, "logarithm").item() == pytest.approx(logarithms)
    squares = (math.log(3) - 1) ** 2 + math.log(4) ** 2
    assert ppidsg.discriminator_objective(real, fake, "least_squares").item() == pytest.approx(squares)


def test_each_network_is_moved_by_its_own_loss_alone() -> None:
    data = cases.bright_images(24, 0)
    other_labels = replace(data, labels=(data.labels + 1) % len(cases.CLASSES))
    first, _ = quick_round(data, **NO_TERMS)
    assert changed_weights(first) == ["discriminator", "extractor", "classifier"]
    # Without the classification loss, labels reach the classifier and nothing else.
    second, _ = quick_round(other_labels, **NO_TERMS)
    assert [name for name in PARTS if not same_state(first[name], second[name])] == ["classifier"]
    third, _ = quick_round(other_labels, classification_weight=1.0)
    fourth, _ = quick_round(data, classification_weight=1.0)
    assert not same_state(third["generator"], fourth["generator"])
    # The encrypted images reach the generator through eq. 8 alone where D has no weight, and D always.
    nets = networks_of(TINY, SIZE, len(cases.CLASSES))
    learn(nets, data, lambda images: 255 - images, quick(**NO_TERMS), round_context())
    assert [name for name in PARTS if not same_state(first[name], nets[name])] == ["discriminator"]


@pytest.mark.parametrize("term", ["adversarial_weight", "semantic_weight", "classification_weight"])
def test_every_term_moves_the_generator(term: str) -> None:
    assert "generator" in changed_weights(quick_round(**{**NO_TERMS, term: 1.0})[0])


def test_learning_rates_are_constant_at_first_and_then_fall_on_a_line() -> None:
    assert [ppidsg.rate_factor(round_number, 50, 20) for round_number in (1, 20, 21, 50, 60)] == pytest.approx(
        [1.0, 1.0, 30 / 31, 1 / 31, 1 / 31]
    )
    assert ppidsg.rate_factor(5, 5, 20) == 1.0


def test_optimisers_are_adam_for_the_gan_and_sgd_with_momentum_for_the_rest() -> None:
    nets, params = networks_of(TINY, SIZE, len(cases.CLASSES)), ppidsg.PpidsgParams()
    trained = ppidsg.translation(nets, cases.bright_images(24, 0), SCRAMBLE, params, round_context(50)).trained
    gan, task = (trained[name].optimiser.param_groups[0] for name in ("generator", "extractor"))
    assert (gan["betas"], gan["weight_decay"], gan["lr"]) == ((0.5, 0.999), 0.0, pytest.approx(2e-4 / 31))
    assert (task["momentum"], task["weight_decay"], task["lr"]) == (0.9, 0.001, pytest.approx(0.01 / 31))


def numbered(start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(start, start + count)
    return labels.float().view(-1, 1, 1, 1), labels


def test_the_pool_exchanges_half_of_the_images_for_earlier_ones_with_their_labels() -> None:
    pool = ppidsg.ImagePool(10, torch.Generator().manual_seed(0))
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


class OneAnswer(ppidsg.ImagePool):
    """A pool that gives the same images and labels, whatever comes."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__(1, torch.Generator())
        self.answer = images, labels

    def exchange(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.answer


def test_extractor_classifier_and_discriminator_are_trained_on_pooled_images_and_their_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nets, twins = (networks_of(TINY, SIZE, len(cases.CLASSES)) for _ in range(2))
    images, encrypted, pooled = (normalise(cases.bright_images(6, seed).images, SQUARE) for seed in (1, 2, 3))
    labels, pooled_labels = torch.zeros(6, dtype=torch.int64), torch.full((6,), 2)
    monkeypatch.setattr(ppidsg, "ImagePool", lambda size, stream: OneAnswer(pooled, pooled_labels))
    stage = ppidsg.translation(nets, cases.bright_images(6, 1), SCRAMBLE, quick(lr=1e-12), round_context())
    one_batch = replace(stage, batches=Batches([(images, encrypted, labels)], 1, None))
    _, restoration, classification, judged = run_stage(one_batch, round_context())
    with torch.no_grad():
        extractor = cast("ImageAutoencoder", twins["extractor"])
        features = extractor(pooled)
        assert restoration == pytest.approx(F.mse_loss(extractor.restore(features), pooled).item())
        right = twins["classifier"](features).log_softmax(1)[:, 2]
        assert classification == pytest.approx(-right.mean().item(), rel=1e-5)
        real, fake = (twins["discriminator"](some) for some in (encrypted, pooled))
        assert judged == pytest.approx(ppidsg.discriminator_objective(real, fake, "logarithm").item())


def test_a_round_has_a_pool_of_the_size_that_is_asked_for() -> None:
    assert not same_state(quick_round()[0]["discriminator"], quick_round(pool_images=0)[0]["discriminator"])


def test_without_a_pool_what_comes_is_given_back() -> None:
    images, labels = numbered(0, 5)
    given = ppidsg.ImagePool(0, torch.Generator()).exchange(images, labels)
    assert torch.equal(given[0], images)
    assert torch.equal(given[1], labels)


def test_what_is_encrypted_is_the_augmented_image() -> None:
    ctx, data = round_context(flip=True), cases.bright_images(24, 0)
    ((images, encrypted, _),) = blocks(data, quick(steps=3), ctx)
    pixels = ((images + 1) * 127.5).round().to(torch.uint8)
    assert torch.equal(normalise(SCRAMBLE(pixels), SQUARE), encrypted)
    plain = {image.numpy().tobytes() for image in data.images}
    assert any(image.numpy().tobytes() not in plain for image in pixels)  # some are mirrored


METHOD = get_method("ppidsg")
SPEC = cases.quick_spec("ppidsg")
COHORT = cases.quick_spec("ppidsg", key="cohort")


def start(spec=SPEC) -> ClientState:  # type: ignore[no-untyped-def]
    return METHOD.init_client(spec, initial_parts(spec, b"cohort"))


def trained(state: ClientState, number: int = 1, root: bytes = b"device", spec=SPEC) -> LocalResult:  # type: ignore[no-untyped-def]
    return METHOD.local_round(state, cases.bright_images(24, 0), None, cases.context(spec, number, root))


def test_the_generator_alone_is_shared_and_no_key_is_in_it() -> None:
    result = trained(start())
    assert set(result.shared.parts) == {Part.IMAGE_GENERATOR}
    layout = {one.name for one in SPEC.layouts[Part.IMAGE_GENERATOR]}
    assert result.shared.parts[Part.IMAGE_GENERATOR].keys() == layout
    assert set(result.private.extras) == {"key", "scrambling", "discriminator"}


def test_the_classifier_starts_every_round_from_its_key() -> None:
    first, key = trained(start()).private, start().extras["key"]
    assert cases.same(first.extras["key"], key)
    assert not cases.same(key, initial_parts(SPEC, b"cohort")[Part.CLASSIFIER])  # that one is public
    assert not cases.same(key, METHOD.init_client(SPEC, initial_parts(SPEC, b"another")).extras["key"])
    assert not cases.same(first.parts[Part.CLASSIFIER], key)
    other = {name: torch.zeros_like(tensor) for name, tensor in first.parts[Part.CLASSIFIER].items()}
    moved = replace(first, parts={**first.parts, Part.CLASSIFIER: other})
    one, two = (trained(state, 2).private for state in (first, moved))
    assert cases.same(one.parts[Part.CLASSIFIER], two.parts[Part.CLASSIFIER])
    assert not cases.same(
        trained(replace(first, extras={**first.extras, "key": other}), 2).private.parts[Part.CLASSIFIER],
        one.parts[Part.CLASSIFIER],
    )


def test_a_box_keeps_its_scrambling_and_each_has_another() -> None:
    first, neighbour = trained(start()).private, trained(start(), root=b"neighbour").private
    assert cases.same(trained(first, 2).private.extras["scrambling"], first.extras["scrambling"])
    assert not cases.same(neighbour.extras["scrambling"], first.extras["scrambling"])


def test_with_a_cohorts_key_all_boxes_scramble_alike_and_other_cohorts_otherwise() -> None:
    one, two = (trained(start(COHORT), root=root, spec=COHORT).private.extras["scrambling"] for root in (b"a", b"b"))
    assert cases.same(one, two)
    assert not cases.same(one, METHOD.init_client(COHORT, initial_parts(COHORT, b"another")).extras["scrambling"])


def test_the_model_is_generator_extractor_and_classifier_in_this_order() -> None:
    parts = trained(start()).private.parts
    model, images = personal_model(SPEC, parts), torch.rand(2, 1, 16, 16) * 2 - 1
    generator, extractor, classifier = model.children()
    assert torch.equal(model(images), classifier(extractor(generator(images))))
    assert generator(images).shape == images.shape
    assert evaluate(SPEC, parts, cases.bright_images(24, 1)).images == 24


@pytest.mark.parametrize(
    ("plan_", "problem"),
    [
        (cases.plan("ppidsg"), "network.split must be image_small or image_paper"),
        (cases.usual_plan("ppidsg").model_copy(update={"input": cases.GREY}), "set each to 0.5"),
        (cases.usual_plan("ppidsg", block=5), "block = 5 does not divide images of 16x16"),
        (cases.usual_plan("ppidsg", scrambling="IR,IC"), "IC permutes colour channels"),
    ],
)
def test_a_federation_it_can_not_work_in_is_refused_with_the_setting(plan_: FederationPlan, problem: str) -> None:
    with pytest.raises(NetworkError, match=problem):
        complete_spec(plan_)


def test_a_device_declines_an_image_generator_until_its_owner_lists_it() -> None:
    refused = check_spec(SPEC, PolicySection())
    assert refused is not None
    assert refused[0] is DeclineReason.UPLOAD_NOT_ALLOWED
    assert "image_generator (a network that turns images" in refused[1]
    assert check_spec(SPEC, PolicySection(allow_upload=frozenset({Part.IMAGE_GENERATOR}))) is None
