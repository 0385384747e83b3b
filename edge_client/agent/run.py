"""Builds an agent from its configuration and runs it until SIGTERM, SIGINT or the federation's end."""

import logging
import signal
import time
from types import FrameType

from edge_client.agent.loop import Agent
from edge_client.agent.reports import Examine, LinkProblems
from edge_client.config import AgentConfig
from edge_client.errors import ConfigError
from edge_client.identity.credentials import Renewer, load_keys, mqtt_config, settle
from edge_client.link.coordinator_link import offline_will
from edge_client.store.private_store import open_store
from edge_client.training.trainer_handle import trainer_process
from export.model.manifest import note_signer
from fedcg.event_log import EventLog
from fedcg.learning.split_names import use_weights
from fedcg.log_output import LogSettings
from fedcg.wire.transport.mqtt import MqttTransport

STORE_WAIT_S = 5.0  # an agent that was just killed may still hold the locks briefly


def run_agent(config: AgentConfig, log: LogSettings, examine: Examine, *, until_finished: bool) -> int:
    """Run a device's agent in this process until SIGTERM, SIGINT, or the federation's end.

    Args:
        config: of the device.
        log: the log's form and level, for the training process.
        examine: the doctor's checks of the device itself.
        until_finished: return once the federation is over.

    Returns:
        The exit code.

    Raises:
        EdgeError: keys or private store can't be used, another agent uses the store, or a required extra is not installed.
        WireError: the TLS files can't be used.
    """
    if problem := config.audit.obstacle or config.privacy_obstacle:
        raise ConfigError(problem)
    if (weights := config.training.weights) is not None:
        if not weights.exists():
            raise ConfigError(f"training.weights = {weights}: no such file or folder; correct or omit it")
        use_weights(weights)  # the training process inherits it
    keys = load_keys(config)
    if config.tls is not None:
        settle(config.tls)
    store = open_store(config, make=True)
    store.take_over()
    with store.locked("lock", wait_s=STORE_WAIT_S):
        with store.locked("trainer.lock", wait_s=STORE_WAIT_S):
            pass  # a killed agent's trainer has ended, so no other process changes the store
        events = EventLog(config.store / "events.jsonl", time.time)
        logging.getLogger("fedcg.wire").addHandler(LinkProblems(events))
        transport = MqttTransport(
            mqtt_config(config, keys), offline_will(config.federation, config.device, keys.signing)
        )
        agent = Agent(config, store, keys, transport, lambda deliver: trainer_process(config, log, deliver), events)
        note_signer(store.root, keys.signing.public.hex)
        renewer = Renewer(config, keys.signing, events, transport.reconnect)

        def end(number: int, frame: FrameType | None) -> None:
            agent.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        with renewer.running(), agent.self_reporter.examining(examine), agent.hardware.watching():
            return agent.run(until_finished=until_finished)
