"""The page of a coordinator in this process, in a real Chromium: tabs, contrast, charts for everybody, forms that keep their input.

`FEDCG_SCREENSHOTS=DIR` keeps pictures.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from coordinator.aggregation.jobs import Progressed
from coordinator.config import RoundSettings
from tests.support.coordinator.federations import Federations
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.coordinator.world import World
from tests.support.page.crowds import add_crowd
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


def made_in(folder: Path) -> World:
    spec = tiny_spec(9)
    pacing = RoundSettings(gather_s=60.0, retry_s=0.0)
    base, clients = aggregate_bytes(spec, 0, 0, seed=1), ("a", "b", "c")
    return World(folder / "home", spec, base, clients=clients, min_clients=2, pacing=pacing)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ServedPage]:
    world = made_in(tmp_path)
    with served(Federations(world)) as running:
        yield running
    world.store.close()


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[ServedPage]:
    """The page with thirty devices, three closed rounds, an open one, and the losses of a merge."""
    world = made_in(tmp_path)
    add_crowd(world.store, "tiny", 30, 3, time.time())
    with served(Federations(world)) as running:
        for step, loss in ((10, 1.5), (20, 0.75), (30, 0.5)):
            world.workers[0].notify(Progressed(4, 1, 1, "distil", step, 40, loss))
        yield running
    world.store.close()


@pytest.fixture
def logged_in(browser: Browser) -> Iterator[LogIn]:
    """`logged_in(page, theme, width)`: a browser of its own with a session of an operator."""
    made: list[BrowserContext] = []

    def log_in(page: ServedPage, theme: str = "light", width: int = 1280) -> BrowserContext:
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
        found: int = sum(page.application.state.events.watchers.values())
        return found

    context = logged_in(page)
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


SCREENS = ("", "/worth", "/models", "/sent")
MORE_SCREENS = (
    "/devices",
    "/devices/line-0003",
    "/federations",
    "/federations/new",
    "/enrolment",
    "/repairs",
    "/events",
    "/confirm/stop/tiny",
    "/no/such/page",
)
FAINT = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const ratio = (one, other) => { const [low, high] = [light(one), light(other)].sort((a, b) => a - b); return (high + 0.05) / (low + 0.05); };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const rgb = channels(getComputedStyle(at).backgroundColor);
      if (rgb.length === 3 || rgb[3] === 1) return rgb;
    }
    throw new Error("no ground");
  };
  const found = [], looked = { text: 0, graphics: 0 };
  const check = (kind, element, colour, under, least) => {
    looked[kind] += 1;
    const is = ratio(channels(colour), under);
    if (is < least) found.push(`${kind} ${element.tagName}.${element.className.baseVal ?? element.className} ${element.textContent.trim().slice(0, 30)}: ${is.toFixed(2)}`);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (walker.currentNode.textContent.trim() && element.checkVisibility() && !element.closest("script, svg"))
      check("text", element, getComputedStyle(element).color, ground(element), 4.5);
  }
  for (const each of document.querySelectorAll("[placeholder]")) check("text", each, getComputedStyle(each, "::placeholder").color, ground(each), 4.5);
  for (const each of document.querySelectorAll("input:not([type=checkbox], [type=hidden]), select, textarea, button:not(.quiet), .button, progress, .bar, .timeline"))
    if (each.checkVisibility()) check("graphics", each, getComputedStyle(each).borderTopColor, ground(each.parentElement), 3);
  for (const each of document.querySelectorAll(".dot:not(.unknown), .grid i")) check("graphics", each, getComputedStyle(each).backgroundColor, ground(each.parentElement), 3);
  for (const each of document.querySelectorAll("svg rect.on, svg rect.off, svg rect.done, svg rect.mark")) {
    const under = getComputedStyle(each.parentElement.querySelector(".unknown, .rest")).fill;
    check("graphics", each, getComputedStyle(each).fill, channels(under), 3);
  }
  for (const each of document.querySelectorAll("svg polyline")) check("graphics", each, getComputedStyle(each).stroke, ground(each), 3);
  return [found, looked];
}"""
PIXELS_OFF = """(dot) => {
  const range = document.createRange();
  range.selectNode(dot.nextSibling);
  return range.getBoundingClientRect().left - dot.getBoundingClientRect().right;
}"""


@pytest.mark.slow
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_text_has_a_contrast_of_four_and_a_half_and_graphics_of_three(
    crowd: ServedPage, logged_in: LogIn, theme: str, width: int
) -> None:
    tab, faint, looked = logged_in(crowd, theme, width).new_page(), {}, Counter[str]()
    for path in (*(f"/f/tiny{part}" for part in SCREENS), *MORE_SCREENS):
        tab.goto(path)
        found, numbers = tab.evaluate(FAINT)
        looked.update(numbers)
        if found:
            faint[path] = found
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
        keep(tab, f"{path.strip('/').replace('/', '-')}-{theme}-{width}")
    assert faint == {}
    assert looked["text"] > 500
    assert looked["graphics"] > 50


def test_a_chart_has_a_name_and_a_table_and_a_status_stands_by_its_dot(crowd: ServedPage, logged_in: LogIn) -> None:
    tab = logged_in(crowd, width=390).new_page()
    tab.goto("/f/tiny/worth")
    chart = tab.get_by_role("figure", name="Mean accuracy of the clients by round")
    expect(chart.get_by_role("img", name="Mean accuracy of the clients by round")).to_be_visible()
    figures = chart.locator("details")
    figures.get_by_text("figures").click()
    expect(figures.get_by_role("columnheader")).to_have_text(["round", "personal", "alone"])
    expect(figures.get_by_role("rowheader")).to_have_text(["1", "2", "3"])
    expect(figures.get_by_role("row").nth(1)).to_contain_text("64.1 %")
    tab.evaluate("htmx.trigger(live(), 'refresh')")
    tab.wait_for_load_state("networkidle")
    expect(figures.get_by_role("rowheader").first, "a refresh leaves it open").to_be_visible()
    tab.goto("/f/tiny")
    distances = [dot.evaluate(PIXELS_OFF) for dot in tab.locator("#live table .dot").all()]
    assert len(distances) == 30
    assert max(distances) < 12
    assert tab.locator("th:not([scope])").count() == 0


def keep(tab: Page, name: str) -> None:
    folder = os.environ.get("FEDCG_SCREENSHOTS")
    if folder:
        tab.wait_for_timeout(300)
        tab.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
