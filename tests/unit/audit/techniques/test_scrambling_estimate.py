"""The scrambling of a generator that imitates it is read off what it makes of known images."""

import pytest
import torch

from audit.attacks.image_generator import estimated_scrambling
from audit.measures import unit_pixels
from fedcg.learning.defences.params import EtcParams
from fedcg.learning.defences.scrambling import draw_keys, scrambling_of
from fedcg.learning.seeds import Streams

STREAM = torch.Generator().manual_seed(3)


def photographs(channels: int) -> torch.Tensor:
    """Smooth images: neighbouring pixels are alike, as in photographs."""
    coarse = torch.rand(400, channels, 5, 5, generator=STREAM)
    return (torch.nn.functional.interpolate(coarse, size=(16, 16), mode="bilinear") * 255).byte()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("left_out", [None, "IS", "IA"])
def test_every_block_is_right_where_the_imitation_has_some_noise(channels: int, left_out: str | None) -> None:
    images, size = photographs(channels), (channels, 16, 16)
    steps = [step for step in EtcParams().order(channels) if step.value != left_out]
    true = scrambling_of(draw_keys(Streams(b"device"), size), size, steps)
    made = unit_pixels(true.encrypt(images))
    found = estimated_scrambling(unit_pixels(images), made + 0.05 * torch.randn(made.shape, generator=STREAM), 4)
    others = photographs(channels)
    assert torch.equal(found.encrypt(others), true.encrypt(others))


def test_a_generator_that_imitates_nothing_shows_no_more_than_chance() -> None:
    images, size = photographs(1), (1, 16, 16)
    true = scrambling_of(draw_keys(Streams(b"device"), size), size, EtcParams().order(1))
    found = estimated_scrambling(unit_pixels(images), torch.rand(images.shape, generator=STREAM), 4)
    assert (found.source == true.source).float().mean() < 0.2
