"""The frozen first convolution: EfficientNet-Lite0's with its batch norm folded in, the Gabor bank, and files that are neither."""

import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F  # noqa: N812

from fedcg.learning.defences import gan_mixing as stems
from fedcg.learning.errors import NetworkError
from fedcg.learning.split_names import MAX_WEIGHT_BYTES, Backbone


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
    stem = stems.pretrained_stem(path)
    assert stem is not None
    images = torch.rand(2, 3, side, side) * 2 - 1
    padded = F.pad(images, (side % 2, 1, side % 2, 1))
    maps = F.conv2d(padded, given["_conv_stem.weight"], stride=2)
    mean, variance, weight, bias = (given[f"_bn0.{name}"] for name in ("running_mean", "running_var", "weight", "bias"))
    expected = F.batch_norm(maps, mean, variance, weight, bias, eps=1e-3)
    assert stem(images).shape == (2, 32, -(-side // 2), -(-side // 2))
    assert torch.allclose(stem(images), expected, atol=1e-4)
    assert not list(stem.parameters())


def test_the_installed_package_is_read_and_grey_images_count_as_colour() -> None:
    stem = stems.pretrained_stem()
    assert stem is not None
    assert (stem.name, stem.channels) == ("efficientnet_lite0", 32)
    grey = torch.rand(1, 1, 16, 16)
    assert torch.allclose(stem(grey), stem(grey.expand(-1, 3, -1, -1)))


def test_without_the_package_there_is_no_pretrained_stem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stems, "BACKBONES", {stems.NAME: Backbone("none", "no_such_package")})
    assert stems.pretrained_stem() is None


def test_a_gabor_filter_answers_to_its_direction_and_the_bank_sees_brightness() -> None:
    bank = stems.gabor_stem()
    columns = torch.cos(2 * torch.pi / 3 * torch.arange(24.0)).expand(1, 1, 24, 24)
    across, along = (bank(images)[0, :16, 3:-3, 3:-3].square().mean(dim=(1, 2)) for images in (columns, columns.mT))
    assert int(across.argmax()) in (0, 1)  # wavelength 3, direction 0
    assert int(along.argmax()) in (4, 5)  # a quarter turn
    flat = bank(torch.ones(1, 1, 8, 8)) - bank(-torch.ones(1, 1, 8, 8))
    assert float(flat[0, ::2, 1:-1, 1:-1].abs().amax()) > 0.1


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
        harmful: "no weights that can be read",
        empty: "no weights that can be read",
        tmp_path / "gone.pth": "No such file",
        other: "_bn0.bias of shape 3 instead of 32",
        listed: "a list in place of tensors",
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
