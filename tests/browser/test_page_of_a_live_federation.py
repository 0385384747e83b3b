"""The page in a real Chromium, of a federation of real processes over a real Mosquitto."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.edge.toml_edit import set_values
from tests.support.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(600)]

DEADLINE_MS = 120_000
REPORTED = ("examples", "accuracy", "loss", "health", "shadow", "downloaded", "per_class", "model")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path, rounds=8, enrol=True, params={"epochs": 2, "server_iterations": 60}, allow_report=REPORTED)
    with made.up():
        for device in made.devices:
            made.enrol_device(device)
        set_values(made.config("site-1"), {("export", "enabled"): True})
        (made.root / "data/site-2/train/circle/damaged.png").write_bytes(b"no image")
        yield made


def opened(browser: Browser, stack: Stack) -> Page:
    """A page that is logged in through the form."""
    page = browser.new_context(base_url=f"http://127.0.0.1:{stack.api_port}").new_page()
    page.goto("/f/shapes/worth")
    expect(page).to_have_url("/login?to=/f/shapes/worth")
    page.get_by_label("Token").fill((stack.home / "api.token").read_text().strip())
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url("/f/shapes/worth")
    return page


def test_an_operator_follows_a_federation_and_steers_it_without_reloading(browser: Browser, stack: Stack) -> None:
    page = opened(browser, stack)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto("/f/shapes")
    expect(page.locator("#live")).to_contain_text("is waiting for: 3 more devices (quorum 3)")
    for device in stack.devices:
        stack.start_agent(device)
    tile = page.locator(".tile", has=page.get_by_role("heading", name="Devices"))
    expect(tile).to_contain_text("3 of 3 online", timeout=DEADLINE_MS)
    expect(page.locator("#c-site-1")).to_be_visible(timeout=DEADLINE_MS)

    page.goto("/events")
    page.get_by_label("Event").fill("update_stored")
    expect(page.locator(".events")).to_contain_text("update of site-", timeout=DEADLINE_MS)
    expect(page.locator("#live")).not_to_contain_text("devices invited")
    expect(page.get_by_label("Event")).to_have_value("update_stored")

    page.goto("/confirm/pause/shapes")
    page.get_by_label("Reason").fill("the line is cleaned")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#f-shapes")).to_contain_text("the line is cleaned", timeout=DEADLINE_MS)
    page.locator("#f-shapes").get_by_role("button", name="Resume").click()
    expect(page.locator("#f-shapes")).not_to_contain_text("the line is cleaned")

    page.goto("/f/shapes")
    expect(page.locator("#live")).to_contain_text("The federation has ended", timeout=DEADLINE_MS)
    page.goto("/f/shapes?round=2#timeline")
    for stage in ("download", "training", "upload", "merge"):  # the reports of real devices divide their time
        expect(page.locator("#timeline tbody tr").first).to_contain_text(re.compile(rf"{stage} [\d.]+ s"))
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


def test_a_lost_coordinator_is_shown_and_followed_again_when_it_is_back(browser: Browser, stack: Stack) -> None:
    page = opened(browser, stack)
    page.goto("/devices")
    stack.kill("coordinator")
    expect(page.locator("#link-state")).to_be_visible(timeout=30_000)
    stack.start_coordinator()
    expect(page.locator("#link-state")).to_be_hidden(timeout=60_000)
    stack.start_agent("site-1")
    expect(page.locator("#d-site-1")).to_contain_text("online", timeout=DEADLINE_MS)
