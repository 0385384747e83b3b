"""The site of the documentation in a real Chromium, from its folder: no server, and no request that leaves the machine."""

import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # `make docs` builds the site in CI too


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its address: of the folder in which it was built, with the checks of `make docs`."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder.as_uri()


@pytest.mark.parametrize(("width", "colours"), [(1280, "light"), (390, "dark")])
def test_a_reader_finds_a_page_by_search_and_sees_its_picture_without_a_network(
    site: str, browser: Browser, width: int, colours: str
) -> None:
    page = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=colours).new_page()  # type: ignore[arg-type]
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{site}/index.html")
    assert page.locator("body").get_attribute("data-md-color-scheme") == {"light": "default", "dark": "slate"}[colours]
    if width < 500:
        page.locator("label[for=__search]").first.click()
    page.locator("input[name=query]").press_sequentially("quiet hours")
    page.locator(".md-search-result__link", has_text="Power, temperature and quiet hours").first.click()
    expect(page).to_have_title("Power, temperature and quiet hours - FedCG Edge")
    page.goto(f"{site}/explanation/how-it-works.html")
    expect(page.locator("div.mermaid").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert [url for url in asked if not url.startswith(("file:", "blob:", "data:"))] == []
