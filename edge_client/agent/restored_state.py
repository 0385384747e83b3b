"""The state of the protocol with which an agent starts: what its private store holds."""

from __future__ import annotations

from edge_client.agent.event_reporter import EventReporter
from edge_client.config import AgentConfig
from edge_client.messaging.coordinator_trust import CoordinatorTrust
from edge_client.session.state import SessionState
from edge_client.store.private_store import PrivateStore
from fedcg.wire.messages.messages import RoundAttempt


def restored_state(
    config: AgentConfig, store: PrivateStore, trust: CoordinatorTrust, reporter: EventReporter
) -> SessionState:
    """The state that continues what the store holds; damage in it is reported.

    Raises:
        StoreError: nothing in it is whole, or the disk does not answer.
    """
    generation, problems = store.generations.current()
    for problem in (*problems, *store.damage()):
        reporter.damage(problem)
    epoch, *highest = trust.order.highest
    committed = None if generation is None else generation.round_attempt
    final = store.finalised().get("aggregate")
    return SessionState(
        federation=config.federation,
        device=config.device,
        epoch=epoch,
        stored=frozenset(store.artifacts.ids()) | store.spec_digests(),
        bound_spec=None if generation is None else generation.spec,
        committed=committed,
        committed_epoch=epoch if committed is None or committed <= RoundAttempt(*highest) else 0,
        finalised=final if isinstance(final, str) else None,
    )
