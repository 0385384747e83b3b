"""Worlds, coordinators' directories and enrolment listeners that end with the test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.paths import Home
from tests.support.coordinator.enrolments import Desk, open_home, running_desk
from tests.support.coordinator.toy_artifacts import tiny_spec
from tests.support.coordinator.world import MakeWorld, World


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    """`make_world(rounds=2, **options)`: a coordinator's directory of its own, with the options of `World`."""
    worlds: list[World] = []

    def make(rounds: int = 2, **options: Any) -> World:
        worlds.append(World(tmp_path / f"home{len(worlds)}", tiny_spec(rounds), **options))
        return worlds[-1]

    yield make
    for world in worlds:
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
