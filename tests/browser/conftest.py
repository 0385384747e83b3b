"""A Chromium for tests of the page; they are skipped visibly where there is none."""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A running Chromium without a window. Its driver keeps an event loop in this thread: it must end with the module."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        why = f"none of {', '.join(NAMES)} on PATH; `apt-get install chromium-headless-shell`"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
    with sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield made
        made.close()
