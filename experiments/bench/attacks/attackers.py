"""What a hostile client sends in the place of its honest update. Uses torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from fedcg.learning.method import Update, Weights
from fedcg.learning.probes import OUTPUTS
from fedcg.wire.parts import Part

Parts = Mapping[Part, Weights]
Attack = Callable[[Update, Parts, torch.Generator], Update]
"""(the honest update, the round's base, a stream) -> the update that is sent."""

MANY_EXAMPLES = 10**9


def noise(honest: Update, base: Parts, stream: torch.Generator) -> Update:
    """Gaussian numbers with mean and deviation of each honest tensor."""

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        spread = float(tensor.std()) if tensor.numel() > 1 else float(tensor.abs().max())
        return float(tensor.mean()) + spread * torch.randn(tensor.shape, generator=stream)

    return _each(honest, lambda part, name, tensor: drawn(tensor))


def moved(times: float) -> Attack:
    """`times` the honest step; below 0 the other way round."""

    def attack(honest: Update, base: Parts, stream: torch.Generator) -> Update:
        def step(part: Part, name: str, tensor: torch.Tensor) -> torch.Tensor:
            start = base[part][name] if part in base else torch.zeros_like(tensor)
            return start + times * (tensor - start)

        return _each(honest, step)

    return attack


def shuffled_labels(honest: Update, base: Parts, stream: torch.Generator) -> Update:
    """The honest weights with the rows of the classifier's last layer moved on by one class."""
    classifier = dict(honest.parts[Part.CLASSIFIER])
    for name in list(classifier)[-2:]:
        classifier[name] = classifier[name].roll(1, dims=0)
    return replace(honest, parts={**honest.parts, Part.CLASSIFIER: classifier})


def constant_class(honest: Update, base: Parts, stream: torch.Generator) -> Update:
    """The honest weights, with a last layer that names class 0 whatever it sees."""
    classifier = dict(honest.parts[Part.CLASSIFIER])
    weight, bias = list(classifier)[-2:]
    classifier[weight] = torch.zeros_like(classifier[weight])
    classifier[bias] = torch.zeros_like(classifier[bias]).index_fill(0, torch.tensor([0]), 50.0)
    return replace(honest, parts={**honest.parts, Part.CLASSIFIER: classifier})


def many_examples(honest: Update, base: Parts, stream: torch.Generator) -> Update:
    """The honest weights, and the claim of 10^9 examples."""
    return replace(honest, examples=MANY_EXAMPLES)


def probes(outputs: Callable[[torch.Tensor, torch.Generator], torch.Tensor]) -> Attack:
    """The honest classifier, and other numbers [M, D] for the outputs on the cohort's probes: behind masks nobody sees them."""

    def attack(honest: Update, base: Parts, stream: torch.Generator) -> Update:
        told = honest.parts[Part.STATISTICS]
        return replace(
            honest, parts={**honest.parts, Part.STATISTICS: {**told, OUTPUTS: outputs(told[OUTPUTS], stream)}}
        )

    return attack


ATTACKS: Mapping[str, Attack] = {
    "noise": noise,
    "sign-flipped": moved(-1.0),
    "sign-flipped-x10": moved(-10.0),
    "x100": moved(100.0),
    "label-shuffled": shuffled_labels,
    "constant-class": constant_class,
    "many-examples": many_examples,
}
PROBE_ATTACKS: Mapping[str, Attack] = {
    "probes-noise": probes(
        lambda told, stream: (told.double().mean() * 2 * torch.rand(told.shape, generator=stream)).long()
    ),
    "probes-shuffled": probes(lambda told, stream: told[torch.randperm(len(told), generator=stream)]),
    "probes-x10": probes(lambda told, stream: 10 * told),
    "probes-highest": probes(lambda told, stream: torch.full_like(told, int(told.max())).mul(100)),
}
"""On methods that add up outputs on probes; ten and a hundred times are below what the sum has room for."""


def _each(honest: Update, change: Callable[[Part, str, torch.Tensor], torch.Tensor]) -> Update:
    """The update with every floating-point tensor changed; variances stay above 0, so that its form is sound."""

    def changed(part: Part, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        value = change(part, name, tensor)
        return value.clamp(min=0.0) if name.rpartition(".")[2] == "running_var" else value

    parts = {
        part: {name: changed(part, name, tensor) for name, tensor in weights.items()}
        for part, weights in honest.parts.items()
    }
    return replace(honest, parts=parts)
