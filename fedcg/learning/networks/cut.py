"""Splits a user's network in two: a private extractor up to a submodule, and the classifier after it.

The network is traced symbolically (torch.fx) through the modules that contain the cut. All others stay leaf modules.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from fedcg.learning.errors import NetworkError
from fedcg.learning.networks.layers import described
from fedcg.learning.spec import Layer


@dataclass(frozen=True, eq=False)
class Halves:
    """A network in two parts, with its initial weights.

    Attributes:
        extractor: private; from inputs [B, *shape] float32, normalised, to features [B, ...].
        classifier: public; from features to logits [B, classes].
    """

    extractor: nn.Module
    classifier: nn.Module

    def __post_init__(self) -> None:
        """Check that both are modules.

        Raises:
            NetworkError: names the one that is not.
        """
        for name in ("extractor", "classifier"):
            if not isinstance(one := getattr(self, name), nn.Module):
                raise NetworkError(f"the {name} is a {type(one).__name__}, not a torch.nn.Module")

    def layers(self) -> tuple[Layer, ...] | None:
        """The classifier as data; None if it is not a sequence of standard layers."""
        if isinstance(self.classifier, fx.GraphModule):
            return _layers_of(self.classifier)
        return described(self.classifier)


def split(net: nn.Module, after: str) -> Halves:
    """Split a network after one of its submodules. The halves share its weights.

    Args:
        net: takes one tensor, [B, *shape].
        after: the submodule's name in `net.named_modules()`; its output is the features.

    Raises:
        NetworkError: no such submodule, or the network can't be split there; gives the reason.
    """
    if not isinstance(net, nn.Module):
        raise NetworkError(f"split: the network is a {type(net).__name__}, not a torch.nn.Module")
    names = [name for name, _ in net.named_modules() if name]
    if after not in names:
        top = [name for name, _ in net.named_children()]
        raise NetworkError(f"split: the network has no submodule {after!r}; it has {', '.join(top) or 'none'}")
    try:
        graph, as_used = (_Tracer(after).trace(copy.deepcopy(net).train(mode)) for mode in (True, False))
    except Exception as error:
        raise NetworkError(
            f"split: the network's forward can't be traced ({type(error).__name__}: {error}); "
            "pass its halves: fedcg.Split(extractor, classifier)"
        ) from error
    if str(graph) != str(as_used):
        raise NetworkError(
            "split: the network's forward reads self.training (F.dropout?), which tracing would freeze: use modules such as "
            "nn.Dropout, or pass its halves: fedcg.Split(extractor, classifier)"
        )
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    found = [node for node in graph.nodes if node.op == "call_module" and node.target == after]
    if len(inputs) != 1:
        raise NetworkError(f"split: the network takes {len(inputs)} inputs ({', '.join(map(str, inputs))}), not one")
    if len(found) != 1:
        raise NetworkError(f"split: the network calls {after} {len(found)} times; split it after a module called once")
    return Halves(_before(net, graph, found[0]), _behind(net, graph, found[0], after))


class _Tracer(fx.Tracer):
    """Traces into the modules that contain the cut, and no others."""

    def __init__(self, after: str) -> None:
        super().__init__()
        self._after = after

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self._after.startswith(f"{module_qualified_name}.")


def _before(net: nn.Module, graph: fx.Graph, cut: fx.Node) -> nn.Module:
    half, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = half.node_copy(node, copies.__getitem__)
        if node is cut:
            break
    half.output(copies[cut])
    return fx.GraphModule(net, half, "Extractor")


def _behind(net: nn.Module, graph: fx.Graph, cut: fx.Node, after: str) -> nn.Module:
    half = fx.Graph()
    copies = {cut: half.placeholder("features")}
    following = list(graph.nodes)[list(graph.nodes).index(cut) + 1 :]
    for node in following:
        if crossing := [one for one in node.all_input_nodes if one not in copies]:
            raise NetworkError(
                f"split: after {after} the network also uses {crossing[0]} from before it; "
                "split it where a single tensor is passed on"
            )
        copies[node] = half.node_copy(node, copies.__getitem__)
    return fx.GraphModule(net, half, "Classifier")


_ACTIVATIONS: Mapping[object, type[nn.Module]] = {
    torch.relu: nn.ReLU,
    "relu": nn.ReLU,
    nn.functional.relu: nn.ReLU,
    nn.functional.gelu: nn.GELU,
    torch.sigmoid: nn.Sigmoid,
    torch.tanh: nn.Tanh,
}


def _layers_of(classifier: fx.GraphModule) -> tuple[Layer, ...] | None:
    """A chain of calls as layers; None if it is not a chain or has a non-standard layer."""
    layers: list[Layer] = []
    last: fx.Node | None = None
    sizes: set[fx.Node] = set()
    for node in classifier.graph.nodes:
        if node.op == "placeholder":
            last = node
            continue
        if last not in node.all_input_nodes or set(node.all_input_nodes) - {last, *sizes}:
            return None
        if node.op == "output":
            return tuple(layers) if node.args == (last,) else None
        if node.target == "size":
            sizes.add(node)
            continue
        module = classifier.get_submodule(str(node.target)) if node.op == "call_module" else _called(node, sizes)
        found = None if module is None else described(module)
        if found is None:
            return None
        layers += found
        last = node
    return None


def _called(node: fx.Node, sizes: set[fx.Node]) -> nn.Module | None:
    """The layer equivalent to a call of a function or a tensor's method; None if there is none."""
    rest, named = node.args[1:], dict(node.kwargs)
    if node.target in (torch.flatten, "flatten"):
        return nn.Flatten() if (rest == (1,) and not named) or (not rest and named == {"start_dim": 1}) else None
    if node.target in ("view", "reshape"):  # to [B, K], as older code flattens
        keeps_rows = len(rest) == 2 and (rest[0] in sizes or rest == (-1, rest[1]))
        return nn.Flatten() if keeps_rows and not named else None
    return (
        _ACTIVATIONS[node.target]() if node.target in _ACTIVATIONS and set(named) <= {"inplace"} and not rest else None
    )
