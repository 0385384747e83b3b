"""Who may use the HTTP interface: tokens, roles, sessions of the page, limits, and other machines; over real connections."""

import ssl
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from coordinator.cli.opening import create_home
from coordinator.config import ApiSettings, BrokerSettings, CoordinatorConfig, render_config
from coordinator.http.access import COOKIE, MAX_SESSIONS, SESSION_S, Access, Role
from coordinator.http.refusals import PER_ADDRESS, FailureLimits
from coordinator.members.api_tokens import DAYS, LOCAL_NAME, ApiTokens, local_token
from coordinator.page import add_page
from coordinator.paths import Home
from coordinator.pki.authority import issue
from coordinator.token_buckets import MAX_KEYS, Rate
from fedcg.files import replace_durably
from tests.support.broker.broker_plant import Plant
from tests.support.commands import data_of, run_fedcg
from tests.support.coordinator.api import Api, identity, running_api
from tests.support.coordinator.homes import add_federation
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.waiting import free_port, wait_until

FEDERATIONS = "/api/v1/federations"


@pytest.fixture
def api(home: Home) -> Iterator[Api]:
    with running_api(home) as running:
        yield running


def test_health_needs_no_token_and_everything_else_a_valid_one(api: Api) -> None:
    with api.as_(None) as nobody, api.as_(Role.VIEWER) as viewer:
        assert nobody.get("/healthz").status_code == nobody.head("/healthz").status_code == 200
        refused = nobody.get(FEDERATIONS)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json()["instance"] == FEDERATIONS
        for path in ("/api/v1/events/stream", "/openapi.json", "/metrics"):
            assert nobody.get(path).status_code == 401
        assert FEDERATIONS in viewer.get("/openapi.json").json()["paths"]
        assert viewer.get(FEDERATIONS).status_code == 200
        wrong = viewer.headers["authorization"][:-1] + "x"
        assert viewer.get(FEDERATIONS, headers={"Authorization": wrong}).status_code == 401


def test_a_token_is_kept_as_a_salted_hash_and_ends_with_its_days_or_when_it_is_revoked(api: Api) -> None:
    now = 1000.0
    tokens = ApiTokens(api.store.api, lambda: now)
    made, other = tokens.create("ann", Role.OPERATOR, days=1), tokens.create("ann", Role.OPERATOR)
    assert made.text.rpartition("_")[2] not in api.home.database.read_bytes().decode("latin-1")
    assert made.record.secret_hash.partition("$")[0] != other.record.secret_hash.partition("$")[0]
    assert tokens.check(made.text) is not None
    now += 86_401
    assert tokens.check(made.text) is None
    assert tokens.check(other.text) is not None
    tokens.revoke(other.record.id)
    assert tokens.check(other.text) is None


def test_the_local_token_is_private_stays_and_is_replaced_when_it_is_no_longer_valid(home: Home, api: Api) -> None:
    first = local_token(home, api.tokens)
    assert stat.S_IMODE(home.api_token.stat().st_mode) == 0o600
    assert local_token(home, api.tokens) == first
    home.api_token.unlink()
    second = local_token(home, api.tokens)
    assert api.tokens.check(first) is None
    identity = api.tokens.check(second)
    assert identity is not None
    assert identity.role is Role.ADMIN


def test_refused_tokens_of_an_address_are_limited_and_a_valid_one_still_works(api: Api) -> None:
    with api.as_(None, Authorization="Bearer fcga_wrong") as stranger, api.as_(Role.VIEWER) as viewer:
        codes = [stranger.get(FEDERATIONS).status_code for _ in range(PER_ADDRESS.burst + 3)]
        assert codes[: PER_ADDRESS.burst] == [401] * PER_ADDRESS.burst
        assert codes[-1] == 429
        assert viewer.get(FEDERATIONS).status_code == 200


@pytest.mark.parametrize("change", ["", "x", ".x.y"])
def test_a_session_is_refused_when_a_byte_of_it_was_changed(api: Api, change: str) -> None:
    made = api.tokens.create("ann", Role.VIEWER)
    value = api.access.open_session(identity(made))
    with api.as_(None) as browser:
        browser.cookies.set(COOKIE, f"{value}{change}")
        assert browser.get(FEDERATIONS).status_code == (401 if change else 200)
        api.tokens.revoke(made.record.id)
        assert browser.get(FEDERATIONS).status_code == 401


def test_a_session_ends_with_its_time_and_the_oldest_of_a_token_with_too_many(home: Home, api: Api) -> None:
    now = 1000.0
    api.application.state.access = access = Access(api.tokens, home.secret(), clock=lambda: now)
    made, other = api.tokens.create("ann", Role.VIEWER), api.tokens.create("bob", Role.VIEWER)
    opened = [access.open_session(identity(made)) for _ in range(MAX_SESSIONS + 1)]
    bob = access.open_session(identity(other))
    with api.as_(None) as browser:

        def answer(session: str) -> int:
            return browser.get(FEDERATIONS, headers={"Cookie": f"{COOKIE}={session}"}).status_code

        assert [answer(session) for session in (*opened[:2], opened[-1], bob)] == [401, 200, 200, 200]
        now += SESSION_S
        assert answer(bob) == 401


