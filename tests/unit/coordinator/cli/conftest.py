"""A home with two devices and ports of its own, and processes on it that end with the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.cli.opening import create_home
from coordinator.config import ApiSettings, BrokerSettings, CoordinatorConfig, EnrolmentSettings
from coordinator.paths import Home
from tests.support.broker.broker_plant import Plant
from tests.support.coordinator.homes import add_federation
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.waiting import free_port


@pytest.fixture
def home(tmp_path: Path) -> Home:
    config = CoordinatorConfig(
        broker=BrokerSettings(port=free_port()),
        api=ApiSettings(port=free_port()),
        enrolment=EnrolmentSettings(port=free_port()),
    )
    made = create_home(tmp_path / "home", config)
    add_federation(made, FEDERATION, ["a", "b"])
    return made


@pytest.fixture
def processes(home: Home) -> Iterator[Plant]:
    """Starts `fedcg` commands on the home, and ends them."""
    made = Plant(home.root.parent, home)
    yield made
    made.close()
