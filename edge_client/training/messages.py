"""The agent's commands to the training process, and its reports. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.session.events import ChooseModel, Chosen, ReleaseTrainer, TrainRound
from fedcg.event_log import EventValue
from fedcg.wire.messages.messages import DeclineReason, RoundAttempt
from fedcg.worker_process import Exited


@dataclass(frozen=True)
class Ready:
    """Report: torch is loaded; the process takes commands."""

    pid: int


@dataclass(frozen=True)
class Committed:
    """Report: the round is durable; the store holds the result."""

    round_attempt: RoundAttempt


@dataclass(frozen=True)
class Failed:
    """Report: the round can't be trained; nothing was changed."""

    round_attempt: RoundAttempt
    reason: DeclineReason
    detail: str


@dataclass(frozen=True)
class Working:
    """Sign of life of the child while it works; ends at the handle."""


@dataclass(frozen=True)
class Noted:
    """Report: an event that the process has written into the event log; the agent's log and status have it too."""

    event: dict[str, EventValue]


Work = TrainRound | ChooseModel
TrainerCommand = Work | ReleaseTrainer
TrainerReport = Ready | Committed | Failed | Chosen | Noted | Exited
