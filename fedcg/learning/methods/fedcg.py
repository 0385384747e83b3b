"""FedCG (Wu et al., IJCAI-22): share a classifier and a conditional GAN's generator, keep extractor and discriminator.

Local round = algorithm 1 (eq. 1-4), server = algorithm 2 (eq. 5-6). Readings of the paper, where it is open:
  * eq. 2's squared norm is a mean over elements; the global generator runs in eval mode and has no gradient;
  * γ(round) = 2 / (1 + exp(-10 p)) - 1 with p = min((round - 1) / ramp_rounds, 1): read with rounds counted from 0, and a ramp over
    50, so the untrained generator of the first round has no weight;
  * eq. 4 is minimised, with the non-saturating generator loss and one generator pass for both steps; Adam's betas are
    (0.5, 0.999);
  * generated rows come in pairs of one label (the first half of the batch's labels, twice), so that the mode-seeking term
    compares two draws of the SAME class; the batch keeps its size, and its labels their distribution;
  * with `balance = logits` or DP-SGD (`RoundContext.privacy`) the generator's labels are drawn uniformly from all
    classes;
  * eq. 5's softmax is over the weighted SUM of logits; eq. 6 is KL(ensemble ‖ student).
`aggregation` offers the two other server halves that FedMD-CG's table 3 combines with FedCG's clients; the default is
FedCG's own.
"""

import math
from typing import Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import nn

from fedcg.learning import method as fl
from fedcg.learning.aggregation.averaging import AverageAggregator
from fedcg.learning.aggregation.crossed_distillation import crossed_aggregator
from fedcg.learning.aggregation.distillation import SHARED, Distillation, EnsembleParams, ensemble_aggregator
from fedcg.learning.errors import PrivacyError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.methods._averaging import local_result
from fedcg.learning.networks import NETWORKS, load_part
from fedcg.learning.networks.gan import ClassGaussians, rows_are_independent
from fedcg.learning.spec import NetworkSpec
from fedcg.learning.training import losses
from fedcg.learning.training.batches import FeatureSource, extract_features, feature_batches, generate, local_steps
from fedcg.learning.training.classification import Penalty, train_classifier, with_downloaded_classifier
from fedcg.learning.training.optimisers import adam
from fedcg.learning.training.stage import Descent, Descents, Nets, Stage, Tensors, Trained, moving_average, run_stage
from fedcg.wire.parts import Part

PRIVATE = frozenset({Part.EXTRACTOR, Part.DISCRIMINATOR})
_GAN_BETAS = (0.5, 0.999)


class FedcgParams(EnsembleParams):
    """Parameters of FedCG; the defaults are the paper's, except for `diversity`: the paper gives no weight, and 0.1 is our choice."""

    gan_lr: float = Field(default=3e-4, gt=0, description="learning rate of generator and discriminator (eta_2)")
    gamma_max: float = Field(default=1.0, ge=0, description="weight of the feature loss, eq. 3, at the end of its ramp")
    ramp_rounds: int = Field(default=50, ge=1, description="rounds over which gamma rises from 0")
    diversity: float = Field(default=0.1, ge=0, description="weight of the mode-seeking term in the generator's loss")
    discriminator_passes: str = Field(
        default="joint",
        pattern="^(joint|separate)$",
        description="whether real and generated rows share one forward pass, and so one power iteration of spectral norm; a "
        "discriminator with batch norm always uses one pass for each, as published",
    )
    generator_training: Literal["gan", "moments"] = Field(
        default="gan",
        exclude_if=lambda how: how == "gan",
        description="how a client fits its generator: against its discriminator (eq. 4), or from means and standard deviations of its "
        "features per class (generator gaussians)",
    )
    aggregation: Literal["average", "kd", "crossed_kd"] = Field(
        default="kd", description="average; kd: plus eq. 6; crossed_kd: plus FedMD-CG's eq. 12, with label counts"
    )

    @field_validator("aggregation")
    @classmethod
    def _crossed_is_plain(cls, aggregation: str, info: ValidationInfo) -> str:
        others = info.data.get("average", "mean"), info.data.get("ensemble", "sum")
        if aggregation == "crossed_kd" and others != ("mean", "sum"):
            raise ValueError("average and ensemble have no effect with aggregation = crossed_kd: omit them, or use kd")
        return aggregation

    @property
    def needs_label_counts(self) -> bool:
        """Eq. 10-11 weight a client by its label counts."""
        return self.aggregation == "crossed_kd"


