"""coordinator.toml: written, read again, and refused where it would show tokens to a network."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from coordinator.config import (
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
    with pytest.raises(ConfigError, match="in the clear"):
        check_api_host(ApiSettings(host=everywhere))
    with pytest.raises(ValidationError, match="name both"):
        ApiSettings(certificate="api.pem")
