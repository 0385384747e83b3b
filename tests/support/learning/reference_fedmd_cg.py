"""FedMD-CG as in its paper (alg. 1, eq. 1-12), one step at a time: the expected values of the tests. See `tests.support.learning.reference_fedcg` for FedCG.

Nothing is optimised here: images are augmented and normalised batch by batch, the extractor runs in every step of the generator, the
frozen global generator in every step of the classifier, and on the server every client's generator and classifier run in every
step of the student. Readings of the equations and random draws are those of `methods.fedmd_cg`.
"""

from collections.abc import Iterator, Sequence

import torch

from fedcg.learning.aggregation.distillation import Bank, Distillation, Pair
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import RoundContext
from fedcg.learning.methods.fedmd_cg import FedmdCgParams, class_scale, ramp
from fedcg.learning.training.batches import Augmenter, index_blocks, slices, steps_of
from fedcg.learning.training.losses import DIVERSITIES, Divergence, cross_entropy, feature_mse
from fedcg.wire.parts import Part
from tests.support.learning.reference_fedcg import Batch, Networks, batches, take_step

Replay = tuple[torch.Tensor, torch.Tensor]
"""Noise [B, q] and labels [B] to replay."""


def replayed_batches(
    data: ImageSet, labels: torch.Tensor, params: FedmdCgParams, ctx: RoundContext
) -> Iterator[tuple[Batch, Replay]]:
    """The batches of the classifier, each with noise for its own labels, and with noise and labels from p(y)."""
    streams = ctx.streams.at("classify")
    augmenter, order = Augmenter(ctx.spec, streams), streams.generator("order")
    noise_stream, label_stream = (ctx.streams.generator("classify", name) for name in ("noise", "replay"))
    for index in index_blocks(len(data), params.batch_size, steps_of(params, len(data)), order):
        augmentation = augmenter.draw(len(index))
        asked = torch.multinomial(labels, len(index), replacement=True, generator=label_stream)
        noise = torch.randn(2 * len(index), ctx.spec.network.noise_dim, generator=noise_stream)
        matched, replayed = noise[: len(index)], noise[len(index) :]
        for rows in slices(len(index), params.batch_size):
            some = data.rows(index[rows])
            yield (Batch(some.images, some.labels, augmentation[rows], matched[rows]), (replayed[rows], asked[rows]))


def classify(
    nets: Networks, data: ImageSet, labels: torch.Tensor, params: FedmdCgParams, ctx: RoundContext
) -> list[float]:
    """Algorithm 1 lines 9-13: extractor and classifier on eq. 4; the loss of every step.

    Args:
        nets: the generator is the GLOBAL one; extractor and classifier are trained in place.
        data: the training images.
        labels: [C] p(y).
        params: the method's.
        ctx: spec, streams, round.
    """
    extractor, classifier = (nets[part].train() for part in (Part.EXTRACTOR, Part.CLASSIFIER))
    generator = nets[Part.GENERATOR].eval()
    divergence = Divergence(params.divergence, params.temperature)
    factor = ramp(ctx.round, ctx.spec.rounds, params.ramp_power)
    weights = [*extractor.parameters(), *classifier.parameters()]
    make = torch.optim.SGD if params.optimiser == "sgd" else torch.optim.Adam
    optimiser = make(weights, lr=params.lr, weight_decay=params.weight_decay)
    losses = []
    for batch, (noise, asked) in replayed_batches(data, labels, params, ctx):
        features = extractor(batch.pixels(ctx.spec))
        logits = classifier(features)
        with torch.no_grad():
            matched, replayed = generator(batch.noise, batch.labels), generator(noise, asked)
            judged = classifier(matched)
        loss = (
            cross_entropy(logits, batch.labels)  # eq. 1
            + factor * params.lambda1 * cross_entropy(classifier(replayed), asked)  # eq. 3
            + factor * params.lambda2 * feature_mse(features, matched)  # eq. 2
            + factor * params.lambda3 * divergence.mean(logits, judged)
        )
        losses.append(take_step(optimiser, loss))
    return losses


def train_generator(nets: Networks, data: ImageSet, params: FedmdCgParams, ctx: RoundContext) -> list[float]:
    """Algorithm 1 lines 14-17: the client's own generator on eq. 9, extractor and classifier frozen; the loss of every step."""
    extractor, classifier = (nets[part].eval() for part in (Part.EXTRACTOR, Part.CLASSIFIER))
    generator, divergence = nets[Part.GENERATOR].train(), Divergence(params.divergence)
    optimiser = torch.optim.Adam(generator.parameters(), lr=params.generator_lr, weight_decay=params.weight_decay)
    some = list(batches(data, params, ctx, "generate"))
    with torch.no_grad():
        first = torch.cat([extractor(batch.pixels(ctx.spec)) for batch in some])
    scale = class_scale(first, torch.cat([batch.labels for batch in some]), ctx.spec.class_count)
    losses = []
    for batch in some:
        with torch.no_grad():
            real = extractor(batch.pixels(ctx.spec))
            target = classifier(real)
        made = generator(batch.noise, batch.labels)
        logits = classifier(made)
        loss = (
            divergence.mean(logits, target)  # eq. 5
            + params.lambda4 * feature_mse(made, real)
            + params.lambda5 * cross_entropy(logits, batch.labels)  # eq. 6
            + params.lambda6 * DIVERSITIES[params.diversity](made, batch.noise, batch.labels, scale)
        )
        losses.append(take_step(optimiser, loss))
    return losses


def distil_crossed(
    student: Pair,
    teachers: Sequence[Pair],
    shares: torch.Tensor,
    bank: Bank,
    settings: Distillation,
    divergence: Divergence,
) -> list[float]:
    """Algorithm 1 lines 20-24: the student on eq. 12; the loss of every step.

    Args:
        student: trained in place; starts as the average of the clients.
        teachers: the clients.
        shares: [N, C] τ_iy.
        bank: z and y of all iterations.
        settings: batch, learning rate, weight decay.
        divergence: of eq. 10 and 11.
    """
    generator, classifier = (student[part].train() for part in (Part.GENERATOR, Part.CLASSIFIER))
    for teacher in teachers:
        for half in teacher.values():
            half.eval().requires_grad_(False)  # noqa: FBT003 - torch's own signature
    weights = [*generator.parameters(), *classifier.parameters()]
    optimiser = torch.optim.Adam(weights, lr=settings.lr, weight_decay=settings.weight_decay)
    losses = []
    for rows in slices(len(bank), settings.batch):
        noise, labels = bank.noise[rows], bank.labels[rows]
        made = generator(noise, labels)
        logits = classifier(made)
        loss = torch.zeros(())
        for share, teacher in zip(shares, teachers, strict=True):
            theirs, judge = teacher[Part.GENERATOR](noise, labels), teacher[Part.CLASSIFIER]
            log_teacher = divergence.log_softmax(judge(theirs))
            judged = (logits, classifier(theirs), judge(made))
            each = sum(divergence.rows(some, log_teacher) for some in judged)
            loss = loss + (share[labels].to(logits.dtype) * each).mean()
        losses.append(take_step(optimiser, loss))
    return losses
