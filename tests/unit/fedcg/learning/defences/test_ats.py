"""ATS: the published transformations by hand, one of the two policies per image, each image once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedcg.learning.defences.ats import TRANSFORMATIONS, AtsParams
from fedcg.learning.defences.defence import DefencePlace, Defended, defence_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import silent
from fedcg.learning.seeds import Streams


def apply(data: ImageSet, folder: Path | None = None, **params: object) -> Defended:
    defence, checked = defence_of("ats", params)
    return defence.apply(data, checked, DefencePlace(Streams(b"device"), silent, folder))


def pictures(channels: int) -> ImageSet:
    pixels = torch.randint(256, (20, channels, 22, 22), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(20) % 2, ("a", "b"))


@pytest.mark.parametrize(
    ("name", "sign", "rows", "columns"),
    # 22 pixels: 150/331 of them are 10.0; magnitudes 2 and 3 of 9 are 2.2 and 3.3.
    [("3", 1, 0, 10), ("3", -1, 0, -10), ("7", 1, 2, 0), ("7", -1, -2, 0), ("43", 1, 3, 0), ("43", -1, -3, 0)],
)
def test_a_shift_moves_the_image_and_what_comes_in_is_black(name: str, sign: int, rows: int, columns: int) -> None:
    pixels = pictures(1).images[0, 0].numpy() // 2 + 1
    moved = np.array(TRANSFORMATIONS[name](Image.fromarray(pixels), sign))
    expected = np.roll(pixels, (-rows, -columns), (0, 1))
    for axis, by in enumerate((rows, columns)):
        lost = np.arange(22) >= 22 - by if by > 0 else np.arange(22) < -by
        expected[lost if axis == 0 else slice(None), lost if axis == 1 else slice(None)] = 0
    assert np.array_equal(moved, expected)


@pytest.mark.parametrize(("name", "factor"), [("1", 1 / 3), ("18", 7 / 18)])
def test_contrast_moves_pixels_from_or_to_the_mean(name: str, factor: float) -> None:
    pixels = np.array([[100, 120], [140, 160]], dtype=np.uint8)
    for sign in (1, -1):
        changed = np.array(TRANSFORMATIONS[name](Image.fromarray(pixels), sign))
        assert changed == pytest.approx(130 + (pixels - 130.0) * (1 + sign * factor), abs=1.0)


@pytest.mark.parametrize("channels", [1, 3])
def test_each_image_is_transformed_by_one_of_the_two_policies(channels: int, tmp_path: Path) -> None:
    data = pictures(channels)
    made = apply(data)
    assert made.facts == {"policy": "3-1-7+43-18-18"}
    assert torch.equal(made.images.labels, data.labels)
    assert made.images.images.shape == data.images.shape
    # Policy 3-1-7 leaves ten columns at one side black, the other one none; black stays what contrast makes of it, so flat.
    flat = [
        bool((image[:, 5:17, :9] == image[:, 5:6, :1]).all() or (image[:, 5:17, -9:] == image[:, 5:6, -1:]).all())
        for image in made.images.images
    ]
    assert 3 < sum(flat) < 17
    for row, image in enumerate(data.images):
        assert not torch.equal(made.images.images[row], image)
    assert apply(data).images.digest() == made.images.digest()
    assert torch.equal(apply(data.rows([7, 3])).images.images, made.images.images[[7, 3]])
    made.keep_picture(tmp_path)
    assert (tmp_path / "samples.png").read_bytes() == made.picture


def test_another_policy_is_refused() -> None:
    assert AtsParams(policy="43-18-18").policy == "43-18-18"
    with pytest.raises(ValueError, match=r"defence_params of ats: policy: .*'3-1-7'"):
        defence_of("ats", {"policy": "1-2-3"})
