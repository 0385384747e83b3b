"""Finds copies of private rows inside sent tensors, at any position: scaled, offset, negated, reversed, coded, in any order.

A run is up to 64 consecutive numbers of a private tensor's row or column, one every 32 numbers. Every window of 24 sent numbers, along the
rows and along the columns, gets a key of 24 order comparisons, which neither scale nor offset changes. A window with the
key of a piece of a run is correlated with the whole run.

A run is found if its correlation exceeds 0.95 and the value that independent normal numbers exceed in one of a thousand
recordings. Weights of networks that were trained on related data stay below 0.85, images below 0.90 (digits).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from fedcg.values import Value

RUN, WINDOW = 64, 24
LEAST = 0.95
FALSE_ALARMS = 1e-3
"""Expected number of false alarms in a recording of independent normal numbers."""
_MOST_RUNS = 1 << 17  # more are thinned out evenly: a whole private row has many
_AT_ONCE = 1 << 16
_DISTINCT = 8  # numbers in a run: fewer, like a mask, resemble others by chance
_EVEN_SHARE = 1 / 8  # of a run's numbers that must carry its variance: one large number correlates with any other
_order = np.random.default_rng(0).permutation(WINDOW)
_PAIRS = [(int(a), int(b)) for turned in (_order, np.roll(_order, 3)) for a, b in turned.reshape(-1, 2)]

Array = NDArray[Any]
Floats = NDArray[np.float32]


def least_correlation(length: int, chance: float) -> float:
    """Return the absolute Pearson correlation that two independent rows of normal numbers exceed with this probability."""
    return float(np.sqrt(1 - betaincinv((length - 2) / 2, 0.5, chance)))


def _lines(value: Array) -> list[Floats]:
    """Return a tensor's rows, [N, length], and its columns: of the first axis against all others."""
    if not value.size:
        return []
    values = np.nan_to_num(value.astype(np.float32), posinf=0.0, neginf=0.0)
    rows = values.reshape(len(values) if values.ndim > 1 else 1, -1)
    return [rows, np.ascontiguousarray(rows.T)][: max(1, values.ndim)]


def _keys(values: Floats) -> NDArray[np.uint32]:
    """Return the key of each window of the last axis, [..., length - 23]; 0 for a constant window."""
    count = values.shape[-1] - WINDOW + 1
    found = np.zeros((*values.shape[:-1], count), np.uint32)
    for a, b in _PAIRS:
        found <<= np.uint32(1)
        found |= values[..., a : a + count] > values[..., b : b + count]
    return found


def _centred(rows: Floats) -> Floats:
    centred = rows - rows.mean(1, keepdims=True)
    units: Floats = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), np.float32(1e-20))
    return units


