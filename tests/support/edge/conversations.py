"""A device that greets its coordinator, or leaves it, without its agent, over the in-process broker."""

from pathlib import Path

from edge_client.config import AgentConfig, BrokerSection
from edge_client.identity.conversation import converse
from edge_client.identity.credentials import AgentKeys
from edge_client.store.private_store import PrivateStore
from fedcg.wire.messages.envelopes import SigningKey
from tests.support.broker.memory import MemoryTransport
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.coordinator.world import World
from tests.support.edge.world import make_config


def box_config(root: Path) -> AgentConfig:
    """Return device `a` of the coordinator's federation, with a broker that does not answer."""
    broker = BrokerSection(host="127.0.0.1", port=1, insecure=True)
    return make_config(root).model_copy(update={"federation": FEDERATION, "device": "a", "broker": broker})


def talk(world: World, root: Path, key: SigningKey, timeout_s: float, *, is_leaving: bool = False) -> float | None:
    """Let device `a` greet the coordinator or leave, signing with `key`; return its clock's lead according to the answer."""
    config = box_config(root)
    store = PrivateStore.open(config.store, config.federation, config.device)
    keys = AgentKeys(key, world.key.public)
    return converse(config, keys, store, MemoryTransport(world.broker, config.device), timeout_s, is_leaving=is_leaving)
