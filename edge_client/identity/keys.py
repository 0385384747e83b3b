"""The keys of this device, and its connection to the broker with them."""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.config import AgentConfig
from edge_client.errors import EnrolError
from edge_client.identity.credentials import read_checked
from fedcg.errors import FAILED
from fedcg.files import is_passing
from fedcg.wire.errors import WireError
from fedcg.wire.messages.signing import SigningKey, VerifyKey
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles, connection_name


@dataclass(frozen=True)
class AgentKeys:
    """This device's signing key, and the coordinator's public key."""

    signing: SigningKey
    coordinator: VerifyKey


def load_keys(config: AgentConfig) -> AgentKeys:
    """The keys that the configuration names.

    Raises:
        EnrolError: names the file that is missing or holds no key.
    """
    try:
        signing = SigningKey.load(config.keys.signing)
        coordinator = VerifyKey.load_all(config.keys.coordinator)[0]
    except (OSError, ValueError, WireError) as error:
        raise EnrolError(
            f"the device's keys, {config.keys.signing} and {config.keys.coordinator}, can't be used: {error}. Enrol the device again "
            "(`fedcg enrol`), or copy its bundle again",
            exit_code=FAILED if is_passing(error) else None,
        ) from error
    return AgentKeys(signing, coordinator)


def mqtt_config(config: AgentConfig, keys: AgentKeys | None = None) -> MqttConfig:
    """How to reach the broker: with keys as the agent, without as another connection of the same device.

    Raises:
        EnrolError: names a TLS file that is damaged.
    """
    tls = None if config.tls is None else TlsFiles(config.tls.ca, config.tls.cert, config.tls.key)
    for path in (tls.ca, tls.cert, tls.key) if tls is not None else ():
        if path.exists():  # the connection names one that is missing
            read_checked(path)
    return MqttConfig(
        host=config.broker.host,
        port=config.broker.port,
        identity=config.device,
        connection="" if keys is None else connection_name(config.federation, keys.signing.public.raw),
        tls=tls,
        insecure=config.broker.insecure,
        protocol=config.broker.protocol,
        keepalive_s=config.broker.keepalive_s,
        max_packet=config.broker.limits.max_packet,
        in_flight=config.broker.limits.in_flight,
    )
