"""PPIDSG (Ma et al., 2024): only a generator is shared, which turns images into block-scrambled ones for the classifier.

A device trains a generator that imitates the encryption of its images, a feature extractor and a classifier on
generated images, and a discriminator (eq. 7-11). Only the generator is uploaded and averaged (eq. 5). Its input is
IMAGES, so a device shares it only if its owner lists `image_generator`. The classifier starts every round from its key:
weights that the coordinator does not know if the federation has a cohort secret.

`key = device`: each device scrambles with its own keys, drawn in its first round. `key = cohort`: all devices with the
cohort secret use the same keys, as in the authors' code, so their generators have one target.

One step is one batch x with labels and its encryption y. G takes a step on eq. 11. A pool then mixes its images with
earlier ones, on which F (eq. 9), C (eq. 10) and D (eq. 7) take one step each. Readings, where the paper's text is
garbled or missing:
  * eq. 7 is log D(y) + log(1 - D(G(x))), which D maximises: minimised here as FedCG's eq. 4 is, with the non-saturating
    form for G, a mean over patches. `adversarial = least_squares` is the loss of the authors' code and of CycleGAN;
  * eq. 8 is the mean of |G(x) - y|;
  * eq. 9 is the mean squared difference of an image and its reconstruction by F's decoder;
  * eq. 11 is a weighted sum of the adversarial, semantic and classification loss; the paper's text lacks its weights;
    1, 1 and 2 are from the authors' code, as are the momentum of SGD and the betas of Adam;
  * F and C are trained separately: the cross-entropy updates only C, the MSE only F (and G's step updates neither).
Deviations: a pooled image keeps its own label for C (the authors' code uses the label of the batch's image at the same
index); one draw from the pool serves all three networks, and the pool is empty at the start of a round; one step of G
per batch, where their code takes two (`generator_steps`). Here each device has its own key, so an averaged generator
has as many targets as there are devices.

What the paper does not say, but the authors' code does:
  * all clients scramble with one key (`key = cohort`), in EtC too;
  * accuracy is that of the averaged G, one client's F, and C with its key: the C that a client trains is dropped;
  * IA acts after normalisation, as 1 - x for x in [-1, 1], on exactly half of the blocks. IC exchanges channels in place,
    so that two or all channels of an exchanged block become equal: information is lost;
  * G and D start from N(0, 0.02);
  * the learning rates fall once, after `constant_rounds`, by one step of the linear decay, and stay there.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Literal, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from pydantic import Field
from torch import nn

from fedcg.learning import method as fl
from fedcg.learning.aggregation.averaging import AverageAggregator
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.defences.params import DEFAULT_BLOCK, Block, EtcParams, ScramblingKey, ScramblingSteps
from fedcg.learning.defences.scrambling import Scrambling, ScramblingKeys, draw_keys, scrambling_of
from fedcg.learning.errors import DefenceError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks import build_part, load_part, weights_of
from fedcg.learning.networks.assembly import allocated, split_of
from fedcg.learning.networks.image_networks import IMAGE_SPLITS, ImageAutoencoder, unfit_form
from fedcg.learning.networks.randomness import draw_weights
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice, NetworkSpec, TensorForm
from fedcg.learning.training import stage
from fedcg.learning.training.batches import Augmenter, images_at_once, local_batches
from fedcg.learning.training.classification import dropped
from fedcg.learning.training.losses import cross_entropy, fake_loss, real_loss
from fedcg.learning.training.optimisers import adam, task_optimiser
from fedcg.wire.parts import Part, Report

SHARED = frozenset({Part.IMAGE_GENERATOR})
PRIVATE = frozenset({Part.EXTRACTOR, Part.CLASSIFIER})
SCRAMBLING = "scrambling"  # extras with a device's keys
_KEY, _DISCRIMINATOR = "key", "discriminator"
GAN_BETAS = (0.5, 0.999)
Encrypt = Callable[[torch.Tensor], torch.Tensor]
"""[N, C, H, W] uint8 -> the same, encrypted with the device's keys."""
ScoreLoss = Callable[[torch.Tensor], torch.Tensor]
Adversarial = Literal["logarithm", "least_squares"]


