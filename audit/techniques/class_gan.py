"""A GAN whose discriminator starts as a classifier, its last layer widened by a class "fake" (Hitaj et al. 2017; Anti-GAN §3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from audit.evidence.case import View
from audit.evidence.networks import WholeModel
from audit.measures.images import unit_pixels
from audit.techniques.class_shares import last_layer
from audit.techniques.image_generator import ImageGenerator
from fedcg.learning.networks.layers.layer_randomness import lent_generators
from fedcg.learning.seeds import Streams
from fedcg.learning.training.optimisers import adam

DRAWN = 200
"""Images that a GAN is asked for."""
_NOISE = 100  # Anti-GAN table 4
_BATCH = 16
_GENERATOR_LR = 1e-3
_DISCRIMINATOR_LR = (
    1e-5  # at Anti-GAN's 1e-4 the discriminator forgets the class, which it sees no image of, within 200 steps
)
_LIKELY = 0.3  # weight of the coefficients' mean square: likely images
_BETAS = (0.5, 0.999)


def widened(classifier: nn.Module, classes: int) -> nn.Module:
    """The classifier with one output more in its last linear layer, in place: the class "fake", whose logit is 0 at first."""
    name = str(last_layer(classifier, classes))
    parent, _, child = name.rpartition(".")
    state = classifier.get_submodule(name).state_dict()
    with lent_generators(0):  # values to be overwritten
        wider = nn.Linear(state["weight"].shape[1], classes + 1)
    wider.load_state_dict({key: torch.cat([value, torch.zeros_like(value[:1])]) for key, value in state.items()})
    setattr(classifier.get_submodule(parent), child, wider)
    return classifier


def generated_images(
    model: WholeModel, view: View, target: int, steps: int, streams: Streams, tick: Callable[[], None]
) -> torch.Tensor:
    """Images of the target class by a GAN whose discriminator starts as the received model.

    Each step trains the discriminator to tell the auxiliary images' classes and "fake" apart, then the generator towards the class.

    Args:
        model: the received one; changed in place.
        view: its auxiliary images are all that the attacker knows of images.
        target: the class.
        steps: of both networks.
        streams: for first weights, noise and order.
        tick: called after each step.

    Returns:
        [DRAWN, C, H, W] in [0, 1].
    """
    assert view.auxiliary is not None
    known, labels = unit_pixels(view.auxiliary.images), view.auxiliary.labels
    discriminator = replace(model, classifier=widened(model.classifier, view.spec.class_count))
    generator, stream = ImageGenerator(_NOISE, view.auxiliary, streams.generator("start")), streams.generator("steps")
    weights = [*discriminator.extractor.parameters(), *discriminator.classifier.parameters()]
    discriminating = adam(weights, _DISCRIMINATOR_LR, 0.0, _BETAS)
    drawing = adam(generator.parameters(), _GENERATOR_LR, 0.0, _BETAS)
    fakes, wanted = (torch.full((_BATCH,), label) for label in (view.spec.class_count, target))
    for _ in range(steps):
        coefficients = generator.coefficients(torch.randn(_BATCH, _NOISE, generator=stream))
        fake, rows = generator.pixels(coefficients), torch.randint(len(known), (_BATCH,), generator=stream)
        seen = discriminator.logits(torch.cat([known[rows], fake.detach()]))
        _step(discriminating, nn.functional.cross_entropy(seen, torch.cat([labels[rows], fakes])))
        loss = nn.functional.cross_entropy(discriminator.logits(fake), wanted)
        _step(drawing, loss + _LIKELY * coefficients.square().mean())
        tick()
    with torch.no_grad():
        drawn: torch.Tensor = generator(torch.randn(DRAWN, _NOISE, generator=streams.generator("images")))
    return drawn.clamp(0, 1)


def _step(optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
