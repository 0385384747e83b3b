"""coordinator.toml: written, read again, and refused where it would show tokens to a network."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from coordinator.config import (
    EVERY_ADDRESS,
    AggregationSettings,
    ApiSettings,
    BrokerSettings,
    CoordinatorConfig,
    EnrolmentSettings,
    RobustnessSettings,
    check_api_host,
    load_config,
    render_config,
)
from coordinator.errors import ConfigError
from coordinator.paths import Home
from tests.support.commands import run_fedcg


@pytest.mark.parametrize(
    "config",
    [
        CoordinatorConfig(),
        CoordinatorConfig(
            robustness=RobustnessSettings(
                weight_medians=2.0, max_share=0.5, examples={"site-1": 2000, "x": 1}, clip_medians=4.0
            )
        ),
        CoordinatorConfig(
            broker=BrokerSettings(
                host="broker.example", preset="azure-event-grid", chunk_bytes=30_000, window_bytes=400_000
            ),
            enrolment=EnrolmentSettings(port=8444, listen="10.0.0.1", host="::1", certificate_days=2.5),
            aggregation=AggregationSettings(public_data='a "b"', public_images=7),
            track="mlflow:sqlite:///runs.db",
        ),
    ],
)
def test_a_configuration_survives_writing_and_reading(tmp_path: Path, config: CoordinatorConfig) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text(render_config(config))
    assert load_config(path) == config


def test_the_http_interface_is_shown_to_a_network_only_behind_tls() -> None:
    everywhere = "0.0.0.0"  # noqa: S104 - the address that must be refused
    for allowed in (
        ApiSettings(),
        ApiSettings(host=everywhere, certificate="api.pem", key="api.key"),
        ApiSettings.model_validate({"host": everywhere, "proxy": "10.0.0.2"}),
    ):
        check_api_host(allowed)
    with pytest.raises(ConfigError, match="sent unencrypted"):
        check_api_host(ApiSettings(host=everywhere))
    with pytest.raises(ValidationError, match="set both"):
        ApiSettings(certificate="api.pem")


def test_a_setting_that_is_none_is_named_with_its_line_and_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text(render_config(CoordinatorConfig()).replace("certificate_days", "certificate_dais"))
    number = 1 + next(n for n, line in enumerate(path.read_text().splitlines()) if "certificate_dais" in line)
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert f"line {number}: enrolment.certificate_dais" in str(refused.value)
    assert "did you mean `certificate_days`?" in str(refused.value)


def test_an_empty_file_is_a_write_that_was_cut_off_and_one_section_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    for text in ("", "\n# coordinator.toml\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"line 1: nothing is set.*interrupted.*fedcg coordinator init"):
            load_config(path)
    path.write_text("[broker]\n")
    assert load_config(path) == CoordinatorConfig()


@pytest.mark.parametrize(
    "host",
    ["http://x", "x:80", "a b/c", "-x", "*", "a\x1bb", "a\n", "x." + "a" * 64, "a" * 999, "300.1.2.3", "[::1]", "a..b"],
)
def test_a_host_that_is_neither_name_nor_address_is_refused_and_nothing_is_made(tmp_path: Path, host: str) -> None:
    refused = run_fedcg("coordinator", "init", "--dir", str(tmp_path / "home"), f"--host={host}")
    assert (refused.exit_code, "must be a DNS name or an IP address" in refused.output) == (2, True)
    assert not (tmp_path / "home").exists()
    with pytest.raises(ValidationError, match="DNS name"):
        EnrolmentSettings(host=host)


def test_names_and_addresses_are_hosts() -> None:
    names = ["localhost", "Broker.Example", "my_broker", "xn--bcher-kva.example", "3com.example"]
    for host in (*names, "10.0.0.2", "fe80::1"):
        assert BrokerSettings(host=host).host == host
    assert BrokerSettings(host="0:0::1").host == "::1"


def test_a_relative_place_starts_at_the_configurations_own_folder(tmp_path: Path) -> None:
    config = CoordinatorConfig(aggregation=AggregationSettings(public_data='a "b"'))
    assert Home(tmp_path).public_data(config) == tmp_path / 'a "b"'
    assert Home(tmp_path).public_data(CoordinatorConfig()) is None


def test_enrolment_is_off_without_a_port_and_the_listener_is_where_devices_reach_the_broker() -> None:
    assert CoordinatorConfig().url_of(EnrolmentSettings()) is None
    for host, settings, address, url in (
        ("127.0.0.1", EnrolmentSettings(port=1), "127.0.0.1", "https://127.0.0.1:1"),
        ("10.1.2.3", EnrolmentSettings(port=18444), EVERY_ADDRESS, "https://10.1.2.3:18444"),
        ("broker.example", EnrolmentSettings(port=8444, host="::1"), "127.0.0.1", "https://[::1]:8444"),
        ("broker.example", EnrolmentSettings(port=8, listen="10.0.0.1"), "10.0.0.1", "https://broker.example:8"),
    ):
        config = CoordinatorConfig(broker=BrokerSettings(host=host), enrolment=settings)
        assert (config.enrolment.address(config.host_of(config.enrolment)), config.url_of(config.enrolment)) == (
            address,
            url,
        )
