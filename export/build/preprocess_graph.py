"""The way from a decoded image to a network's input as ONNX nodes: any height and width in, resized, normalised. Needs `onnx`; torch-free.

Must stay, bit for bit, the same function as `fedcg.imaging`; tests hold the two together.
onnxruntime's own Resize differs from Pillow's by up to 16 levels, so Pillow's arithmetic is written out, in the templates beside this module:
a pass over the columns, then one over the rows, each rounded to 8 bits, with weights of 22 bits that are computed from the image's size in double.
Only the pixels that a weight falls on are gathered, and their sums are exact: a weight is three bytes, and MatMulInteger adds up products
of bytes in 32 bits. So a photograph needs twice its own memory, not that of its values in double.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from export.model.runtime import INPUT_NAME, NETWORK_INPUT
from fedcg.input_form import ImageForm

if TYPE_CHECKING:
    import onnx

_PREFIX = "preprocess/"
T = TypeVar("T")


def add_preprocessing(network: onnx.ModelProto, form: ImageForm) -> onnx.ModelProto:
    """Put resizing and normalisation in front of a network.

    Args:
        network: takes `input`, [batch, channels, height, width] float32, normalised.
        form: mode, size and statistics that it was trained with.

    Returns:
        A model that takes `images`, [batch, any height, any width, channels] uint8.
    """
    from onnx.compose import add_prefix_graph
    from onnx.parser import parse_graph

    front = parse_graph(_text(form))
    for number, node in enumerate(front.node):
        node.name = str(number)
    add_prefix_graph(front, _PREFIX, rename_inputs=False, rename_outputs=False, inplace=True)
    return _joined(front, network)


def on_network(model: onnx.ModelProto, convert: Callable[[onnx.ModelProto], onnx.ModelProto]) -> onnx.ModelProto:
    """Convert a model's network; its preprocessing, if it has one, stays as it is."""
    import onnx

    nodes = list(model.graph.node)
    front = onnx.GraphProto(node=[one for one in nodes if _is_preprocessing(one)], input=model.graph.input)
    if not front.node:
        return convert(model)
    network = onnx.ModelProto()
    network.CopyFrom(model)
    _replace(network.graph.node, [one for one in nodes if not _is_preprocessing(one)])
    _replace(network.graph.input, [one for one in model.graph.value_info if one.name == NETWORK_INPUT])
    _replace(network.graph.value_info, [one for one in model.graph.value_info if one.name != NETWORK_INPUT])
    return _joined(front, convert(network))


def _is_preprocessing(node: onnx.NodeProto) -> bool:
    return bool(node.name.startswith(_PREFIX))


def _joined(front: onnx.GraphProto, network: onnx.ModelProto) -> onnx.ModelProto:
    """A model of both; what the network takes is kept in `value_info`, so that they can be taken apart again."""
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(network)
    _replace(model.graph.node, [*front.node, *network.graph.node])
    _replace(model.graph.input, front.input)
    model.graph.value_info.extend(network.graph.input)
    return model


def _replace(field: MutableSequence[T], values: Iterable[T]) -> None:
    kept = list(values)
    del field[:]
    field.extend(kept)


def _text(form: ImageForm) -> str:
    graph, resample = (
        Template(files("export.build").joinpath(f"{name}.template").read_text(encoding="utf-8"))
        for name in ("preprocess_graph", "resample")
    )
    mean, std = (", ".join(repr(float(np.float32(value))) for value in values) for values in (form.mean, form.std))
    return graph.substitute(
        images=INPUT_NAME,
        input=NETWORK_INPUT,
        channels=form.channels,
        height=form.height,
        width=form.width,
        x_pass=resample.substitute(p="x", data="x", out=form.width),
        y_pass=resample.substitute(p="y", data="y", out=form.height),
        mean=mean,
        std=std,
    )
