"""What the tests of `export` share: a small federation's spec, weights that fit it, and labelled image files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from export.build import variants
from export.model.runtime import Predictor
from fedcg.imaging import Pixels
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part
from tests.support.learning.export_models import TestImages, make_parts, make_spec, write_images
from tests.support.serving import install_versions


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def spec() -> FederationSpec:
    return make_spec()


@pytest.fixture(scope="module")
def parts(spec: FederationSpec) -> Mapping[Part, Mapping[str, torch.Tensor]]:
    return make_parts(spec)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> TestImages:
    return write_images(tmp_path_factory.mktemp("images"), 24)


@pytest.fixture(scope="module")
def folder(images: TestImages) -> Path:
    """The folder of the image files' classes."""
    return images.files[0].parent.parent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets how many milliseconds a prediction of each form takes, by its name; 100 for those that are not named."""
    monkeypatch.setattr(variants, "TIMING_S", 0.02)

    def set_to(**milliseconds: float) -> None:
        def latencies(predictors: Sequence[Predictor], _images: Sequence[Pixels]) -> list[float]:
            return [milliseconds.get(one.name, 100.0) for one in predictors]

        monkeypatch.setattr(variants, "_latencies", latencies)

    return set_to


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("installed") / "models"
    install_versions(root, 2)
    return root