class PpidsgParams(fl.TrainingParams):
    """Parameters of training and of the encryption. Defaults are the paper's, or else those of the authors' code."""

    scrambling: ScramblingSteps = ""
    block: Block = DEFAULT_BLOCK
    key: ScramblingKey = "device"
    epochs: int = Field(default=1, ge=1, description="local epochs per round")
    batch_size: int = Field(default=64, ge=2, description="local batch size")
    optimiser: str = Field(default="sgd", pattern="^(adam|sgd)$", description="optimiser of extractor and classifier")
    lr: float = Field(default=0.01, gt=0, description="learning rate of extractor and classifier")
    weight_decay: float = Field(default=1e-3, ge=0, description="weight decay of extractor and classifier")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of sgd; no effect on adam")
    gan_lr: float = Field(default=2e-4, gt=0, description="learning rate of Adam for generator and discriminator")
    constant_rounds: int = Field(default=20, ge=1, description="rounds before learning rates decay linearly towards 0")
    adversarial: Adversarial = Field(default="logarithm", description="eq. 7 as printed, or the authors' least squares")
    adversarial_weight: float = Field(default=1.0, ge=0, description="weight of eq. 7 in the generator's loss, eq. 11")
    semantic_weight: float = Field(default=1.0, ge=0, description="weight of eq. 8, the distance to encrypted images")
    classification_weight: float = Field(default=2.0, ge=0, description="weight of cross-entropy through both networks")
    generator_steps: int = Field(default=1, ge=1, le=100, description="generator steps per batch")
    pool_images: int = Field(
        default=10, ge=0, le=4096, description="size of the pool of earlier generated images; 0: no pool"
    )

    @property
    def needs_cohort(self) -> bool:
        """Without the secret, the coordinator could derive the cohort's key from the public seed."""
        return self.key == "cohort"

    @property
    def etc(self) -> EtcParams:
        """The parameters of the encryption alone."""
        return EtcParams(scrambling=self.scrambling, block=self.block, key=self.key)


def problem_with(spec: NetworkSpec) -> str:
    """Why the method does not support this plan; empty if it does."""
    if spec.network.split not in IMAGE_SPLITS:
        first, *_ = names = tuple(IMAGE_SPLITS)
        return f"its networks work on whole images: network.split must be {' or '.join(names)} (--network {first})"
    if isinstance(spec.input, TensorForm):
        return f"{spec.network.split} needs images, not tensors of shape {list(spec.input.shape)}"
    form, params = spec.image, PpidsgParams.model_validate(spec.params)
    if unfit := unfit_form(form):
        return unfit
    try:
        size = form.tensor_shape
        scrambling_of(draw_keys(Streams(b""), size, params.block), size, params.etc.order(form.channels))
    except DefenceError as error:
        return f"params: {error}"
    return ""


def init_client(spec: FederationSpec, initial: fl.Parts) -> fl.ClientState:
    """The state of a new client: initial networks and keys.

    With every method, a classifier's initial weights follow from the public seed and an extractor's from the cohort
    secret. The classifier's key and a cohort's scrambling are therefore derived from the extractor's initial weights.
    """
    digest = hashlib.sha256()
    for name in sorted(initial[Part.EXTRACTOR]):
        digest.update(initial[Part.EXTRACTOR][name].numpy().tobytes())
    params, streams = PpidsgParams.model_validate(spec.params), Streams(digest.digest())
    key = weights_of(build_part(spec, Part.CLASSIFIER, streams.generator("key")))
    extras: dict[str, fl.Weights] = {_KEY: key}
    if params.key == "cohort":
        extras[SCRAMBLING] = _stored(draw_keys(streams, _size(spec), params.block))
    return fl.ClientState({part: initial[part] for part in sorted(SHARED | PRIVATE)}, extras)


def _size(spec: NetworkSpec) -> tuple[int, int, int]:
    return spec.image.tensor_shape


