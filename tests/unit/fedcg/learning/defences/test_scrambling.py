"""Block scrambling: each step by hand, any order against plain loops, the inverse for every key, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcg.image_form import ImageForm
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.defences.defence import DefencePlace, defence_of
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
ROTATE, COMPLEMENT, FLIP, CHANNELS, SHUFFLE = ScramblingStep


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def keys_that_do_nothing(block: int, count: int, channels: int = 1) -> ScramblingKeys:
    zeros = torch.zeros(count, dtype=torch.int64)
    return ScramblingKeys(block, zeros, zeros, zeros, torch.arange(channels).repeat(count, 1), torch.arange(count))


def image(*channels: list[list[int]]) -> torch.Tensor:
    return torch.tensor([list(channels)], dtype=torch.uint8)


def random_images(count: int, size: tuple[int, int, int], seed: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, *size), generator=stream, dtype=torch.uint8)


def scrambling(images: torch.Tensor, keys: ScramblingKeys, steps: Sequence[ScramblingStep] | None = None) -> Scrambling:
    channels, height, width = images.shape[1:]
    return scrambling_of(keys, (channels, height, width), EtcParams().order(channels) if steps is None else steps)


def encrypt(images: torch.Tensor, keys: ScramblingKeys, steps: Sequence[ScramblingStep] | None = None) -> torch.Tensor:
    return scrambling(images, keys, steps).encrypt(images)


def decrypt(images: torch.Tensor, keys: ScramblingKeys, steps: Sequence[ScramblingStep] | None = None) -> torch.Tensor:
    return scrambling(images, keys, steps).decrypt(images)


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


@pytest.mark.parametrize(
    ("turns", "expected"),
    [(0, [[1, 2], [3, 4]]), (1, [[2, 4], [1, 3]]), (2, [[4, 3], [2, 1]]), (3, [[3, 1], [4, 2]])],
)
def test_ir_turns_a_block_by_quarters(turns: int, expected: list[list[int]]) -> None:
    keys = replace(keys_that_do_nothing(2, 1), rotation=numbers(turns))
    assert encrypt(image([[1, 2], [3, 4]]), keys, [ROTATE]).tolist() == [[expected]]


@pytest.mark.parametrize(("flip", "expected"), [(0, [[1, 2], [3, 4]]), (1, [[2, 1], [4, 3]]), (2, [[3, 4], [1, 2]])])
def test_if_mirrors_a_block_left_to_right_or_top_to_bottom(flip: int, expected: list[list[int]]) -> None:
    keys = replace(keys_that_do_nothing(2, 1), flip=numbers(flip))
    assert encrypt(image([[1, 2], [3, 4]]), keys, [FLIP]).tolist() == [[expected]]


def test_ia_takes_every_pixel_of_a_block_with_the_bit_from_255() -> None:
    # Two blocks side by side, the second with the bit, in all three channels: 255 - 0, 255 - 255, 255 - 1, 255 - 128.
    row = [[7, 8, 0, 255], [9, 10, 1, 128]]
    keys = replace(keys_that_do_nothing(2, 2, 3), complement=numbers(0, 1))
    changed = [[7, 8, 255, 0], [9, 10, 254, 127]]
    assert encrypt(image(row, row, row), keys, [COMPLEMENT]).tolist() == [[changed] * 3]


def test_ic_takes_each_channel_of_a_block_from_the_one_that_its_key_names() -> None:
    # Two blocks of one pixel: the first keeps its channels, the second has blue, red, green.
    keys = replace(keys_that_do_nothing(1, 2, 3), channels=torch.tensor([[0, 1, 2], [2, 0, 1]]))
    assert encrypt(image([[1, 10]], [[2, 20]], [[3, 30]]), keys, [CHANNELS]).tolist() == [
        [[[1, 30]], [[2, 10]], [[3, 20]]]
    ]


def test_is_takes_each_block_from_the_place_that_its_key_names() -> None:
    keys = replace(keys_that_do_nothing(1, 4), shuffle=numbers(2, 0, 3, 1))
    assert encrypt(image([[10, 11], [12, 13]]), keys, [SHUFFLE]).tolist() == [[[[12, 10], [13, 11]]]]


def test_a_key_entry_belongs_to_the_block_that_is_at_its_place_when_the_step_runs() -> None:
    keys = replace(keys_that_do_nothing(1, 2), shuffle=numbers(1, 0), complement=numbers(1, 0))
    # IA first: 10 becomes 245 and is then moved to the right. IS first: 11 is at the left when it is complemented.
    assert encrypt(image([[10, 11]]), keys, [COMPLEMENT, SHUFFLE]).tolist() == [[[[11, 245]]]]
    assert encrypt(image([[10, 11]]), keys, [SHUFFLE, COMPLEMENT]).tolist() == [[[[244, 10]]]]


def test_all_steps_run_in_the_papers_order_unless_others_are_asked_for() -> None:
    assert [step.value for step in EtcParams().order(3)] == ["IR", "IA", "IF", "IC", "IS"]
    assert [step.value for step in EtcParams().order(1)] == ["IR", "IA", "IF", "IS"]
    for channels in (1, 3):
        images = random_images(2, (channels, 8, 8))
        keys = draw_keys(DEVICE, (channels, 8, 8))
        assert torch.equal(encrypt(images, keys), in_plain_loops(images, keys, EtcParams().order(channels)))


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
def test_any_steps_in_any_order_are_undone_by_the_same_key(
    case: tuple[torch.Tensor, ScramblingKeys, tuple[ScramblingStep, ...]],
) -> None:
    images, keys, steps = case
    scrambled = encrypt(images, keys, steps)
    assert scrambled.dtype == torch.uint8
    assert torch.equal(scrambled, in_plain_loops(images, keys, steps))
    assert torch.equal(decrypt(scrambled, keys, steps), images)


def test_another_key_does_not_decrypt() -> None:
    images, size = random_images(4, (3, 32, 32)), (3, 32, 32)
    keys = draw_keys(DEVICE, size)
    for name in ("rotation", "complement", "flip", "channels", "shuffle"):
        other = replace(keys, **{name: getattr(draw_keys(Streams(b"another device"), size), name)})
        assert not torch.equal(decrypt(encrypt(images, keys), other), images), name


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


def test_grey_images_have_no_channels_to_permute() -> None:
    with pytest.raises(DefenceError, match="scrambling: IC permutes the channels of colour images"):
        encrypt(random_images(1, (1, 8, 8)), draw_keys(DEVICE, (1, 8, 8)), tuple(ScramblingStep))


def test_keys_of_another_length_are_named() -> None:
    images, keys = random_images(1, (3, 8, 8)), draw_keys(DEVICE, (3, 8, 8))
    for name in ("rotation", "complement", "flip", "shuffle"):
        five: Any = torch.zeros(5, dtype=torch.int64)
        wrong = replace(keys, **{name: five})
        for run in (encrypt, decrypt):
            with pytest.raises(DefenceError, match=rf"the key {name} has the shape \(5,\), and images of 3x8x8"):
                run(images, wrong)
    with pytest.raises(DefenceError, match=r"the key channels has the shape \(4, 1\).* need \(4, 3\): draw keys"):
        encrypt(images, draw_keys(DEVICE, (1, 8, 8)))


def test_images_of_another_type_or_size_are_refused() -> None:
    ready = scrambling(random_images(1, (1, 8, 8)), draw_keys(DEVICE, (1, 8, 8)))
    for wrong in (random_images(1, (1, 8, 8)).float(), random_images(1, (1, 8, 12)), random_images(1, (1, 8, 8))[0]):
        for run in (ready.encrypt, ready.decrypt):
            with pytest.raises(DefenceError, match=r"are \[N, 1, 8, 8\] uint8, not \["):
                run(wrong)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"scrambling": "IF,IF"}, "scrambling: .*IF is there twice, and each step can run once"),
        ({"scrambling": "IR,IX"}, "scrambling: .*no step 'IX'; there are IR, IA, IF, IC, IS"),
        ({"block": 0}, "block: .*greater than or equal to 1"),
        ({"key": "mine"}, "key: .*'device' or 'cohort'"),
    ],
)
def test_parameters_that_can_not_be_are_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        defence_of("etc", values)


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
    assert torch.equal(layer.decrypt(made.images.images), train.images)
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
    with pytest.raises(DefenceError, match="key = cohort needs the cohort secret: `fedcg cohort join`, or set key"):
        etc.apply(bright_images(6, 0), params, DefencePlace(DEVICE, silent))
