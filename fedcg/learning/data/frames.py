"""Tables and signals from files, as samples for `fedcg.Client`: CSV and Parquet (with pandas) and WAV (with scipy).

Preprocessing is a module in front of the user's layers, so the exported model includes it.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcg.errors import NOT_FOUND, told
from fedcg.imaging import is_named_as_image
from fedcg.learning.data.input_layers import LogMel, OneHot
from fedcg.learning.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

Columns = Mapping[str, Sequence[str] | None]
_Floats = NDArray[np.float32]
_POINT_ZERO = re.compile(r"(?<=\d)\.0+$")
_BLOCK = 5  # overlapping windows are split in blocks of this many window lengths
_FULL_SCALE = {"uint8": 128.0, "int16": 2.0**15, "int32": 2.0**31, "float32": 1.0, "float64": 1.0}


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples with labels, as `train` and `test` of `fedcg.Client`, or as a map-style data set of (x, y) for a trainer.

    Attributes:
        inputs: [N, *shape] float32.
        labels: [N] int64, the index of a class; without classes [N] float32.
        classes: class names that labels index; None: labels are numbers.
        blocks: the block that each sample was cut from; a block is never divided by a split. Empty: samples are split
            individually.
    """

    inputs: _Floats
    labels: NDArray[Any]
    classes: tuple[str, ...] | None = None
    blocks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[_Floats, Any]:
        return self.inputs[row], self.labels[row]


@dataclass(frozen=True, eq=False)
class Table(Samples):
    """The rows of a table. A category is the index of its value, -1 for an unknown value.

    Attributes:
        columns: as passed to `table`.
    """

    columns: Columns = field(default_factory=dict)

    def one_hot(self) -> OneHot:
        """The layer in front of a network that one-hot encodes categories. Its `width` is the network's input size."""
        return OneHot(self.columns)


@dataclass(frozen=True, eq=False)
class Signals(Samples):
    """Windows [N, channels, samples].

    Attributes:
        rate: samples per second, for sound.
    """

    rate: int = 0

    def log_mel(self, bands: int = 40, n_fft: int = 512, hop: int = 160) -> LogMel:
        """The layer in front of a network that turns windows into log-mel spectrograms [B, channels, bands, frames].

        Args:
            bands: number of mel bands.
            n_fft: samples per frame.
            hop: samples between the starts of two frames.

        Raises:
            DataError: not sound, or windows shorter than a frame.
        """
        if not self.rate or not 16 <= n_fft <= self.inputs.shape[2] or hop < 1 or bands < 1:
            raise DataError(
                f"log_mel: needs sound, an n_fft from 16 to the window's {self.inputs.shape[2]} samples, and a hop of 1 or more"
            )
        return LogMel(self.rate, bands, n_fft, hop)


def table(
    source: str | Path | pd.DataFrame, columns: Columns, label: str = "label", classes: Sequence[str] | None = None
) -> Table:
    """Read the rows of a table.

    Args:
        source: a CSV file (UTF-8, a header, commas), a Parquet file, or a pandas.DataFrame.
        columns: the network's inputs, in this order: name to None for a number, or to the values of a category.
        label: the column of labels.
        classes: the class names in that column; None: it holds numbers.

    Raises:
        DataError: names the file, the row (from 1, after the header), the column and the problem.
    """
    if not isinstance(columns, Mapping) or not columns or label in columns:
        raise DataError('columns: use a mapping such as {"age": None, "ward": ["a", "b"]}, without the label')
    frame, where = _frame(source, [*columns, label])
    read = [
        _numbers(frame, name, where) if values is None else _codes(frame, name, values, where)
        for name, values in columns.items()
    ]
    for name, found in zip(columns, read, strict=True):
        if columns[name] is not None and found.max() < 0:
            warnings.warn(f"{where}: column {name}: no row has one of the values {columns[name]}", stacklevel=2)
    labels, named = _labels(frame, label, classes, where), None if classes is None else tuple(map(str, classes))
    return Table(np.stack(read, axis=1).astype(np.float32), labels, named, columns=columns)


