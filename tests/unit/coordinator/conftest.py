"""Worlds, coordinators' directories and enrolment listeners that end with the test."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.support.coordinator.enrolments import desk as desk
from tests.support.coordinator.enrolments import home as home
from tests.support.coordinator.toy_artifacts import tiny_spec
from tests.support.coordinator.world import MakeWorld, World


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    """`make_world(rounds=2, **options)`: a coordinator's directory of its own, with the options of `World`."""
    with ExitStack() as stack:
        yield lambda rounds=2, **options: stack.enter_context(
            closing(World(tmp_path / f"home{secrets.token_hex(4)}", tiny_spec(rounds), **options))
        )
