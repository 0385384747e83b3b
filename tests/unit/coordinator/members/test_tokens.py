"""`fedcg token` and `fedcg device`, and the settings of the enrolment listener."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.broker.access_lists import refresh_access
from coordinator.cli.opening import create_home
from coordinator.config import EVERY_ADDRESS, BrokerSettings, CoordinatorConfig, EnrolmentSettings, load_config
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, credential_of
from coordinator.rounds.records import DeviceState, TokenState
from coordinator.storage.store import Store
from fedcg.errors import BAD_INPUT, EXISTS, NOT_FOUND
from fedcg.wire.messages.enrolment_messages import Token, certificate_key_digest, load_certificate
from tests.support.commands import data_of
from tests.support.coordinator.homes import call


@pytest.fixture
def store(home: Home) -> Iterator[Store]:
    opened = Store(home.database)
    yield opened
    opened.close()


def created(home: Home, *arguments: object) -> dict[str, object]:
    code, output = call("token", "create", "--dir", home.root, "--json", *arguments)
    assert code == 0, output
    values: dict[str, object] = data_of(output)
    return values


def test_a_token_names_the_authority_the_place_and_its_end(home: Home, store: Store) -> None:
    values = created(home, "--device", "line-4")
    token = Token.parse(str(values["token"]))
    authority = load_certificate(credential_of(home.pki, CA_NAME).certificate.read_bytes())
    assert token.authority == certificate_key_digest(authority)
    assert (token.url, token.device, token.id) == (home.config().enrolment_url, "line-4", values["id"])
    (known,) = store.register.tokens()
    assert 23.9 * 3600 < known.expires_at - time.time() <= 24 * 3600
    assert token.secret.hex() not in repr(known)
    assert Token.parse(str(created(home)["token"])).secret != token.secret


def test_the_text_for_people_shows_the_token_once_and_what_to_type_on_the_box(home: Home) -> None:
    code, output = call("token", "create", "--dir", home.root)
    assert code == 0
    text = output.split()[0]
    assert Token.parse(text).device is None
    assert "fedcg enrol --token - --device ID" in output
    assert text not in call("token", "list", "--dir", home.root)[1]


def test_tokens_are_listed_with_what_they_are_still_good_for_and_an_open_one_can_be_revoked(
    home: Home, store: Store
) -> None:
    first, second = created(home, "--device", "a"), created(home, "--for", "1ms")
    code, output = call("token", "revoke", first["id"], "--dir", home.root, "--json")
    revoked = data_of(output)
    assert (code, revoked["id"], revoked["state"]) == (0, first["id"], "revoked")
    listed = data_of(call("token", "list", "--dir", home.root, "--json")[1])
    assert {entry["id"]: entry["state"] for entry in listed} == {first["id"]: "revoked", second["id"]: "expired"}
    code, output = call("token", "revoke", "nobody", "--dir", home.root)
    assert code == NOT_FOUND
    assert "fedcg token list" in output
    assert store.register.tokens()[0].state(0.0) in (TokenState.REVOKED, TokenState.OPEN)


@pytest.mark.parametrize(
    ("arguments", "ends", "why"),
    [
        (["--device", "taken"], EXISTS, "--replaces taken"),
        (["--device", "Line4"], BAD_INPUT, "lower-case"),
        (["--replaces", "nobody"], NOT_FOUND, "no device 'nobody'"),
        (["--device", "a", "--replaces", "taken"], BAD_INPUT, "contradicts"),
        (["--enrolment-url", "http://127.0.0.1:1"], BAD_INPUT, "https://HOST:PORT"),
        (["--enrolment-url", "https://127.0.0.1:99999"], BAD_INPUT, "a port of 1 to 65535"),
        (["--for", "0m"], BAD_INPUT, "more than 0"),
        (["--for", "91d"], BAD_INPUT, "at most 90d"),
        (["--for", "999999999d"], BAD_INPUT, "--for 999999999d: choose at most 90d"),
        (["--for", "24"], BAD_INPUT, "give a time span such as 90s"),
    ],
)
def test_a_token_that_could_not_be_used_is_not_made(
    home: Home, store: Store, arguments: list[str], ends: int, why: str
) -> None:
    store.add_device("taken", "a" * 64, 1.0)
    code, output = call("token", "create", "--dir", home.root, *arguments)
    assert code == ends
    assert why in output
    assert store.register.tokens() == []


def test_where_nothing_listens_a_token_is_refused_with_the_next_step(tmp_path: Path) -> None:
    home = create_home(tmp_path / "home", CoordinatorConfig())
    code, output = call("token", "create", "--dir", home.root)
    assert code == 2
    assert "[enrolment]" in output
    assert "fedcg device add" in output


def test_devices_are_shown_with_state_and_certificate_and_revoked_by_a_command(
    home: Home, store: Store, tmp_path: Path
) -> None:
    assert call("device", "add", "a", "--dir", home.root, "--out", tmp_path / "out")[0] == 0
    shown = data_of(call("device", "show", "a", "--dir", home.root, "--json")[1])
    leaf = load_certificate((tmp_path / "out" / "a" / "tls" / "device.pem").read_bytes())
    assert [entry["serial"] for entry in shown["certificates"]] == [f"{leaf.serial_number:x}"]
    assert shown["state"] == "enrolled"
    code, output = call("device", "revoke", "a", "--dir", home.root, "--reason", "stolen")
    assert code == 0
    for _ in range(2):  # again does no harm
        answer = data_of(call("device", "revoke", "a", "--dir", home.root, "--json")[1])
        assert (answer["was_member"], answer["certificates"]) == (False, 1)
    (listed,) = data_of(call("device", "list", "--dir", home.root, "--json")[1])
    assert (listed["state"], listed["ended_because"]) == ("revoked", "stolen")
    assert refresh_access(home).devices == ()
    assert store.members() == []
    for command in ("show", "revoke"):
        code, output = call("device", command, "nobody", "--dir", home.root)
        assert code == NOT_FOUND
        assert "fedcg device list" in output
    code, output = call("token", "create", "--dir", home.root, "--device", "a")
    assert code == EXISTS
    assert f"it is {DeviceState.REVOKED.value}" in output


def test_enrolment_is_off_unless_a_port_is_configured(tmp_path: Path) -> None:
    config = CoordinatorConfig()
    assert config.enrolment_url is None
    code, _ = call("coordinator", "init", "--dir", tmp_path / "home", "--enrol-port", 18444, "--host", "10.1.2.3")
    assert code == 0
    config = load_config(tmp_path / "home" / "coordinator.toml")
    assert config.enrolment_url == "https://10.1.2.3:18444"
    assert config.enrolment.address(config.enrolment_host) == EVERY_ADDRESS
    assert config.enrolment.certificate_days == 30


def test_the_listener_stays_on_this_machine_for_a_broker_on_this_machine() -> None:
    local = CoordinatorConfig(enrolment=EnrolmentSettings(port=1))
    assert local.enrolment.address(local.enrolment_host) == "127.0.0.1"
    full = CoordinatorConfig(
        broker=BrokerSettings(host="broker.example"),
        enrolment=EnrolmentSettings(port=8444, listen="10.0.0.1", host="::1", certificate_days=2.5),
    )
    assert full.enrolment_url == "https://[::1]:8444"
