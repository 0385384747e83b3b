"""Block-scrambling encryption of images (PPIDSG, algorithm 1 and appendix B).

An image is cut into blocks (IB), and a separate key controls each step: IR rotates a block by 0, 90, 180 or 270
degrees, IA replaces its pixels by their complements, IF mirrors it left to right, top to bottom or not at all, IC
permutes its channels, IS shuffles the blocks. The text of algorithm 1 and of eq. 6 and 12 is garbled. From the prose
and appendix B it is read as:
  * eq. 6: p' = p where the bit is 0, and p xor (2^L - 1) = 255 - p where it is 1 (L = 8). The bit is one per BLOCK, for all its
    pixels and channels: the appendix counts two states of a block under IA, and eq. 12 multiplies states of blocks;
  * keys count per block too, and one key serves all images of a device: eq. 12's space is n! (4 * 2 * 3 * 6)^n for n blocks;
  * the order is that of appendix B: IR, IA, IF, IC, IS. A key entry applies to the block at its position when its step
    runs.

Every step except IA moves pixels, and IA commutes with moving, so any order of steps is one permutation of the pixels
and one mask. One known image with its encryption reveals most of both. This hides images from people; it is not a
cipher.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedcg.learning.defences.params import DEFAULT_BLOCK, ScramblingStep, Size
from fedcg.learning.errors import DefenceError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import ImageForm
from fedcg.values import Value


class ScramblingKeys(Value):
    """One key per step for images of one size. Keys never leave the device.

    Attributes:
        block: pixels of a block's side.
        rotation: [n] int64, quarter turns anticlockwise, 0..3, of each of the n blocks (row by row).
        complement: [n] int64, 1 where a block is complemented, else 0.
        flip: [n] int64, 0 unchanged, 1 mirrored left to right, 2 top to bottom.
        channels: [n, C] int64, the source channel of each channel of a block.
        shuffle: [n] int64, the source block of each block.
    """

    block: int
    rotation: torch.Tensor
    complement: torch.Tensor
    flip: torch.Tensor
    channels: torch.Tensor
    shuffle: torch.Tensor


def draw_keys(streams: Streams, size: Size, block: int = DEFAULT_BLOCK) -> ScramblingKeys:
    """The keys of a device for images of one size, each from its own stream.

    Args:
        streams: of the device's secret, in a scope without round and attempt, so that all rounds use the same keys.
        size: of the images.
        block: pixels of a block's side.

    Raises:
        DefenceError: the block does not divide the image.
    """
    count = blocks_of(size, block)
    rotate, complement, flip, channels, shuffle = (
        streams.generator("scrambling", step.value) for step in ScramblingStep
    )
    return ScramblingKeys(
        block,
        rotation=torch.randint(4, (count,), generator=rotate),
        complement=torch.randint(2, (count,), generator=complement),
        flip=torch.randint(3, (count,), generator=flip),
        channels=torch.rand(count, size[0], generator=channels).argsort(dim=1),
        shuffle=torch.randperm(count, generator=shuffle),
    )


@dataclass(frozen=True, eq=False)
class Scrambling:
    """Steps and keys for images of one size, as one permutation of the pixels and one mask.

    Attributes:
        size: of the images.
        source: [C * H * W] int64, the source pixel of each pixel of an encrypted image.
        mask: [C * H * W] uint8, 255 if the pixel is complemented, else 0.
    """

    size: Size
    source: torch.Tensor
    mask: torch.Tensor

    def encrypt(self, images: torch.Tensor) -> torch.Tensor:
        """Encrypt images, all with the same keys.

        Args:
            images: [N, C, H, W] uint8, on any device.

        Returns:
            [N, C, H, W] uint8, on the same device.

        Raises:
            DefenceError: images of another type or size.
        """
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != self.size:
            channels, height, width = self.size
            raise DefenceError(
                f"images to scramble are [N, {channels}, {height}, {width}] uint8, not {list(images.shape)} {images.dtype}"
            )
        source, mask = self.source.to(images.device), self.mask.to(images.device)
        return (images.flatten(1)[:, source] ^ mask).view(images.shape)

    def seen(self, data: ImageSet) -> ImageSet:
        """The same set with encrypted images."""
        return replace(data, images=self.encrypt(data.images))

    def layer(self, form: ImageForm) -> nn.Module:
        """`encrypt` for normalised images, as a layer in front of a network: [B, C, H, W] float32 to the same."""
        return _ScramblingLayer(self, form)


class _ScramblingLayer(nn.Module):
    """One gather and one affine step: p' = 255 - p is 1 - p/255 for pixels scaled to [0, 1]."""

    def __init__(self, scrambling: Scrambling, form: ImageForm) -> None:
        super().__init__()
        self.size = scrambling.size
        statistics = torch.tensor([form.mean, form.std], dtype=torch.float64)
        mean, std = statistics.repeat_interleave(form.height * form.width, dim=1)
        source, bit = scrambling.source, scrambling.mask.double() / 255
        sign = 1 - 2 * bit
        scale, shift = sign * std[source] / std, (bit + sign * mean[source] - mean) / std
        self.source, self.scale, self.shift = map(nn.Buffer, (source, scale.float(), shift.float()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pixels = images.flatten(1).index_select(1, self.source) * self.scale + self.shift
        return pixels.view(-1, *self.size)


def scrambling_of(keys: ScramblingKeys, size: Size, steps: Sequence[ScramblingStep]) -> Scrambling:
    """The scrambling by steps and keys for images of one size.

    Computed by running the steps on an image of doubled pixel indices, whose last bit IA flips.

    Args:
        keys: drawn for this size.
        size: of the images.
        steps: the steps, in order.

    Raises:
        DefenceError: blocks do not divide the images, keys have another length, or IC is used on grey images.
    """
    _check(keys, size, steps)
    channels, height, width = size
    grid = (channels, height // keys.block, keys.block, width // keys.block, keys.block)
    numbers = 2 * torch.arange(channels * height * width).view(grid)
    blocks = numbers.permute(1, 3, 0, 2, 4).reshape(-1, channels, keys.block, keys.block)
    for step in steps:
        blocks = _apply(step, blocks, keys)
    placed = blocks.view(grid[1], grid[3], channels, keys.block, keys.block).permute(2, 0, 3, 1, 4).flatten()
    return Scrambling(size, placed >> 1, (255 * (placed & 1)).to(torch.uint8))


def _apply(step: ScramblingStep, blocks: torch.Tensor, keys: ScramblingKeys) -> torch.Tensor:
    """One step on [n, C, block, block]."""
    each = torch.arange(len(blocks))
    if step is ScramblingStep.ROTATE:
        return torch.stack([blocks.rot90(turns, (2, 3)) for turns in range(4)])[keys.rotation, each]
    if step is ScramblingStep.COMPLEMENT:
        return blocks ^ keys.complement.view(-1, 1, 1, 1)
    if step is ScramblingStep.FLIP:
        return torch.stack([blocks, blocks.flip(3), blocks.flip(2)])[keys.flip, each]
    if step is ScramblingStep.PERMUTE_CHANNELS:
        return blocks[each.view(-1, 1), keys.channels]
    return blocks[keys.shuffle]


def blocks_of(size: Size, block: int) -> int:
    """The number of blocks of an image.

    Raises:
        DefenceError: blocks do not divide the image.
    """
    _, height, width = size
    if block < 1 or height % block or width % block:
        raise DefenceError(
            f"block = {block} does not divide images of {height}x{width} pixels: choose a divisor of both sides, or another size"
        )
    return (height // block) * (width // block)


def _check(keys: ScramblingKeys, size: Size, steps: Sequence[ScramblingStep]) -> None:
    (channels, height, width), count = size, blocks_of(size, keys.block)
    if channels == 1 and ScramblingStep.PERMUTE_CHANNELS in steps:
        raise DefenceError("scrambling: IC permutes colour channels, but these images are grey; leave IC out")
    for name in ("rotation", "complement", "flip", "channels", "shuffle"):
        actual, shape = tuple(getattr(keys, name).shape), (count, channels) if name == "channels" else (count,)
        if actual != shape:
            raise DefenceError(
                f"the key {name} has the shape {actual}, but images of {channels}x{height}x{width} in blocks of {keys.block} need "
                f"{shape}: draw keys for this size"
            )