class _Runs(Value):
    """All runs of one length, each as it is, negated, reversed, and both.

    Attributes:
        units: [V, length], centred, of norm 1; `owners`: [V] index of the private tensor.
        keys: sorted keys of windows in the runs; `rows` and `starts`: of the window.
    """

    units: Floats
    owners: NDArray[np.int64]
    keys: NDArray[np.uint32]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]

    @staticmethod
    def of(runs: Floats, owners: NDArray[np.int64]) -> _Runs:
        units, length = _centred(runs), runs.shape[1]
        distinct = (np.diff(np.sort(runs, axis=1)) > 0).sum(1) + 1
        kept = (distinct >= _DISTINCT) & ((units**4).sum(1) * length * _EVEN_SHARE <= 1)
        thinned = np.arange(kept.sum()) % (kept.sum() // _MOST_RUNS + 1) == 0
        thinned[np.unique(owners[kept], return_index=True)[1]] = True  # some of every tensor
        kept[kept] = thinned
        turned = units[kept]
        turned = np.concatenate([turned, -turned, turned[:, ::-1], -turned[:, ::-1]])
        starts = np.unique([*range(0, length - WINDOW, WINDOW), length - WINDOW])
        keys = _keys(turned)[:, starts].ravel()
        order = np.argsort(keys)
        order = order[np.searchsorted(keys, 1, sorter=order) :]
        return _Runs(turned, np.tile(owners[kept], 4), keys[order], order // len(starts), starts[order % len(starts)])

    def near(self, sent: Floats, at: NDArray[np.int64], keys: NDArray[np.uint32]) -> Iterator[tuple[Array, Array]]:
        """Yield owners and correlations of the runs with the keys of windows at some places of sent numbers."""
        first, last = (np.searchsorted(self.keys, keys, side) for side in ("left", "right"))
        counts, length = last - first, self.units.shape[1]
        entries = np.repeat(first + counts - counts.cumsum(), counts) + np.arange(counts.sum())
        begins = np.repeat(at, counts) - self.starts[entries]
        inside = (begins >= 0) & (begins + length <= sent.size)
        begins, rows = begins[inside], self.rows[entries[inside]]
        for some in range(0, len(rows), _AT_ONCE):
            chosen = rows[some : some + _AT_ONCE]
            windows = _centred(sent[begins[some : some + _AT_ONCE, None] + np.arange(length)])
            yield self.owners[chosen], np.abs((windows * self.units[chosen]).sum(1))


def _all_runs(private: Sequence[Array]) -> list[_Runs]:
    found: dict[int, list[tuple[Floats, int]]] = {}
    first = {value.tobytes(): at for at, value in reversed(list(enumerate(private)))}
    for at in sorted(first.values()):
        for lines in _lines(private[at]):
            rows = lines if lines.shape[1] >= WINDOW else lines.reshape(1, -1)
            length = min(RUN, rows.shape[1])
            starts = {*range(0, rows.shape[1] - length, RUN // 2), rows.shape[1] - length} if length >= WINDOW else ()
            found.setdefault(length, []).extend((rows[:, start : start + length], at) for start in sorted(starts))
    return [
        _Runs.of(
            np.concatenate([rows for rows, _ in some]), np.repeat([at for _, at in some], [len(r) for r, _ in some])
        )
        for some in found.values()
        if some
    ]


def searchable(private: Sequence[Array]) -> int:
    """Return how many tensors have a run that `copied_rows` can find."""
    runs = _all_runs(private)
    return len({int(owner) for group in runs for owner in group.owners[group.rows]})


def copied_rows(sent: Sequence[Array], private: Sequence[Array]) -> dict[tuple[int, int], float]:
    """Find private rows and columns in sent tensors.

    Args:
        sent: tensors of any shape and type, coded ones also decoded.
        private: tensors; rows of fewer than 24 numbers count as one. Too few numbers, or too few distinct ones, are
            left out. Of equal tensors only the first counts.

    Returns:
        The largest absolute correlation, by index of the sent and of the private tensor; only those above the threshold.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # a number such as 1e30 makes its row no match
        return _copied_rows(sent, private)


def _copied_rows(sent: Sequence[Array], private: Sequence[Array]) -> dict[tuple[int, int], float]:
    groups = _all_runs(private)
    known = np.zeros(1 << len(_PAIRS), bool)
    for group in groups:
        known[group.keys] = True
    compared = sum(min(2, max(1, value.ndim)) * value.size for value in sent) * sum(len(one.owners) for one in groups)
    found: dict[tuple[int, int], float] = {}
    for number, value in enumerate(sent):
        for lines in _lines(value):
            flat = lines.ravel()
            keys = _keys(flat) if flat.size >= WINDOW else np.zeros(0, np.uint32)
            at = np.flatnonzero(known[keys])
            for group in groups if len(at) else ():
                least = max(LEAST, least_correlation(group.units.shape[1], FALSE_ALARMS / compared))
                for owners, correlations in group.near(flat, at, keys[at]):
                    for hit in np.flatnonzero(correlations >= least):
                        pair = number, int(owners[hit])
                        found[pair] = max(found.get(pair, 0.0), min(1.0, float(correlations[hit])))
    return found
