"""Local-only accuracies: a run of `local` gives them to every other run of its table, budget, seed and learning rate."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.papers.lines import key_of, table_differences
from experiments.papers.records import ClientRecord, RunRecord

_LOCAL = "local"
_Key = tuple[str | None, str, str, int, str]


def beside_local(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs, with the local-only accuracy of each client that was trained without a shadow.

    A shadow and a run of `local` are the same training: same data, split, weights and streams, no aggregate.
    """
    alone: dict[_Key, dict[str, float]] = {}
    for run in sorted(runs, key=lambda run: (run.date, run.file)):
        if run.method == _LOCAL:
            figures = {client.id: client.accuracy_personal for client in run.clients}
            alone[_key(run)] = {name: figure for name, figure in figures.items() if figure is not None}
    return [run if run.method == _LOCAL else _compared(run, alone.get(_key(run), {})) for run in runs]


def _key(run: RunRecord) -> _Key:
    lr = run.params.get("lr", run.setting.get("lr"))
    return run.base, key_of(table_differences(run)), run.network.split, run.seed, str(lr)


def _compared(run: RunRecord, alone: dict[str, float]) -> RunRecord:
    return run.model_copy(update={"clients": [_beside(client, alone.get(client.id)) for client in run.clients]})


def _beside(client: ClientRecord, local: float | None) -> ClientRecord:
    if client.accuracy_local is not None or local is None or client.accuracy_personal is None:
        return client
    return client.model_copy(update={"accuracy_local": local, "below_local": client.accuracy_personal < local})
