"""The page in a real Chromium, of a federation of real processes over a real Mosquitto.

`FEDCG_SCREENSHOTS=DIR` keeps a picture of every screen, in both themes, wide and at 390 pixels.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.edge.toml_edit import set_values
from tests.support.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(600)]

SCREENS = {
    "now": "/f/shapes",
    "worth": "/f/shapes/worth",
    "models": "/f/shapes/models",
    "sent": "/f/shapes/sent",
    "federations": "/federations",
    "plan": "/federations/new",
    "devices": "/devices",
    "device": "/devices/site-1",
    "enrolment": "/enrolment",
    "repairs": "/repairs",
    "events": "/events",
    "stop": "/confirm/stop/shapes",
}
LOOKS = (("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390))
DEADLINE_MS = 120_000
EPOCHS = 5000
"""Of a training that is still going on when a person looks."""
REPORTED = ("examples", "accuracy", "loss", "health", "shadow", "downloaded", "per_class", "model")
LOADED = "performance.getEntriesByType('resource').map((each) => each.name).join(' ')"
SCRIPT_BYTES = (
    "performance.getEntriesByType('resource').filter((each) => each.name.includes('.js?'))"
    ".reduce((sum, each) => sum + each.transferSize, 0)"
)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path, rounds=8, enrol=True, params={"epochs": 2, "server_iterations": 60}, allow_report=REPORTED)
    with made.up():
        for device in made.devices:
            made.enrol_device(device)
        set_values(made.config("site-1"), {("export", "enabled"): True})
        (made.root / "data/site-2/train/circle/damaged.png").write_bytes(b"no image")
        yield made


def opened(browser: Browser, stack: Stack, theme: str = "light", width: int = 1280) -> Page:
    """A page that is logged in through the form."""
    context = browser.new_context(
        color_scheme="dark" if theme == "dark" else "light",
        viewport={"width": width, "height": 844},
        base_url=f"http://127.0.0.1:{stack.api_port}",
    )
    page = context.new_page()
    page.goto("/f/shapes/worth")
    expect(page).to_have_url("/login?to=/f/shapes/worth")
    page.get_by_label("Token").fill((stack.home / "api.token").read_text().strip())
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url("/f/shapes/worth")
    return page


def errors_of(page: Page) -> list[str]:
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    return found


def script_bytes(page: Page) -> int:
    """Bytes of scripts that a page loaded over the network; the library of charts only where there is one."""
    for plot in page.locator(".plot").all():
        expect(plot.locator("> *").first).to_be_visible()
    assert ("uplot" in page.evaluate(LOADED)) == (page.locator(".u-wrap").count() > 0)
    loaded: int = page.evaluate(SCRIPT_BYTES)
    return loaded


def test_an_operator_follows_a_federation_and_steers_it_without_reloading(browser: Browser, stack: Stack) -> None:
    page = opened(browser, stack)
    errors = errors_of(page)
    page.goto("/f/shapes")
    expect(page.locator("#live")).to_contain_text("It waits for: 3 more devices (quorum 3)")
    for device in stack.devices:
        stack.start_agent(device)
    tile = page.locator(".tile", has=page.get_by_role("heading", name="Devices"))
    expect(tile).to_contain_text("3 of 3 online", timeout=DEADLINE_MS)
    expect(page.locator("#c-site-1")).to_be_visible(timeout=DEADLINE_MS)

    page.goto("/events")
    page.get_by_label("Event").fill("update_stored")
    expect(page.locator(".events")).to_contain_text("the update of site-", timeout=DEADLINE_MS)
    expect(page.locator("#live")).not_to_contain_text("devices invited")
    expect(page.get_by_label("Event")).to_have_value("update_stored")

    page.goto("/confirm/pause/shapes")
    page.get_by_label("Reason").fill("the line is cleaned")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#f-shapes")).to_contain_text("the line is cleaned", timeout=DEADLINE_MS)
    page.locator("#f-shapes").get_by_role("button", name="Resume").click()
    expect(page.locator("#f-shapes")).not_to_contain_text("the line is cleaned")

    page.goto("/f/shapes")
    expect(page.locator("#live")).to_contain_text("The federation is over", timeout=DEADLINE_MS)
    page.goto("/f/shapes/worth")
    row = page.locator("#w-site-1 td")
    for column in (2, 3, 4):  # alone, personal and downloaded are reported
        expect(row.nth(column)).to_contain_text("%")
    expect(page.locator(".classes tbody tr")).to_contain_text(["circle", "cross", "stripe"])
    expect(page.locator(".u-wrap")).to_be_visible()
    stack.wait_finished()
    page.goto("/f/shapes/models")
    forms = page.locator("#m-site-1 td").last
    for form in ("fp32", "fp16", "int8"):
        expect(forms).to_contain_text(form)
    expect(forms).to_contain_text("ms")
    page.goto("/devices/site-2")
    expect(page.locator("#doctor")).to_contain_text("can't be decoded")
    assert "damaged.png" not in page.content()
    assert errors == []


def test_the_training_of_agents_is_shown_with_its_predicted_end(browser: Browser, tmp_path: Path) -> None:
    stack = Stack(tmp_path, rounds=1, params={"epochs": EPOCHS})
    with stack.up():
        page = opened(browser, stack)
        page.goto("/f/shapes")
        for device in stack.devices:
            settings = {
                ("broker", "keepalive_s"): 5,
                ("policy", "max_epochs"): EPOCHS,
            }  # progress comes with heartbeats
            set_values(stack.config(device), settings)
            stack.start_agent(device)
        row = page.locator("#c-site-1")
        expect(row).to_contain_text("%, ends about in", timeout=DEADLINE_MS)
        expect(row).to_contain_text("training")
        expect(row.locator("progress")).to_be_visible()
        share = float(row.locator("progress").get_attribute("value") or "0")
        assert 0.0 < share < 1.0


def test_a_federation_is_created_from_a_plan_and_runs_beside_the_other_one(browser: Browser, stack: Stack) -> None:
    page = opened(browser, stack)
    page.goto("/federations/new")
    plan = page.get_by_label("Plan")
    text = plan.input_value()
    plan.fill(text.replace("rounds = 20", "rounds = 0"))
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("alert")).to_contain_text("rounds")
    plan.fill(text)
    page.get_by_role("button", name="Create").click()
    expect(page).to_have_url("/f/casting", timeout=60_000)
    expect(page.locator("#live")).to_contain_text("waiting")
    page.goto("/federations")
    expect(page.locator("#f-casting")).to_contain_text("Round 1 of 20")
    expect(page.locator("#f-shapes")).to_be_visible()


def test_a_token_is_made_shown_once_seen_used_and_another_one_deleted(browser: Browser, stack: Stack) -> None:
    page = opened(browser, stack)
    page.goto("/enrolment")
    page.get_by_label("Device id").fill("line-9")
    page.get_by_role("button", name="Make a token").click()
    secret = page.locator("#token").inner_text()
    assert secret.startswith("fcg")
    expect(page.locator(".made time[data-until]")).to_contain_text("in 2")
    row = page.locator("tr", has_text="line-9")
    expect(row).to_contain_text("open")
    stack.command(
        "enrol", "--token", secret, "--out", str(stack.root / "line-9"), "--data", str(stack.root / "data/site-1")
    )
    expect(page.locator("tr", has_text="used by line-9")).to_be_visible(timeout=30_000)
    page.goto("/enrolment")
    assert secret not in page.content()
    page.get_by_label("Device id").fill("line-10")
    page.get_by_role("button", name="Make a token").click()
    page.locator("tr", has_text="line-10").get_by_role("button", name="Delete").click()
    expect(page.locator("tr", has_text="line-10")).to_contain_text("revoked")


def test_what_a_person_typed_stays_while_data_change(browser: Browser, stack: Stack) -> None:
    page = opened(browser, stack)
    page.goto("/devices")
    search = page.get_by_role("searchbox")
    search.press_sequentially("site-2")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page).to_have_url("/devices?q=site-2&state=&sort=device")
    expect(page.locator("tbody tr")).to_contain_text("offline")
    stack.start_agent("site-2")
    expect(page.locator("tbody tr")).to_contain_text("online", timeout=DEADLINE_MS)
    expect(search).to_have_value("site-2")
    expect(search).to_be_focused()
    expect(page.locator("tbody tr")).to_have_count(1)


def test_a_lost_coordinator_is_shown_and_followed_again_when_it_is_back(browser: Browser, stack: Stack) -> None:
    page = opened(browser, stack)
    page.goto("/devices")
    stack.kill("coordinator")
    expect(page.locator("#link-state")).to_be_visible(timeout=30_000)
    stack.start_coordinator()
    expect(page.locator("#link-state")).to_be_hidden(timeout=60_000)
    stack.start_agent("site-1")
    expect(page.locator("#d-site-1")).to_contain_text("online", timeout=DEADLINE_MS)


def test_every_screen_fits_in_both_themes_and_on_a_phone(browser: Browser, stack: Stack) -> None:
    for device in stack.devices:
        stack.start_agent(device)
    stack.wait_event(
        "coordinator", lambda event: event["event"] == "aggregate_stored" and event["round"] == 2, "round 2"
    )
    for theme, width in LOOKS:
        page = opened(browser, stack, theme, width)
        errors, scripts = errors_of(page), script_bytes(page)
        for name, path in SCREENS.items():
            page.goto(path)
            scripts += script_bytes(page)
            page.wait_for_function("window.htmx !== undefined")
            wider = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            assert wider <= 0, f"{path} is {wider} pixels too wide at {width}"
            dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 28)"
            assert dark == (theme == "dark")
            _keep(page, f"{name}-{theme}-{width}")
        assert errors == []
        assert 10_000 < scripts < 70_000  # all screens together: each file crosses the network once
        page.context.close()


def test_the_theme_switch_wins_over_the_system_and_is_remembered(browser: Browser, stack: Stack) -> None:
    page = opened(browser, stack)
    page.get_by_role("button", name="Light or dark").click()
    page.goto("/devices")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 28)"


def _keep(page: Page, name: str) -> None:
    folder = os.environ.get("FEDCG_SCREENSHOTS")
    if folder:
        page.wait_for_timeout(300)
        page.screenshot(path=Path(folder) / f"{name}.png")