def _stored(keys: ScramblingKeys) -> fl.Weights:
    return {field.name: getattr(keys, field.name) for field in fields(keys) if field.name != "block"}


def scrambling_by(spec: NetworkSpec, keys: fl.Weights) -> Scrambling:
    """The scrambling that a generator imitates, by a device's keys (its extras `scrambling`)."""
    params = PpidsgParams.model_validate(spec.params)
    return scrambling_of(ScramblingKeys(params.block, **keys), _size(spec), params.etc.order(spec.image.channels))


TRANSLATION_LOSSES = ("generator", "restoration", "classification", "discriminator")
"""Eq. 11, 9, 10, and eq. 7 as the discriminator's, in the order in which the stage reports them."""
_NAME = "generate"


def rate_factor(round_number: int, rounds: int, constant_rounds: int) -> float:
    """The factor of learning rates in a round counted from 1.

    1 at first, then a linear decay that would reach 0 after the last round. An extended federation continues at the
    last round's rate.
    """
    falling = max(rounds - constant_rounds, 0) + 1
    return min(1.0, max(rounds - round_number + 1, 1) / falling)


# Losses on scores of real and of generated images. The generator uses the loss of real ones, on its own images.
_ADVERSARIAL: Mapping[Adversarial, tuple[ScoreLoss, ScoreLoss]] = {
    "logarithm": (real_loss, fake_loss),
    "least_squares": (lambda scores: (scores - 1.0).square().mean(), lambda scores: scores.square().mean()),
}


def discriminator_objective(real: torch.Tensor, fake: torch.Tensor, kind: Adversarial) -> torch.Tensor:
    """Eq. 7 as minimised by D, from its scores [B, 1, h, w] of encrypted and of generated images."""
    of_real, of_fake = _ADVERSARIAL[kind]
    return of_real(real) + of_fake(fake)


def generator_objective(
    scores: torch.Tensor,
    made: torch.Tensor,
    encrypted: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    params: PpidsgParams,
) -> torch.Tensor:
    """Eq. 11: weighted adversarial loss (eq. 7), L1 distance to the encrypted images (eq. 8), and cross-entropy.

    Args:
        scores: D's scores of the generated images, [B, 1, h, w].
        made: G(x), [B, C, H, W].
        encrypted: y, [B, C, H, W].
        logits: C(F(G(x))), [B, classes].
        labels: [B] int64.
        params: the three weights, and the form of eq. 7.
    """
    adversarial = params.adversarial_weight * _ADVERSARIAL[params.adversarial][0](scores)
    semantic = params.semantic_weight * F.l1_loss(made, encrypted)
    return adversarial + semantic + params.classification_weight * cross_entropy(logits, labels)


class ImagePool:
    """CycleGAN's image history: half of the incoming images are exchanged for earlier ones, each with its label."""

    def __init__(self, size: int, stream: torch.Generator) -> None:
        """`size`: images kept; `stream`: draws which are exchanged, and for which."""
        self._size = size
        self._stream = stream
        self._images: torch.Tensor | None = None
        self._labels: torch.Tensor | None = None

    def kept(self) -> dict[str, torch.Tensor]:
        """Its state for a checkpoint."""
        pooled = (
            {} if self._images is None or self._labels is None else {"images": self._images, "labels": self._labels}
        )
        return {**pooled, "stream": self._stream.get_state()}

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Take the state of a checkpoint."""
        self._stream.set_state(kept["stream"])
        self._images, self._labels = kept.get("images"), kept.get("labels")

    def exchange(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same number of images and labels. The first ones fill the pool unchanged; later, half are exchanged for pooled ones."""
        if self._size == 0:
            return images, labels
        kept = 0 if self._images is None else len(self._images)
        if self._images is not None and self._labels is not None:
            images = torch.cat([self._images.to(images.device), images])
            labels = torch.cat([self._labels.to(labels.device), labels])
        exchanged = torch.rand(len(images), generator=self._stream) < 0.5
        places = torch.randint(self._size, (len(images),), generator=self._stream).tolist()
        pool, given = list(range(kept)), []
        for row in range(kept, len(images)):
            if len(pool) < self._size:
                pool.append(row)
                given.append(row)
            elif exchanged[row]:
                given.append(pool[places[row]])
                pool[places[row]] = row
            else:
                given.append(row)
        self._images, self._labels = images[pool], labels[pool]
        return images[given], labels[given]


