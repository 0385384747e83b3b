"""Networks on whole images: published sizes, shapes at both widths, ranges of their outputs, and which images they take."""

import pytest
import torch
from torch import nn

from fedcg.learning.networks.image_networks import (
    WIDTHS,
    ImageAutoencoder,
    ResidualBlock,
    image_discriminator,
    image_generator,
    image_split,
    unfit_form,
)
from fedcg.learning.networks.splits import FeatureRange
from fedcg.learning.spec import ImageForm
from tests.support.learning.image_translation import built, networks_of

HALF = (0.5,)


def grey_form(**changed: object) -> ImageForm:
    return ImageForm.model_validate({"mode": "L", "height": 28, "width": 32, "mean": HALF, "std": HALF, **changed})


def weights_in(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def test_the_paper_widths_have_the_published_sizes() -> None:
    paper = WIDTHS["paper"]
    split = image_split(paper)
    with torch.device("meta"):
        # Table 5: 4,704 + 18,432 + 73,728 + 6 * 294,912 + 73,728 + 18,432 + 4,704.
        assert weights_in(image_generator(3, paper)) == 1_963_200
        assert weights_in(split.classifier((128, 8, 8), 10)) == 37_764_106
        assert weights_in(split.classifier((128, 7, 7), 10)) == 29_899_786
        extractor = split.extractor(3)
    # Convolutions 9 * (3*64 + 64*64 + 64*128 + 128*128) and 16 * (128*64 + 64*3), batch norms 2 * (64 + 64 + 128 + 128 + 64), 3 biases.
    assert weights_in(extractor) == 259_776 + 134_144 + 896 + 3


@pytest.mark.parametrize("width", sorted(WIDTHS))
@pytest.mark.parametrize(("channels", "height", "wide"), [(1, 28, 28), (3, 32, 32), (1, 12, 16)])
def test_every_network_fits_its_neighbours(width: str, channels: int, height: int, wide: int) -> None:
    nets = networks_of(WIDTHS[width], (channels, height, wide), classes=7)
    images = torch.rand(2, channels, height, wide, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        made = nets.generator(images)
        features = nets.extractor(made)
        restored = nets.extractor.restore(features)
        assert nets.classifier(features).shape == (2, 7)
        assert nets.discriminator(made).shape == (2, 1, height // 4 - 2, wide // 4 - 2)
    assert made.shape == restored.shape == images.shape
    assert features.shape == (2, 2 * WIDTHS[width].extractor, height // 4, wide // 4)
    for image in (made, restored):
        assert -1.0 <= image.min().item() < 0.0 < image.max().item() <= 1.0
    assert features.min().item() >= 0.0
    assert image_split(WIDTHS[width]).feature_range is FeatureRange.NON_NEGATIVE


def test_initial_weights_follow_from_the_stream_alone() -> None:
    first, again, other = (built(lambda: ImageAutoencoder(3, 4), seed).state_dict() for seed in (1, 1, 2))
    assert all(bool(tensor.isfinite().all()) for tensor in first.values())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_residual_block_adds_its_input() -> None:
    block = built(lambda: ResidualBlock(2), 0)
    maps = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    added = block(maps) - maps
    # The last layer is an instance norm: what is added has mean 0 and variance 1 in every map.
    assert torch.allclose(added.mean(dim=(2, 3)), torch.zeros(1, 2), atol=1e-5)
    assert torch.allclose(added.var(dim=(2, 3), unbiased=False), torch.ones(1, 2), atol=1e-2)


def test_a_form_that_fits_has_no_problem_and_others_name_the_field() -> None:
    assert unfit_form(grey_form()) == ""
    assert unfit_form(grey_form(mode="RGB", mean=HALF * 3, std=HALF * 3)) == ""
    assert "image.height = 30 twice: choose a multiple of 4 from 12 on" in unfit_form(grey_form(height=30))
    assert "image.width = 8 twice" in unfit_form(grey_form(width=8))
    assert "image.std = (0.25,) make others: set every one to 0.5" in unfit_form(grey_form(std=(0.25,)))


def test_twelve_pixels_are_the_least_that_the_discriminator_takes() -> None:
    judge = built(lambda: image_discriminator(1, WIDTHS["small"]), 0)
    assert judge(torch.zeros(1, 1, 12, 12)).shape == (1, 1, 1, 1)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        judge(torch.zeros(1, 1, 8, 8))