def signals(
    source: str | Path | pd.DataFrame,
    classes: Sequence[str],
    samples: int,
    hop: int | None = None,
    *,
    channels: Sequence[str] = (),
    label: str = "label",
    group: str | None = None,
    rate: int = 0,
) -> Signals:
    """Cut recordings into windows. An incomplete window at the end of a recording is dropped.

    Args:
        source: a folder of WAV files, `CLASS/*.wav`, mixed to one channel; or a table as for `table` with one row per
            time step. Consecutive rows with one label and one group form a recording.
        classes: names of the classes.
        samples: length of a window.
        hop: samples between the starts of two windows; None: windows do not overlap.
        channels: for tables, the columns to read.
        label: for tables, the column of class names.
        group: for tables, a column that separates recordings, such as the recording's number. No window crosses a
            change.
        rate: for sound, samples per second; files are not resampled.

    Raises:
        DataError: names the file, the row, the column and the problem.
    """
    step = samples if hop is None else hop
    if not isinstance(samples, int) or not isinstance(step, int) or samples < 2 or step < 1:
        raise DataError(f"signals: samples is {samples} and hop {step}: samples must be 2 or more, and hop 1 or more")
    sound = not channels
    recordings = _sound(Path(str(source)), classes, rate) if sound else _runs(source, channels, label, group, classes)
    cut = [(found, number) for number, recording in recordings for found in _windows(recording, samples, step)]
    if not cut:
        raise DataError(f"{_where(source)}: no recording has {samples} samples of one class, the length of a window")
    labels = np.concatenate([np.full(len(found), number, dtype=np.int64) for found, number in cut])
    blocks = [block for found, _ in cut for block in [_name_of(found)] * len(found)]
    inputs = np.concatenate([found for found, _ in cut])
    return Signals(inputs, labels, tuple(map(str, classes)), tuple(blocks) if step < samples else (), rate=rate)


def _name_of(block: _Floats) -> str:
    """Name a recording by its first non-silent window, so that the name stays when the recording grows."""
    first = next((window for window in block if window.min() != window.max()), block[0])
    return hashlib.sha256(first.tobytes()).hexdigest()


def _windows(recording: _Floats, samples: int, hop: int) -> Iterator[_Floats]:
    """[T, channels] to the windows of each block, [n, channels, samples]; overlapping windows do not cross blocks."""
    length = _BLOCK * samples if hop < samples else max(len(recording), 1)
    for start in range(0, len(recording) - samples + 1, length):
        block = recording[start : start + length]
        if len(block) >= samples:
            yield np.lib.stride_tricks.sliding_window_view(block, samples, axis=0)[::hop]


def _where(source: object) -> str:
    return str(source) if isinstance(source, (str, Path)) else "the table"


def _frame(source: Any, names: Sequence[str]) -> tuple[pd.DataFrame, str]:
    where, pandas = _where(source), _package("pandas", _where(source))
    frame = source
    if not isinstance(source, pandas.DataFrame):
        if not (path := Path(source)).is_file():
            raise DataError(f"{path}: no such file", exit_code=NOT_FOUND)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", pandas.errors.ParserWarning)  # rows longer than the header
                if path.suffix == ".parquet":
                    frame = pandas.read_parquet(path)
                else:
                    frame = pandas.read_csv(path, dtype=str, index_col=False, na_filter=False)
                    frame.columns = pandas.read_csv(path, dtype=str, header=None, nrows=1, na_filter=False).iloc[0]
        except Exception as error:
            raise DataError(f"{path}: can't be read as a table: {told(error)}") from error
    there = list(frame.columns)
    if wrong := [name for name in names if there.count(name) != 1]:
        fault = "is duplicated" if wrong[0] in there else f"is missing; columns are {', '.join(map(str, there[:20]))}"
        raise DataError(f"{where}: column {wrong[0]} {fault}")
    if not len(frame):
        raise DataError(f"{where}: has no rows")
    return frame, where


