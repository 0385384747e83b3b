"""Sends settings, figures and tables of a run to MLflow or TensorBoard.

A tracker gets names, numbers and digests of files, never a weight or a sample. A separate thread sends them, so a slow or
unreachable server does not delay the run. This module must not know rounds, federations and records.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Protocol

from fedcg.errors import BadInputError
from fedcg.values import Value

MOST_WAITING = 10_000
"""The most entries that are kept while a tracker can't be reached; beyond that the oldest are dropped."""
END_S = 30.0
"""The longest time that the end of a run waits for its tracker."""
_PROJECT = "fedcg"
_LABEL = "fedcg.run"  # the tag of an MLflow run that holds its identity
_AT_ONCE = 100  # MLflow takes 1000 metrics and 100 parameters in a request
# One request without retries, because the next round retries it; no lines on stdout, no telemetry.
_QUIET = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}  # fmt: skip
_log = logging.getLogger(__name__)

Row = Mapping[str, str | int | float | None]


class TrackedRun(Value):
    """A run as a tracker shows it.

    Attributes:
        name: for people.
        identity: letters, digits and dashes; the same where a run is continued.
        settings: returns the settings, on the tracker's thread; nested mappings become names with dots.
        is_continued: whether the tracker may have an earlier part of the run.
    """

    name: str
    identity: str
    settings: Callable[[], Mapping[str, object]]
    is_continued: bool = False

    @property
    def params(self) -> dict[str, str]:
        """The settings by their names with dots, as texts."""
        return dict(_flat(self.settings().items()))


def _flat(settings: Iterable[tuple[str, object]]) -> Iterator[tuple[str, str]]:
    for name, value in settings:
        if isinstance(value, Mapping):
            yield from _flat((f"{name}.{inner}", one) for inner, one in value.items())
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, default=str)


