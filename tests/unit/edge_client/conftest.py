"""Worlds and enrolment listeners that end with the test: a box's agent, a coordinator's service with two devices."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.support.coordinator.enrolments import desk as desk
from tests.support.coordinator.enrolments import home as home
from tests.support.coordinator.toy_artifacts import tiny_spec
from tests.support.coordinator.world import World as ServiceWorld
from tests.support.edge.world import MakeWorld, World


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(closing(World(tmp_path, **changes)))


@pytest.fixture
def service_world(tmp_path: Path) -> Iterator[ServiceWorld]:
    """Device `b` is silent."""
    world = ServiceWorld(tmp_path / "home", tiny_spec(1))
    world.devices["b"].silent = True
    yield world
    world.close()
