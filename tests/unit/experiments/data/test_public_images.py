"""Public images of demo and simulation: held out of everybody's, the same in both, and asked for before anything runs."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from experiments.data.client_datasets import build_cohort
from experiments.data.deal import DealOptions, Partition
from experiments.data.open import open_source
from experiments.data.partition_folders import prepare
from experiments.errors import SourceError
from experiments.settings import DEMO_PUBLIC_IMAGES
from experiments.simulation.batch import RunSetting
from experiments.simulation.party_builder import party_of
from fedcg.learning.data.public_images import read_public
from fedcg.learning.registry import get_method
from fedcg.learning.spec import ImageForm
from tests.support.learning.learning_cases import quick_spec

FORM = ImageForm(mode="L", height=8, width=8, mean=(0.5,), std=(0.5,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of 120 flat images; no two are alike, and files of both classes have the same names."""
    for label, name in enumerate(("a", "b")):
        for number in range(120):
            path = tmp_path / "images" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), (2 * number + label) % 256).save(path)
    return tmp_path / "images"


def test_a_demo_writes_the_public_images_that_a_simulation_of_the_same_seed_holds_out(
    folder: Path, tmp_path: Path
) -> None:
    source, partition = open_source(str(folder)), Partition.parse("iid")
    options = DealOptions(2, partition, 3, public_images=12)
    prepare(source, tmp_path / "out", options)
    cohort = build_cohort(source, FORM, options)
    assert cohort.public is not None
    assert len(cohort.public) == 12
    assert torch.equal(read_public(tmp_path / "out" / "public", FORM, 100).images, cohort.public)
    assert {path.name[:6] for path in (tmp_path / "out" / "public").iterdir()} == {f"{row:06d}" for row in range(12)}
    own = torch.cat([part.images for data in cohort.clients.values() for part in (data.train, data.val, data.test)])
    seen = {int(image[0, 0, 0]) for image in own}
    assert seen.isdisjoint(int(image[0, 0, 0]) for image in cohort.public)


def test_a_simulation_without_public_images_is_refused_when_its_method_needs_some(folder: Path) -> None:
    cohort = build_cohort(open_source(str(folder)), FORM, DealOptions(2, Partition.parse("iid"), 3))
    with pytest.raises(SourceError, match="--public-images"):
        party_of(RunSetting(method="feddf"), quick_spec("feddf"), cohort)
    assert party_of(RunSetting(method="fedavg"), quick_spec("fedavg"), cohort).public is None


def test_a_demo_holds_images_out_for_exactly_the_methods_that_need_some() -> None:
    assert all(get_method(name).needs.public for name in DEMO_PUBLIC_IMAGES)
    assert get_method("feddf").name in DEMO_PUBLIC_IMAGES
