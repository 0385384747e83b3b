"""A home with two devices and ports of its own, and processes on it that end with the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.paths import Home
from tests.support.broker.broker_plant import Plant
from tests.support.coordinator.homes import make_home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path, ["a", "b"])


@pytest.fixture
def processes(home: Home) -> Iterator[Plant]:
    """Starts `fedcg` commands on the home, and ends them."""
    made = Plant(home.root.parent, home)
    yield made
    made.close()
