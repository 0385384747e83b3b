"""FedGen (Zhu et al., ICML 2021), as in FedCG's comparison: FedSplit with ONE generator that the server trains.

Server, every round: the classifiers are averaged by data size, and the global generator G(z, y) is trained so that the
data-size weighted sum of the PRESENT clients' classifiers' logits on its features predicts y (Zhu et al. eq. 4 with a
softmax after the sum), plus the mode-seeking diversity term: CE(Σ_i n_i / n · C_i(G(z, y)), y) + weight · 1 / (d(G) /
d(z) + 1e-5). Client: CE(C(E(x)), y) + weight · CE(C(G(z, y')), y') with fresh z and G frozen: only the classifier
learns from the second term.

Four sources differ on where y' comes from. Zhu et al. eq. 5 draws it from the label distribution of all clients, their
code uniformly from the labels that any client has. The code of FedCG's comparison uses the labels y of the client's own
batch, as does the default here, `replay_labels = batch`. The code of FedMD-CG's comparison draws from the sum of all
clients' label counts. `uniform` draws from all classes: this equals Zhu et al.'s code if every class occurs at some
client, and eq. 5 if classes are balanced over all clients together. With iid clients all four have the same
distribution. With `batch`, a client never replays classes that it lacks.

Readings and deviations, with reasons: features are generated, as in both papers; Zhu et al.'s code has a second term on
the client (KL between the logits of E(x) and of G(z, y)), which is omitted here as in FedCG's comparison; diversity
pairs rows of one label (rows j and j + B//2; the published version pairs arbitrary halves, whose classes differ
anyway); the optimiser of G is reset every round, as all optimisers here; when all clients reported their label counts,
labels for G are limited to those that some client has. The generator of the first round is untrained, and its features
are still replayed, as in the code of FedCG's comparison. Zhu et al.'s code replays from the second round on.

Cost: G changes with every step, so teacher passes can't be precomputed. A step runs all N classifiers, which are all in
memory (60 MB for 256 clients of 240 kB). The time of `finish` grows with N.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from fedcg.learning import method as fl
from fedcg.learning.aggregation import distillation
from fedcg.learning.aggregation.averaging import AverageAggregator, Merged, Updates
from fedcg.learning.methods._averaging import averaging_method
from fedcg.learning.networks import load_part, weights_of
from fedcg.learning.training.batches import generate
from fedcg.learning.training.classification import Penalty
from fedcg.learning.training.losses import cross_entropy, mode_seeking, paired_labels
from fedcg.learning.training.stage import Nets, Tensors, run_stage
from fedcg.wire.parts import Part

SHARED = frozenset({Part.CLASSIFIER})


class FedgenParams(distillation.DistilledParams):
    """Parameters of FedGen. In the published comparison every term has weight 1."""

    average: fl.Average = "mean"
    aux: fl.Aux = 0.0
    replay: float = Field(default=1.0, ge=0, description="weight of the classifier's loss on generated features")
    replay_labels: Literal["batch", "uniform"] = Field(
        default="batch",
        # A spec without it keeps the digest from before this parameter existed.
        exclude_if=lambda labels: labels == "batch",
        description="labels of the replayed features: those of the client's batch, or uniform over all classes",
    )
    diversity: float = Field(default=1.0, ge=0, description="weight of the mode-seeking term in the generator's loss")


def replay_penalty(nets: Mapping[Part, nn.Module], params: FedgenParams, ctx: fl.RoundContext) -> Penalty | None:
    """The term replay · CE(C(G(z, y')), y') for the labels y' selected by `replay_labels`; G is frozen and in eval mode."""
    if params.replay == 0.0:
        return None
    generator, stream = nets[Part.GENERATOR], ctx.streams.generator("classify", "noise")

    def loss(
        nets: Nets, features: torch.Tensor, logits: torch.Tensor, replayed: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        return params.replay * cross_entropy(nets[Part.CLASSIFIER](replayed), labels)

    def draw(images: torch.Tensor, labels: torch.Tensor) -> Tensors:
        noise = torch.randn(len(labels), ctx.spec.network.noise_dim, generator=stream).to(ctx.device)
        if params.replay_labels == "uniform":
            labels = torch.randint(ctx.spec.class_count, labels.shape, generator=stream).to(ctx.device)
        return generate(generator, noise, labels), labels

    return Penalty(loss, draw)


def generator_objective(
    generator: nn.Module,
    jury: Sequence[tuple[float, nn.Module]],
    noise: torch.Tensor,
    labels: torch.Tensor,
    diversity: float,
) -> torch.Tensor:
    """CE of Σ_i n_i / n · C_i(G(z, y)) against y, plus diversity · mode seeking between the halves of the batch.

    Args:
        generator: G.
        jury: the present clients' classifiers, frozen, each with its share n_i / n of the data.
        noise: [B, q].
        labels: [B], rows j and j + B//2 alike (`paired_labels`).
        diversity: weight of the mode-seeking term.
    """
    features = generator(noise, labels)
    half = len(labels) // 2
    first, second = slice(0, half), slice(half, 2 * half)
    spread = mode_seeking(features[first], features[second], noise[first], noise[second])
    votes = torch.stack([share * judge(features) for share, judge in jury]).sum(dim=0)
    return cross_entropy(votes, labels) + diversity * spread


def trained_generator(start: fl.Weights, updates: Updates, merged: Merged, ctx: fl.RoundContext) -> fl.Weights:
    """The generator of the last aggregate after its training against all classifiers of the round.

    Raises:
        DivergedError: the loss is not finite or exploded.
    """
    params = FedgenParams.model_validate(ctx.spec.params)
    settings = distillation.Distillation.of(params)
    total, judges = sum(merged.examples.values()), {}
    for client in merged.examples:
        weights = updates[client]().parts[Part.CLASSIFIER]
        judges[f"judge {client}"] = load_part(ctx.spec, Part.CLASSIFIER, weights, ctx.device)
    shares = [examples / total for examples in merged.examples.values()]
    generator = load_part(ctx.spec, Part.GENERATOR, start, ctx.device)
    asked_for = distillation.label_probabilities(
        [merged.label_counts.get(client) for client in merged.examples], ctx.spec.class_count
    )
    bank = distillation.draw_bank(ctx.streams, settings.rows, ctx.spec.network.noise_dim, asked_for)
    noise, labels = bank.noise.to(ctx.device), bank.labels.to(ctx.device)

    def loss_of(nets: Nets, batch: Tensors) -> torch.Tensor:
        z, asked = batch
        jury = [(share, nets[judge]) for share, judge in zip(shares, judges, strict=True)]
        return generator_objective(nets[Part.GENERATOR], jury, z, paired_labels(asked), params.diversity)

    nets: dict[str, nn.Module] = {Part.GENERATOR: generator}
    stage = distillation.distillation(nets, loss_of, lambda rows: (noise[rows], labels[rows]), settings, frozen=judges)
    run_stage(stage, ctx)
    return weights_of(generator)


def aggregator(state: fl.ServerState, ctx: fl.RoundContext, spill: fl.Spill) -> fl.Aggregator:
    """The server half: average the classifiers, train the generator of the last aggregate against all of them."""

    def with_generator(merged: Merged, updates: Updates) -> fl.ServerState:
        generator = trained_generator(state.aggregate.parts[Part.GENERATOR], updates, merged, ctx)
        return fl.ServerState(fl.Aggregate({**merged.parts, Part.GENERATOR: generator}))

    average = FedgenParams.model_validate(ctx.spec.params).average
    return AverageAggregator(SHARED, spill, average, then=with_generator)


METHOD = averaging_method(
    "fedgen",
    "FedGen: shared classifier, one generator trained on the server",
    FedgenParams,
    SHARED,
    penalty_of=replay_penalty,
    downloads=frozenset({Part.GENERATOR}),
    label_counts=fl.LabelCounts.OPTIONAL,
    aggregator=aggregator,
)
