"""FedCG (Wu et al., IJCAI-22): share a classifier and a conditional GAN's generator, keep extractor and discriminator.

Local round = algorithm 1 (eq. 1-4), server = algorithm 2 (eq. 5-6). Readings, where the paper leaves room:
  * eq. 2's squared norm is a mean over elements; the global generator runs in eval mode and has no gradient;
  * γ(round) = 2 / (1 + exp(-10 p)) - 1 with p = min((round - 1) / ramp_rounds, 1): read with rounds counted from 0, and a ramp over
    50, so the untrained generator of the first round has no weight;
  * eq. 4 is minimised, with the non-saturating generator loss, one generator pass for both steps; Adam's betas are (0.5, 0.999);
  * generated rows come in pairs of one label (the first half of the batch's labels, twice), so that the mode-seeking term
    compares two draws of the SAME class; the batch keeps its size, and its labels their distribution;
  * with `balance = logits` or DP-SGD (`RoundContext.privacy`) the generator asks for labels drawn from all classes alike;
  * eq. 5's softmax is over the weighted SUM of logits; eq. 6 is KL(ensemble ‖ student).
`aggregation` offers the two other server halves that FedMD-CG's table 3 puts beneath FedCG's clients; the default is FedCG's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import nn

from fedcg.learning.aggregation.averaging import AverageAggregator
from fedcg.learning.aggregation.crossed_distillation import CrossedAggregator, Crossing
from fedcg.learning.aggregation.distillation import SHARED, Distillation, EnsembleAggregator
from fedcg.learning.errors import PrivacyError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.dp_sgd import poisson_batches, private_step_count, private_steps, sampling_rate
from fedcg.learning.mechanisms.noisy_gradients import with_gradient_noise
from fedcg.learning.method import (
    Aggregate,
    Aggregator,
    ClientState,
    LabelCounts,
    LocalResult,
    Method,
    RoundContext,
    ServerState,
    Spill,
    TaughtParams,
)
from fedcg.learning.methods._averaging import init_client_of, init_server_of, local_result
from fedcg.learning.networks import NETWORKS, load_part
from fedcg.learning.networks.discriminators import rows_are_independent
from fedcg.learning.networks.generators import ClassGaussians
from fedcg.learning.networks.layers.layer_randomness import seeded_layers
from fedcg.learning.round_checkpoint import Kept, stage_blocks
from fedcg.learning.spec import NetworkSpec
from fedcg.learning.training.augmentation import Augmenter
from fedcg.learning.training.cuda_graph import Step, graphed
from fedcg.learning.training.losses import (
    Divergence,
    LossMeter,
    discriminator_loss,
    fake_loss,
    feature_mse,
    generator_loss,
    mode_seeking,
    paired_labels,
    real_loss,
)
from fedcg.learning.training.moving_average import moving_average
from fedcg.learning.training.optimisers import adam
from fedcg.learning.training.precision import Network, in_precision
from fedcg.learning.training.private_training import checked_every, train_task
from fedcg.learning.training.training_loop import (
    Block,
    FeatureSource,
    Penalty,
    PenaltyMaker,
    extract_features,
    feature_blocks,
    generate,
    slices,
    steps_of,
    with_downloaded_classifier,
)
from fedcg.wire.parts import Part

PRIVATE = frozenset({Part.EXTRACTOR, Part.DISCRIMINATOR})
_GAN_BETAS = (0.5, 0.999)


class FedcgParams(TaughtParams):
    """Parameters of FedCG; the defaults are the paper's, except for `diversity`: the paper gives no weight, 0.1 is ours."""

    gan_lr: float = Field(default=3e-4, gt=0, description="learning rate of generator and discriminator (eta_2)")
    gamma_max: float = Field(default=1.0, ge=0, description="weight of the feature loss, eq. 3, at the end of its ramp")
    ramp_rounds: int = Field(default=50, ge=1, description="rounds over which gamma rises from 0")
    diversity: float = Field(default=0.1, ge=0, description="weight of the mode-seeking term in the generator's loss")
    discriminator_passes: str = Field(
        default="joint",
        pattern="^(joint|separate)$",
        description="whether real and generated rows share a pass, and so one power iteration of spectral norm; a "
        "discriminator with batch norm always takes one for each, as published",
    )
    server_iterations: int = Field(default=2000, ge=1, description="student steps on the server (T)")
    server_batch: int = Field(default=16, ge=2, description="rows of a student step (B)")
    server_lr: float = Field(default=3e-4, gt=0, description="learning rate of the student (eta_3)")
    generator_training: Literal["gan", "moments"] = Field(
        default="gan",
        exclude_if=lambda how: how == "gan",
        description="how a client makes its generator: against its discriminator (eq. 4), or by means and standard deviations of its "
        "features by class (generator gaussians)",
    )
    aggregation: Literal["average", "kd", "crossed_kd"] = Field(
        default="kd", description="weighted average, eq. 6 on top, or FedMD-CG's eq. 12 on top (it needs label counts)"
    )
    exact_clients: int = Field(
        default=32, ge=1, description="crossed_kd: above, eq. 11 draws one client per batch and label"
    )

    @field_validator("aggregation")
    @classmethod
    def _crossed_is_plain(cls, aggregation: str, info: ValidationInfo) -> str:
        others = info.data.get("average", "mean"), info.data.get("ensemble", "sum")
        if aggregation == "crossed_kd" and others != ("mean", "sum"):
            raise ValueError(
                "average and ensemble have no effect with aggregation = crossed_kd: leave them out, or use kd"
            )
        return aggregation

    @property
    def needs_label_counts(self) -> bool:
        """Eq. 10-11 weigh a client by its label counts."""
        return self.aggregation == "crossed_kd"


