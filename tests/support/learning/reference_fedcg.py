"""FedCG as in its paper (alg. 1 and 2), one step at a time: the expected values of the tests.

Nothing is optimised here: images are augmented and normalised batch by batch, the extractor runs in every step of the GAN, the global
generator in every step of the classifier, the discriminator has a pass for real and one for generated rows, the generator runs
again for its own step, and on the server every teacher runs in every step of the student. Optimisers are torch's own; layers
are ours, which `test_layers` compares with torch's.
The readings of eq. 1-6 are those of `methods.fedcg`, and so are the random draws: after a step, losses and weights are the same.
One deviation from the paper: the generator's second run over a batch does not count in its running statistics, so that
each batch counts once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from fedcg.learning.aggregation.distillation import Bank, Distillation, Pair
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import RoundContext, TrainingParams
from fedcg.learning.methods.fedcg import FedcgParams, gamma
from fedcg.learning.spec import FederationSpec
from fedcg.learning.training import losses
from fedcg.learning.training.batches import Augmentation, Augmenter, index_blocks, slices, steps_of
from fedcg.wire.parts import Part

_GAN_BETAS = (0.5, 0.999)
Networks = Mapping[Part, nn.Module]


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Within the block, batch norms normalise by the batch as usual, but their running statistics do not change."""
    norms = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


@dataclass(frozen=True)
class Batch:
    """The inputs of one step of a client.

    Attributes:
        images: [B, C, H, W] uint8.
        labels: [B] int64.
        augmentation: of the B images.
        noise: [B, q] float32.
    """

    images: torch.Tensor
    labels: torch.Tensor
    augmentation: Augmentation
    noise: torch.Tensor

    def pixels(self, spec: FederationSpec) -> torch.Tensor:
        """Return the extractor's input images, [B, C, H, W] float32."""
        return normalise(self.augmentation.apply(self.images), spec.image)


def batches(data: ImageSet, params: TrainingParams, ctx: RoundContext, stage: str) -> Iterator[Batch]:
    """Return the batches of a stage ("classify" or "generate"), with the draws of both methods."""
    streams = ctx.streams.at(stage)
    augmenter, order, stream = Augmenter(ctx.spec, streams), streams.generator("order"), streams.generator("noise")
    for index in index_blocks(len(data), params.batch_size, steps_of(params, len(data)), order):
        augmentation = augmenter.draw(len(index))
        noise = torch.randn(len(index), ctx.spec.network.noise_dim, generator=stream)
        for rows in slices(len(index), params.batch_size):
            some = data.rows(index[rows])
            yield Batch(some.images, some.labels, augmentation[rows], noise[rows])


def take_step(optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """Take one gradient step of an optimiser on a loss; return the loss."""
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return loss.item()


def classify(nets: Networks, data: ImageSet, params: FedcgParams, ctx: RoundContext) -> list[float]:
    """Run algorithm 1 lines 3-9: extractor and classifier on eq. 3; return the loss of every step."""
    extractor, classifier = (nets[part].train() for part in (Part.EXTRACTOR, Part.CLASSIFIER))
    generator = nets[Part.GENERATOR].eval()
    weights = [*extractor.parameters(), *classifier.parameters()]
    optimiser = torch.optim.Adam(weights, lr=params.lr, weight_decay=params.weight_decay)
    told = []
    for batch in batches(data, params, ctx, "classify"):
        features = extractor(batch.pixels(ctx.spec))
        loss = losses.cross_entropy(classifier(features), batch.labels)
        with torch.no_grad():
            target = generator(batch.noise, batch.labels)
        loss = loss + gamma(ctx.round, params) * losses.feature_mse(features, target)
        told.append(take_step(optimiser, loss))
    return told


def train_gan(nets: Networks, data: ImageSet, params: FedcgParams, ctx: RoundContext) -> list[float]:
    """Run algorithm 1 lines 10-18: discriminator and generator on eq. 4, extractor frozen; return the sum of both losses per step."""
    extractor, decay = nets[Part.EXTRACTOR].eval(), params.weight_decay
    generator, discriminator = (nets[part].train() for part in (Part.GENERATOR, Part.DISCRIMINATOR))
    judge = torch.optim.Adam(discriminator.parameters(), lr=params.gan_lr, betas=_GAN_BETAS, weight_decay=decay)
    forger = torch.optim.Adam(generator.parameters(), lr=params.gan_lr, betas=_GAN_BETAS, weight_decay=decay)
    told = []
    for batch in batches(data, params, ctx, "generate"):
        asked = losses.paired_labels(batch.labels)
        with torch.no_grad():
            real = extractor(batch.pixels(ctx.spec))
        fake = generator(batch.noise, asked)
        judged = discriminator(real, batch.labels)
        d_loss = losses.discriminator_loss(judged, discriminator(fake.detach(), asked))
        judged_loss = take_step(judge, d_loss)

        with statistics_kept(generator):
            fake = generator(batch.noise, asked)
        g_loss = losses.generator_loss(discriminator(fake, asked))
        first, second = slice(0, len(asked) // 2), slice(len(asked) // 2, 2 * (len(asked) // 2))
        spread = losses.mode_seeking(fake[first], fake[second], batch.noise[first], batch.noise[second])
        g_loss = g_loss + params.diversity * spread
        told.append(judged_loss + take_step(forger, g_loss))
    return told


def distil(student: Pair, teachers: Sequence[tuple[float, Pair]], bank: Bank, settings: Distillation) -> list[float]:
    """Algorithm 2: KL from the ensemble (eq. 5) to the student (eq. 6); the loss of every step.

    Args:
        student: trained in place; starts as the average of the clients.
        teachers: each with its share of all images.
        bank: z and y of all iterations.
        settings: batch, learning rate, weight decay.
    """
    generator, classifier = (student[part].train() for part in (Part.GENERATOR, Part.CLASSIFIER))
    taught = [(share, one[Part.GENERATOR].eval(), one[Part.CLASSIFIER].eval()) for share, one in teachers]
    weights = [*generator.parameters(), *classifier.parameters()]
    optimiser = torch.optim.Adam(weights, lr=settings.lr, weight_decay=settings.weight_decay)
    told = []
    for rows in slices(len(bank), settings.batch):
        noise, labels = bank.noise[rows], bank.labels[rows]
        with torch.no_grad():
            ensemble = sum(share * judge(maker(noise, labels)) for share, maker, judge in taught)
        assert isinstance(ensemble, torch.Tensor)
        loss = losses.kl_teacher_student(ensemble, classifier(generator(noise, labels)))
        told.append(take_step(optimiser, loss))
    return told