def gamma(round_number: int, params: FedcgParams) -> float:
    """Weight γ of eq. 3 in a round counted from 1: 0 in the first, `gamma_max` times a logistic ramp afterwards."""
    progress = min((round_number - 1) / params.ramp_rounds, 1.0)
    return params.gamma_max * (2.0 / (1.0 + math.exp(-10.0 * progress)) - 1.0)


def local_round(
    state: fl.ClientState, data: ImageSet, aggregate: fl.Aggregate | None, ctx: fl.RoundContext
) -> fl.LocalResult:
    """Algorithm 1: load both shared parts, train E and C on eq. 3, then G and D on eq. 4 with E frozen.

    Without an aggregate, the client's own shared parts replace the global ones.

    Raises:
        PrivacyError: `generator_training = moments` with DP-SGD, which does not cover the moments.
    """
    params = FedcgParams.model_validate(ctx.spec.params)
    if params.generator_training == "moments" and ctx.privacy.dp_sgd is not None:
        raise PrivacyError("generator_training = moments is not supported with DP-SGD: set generator_training = gan")
    weights = {**state.parts, **(aggregate.parts if aggregate else {})}
    nets = {part: load_part(ctx.spec, part, weights[part], ctx.device) for part in NETWORKS}
    data = data.to(ctx.device)
    penalty = feature_penalty(nets[Part.GENERATOR], gamma(ctx.round, params), ctx)
    if aggregate is not None:
        penalty = with_downloaded_classifier(penalty, nets[Part.CLASSIFIER], params.aux, ctx)
    average = moving_average(nets, params)
    loss = train_classifier(nets[Part.EXTRACTOR], nets[Part.CLASSIFIER], data, params, ctx, penalty, average)
    if params.generator_training == "moments":
        take_moments(nets[Part.GENERATOR], nets[Part.EXTRACTOR], data, ctx)
    else:
        draws = local_steps(params, len(data), ctx) * params.batch_size
        source = FeatureSource(nets[Part.EXTRACTOR], data, ctx.spec, draws)
        run_stage(adversarial(nets[Part.GENERATOR], nets[Part.DISCRIMINATOR], source, params, ctx), ctx)
    return local_result(nets, SHARED, data, loss, fl.LabelCounts.OPTIONAL, average)


def networks(spec: NetworkSpec) -> str:
    """Why the parameters do not support these networks; empty if they do."""
    if spec.params.get("generator_training") == "moments" and spec.network.generator != "gaussians":
        return f"generator_training = moments needs network.generator = gaussians, not {spec.network.generator}"
    return ""


def take_moments(generator: nn.Module, extractor: nn.Module, data: ImageSet, ctx: fl.RoundContext) -> None:
    """Set the generator's Gaussians to the moments of the frozen extractor's features (also of mirrored images if the spec flips)."""
    assert isinstance(generator, ClassGaussians)  # checked by `networks`
    sides = (False, True) if ctx.spec.augment_flip else (False,)
    features = [extract_features(extractor, data.images, ctx.spec, flipped=side) for side in sides]
    generator.fit(torch.cat(features), data.labels.repeat(len(sides)))


