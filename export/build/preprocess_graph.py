"""Preprocessing as ONNX nodes: takes decoded images of any size, resizes and normalises them. Needs `onnx`; torch-free.

Must stay bit-exact with `fedcg.imaging`; tests compare the two.
onnxruntime's own Resize differs from Pillow's by up to 16 levels. The templates in this folder therefore implement Pillow's arithmetic:
one pass over the columns, then one over the rows, each rounded to 8 bits. The 22-bit weights are computed from the image's size in double.
Only the pixels with a weight are gathered, and their sums are exact: a weight is three bytes, and MatMulInteger sums products of bytes in
32 bits. So a photograph needs only twice its memory, instead of an array of doubles.
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
        form: mode, size and statistics of its training.

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
    """Convert a model's network. Its preprocessing, if any, stays unchanged."""
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
    """Join both to one model. The network's input stays in `value_info`, so that they can be separated again."""
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
