"""Reads the records of simulated runs from a folder, strictly and within bounds. Independent of tables; imports no torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import BaseModel, ValidationError

from experiments.errors import OptionError
from fedcg.errors import NOT_FOUND
from fedcg.learning.defences.params import LEAST_SPREAD
from fedcg.learning.spec import ParameterValue
from fedcg.text_output import wrong_value
from fedcg.values import Value

# A record of 250 rounds and 20 clients takes about 300 KB.
MAX_RECORD_BYTES = 8 * 1024 * 1024
MAX_RECORDS = 50_000
_Column = list[float | None]


class _Part(BaseModel, frozen=True, allow_inf_nan=False):
    """A part of a record; unused fields are ignored."""


class Curve(_Part):
    """The used columns of a client's curve."""

    validation: _Column = []
    after: _Column = []


class ClientRecord(_Part):
    """One client's figures; accuracies are shares of 1."""

    id: str
    accuracy_personal: float | None = None
    accuracy_local: float | None = None
    accuracy_deployed: float | None = None
    accuracy_ema: float | None = None
    below_local: bool | None = None
    failures: list[object] = []
    curve: Curve = Curve()


class Network(_Part):
    """The run's networks."""

    split: str


class RunRecord(_Part):
    """One simulated run, format 2.

    Attributes:
        paper: the preset of the run; None without one.
        reduced: differences from the published setting: name to [published, run].
        mean: means over clients; accuracies are shares of 1.
        server_failures: rounds whose updates were not merged.
        defended: facts about the data defence by client.
        file: name of the record's file.
    """

    format: Literal[2]
    kind: Literal["simulation"]
    date: str = ""
    paper: str | None = None
    reduced: dict[str, tuple[object, object]] = {}
    method: str
    variant: str = ""
    seed: int
    data: str
    partition: str
    rounds: int
    setting: dict[str, object]
    params: dict[str, ParameterValue]
    network: Network
    mean: dict[str, float | None]
    clients: list[ClientRecord]
    server_failures: list[object] = []
    defended: dict[str, dict[str, str]] = {}
    file: str = ""

    @property
    def base(self) -> str | None:
        """The preset's name without the budget."""
        return None if self.paper is None else self.paper.partition("@")[0]

    @property
    def collapsed(self) -> bool:
        """Whether a client's generated images share a texture (`LEAST_SPREAD`), or are not known not to, so that the run tests no claim."""
        made = [facts for facts in self.defended.values() if "spread" in facts]
        return any(float(one["spread"]) < LEAST_SPREAD * float(one.get("real_spread", "inf")) for one in made)

    def figure(self, name: str) -> float | None:
        """Return a mean over clients in percent; for the moving average and the last download, records only have values by client."""
        if name == "download_last":
            return self.after_download(last=True)
        share = self.mean.get(name)
        if name == "accuracy_ema":
            told = [client.accuracy_ema for client in self.clients if client.accuracy_ema is not None]
            share = fmean(told) if told else None
        return None if share is None else 100.0 * share

    def validation(self, *, last: bool) -> float | None:
        """Return the mean over clients of the last or the best validation accuracy, in percent."""
        columns = ([value for value in client.curve.validation if value is not None] for client in self.clients)
        return _percent([values[-1] if last else max(values) for values in columns if values])

    def after_download(self, *, last: bool) -> float | None:
        """Return the mean over clients of the accuracy with the round's aggregate loaded, in percent.

        Args:
            last: in the last round; else at each client's best validation round.
        """
        if not last:
            return self.figure("accuracy_after")
        ended = [client.curve.after[-1] for client in self.clients if client.curve.after]
        return _percent([value for value in ended if value is not None])


def _percent(values: Sequence[float]) -> float | None:
    return 100.0 * sum(values) / len(values) if values else None


class Folder(Value):
    """The content of a folder of runs.

    Attributes:
        runs: the simulated runs, by file name.
        damaged: (file, reason) of unreadable files.
    """

    runs: tuple[RunRecord, ...]
    damaged: tuple[tuple[str, str], ...]


def read_folder(folder: Path) -> Folder:
    """Read every `*.json` of a folder.

    Raises:
        OptionError: not a folder, or too many files.
    """
    if not folder.is_dir():
        raise OptionError(f"{folder} is not a folder of runs: choose one with --runs", exit_code=NOT_FOUND)
    paths = sorted(path for path in folder.glob("*.json") if not path.name.startswith("."))
    if len(paths) > MAX_RECORDS:
        raise OptionError(f"{folder} holds {len(paths)} files, more than {MAX_RECORDS}: choose the folder of the runs")
    runs, damaged = [], []
    for path in paths:
        try:
            runs += _read(path)
        except (OSError, ValueError, RecursionError) as error:  # noqa: PERF203 - each file separately
            damaged.append((path.name, _reason(error)))
    return Folder(tuple(runs), tuple(damaged))


def _read(path: Path) -> list[RunRecord]:
    """Return the run in a file; None for a demo, which belongs to no table."""
    size = path.stat().st_size
    if size > MAX_RECORD_BYTES:
        raise ValueError(f"{size} bytes are too large for a record")
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - bad content, not a bad call
    return [] if content.get("format") == 1 else [RunRecord.model_validate({**content, "file": path.name})]


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {wrong_value(first)}"
    return str(error) or type(error).__name__
