"""The audit's page as Chromium shows it: light and dark, wide and narrow, without a request. `FEDCG_SCREENSHOTS=DIR` keeps pictures."""

import os
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from audit.report import render
from tests.support.audit import SUBJECT, VERDICTS, findings


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_is_readable(browser: Browser, tmp_path: Path, scheme: str, width: int) -> None:
    file = tmp_path / "report.html"
    file.write_text(render(SUBJECT, findings(), VERDICTS, "2026-11-23 10:00 UTC"))
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})  # type: ignore[arg-type]
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert page.get_by_text("1 of 3 attacks got something back from this update").is_visible()
    verdict = page.locator("#verdict").bounding_box()
    assert verdict is not None
    assert verdict["height"] < 900 or width < 1280  # one screen, where there is room for one
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    images = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert images == [64, 64, 64]
    ink, ground = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert (_lightness(ink) < _lightness(ground)) is (scheme == "light")
    if folder := os.environ.get("FEDCG_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / f"audit-{scheme}-{width}.png"), full_page=True)
    page.close()


def _lightness(colour: str) -> float:
    red, green, blue = (int(piece) for piece in colour[4:-1].split(",")[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue
