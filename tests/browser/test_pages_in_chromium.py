"""The coordinator's page and the audit's page in a real Chromium: tabs, accessibility, charts for everybody, light and dark, wide and narrow."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from audit.report import render
from coordinator.aggregation.jobs import Progressed
from coordinator.pki.authority import create_ca
from tests.support.audit import SUBJECT, VERDICTS, findings
from tests.support.broker.memory import MemoryBroker
from tests.support.coordinator.world import World, rules_of
from tests.support.page.pages import ServedPage, add_crowd, tiny_page
from tests.support.waiting import wait_until

LogIn = Callable[..., BrowserContext]
TABS = 10
DEADLINE_MS = 30_000
DARK = "rgb(16, 20, 28)"
LOADED = "performance.getEntriesByType('resource').map((each) => each.name).join(' ')"
SCRIPT_BYTES = (
    "performance.getEntriesByType('resource').filter((each) => each.name.includes('.js?'))"
    ".reduce((sum, each) => sum + each.transferSize, 0)"
)
SET_VISIBILITY = """(state) => {
  Object.defineProperty(document, "hidden", { value: state === "hidden", configurable: true });
  Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ServedPage]:
    with tiny_page(tmp_path, rounds=9, clients=("a", "b", "c")) as running:
        yield running


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[ServedPage]:
    """The page with thirty devices, three closed rounds, an open one, and the losses of a merge."""

    def prepare(world: World) -> None:
        add_crowd(world.store, "tiny", 30, 3, time.time())

    with tiny_page(tmp_path, rounds=9, clients=("a", "b", "c"), prepare=prepare) as running:
        for step, loss in ((10, 1.5), (20, 0.75), (30, 0.5)):
            running.made.world.workers[0].notify(Progressed(1, 1, 4, "distil", step, 40, loss))
        yield running


