"""Curves for TensorBoard, written while a simulation runs. Only the optional package knows the files' form."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.demo.summary import mean
from experiments.errors import OptionError

if TYPE_CHECKING:
    from fedcg.learning.simulation.simulation import Simulation

EVENTS_FOLDER = "tensorboard"


def check_installed() -> None:
    """Before anything is run: event files can be written.

    Raises:
        OptionError: the package is not installed.
    """
    if find_spec("tensorboard") is None:
        raise OptionError(
            "event files need the Python package 'tensorboard': install the extra `experiments`, or --no-tensorboard"
        )


class EventFiles:
    """The event files of one run, in a folder of its own; those of rounds that will be done again are cut off.

    Args:
        batch: folder of the batch.
        name: of the run.
        done_rounds: that need not be done again.
    """

    def __init__(self, batch: Path, name: str, done_rounds: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = batch / EVENTS_FOLDER / name
        if done_rounds == 0:
            shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder), purge_step=done_rounds + 1 if done_rounds else None)

    def add(self, now: Simulation) -> None:
        """Write the figures of the round that just ended, where it was measured."""
        writer = self._writer
        latest = {name: curve[-1] for name, curve in now.curves.items() if curve and curve[-1].round == now.rounds}
        for tag, name in (
            ("accuracy", "accuracy"),
            ("accuracy_after", "accuracy_after"),
            ("loss", "loss"),
            ("local_only", "local_accuracy"),
            ("common", "common"),
            ("consistency", "consistency"),
        ):
            for client, record in latest.items():
                value = getattr(record, name)
                if value is not None:
                    writer.add_scalar(f"{tag}/{client}", value, now.rounds)
            average = mean([getattr(record, name) for record in latest.values()])
            if average is not None:
                writer.add_scalar(f"{tag}/mean", average, now.rounds)
        if now.global_accuracy and now.global_accuracy[-1][0] == now.rounds:
            writer.add_scalar("accuracy/global", now.global_accuracy[-1][1], now.rounds)
        writer.flush()

    def end(self) -> None:
        """Close the run's files."""
        self._writer.close()
