"""The round engine, event by event."""

from __future__ import annotations

from coordinator.rounds.round_commands import Command
from coordinator.rounds.round_engine import RoundState, transition
from coordinator.rounds.round_events import Event


def play(state: RoundState, *events: Event, now: float = 0.0) -> tuple[RoundState, list[Command]]:
    """Apply events at one time; returns the last state and all commands."""
    commands: list[Command] = []
    for event in events:
        state, more = transition(state, event, now)
        commands += more
    return state, commands
