"""Puts an agent together from its configuration and runs it until it is told to stop."""

from __future__ import annotations

import logging
import signal
import time
from types import FrameType

from edge_client.agent.event_reporter import LinkProblems
from edge_client.agent.loop import Agent, AgentKeys
from edge_client.config import AgentConfig
from edge_client.errors import EdgeError
from edge_client.identity.credentials import settle_pair
from edge_client.identity.renewal import Renewer
from edge_client.messaging.publisher import offline_will
from edge_client.store.private_store import PrivateStore
from edge_client.training.trainer_handle import TrainerProcess
from fedcg.event_log import EventLog
from fedcg.wire.errors import WireError
from fedcg.wire.messages.signing import SigningKey, VerifyKey
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles

STORE_WAIT_S = 5.0  # a predecessor that was just killed may still hold the locks for a moment
_log = logging.getLogger(__name__)


def load_keys(config: AgentConfig) -> AgentKeys:
    """The keys that the configuration names.

    Raises:
        EdgeError: a file is missing or holds no key; says which.
    """
    try:
        signing = SigningKey.load(config.keys.signing)
        coordinator = VerifyKey.from_hex(config.keys.coordinator.read_text(encoding="ascii"))
    except (OSError, ValueError, WireError) as error:
        raise EdgeError(
            f"the device's keys can't be used: {error}. Enrol the device again, or copy its bundle again."
        ) from error
    return AgentKeys(signing, coordinator)


def mqtt_config(config: AgentConfig) -> MqttConfig:
    """How to reach the broker."""
    tls = None if config.tls is None else TlsFiles(config.tls.ca, config.tls.cert, config.tls.key)
    return MqttConfig(
        host=config.broker.host,
        port=config.broker.port,
        identity=config.device,
        tls=tls,
        insecure=config.broker.insecure,
        protocol=config.broker.protocol,
        keepalive_s=config.broker.keepalive_s,
        max_packet=config.broker.limits.max_packet,
        in_flight=config.broker.limits.in_flight,
    )


def run_agent(config: AgentConfig, *, until_finished: bool) -> int:
    """Run a device's agent in this process until SIGTERM, SIGINT, or the federation's end.

    Returns:
        The exit code.

    Raises:
        EdgeError: keys or private store can't be used, or another agent works in the store.
        WireError: the TLS files can't be used.
    """
    keys = load_keys(config)
    if config.tls is not None:
        settle_pair(config.tls.cert, config.tls.key)
    store = PrivateStore.open(config.store, config.federation, config.device)
    with store.locked("lock", wait_s=STORE_WAIT_S):
        with store.locked("trainer.lock", wait_s=STORE_WAIT_S):
            pass  # the trainer of a killed agent is gone: nothing in the store changes under us any more
        events = EventLog(config.store / "events.jsonl", time.time)
        logging.getLogger("fedcg.wire").addHandler(LinkProblems(events))
        transport = MqttTransport(mqtt_config(config), offline_will(config.federation, config.device, keys.signing))
        agent = Agent(config, store, keys, transport, lambda deliver: TrainerProcess(config, deliver), events)
        renewer = Renewer(config, keys.signing, events, transport.reconnect)

        def end(number: int, frame: FrameType | None) -> None:
            agent.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        with renewer.running():
            return agent.run(until_finished=until_finished or config.exit_when_finished)