def _package(name: str, where: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise DataError(f"{where}: needs the package {name}: pip install 'fedcg-edge[tables]'") from error


def _numbers(frame: pd.DataFrame, name: str, where: str) -> NDArray[Any]:
    if frame[name].dtype.kind in "mMc":
        raise DataError(f"{where}: column {name} is {frame[name].dtype}: convert it to numbers, such as hours or days")
    column = _package("pandas", where).to_numeric(frame[name], errors="coerce")
    numbers: NDArray[Any] = column.to_numpy(dtype=np.float64, na_value=np.nan)
    if len(wrong := np.flatnonzero(~(np.abs(numbers) <= np.finfo(np.float32).max))):
        raise DataError(
            f"{where}: row {wrong[0] + 1}: column {name}: not a float32 number; fill in missing values first, e.g. in a "
            "pandas.DataFrame, and pass that"
        )
    return numbers


def _codes(frame: pd.DataFrame, name: str, values: Sequence[str], where: str) -> NDArray[Any]:
    """The index of each row's value; -1 for an unknown value."""
    if isinstance(values, str) or not values or len(set(values)) < len(values):
        raise DataError(f"{where}: column {name}: {values!r} must be a list of distinct values")
    place, column = {str(value): number for number, value in enumerate(values)}, frame[name]
    texts = ["" if gone else str(cell).strip() for cell, gone in zip(column, column.isna(), strict=True)]
    # If the column has missing numbers, pandas turns 1 into 1.0.
    return np.array([place.get(text, place.get(_POINT_ZERO.sub("", text), -1)) for text in texts])


def _labels(frame: pd.DataFrame, name: str, classes: Sequence[str] | None, where: str) -> NDArray[Any]:
    if classes is None:
        return _numbers(frame, name, where).astype(np.float32)
    labels = _codes(frame, name, classes, where)
    if len(wrong := np.flatnonzero(labels < 0)):
        raise DataError(
            f"{where}: row {wrong[0] + 1}: column {name}: unknown class; the classes are {', '.join(map(str, classes[:20]))}"
        )
    return labels.astype(np.int64)


def _runs(
    source: Any, channels: Sequence[str], label: str, group: str | None, classes: Sequence[str]
) -> Iterator[tuple[int, _Floats]]:
    """Label and numbers [T, channels] of each run of consecutive rows with one label and one group."""
    frame, where = _frame(source, [*channels, label, *([] if group is None else [group])])
    labels = _labels(frame, label, classes, where)
    numbers = np.stack([_numbers(frame, name, where) for name in channels], axis=1).astype(np.float32)
    changes = labels[1:] != labels[:-1]
    if group is not None:
        groups = frame[group].astype(str).to_numpy()
        changes = changes | (groups[1:] != groups[:-1])
    starts = [0, *(np.flatnonzero(changes) + 1), len(labels)]
    return ((int(labels[start]), numbers[start:end]) for start, end in itertools.pairwise(starts))


def _sound(root: Path, classes: Sequence[str], rate: int) -> Iterator[tuple[int, _Floats]]:
    if not root.is_dir():
        raise DataError(f"{root}: no folder with CLASS/*.wav; for a table, set channels", exit_code=NOT_FOUND)
    if unknown := sorted({path.name for path in root.iterdir() if path.is_dir()} - set(classes)):
        raise DataError(f"{root / unknown[0]}: unknown class; the classes are {', '.join(classes[:20])}")
    for number, name in enumerate(classes):
        for path in sorted(one for one in (root / name).glob("*") if is_named_as_image(one, frozenset({".wav"}))):
            yield number, _read_wav(path, rate)


def _read_wav(path: Path, rate: int) -> _Floats:
    """[T, 1], scaled to full scale 1."""
    wavfile = _package("scipy.io.wavfile", str(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", wavfile.WavFileWarning)
            warnings.filterwarnings("ignore", "Chunk", wavfile.WavFileWarning)  # chunks other than the sound
            found, sound = wavfile.read(path)
    except Exception as error:
        raise DataError(f"{path}: can't be read as WAV: {told(error)}") from error
    if found != rate:
        raise DataError(f"{path}: has {found} Hz, but rate is {rate}: convert the file; files are not resampled")
    if (scale := _FULL_SCALE.get(str(sound.dtype))) is None:
        raise DataError(f"{path}: samples of type {sound.dtype} are not supported")
    mixed = sound.reshape(len(sound), sound[:1].size or 1).astype(np.float64) - (
        scale if sound.dtype == np.uint8 else 0
    )
    if not np.isfinite(mixed).all():
        raise DataError(f"{path}: sample {int(np.isfinite(mixed).all(1).argmin())} is not finite")
    return np.asarray(mixed.mean(axis=1, keepdims=True) / scale, dtype=np.float32)
