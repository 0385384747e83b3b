"""The agent's handle of the training process: starts it, sends commands, receives reports, restarts it after a crash.

Torch-free. Only the child process imports torch.
"""

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

from edge_client.config import AgentConfig
from edge_client.session.signals import Noted, TrainerCommand, TrainerReady, Working, WorkReport
from fedcg.child_python import loading
from fedcg.log_output import LogSettings, set_up_log
from fedcg.worker_process import Exited, WorkerProcess

TrainerReport = TrainerReady | WorkReport | Noted | Exited


class TrainerHandle(Protocol):
    """A training process, or its substitute in a test."""

    def start(self) -> int:
        """Start or restart the process and return its id. Reports arrive through the callback given at construction."""

    def send(self, command: TrainerCommand) -> None:
        """Send the process its next command."""

    def stop(self) -> None:
        """End the process if it runs. Uncommitted work is repeated later."""


def trainer_process(config: AgentConfig, log: LogSettings, deliver: Callable[[TrainerReport], None]) -> WorkerProcess:
    """The training process of a device. `deliver` is called with its reports on a thread and must only enqueue."""

    def deliver_reports(report: TrainerReport | Working) -> None:
        if not isinstance(report, Working):
            deliver(report)

    return WorkerProcess("fedcg-trainer", run_child, (config, log), config.training.stall_s, deliver_reports)


def run_child(connection: Connection, config: AgentConfig, log: LogSettings) -> None:
    """Entry point of the child process: load torch and work."""
    set_up_log(log)
    with loading():
        from edge_client.training.trainer_child import trainer_main

    trainer_main(connection, config)
