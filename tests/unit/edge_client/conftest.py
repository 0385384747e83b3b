"""A coordinator's service with two devices, one of them silent, for tests of a box that connects to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.coordinator_support import World, aggregate_bytes, tiny_spec


@pytest.fixture
def service_world(tmp_path: Path) -> Iterator[World]:
    spec = tiny_spec(1)
    world = World(tmp_path / "home", spec, aggregate_bytes(spec, 0, 0, seed=1), clients=("a", "b"), min_clients=2)
    world.devices["b"].silent = True
    yield world
    world.close()
