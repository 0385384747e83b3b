"""A new database of either kind."""

from pathlib import Path

import pytest
from sqlalchemy import URL

from tests.support.postgres import Cluster


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Path | URL:
    if request.param == "sqlite":
        return tmp_path / "database.sqlite"
    cluster: Cluster = request.getfixturevalue("postgres")
    return cluster.make_database()
