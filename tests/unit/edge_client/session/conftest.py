"""States of the agent's state machine that tests start from."""

import pytest

from edge_client.session.signals import (
    ArtifactStored,
    Invited,
    LinkChanged,
    SpecChecked,
    Tick,
    TrainerReady,
    TrainRound,
    Welcomed,
)
from edge_client.session.state import SessionState
from fedcg.wire.messages.schemas import RoundAttempt
from tests.support.edge.session_events import SPEC, aggregate, drive, offer


@pytest.fixture
def ready() -> SessionState:
    """Connected, welcomed, trainer idle, nothing known of any round."""
    fresh = SessionState(federation="shapes", device="site-1")
    state, _ = drive(fresh, Tick(), TrainerReady(), LinkChanged(up=True), Welcomed(epoch=1))
    return state


@pytest.fixture
def training(ready: SessionState) -> SessionState:
    """Round 1 is being trained."""
    state, commands = drive(
        ready,
        offer(1),
        Invited(RoundAttempt(1, 1)),
        ArtifactStored(SPEC.id),
        SpecChecked(SPEC.id, None),
        ArtifactStored(aggregate(1).id),
    )
    assert TrainRound(RoundAttempt(1, 1), SPEC.id, aggregate(1).id) in commands
    return state
