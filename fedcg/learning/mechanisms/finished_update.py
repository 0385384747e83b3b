"""What is done to a finished update before it leaves: clipping, noise, pruning, and noise on label counts.

The first three change the update's difference to the aggregate that the round started from, in this order; integer tensors
(batch norm's counters) are sent as they are. Noise comes from explicit generators, in the order of parts and names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fedcg.learning.method import Weights
from fedcg.learning.privacy import PrivacySettings
from fedcg.wire.parts import Part, Report

Parts = Mapping[Part, Weights]


def reduced_update(parts: Parts, base: Parts, privacy: PrivacySettings, stream: torch.Generator) -> Parts:
    """An update as it may leave.

    Args:
        parts: shared parts after the local round.
        base: the same parts of the aggregate that the round started from.
        privacy: `update_clip`, `update_noise` and `prune`; with all of them off the very same parts come back.
        stream: of the noise.
    """
    if privacy.update_clip is None and not privacy.update_noise and not privacy.prune:
        return parts
    differences = {
        (part, name): parts[part][name] - base[part][name]
        for part in sorted(parts)
        for name in sorted(parts[part])
        if parts[part][name].is_floating_point()
    }
    factor = _clip_factor(differences.values(), privacy.update_clip)
    reduced = {part: dict(weights) for part, weights in parts.items()}
    for (part, name), difference in differences.items():
        changed = pruned(_noisy(difference * factor, privacy.update_noise, stream), privacy.prune)
        tensor = base[part][name] + changed
        # Batch norm takes a root of it: noise must not make it negative.
        reduced[part][name] = tensor.clamp(min=0.0) if name.endswith("running_var") else tensor
    return reduced


def _clip_factor(differences: Iterable[torch.Tensor], clip: float | None) -> float:
    if clip is None:
        return 1.0
    norm = float(torch.stack([one.double().square().sum() for one in differences]).sum().sqrt())
    return min(1.0, clip / norm) if norm else 1.0


def _noisy(difference: torch.Tensor, deviation: float, stream: torch.Generator) -> torch.Tensor:
    if not deviation:
        return difference
    return difference + deviation * torch.randn(difference.shape, generator=stream)


def pruned(tensor: torch.Tensor, share: float) -> torch.Tensor:
    """A tensor whose floor(share · numbers) smallest numbers in magnitude are 0 (gradient compression, DLG §5)."""
    count = int(share * tensor.numel())
    if not count:
        return tensor
    smallest = tensor.abs().flatten().topk(count, largest=False, sorted=False).indices
    kept = tensor.flatten().clone()
    kept[smallest] = 0.0
    return kept.view(tensor.shape)


def noisy_counts(report: Report, scale: float, stream: torch.Generator) -> Report:
    """A report whose label counts have discrete Laplace noise, P(k) ~ exp(-|k| / scale), cut at 0; `examples` is their sum.

    One image more or less changes one count by 1, so the counts alone have ε = 1 / scale for it. A report without label counts
    is not changed. Where every count comes to 0, one class, drawn at random, counts 1: an update has an example.
    """
    if report.label_counts is None or not scale:
        return report
    classes = len(report.label_counts)
    # The floor of an exponential variable is geometric; the difference of two of them is discrete Laplace.
    draws = torch.empty(2, classes, dtype=torch.float64).exponential_(generator=stream).mul_(scale).floor_().long()
    counts = (torch.tensor(report.label_counts) + draws[0] - draws[1]).clamp(min=0)
    if not int(counts.sum()):
        counts[int(torch.randint(classes, (), generator=stream))] = 1
    values = tuple(int(count) for count in counts)
    return report.model_copy(update={"label_counts": values, "examples": sum(values)})