def feature_penalty(global_generator: nn.Module, weight: float, ctx: fl.RoundContext) -> Penalty | None:
    """γ · L_dist (eq. 2-3) against the frozen global generator, with fresh noise for every image of every epoch."""
    if weight == 0.0:
        return None
    stream = ctx.streams.generator("classify", "noise")

    def loss(nets: Nets, features: torch.Tensor, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return weight * losses.feature_mse(features, target)

    def draw(images: torch.Tensor, labels: torch.Tensor) -> Tensors:
        noise = torch.randn(len(labels), ctx.spec.network.noise_dim, generator=stream).to(ctx.device)
        return (generate(global_generator, noise, labels),)

    return Penalty(loss, draw)


def adversarial(
    generator: nn.Module, discriminator: nn.Module, source: FeatureSource, params: FedcgParams, ctx: fl.RoundContext
) -> Stage:
    """Algorithm 1 lines 10-18: one discriminator and one generator step in turn (eq. 4) on features of the frozen extractor.

    With DP-SGD the discriminator's real rows are clipped; the generator's rows, labels and steps depend on no image.
    """
    is_private = ctx.privacy.dp_sgd is not None
    joint = params.discriminator_passes == "joint" and rows_are_independent(discriminator)

    def step(nets: Nets, batch: Tensors) -> Descents:
        real, labels, z, *drawn = batch
        judge = nets[Part.DISCRIMINATOR]
        asked = losses.paired_labels(drawn[0] if drawn else labels)
        fake = nets[Part.GENERATOR](z, asked)

        def both() -> torch.Tensor:
            if not joint:
                return losses.discriminator_loss(judge(real, labels), judge(fake.detach(), asked))
            logits = judge(torch.cat([real, fake.detach()]), torch.cat([labels, asked]))
            return losses.discriminator_loss(logits[: len(asked)], logits[len(asked) :])

        def forged() -> torch.Tensor:
            half = len(asked) // 2
            spread = losses.mode_seeking(fake[:half], fake[half : 2 * half], z[:half], z[half : 2 * half])
            return losses.generator_loss(judge(fake, asked)) + params.diversity * spread

        if is_private:
            apart = (
                lambda: losses.real_loss(judge(real, labels)),
                lambda: losses.fake_loss(judge(fake.detach(), asked)),
            )
            judged = yield Descent(Part.DISCRIMINATOR, *apart)
        else:
            judged = yield Descent(Part.DISCRIMINATOR, both)
        lost = yield Descent(Part.GENERATOR, rest=forged)
        assert judged is not None
        assert lost is not None
        return (judged + lost,)

    networks: dict[str, nn.Module] = {Part.GENERATOR: generator, Part.DISCRIMINATOR: discriminator}
    optimisers = {
        part: adam(network.parameters(), params.gan_lr, params.weight_decay, _GAN_BETAS)
        for part, network in networks.items()
    }
    return Stage(
        name="generate",
        losses=("generator and discriminator",),
        networks=networks,
        trained={
            part: Trained((part,), one, sees_images=part is Part.DISCRIMINATOR) for part, one in optimisers.items()
        },
        batches=feature_batches(source, params, ctx, labels_too=is_private or ctx.privacy.balance == "logits"),
        step=step,
    )


def aggregator(state: fl.ServerState, ctx: fl.RoundContext, spill: fl.Spill) -> fl.Aggregator:
    """Algorithm 2, or an aggregation that FedMD-CG compares with it."""
    params = FedcgParams.model_validate(ctx.spec.params)
    settings = Distillation.of(params)
    if params.aggregation == "average":
        return AverageAggregator(SHARED, spill, params.average)
    if params.aggregation == "crossed_kd":
        return crossed_aggregator(settings, losses.Divergence(), ctx, spill)
    return ensemble_aggregator(settings, ctx, spill, params.average, params.ensemble)


METHOD = fl.Method(
    name="fedcg",
    title="FedCG: shared classifier and GAN generator, ensemble distillation",
    params_type=FedcgParams,
    payload=fl.Payload(SHARED, SHARED, PRIVATE),
    needs=fl.Needs(fl.LabelCounts.OPTIONAL, networks=networks),
    private_stages=2,
    local_round=local_round,
    aggregator=aggregator,
)