class Tracker(Protocol):
    """One run at a tracker. Only the thread of a `Tracking` calls it; a call that raises an error is retried later."""

    def open(self, run: TrackedRun) -> None:
        """Create the run at the tracker, or find the existing one."""

    def add(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        """Send the figures of a round that ended at the unix time `at`, unless they were sent before."""

    def add_table(self, name: str, rows: Sequence[Row]) -> None:
        """Send a table; all its rows have the same columns."""

    def close(self, *, is_whole: bool) -> None:
        """End the run at the tracker, as finished or as interrupted."""


class _MLflow:
    def __init__(self, uri: str, _folder: Path) -> None:
        self._uri = uri

    def open(self, run: TrackedRun) -> None:
        self._entities = entities = import_module("mlflow.entities")
        self._client = client = import_module("mlflow.tracking").MlflowClient(self._uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        known = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if known is None else known.experiment_id
        found = client.search_runs([experiment], f"tags.`{_LABEL}` = '{run.identity}'", max_results=1)
        one = found[0] if found else client.create_run(experiment, run_name=run.name, tags={_LABEL: run.identity})
        self._run = one.info.run_id
        client.update_run(self._run, status="RUNNING")
        self._log("params", [] if one.data.params else [entities.Param(*pair) for pair in run.params.items()])

    def add(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        metric = self._entities.Metric
        self._log("metrics", [metric(name, value, int(1000 * at), step) for name, value in figures.items()])

    def _log(self, kind: str, entities: Sequence[object]) -> None:
        for first in range(0, len(entities), _AT_ONCE):
            self._client.log_batch(self._run, **{kind: entities[first : first + _AT_ONCE]})

    def add_table(self, name: str, rows: Sequence[Row]) -> None:
        table = {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}
        self._client.log_text(self._run, json.dumps(table), f"{name}.json")

    def close(self, *, is_whole: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if is_whole else "KILLED")


class _TensorBoard:
    def __init__(self, directory: str, folder: Path) -> None:
        self._directory = folder / directory

    def open(self, run: TrackedRun) -> None:
        folder = self._directory / run.name
        for file in () if run.is_continued else folder.glob("events.out.tfevents.*"):
            file.unlink()  # the run starts again from the beginning
        self._writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(folder))
        self.add_table("settings", [{"setting": name, "value": value} for name, value in run.params.items()])

    def add(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        self._write(step, at, [{"tag": tag, "simple_value": value} for tag, value in figures.items()])

    def add_table(self, name: str, rows: Sequence[Row]) -> None:
        lines = [[*rows[0]], ["---"] * len(rows[0]), *([str(one) for one in row.values()] for row in rows)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        tensor = {"dtype": "DT_STRING", "string_val": [text.encode()]}
        metadata = {"plugin_data": {"plugin_name": "text"}}
        self._write(0, time.time(), [{"tag": name, "tensor": tensor, "metadata": metadata}])

    def _write(self, step: int, at: float, values: Sequence[Mapping[str, object]]) -> None:
        event = import_module("tensorboard.compat.proto.event_pb2").Event
        self._writer.add_event(event(wall_time=at, step=step, summary={"value": values}))
        self._writer.flush()

    def close(self, *, is_whole: bool) -> None:
        self._writer.close()


_KINDS: Mapping[str, Callable[[str, Path], Tracker]] = {
    "mlflow": _MLflow, "tensorboard": _TensorBoard
}  # fmt: skip
TRACK_PATTERN = r"^(mlflow|tensorboard):.+$"
TRACK_FORMS = "mlflow:URI or tensorboard:DIR"


def check_track(track: str, otherwise: str = "leave it out") -> None:
    """Check before the run that the tracker's package is installed.

    Args:
        track: as `TRACK_PATTERN` has it.
        otherwise: what to do instead of an installation.

    Raises:
        BadInputError: it is not installed, or the text has another form.
    """
    if re.fullmatch(TRACK_PATTERN, track) is None:
        raise BadInputError(f"track {track}: give {TRACK_FORMS}")
    kind = track.partition(":")[0]
    if find_spec(kind) is None:
        raise BadInputError(f"track: {kind} is not installed: pip install 'fedcg-edge[{kind}]', or {otherwise}")


class Tracking:
    """Sends one run to a tracker. A failure causes one warning; unsent entries are retried with the next one.

    Args:
        track: as `TRACK_PATTERN` has it.
        run: to send.
        folder: the base of a relative directory.
    """

    def __init__(self, track: str, run: TrackedRun, folder: Path = Path()) -> None:
        kind, _, place = track.partition(":")
        self._tracker = _KINDS[kind](place, folder)
        self._waiting: deque[Callable[[], None]] = deque(maxlen=MOST_WAITING)
        self._is_whole = self._ends = self._has_failed = False
        self._wake = Event()
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        self._put(partial(self._tracker.open, run))
        self._thread = Thread(target=self._send, name=f"{kind} of {run.name}", daemon=True)
        self._thread.start()

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Send the figures of a round that just ended."""
        self._put(partial(self._tracker.add, step, time.time(), dict(figures)))

    def finish(self, tables: Mapping[str, Sequence[Row]]) -> None:
        """Send the tables of a run and end it as finished; tables without rows are skipped."""
        for name, rows in tables.items():
            if rows:
                self._put(partial(self._tracker.add_table, name, rows))
        self._put(partial(self._tracker.close, is_whole=True))
        self._is_whole = True

    def close(self) -> None:
        """Send the remaining entries, for at most `END_S`. An unfinished run is marked as interrupted."""
        if not self._is_whole:
            self._put(partial(self._tracker.close, is_whole=False))
        self._ends = True
        self._wake.set()
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._warn(f"not everything was sent within {END_S:g} s")

    def _put(self, entry: Callable[[], None]) -> None:
        self._waiting.append(entry)
        self._wake.set()

    def _send(self) -> None:
        """Send entries in order. A failed entry and those after it wait for the next one; at the end each is tried once more."""
        is_last = False
        while not is_last:
            self._wake.wait()
            self._wake.clear()
            is_last = self._ends
            while self._waiting and (self._is_sent(self._waiting[0]) or is_last):
                self._waiting.popleft()

    def _is_sent(self, entry: Callable[[], None]) -> bool:
        try:
            entry()
        except Exception as error:  # noqa: BLE001 - an error of a tracker's package never ends the run
            reason = re.sub(r"//[^/\s]*@", "//", str(error) or type(error).__name__).splitlines()[0][:200]
            self._warn(f"nothing can be sent: {reason}")
            return False
        self._has_failed = False
        return True

    def _warn(self, reason: str) -> None:
        if not self._has_failed:
            _log.warning("%s: %s; the run continues", self._thread.name, reason)
        self._has_failed = True
