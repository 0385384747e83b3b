"""A real training process that is killed in the middle of a round and started again."""

import os
import queue
import signal
from pathlib import Path

from edge_client.config import AgentConfig
from edge_client.session.signals import Noted, RoundCommitted, TrainerReady, TrainRound
from edge_client.training.trainer_handle import TrainerReport, trainer_process
from fedcg.log_output import LogSettings
from fedcg.worker_process import Exited
from tests.support.waiting import wait_until


class KilledTrainer:
    """Starts training processes for one device, one after the other."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config

    def train(self, command: TrainRound) -> None:
        """Train a round undisturbed."""
        self._run(command, None)

    def train_and_kill(self, command: TrainRound, checkpoint: Path) -> None:
        """SIGKILL the process once it has written a checkpoint; the round is not committed."""
        self._run(command, checkpoint)

    def _run(self, command: TrainRound, checkpoint: Path | None) -> None:
        reports: queue.SimpleQueue[TrainerReport] = queue.SimpleQueue()
        process = trainer_process(self._config, LogSettings(), reports.put)
        try:
            pid = process.start()
            assert _next(reports) == TrainerReady()
            process.send(command)
            if checkpoint is None:
                assert _next(reports) == RoundCommitted(command.round_attempt)
                return
            wait_until(checkpoint.exists, "the first checkpoint", 60.0)
            os.kill(pid, signal.SIGKILL)
            assert isinstance(_next(reports), Exited)
        finally:
            process.stop()


def _next(reports: queue.SimpleQueue[TrainerReport]) -> TrainerReport:
    """The next report that is not an event."""
    while isinstance(report := reports.get(timeout=120), Noted):
        pass
    return report
