"""Crops and mirrors of training images: what is drawn, from which stream, and what becomes of the pixels."""

import pytest
import torch

from fedcg.learning.data.image_folder import normalise
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks import build_part
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec, ImageForm
from fedcg.learning.training.batches import (
    Augmentation,
    Augmenter,
    FeatureSource,
    extract_features,
    image_tensors,
    index_blocks,
)
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import bright_images, plan, quick_spec

STREAMS = Streams(b"x")


def one_by_one(images: torch.Tensor, augmentation: Augmentation) -> torch.Tensor:
    """What `apply` should give, pixel by pixel in plain Python."""
    crop = augmentation.spec.augment_crop
    result = torch.zeros_like(images)
    height, width = images.shape[2:]
    for number, (top, left, mirrored) in enumerate(augmentation.choices.tolist()):
        for y in range(height):
            for x in range(width):
                from_y, from_x = y + top - crop, (width - 1 - x if mirrored else x) + left - crop
                if 0 <= from_y < height and 0 <= from_x < width:
                    result[number, :, y, x] = images[number, :, from_y, from_x]
    return result


def test_only_the_chosen_images_are_mirrored_left_to_right() -> None:
    images = torch.arange(8).view(2, 1, 2, 2)
    choices = torch.tensor([[0, 0, 1], [0, 0, 0]])
    flipped = Augmentation(quick_spec("local", augment_flip=True), choices).apply(images)
    assert flipped.tolist() == [[[[1, 0], [3, 2]]], [[[4, 5], [6, 7]]]]


def test_a_window_reaches_into_black_padding_and_is_mirrored_after_it_is_cut_out() -> None:
    spec = quick_spec("local", augment_flip=True, augment_crop=1)
    images = torch.arange(1, 5, dtype=torch.uint8).view(1, 1, 2, 2).repeat(3, 1, 1, 1)
    # 1 2 and 3 4 with a black frame; (1, 1) is the image itself, (0, 2) lies one up and one to the right: 0 0 and 2 0.
    cropped = Augmentation(spec, torch.tensor([[1, 1, 0], [0, 2, 0], [0, 2, 1]])).apply(images)
    assert cropped.dtype == torch.uint8
    assert cropped.squeeze(1).tolist() == [[[1, 2], [3, 4]], [[0, 0], [2, 0]], [[0, 0], [0, 2]]]


@pytest.mark.parametrize("flip", [False, True])
def test_a_block_of_images_is_augmented_as_one_image_after_the_other(*, flip: bool) -> None:
    wide = ImageForm(mode="RGB", height=16, width=20, mean=(0.5,) * 3, std=(0.25,) * 3)
    asked = {"augment_flip": flip, "augment_crop": 3}
    spec = complete_spec(plan("local", image=wide).model_copy(update=asked))
    images = torch.randint(0, 256, (12, 3, 16, 20), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    augmentation = Augmenter(spec, STREAMS).draw(12)
    done = augmentation.apply(images)
    assert torch.equal(done, one_by_one(images, augmentation))
    assert not torch.equal(done, images)
    assert torch.equal(augmentation[slice(4, 9)].apply(images[4:9]), done[4:9])


def test_every_window_is_as_likely_as_any_other() -> None:
    choices = Augmenter(quick_spec("local", augment_crop=2), STREAMS).draw(10_000).choices
    for offsets in choices[:, :2].unbind(1):  # 2,000 of each, with a standard deviation of 40
        counts = torch.bincount(offsets)
        assert len(counts) == 5
        assert float((counts - 2000).abs().max()) < 200
    assert len(choices[:, :2].unique(dim=0)) == 25
    assert not choices[:, 2].any()


def test_crops_and_mirrors_do_not_shift_each_others_draws() -> None:
    def drawn(*, flip: bool, crop: int) -> torch.Tensor:
        augmenter = Augmenter(quick_spec("local", augment_flip=flip, augment_crop=crop), STREAMS)
        return torch.cat([augmenter.draw(rows).choices for rows in (24, 16)])

    both = drawn(flip=True, crop=2)
    assert torch.equal(both[:, :2], drawn(flip=False, crop=2)[:, :2])
    assert torch.equal(both[:, 2], drawn(flip=True, crop=0)[:, 2])
    assert torch.equal(both, drawn(flip=True, crop=2))


@pytest.mark.parametrize("flip", [False, True])
def test_without_crops_blocks_are_made_of_the_streams_of_order_and_flips_alone(*, flip: bool) -> None:
    data, spec = bright_images(40, 1), quick_spec("local", augment_flip=flip)
    order, mirror = STREAMS.generator("order"), STREAMS.generator("flip")
    blocks = image_blocks(data, spec, 12)
    for (prepared, _), index in zip(blocks, index_blocks(40, 8, 12, order), strict=True):
        images = data.images[index]
        if flip:
            chosen = torch.rand(len(index), generator=mirror) < 0.5
            images = torch.where(chosen.view(-1, 1, 1, 1), images.flip(-1), images)
        assert torch.equal(prepared, normalise(images, spec.image))


def image_blocks(data: ImageSet, spec: FederationSpec, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Blocks of prepared images and labels of so many batches of 8."""
    order, of_images = STREAMS.generator("order"), image_tensors(data, spec, Augmenter(spec, STREAMS))
    return [of_images(index) for index in index_blocks(len(data), 8, steps, order)]


def expected_rows(spec: FederationSpec, index: torch.Tensor) -> torch.Tensor:
    return one_by_one(bright_images(40, 1).images[index], Augmenter(spec, STREAMS).draw(len(index)))


def test_blocks_of_cropped_images_show_the_same_images_in_the_same_order() -> None:
    data, spec = bright_images(40, 1), quick_spec("local", augment_flip=True, augment_crop=2)
    ((cropped, labels),), ((_, others),) = (
        image_blocks(data, one, 5) for one in (spec, quick_spec("local", augment_flip=True))
    )
    assert torch.equal(labels, others)
    (index,) = index_blocks(40, 8, 5, STREAMS.generator("order"))
    assert torch.equal(cropped, normalise(expected_rows(spec, index), spec.image))


def test_features_of_crops_are_computed_as_they_are_drawn_however_many_are_asked_for() -> None:
    data, spec = bright_images(40, 1), quick_spec("fedmd_cg", augment_flip=True, augment_crop=2)
    extractor = build_part(spec, Part.EXTRACTOR, torch.Generator().manual_seed(3))
    index = torch.tensor([5, 0, 5, 31])
    expected = extract_features(extractor, expected_rows(spec, index), spec)
    for draws in (4, 1000, None):
        features, labels = FeatureSource(extractor, data, spec, draws).rows(index, Augmenter(spec, STREAMS))
        torch.testing.assert_close(features, expected)
        assert labels.tolist() == data.labels[index].tolist()