def gamma(round_number: int, params: FedcgParams) -> float:
    """Weight γ of eq. 3 in a round counted from 1: 0 in the first, `gamma_max` times a logistic ramp afterwards."""
    progress = min((round_number - 1) / params.ramp_rounds, 1.0)
    return params.gamma_max * (2.0 / (1.0 + math.exp(-10.0 * progress)) - 1.0)


def local_round(state: ClientState, data: ImageSet, aggregate: Aggregate | None, ctx: RoundContext) -> LocalResult:
    """Algorithm 1: load both shared parts, train E and C on eq. 3, then G and D on eq. 4 with E frozen.

    Without an aggregate the client's own shared parts stand in for the global ones.

    Raises:
        PrivacyError: DP-SGD does not cover the moments of `generator_training = moments`.
    """
    params = FedcgParams.model_validate(ctx.spec.params)
    if params.generator_training == "moments" and ctx.privacy.dp_sgd is not None:
        raise PrivacyError("generator_training = moments can't be had with DP-SGD: set generator_training = gan")
    weights = {**state.parts, **(aggregate.parts if aggregate else {})}
    nets = {part: load_part(ctx.spec, part, weights[part], ctx.device) for part in NETWORKS}
    data = data.to(ctx.device)
    penalty = feature_penalty(nets[Part.GENERATOR], gamma(ctx.round, params), ctx)
    if aggregate is not None:
        penalty = with_downloaded_classifier(penalty, nets[Part.CLASSIFIER], params.aux, ctx)
    average = moving_average(nets, params)
    loss = train_task(nets[Part.EXTRACTOR], nets[Part.CLASSIFIER], data, params, ctx, penalty, average=average)
    if params.generator_training == "moments":
        take_moments(nets[Part.GENERATOR], nets[Part.EXTRACTOR], data, ctx)
        return local_result(nets, SHARED, data, loss, LabelCounts.OPTIONAL, average)
    is_private = ctx.privacy.dp_sgd is not None
    steps = private_step_count(params, len(data)) if is_private else steps_of(params, len(data))
    source = FeatureSource(nets[Part.EXTRACTOR], data, ctx.spec, steps * params.batch_size)
    with seeded_layers(ctx, "generate"):
        train = train_gan_privately if is_private else train_gan
        train(nets[Part.GENERATOR], nets[Part.DISCRIMINATOR], source, params, ctx)
    return local_result(nets, SHARED, data, loss, LabelCounts.OPTIONAL, average)


def networks(spec: NetworkSpec) -> str:
    """Why the method can't have these networks with its parameters, if it can't."""
    if spec.params.get("generator_training") == "moments" and spec.network.generator != "gaussians":
        return f"generator_training = moments has no effect on generator {spec.network.generator}: take generator gaussians"
    return ""


