"""The HTTP interface for other machines: with its own certificate, or behind a reverse proxy."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from coordinator.cli.opening import create_home
from coordinator.config import ApiSettings, BrokerSettings, CoordinatorConfig, render_config
from coordinator.http.access import Role
from coordinator.paths import Home
from coordinator.pki.authority import issue
from fedcg.files import replace_durably
from tests.support.broker.broker_plant import Plant
from tests.support.commands import data_of, run_fedcg
from tests.support.coordinator.api import Api, running_api
from tests.support.coordinator.homes import add_federation
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.waiting import free_port, wait_until


@contextmanager
def behind(home: Home, proxy: str) -> Iterator[Api]:
    with running_api(home, proxy=proxy) as api:
        yield api


def test_the_address_that_a_proxy_names_is_audited_and_one_that_a_stranger_names_is_not(home: Home) -> None:
    named = {"X-Forwarded-For": "203.0.113.9, 198.51.100.7", "X-Forwarded-Proto": "https"}
    for proxy, audited in (("127.0.0.1", "198.51.100.7"), ("10.0.0.2", "127.0.0.1")):
        with behind(home, proxy) as api, api.as_(Role.OPERATOR, **named) as operator:
            assert operator.post("/api/v1/federations/casting/pause").status_code == 200
        last = home.audit_file.read_text().splitlines()[-1]
        assert f'"address": "{audited}"' in last


@pytest.fixture
def encrypted(tmp_path: Path) -> Home:
    """A home whose interface has a certificate."""
    broker, api = BrokerSettings(port=free_port()), ApiSettings(port=free_port())
    made = create_home(tmp_path / "home", CoordinatorConfig(broker=broker, api=api))
    add_federation(made, FEDERATION, ["a"])
    own = issue(made.pki, "api", server=True, sans=("127.0.0.1",))
    api = ApiSettings(port=api.port, certificate=str(own.certificate), key=str(own.key))
    replace_durably(made.config_file, render_config(CoordinatorConfig(broker=broker, api=api)))
    return made


def test_with_a_certificate_the_interface_speaks_https_only_and_commands_follow(encrypted: Home) -> None:
    processes = Plant(encrypted.root.parent, encrypted)
    try:
        process = processes.fedcg("coordinator", "coordinator", "run")
        wait_until(lambda: "https://" in processes.log("coordinator") or process.poll() is not None, "it listens")
        shown = run_fedcg("federation", "show", "--dir", encrypted.root, "--json")
        assert data_of(shown.stdout)["epoch"] == 1, processes.log("coordinator")
        trusted = ssl.create_default_context(cafile=str(encrypted.pki / "ca.pem"))
        url = encrypted.config().api.url
        assert httpx.get(f"{url}/healthz", verify=trusted, trust_env=False).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/healthz".replace("https", "http"), trust_env=False)
    finally:
        processes.close()
