"""torchvision's backbones as splits, without pretrained weights, for grey and colour images of any size.

`resnet18` is FedCG's backbone for larger images as its authors' code has it: cut after `layer2`, then a sigmoid. With a layer
(`resnet18@layer2`) the cut is bare: every layer offered ends in a ReLU, whose features are >= 0. MobileNetV3's blocks end in
a linear layer with batch norm, of both signs, so a sigmoid follows every cut; a ReLU would throw half of it away.

`vision` is the one door to torchvision, which is optional: imported when a backbone or a data set of its is named, never before.
torchvision's wheels carry an extension compiled for one build of torch. Beside another build (a CPU torch from elsewhere) it
does not load, and `import torchvision` then fails over two operators that nothing here uses. Their schemas are declared by
hand in that case, and models, data sets and transforms work; `torchvision.ops` that need the extension do not.
"""

import functools
import importlib
import importlib.util
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn

from fedcg.learning.errors import LearningError
from fedcg.learning.networks.splits import FeatureRange, Split
from fedcg.learning.split_names import CUTS, INSTALL_VISION, backbone_cut, check_name

_SCHEMAS = tuple(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms"))


@functools.cache
def vision(submodule: str) -> ModuleType:
    """`torchvision.<submodule>`, e.g. "models" or "datasets".

    Raises:
        LearningError: torchvision is not installed, or does not fit this torch; names what to install.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise LearningError(f"this needs torchvision, which is not installed here; {INSTALL_VISION}")
    try:
        return importlib.import_module(f"torchvision.{submodule}")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise LearningError(
                f"torchvision does not fit torch {torch.__version__}: {error}; {INSTALL_VISION}"
            ) from error
    _declare_schemas()
    return importlib.import_module(f"torchvision.{submodule}")


@functools.cache  # also because the schemas live only as long as this object
def _declare_schemas() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    return library


# Share of a batch in batch norm's running averages. torchvision gives MobileNetV3 0.01, which suits a million steps: after a client's
# few hundred, the averages still are what they started as, and the model, right in train mode, is at chance in eval mode.
_MOMENTUM = 0.1

Chain = OrderedDict[str, nn.Module]


@functools.cache
def backbone_split(name: str) -> Split:
    """The split of a name such as `resnet18`, `resnet18@layer3` or `mobilenet_v3_small@features.8`.

    Raises:
        NetworkError: a layer that it can't be cut after, or torchvision is not installed.
    """
    check_name(name)
    backbone, layer = backbone_cut(name)
    chain_of = _CHAINS[backbone]
    # Imported here, not in the factories: those run on the meta device, where an import's own tensors would be lost.
    models = vision("models")
    with_sigmoid = backbone == "mobilenet_v3_small" or name == backbone

    def extractor(channels: int) -> nn.Module:
        head, _ = cut(chain_of(models, channels, 1), layer)
        if with_sigmoid:
            head["sigmoid"] = nn.Sigmoid()
        return nn.Sequential(head)

    def classifier(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
        _, tail = cut(chain_of(models, 3, classes), layer)
        return nn.Sequential(tail)

    return Split(
        extractor=extractor,
        classifier=classifier,
        feature_range=FeatureRange.UNIT if with_sigmoid else FeatureRange.NON_NEGATIVE,
        smallest_side=CUTS[backbone].smallest_side(layer),
    )


def cut(chain: Chain, layer: str) -> tuple[Chain, Chain]:
    """A chain of layers up to and including `layer`, and the rest.

    Args:
        chain: layers by name, each one's output the next one's input.
        layer: a name in the chain, or a dotted one inside a sequence of it ("layer2.0").
    """
    name, _, inside = layer.partition(".")
    names = list(chain)
    at = names.index(name)
    head = OrderedDict((one, chain[one]) for one in names[:at])
    tail = OrderedDict((one, chain[one]) for one in names[at + 1 :])
    sequence = chain[name]
    if not inside or not isinstance(sequence, nn.Sequential):
        head[name] = sequence
        return head, tail
    after = int(inside) + 1
    head[name] = sequence[:after]
    if after < len(sequence):
        tail[name] = sequence[after:]
        tail.move_to_end(name, last=False)
    return head, tail


def _resnet18(models: ModuleType, channels: int, classes: int) -> Chain:
    net = models.resnet18(weights=None, num_classes=classes)
    _take_channels(net.conv1, channels)
    chain = OrderedDict(net.named_children())
    return _flattened_before(chain, "fc")


def _mobilenet_v3_small(models: ModuleType, channels: int, classes: int) -> Chain:
    net = models.mobilenet_v3_small(weights=None, num_classes=classes)
    _take_channels(net.features[0][0], channels)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = _MOMENTUM
    chain = OrderedDict(net.named_children())
    return _flattened_before(chain, "classifier")


def _take_channels(conv: nn.Conv2d, channels: int) -> None:
    """Make a network's first convolution, which has no values yet, one for images of `channels` channels."""
    if conv.in_channels != channels:
        conv.in_channels = channels
        conv.weight = nn.Parameter(conv.weight.new_empty(conv.out_channels, channels, *conv.kernel_size))


def _flattened_before(chain: Chain, last: str) -> Chain:
    """A layer for what torchvision does in `forward`, so that the chain is all there is to the network."""
    chain["flatten"] = nn.Flatten()
    chain.move_to_end(last)
    return chain


_CHAINS: dict[str, Callable[[ModuleType, int, int], Chain]] = {
    "resnet18": _resnet18,
    "mobilenet_v3_small": _mobilenet_v3_small,
}
