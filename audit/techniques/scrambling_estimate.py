"""The block scrambling that an image generator imitates (PPIDSG, algorithm 1), estimated from what it makes of known images."""

from __future__ import annotations

import itertools

import torch
from scipy.optimize import linear_sum_assignment

from fedcg.learning.defences.scrambling import Scrambling

MOST_NUMBERS = 4096  # of an image: the table of correlations between pixels has its square, 64 MB
_TINY = 1e-6


def estimated_scrambling(images: torch.Tensor, made: torch.Tensor, block: int) -> Scrambling:
    """The scrambling that explains best what a generator makes of images.

    Which block of an image a block of its encryption comes from, how that is turned, mirrored, complemented and its channels permuted, is
    what gives the highest sum of absolute correlations between their numbers; every block is used once.

    Args:
        images: known ones, [N, C, H, W].
        made: what the generator makes of them, [N, C, H, W].
        block: pixels of a block's side, which divides both sides of an image.
    """
    shape = images.shape[1:]
    numbers = _blocks(torch.arange(shape.numel()).view(1, *shape), block)[0]
    known, seen = (_standardised(_blocks(some, block)) for some in (images, made))
    moves = _moves(shape[0], block)
    count, size = numbers.shape
    best, which = torch.zeros(count, count), torch.zeros(count, count, dtype=torch.int64)
    for place in range(count):
        table = torch.einsum("ni,nsj->sij", seen[:, place], known) / len(images)
        scores = table[:, torch.arange(size), moves].sum(2)
        chosen = scores.abs().argmax(1)
        which[place] = chosen
        best[place] = scores.gather(1, chosen[:, None])[:, 0]
    _, sources = linear_sum_assignment(best.abs().numpy(), maximize=True)
    source, mask = torch.empty(shape.numel(), dtype=torch.int64), torch.zeros(shape.numel(), dtype=torch.uint8)
    for place, origin in enumerate(sources.tolist()):
        source[numbers[place]] = numbers[origin][moves[which[place, origin]]]
        mask[numbers[place]] = 255 if best[place, origin] < 0 else 0
    return Scrambling((shape[0], shape[1], shape[2]), source, mask)


def _blocks(images: torch.Tensor, block: int) -> torch.Tensor:
    """[N, C, H, W] -> [N, blocks, C * block * block], row by row."""
    count, channels, height, width = images.shape
    grid = images.view(count, channels, height // block, block, width // block, block)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * block * block)


def _standardised(blocks: torch.Tensor) -> torch.Tensor:
    deviation, mean = torch.std_mean(blocks, 0)
    return (blocks - mean) / (deviation + _TINY)


def _moves(channels: int, block: int) -> torch.Tensor:
    """[M, C * block * block]: every way in which turning, mirroring and permuting channels can move the numbers of a block."""
    numbers = torch.arange(channels * block * block).view(channels, block, block)
    turned = [some.rot90(turns, (1, 2)) for some in (numbers, numbers.flip(2)) for turns in range(4)]
    orders = itertools.permutations(range(channels))
    return torch.stack([some[list(order)].flatten() for order in orders for some in turned])
