"""The way from a decoded image to a network's input as ONNX nodes: any height and width in, resized, normalised. Needs `onnx`; torch-free.

Must stay, bit for bit, the same function as `fedcg.imaging`; tests hold the two together.
onnxruntime's own Resize differs from Pillow's by up to 16 levels, so Pillow's arithmetic is written out here: a pass over the columns,
then one over the rows, each rounded to 8 bits, with weights of 22 bits that are computed from the image's size in double.
Only the pixels that a weight falls on are gathered, and their sums are exact: a weight is three bytes, and MatMulInteger adds up products
of bytes in 32 bits. So a photograph needs twice its own memory, not that of its values in double.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from export.model.runtime import INPUT_NAME, NETWORK_INPUT
from fedcg.image_form import ImageForm

if TYPE_CHECKING:
    import onnx

_PREFIX = "preprocess/"
T = TypeVar("T")

_CONSTANTS = """
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    middle = Constant <value_ints = [1]> ()
    rest = Constant <value_ints = [-1]> ()
    columns = Constant <value_ints = [0, -1]> ()
    zero_d = Constant <value = double {0.0}> ()
    half_d = Constant <value = double {0.5}> ()
    one_d = Constant <value = double {1.0}> ()
    unit_d = Constant <value = double {4194304.0}> ()   # a weight of 1: 2 to the power of 22
    byte = Constant <value = int64 {256}> ()
    places = Constant <value = int64[3, 1] {1, 256, 65536}> ()
    places_i = Cast <to = 6> (places)
    unit_i = Constant <value = int32 {4194304}> ()
    half_i = Constant <value = int32 {2097152}> ()
    white = Constant <value = int32 {255}> ()
"""

# [in, M] uint8 to [out, M] uint8. The names are those of Pillow's Resample.c where it has one; {p} distinguishes the two passes.
_RESAMPLE = """
    {p}_in = Shape <start = 0, end = 1> ({data})
    {p}_in_d = Cast <to = 11> ({p}_in)
    {p}_out = Constant <value = int64 {{{out}}}> ()
    {p}_out_d = Cast <to = 11> ({p}_out)
    {p}_scale = Div ({p}_in_d, {p}_out_d)
    {p}_support = Max ({p}_scale, one_d)

    # where the filter of each output lies: [out, 1]
    {p}_number = Range (zero, {p}_out, one)
    {p}_number_d = Cast <to = 11> ({p}_number)
    {p}_number_half = Add ({p}_number_d, half_d)
    {p}_center_row = Mul ({p}_number_half, {p}_scale)
    {p}_center = Unsqueeze ({p}_center_row, middle)
    {p}_from = Sub ({p}_center, {p}_support)
    {p}_from_half = Add ({p}_from, half_d)
    {p}_from_whole = Cast <to = 7> ({p}_from_half)
    {p}_xmin = Max ({p}_from_whole, zero)
    {p}_to = Add ({p}_center, {p}_support)
    {p}_to_half = Add ({p}_to, half_d)
    {p}_to_whole = Cast <to = 7> ({p}_to_half)
    {p}_xmax = Min ({p}_to_whole, {p}_in)

    # the pixels under it, and their weights as three bytes: [out, taps], [out, 3, taps]
    {p}_width = Sub ({p}_xmax, {p}_xmin)
    {p}_taps = ReduceMax <keepdims = 0> ({p}_width)
    {p}_tap = Range (zero, {p}_taps, one)
    {p}_x = Add ({p}_xmin, {p}_tap)
    {p}_x_d = Cast <to = 11> ({p}_x)
    {p}_offset = Sub ({p}_x_d, {p}_center)
    {p}_offset_half = Add ({p}_offset, half_d)
    {p}_ss = Div (one_d, {p}_support)
    {p}_argument = Mul ({p}_offset_half, {p}_ss)
    {p}_distance = Abs ({p}_argument)
    {p}_slope = Sub (one_d, {p}_distance)
    {p}_triangle = Max ({p}_slope, zero_d)
    {p}_is_inside = Less ({p}_x, {p}_xmax)
    {p}_inside = Cast <to = 11> ({p}_is_inside)
    {p}_w = Mul ({p}_triangle, {p}_inside)
    {p}_ww = ReduceSum <keepdims = 1> ({p}_w, middle)
    {p}_k = Div ({p}_w, {p}_ww)
    {p}_k_unit = Mul ({p}_k, unit_d)
    {p}_k_half = Add ({p}_k_unit, half_d)
    {p}_kk_row = Cast <to = 7> ({p}_k_half)
    {p}_kk = Unsqueeze ({p}_kk_row, middle)
    {p}_kk_shifted = Div ({p}_kk, places)
    {p}_kk_digits = Mod ({p}_kk_shifted, byte)
    {p}_kk_bytes = Cast <to = 2> ({p}_kk_digits)

    # the weighted sums, rounded to 8 bits
    {p}_last = Sub ({p}_in, one)
    {p}_x_valid = Min ({p}_x, {p}_last)
    {p}_pixels = Gather <axis = 0> ({data}, {p}_x_valid)
    {p}_sums = MatMulInteger ({p}_kk_bytes, {p}_pixels)
    {p}_sums_placed = Mul ({p}_sums, places_i)
    {p}_ss0 = ReduceSum <keepdims = 0> ({p}_sums_placed, middle)
    {p}_ss0_half = Add ({p}_ss0, half_i)
    {p}_level = Div ({p}_ss0_half, unit_i)
    {p}_clipped = Min ({p}_level, white)
    {p}_done = Cast <to = 2> ({p}_clipped)
