"""The round engine, event by event."""

from coordinator.rounds.engine import RoundState, transition
from coordinator.rounds.signals import Command, Event
from fedcg.learning.spec import DEFAULT_MIN_COHORT, RoundPolicy


def policy_of(rounds: int, min_clients: int, max_attempts: int = 3, deadline_s: float = 100.0) -> RoundPolicy:
    """Return a policy with this cohort size."""
    return RoundPolicy(
        rounds=rounds,
        min_clients=min_clients,
        min_cohort=min(min_clients, DEFAULT_MIN_COHORT),
        max_attempts=max_attempts,
        deadline_s=deadline_s,
    )


def play(state: RoundState, *events: Event, now: float = 0.0) -> tuple[RoundState, list[Command]]:
    """Apply events at one time; return the last state and all commands."""
    commands: list[Command] = []
    for event in events:
        state, more = transition(state, event, now)
        commands += more
    return state, commands
