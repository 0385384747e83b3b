"""FedMD-CG: share a classifier and a generator trained by distillation, no discriminator; crossed distillation on the server.

Local round = algorithm 1 lines 7-18 (eq. 1-9), server = lines 19-24 (eq. 10-12, in `fedcg.learning.aggregation.crossed_distillation`). Readings:
  * squared norms (eq. 2, 5) are means over elements;
  * eq. 2 trains the REAL branch: KL(ρ(D_i(F_i(x))) ‖ ρ(D_i(G(z, y)))), its generated branch detached. That branch is
    the teacher ("make D_i(F_i(x)) close to D_i(G(z, y))"), although the trained D_i occurs in both;
  * eq. 5 trains the GENERATED branch: KL(ρ(D_i(G_i(z, y))) ‖ ρ(D_i(F_i(x)))); F_i and D_i are frozen, the gradient passes
    through D_i into G_i;
  * the global generator G is frozen, in eval mode; it never replaces the client's own G_i (the classifier is loaded);
  * λ1, λ2, λ3 rise as λ ((r - 1) / R)^d; λ4, λ5, λ6 are constant;
  * the label counter c_i is the client's number of training images per class, n_i^y;
  * the default diversity term is not the published one, which underflows: see `losses.diversity_normalised`.
The authors' code differs from the paper. Every difference that can matter is a parameter: the code computes KL(teacher
‖ student) at temperature 10 (`divergence`, `temperature`), distances as means over dimensions
(`diversity=mean_squared`), λ2 = 0.1 and d = 3. The published set-up trains 20 steps of 64 images per round with SGD.
Here both `epochs` and `steps` are parameters.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import nn

from fedcg.learning import method as fl
from fedcg.learning.aggregation.averaging import AverageAggregator, Merged, Updates
from fedcg.learning.aggregation.crossed_distillation import counts_of, crossed_aggregator, label_distribution
from fedcg.learning.aggregation.distillation import SHARED, Distillation, DistilledParams, ensemble_aggregator, uniform
from fedcg.learning.image_set import ImageSet
from fedcg.learning.methods._averaging import local_result
from fedcg.learning.networks import load_part
from fedcg.learning.spec import FederationSpec
from fedcg.learning.training.batches import FeatureSource, feature_batches, generate, local_steps
from fedcg.learning.training.classification import Penalty, train_classifier
from fedcg.learning.training.losses import DIVERSITIES, Divergence, cross_entropy, feature_mse
from fedcg.learning.training.optimisers import adam
from fedcg.learning.training.stage import Descent, Descents, Nets, Stage, Tensors, Trained, moving_average, run_stage
from fedcg.wire.parts import Part

PRIVATE = frozenset({Part.EXTRACTOR})
_PARTS = SHARED | PRIVATE
_LEAST_SCALE = 1e-3  # keeps the normalised diversity finite for a class with one image or dead features


class FedmdCgParams(DistilledParams):
    """Parameters of FedMD-CG; the weights λ are the paper's (all 1)."""

    generator_lr: float = Field(default=3e-4, gt=0, description="learning rate of the local generator")
    lambda1: float = Field(default=1.0, ge=0, description="weight of replaying generated features, eq. 3")
    lambda2: float = Field(default=1.0, ge=0, description="weight of the feature loss, eq. 2")
    lambda3: float = Field(default=1.0, ge=0, description="weight of the logit loss, eq. 2")
    lambda4: float = Field(default=1.0, ge=0, description="weight of the generator's feature loss, eq. 5")
    lambda5: float = Field(default=1.0, ge=0, description="weight of the generator's classification loss, eq. 6")
    lambda6: float = Field(default=1.0, ge=0, description="weight of the diversity term")
    ramp_power: float = Field(default=1.0, gt=0, description="d of the ramp ((r-1)/R)^d of lambda 1, 2 and 3")
    diversity: Literal["normalised", "mean_squared", "published_0", "published_1", "published_2"] = Field(
        default="normalised", description="diversity term: ours, the authors' code, or eq. 7-8 as published"
    )
    divergence: Literal["student_teacher", "teacher_student"] = Field(
        default="student_teacher", description="direction of every KL: as published, or as in the authors' code"
    )
    temperature: float = Field(default=1.0, gt=0, description="divides the logits in eq. 2, 10 and 11")
    aggregation: Literal["average", "kd", "crossed_kd"] = Field(
        default="crossed_kd", description="weighted average; kd: plus FedCG's distillation; crossed_kd: plus eq. 12"
    )
    server_iterations: int = Field(default=50, ge=1, description="student steps on the server (I_s)")
    server_batch: int = Field(default=64, ge=2, description="rows of a student step")


