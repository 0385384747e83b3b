"""Block-scrambling encryption of images (PPIDSG, algorithm 1 and appendix B).

An image is cut into blocks (IB), and a key of its own controls each step: IR turns a block by 0, 90, 180 or 270 degrees, IA
replaces its pixels by their complements, IF mirrors it left to right, top to bottom or not at all, IC permutes its channels, IS
shuffles the blocks. The text of algorithm 1 and of eq. 6 and 12 is garbled; read from the prose and appendix B as:
  * eq. 6: p' = p where the bit is 0, and p xor (2^L - 1) = 255 - p where it is 1 (L = 8). The bit is one per BLOCK, for all its
    pixels and channels: the appendix counts two states of a block under IA, and eq. 12 multiplies states of blocks;
  * keys count per block too, and one key serves all images of a device: eq. 12's space is n! (4 * 2 * 3 * 6)^n for n blocks;
  * the order is that of appendix B: IR, IA, IF, IC, IS. A key entry belongs to the block that is at its place when its step runs.

Every step but IA moves pixels, and IA commutes with moving, so any order of steps is one permutation of the pixels and one mask.
One known image with its encryption reveals most of both: this hides images from people, it is not a cipher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from fedcg.learning.errors import DefenceError
from fedcg.learning.seeds import Streams

DEFAULT_BLOCK = 4
Size = tuple[int, int, int]
"""Channels, height and width of an image."""


class ScramblingStep(str, Enum):
    """A step of algorithm 1, by the paper's name."""

    ROTATE = "IR"
    COMPLEMENT = "IA"
    FLIP = "IF"
    PERMUTE_CHANNELS = "IC"
    SHUFFLE = "IS"


COLOUR_STEPS = tuple(ScramblingStep)
GREY_STEPS = tuple(step for step in ScramblingStep if step is not ScramblingStep.PERMUTE_CHANNELS)


def steps_for(channels: int) -> tuple[ScramblingStep, ...]:
    """Every step that images of so many channels can have, in the paper's order: grey ones have no IC."""
    return GREY_STEPS if channels == 1 else COLOUR_STEPS


@dataclass(frozen=True)
class ScramblingKeys:
    """One key per step for images of one size; they never leave the device.

    Attributes:
        block: pixels of a block's side.
        rotation: [n] int64, quarter turns anticlockwise, 0..3, of each of the n blocks (row by row).
        complement: [n] int64, 1 where a block is complemented, else 0.
        flip: [n] int64, 0 as it is, 1 mirrored left to right, 2 top to bottom.
        channels: [n, C] int64, which channel of the block each channel is taken from.
        shuffle: [n] int64, which block each block is taken from.
    """

    block: int
    rotation: torch.Tensor
    complement: torch.Tensor
    flip: torch.Tensor
    channels: torch.Tensor
    shuffle: torch.Tensor


def draw_keys(streams: Streams, size: Size, block: int = DEFAULT_BLOCK) -> ScramblingKeys:
    """The keys of a device for images of one size, each from a stream of its own.

    Args:
        streams: of the device's secret, in a scope that no round or attempt is part of: all rounds use the same keys.
        size: of the images.
        block: pixels of a block's side.

    Raises:
        DefenceError: the block does not divide the image.
    """
    channels, height, width = size
    count = _blocks_of(height, width, block)

    def numbers(step: ScramblingStep, states: int) -> torch.Tensor:
        return torch.randint(states, (count,), generator=streams.generator("scrambling", step.value))

    order = torch.rand(
        count, channels, generator=streams.generator("scrambling", ScramblingStep.PERMUTE_CHANNELS.value)
    )
    shuffle = torch.randperm(count, generator=streams.generator("scrambling", ScramblingStep.SHUFFLE.value))
    return ScramblingKeys(
        block,
        rotation=numbers(ScramblingStep.ROTATE, 4),
        complement=numbers(ScramblingStep.COMPLEMENT, 2),
        flip=numbers(ScramblingStep.FLIP, 3),
        channels=order.argsort(dim=1),
        shuffle=shuffle,
    )


def encrypt(images: torch.Tensor, keys: ScramblingKeys, steps: Sequence[ScramblingStep] | None = None) -> torch.Tensor:
    """Encrypt images, all of them with the same keys.

    Args:
        images: [N, C, H, W] uint8, on any device.
        keys: drawn for this size.
        steps: which, in which order, each at most once; None: all that the images can have, in the paper's order.

    Returns:
        [N, C, H, W] uint8, on the same device.

    Raises:
        DefenceError: images of another type, a block that does not divide them, keys of another length, a step twice, IC on
            grey images.
    """
    source, mask = (part.to(images.device) for part in _plan(images, keys, steps))
    return (images.flatten(1)[:, source] ^ mask).view(images.shape)


def decrypt(images: torch.Tensor, keys: ScramblingKeys, steps: Sequence[ScramblingStep] | None = None) -> torch.Tensor:
    """The inverse of `encrypt` with the same keys and steps; same arguments and errors."""
    source, mask = (part.to(images.device) for part in _plan(images, keys, steps))
    return (images.flatten(1) ^ mask)[:, source.argsort()].view(images.shape)


def _plan(
    images: torch.Tensor, keys: ScramblingKeys, steps: Sequence[ScramblingStep] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where every pixel comes from ([C * H * W] int64), and 255 where it is complemented, else 0 ([C * H * W] uint8).

    Found by running the steps on an image of twice the pixels' own numbers, whose last bit is flipped by IA.
    """
    if images.ndim != 4 or images.dtype != torch.uint8:
        raise DefenceError(f"images to scramble are [N, C, H, W] uint8, not {list(images.shape)} {images.dtype}")
    channels, height, width = images.shape[1:]
    steps = steps_for(channels) if steps is None else steps
    _check(keys, (channels, height, width), steps)
    grid = (channels, height // keys.block, keys.block, width // keys.block, keys.block)
    numbers = 2 * torch.arange(channels * height * width).view(grid)
    blocks = numbers.permute(1, 3, 0, 2, 4).reshape(-1, channels, keys.block, keys.block)
    for step in steps:
        blocks = _apply(step, blocks, keys)
    placed = blocks.view(grid[1], grid[3], channels, keys.block, keys.block).permute(2, 0, 3, 1, 4).flatten()
    return placed >> 1, (255 * (placed & 1)).to(torch.uint8)


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


def _blocks_of(height: int, width: int, block: int) -> int:
    if block < 1 or height % block or width % block:
        raise DefenceError(
            f"block = {block} does not divide images of {height}x{width} pixels: choose a divisor of both sides, or another size"
        )
    return (height // block) * (width // block)


def _check(keys: ScramblingKeys, size: Size, steps: Sequence[ScramblingStep]) -> None:
    channels, height, width = size
    count = _blocks_of(height, width, keys.block)
    if len(set(steps)) < len(steps):
        raise DefenceError(f"steps = {', '.join(steps)}: each step can run once; leave out the second")
    if channels == 1 and ScramblingStep.PERMUTE_CHANNELS in steps:
        raise DefenceError("steps: IC permutes the channels of colour images, and these are grey; leave IC out")
    expected: Mapping[str, tuple[int, ...]] = {
        "rotation": (count,),
        "complement": (count,),
        "flip": (count,),
        "channels": (count, channels),
        "shuffle": (count,),
    }
    for name, shape in expected.items():
        actual = tuple(getattr(keys, name).shape)
        if actual != shape:
            raise DefenceError(
                f"the key {name} has the shape {actual}, and images of {channels}x{height}x{width} in blocks of {keys.block} need "
                f"{shape}: draw keys for this size"
            )
