"""Public images on the coordinator: what is read, what is refused, and a FedDF federation that distils on them."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from coordinator.aggregation.worker import public_images
from coordinator.errors import PlanError
from coordinator.operations.create_federation import make_artifacts, read_plan
from fedcg.learning.data.public_images import read_public, spread
from fedcg.learning.errors import DataError
from fedcg.learning.spec import ImageForm
from fedcg.wire.artifacts.artifacts import unpack
from tests.support.coordinator.toy_artifacts import shared_layouts
from tests.unit.coordinator.aggregation.test_aggregation import founded, plan_file, real_world, run_to_the_end

GREY = ImageForm(mode="L", height=28, width=28, mean=(0.5,), std=(0.5,))


def write_public(folder: Path, count: int) -> Path:
    """Flat grey squares, image number k of brightness 10 k, in two folders and of two sizes."""
    for number in range(count):
        place = folder / ("deep/er" if number % 2 else ".")
        place.mkdir(parents=True, exist_ok=True)
        side = 28 if number < 2 else 40
        Image.new("L", (side, side), 10 * number).save(place / f"{number:03d}.png")
    return folder


def brightness(images: object) -> list[int]:
    return [int(image.float().mean()) for image in images]  # type: ignore[attr-defined]


def test_images_anywhere_below_a_folder_are_read_in_the_specs_form_and_broken_ones_are_told(tmp_path: Path) -> None:
    folder = write_public(tmp_path / "public", 4)
    (folder / "zz.png").write_bytes(b"no image")
    (folder / ".hidden.png").write_bytes(b"hidden")
    (folder / "notes.txt").write_text("not an image")
    read = read_public(folder, GREY, 100)
    assert read.images.shape == (4, 1, 28, 28)
    assert brightness(read.images) == [0, 20, 10, 30]  # in the order of their paths
    assert read.found == 5
    assert [skipped.file for skipped in read.skipped] == [str(folder / "zz.png")]
    assert brightness(read_public(folder, GREY, 2).images) == [0, 10]


def test_of_more_images_than_wanted_evenly_spread_ones_are_taken() -> None:
    assert spread(3, 5) == [0, 1, 2]
    assert spread(10, 4) == [0, 2, 5, 7]


def test_labels_of_array_files_are_not_looked_at(tmp_path: Path) -> None:
    pixels = np.stack([np.full((28, 28), 10 * number, np.uint8) for number in range(3)])
    np.savez(tmp_path / "bare.npz", images=pixels)
    np.savez(tmp_path / "labelled.npz", train_images=pixels[..., None], train_labels=np.array([7, 700, 70000]))
    for name in ("bare.npz", "labelled.npz"):
        assert brightness(read_public(tmp_path / name, GREY, 9).images) == [0, 10, 20]


def test_what_can_not_be_read_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "a.png").write_bytes(b"no image")
    (tmp_path / "fake.npz").write_bytes(b"no zip")
    np.savez(tmp_path / "other.npz", pixels=np.zeros((1, 2, 2), np.uint8))
    np.savez(tmp_path / "floats.npz", images=np.zeros((1, 2, 2)))
    np.savez(tmp_path / "flat.npz", images=np.zeros(4, np.uint8))
    for name, said in (
        ("nowhere", "not a folder of public images"),
        ("empty", "no public images"),
        ("broken", "none of 1 public images"),
        ("fake.npz", "not an .npz"),
        ("other.npz", "needs one of the arrays `images`"),
        ("floats.npz", "must be uint8"),
        ("flat.npz", "must be"),
    ):
        with pytest.raises(DataError, match=said) as refused:
            read_public(tmp_path / name, GREY, 9)
        assert name in str(refused.value)


def test_too_many_large_images_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    np.savez(tmp_path / "many.npz", images=np.zeros((2100, 2, 2), np.uint8))
    large = GREY.model_copy(update={"height": 1024, "width": 1024})
    with pytest.raises(DataError, match="use at most 2048"):
        read_public(tmp_path / "many.npz", large, 9999)


def test_the_coordinator_reads_them_once_and_only_when_its_configuration_names_some(tmp_path: Path) -> None:
    assert public_images(None, 9)(GREY) is None
    folder = write_public(tmp_path / "public", 3)
    images = public_images(folder, 9)
    first = images(GREY)
    (folder / "000.png").unlink()
    assert first is images(GREY)
    with pytest.raises(DataError, match="not a folder of public images"):
        public_images(tmp_path / "nowhere", 9)(GREY)


def test_a_method_that_needs_public_images_is_refused_without_them(tmp_path: Path) -> None:
    plan = read_plan(plan_file(tmp_path, "feddf", params=""))
    with pytest.raises(PlanError, match=r"aggregation\.public_data in coordinator\.toml"):
        make_artifacts(plan, tmp_path / "artifacts")


@pytest.mark.slow
def test_a_feddf_federation_distils_on_the_coordinators_public_images(tmp_path: Path) -> None:
    params = "server_iterations = 3\nserver_batch = 4"
    public = write_public(tmp_path / "public", 6)
    made = founded(tmp_path, "feddf", 1, params, public=public)
    world = real_world(tmp_path / "home", *made, public_data=public)
    merged = unpack(world.artifacts.get(run_to_the_end(world)), shared_layouts(world.spec))
    assert {part.value for part in merged.parts} == {"extractor", "classifier"}
    phases = {event["phase"] for event in world.events("phase_started")}
    assert phases == {"teacher", "distil"}, json.dumps(world.events())