def divergence_of(params: FedmdCgParams) -> Divergence:
    """The divergence of eq. 2, 10 and 11."""
    return Divergence(params.divergence, params.temperature)


def ramp(round_number: int, horizon: int, power: float) -> float:
    """((r - 1) / R)^d: the factor of λ1, λ2, λ3 in round r of R, counted from 1."""
    return float(min(max((round_number - 1) / horizon, 0.0), 1.0) ** power)


def local_round(
    state: fl.ClientState, data: ImageSet, aggregate: fl.Aggregate | None, ctx: fl.RoundContext
) -> fl.LocalResult:
    """Algorithm 1 lines 7-18: load the classifier; train F, D on eq. 4 with the global G as teacher; then G_i on eq. 9.

    Without an aggregate, the client's own classifier and generator replace the global ones, and p(y) is uniform.
    """
    params = FedmdCgParams.model_validate(ctx.spec.params)
    down = aggregate.parts if aggregate else state.parts
    sources = {**state.parts, Part.CLASSIFIER: down[Part.CLASSIFIER]}
    nets = {part: load_part(ctx.spec, part, sources[part], ctx.device) for part in sorted(_PARTS)}
    data = data.to(ctx.device)
    teacher = load_part(ctx.spec, Part.GENERATOR, down[Part.GENERATOR], ctx.device)
    published = aggregate.label_distribution if aggregate else None
    labels = uniform(ctx.spec.class_count) if published is None else torch.tensor(published, dtype=torch.float64)
    penalty = global_penalty(teacher, labels, params, ctx)
    average = moving_average(nets, params)
    loss = train_classifier(nets[Part.EXTRACTOR], nets[Part.CLASSIFIER], data, params, ctx, penalty, average)
    source = FeatureSource(
        nets[Part.EXTRACTOR], data, ctx.spec, local_steps(params, len(data), ctx) * params.batch_size
    )
    run_stage(imitation(nets[Part.GENERATOR], nets[Part.CLASSIFIER], source, params, ctx), ctx)
    return local_result(nets, SHARED, data, loss, fl.LabelCounts.REQUIRED, average)


def global_penalty(
    teacher: nn.Module, label_probabilities: torch.Tensor, params: FedmdCgParams, ctx: fl.RoundContext
) -> Penalty | None:
    """λ1 · eq. 3 + λ2 · MSE + λ3 · KL (eq. 2), ramped, against the frozen global generator, with fresh z for every image."""
    factor = ramp(ctx.round, ctx.spec.rounds, params.ramp_power)
    replay, pull, agree = (factor * weight for weight in (params.lambda1, params.lambda2, params.lambda3))
    if replay == pull == agree == 0.0:
        return None
    divergence = divergence_of(params)
    noise_stream, label_stream = (ctx.streams.generator("classify", name) for name in ("noise", "replay"))

    def loss(
        nets: Nets,
        real: torch.Tensor,
        logits: torch.Tensor,
        matched: torch.Tensor,
        replayed: torch.Tensor,
        asked: torch.Tensor,
    ) -> torch.Tensor:
        size = len(logits)
        generated = nets[Part.CLASSIFIER](torch.cat([replayed, matched]))
        return (
            replay * cross_entropy(generated[:size], asked)
            + pull * feature_mse(real, matched)
            + agree * divergence.mean(logits, generated[size:].detach())
        )

    def draw(images: torch.Tensor, labels: torch.Tensor) -> Tensors:
        count, q = len(labels), ctx.spec.network.noise_dim
        asked = torch.multinomial(label_probabilities, count, replacement=True, generator=label_stream).to(ctx.device)
        noise = torch.randn(2 * count, q, generator=noise_stream).to(ctx.device)
        features = generate(teacher, noise, torch.cat([labels, asked]))
        return features[:count], features[count:], asked

    return Penalty(loss, draw)