def translation(
    networks: stage.Nets,
    data: ImageSet,
    encrypt: Encrypt,
    params: PpidsgParams,
    ctx: fl.RoundContext,
    after: tuple[stage.AfterStep, ...] = (),
) -> stage.Stage:
    """One round of PPIDSG's local training.

    Args:
        networks: trained in place, on `ctx.device` (`networks.image_networks`): `generator` G, image -> encrypted
            image, in [-1, 1]; `discriminator` D, image -> logits of patches; `extractor` F, image -> features, inverted
            by `restore`; `classifier` C, features -> logits, with the device's key as its weights.
        data: the training images, on `ctx.device`.
        encrypt: `defences.scrambling.Scrambling.encrypt` with the device's keys and steps; applied to augmented images,
            as in the paper.
        params: weights of the losses, learning rates, pool.
        ctx: spec, round, random streams, progress (phase "generate").
        after: as of `Stage`.
    """
    streams, spec = ctx.streams.at(_NAME), ctx.spec
    augmenter, pool = Augmenter(spec, streams), ImagePool(params.pool_images, streams.generator("pool"))

    def of_images(index: torch.Tensor) -> stage.Tensors:
        raw = data.rows(index.to(data.labels.device))
        images = augmenter.draw(len(index)).apply(raw.images)
        return normalise(images, spec.image), normalise(encrypt(images), spec.image), raw.labels

    def step(nets: stage.Nets, batch: stage.Tensors) -> stage.Descents:
        images, encrypted, labels = batch
        generator, judge, classifier = nets["generator"], nets["discriminator"], nets["classifier"]
        extractor = cast(ImageAutoencoder, nets["extractor"])
        made: list[torch.Tensor] = []

        def forge() -> torch.Tensor:
            image = generator(images)
            made[:] = [image]
            return generator_objective(judge(image), image, encrypted, classifier(extractor(image)), labels, params)

        for _ in range(params.generator_steps):
            forged = yield stage.Descent("generator", forge)
        pooled, pooled_labels = pool.exchange(made[0].detach(), labels)

        def classify() -> torch.Tensor:
            with torch.no_grad():
                features = extractor(pooled)
            return cross_entropy(classifier(dropped(features, ctx.privacy.dropout)), pooled_labels)

        restored = yield stage.Descent("extractor", lambda: F.mse_loss(extractor.restore(extractor(pooled)), pooled))
        classified = yield stage.Descent("classifier", classify)
        judged = yield stage.Descent(
            "discriminator", lambda: discriminator_objective(judge(encrypted), judge(pooled), params.adversarial)
        )
        return [loss for loss in (forged, restored, classified, judged) if loss is not None]

    return stage.Stage(
        name=_NAME,
        losses=tuple(f"{name} loss of the image translation" for name in TRANSLATION_LOSSES),
        networks=networks,
        trained={name: stage.Trained((name,), _optimiser(name, one, params, ctx)) for name, one in networks.items()},
        batches=local_batches(_NAME, len(data), params, ctx, of_images, at_once=images_at_once(spec.image)),
        step=step,
        kept={"pool": pool},
        after=after,
        is_pure=False,  # the pool
    )


def _optimiser(name: str, network: nn.Module, params: PpidsgParams, ctx: fl.RoundContext) -> torch.optim.Optimizer:
    if name in {"generator", "discriminator"}:
        optimiser = adam(network.parameters(), params.gan_lr, 0.0, GAN_BETAS)
    else:
        optimiser = task_optimiser(network.parameters(), params)
        if params.optimiser == "sgd":
            optimiser.param_groups[0]["momentum"] = params.momentum
    optimiser.param_groups[0]["lr"] *= rate_factor(ctx.round, ctx.spec.rounds, params.constant_rounds)
    return optimiser


