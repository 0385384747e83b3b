"""Two versions of a model, made once for all tests of serving; a test that changes them takes a copy."""

from pathlib import Path

import pytest

from tests.support.serving import install_versions


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("installed") / "models"
    install_versions(root, 2)
    return root
