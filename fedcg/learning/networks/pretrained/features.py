"""The pooled features of a wholly frozen backbone in the place of images: computed once, they take less memory than the pixels.

Only the projection and what follows it are then computed in a step. Exact up to rounding: a frozen backbone is in eval mode, so
that images do not see each other, and without random crops and flips every epoch shows it the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fedcg.learning.data.image_folder import normalise
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks.assembly import allocated, skeleton, split_of
from fedcg.learning.networks.pretrained.backbone import ProjectedBackbone
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

_PIXELS_AT_ONCE = 64 * 96 * 96  # 0.1 GB of the first layers' maps


def keeps_features(spec: FederationSpec) -> bool:
    """Whether features can stand for images under a spec: the whole backbone is frozen, and no image is changed at random."""
    return spec.network.freeze == "all" and not spec.augment_flip and not spec.augment_crop


def frozen_backbone(spec: FederationSpec, device: str) -> ProjectedBackbone:
    """The extractor of such a spec with its constants, in eval mode; the projection holds no values yet.

    Raises:
        NetworkError: its weights are not here.
    """
    extractor, fill = allocated(skeleton(spec, Part.EXTRACTOR), device), split_of(spec).fill
    assert isinstance(extractor, ProjectedBackbone)
    assert fill is not None  # without weights nothing can be frozen
    fill(extractor, None)
    return extractor.eval()


def with_features(
    spec: FederationSpec, sets: Sequence[ImageSet], device: str, working: Callable[[], None] = lambda: None
) -> list[ImageSet]:
    """Sets of images, with features in the place of images where the spec lets them stand there; else as they are.

    Features that would take more memory than the pixels are not kept.

    Args:
        spec: names the network.
        sets: [N, C, H, W] uint8 each.
        device: torch device.
        working: called after each batch.

    Returns:
        Sets of [N, K] float32, in the same order.

    Raises:
        NetworkError: the backbone's weights are not here.
    """
    if not keeps_features(spec):
        return list(sets)
    form, backbone = spec.image, frozen_backbone(spec, device)
    if 4 * backbone.project.in_features > form.channels * form.height * form.width:
        return list(sets)
    rows = max(1, _PIXELS_AT_ONCE // (form.height * form.width))

    @torch.no_grad()
    def features(images: torch.Tensor) -> torch.Tensor:
        found = [torch.empty(0, backbone.project.in_features, device=images.device)]
        for some in images.split(rows) if len(images) else ():
            found.append(backbone.pooled(normalise(some.to(device), form)).to(images.device))
            working()
        return torch.cat(found)

    return [replace(images, images=features(images.images)) for images in sets]


class KeptFeatures:
    """Features of the sets that were asked for last: a device's images stay the same for many rounds."""

    def __init__(self) -> None:
        self._kept: tuple[str, Sequence[ImageSet], list[ImageSet]] = ("", (), [])

    def of(
        self, spec: FederationSpec, sets: Sequence[ImageSet], device: str, working: Callable[[], None]
    ) -> list[ImageSet]:
        """As `with_features`."""
        if not keeps_features(spec):
            return list(sets)  # nothing is kept: these images may go
        known, before, made = self._kept
        if known != spec.digest or [id(one.images) for one in before] != [id(one.images) for one in sets]:
            made = with_features(spec, sets, device, working)
            self._kept = (spec.digest, sets, made)
        return made
