"""Judges of images: whether they show a class, by networks that share neither weights nor start with the model under attack.

They belong to the truth's side of an audit: they are trained on images that no attacker has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from audit.evidence.case import View
from audit.evidence.networks import WholeModel, trained_alone, whole_model
from audit.measures.statistics import Values
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks import build_part, weights_of
from fedcg.learning.seeds import Streams
from fedcg.wire.parts import Part


def trained_judges(
    view: View, images: ImageSet, count: int, epochs: int, streams: Streams, tick: Callable[[], None]
) -> list[WholeModel]:
    """Networks of the federation's kind that were trained on these images alone, each from a random start of its own.

    Args:
        view: for the network and its training parameters; nothing of the update is used.
        images: of all classes, none of which the attacker has: what fits the attacked model alone does not fit these.
        count: of networks.
        epochs: of each.
        streams: for starts and the order of images.
        tick: called after each network.
    """
    judges = []
    for number in range(count):
        own = streams.at("judge", number)
        wanted = (Part.EXTRACTOR, Part.CLASSIFIER)
        start = {part: weights_of(build_part(view.spec, part, own.generator(part.value))) for part in wanted}
        trained = trained_alone(view, start, images, own, epochs)
        judges.append(whole_model(view.spec, trained[Part.EXTRACTOR], trained[Part.CLASSIFIER]))
        tick()
    return judges


@torch.no_grad()
def recognised(judges: Sequence[WholeModel], images: torch.Tensor, target: int) -> Values:
    """The probability of the class by the judges, their mean, for each image [N, C, H, W] in [0, 1]: [N]."""
    found: Values = (
        torch.stack([judge.logits(images).softmax(1)[:, target] for judge in judges]).mean(0).double().numpy()
    )
    return found
