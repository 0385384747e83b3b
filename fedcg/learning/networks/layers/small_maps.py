"""Convolutions of tiny feature maps as a few matrix products: drop-in for torch's layers, same tensor names and shapes.

A stride-1 convolution is a product of two polynomials, and a product that is n + k - 1 long is known from its values at as many
points (Toom-Cook; for convolutions Winograd): 512 -> 256 channels from 2x2 to 3x3 take 9 matrix products instead of 16, from 3x3
to 4x4 16 instead of 36. Both directions of the layer and all three gradients are the same product, with its factors in other
roles. At most five points per axis: their matrices hold small numbers, so that nothing is lost in float32 but the last digit or two.

Memory order of maps between such layers is (height, width, batch, channels), of their weights (height, width, inputs, outputs);
shapes as torch has them. On other devices than a CPU, and for larger maps, torch's own layers run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

Size = tuple[int, int]
_POINTS = (0.0, 1.0, -1.0, 2.0)  # and infinity, always the last


@dataclass(frozen=True)
class Form:
    """A convolution as products between points: out = leave · ((enter · maps) x (kernel · weight)), x a matrix product per point.

    Attributes:
        enter: [P, positions of the input].
        kernel: [P, positions of the kernel].
        leave: [positions of the output, P]. None, for any of the three, is the identity.
        size: height and width of the output.
        grows: it is a transposed convolution.
    """

    enter: torch.Tensor | None
    kernel: torch.Tensor | None
    leave: torch.Tensor | None
    size: Size
    grows: bool


def is_small(smaller: Size, kernel: Size) -> bool:
    """Whether a layer between a map of this size and one larger by the kernel can be written as a `Form`."""
    return all(side > 0 and side + width - 1 <= len(_POINTS) + 1 for side, width in zip(smaller, kernel, strict=True))


def _values(length: int, points: int) -> torch.Tensor:
    """[points, length] float64: takes a polynomial's coefficients to its values; at infinity that is the leading one."""
    finite = torch.tensor(_POINTS[: points - 1], dtype=torch.float64).view(-1, 1)
    infinity = torch.zeros(1, length, dtype=torch.float64)
    infinity[0, -1] = 1.0
    return torch.cat([finite ** torch.arange(length), infinity])


@functools.lru_cache(maxsize=64)
def form_of(smaller: Size, kernel: Size, dtype: torch.dtype, *, grows: bool) -> Form:
    """The form of a transposed convolution (`grows`: from the smaller map) or of a convolution (to the smaller map)."""
    larger = (smaller[0] + kernel[0] - 1, smaller[1] + kernel[1] - 1)
    pairs = [zip(smaller, larger, strict=True), zip(kernel, larger, strict=True), zip(larger, larger, strict=True)]
    of_map, of_kernel, of_product = (torch.kron(*(_values(few, many) for few, many in pair)) for pair in pairs)
    interpolated = torch.linalg.inv(of_product)
    enter, leave = (of_map, interpolated) if grows else (interpolated.t(), of_map.t())
    matrices = [_unless_identity(matrix.to(dtype).contiguous()) for matrix in (enter, of_kernel, leave)]
    return Form(matrices[0], matrices[1], matrices[2], larger if grows else smaller, grows)


def _unless_identity(matrix: torch.Tensor) -> torch.Tensor | None:
    rows, columns = matrix.shape
    return None if rows == columns and torch.equal(matrix, torch.eye(rows, dtype=matrix.dtype)) else matrix


def _apply(matrix: torch.Tensor | None, planes: torch.Tensor) -> torch.Tensor:
    """A matrix [R, S], or the identity, on the first axis of [S, A, B]."""
    return planes if matrix is None else (matrix @ planes.flatten(1)).view(matrix.shape[0], *planes.shape[1:])


def _transpose(matrix: torch.Tensor | None) -> torch.Tensor | None:
    return None if matrix is None else matrix.t()