"""

# The size is that of one image: a shape that contains the unknown size of the batch would not be folded. When onnxruntime is given the
# network's own height and width, it removes the resize altogether.
_GRAPH = """
preprocess (uint8[batch, height, width, {channels}] {images}) => (float[batch, {channels}, {height}, {width}] {input})
{{
    nought = Constant <value_int = 0> ()
    image = Gather <axis = 0> ({images}, nought)
    size = Shape <start = 0, end = 2> (image)
    wanted = Constant <value_ints = [{height}, {width}]> ()
    apart = Sub (size, wanted)
    apart_abs = Abs (apart)
    apart_sum = ReduceSum <keepdims = 0> (apart_abs)
    is_fitting = Equal (apart_sum, nought)
    fitted = If (is_fitting) <
        then_branch = fits () => (uint8[batch, {channels}, {height}, {width}] kept)
        {{ kept = Transpose <perm = [0, 3, 1, 2]> ({images}) }},
        else_branch = differs () => (uint8[batch, {channels}, {height}, {width}] resized)
        {{ {constants}
            batch_height = Shape <start = 0, end = 2> ({images})
            old_width = Shape <start = 2, end = 3> ({images})
            line = Shape <start = 2, end = 4> ({images})
            line_bytes = ReduceProd <keepdims = 1> (line)
            lines_shape = Concat <axis = 0> (rest, line_bytes)
            lines = Reshape ({images}, lines_shape)
            turned = Transpose <perm = [1, 0]> (lines)      # single bytes: several times as fast as pixels of three
            x_shape = Concat <axis = 0> (old_width, rest)
            x = Reshape (turned, x_shape)                   # [width, channels * batch * height]
            {x_pass}
            x_outer = Constant <value_ints = [{width}, {channels}]> ()
            narrow_shape = Concat <axis = 0> (x_outer, batch_height)
            narrow = Reshape (x_done, narrow_shape)
            upright = Transpose <perm = [3, 2, 1, 0]> (narrow)
            y = Reshape (upright, columns)                  # [height, batch * channels * {width}]
            {y_pass}
            small_shape = Constant <value_ints = [{height}, -1, {channels}, {width}]> ()
            small = Reshape (y_done, small_shape)
            resized = Transpose <perm = [1, 2, 0, 3]> (small)
        }}
    >
    levels = Cast <to = 1> (fitted)
    full = Constant <value = float {{255.0}}> ()
    scaled = Div (levels, full)
    mean = Constant <value = float[1, {channels}, 1, 1] {{{mean}}}> ()
    std = Constant <value = float[1, {channels}, 1, 1] {{{std}}}> ()
    centred = Sub (scaled, mean)
    {input} = Div (centred, std)
}}
"""


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
    mean, std = (", ".join(repr(float(np.float32(value))) for value in values) for values in (form.mean, form.std))
    return _GRAPH.format(
        images=INPUT_NAME,
        input=NETWORK_INPUT,
        channels=form.channels,
        height=form.height,
        width=form.width,
        constants=_CONSTANTS,
        x_pass=_RESAMPLE.format(p="x", data="x", out=form.width),
        y_pass=_RESAMPLE.format(p="y", data="y", out=form.height),
        mean=mean,
        std=std,
    )
