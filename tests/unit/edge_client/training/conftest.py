"""Real training runs on one thread; `site` is a device of the default method."""

from pathlib import Path

import pytest
import torch

from tests.support.edge.training_site import Site, real_spec


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, real_spec())