def test_a_session_outlives_a_restart_and_one_that_was_ended_does_not_come_back(home: Home, api: Api) -> None:
    add_page(api.application)
    made = api.tokens.create("ann", Role.VIEWER)
    with api.as_(None) as browser, api.as_(None) as other:

        def restart() -> None:
            api.application.state.access = Access(api.tokens, home.secret(), kept=home.sessions)

        for each in (browser, other):
            assert each.post("/login", data={"token": made.text}).status_code == 303
        restart()
        assert [each.get(FEDERATIONS).status_code for each in (browser, other)] == [200, 200]
        cookies = {one.cookies[COOKIE] for one in (browser, other)}
        assert len(cookies) == 2
        assert not any(cookie in home.sessions.read_text() for cookie in cookies), "it holds digests alone"
        cookie = browser.cookies[COOKIE]
        assert browser.post("/logout", headers={"X-FedCG": "1"}).status_code == 303
        restart()
        assert browser.get(FEDERATIONS, headers={"Cookie": f"{COOKIE}={cookie}"}).status_code == 401
        assert other.get(FEDERATIONS).status_code == 200
        home.sessions.write_bytes(b"[[")
        restart()
        assert other.get(FEDERATIONS).status_code == 401


def test_a_token_expires_unless_it_is_that_of_the_commands_on_this_machine(home: Home, api: Api) -> None:
    with api.as_(Role.ADMIN) as admin:
        made = admin.post("/api/v1/api-tokens", json={"name": "ann", "role": "viewer"}).json()
        assert made["expires_at"] - made["created_at"] == pytest.approx(DAYS * 86_400)
        assert admin.post("/api/v1/api-tokens", json={"name": "x", "role": "viewer", "days": None}).status_code == 422
    local_token(home, api.tokens)
    assert [token.name for token in api.tokens.list() if token.expires_at is None] == [LOCAL_NAME]


def test_refusals_of_an_address_and_of_all_together_are_refilled_and_success_costs_nothing() -> None:
    now = 100.0
    limits = FailureLimits(lambda: now, Rate(2, 0.1), Rate(5, 0.5))
    assert [limits.wait_s("10.0.0.1") for _ in range(1000)] == [0.0] * 1000
    for address in ("10.0.0.1", "10.0.0.1", "2001:db8::1", "2001:db8::2"):  # of one IPv6 network of 64 bits
        assert limits.wait_s(address) == 0
        limits.refused(address)
    waits = [limits.wait_s(address) for address in ("10.0.0.1", "2001:db8::ffff", "10.0.0.2", "2001:db8:0:1::1")]
    assert waits == [pytest.approx(10.0), pytest.approx(10.0), 0, 0]
    limits.refused("10.0.0.3")
    assert limits.wait_s("10.9.9.9") == pytest.approx(2.0)  # a refusal of anybody
    now += 10.0
    assert limits.wait_s("10.0.0.1") == limits.wait_s("10.9.9.9") == 0


def test_memory_is_bounded_however_many_addresses_come() -> None:
    limits = FailureLimits(lambda: 100.0, Rate(1, 0.1), Rate(10**6, 1.0))
    addresses = [f"10.{number >> 16}.{(number >> 8) & 255}.{number & 255}" for number in range(MAX_KEYS + 100)]
    for address in addresses:
        limits.refused(address)
    assert sum(limits.wait_s(address) > 0 for address in addresses) == MAX_KEYS


def test_the_address_that_a_proxy_names_is_audited_and_one_that_a_stranger_names_is_not(home: Home) -> None:
    named = {"X-Forwarded-For": "203.0.113.9, 198.51.100.7", "X-Forwarded-Proto": "https"}
    for proxy, audited in (("127.0.0.1", "198.51.100.7"), ("10.0.0.2", "127.0.0.1")):
        with running_api(home, proxy=proxy) as api, api.as_(Role.OPERATOR, **named) as operator:
            assert operator.post("/api/v1/federations/casting/pause").status_code == 200
        assert f'"address": "{audited}"' in home.audit_file.read_text().splitlines()[-1]


def test_with_a_certificate_the_interface_speaks_https_only_and_commands_follow(tmp_path: Path) -> None:
    broker, api = BrokerSettings(port=free_port()), ApiSettings(port=free_port())
    encrypted = create_home(tmp_path / "home", CoordinatorConfig(broker=broker, api=api))
    add_federation(encrypted, FEDERATION, ["a"])
    own = issue(encrypted.pki, "api", server=True, sans=("127.0.0.1",))
    api = ApiSettings(port=api.port, certificate=str(own.certificate), key=str(own.key))
    replace_durably(encrypted.config_file, render_config(CoordinatorConfig(broker=broker, api=api)))
    with closing(Plant(tmp_path, encrypted)) as processes:
        process = processes.fedcg("coordinator", "coordinator", "run")
        wait_until(lambda: "https://" in processes.log("coordinator") or process.poll() is not None, "it listens")
        shown = run_fedcg("federation", "show", "--dir", encrypted.root, "--json")
        assert data_of(shown.stdout)["epoch"], processes.log("coordinator")
        trusted = ssl.create_default_context(cafile=str(encrypted.pki / "ca.pem"))
        assert httpx.get(f"{api.url}/healthz", verify=trusted, trust_env=False).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{api.url}/healthz".replace("https", "http"), trust_env=False)
