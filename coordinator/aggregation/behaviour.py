"""What an update does: does its classifier recognise its generator's features, and does the last aggregate agree? Uses torch."""

from __future__ import annotations

from dataclasses import replace

import torch

from coordinator.updates.figures import Behaviour, sketches_of
from coordinator.updates.robustness import Yardstick
from fedcg.learning.method import Weights
from fedcg.learning.networks import load_part
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.learning.tensor_conversion import to_weights
from fedcg.learning.training.batches import frozen_rows, generate
from fedcg.wire.artifacts.tensors import PartArrays
from fedcg.wire.parts import Part

DRAWS_PER_CLASS = 1000
MOST_DRAWS = 20_000
"""With more than 20 classes each one has fewer draws: the time of a measurement stays that of a small teacher pass."""


def behaviour_of(parts: PartArrays, yardstick: Yardstick, spec: FederationSpec, streams: Streams) -> Behaviour:
    """Measure one update alone; a function of the update, the base and the streams.

    Args:
        parts: of the update, decoded, as the device sent them.
        yardstick: with the round's base.
        spec: of the federation.
        streams: the coordinator's, scoped to the attempt: no device knows the draws.
    """
    trained_on = get_method(spec.method).with_base
    base = {part: arrays for part, arrays in yardstick.base.parts.items() if part in trained_on}
    plain = Behaviour(yardstick.distances(parts), sketches_of(parts, base, streams.seed("sketch")))
    if Part.GENERATOR not in parts or Part.CLASSIFIER not in parts:
        return plain
    last = yardstick.base.parts.get(Part.CLASSIFIER)
    known = None if last is None else to_weights({Part.CLASSIFIER: last})[Part.CLASSIFIER]
    consistency, agreement = _shares(to_weights(parts), known, spec, streams)
    return replace(plain, consistency=consistency, agreement=agreement)


@torch.no_grad()
def _shares(
    own: dict[Part, Weights], last: Weights | None, spec: FederationSpec, streams: Streams
) -> tuple[float, float | None]:
    """(consistency, agreement with the classifier `last`) on features of the update's own generator."""
    generator, classifier = (load_part(spec, part, own[part]).eval() for part in (Part.GENERATOR, Part.CLASSIFIER))
    base = None if last is None else load_part(spec, Part.CLASSIFIER, last).eval()
    labels = torch.arange(spec.class_count).repeat_interleave(
        max(1, min(DRAWS_PER_CLASS, MOST_DRAWS // spec.class_count))
    )
    noise = torch.randn(len(labels), spec.network.noise_dim, generator=streams.generator("figures"))
    asked, agreed = 0, 0
    rows = frozen_rows(torch.device("cpu"))
    for some_noise, some_labels in zip(noise.split(rows), labels.split(rows), strict=True):
        features = generate(generator, some_noise, some_labels)
        given = classifier(features).argmax(1)
        asked += int((given == some_labels).sum())
        agreed += 0 if base is None else int((given == base(features).argmax(1)).sum())
    return asked / len(labels), None if base is None else agreed / len(labels)
