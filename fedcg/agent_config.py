"""Renders a new device's agent.toml: the coordinator does so for a bundle, the device itself when it enrols.

Both use one template, so that a bundle and an enrolled device do not differ.
"""

import json
from importlib.resources import files
from string import Template

from fedcg.wire.messages.enrolment_messages import PresetName

CONFIG_NAME = "agent.toml"
DATA = "data"
_NO_CARRIER = '# carrier_url = "https://coordinator.example:8445"'
_NO_RENEWAL = '# url = "https://coordinator.example:8444"'


def render_agent_config(
    federation: str,
    device: str,
    *,
    host: str,
    port: int,
    preset: PresetName,
    enrolment_url: str | None = None,
    carrier_url: str | None = None,
    data: str = DATA,
) -> str:
    """The text of agent.toml.

    Args:
        federation: the federation that the device joins.
        device: its id.
        host: the broker's name or address.
        port: the broker's port.
        preset: the broker's limits.
        enrolment_url: where the certificate is renewed; None if certificates are replaced by hand.
        carrier_url: where artifacts can travel over HTTPS; None if the coordinator offers only MQTT.
        data: the folder of the images, relative to the file.
    """
    template = files("fedcg").joinpath(f"{CONFIG_NAME}.template").read_text(encoding="utf-8")
    return Template(template).substitute(
        federation=federation,
        device=device,
        host=json.dumps(host),
        port=port,
        preset=preset,
        enrolment=_NO_RENEWAL if enrolment_url is None else f"url = {json.dumps(enrolment_url)}",
        carrier=_NO_CARRIER if carrier_url is None else f"carrier_url = {json.dumps(carrier_url)}",
        data=json.dumps(data),
    )
