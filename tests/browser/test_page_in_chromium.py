"""The page of a coordinator in this process, in a real Chromium: tabs, contrast, charts for everybody, forms that keep their input.

`FEDCG_SCREENSHOTS=DIR` keeps pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from coordinator.config import RoundSettings
from tests.support.coordinator.federations import Federations
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.coordinator.world import World
from tests.support.page.pages import ServedPage, served
from tests.support.waiting import wait_until

LogIn = Callable[..., BrowserContext]
TABS = 10
DEADLINE_MS = 30_000
SET_VISIBILITY = """(state) => {
  Object.defineProperty(document, "hidden", { value: state === "hidden", configurable: true });
  Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ServedPage]:
    spec = tiny_spec()
    pacing = RoundSettings(gather_s=60.0, retry_s=0.0)
    base, clients = aggregate_bytes(spec, 0, 0, seed=1), ("a", "b", "c")
    world = World(tmp_path / "home", spec, base, clients=clients, min_clients=2, pacing=pacing)
    with served(Federations(world)) as running:
        yield running
    world.store.close()


@pytest.fixture
def logged_in(browser: Browser, page: ServedPage) -> Iterator[LogIn]:
    """`logged_in(theme, width)`: a browser of its own with a session of an operator."""
    made: list[BrowserContext] = []

    def log_in(theme: str = "light", width: int = 1280) -> BrowserContext:
        context = browser.new_context(
            color_scheme="dark" if theme == "dark" else "light",
            viewport={"width": width, "height": 844},
            base_url=f"http://127.0.0.1:{page.port}",
        )
        made.append(context)
        name, _, value = page.reader().cookie.partition("=")
        context.add_cookies([{"name": name, "value": value, "domain": "127.0.0.1", "path": "/"}])
        return context

    yield log_in
    for context in made:
        context.close()


def without_idle_refresh(route: Route) -> None:
    """The page's script, which then refreshes after events alone and not every 15 s."""
    answer = route.fetch()
    text = answer.text()
    assert "IDLE_MS = 15000" in text
    route.fulfill(response=answer, body=text.replace("IDLE_MS = 15000", "IDLE_MS = 1e9"))


def shows_online(tab: Page, devices: int) -> None:
    expect(tab.locator("#live")).to_contain_text(f"{devices} of 3 online", timeout=DEADLINE_MS)


@pytest.mark.slow
def test_ten_tabs_load_and_every_visible_one_is_live(page: ServedPage, logged_in: LogIn) -> None:
    def watchers() -> int:
        found: int = page.application.state.events.watchers
        return found

    context = logged_in()
    context.route("**/page.js*", without_idle_refresh)
    tabs = [context.new_page() for _ in range(TABS)]
    for tab in tabs:
        tab.goto("/f/tiny")
    first, second, third = page.made.devices["tiny"]
    first.start()
    for tab in tabs:
        shows_online(tab, 1)
    assert watchers() == 1, "one stream for all tabs of a browser"
    tabs.pop(0).close()  # it had the stream; another one takes it over
    second.start()
    for tab in tabs:
        shows_online(tab, 2)
    for tab in tabs:
        tab.evaluate(SET_VISIBILITY, "hidden")
    wait_until(lambda: watchers() == 0, "no tab that a person sees, and no stream")
    tabs[4].evaluate(SET_VISIBILITY, "visible")
    wait_until(lambda: watchers() == 1, "the tab that is seen again follows the events")
    third.start()
    shows_online(tabs[4], 3)
