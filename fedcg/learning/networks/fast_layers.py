"""Layers that are faster on small feature maps, with torch's tensor names and shapes.

Three kinds: convolutions as matrix products, spectral norm on top of them, and a convolution fused with its pooling.

A stride-1 convolution is a product of two polynomials. A product of length n + k - 1 is determined by its values at n +
k - 1 points (Toom-Cook; for convolutions Winograd): 512 -> 256 channels from 2x2 to 3x3 take 9 matrix products instead
of 16, from 3x3 to 4x4 16 instead of 36. At most five points per axis are used. Their matrices hold small numbers, so float32 loses
at most the last digit or two.

Memory order of maps between such layers is (height, width, batch, channels), of their weights (height, width, inputs,
outputs); shapes are torch's. On devices other than a CPU, and for larger maps, torch's own layers run.

Spectrally normalised layers: W x / σ(W) + b, with σ, the largest singular value, tracked by power iteration.

The same function as `torch.nn.utils.parametrizations.spectral_norm` (one iteration a forward pass in train mode,
gradient through σ). σ divides the OUTPUT instead of the weights.

A convolution fused with the following 2x2 pooling: same functions and tensors as `nn.Conv2d` followed by pooling.

Average pooling is linear. Fused with the convolution, it is one convolution of stride 2. Its kernel is the mean of four
copies of the kernel, shifted by one: 6x6 instead of 5x5, at a quarter of the positions.
"""

import functools

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

from fedcg.values import Value

Size = tuple[int, int]
_POINTS = (0.0, 1.0, -1.0, 2.0)  # and infinity, always the last


class Form(Value):
    """A convolution in Toom-Cook form: out = leave · ((enter · maps) x (kernel · weight)), x a matrix product per point.

    Attributes:
        enter: [P, positions of the input].
        kernel: [P, positions of the kernel].
        leave: [positions of the output, P]. None for any of the three is the identity.
        size: height and width of the output.
        grows: whether it is a transposed convolution.
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
    """[points, length] float64: maps a polynomial's coefficients to its values; at infinity, the leading coefficient."""
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
    """Apply a matrix [R, S], or the identity, to the first axis of [S, A, B]."""
    return planes if matrix is None else (matrix @ planes.flatten(1)).view(matrix.shape[0], *planes.shape[1:])


def planes_of(maps: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] -> [H * W, B, C]; a view in the memory order of this module."""
    return maps.permute(2, 3, 0, 1).flatten(0, 1)


def maps_of(planes: torch.Tensor, size: Size) -> torch.Tensor:
    """[H * W, B, C] -> [B, C, H, W], a view."""
    return planes.view(*size, *planes.shape[1:]).permute(2, 3, 0, 1)


def matrices_of(weight: torch.Tensor, *, grows: bool) -> torch.Tensor:
    """A weight in torch's shape -> [kh * kw, inputs, outputs]; a view in the memory order of this module."""
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


def convolved(maps: torch.Tensor, weight: torch.Tensor, form: Form) -> torch.Tensor:
    """A (transposed) convolution by its form: [B, inputs, H, W] -> [B, outputs, H', W']."""
    entered, matrices = _apply(form.enter, planes_of(maps)), _apply(form.kernel, matrices_of(weight, grows=form.grows))
    return maps_of(_apply(form.leave, torch.bmm(entered, matrices)), form.size)


def form_for(maps: torch.Tensor, weight: torch.Tensor, *, grows: bool) -> Form | None:
    """The form of a (transposed) convolution, or None if torch's own layer runs."""
    kernel = (weight.shape[2], weight.shape[3])
    tall, wide = maps.shape[2], maps.shape[3]
    smaller = (tall, wide) if grows else (tall - kernel[0] + 1, wide - kernel[1] + 1)
    if maps.device.type != "cpu" or torch.is_autocast_enabled("cpu") or not is_small(smaller, kernel):
        return None
    return form_of(smaller, kernel, weight.dtype, grows=grows)


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
        return convolved(input, self.weight, form)


class MapBatchNorm2d(nn.BatchNorm2d):
    """Batch norm of small maps in this module's memory order."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[B, C, H, W] -> the same shape."""
        if input.device.type != "cpu":
            return super().forward(input)
        # One image of one column: the only form of this memory order that torch's channels-last kernel supports.
        column = input.permute(2, 3, 0, 1).reshape(1, -1, 1, input.shape[1]).permute(0, 3, 1, 2)
        normed = super().forward(column)
        images, channels, *size = input.shape
        return maps_of(normed.permute(0, 2, 3, 1).reshape(size[0] * size[1], images, channels), (size[0], size[1]))


_EPS = 1e-12


class SingularVectors(nn.Module):
    """Estimates of a weight matrix's first left and right singular vectors; buffers, so they are stored with the weights."""

    left: torch.Tensor
    right: torch.Tensor

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("left", torch.empty(rows))
        self.register_buffer("right", torch.empty(columns))

    def forward(self, matrices: torch.Tensor) -> torch.Tensor:
        """σ = uᵀ W v, with the gradient for fixed vectors, after one iteration in train mode.

        Args:
            matrices: [K, inputs, outputs], the weight; `right` has the order (inputs, K).
        """
        positions, inputs, outputs = matrices.shape
        matrix = matrices.reshape(positions * inputs, outputs)
        left, right = self.left, self.right.view(inputs, positions).t().flatten()
        if self.training:
            with torch.no_grad():
                left = F.normalize(right @ matrix, dim=0, eps=_EPS)
                right = F.normalize(matrix @ left, dim=0, eps=_EPS)
                self.left.copy_(left)
                self.right.copy_(right.view(positions, inputs).t().flatten())
        return right @ matrix @ left

    def reset(self, generator: torch.Generator) -> None:
        """Start from random directions."""
        for vector in (self.left, self.right):
            direction = torch.randn(vector.shape, generator=generator)
            vector.copy_(direction / direction.norm())


class SpectralLinear(nn.Linear):
    """A linear layer divided by its weight's largest singular value."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight = nn.Parameter(self.weight.new_empty(inputs, outputs).t())
        self.vectors = SingularVectors(outputs, inputs)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[B, inputs] -> [B, outputs]."""
        sigma: torch.Tensor = self.vectors(self.weight.t().unsqueeze(0))
        return F.linear(input, self.weight) / sigma + self.bias


class SpectralConv2d(nn.Conv2d):
    """A convolution divided by the largest singular value of its weight, flattened to [outputs, the rest]."""

    def __init__(self, inputs: int, outputs: int, kernel: Size, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, kernel, bias=bias)
        self.weight = without_values(self.weight, grows=False)
        self.vectors = SingularVectors(outputs, inputs * kernel[0] * kernel[1])

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[B, inputs, H, W] -> [B, outputs, H', W']."""
        sigma: torch.Tensor = self.vectors(matrices_of(self.weight, grows=False))
        form = form_for(input, self.weight, grows=False)
        maps = F.conv2d(input, self.weight) if form is None else convolved(input, self.weight, form)
        return maps / sigma if self.bias is None else maps / sigma + self.bias.view(-1, 1, 1)


def is_exporting() -> bool:
    """Whether a graph is being exported. It gets torch's two separate layers, with constant kernels."""
    return bool(torch.jit.is_tracing() or torch.compiler.is_exporting())  # type: ignore[no-untyped-call, attr-defined]


class AveragedConv2d(nn.Conv2d):
    """`nn.AvgPool2d(2)(nn.Conv2d(inputs, outputs, kernel)(images))`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[B, inputs, H, W] -> [B, outputs, (H - kernel + 1) // 2, (W - kernel + 1) // 2]."""
        if is_exporting():
            return F.avg_pool2d(super().forward(input), 2)
        tall = F.pad(self.weight, (0, 0, 0, 1)) + F.pad(self.weight, (0, 0, 1, 0))
        wide = F.pad(tall, (0, 1)) + F.pad(tall, (1, 0))
        return F.conv2d(input, 0.25 * wide, self.bias, stride=2)


class MaxedConv2d(nn.Conv2d):
    """`nn.MaxPool2d(2)(nn.Conv2d(inputs, outputs, kernel)(images))`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[B, inputs, H, W] -> [B, outputs, (H - kernel + 1) // 2, (W - kernel + 1) // 2]."""
        return F.max_pool2d(super().forward(input), 2)
