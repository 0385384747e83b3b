"""Sign-in with a real OpenID Connect provider: roles from groups, everything that is refused, sessions that are listed and ended."""

import json
import re
import time
from collections.abc import Iterator

import httpx
import pytest
from joserfc.jwk import RSAKey
from pydantic import ValidationError

from coordinator.config import OidcSettings
from coordinator.http import oidc as module
from coordinator.http.access import COOKIE, SESSION_S, Access, Role
from coordinator.page import add_page
from coordinator.paths import Home
from tests.support.commands import data_of, succeeds
from tests.support.coordinator.api import Api, running_api
from tests.support.oidc import Provider, running_provider

SESSIONS, AUDIT, OWN = "/api/v1/sessions", "/api/v1/audit", {"X-FedCG": "1"}


@pytest.fixture
def provider() -> Iterator[Provider]:
    with running_provider(ann=["staff", "plant", "fleet-admins"], bob="plant", eve=["staff"]) as made:
        yield made


@pytest.fixture
def api(home: Home, provider: Provider) -> Iterator[Api]:
    with running_api(home, proxy="127.0.0.1") as running, running.as_(None) as anyone:
        add_page(running.application)
        assert anyone.get("/login/oidc").status_code == 404, "it is off by default"
        assert "Sign in with" not in anyone.get("/login").text
        running.access.oidc = provider.oidc(running.url)
        yield running


def test_people_have_the_highest_role_of_their_groups_and_others_are_refused(api: Api, provider: Provider) -> None:
    with api.as_(None) as ann, api.as_(None) as bob, api.as_(None) as eve:
        assert (
            f'href="/login/oidc?to=/x%3Fq%3D1">Sign in with {api.access.oidc.host}' in ann.get("/login?to=/x?q=1").text
        )
        answer = provider.sign_in(ann, "ann", to="/devices?q=a&page=2")
        assert 'content="0;url=/devices?q=a&amp;page=2"' in answer.text
        assert re.search(rf"{COOKIE}=\w{{64}}; HttpOnly; Max-Age=43200; Path=/; SameSite=strict", str(answer.headers))
        assert 'content="0;url=/"' in provider.sign_in(bob, "bob", to="//evil.example").text
        assert "eve has no role here: [oidc] roles has none" in provider.sign_in(eve, "eve").json()["detail"]
        assert [each.get(AUDIT).status_code for each in (ann, bob, eve)] == [200, 403, 401]


WRONG = {"nonce": "0", "aud": "x", "iss": "https://x", "exp": 1, "azp": "x", "sub": "a\nb", "bad_signature": ""}


def test_what_is_not_right_is_refused(api: Api, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(status: int, why: str, answer: httpx.Response) -> None:
        assert (answer.status_code, COOKIE in ann.cookies) == (status, False)
        assert why in answer.json()["detail"]

    with api.as_(None) as ann, api.as_(None, **{"X-Forwarded-Proto": "https"}) as other:
        for name, value in WRONG.items():
            provider.claims = {name: value}
            provider.key = RSAKey.generate_key(2048) if name == "bad_signature" else None
            refused(403, name, provider.sign_in(ann, "ann"))
        refused(400, "began no sign-in", provider.sign_in(ann, "ann", wrong="state"))
        refused(502, "401 UNAUTHORIZED", provider.sign_in(ann, "ann", wrong="code_challenge"))
        begun = other.get("/login/oidc")
        cookie, _, attributes = begun.headers["set-cookie"].partition("; ")
        assert attributes == "HttpOnly; Max-Age=600; Path=/login/oidc; SameSite=lax; Secure"
        granted = httpx.post(begun.headers["location"], data={"sub": "ann"}).headers["location"]
        refused(400, "began no sign-in", ann.get(granted))  # with the cookie of another sign-in
        denied = re.sub("code=[^&]*", "error=access_denied", granted)
        refused(403, "access_denied", ann.get(denied, headers={"Cookie": cookie}))
        monkeypatch.setattr(api.access.oidc, "_clock", lambda: time.time() + 601)
        refused(400, "began no sign-in", ann.get(granted, headers={"Cookie": cookie}))
        monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 100)
        refused(502, "JSON", provider.sign_in(ann, "ann"))
        monkeypatch.undo()
        api.access.oidc = provider.oidc(api.url, issuer=f"{provider.issuer}/")
        refused(502, "of another issuer", ann.get("/login/oidc"))
        for issuer in ("http://login.example", "https://user@login.example", "https://login.example"):
            with pytest.raises(ValidationError):
                OidcSettings(issuer=issuer)


def test_a_session_survives_restarts_with_the_role_that_is_configured_now(api: Api, provider: Provider) -> None:
    with api.as_(None) as ann:
        provider.sign_in(ann, "ann")
        roles = ({"plant": "admin"}, 0, 200), ({"plant": "viewer"}, 0, 403), ({"staff": "admin"}, 0, 401)
        for given, later, status in (*roles, (None, 0, 401), ({"plant": "admin"}, SESSION_S, 401)):
            oidc = provider.oidc(api.url, roles=given) if given else None
            clock = lambda later=later: time.time() + later  # noqa: E731
            api.application.state.access = Access(api.tokens, b"", clock=clock, kept=api.home.sessions, oidc=oidc)
            assert ann.get(AUDIT).status_code == status


def test_own_sessions_are_listed_and_ended_and_all_by_an_admin_and_by_a_command(api: Api, provider: Provider) -> None:
    token = api.tokens.create("cat", Role.VIEWER)
    with api.as_(None) as ann, api.as_(None) as bob, api.as_(None) as cat:
        provider.sign_in(ann, "ann")
        provider.sign_in(bob, "bob")
        assert cat.post("/login", data={"token": token.text}).status_code == 303
        found = ann.get(SESSIONS).json()
        persons = [("cat", "viewer"), ("bob", "viewer"), ("ann", "admin")]
        assert [(each["who"]["name"], each["who"]["role"]) for each in found] == persons
        assert not any(one.cookies[COOKIE] in json.dumps(found) for one in (ann, bob, cat))
        assert bob.get(SESSIONS).json() == found[1:2]
        own, others = (f"{SESSIONS}/{each['id']}" for each in found[1::-1])
        assert [bob.delete(own).status_code, bob.delete(others, headers=OWN).status_code] == [403, 404]
        ((path, form_token),) = re.findall(r'"(/sessions/\w+/end)".*?value="(\w+)"', bob.get("/sessions").text)
        assert bob.post(path, data={"form_token": form_token}).status_code == 303
        line = json.loads(api.home.audit_file.read_text().splitlines()[-1])
        assert (line["names"], line["token"]) == ([found[1]["id"]], f"{provider.issuer}#bob")
        assert ann.delete(others, headers=OWN).json()["address"] == "127.0.0.1"
        assert [each.get(SESSIONS).status_code for each in (ann, bob, cat)] == [200, 401, 401]
        cat.post("/login", data={"token": token.text})
        at = ("--dir", api.home.root)
        (kept,) = data_of(
            succeeds("coordinator", "session", "list", *at, "--json")
        )  # without a provider: of tokens only
        assert "of cat has ended" in succeeds("coordinator", "session", "end", kept["id"], *at)
        assert "No open sessions" in succeeds("coordinator", "session", "list", *at)
