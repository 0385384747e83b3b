"""Processes that end with the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator.paths import Home
from tests.support.broker.broker_plant import Plant


@pytest.fixture
def processes(home: Home) -> Iterator[Plant]:
    """Starts `fedcg` commands on the home, and ends them."""
    made = Plant(home.root.parent, home)
    yield made
    made.close()
