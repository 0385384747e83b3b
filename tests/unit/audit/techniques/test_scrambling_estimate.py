"""The scrambling of a generator that imitates it is read off what it makes of known images."""

from __future__ import annotations

import pytest
import torch

from audit.measures.images import unit_pixels
from audit.techniques.scrambling_estimate import estimated_scrambling
from fedcg.learning.defences.scrambling import ScramblingStep, draw_keys, encrypt, steps_for
from fedcg.learning.seeds import Streams

STREAM = torch.Generator().manual_seed(3)


def photographs(channels: int) -> torch.Tensor:
    """Smooth images: neighbouring pixels are alike, as in photographs."""
    coarse = torch.rand(400, channels, 5, 5, generator=STREAM)
    return (torch.nn.functional.interpolate(coarse, size=(16, 16), mode="bilinear") * 255).byte()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("left_out", [None, ScramblingStep.SHUFFLE, ScramblingStep.COMPLEMENT])
def test_every_block_is_right_where_the_imitation_has_some_noise(
    channels: int, left_out: ScramblingStep | None
) -> None:
    images, keys = photographs(channels), draw_keys(Streams(b"device"), (channels, 16, 16))
    steps = [step for step in steps_for(channels) if step is not left_out]
    made = unit_pixels(encrypt(images, keys, steps))
    found = estimated_scrambling(unit_pixels(images), made + 0.05 * torch.randn(made.shape, generator=STREAM), 4)
    others = photographs(channels)
    assert torch.allclose(found.encrypted(unit_pixels(others)), unit_pixels(encrypt(others, keys, steps)))


def test_a_generator_that_imitates_nothing_shows_no_more_than_chance() -> None:
    images, keys = photographs(1), draw_keys(Streams(b"device"), (1, 16, 16))
    found = estimated_scrambling(unit_pixels(images), torch.rand(images.shape, generator=STREAM), 4)
    same = found.encrypted(unit_pixels(images)) == unit_pixels(encrypt(images, keys))
    assert same.all(0).float().mean() < 0.2
