"""Which defences there are, and two of them by hand: ATS' transformations, and block scrambling."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedcg.input_form import ImageForm
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.defences.ats import TRANSFORMATIONS
from fedcg.learning.defences.defence import (
    DefencePlace,
    Defended,
    check_defence,
    defence_label,
    defence_names,
    defence_of,
)
from fedcg.learning.defences.params import EtcParams, ScramblingStep
from fedcg.learning.defences.scrambling import Scrambling, ScramblingKeys, draw_keys, scrambling_of
from fedcg.learning.errors import DefenceError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import silent
from fedcg.learning.seeds import Streams
from tests.support.learning.learning_cases import bright_images

DEVICE = Streams(b"device")
GREY = ImageForm(mode="L", height=8, width=12, mean=(0.3,), std=(0.2,))
COLOUR = ImageForm(mode="RGB", height=8, width=8, mean=(0.1, 0.5, 0.7), std=(0.2, 0.5, 1.0))
ROTATE, COMPLEMENT, FLIP, CHANNELS, _ = ScramblingStep


def random_images(count: int, size: tuple[int, int, int], seed: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, *size), generator=stream, dtype=torch.uint8)


def scrambling(images: torch.Tensor, keys: ScramblingKeys, steps: Sequence[ScramblingStep] | None = None) -> Scrambling:
    channels, height, width = images.shape[1:]
    return scrambling_of(keys, (channels, height, width), EtcParams().order(channels) if steps is None else steps)


def encrypt(images: torch.Tensor, keys: ScramblingKeys, steps: Sequence[ScramblingStep] | None = None) -> torch.Tensor:
    return scrambling(images, keys, steps).encrypt(images)


def in_plain_loops(images: torch.Tensor, keys: ScramblingKeys, steps: tuple[ScramblingStep, ...]) -> torch.Tensor:
    """What `encrypt` should give, one image, one step and one block after the other."""
    side = keys.block
    result = images.numpy().copy()
    for pixels in result:
        places = [(y, x) for y in range(0, pixels.shape[1], side) for x in range(0, pixels.shape[2], side)]
        blocks = [pixels[:, y : y + side, x : x + side].copy() for y, x in places]
        for step in steps:
            before = list(blocks)
            for at, block in enumerate(before):
                if step is ROTATE:
                    blocks[at] = np.rot90(block, int(keys.rotation[at]), axes=(1, 2))
                elif step is COMPLEMENT:
                    blocks[at] = 255 - block if keys.complement[at] else block
                elif step is FLIP:
                    blocks[at] = {0: block, 1: block[:, :, ::-1], 2: block[:, ::-1]}[int(keys.flip[at])]
                elif step is CHANNELS:
                    blocks[at] = block[keys.channels[at].tolist()]
                else:
                    blocks[at] = before[int(keys.shuffle[at])]
        for (y, x), block in zip(places, blocks, strict=True):
            pixels[:, y : y + side, x : x + side] = block
    return torch.from_numpy(result)


def test_all_steps_run_in_the_papers_order_unless_others_are_asked_for() -> None:
    assert [step.value for step in EtcParams().order(3)] == ["IR", "IA", "IF", "IC", "IS"]
    assert [step.value for step in EtcParams().order(1)] == ["IR", "IA", "IF", "IS"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, ScramblingKeys, tuple[ScramblingStep, ...]]:
    block, channels = draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 4]))
    size = (channels, block * draw(st.integers(1, 4)), block * draw(st.integers(1, 4)))
    steps = draw(st.permutations(EtcParams().order(channels)))[: draw(st.integers(0, 5))]
    seed = draw(st.integers(0, 1 << 30))
    images = random_images(draw(st.integers(1, 3)), size, seed)
    return images, draw_keys(Streams(str(seed).encode()), size, block), tuple(steps)


@settings(max_examples=150)
@given(cases())
def test_any_steps_in_any_order_are_those_of_plain_loops(
    case: tuple[torch.Tensor, ScramblingKeys, tuple[ScramblingStep, ...]],
) -> None:
    images, keys, steps = case
    scrambled = encrypt(images, keys, steps)
    assert scrambled.dtype == torch.uint8
    assert torch.equal(scrambled, in_plain_loops(images, keys, steps))


def test_keys_follow_from_the_device_alone_and_reach_every_state() -> None:
    keys, again = draw_keys(DEVICE, (3, 64, 64)), draw_keys(DEVICE, (3, 64, 64))
    for name, states in (("rotation", 4), ("complement", 2), ("flip", 3)):
        assert torch.equal(getattr(keys, name), getattr(again, name))
        assert getattr(keys, name).unique().tolist() == list(range(states))
    assert torch.equal(keys.channels, again.channels)
    assert len(keys.channels.unique(dim=0)) == 6
    assert torch.equal(keys.shuffle, again.shuffle)
    assert sorted(keys.shuffle.tolist()) == list(range(256))
    # No step's key follows from another's: each has a stream of its own.
    assert not torch.equal(keys.rotation % 2, keys.complement)


def test_a_block_that_does_not_divide_the_image_is_named() -> None:
    with pytest.raises(DefenceError, match="block = 4 does not divide images of 30x32 pixels"):
        draw_keys(DEVICE, (1, 30, 32))
    with pytest.raises(DefenceError, match="block = 0"):
        draw_keys(DEVICE, (1, 32, 32), 0)
    with pytest.raises(DefenceError, match="block = 4 does not divide images of 32x30 pixels"):
        encrypt(random_images(1, (1, 32, 30)), draw_keys(DEVICE, (1, 32, 32)))


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        ("etc", {"scrambling": "IF,IF"}, "scrambling: .*IF is listed twice, but each step can run only once"),
        ("etc", {"scrambling": "IR,IX"}, "scrambling: .*unknown step 'IX'; choose from IR, IA, IF, IC, IS"),
        ("etc", {"block": 0}, "block: .*greater than or equal to 1"),
        ("etc", {"key": "mine"}, "key: .*'device' or 'cohort'"),
        ("ats", {"policy": "1-2-3"}, r"defence_params of ats: policy: .*'3-1-7'"),
    ],
)
def test_parameters_that_can_not_be_are_named(name: str, values: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        defence_of(name, values)


@pytest.mark.parametrize("form", [GREY, COLOUR])
@pytest.mark.parametrize("steps", ["", "IS,IA", "IR"])
def test_the_layer_before_a_network_is_the_encryption_of_its_normalised_images(form: ImageForm, steps: str) -> None:
    size = form.channels, form.height, form.width
    images = random_images(3, size)
    ready = scrambling_of(draw_keys(DEVICE, size), size, EtcParams(scrambling=steps).order(form.channels))
    expected = normalise(ready.encrypt(images), form)
    assert torch.allclose(ready.layer(form)(normalise(images, form)), expected, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_etc_encrypts_every_set_of_a_device_with_the_same_keys_and_keeps_labels(channels: int) -> None:
    train = bright_images(6, 0)
    train = ImageSet(train.images.repeat(1, channels, 1, 1), train.labels, train.classes)
    etc, params = defence_of("etc", {})
    place = DefencePlace(DEVICE, silent, cohort=Streams(b"cohort"))
    made = etc.apply(train, params, place)
    assert torch.equal(made.images.labels, train.labels)
    assert made.images.classes == train.classes
    assert dict(made.facts)["steps"] == ("IR,IA,IF,IS" if channels == 1 else "IR,IA,IF,IC,IS")
    assert etc.input_layer is not None
    layer = etc.input_layer(params, place, (channels, 16, 16))
    assert torch.equal(layer.seen(train.rows([4, 1])).images, made.images.images[[4, 1]])
    assert not torch.equal(made.images.images, train.images)
    for other in (replace(place, streams=Streams(b"another device")), place):
        asked = EtcParams() if other is not place else EtcParams(key="cohort")
        assert made.images.digest() != etc.apply(train, asked, other).images.digest()


def test_devices_of_a_cohort_scramble_alike_and_one_without_its_secret_is_told_what_to_do() -> None:
    etc, params = defence_of("etc", {"key": "cohort"})
    one, two = (
        etc.apply(bright_images(6, 0), params, DefencePlace(Streams(root), silent, cohort=Streams(b"cohort"))).images
        for root in (b"a", b"b")
    )
    assert one.digest() == two.digest()
    with pytest.raises(DefenceError, match="key = cohort needs the cohort secret: run `fedcg cohort join`, or set key"):
        etc.apply(bright_images(6, 0), params, DefencePlace(DEVICE, silent))


def apply(data: ImageSet, folder: Path | None = None, **params: object) -> Defended:
    defence, checked = defence_of("ats", params)
    return defence.apply(data, checked, DefencePlace(Streams(b"device"), silent, folder))


def pictures(channels: int) -> ImageSet:
    pixels = torch.randint(256, (20, channels, 22, 22), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(20) % 2, ("a", "b"))


@pytest.mark.parametrize(
    ("name", "sign", "rows", "columns"),
    # 22 pixels: 150/331 of them are 10.0; magnitudes 2, 3 and 5 of 9 are 2.2, 3.3 and 5.5 (rounded).
    [
        ("3", 1, 0, 10),
        ("3", -1, 0, -10),
        ("7", 1, 2, 0),
        ("7", -1, -2, 0),
        ("43", 1, 3, 0),
        ("43", -1, -3, 0),
        ("21", 1, 0, 6),
    ],
)
def test_a_shift_moves_the_image_and_what_comes_in_is_black(name: str, sign: int, rows: int, columns: int) -> None:
    pixels = pictures(1).images[0, 0].numpy() // 2 + 1
    moved = np.array(TRANSFORMATIONS[name](Image.fromarray(pixels), sign))
    expected = np.roll(pixels, (-rows, -columns), (0, 1))
    for axis, by in enumerate((rows, columns)):
        lost = np.arange(22) >= 22 - by if by > 0 else np.arange(22) < -by
        expected[lost if axis == 0 else slice(None), lost if axis == 1 else slice(None)] = 0
    assert np.array_equal(moved, expected)


@pytest.mark.parametrize(
    ("name", "factor", "of"), [("1", 1 / 3, 130), ("18", 7 / 18, 130), ("13", 5 / 18, 0), ("15", 0.5, 0)]
)
def test_contrast_moves_pixels_from_or_to_the_mean_and_brightness_from_or_to_black(
    name: str, factor: float, of: int
) -> None:
    pixels = np.array([[100, 120], [140, 160]], dtype=np.uint8)
    for sign in (1, -1):
        changed = np.array(TRANSFORMATIONS[name](Image.fromarray(pixels), sign))
        assert changed == pytest.approx((of + (pixels - float(of)) * (1 + sign * factor)).clip(0, 255), abs=1.0)


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


def test_defences_are_the_files_that_assign_one() -> None:
    assert {"antigan", "ats"} <= set(defence_names())
    assert {"defence", "params", "gan_mixing", "sample_pictures"}.isdisjoint(defence_names())
    for name in defence_names():
        assert defence_of(name, {})[0].name == name


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        ("antigan", {"ve": 1}, "ve: there is no such setting.*did you mean `v_e`"),
        ("antigan", {"mu": 1.1, "v_e": -1}, "v_e: .*greater than or equal to 0.*; mu: .*less than or equal to 1"),
    ],
)
def test_a_bad_choice_is_named_with_what_there_is(name: str | None, values: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_defence(name, values, dp_sgd=False)


def test_a_defence_that_learns_from_all_images_is_refused_beside_dp_sgd() -> None:
    with pytest.raises(ValueError, match="antigan learns from all real images, which dp_sgd's epsilon does not cover"):
        check_defence("antigan", {}, dp_sgd=True)
    check_defence("ats", {}, dp_sgd=True)


def test_a_label_has_what_differs_from_the_defaults() -> None:
    assert defence_label(None, {}) == ""
    assert defence_label("antigan", {"v_e": 0.5}) == "antigan"
    assert defence_label("antigan", {"v_e": 0.3, "mu": 0.7}) == "antigan-v_e=0.3-mu=0.7"


def test_the_choice_is_checked_without_torch() -> None:
    code = (
        "import sys; from fedcg.learning.defences.defence import *; "
        "[check_defence(name, {}, dp_sgd=False) for name in defence_names()]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
