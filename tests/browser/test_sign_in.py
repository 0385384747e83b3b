"""Sign-in with an OpenID Connect provider on another site, in a real Chromium."""

from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.support.oidc import running_provider
from tests.support.page.pages import tiny_page


def test_a_person_comes_back_with_a_strict_session_and_ends_it(browser: Browser, tmp_path: Path) -> None:
    with running_provider(ann=["fleet-admins"]) as provider, tiny_page(tmp_path) as page:
        url = f"http://127.0.0.1:{page.port}"
        page.application.state.access.oidc = provider.oidc(url)
        tab = browser.new_page(base_url=url)
        tab.goto("/events?level=warning")
        tab.get_by_role("link", name="Sign in with localhost").click()
        tab.get_by_role("button", name="ann").click()
        expect(tab).to_have_url("/events?level=warning")
        assert [each["sameSite"] for each in tab.context.cookies() if each["path"] == "/"] == ["Strict"]
        tab.get_by_role("link", name="Sessions").click()
        expect(tab.get_by_role("row", name="ann this browser")).to_contain_text(provider.issuer)
        tab.get_by_role("button", name="End the session of ann").click()
        expect(tab).to_have_url("/login?to=/sessions")
        tab.close()