@pytest.fixture
def logged_in(browser: Browser) -> Iterator[LogIn]:
    """`logged_in(page, theme, width)`: a browser of its own with a session of an operator."""
    made: list[BrowserContext] = []

    def log_in(page: ServedPage, theme: str = "light", width: int = 1280, zone: str = "UTC") -> BrowserContext:
        context = browser.new_context(
            timezone_id=zone,
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


SCREENS = ("", "/worth", "/models", "/sent", "/sent/line-0003", "/audits", "/policy")
MORE_SCREENS = (
    "/",
    "/search?q=line-000",
    "/confirm/devices?action=label&device=line-0003",
    "/devices?columns=note&columns=hardware",
    "/devices",
    "/devices/line-0003",
    "/federations",
    "/federations/new",
    "/enrolment",
    "/repairs",
    "/sessions",
    "/events",
    "/confirm/stop/tiny",
    "/confirm/set/tiny",
    "/f/tiny?round=2&phase=declined",
    "/notifications",
    "/login",
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
  for (const each of document.querySelectorAll("[placeholder]")) check("text", each, getComputedStyle(each, "::placeholder").color, ground(each), 4.5);
  for (const each of document.querySelectorAll("input:not([type=checkbox], [type=hidden]), select, textarea, button:not(.quiet), .button, progress, .bar, .timeline"))
    if (each.checkVisibility()) check("graphics", each, getComputedStyle(each).borderTopColor, ground(each.parentElement), 3);
  for (const each of document.querySelectorAll(".dot:not(.unknown), .grid i")) check("graphics", each, getComputedStyle(each).backgroundColor, ground(each.parentElement), 3);
  for (const each of document.querySelectorAll("svg rect.on, svg rect.off, svg rect.done, svg rect.mark")) {
    const under = getComputedStyle(each.parentElement.querySelector(".unknown, .rest")).fill;
    check("graphics", each, getComputedStyle(each).fill, channels(under), 3);
  }
  for (const each of document.querySelectorAll(".gantt rect")) check("graphics", each, getComputedStyle(each).fill, ground(each.parentElement), 3);
  for (const each of document.querySelectorAll("svg polyline")) check("graphics", each, getComputedStyle(each).stroke, ground(each), 3);
  return [found, looked];
}"""
PIXELS_OFF = """(dot) => {
  const range = document.createRange();
  range.selectNode(dot.nextSibling);
  return range.getBoundingClientRect().left - dot.getBoundingClientRect().right;
}"""


@pytest.mark.slow
@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 390)])
def test_axe_finds_nothing_serious_and_graphics_have_a_contrast_of_three(
    crowd: ServedPage, logged_in: LogIn, theme: str, width: int
) -> None:
    tab, faint, looked = logged_in(crowd, theme, width).new_page(), {}, Counter[str]()
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    scripts, axe = 0, Axe()
    for path in (*(f"/f/tiny{part}" for part in SCREENS), *MORE_SCREENS):
        tab.goto(path)
        accessible = axe.run(tab).response
        assert accessible["passes"], path
        serious = [one for one in accessible["violations"] if one["impact"] in ("serious", "critical")]
        assert [(one["id"], one["nodes"][0]["html"]) for one in serious] == [], path
        found, numbers = tab.evaluate(FAINT)
        looked.update(numbers)
        if found:
            faint[path] = found
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
        assert (tab.evaluate("getComputedStyle(document.body).backgroundColor") == DARK) == (theme == "dark")
        for plot in tab.locator(".plot").all():
            expect(plot.locator("> *").first).to_be_visible()
        assert ("uplot" in tab.evaluate(LOADED)) == (tab.locator(".u-wrap").count() > 0), path
        for at in tab.locator("time[data-at]").all():  # with its zone, on one line
            looked["moments"] += 1
            assert re.search(r"UTC|GMT", at.text_content() or "")
            assert at.evaluate("(at) => at.getClientRects().length") <= 1
        scripts += tab.evaluate(SCRIPT_BYTES)
    assert (faint, errors) == ({}, [])
    assert 10_000 < scripts < 70_000  # all screens together: each file crosses the network once
    assert looked["graphics"] > 50
    assert looked["moments"] > 0


def test_an_operator_repairs_and_steers_by_mouse_or_by_keyboard_and_comes_back(
    page: ServedPage, logged_in: LogIn
) -> None:
    tab, operations = logged_in(page, "dark", 390).new_page(), page.made.operations
    operations.change_policy("tiny", {"min_cohort": 1, "min_clients": 2})
    operations.disable("c", "moved")
    page.made.devices["tiny"][0].start()
    tab.goto("/repairs")
    enable = tab.get_by_role("list", name="what the coordinator can do about tiny").get_by_role("link", name="Enable c")
    enable.click(timeout=DEADLINE_MS)
    expect(tab.get_by_role("heading", name="Enable: c?")).to_be_visible()
    expect(tab.locator("main")).to_contain_text("It is invited to rounds again.")
    tab.get_by_role("button", name="Enable").click()
    expect(tab).to_have_url("/repairs")
    expect(enable).to_have_count(0)
    tab.get_by_role("link", name="Change policy: min_clients = 1").focus()
    tab.keyboard.press("Enter")
    expect(tab.get_by_label("Min clients")).to_have_value("1")
    tab.get_by_label("Min clients").press("Enter")
    expect(tab.locator("#history")).to_contain_text("Min clients")
    tab.goto("/repairs")
    expect(tab.locator("#live")).not_to_contain_text("too few devices", timeout=DEADLINE_MS)
    tab.goto("/f/tiny")
    expect(tab.locator(".policy")).to_contain_text("at least 1 client")
    tab.get_by_role("link", name="Pause").click()
    tab.get_by_label("Reason").fill("the line is cleaned")
    tab.get_by_role("button", name="Pause").click()
    expect(tab).to_have_url("/f/tiny")
    expect(tab.locator("#live .notice")).to_contain_text("the line is cleaned")
    expect(tab.get_by_role("link", name="Resume")).to_be_visible()


def test_a_chart_has_a_name_and_a_table_and_a_status_stands_by_its_dot(crowd: ServedPage, logged_in: LogIn) -> None:
    tab = logged_in(crowd, width=390).new_page()
    tab.goto("/f/tiny/worth")
    chart = tab.get_by_role("figure", name="Mean accuracy of the clients by round")
    expect(chart.get_by_role("img", name="Mean accuracy of the clients by round")).to_be_visible()
    figures = chart.locator("details")
    figures.get_by_text("figures").click()
    expect(figures.get_by_role("columnheader")).to_have_text(["round", "personal", "local-only"])
    expect(figures.get_by_role("rowheader")).to_have_text(["1", "2", "3"])
    expect(figures.get_by_role("row").nth(1)).to_contain_text("64.1 %")
    tab.evaluate("htmx.trigger(live(), 'refresh')")
    tab.wait_for_load_state("networkidle")
    expect(figures.get_by_role("rowheader").first, "a refresh leaves it open").to_be_visible()
    for kind, begin in (("CSV", b"round,personal,local-only\n1,0.68"), ("PNG", b"\x89PNG")):
        with tab.expect_download() as saved:
            chart.get_by_role("button", name=kind).click()
        assert saved.value.suggested_filename == f"Mean accuracy of the clients by round.{kind.lower()}"
        assert Path(saved.value.path()).read_bytes().startswith(begin)
    tab.route("**/f/tiny/worth*", lambda route: route.abort())  # a refresh ends hovering
    chart.locator(".u-over").hover()
    expect(chart.locator(".u-legend")).to_contain_text("personal70.1 %")
    tab.unroute("**/f/tiny/worth*")
    tab.goto("/f/tiny")
    distances = [dot.evaluate(PIXELS_OFF) for dot in tab.locator("#live table .dot").all()]
    assert len(distances) == 30
    assert max(distances) < 12
    assert tab.locator("th:not([scope])").count() == 0


def test_what_a_person_typed_stays_while_data_change(page: ServedPage, logged_in: LogIn) -> None:
    tab = logged_in(page).new_page()
    tab.goto("/devices")
    search = tab.get_by_role("searchbox", name="Search", exact=True)
    search.press_sequentially("b")
    rows = tab.locator("tbody tr")
    expect(rows).to_have_count(1)
    expect(tab).to_have_url("/devices?q=b")
    expect(rows).to_contain_text("offline")
    page.made.devices["tiny"][1].start()
    expect(rows).to_contain_text("online", timeout=DEADLINE_MS)
    expect(search).to_have_value("b")
    expect(search).to_be_focused()
    expect(rows).to_have_count(1)


def test_the_slash_key_searches_and_all_devices_shown_are_selected_at_once_by_keyboard(
    crowd: ServedPage, logged_in: LogIn
) -> None:
    tab = logged_in(crowd).new_page()
    tab.goto("/")
    expect(tab.get_by_role("img", name="tiny: mean accuracy by round")).to_be_visible()
    tab.keyboard.press("/")
    box = tab.get_by_role("searchbox", name="Search devices, federations and models")
    expect(box).to_be_focused()
    tab.keyboard.type("line-0003/")
    expect(box).to_have_value("line-0003/")
    tab.keyboard.press("Backspace")
    tab.keyboard.press("Enter")
    tab.get_by_role("link", name="line-0003", exact=True).click()
    expect(tab).to_have_url("/devices/line-0003")
    tab.goto("/devices?q=line-000")
    tab.get_by_label("select all devices shown").press("Space")
    tab.evaluate("htmx.trigger(live(), 'refresh')")
    tab.wait_for_load_state("networkidle")
    tab.locator("select[name=action]").select_option("enable")
    tab.get_by_role("button", name="Continue…").press("Enter")
    expect(tab.get_by_role("heading", name="Enable: 10 devices?")).to_be_visible()


def test_keys_lead_to_the_screens_unless_a_person_types_or_has_switched_them_off(
    page: ServedPage, logged_in: LogIn
) -> None:
    tab = logged_in(page).new_page()
    tab.goto("/devices")
    keys = tab.get_by_role("dialog", name="Keyboard shortcuts")
    box = tab.get_by_role("searchbox", name="Search", exact=True)
    box.press_sequentially("?ge")
    expect(keys).to_have_count(0)
    box.blur()
    for first, second, path in (("g", "r", "/repairs"), ("g", "e", "/events"), ("g", "h", "/"), ("g", "d", "/devices")):
        tab.keyboard.press(first)
        tab.keyboard.press(second)
        expect(tab).to_have_url(path)
        tab.wait_for_load_state()
    tab.keyboard.press("Control+g")
    tab.keyboard.press("r")
    tab.keyboard.press("?")
    expect(keys).to_contain_text("Repairs")
    keys.get_by_role("checkbox").uncheck()
    tab.keyboard.press("Escape")
    expect(keys).to_have_count(0)
    for key in "gr?":
        tab.keyboard.press(key)
    expect(keys).to_have_count(0)
    expect(tab).to_have_url("/devices")
    tab.get_by_role("button", name="Keyboard shortcuts").click()
    expect(keys.get_by_role("checkbox")).not_to_be_checked()  # to switch them on again


def test_a_time_is_asked_in_the_zone_of_the_browser_and_sent_in_utc(page: ServedPage, logged_in: LogIn) -> None:
    tab = logged_in(page, zone="Europe/Berlin").new_page()
    tab.goto("/events")
    tab.get_by_label("From (Europe/Berlin)").fill("2026-06-01T02:00")
    expect(tab).to_have_url(re.compile(r"from=2026-06-01T00%3A00%3A00\.000Z"))
    tab.reload()
    expect(tab.get_by_label("From (Europe/Berlin)")).to_have_value("2026-06-01T02:00")
    expect(tab.locator("#live")).to_contain_text("times in the zone Europe/Berlin")


def test_a_page_is_printed_light_without_navigation_and_with_its_figures(page: ServedPage, logged_in: LogIn) -> None:
    tab = logged_in(page, "dark").new_page()
    tab.goto("/f/tiny/policy")
    tab.emulate_media(media="print")
    for hidden in (tab.get_by_role("navigation"), tab.get_by_role("button", name="Save")):
        expect(hidden).to_have_count(0)
    expect(tab.get_by_label("Deadline (seconds)")).to_be_visible()
    assert tab.evaluate("getComputedStyle(document.querySelector('main .card')).breakInside") == "avoid"
    assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(24, 32, 46)"


def test_the_theme_switch_wins_over_the_system_and_is_remembered(page: ServedPage, logged_in: LogIn) -> None:
    tab = logged_in(page).new_page()
    tab.goto("/")
    tab.get_by_role("button", name="Switch between light and dark").click()
    tab.goto("/devices")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == DARK


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
    assert page.get_by_text("1 of 3 attacks beat the best guess on this update").is_visible()
    verdict = page.locator("#verdict").bounding_box()
    assert verdict is not None
    assert verdict["height"] < 900 or width < 1280  # one screen, where there is room for one
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate("[...document.images].map(image => image.naturalWidth)") == [64, 64, 64]
    ink, ground = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert (_lightness(ink) < _lightness(ground)) is (scheme == "light")
    page.close()


def _lightness(colour: str) -> float:
    red, green, blue = (int(piece) for piece in colour[4:-1].split(",")[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue


def test_a_federation_is_duplicated_changed_created_and_started_by_mouse_alone(
    page: ServedPage, logged_in: LogIn
) -> None:
    tab, store = logged_in(page, "dark", 390).new_page(), page.made.world.store
    page.application.state.home.make_folders()
    create_ca(page.application.state.home.pki)
    page.made.world.key.save(page.application.state.home.signing_key)
    tab.goto("/f/tiny")
    tab.get_by_role("link", name="Duplicate").click()
    expect(tab.get_by_label("Name", exact=True)).to_have_value("tiny-2")
    plan, network = tab.get_by_role("textbox", name="Plan"), tab.get_by_role("row").filter(has_text="cnn_bn")
    tab.get_by_label("Do 5 or more devices share a cohort secret?").select_option("yes")
    expect(plan).to_have_value(re.compile('method = "fedseal"'), timeout=DEADLINE_MS)
    tab.get_by_label("Method", exact=True).select_option("fedcg")
    expect(plan).to_have_value(re.compile('method = "fedcg"'), timeout=DEADLINE_MS)
    expect(network).to_contain_text("needs images of at least 16x16", timeout=DEADLINE_MS)
    network.get_by_role("radio").check()
    tab.get_by_label("start immediately").uncheck()
    tab.get_by_role("button", name="Create").click()
    expect(tab.locator("[id='h-network.split']")).to_contain_text("cnn_bn needs images of", timeout=DEADLINE_MS)
    for side in ("Height", "Width"):
        tab.get_by_label(side).evaluate("(each) => each.stepUp(24)")  # as its arrow does
    tab.get_by_label("start immediately").click()
    expect(plan).to_have_value(re.compile(r"height = 32\nwidth = 32"), timeout=DEADLINE_MS)
    expect(network).to_contain_text("kB", timeout=DEADLINE_MS)
    tab.get_by_label("start immediately").uncheck()
    tab.get_by_role("button", name="Create").click()
    expect(tab).to_have_url("/f/tiny-2", timeout=DEADLINE_MS)
    assert store.federation("tiny-2").status.value == "created"
    spec = page.made.coordinator.spec(store.federation("tiny-2"))
    assert spec.network.split == "cnn_bn"
    page.made._specs["tiny-2"], page.made._brokers["tiny-2"] = spec, MemoryBroker(rules_of("tiny-2"))
    tab.get_by_role("link", name="Start").click()
    tab.get_by_role("button", name="Start").click()
    expect(tab.get_by_role("link", name="Pause")).to_be_visible(timeout=DEADLINE_MS)
    assert store.federation("tiny-2").status.value == "running"
