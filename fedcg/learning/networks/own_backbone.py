"""The spec as one device trains under it, where devices choose their backbones (`network.backbones`).

The projection gives every device's features the same shape, so classifier and generator, which alone are shared, fit all of them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedcg.learning.backbone_names import is_projected
from fedcg.learning.errors import NetworkError
from fedcg.learning.networks.assembly import layouts, split_of
from fedcg.learning.networks.pretrained.backbone import check_weights
from fedcg.learning.spec import FederationPlan, FederationSpec
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
    """The spec of a device that trains a backbone; the spec itself where there is no choice.

    Raises:
        NetworkError: the spec does not list that backbone, or its weights do not fit.
    """
    choice = spec.network
    if not choice.backbones:
        return spec
    if backbone not in choice.backbone_names:
        raise NetworkError(
            f"the spec has no backbone {backbone!r}; a device may choose {', '.join(choice.backbone_names)}"
        )
    changed = spec.model_copy(update={"network": choice.with_backbone(backbone)})
    own = {**spec.layouts, **layouts(changed, frozenset({Part.EXTRACTOR}) & spec.layouts.keys())}
    values = {name: getattr(changed, name) for name in FederationSpec.model_fields}
    return DeviceSpec.model_construct(**{**values, "layouts": own, "agreed": spec.digest})


def check_backbones(plan: FederationPlan, shared: frozenset[Part]) -> None:
    """Check the backbones that a plan lets devices choose, and the files of their weights that are on this machine.

    Args:
        plan: of an operator.
        shared: parts that the method's clients send or get.

    Raises:
        NetworkError: the method shares extractors, a backbone can't be built, or a file does not hold its weights.
    """
    if plan.network.backbones and Part.EXTRACTOR in shared:
        raise NetworkError(
            f"{plan.method} averages extractors, which have to be alike: leave network.backbones out, or choose a method that keeps "
            "extractors private (fedcg, fedsplit, fedmd_cg)"
        )
    for name in plan.network.backbone_names if is_projected(plan.network.split) else ():
        network = plan.network.with_backbone(name)
        split_of(plan.model_copy(update={"network": network}))
        check_weights(network)
