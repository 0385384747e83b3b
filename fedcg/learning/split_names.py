"""Which names of splits mean something here, and which code a name may make this process import. Torch-free.

A split's name reaches a device in the spec, from the coordinator. A name is therefore never taken as something to import
because a spec names it: only what the owner of this machine installed or allowed counts.

  * `lenet5`, `lenet5_relu`, `lenet5_wide`, `cnn_bn`, `image_small`, `image_paper`: part of this program;
  * `resnet18`, `mobilenet_v3_small`, or one of them `@` a layer's name: torchvision's, cut after that layer;
  * a backbone of timm's with a private projection (`fedcg.learning.backbone_names`);
  * a name in the entry-point group `fedcg.splits` of a package that is installed here, or the `module:function` it stands for;
  * a `module:function` that the environment variable FEDCG_ALLOW_SPLITS lists (commas between several): for experiments
    with code that is not installed. Child processes inherit it.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fedcg.learning import extensions
from fedcg.learning.backbone_names import check_projected, is_projected
from fedcg.learning.errors import NetworkError

BUILT_IN = ("lenet5", "lenet5_relu", "lenet5_wide", "cnn_bn", "image_small", "image_paper")
ENTRY_POINT_GROUP = "fedcg.splits"
ALLOW_VARIABLE = "FEDCG_ALLOW_SPLITS"
INSTALL_VISION = "install torchvision: pip install 'fedcg-edge[vision]'"
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True)
class Cuts:
    """Where a backbone can be cut.

    Attributes:
        default: the layer after which the bare name cuts.
        strides: per layer that can be the extractor's last, how many pixels of an image one position of its output stands for.
    """

    default: str
    strides: Mapping[str, int]

    def smallest_side(self, layer: str) -> int:
        """The least side of an image such that no layer up to the cut halves a map of one position (all but padding)."""
        return self.strides[layer] // 2 + 1


def _resnet_strides() -> dict[str, int]:
    stages = {f"layer{stage}{block}": 2 ** (stage + 1) for stage in (1, 2, 3, 4) for block in (".0", "")}
    return {"relu": 2, "maxpool": 4, **stages, "avgpool": 32}


BACKBONES: Mapping[str, Cuts] = {
    "resnet18": Cuts("layer2", _resnet_strides()),
    "mobilenet_v3_small": Cuts(
        "features.8",
        {
            **{f"features.{layer}": 2 ** min(layer + 1, 3) for layer in range(4)},
            **{f"features.{layer}": 16 for layer in range(4, 9)},
            **{f"features.{layer}": 32 for layer in range(9, 13)},
            "avgpool": 32,
        },
    ),
}


def is_backbone(name: str) -> bool:
    """Whether a name asks for one of torchvision's networks, with or without a layer."""
    return name.partition("@")[0] in BACKBONES and not is_projected(name)


def backbone_cut(name: str) -> tuple[str, str]:
    """Backbone and layer of a name such as `resnet18@layer3`; a bare name means the default layer.

    Raises:
        NetworkError: a layer that the backbone can't be cut after; lists those it can.
    """
    backbone, at, layer = name.partition("@")
    cuts = BACKBONES[backbone]
    if not at:
        return backbone, cuts.default
    if layer not in cuts.strides:
        raise NetworkError(f"{backbone} can't be cut after {layer!r}; it can after {', '.join(cuts.strides)}")
    return backbone, layer


def registered() -> Mapping[str, str]:
    """Splits of the user's own that are installed here: name to `module:function`.

    Raises:
        ExtensionError: two installed packages give one name to different functions, or one has the name of a built-in split.
    """
    return extensions.registered(ENTRY_POINT_GROUP, frozenset({*BUILT_IN, *BACKBONES}))


def own_target(name: str) -> str:
    """The `module:function` that a name of a user's own split stands for, when this machine's owner let it in.

    Raises:
        NetworkError: neither installed nor allowed here; names how it can be.
    """
    installed = registered()
    allowed = {entry.strip() for entry in os.environ.get(ALLOW_VARIABLE, "").split(",")}
    if name in installed:
        return installed[name]
    if _TARGET.fullmatch(name):
        if name in installed.values() or name in allowed:
            return name
        raise NetworkError(
            f"the split {name} may not be imported on this machine: install a package that registers it as an entry point "
            f"in {ENTRY_POINT_GROUP}, or, for an experiment, list it in the environment variable {ALLOW_VARIABLE}"
        )
    known = ", ".join([*BUILT_IN, *BACKBONES, *sorted(installed)])
    raise NetworkError(
        f"no split named {name!r}; there are {known}, a backbone cut elsewhere (resnet18@layer3), one with a projection "
        "(efficientnet_lite0+project:256), and module:function"
    )


def allow_here(name: str) -> None:
    """Let this process and those it starts import a `module:function` that a person typed as an option; other names need nothing.

    For commands that run a whole experiment on one machine. Never for a name that came from elsewhere.
    """
    if _TARGET.fullmatch(name):
        listed = os.environ.get(ALLOW_VARIABLE, "")
        os.environ[ALLOW_VARIABLE] = f"{listed},{name}" if listed else name


def check_name(name: str) -> None:
    """Check, without importing any network, that a split of this name can be built here.

    Raises:
        NetworkError: an unknown name or layer, code that may not be imported here, or torchvision is missing.
        ExtensionError: see `registered`.
    """
    registered()
    if name in BUILT_IN:
        return
    if is_projected(name):
        check_projected(name)
        return
    if not is_backbone(name):
        own_target(name)
        return
    backbone, _ = backbone_cut(name)
    if importlib.util.find_spec("torchvision") is None:
        raise NetworkError(f"{backbone} comes from torchvision, which is not installed here; {INSTALL_VISION}")