def take_moments(generator: nn.Module, extractor: nn.Module, data: ImageSet, ctx: RoundContext) -> None:
    """Set the generator's Gaussians to the moments of the frozen extractor's features, of both mirror images where the spec flips."""
    assert isinstance(generator, ClassGaussians)  # `networks` has seen to it
    sides = (False, True) if ctx.spec.augment_flip else (False,)
    features = [extract_features(extractor, data.images, ctx.spec, flipped=side) for side in sides]
    generator.fit(torch.cat(features), data.labels.repeat(len(sides)))


def feature_penalty(global_generator: nn.Module, weight: float, ctx: RoundContext) -> PenaltyMaker:
    """γ · L_dist (eq. 2-3) against the frozen global generator; fresh noise for every image of every epoch."""
    stream = ctx.streams.generator("classify", "noise")

    def loss(features: torch.Tensor, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return weight * feature_mse(features, target)

    def per_block(block: Block) -> Penalty | None:
        if weight == 0.0:
            return None
        noise = torch.randn(len(block.labels), ctx.spec.network.noise_dim, generator=stream).to(ctx.device)
        return Penalty(loss, (generate(global_generator, noise, block.labels),))

    return per_block


def train_gan(
    generator: nn.Module, discriminator: nn.Module, source: FeatureSource, params: FedcgParams, ctx: RoundContext
) -> None:
    """Algorithm 1 lines 10-18: alternate one discriminator and one generator step (eq. 4) on features of the frozen extractor.

    Raises:
        DivergedError: a loss is not finite or exploded.
    """
    generator.train()
    discriminator.train()
    judge, forger = (
        with_gradient_noise(_gan_adam(network, params), ctx, "generate", part)
        for part, network in ((Part.DISCRIMINATOR, discriminator), (Part.GENERATOR, generator))
    )
    steps, done = steps_of(params, len(source.labels)), 0
    meter = LossMeter("generator and discriminator", ctx.device)
    plain = gan_step(in_precision(generator, ctx), discriminator, judge, forger, params)
    step = graphed(plain, [generator, discriminator], [judge, forger], steps if ctx.graphs else 0)
    asked = ctx.streams.generator("generate", "asked")
    kept: dict[str, Kept] = {"generator": generator, "discriminator": discriminator, "judge": judge, "forger": forger}
    blocks = stage_blocks(ctx, "generate", feature_blocks(source, params, ctx), **kept, loss=meter)
    for (real, labels, noise), is_new in blocks:
        inputs: tuple[torch.Tensor, ...] = (real, labels, noise)
        if ctx.privacy.balance == "logits":
            inputs = (*inputs, torch.randint(ctx.spec.class_count, labels.shape, generator=asked).to(ctx.device))
        if not is_new:
            done += len(list(slices(len(labels), params.batch_size)))
            continue
        for rows in slices(len(labels), params.batch_size):
            meter.add(step(*(tensor[rows] for tensor in inputs)))
            done += 1
            ctx.progress("generate", done, steps)
        meter.check()


def gan_step(
    generator: Network,
    discriminator: nn.Module,
    judge: torch.optim.Optimizer,
    forger: torch.optim.Optimizer,
    params: FedcgParams,
) -> Step:
    """One step of D (by `judge`), then of G (by `forger`), on (real features, their labels, noise); returns both losses' sum.

    A fourth tensor has the labels that the generator is asked for; without one they are those of the real features.
    """
    joint = params.discriminator_passes == "joint" and rows_are_independent(discriminator)
    judge_both = discriminator if joint else partial(discriminator, passes=2)

    def step(real: torch.Tensor, labels: torch.Tensor, z: torch.Tensor, *drawn: torch.Tensor) -> torch.Tensor:
        asked = paired_labels(drawn[0] if drawn else labels)
        fake = generator(z, asked)
        size = len(asked)
        logits = judge_both(torch.cat([real, fake.detach()]), torch.cat([labels, asked]))
        loss = discriminator_loss(logits[:size], logits[size:])
        judge.zero_grad()
        loss.backward()
        judge.step()
        return loss + forge(discriminator, forger, fake, asked, z, params.diversity)

    return step


def forge(
    discriminator: nn.Module,
    forger: torch.optim.Optimizer,
    fake: torch.Tensor,
    asked: torch.Tensor,
    z: torch.Tensor,
    diversity: float,
) -> torch.Tensor:
    """The generator's step of eq. 4 on its features of (z, asked), with the discriminator held fixed; returns its loss."""
    half = len(asked) // 2
    weights = list(discriminator.parameters())
    for weight in weights:
        weight.requires_grad_(False)  # noqa: FBT003 - torch's own signature
    forged = generator_loss(discriminator(fake, asked))
    forged = forged + diversity * mode_seeking(fake[:half], fake[half : 2 * half], z[:half], z[half : 2 * half])
    forger.zero_grad()
    forged.backward()
    forger.step()
    for weight in weights:
        weight.requires_grad_(True)  # noqa: FBT003
    return forged


def train_gan_privately(
    generator: nn.Module, discriminator: nn.Module, source: FeatureSource, params: FedcgParams, ctx: RoundContext
) -> None:
    """`train_gan` with DP-SGD on the discriminator's real rows; the generator's rows, labels and steps depend on no image.

    Raises:
        DivergedError: a loss is not finite or exploded.
    """
    assert ctx.privacy.dp_sgd is not None
    generator.train()
    discriminator.train()
    judge, forger = (_gan_adam(network, params) for network in (discriminator, generator))
    streams, rows, size = ctx.streams.at("generate"), len(source.labels), params.batch_size
    rate, steps = sampling_rate(rows, size), private_step_count(params, rows)
    augmenter, order = Augmenter(ctx.spec, streams), streams.generator("order")
    noise, labels = streams.generator("noise"), streams.generator("asked")
    meter = LossMeter("generator and discriminator", ctx.device)
    seed = ctx.streams.at("privacy").seed("generate")
    with private_steps([discriminator], judge, ctx.privacy.dp_sgd, rate * rows, seed) as private:
        kept: dict[str, Kept] = {
            "generator": generator,
            "discriminator": discriminator,
            "judge": judge,
            "forger": forger,
        }
        batches = enumerate(poisson_batches(rows, rate, steps, order), 1)
        kept_batches = stage_blocks(ctx, "generate", batches, **kept, loss=meter, noise=private.noise)
        for (done, index), is_new in kept_batches:
            z = torch.randn(size, ctx.spec.network.noise_dim, generator=noise).to(ctx.device)
            asked = paired_labels(torch.randint(ctx.spec.class_count, (size,), generator=labels).to(ctx.device))
            real = source.rows(index, augmenter) if len(index) else None
            if not is_new:
                continue
            fake = generator(z, asked)
            private.step(
                len(index),
                None if real is None else partial(_loss_of, real_loss, discriminator, *real),
                partial(_loss_of, fake_loss, discriminator, fake.detach(), asked),
            )
            meter.add(forge(discriminator, forger, fake, asked, z, params.diversity))
            ctx.progress("generate", done, steps)
            if done == steps or done % checked_every(params) == 0:
                meter.check()


def _gan_adam(network: nn.Module, params: FedcgParams) -> torch.optim.Optimizer:
    return adam(network.parameters(), params.gan_lr, params.weight_decay, _GAN_BETAS)


def _loss_of(
    loss: Callable[[torch.Tensor], torch.Tensor],
    discriminator: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    return loss(discriminator(features, labels))


def aggregator(state: ServerState, ctx: RoundContext, spill: Spill) -> Aggregator:
    """Algorithm 2, or an aggregation that FedMD-CG compares it with."""
    params = FedcgParams.model_validate(ctx.spec.params)
    settings = Distillation(
        params.server_iterations, params.server_batch, params.server_lr, params.weight_decay, params.server_flat_steps
    )
    if params.aggregation == "average":
        return AverageAggregator(SHARED, spill, params.average)
    if params.aggregation == "crossed_kd":
        return CrossedAggregator(settings, Crossing("auto", params.exact_clients, Divergence()), state, ctx, spill)
    return EnsembleAggregator(settings, ctx, spill, params)


METHOD = Method(
    name="fedcg",
    title="FedCG: shared classifier and GAN generator, ensemble distillation",
    params_type=FedcgParams,
    shared_up=SHARED,
    shared_down=SHARED,
    private_parts=PRIVATE,
    label_counts=LabelCounts.OPTIONAL,
    private_stages=2,
    networks=networks,
    init_client=partial(init_client_of, frozenset(NETWORKS)),
    local_round=local_round,
    init_server=partial(init_server_of, SHARED),
    aggregator=aggregator,
)
