"""What one device trains: its own backbone if devices choose (`network.backbones`), and features instead of images.

The projection gives all devices' features the same shape, so the shared classifier and generator fit all of them.

The pooled features of a fully frozen backbone are computed once and take less memory than the pixels. A step then
computes only the projection and later layers. This is exact up to rounding: a frozen backbone is in eval mode, so
images are independent, and without random crops and flips every epoch has the same inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field

from fedcg.learning.data.image_folder import normalise
from fedcg.learning.errors import NetworkError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks.assembly import allocated, layouts, skeleton, split_of
from fedcg.learning.networks.timm_backbones import ProjectedBackbone, check_weights
from fedcg.learning.spec import FederationPlan, FederationSpec
from fedcg.learning.split_names import is_projected
from fedcg.wire.parts import Part


class DeviceSpec(FederationSpec):
    """A federation's spec with one device's own backbone. Its digest is still the federation's."""

    agreed: Annotated[str, Field(exclude=True)]

    @property
    def digest(self) -> str:
        """The sha256 of the federation's spec, in hex."""
        return self.agreed

    @property
    def backbone(self) -> str:
        """The name of the device's own backbone, as the federation's spec lists it."""
        return self.network.backbone_names[0]


def device_spec(spec: FederationSpec, backbone: str) -> FederationSpec:
    """The spec of a device that trains a backbone; the spec itself if there is no choice.

    Raises:
        NetworkError: the spec does not list that backbone, or its weights do not fit.
    """
    choice = spec.network
    if not choice.backbones:
        return spec
    if backbone not in choice.backbone_names:
        raise NetworkError(f"the spec has no backbone {backbone!r}; choose from {', '.join(choice.backbone_names)}")
    changed = spec.model_copy(update={"network": choice.with_backbone(backbone)})
    own = {**spec.layouts, **layouts(changed, frozenset({Part.EXTRACTOR}) & spec.layouts.keys())}
    values = {name: getattr(changed, name) for name in FederationSpec.model_fields}
    return DeviceSpec.model_construct(**{**values, "layouts": own, "agreed": spec.digest})


def check_backbones(plan: FederationPlan, shared: frozenset[Part]) -> None:
    """Check the backbones of a plan from which devices choose, and their weights files on this machine.

    Args:
        plan: an operator's plan.
        shared: parts that the method's clients upload or download.

    Raises:
        NetworkError: the method shares extractors, a backbone can't be built, or a file has other weights.
    """
    if plan.network.backbones and Part.EXTRACTOR in shared:
        raise NetworkError(
            f"{plan.method} averages extractors, which must be identical: leave network.backbones out, or choose a method that keeps "
            "extractors private (fedcg, fedsplit, fedmd_cg)"
        )
    for name in plan.network.backbone_names if is_projected(plan.network.split) else ():
        network = plan.network.with_backbone(name)
        split_of(plan.model_copy(update={"network": network}))
        check_weights(network)


_PIXELS_AT_ONCE = 64 * 96 * 96  # 0.1 GB of the first layers' maps


def keeps_features(spec: FederationSpec) -> bool:
    """Whether features can replace images under a spec: the whole backbone is frozen, and there is no augmentation."""
    return spec.network.freeze == "all" and not spec.augment_flip and not spec.augment_crop


def frozen_backbone(spec: FederationSpec, device: str) -> ProjectedBackbone:
    """The extractor of such a spec with its constants, in eval mode. The projection has no values yet.

    Raises:
        NetworkError: its weights are not on this machine.
    """
    extractor, fill = allocated(skeleton(spec, Part.EXTRACTOR), device), split_of(spec).fill
    assert isinstance(extractor, ProjectedBackbone)
    assert fill is not None  # freezing requires weights
    fill(extractor, None)
    return extractor.eval()


def with_features(
    spec: FederationSpec, sets: Sequence[ImageSet], device: str, working: Callable[[], None] = lambda: None
) -> list[ImageSet]:
    """Sets of images with features instead of images if the spec allows; otherwise unchanged.

    Features that need more memory than the pixels are not used.

    Args:
        spec: names the network.
        sets: [N, C, H, W] uint8 each.
        device: torch device.
        working: called after each batch.

    Returns:
        Sets of [N, K] float32, in the same order.

    Raises:
        NetworkError: the backbone's weights are not on this machine.
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

    made = {id(one.images): one.images for one in sets}  # clients may share one test set
    made = {number: features(images) for number, images in made.items()}
    return [replace(one, images=made[id(one.images)]) for one in sets]


class KeptFeatures:
    """Caches the features of the last requested sets, since a device's images stay the same for many rounds."""

    def __init__(self) -> None:
        self._kept: tuple[str, Sequence[ImageSet], list[ImageSet]] = ("", (), [])

    def of(
        self, spec: FederationSpec, sets: Sequence[ImageSet], device: str, working: Callable[[], None]
    ) -> list[ImageSet]:
        """As `with_features`."""
        if not keeps_features(spec):
            return list(sets)  # nothing is cached, so these images can be freed
        known, before, made = self._kept
        if known != spec.digest or [id(one.images) for one in before] != [id(one.images) for one in sets]:
            made = with_features(spec, sets, device, working)
            self._kept = (spec.digest, sets, made)
        return made