def class_scale(features: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """s_y: root mean square distance of two real features of a class, √(2 Σ_d var_d(F | y)), [C]; a floor if unknown."""
    flat = features.flatten(1)
    scale = torch.full((classes,), _LEAST_SCALE, device=flat.device)
    for label in range(classes):
        rows = flat[labels == label]
        if len(rows) > 1:
            scale[label] = (2.0 * rows.var(dim=0).sum()).sqrt().clamp(min=_LEAST_SCALE)
    return scale


def imitation(
    generator: nn.Module, classifier: nn.Module, source: FeatureSource, params: FedmdCgParams, ctx: fl.RoundContext
) -> Stage:
    """Algorithm 1 lines 14-17: train G_i on eq. 9, KL + λ4 MSE + λ5 CE + λ6 diversity, with F_i and D_i frozen."""
    diversity, divergence = DIVERSITIES[params.diversity], Divergence(params.divergence)

    def step(nets: Nets, batch: Tensors) -> Descents:
        real, labels, target, scales, noise = batch

        def imitated() -> torch.Tensor:
            features = nets[Part.GENERATOR](noise, labels)
            logits = nets[Part.CLASSIFIER](features)
            return (
                divergence.mean(logits, target)
                + params.lambda4 * feature_mse(features, real)
                + params.lambda5 * cross_entropy(logits, labels)
                + params.lambda6 * diversity(features, noise, labels, scales[0])
            )

        loss = yield Descent(Part.GENERATOR, imitated)
        assert loss is not None
        return (loss,)

    scale: list[torch.Tensor] = []

    @torch.no_grad()
    def beside(real: torch.Tensor, labels: torch.Tensor) -> Tensors:
        if not scale:  # of the first block, in which every class has rows
            scale.append(class_scale(real, labels, ctx.spec.class_count))
        return classifier.eval()(real), scale[0].expand(len(real), -1)

    optimiser = adam(generator.parameters(), params.generator_lr, params.weight_decay)
    return Stage(
        name="generate",
        losses=("generator",),
        networks={Part.GENERATOR: generator, Part.CLASSIFIER: classifier},
        trained={Part.GENERATOR: Trained((Part.GENERATOR,), optimiser)},
        batches=feature_batches(source, params, ctx, target=beside),
        step=step,
    )


def init_server(spec: FederationSpec, initial: fl.Parts) -> fl.ServerState:
    """The first aggregate is the initial generator and classifier, with a uniform p(y)."""
    even = tuple(uniform(spec.class_count).tolist())
    return fl.ServerState(fl.Aggregate({part: initial[part] for part in sorted(SHARED)}, even))


def _labels_of(merged: Merged) -> tuple[float, ...]:
    """p(y), which aggregations without labels (`average`, `kd`) also publish."""
    return tuple(label_distribution(counts_of(merged)).tolist())


def aggregator(state: fl.ServerState, ctx: fl.RoundContext, spill: fl.Spill) -> fl.Aggregator:
    """Algorithm 1 lines 19-24 (`crossed_kd`), or one of the simpler aggregations that the paper compares."""
    params = FedmdCgParams.model_validate(ctx.spec.params)
    settings = Distillation.of(params)
    if params.aggregation == "crossed_kd":
        return crossed_aggregator(settings, divergence_of(params), ctx, spill)
    if params.aggregation == "kd":
        return ensemble_aggregator(settings, ctx, spill, labels_of=_labels_of)

    def published(merged: Merged, _: Updates) -> fl.ServerState:
        return fl.ServerState(fl.Aggregate(merged.parts, _labels_of(merged)))

    return AverageAggregator(SHARED, spill, then=published)


METHOD = fl.Method(
    name="fedmd_cg",
    title="FedMD-CG: shared classifier and distilled generator, crossed distillation",
    params_type=FedmdCgParams,
    payload=fl.Payload(SHARED, SHARED, PRIVATE, continued=frozenset({Part.CLASSIFIER})),
    needs=fl.Needs(fl.LabelCounts.REQUIRED),
    local_round=local_round,
    server_start=init_server,
    aggregator=aggregator,
)
