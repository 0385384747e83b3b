"""Worlds and enrolment listeners that end with the test: a box's agent, a coordinator's service with two devices."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.paths import Home
from tests.support.coordinator.enrolments import Desk, open_home, running_desk
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.coordinator.world import World as ServiceWorld
from tests.support.edge.world import MakeWorld, World


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def make(**changes: object) -> World:
        worlds.append(World(tmp_path, **changes))  # type: ignore[arg-type]
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def service_world(tmp_path: Path) -> Iterator[ServiceWorld]:
    """Device `b` is silent."""
    spec, home = tiny_spec(1), tmp_path / "home"
    world = ServiceWorld(home, spec, aggregate_bytes(spec, 0, 0, seed=1), clients=("a", "b"), min_clients=2)
    world.devices["b"].silent = True
    yield world
    world.close()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A coordinator's directory with a federation and a port for enrolments."""
    return open_home(tmp_path / "home")


@pytest.fixture
def desk(home: Home) -> Iterator[Desk]:
    """Its running enrolment listener."""
    with running_desk(home) as running:
        yield running