def planes_of(maps: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] -> [H * W, B, C]; a view in the memory order of this module."""
    return maps.permute(2, 3, 0, 1).flatten(0, 1)


def maps_of(planes: torch.Tensor, size: Size) -> torch.Tensor:
    """[H * W, B, C] -> [B, C, H, W], a view."""
    return planes.view(*size, *planes.shape[1:]).permute(2, 3, 0, 1)


def matrices_of(weight: torch.Tensor, *, grows: bool) -> torch.Tensor:
    """A weight as torch shapes it -> [kh * kw, inputs, outputs]; a view in the memory order of this module."""
    return (weight.permute(2, 3, 0, 1) if grows else weight.permute(2, 3, 1, 0)).flatten(0, 1)


def weight_of(matrices: torch.Tensor, kernel: Size, *, grows: bool) -> torch.Tensor:
    """The inverse of `matrices_of`, a view."""
    matrices = matrices.view(*kernel, *matrices.shape[1:])
    return matrices.permute(2, 3, 0, 1) if grows else matrices.permute(3, 2, 0, 1)


def without_values(weight: torch.Tensor, *, grows: bool) -> nn.Parameter:
    """A parameter of the same shape, without values, in the memory order of this module."""
    tall, wide = weight.shape[2:]
    inputs, outputs = (weight.shape[0], weight.shape[1]) if grows else (weight.shape[1], weight.shape[0])
    return nn.Parameter(weight_of(weight.new_empty(tall * wide, inputs, outputs), (tall, wide), grows=grows))


@dataclass(frozen=True)
class Products:
    """A convolution on its way: what the gradients need."""

    form: Form
    size: Size
    kernel: Size
    entered: torch.Tensor
    matrices: torch.Tensor

    def output(self) -> torch.Tensor:
        """[B, outputs, H', W']."""
        return maps_of(_apply(self.form.leave, torch.bmm(self.entered, self.matrices)), self.form.size)

    def left(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the output, [B, outputs, H', W'], as it left the products: [P, B, outputs]."""
        return _apply(_transpose(self.form.leave), planes_of(grad))

    def to_maps(self, left: torch.Tensor) -> torch.Tensor:
        """Gradient of the maps, [B, inputs, H, W]."""
        inner = torch.bmm(left, self.matrices.transpose(1, 2))
        return maps_of(_apply(_transpose(self.form.enter), inner), self.size)

    def to_matrices(self, left: torch.Tensor) -> torch.Tensor:
        """Gradient of the weight as [kh * kw, inputs, outputs]."""
        return _apply(_transpose(self.form.kernel), torch.bmm(self.entered.transpose(1, 2), left))


def products(maps: torch.Tensor, weight: torch.Tensor, form: Form) -> Products:
    """Begin a convolution: both factors between the points."""
    return Products(
        form,
        (maps.shape[2], maps.shape[3]),
        (weight.shape[2], weight.shape[3]),
        _apply(form.enter, planes_of(maps)),
        _apply(form.kernel, matrices_of(weight, grows=form.grows)),
    )


def form_for(maps: torch.Tensor, weight: torch.Tensor, *, grows: bool) -> Form | None:
    """The form of a (transposed) convolution, or None where torch's own layer is to run."""
    kernel = (weight.shape[2], weight.shape[3])
    tall, wide = maps.shape[2], maps.shape[3]
    smaller = (tall, wide) if grows else (tall - kernel[0] + 1, wide - kernel[1] + 1)
    if maps.device.type != "cpu" or torch.is_autocast_enabled("cpu") or not is_small(smaller, kernel):
        return None
    return form_of(smaller, kernel, weight.dtype, grows=grows)


class ConvolvedInForm(torch.autograd.Function):
    """A (transposed) convolution by its form. Args of `apply`: maps, weight, form."""

    @staticmethod
    def forward(ctx: Any, maps: torch.Tensor, weight: torch.Tensor, form: Form) -> torch.Tensor:
        """[B, inputs, H, W] -> [B, outputs, H', W']."""
        ctx.products = products(maps, weight, form)
        output: torch.Tensor = ctx.products.output()
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Gradients of maps and weight, where they are needed."""
        made: Products = ctx.products
        left = made.left(grad)
        to_maps = made.to_maps(left) if ctx.needs_input_grad[0] else None
        to_weight = (
            weight_of(made.to_matrices(left), made.kernel, grows=made.form.grows) if ctx.needs_input_grad[1] else None
        )
        return to_maps, to_weight, None


class SmallConvTranspose2d(nn.ConvTranspose2d):
    """A transposed convolution with stride 1 and without bias."""

    def __init__(self, inputs: int, outputs: int, kernel: Size) -> None:
        super().__init__(inputs, outputs, kernel, bias=False)
        self.weight = without_values(self.weight, grows=True)

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:  # noqa: A002 - torch's
        """[B, inputs, H, W] -> [B, outputs, H + kh - 1, W + kw - 1]."""
        form = form_for(input, self.weight, grows=True)
        if form is None or output_size is not None:
            return super().forward(input, output_size)
        convolved: torch.Tensor = ConvolvedInForm.apply(input, self.weight, form)  # type: ignore[no-untyped-call]
        return convolved


class MapBatchNorm2d(nn.BatchNorm2d):
    """Batch norm of small maps in this module's memory order; several passes' rows in one tensor see only their own pass."""

    def forward(self, input: torch.Tensor, passes: int = 1) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[B, C, H, W] -> the same shape; the batch holds `passes` passes of equal size, one after the other."""
        if passes == 1 or not self.training:
            return self._one(input)
        return torch.cat([self._one(rows) for rows in input.chunk(passes)])

    def _one(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.device.type != "cpu":
            return super().forward(rows)
        # One image of one column: the only form of this memory order that torch's channels-last kernel knows.
        column = rows.permute(2, 3, 0, 1).reshape(1, -1, 1, rows.shape[1]).permute(0, 3, 1, 2)
        normed = super().forward(column)
        size = (rows.shape[2], rows.shape[3])
        return maps_of(normed.permute(0, 2, 3, 1).reshape(size[0] * size[1], rows.shape[0], rows.shape[1]), size)