def local_round(
    state: fl.ClientState, data: ImageSet, aggregate: fl.Aggregate | None, ctx: fl.RoundContext
) -> fl.LocalResult:
    """Continue from the averaged generator. The classifier starts from its key."""
    params, spec = PpidsgParams.model_validate(ctx.spec.params), ctx.spec
    kept = state.extras.get(SCRAMBLING)
    if kept is None:
        kept = _stored(draw_keys(ctx.streams.at("keys"), _size(spec), params.block))
    generator = (aggregate or state).parts[Part.IMAGE_GENERATOR]
    nets = {
        "generator": load_part(spec, Part.IMAGE_GENERATOR, generator, ctx.device),
        "discriminator": _discriminator(state, ctx),
        "extractor": load_part(spec, Part.EXTRACTOR, state.parts[Part.EXTRACTOR], ctx.device),
        "classifier": load_part(spec, Part.CLASSIFIER, state.extras[_KEY], ctx.device),
    }
    encrypt = scrambling_by(spec, kept).encrypt
    own = {Part.IMAGE_GENERATOR: nets["generator"]} | {part: nets[part] for part in (Part.EXTRACTOR, Part.CLASSIFIER)}
    average = stage.moving_average(own, params, own)
    told = stage.run_stage(translation(nets, data.to(ctx.device), encrypt, params, ctx, average), ctx)
    losses = dict(zip(TRANSLATION_LOSSES, told, strict=True))
    parts = {part: weights_of(net) for part, net in own.items()}
    extras = {
        **stage.average_extras(average),
        _KEY: {name: tensor.clone() for name, tensor in state.extras[_KEY].items()},
        SCRAMBLING: {name: tensor.clone() for name, tensor in kept.items()},
        _DISCRIMINATOR: weights_of(nets["discriminator"]),
    }
    shared = fl.SharedResult({Part.IMAGE_GENERATOR: weights_of(nets["generator"])})
    return fl.LocalResult(
        shared, fl.ClientState(parts, extras), Report(examples=len(data), loss=losses["classification"])
    )


def _discriminator(state: fl.ClientState, ctx: fl.RoundContext) -> nn.Module:
    """The client's discriminator; a new one in its first round."""
    make = split_of(ctx.spec).image_discriminator
    assert make is not None
    with torch.device("meta"):
        module = make(ctx.spec.image.channels)
    module = allocated(module, "cpu")
    if _DISCRIMINATOR in state.extras:
        module.load_state_dict(dict(state.extras[_DISCRIMINATOR]))
    else:
        draw_weights(module, ctx.streams.generator("discriminator"))
    return module.to(ctx.device)


def predict(spec: NetworkSpec, parts: fl.Parts) -> nn.Module:
    """Generator, extractor and classifier, one after the other."""
    order = (Part.IMAGE_GENERATOR, Part.EXTRACTOR, Part.CLASSIFIER)
    return nn.Sequential(*(load_part(spec, part, parts[part]) for part in order))


def aggregator(state: fl.ServerState, ctx: fl.RoundContext, spill: fl.Spill) -> fl.Aggregator:
    """The server half: generators averaged by data size."""
    return AverageAggregator(SHARED, spill)


METHOD = fl.Method(
    name="ppidsg",
    title="PPIDSG: an encrypting image generator is averaged; extractor and classifier stay private",
    params_type=PpidsgParams,
    payload=fl.Payload(SHARED, SHARED, PRIVATE),
    needs=fl.Needs(networks=problem_with),
    personal=fl.Personal(SHARED | PRIVATE, predict),
    client_start=init_client,
    local_round=local_round,
    aggregator=aggregator,
    example=fl.Example(
        NetworkChoice(split="image_small"), ImageForm(mode="L", height=16, width=16, mean=(0.5,), std=(0.5,))
    ),
)
