"""Networks on whole images (PPIDSG, appendix C): an image generator, its discriminator, a feature autoencoder and a classifier.

Images lie in [-1, 1], the range of the generator's tanh, in which the complement of an encrypted pixel is its negative.
The spec therefore normalises with mean 0.5 and standard deviation 0.5 (`unfit_form`). Sides are multiples of 4, at
least 12.

`paper` has the published widths: 1,963,200 weights in the generator (table 5), 37,764,106 in the classifier for 32x32 colour images
and 29,899,786 for 28x28 grey ones. Deviations, with reasons:
  * no bias before a norm layer, which would subtract it (table 5 counts none either), and none in the generator at all;
  * residual blocks add their input, as in the paper's text and in CycleGAN; the authors' code omits this;
  * the autoencoder's last layer is a tanh without batch norm: with the published ReLU, negative pixels can't be
    restored.
`small` has two instead of six residual blocks and is otherwise as deep. Generator, discriminator and autoencoder have a
quarter of the channels, and the classifier 256 and 64 instead of 4,096 and 1,024 units.
"""

from collections.abc import Mapping

import torch
from torch import nn

from fedcg.input_form import ImageForm
from fedcg.learning.networks.splits import FeatureRange, Split, dense_classifier
from fedcg.values import Value

SMALLEST_SIDE = 12  # the discriminator's last two 4x4 convolutions reduce a quarter of a side by two pixels
_SLOPE = 0.2


class Widths(Value):
    """Widths of the networks.

    Attributes:
        generator: channels of its first layer, doubled twice in the encoder.
        residual: blocks between its encoder and decoder.
        discriminator: channels of its first layer, doubled twice.
        extractor: channels of the autoencoder's first two blocks, twice as many in the other two.
        hidden: units of the classifier's two hidden layers.
    """

    generator: int
    residual: int
    discriminator: int
    extractor: int
    hidden: tuple[int, int]


WIDTHS: Mapping[str, Widths] = {
    "paper": Widths(generator=32, residual=6, discriminator=32, extractor=64, hidden=(4096, 1024)),
    "small": Widths(generator=8, residual=2, discriminator=8, extractor=16, hidden=(256, 64)),
}


def unfit_form(form: ImageForm) -> str:
    """Why these networks do not support this image form, as a sentence with the setting to change; empty if they do."""
    for side, pixels in (("height", form.height), ("width", form.width)):
        if pixels % 4 or pixels < SMALLEST_SIDE:
            return f"networks on whole images halve input.{side} = {pixels} twice: choose a multiple of 4 from {SMALLEST_SIDE} on"
    if {*form.mean, *form.std} != {0.5}:
        return (
            f"networks on whole images need pixels in [-1, 1], but input.mean = {form.mean}, input.std = {form.std} give another range: "
            "set each to 0.5"
        )
    return ""


class ResidualBlock(nn.Module):
    """x + f(x), where f is two 3x3 convolutions with reflection padding and instance norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(channels, channels, 3, bias=False),
            nn.InstanceNorm2d(channels),
            nn.ReLU(),
            nn.ReflectionPad2d(1),
            nn.Conv2d(channels, channels, 3, bias=False),
            nn.InstanceNorm2d(channels),
        )

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] -> the same shape."""
        inner: torch.Tensor = self.body(maps)
        return maps + inner


def image_generator(channels: int, widths: Widths) -> nn.Module:
    """G: image -> encrypted image, both [B, C, H, W] float32 in [-1, 1]; encoder, residual blocks, decoder."""
    first = widths.generator

    def normed(layer: nn.Module, after: int) -> list[nn.Module]:
        return [layer, nn.InstanceNorm2d(after), nn.ReLU()]

    layers: list[nn.Module] = [nn.ReflectionPad2d(3), *normed(nn.Conv2d(channels, first, 7, bias=False), first)]
    for width in (first, 2 * first):
        layers += normed(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False), 2 * width)
    layers += [ResidualBlock(4 * first) for _ in range(widths.residual)]
    for width in (2 * first, first):
        up = nn.ConvTranspose2d(2 * width, width, 3, stride=2, padding=1, output_padding=1, bias=False)
        layers += normed(up, width)
    return nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(first, channels, 7, bias=False), nn.Tanh())


def image_discriminator(channels: int, widths: Widths) -> nn.Module:
    """D: [B, C, H, W] in [-1, 1] -> [B, 1, H/4 - 2, W/4 - 2], a logit per patch; its sigmoid tends to 1 on encrypted images."""
    first = widths.discriminator
    layers: list[nn.Module] = [nn.Conv2d(channels, first, 4, stride=2, padding=1), nn.LeakyReLU(_SLOPE)]
    for width, stride in ((first, 2), (2 * first, 1)):
        convolution = nn.Conv2d(width, 2 * width, 4, stride=stride, padding=1, bias=False)
        layers += [convolution, nn.InstanceNorm2d(2 * width), nn.LeakyReLU(_SLOPE)]
    return nn.Sequential(*layers, nn.Conv2d(4 * first, 1, 4, padding=1))


class ImageAutoencoder(nn.Module):
    """F: an encoder of four blocks, whose features are the classifier's input, and a decoder back to the image."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        blocks = (
            (channels, width, False),
            (width, width, True),
            (width, 2 * width, False),
            (2 * width, 2 * width, True),
        )
        self.encoder = nn.Sequential(*(self._block(before, after, halves) for before, after, halves in blocks))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, channels, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    @staticmethod
    def _block(before: int, after: int, halves: bool) -> nn.Module:
        layers = [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if halves else []))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Features >= 0: [B, C, H, W] in [-1, 1] -> [B, 2 * width, H/4, W/4]."""
        features: torch.Tensor = self.encoder(images)
        return features

    def restore(self, features: torch.Tensor) -> torch.Tensor:
        """The images reconstructed from features, [B, C, H, W] in [-1, 1]."""
        images: torch.Tensor = self.decoder(features)
        return images


def image_split(widths: Widths) -> Split:
    """F and C as a split: `ImageAutoencoder` as the extractor, and three linear layers with tanh on its features."""

    def extractor(channels: int) -> nn.Module:
        return ImageAutoencoder(channels, widths.extractor)

    return Split(
        extractor,
        dense_classifier(*widths.hidden, activation=nn.Tanh),
        FeatureRange.NON_NEGATIVE,
        SMALLEST_SIDE,
        image_generator=lambda channels: image_generator(channels, widths),
        image_discriminator=lambda channels: image_discriminator(channels, widths),
    )


IMAGE_SPLITS: Mapping[str, Split] = {
    f"image_{name}": image_split(widths) for name, widths in sorted(WIDTHS.items(), reverse=True)
}
