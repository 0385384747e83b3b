"""Curves of each federation as event files for TensorBoard. Only the optional package knows their form."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import ConfigError
from coordinator.rounds.records import UpdateRecord
from coordinator.storage.store import Store
from fedcg.wire.messages.schemas import Outcome, RoundAttempt

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

_log = logging.getLogger(__name__)
_REPORTED = ("accuracy", "loss")


class RoundCurves:
    """Writes the figures of every round that closes: accuracies and losses that clients report, the distillation's loss, bytes, updates.

    Args:
        directory: gets a folder for each federation.
        store: the database.

    Raises:
        ConfigError: the package `tensorboard` is not installed.
    """

    def __init__(self, directory: Path, store: Store) -> None:
        if find_spec("tensorboard") is None:
            raise ConfigError(
                "[tensorboard] directory in coordinator.toml needs the Python package 'tensorboard': install it with "
                "pip install 'fedcg-edge[tensorboard]', or leave the setting out"
            )
        self._directory = directory
        self._store = store
        self._writers: dict[str, EventFileWriter] = {}
        self._losses: dict[str, float] = {}  # the last one of each federation's distillation

    def follow(self, event: Mapping[str, Any]) -> None:
        """Take an event of the event log; a disk that refuses the file costs the curve, not the round."""
        federation, name = event.get("federation"), event.get("event")
        if not isinstance(federation, str):
            return
        if name == "aggregate_step" and event.get("loss") is not None:
            self._losses[federation] = event["loss"]
        if name != "aggregate_stored":
            return
        updates = self._store.updates(federation, RoundAttempt(event["round"], event["attempt"]))
        figures = figures_of(updates, event["size"])
        if federation in self._losses:
            figures["distillation/loss"] = self._losses.pop(federation)
        try:
            self._write(federation, event["round"], event["t"], figures)
        except OSError as error:
            _log.warning("the curves of round %d are not written to %s: %s", event["round"], self._directory, error)

    def close(self) -> None:
        """End all files."""
        for writer in self._writers.values():
            writer.close()

    def _write(self, federation: str, round_number: int, moment: float, figures: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = self._writers.get(federation)
        if writer is None:
            writer = self._writers[federation] = EventFileWriter(str(self._directory / federation))
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
        writer.add_event(Event(wall_time=moment, step=round_number, summary=Summary(value=values)))
        writer.flush()


def figures_of(updates: list[UpdateRecord], aggregate_bytes: int) -> dict[str, float]:
    """The figures of a round by their tags.

    Args:
        updates: how each client's update ended; only accepted ones count.
        aggregate_bytes: size of the aggregate.
    """
    accepted = [update for update in updates if update.outcome is Outcome.ACCEPTED]
    figures = {
        "updates/accepted": float(len(accepted)),
        "updates/rejected": float(sum(update.outcome is Outcome.REJECTED for update in updates)),
        "bytes/up": float(sum(update.size for update in accepted)),
        "bytes/aggregate": float(aggregate_bytes),
    }
    for name in _REPORTED:
        known = {update.client: update.reported[name] for update in accepted if name in update.reported}
        figures |= {f"{name}/{client}": float(value) for client, value in sorted(known.items())}
        if known:
            figures[f"{name}/mean"] = statistics.fmean(known.values())
    return figures
