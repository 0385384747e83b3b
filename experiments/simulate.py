"""A federation in one process: the data of a demo, the functions of agents and coordinator, one JSON per run. Uses torch.

With one seed it trains what a demo of that seed trains: the same folders, the same split, the same roots of randomness.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from experiments.demo import versions
from experiments.options import Setting, root_secret
from experiments.partitions import Prepared, prepare
from experiments.sources import write_digits
from experiments.summary import mean
from fedcg.learning.data import load_folder, split_by_hash
from fedcg.learning.initial import complete_spec
from fedcg.learning.simulation import ClientData, Party, Roots, Simulation, simulate
from fedcg.learning.spec import FederationSpec, plan_from_mapping

FIGURES = (
    "accuracy_local",
    "accuracy_personal",
    "accuracy_after",
    "accuracy_common_local",
    "accuracy_common_personal",
    "consistency",
    "generator_spread",
)
# As the agent splits a folder that has a test part.
SPLIT = {"train": 0.9, "val": 0.1}


def client_data(root: Path, spec: FederationSpec) -> ClientData:
    """Load a client's folder and split it as its agent would."""
    images, entries = load_folder(root, spec.classes, spec.image)
    row = {entry.path: number for number, entry in enumerate(entries)}
    test = [entry for entry in entries if entry.path.startswith("test/")]
    splits = split_by_hash([entry for entry in entries if not entry.path.startswith("test/")], SPLIT)
    train, val, held_out = (
        images.rows([row[entry.path] for entry in chosen]) for chosen in (splits["train"], splits["val"], test)
    )
    return ClientData(train, val, held_out)


def roots_of(seed: int, clients: tuple[str, ...]) -> Roots:
    """The roots that a demo of this seed writes into its processes' folders."""
    devices = {client: root_secret(seed, f"device {client}") for client in clients}
    return Roots(root_secret(seed, "cohort"), root_secret(seed, "coordinator"), devices)


def run_simulation(setting: Setting, *, threads: int, console: Console) -> dict[str, Any]:
    """Prepare the data, simulate, and return the run's record.

    Raises:
        SourceError: the data can't be used.
        DivergedError: a client or the student diverged.
    """
    torch.set_num_threads(threads)
    source = setting.source()
    spec = complete_spec(plan_from_mapping(setting.plan(source)))
    with tempfile.TemporaryDirectory(prefix="fedcg-simulate-") as folder:
        root = Path(folder)
        prepared = prepare(
            source or write_digits(root / "source"),
            root,
            clients=setting.clients,
            partition=setting.checked_partition(),
            seed=setting.seed,
            images_per_client=setting.images_per_client,
        )
        datasets = {client.id: client_data(client.root, spec) for client in prepared.clients}
        common, _ = load_folder(prepared.common, spec.classes, spec.image)
    started = time.perf_counter()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"{spec.method}, seed {setting.seed}", total=spec.rounds * len(datasets))

        def advance(now: Simulation) -> None:
            bar.update(task, advance=len(datasets), description=f"{spec.method}, round {now.rounds} of {spec.rounds}")

        party = Party(spec, datasets, roots_of(setting.seed, tuple(sorted(datasets))), common)
        result = simulate(party, on_round=advance)
    return record_of(setting, spec, prepared, result, time.perf_counter() - started)


def record_of(
    setting: Setting, spec: FederationSpec, prepared: Prepared, result: Simulation, seconds: float
) -> dict[str, Any]:
    """The JSON of one run: what was asked, what came out, and what it takes to repeat it."""
    clients: list[dict[str, Any]] = [
        {
            "id": client.id,
            "train_images": sum(client.train),
            "test_images": sum(client.test),
            **_accuracies(result, client.id),
            "curve": [vars(record) for record in result.curves[client.id]],
        }
        for client in prepared.clients
    ]
    return {
        "format": 1,
        "method": spec.method,
        "rounds": spec.rounds,
        "data": setting.data if setting.data == "digits" else Path(setting.data).name,
        "setting": setting.model_dump(mode="json", exclude={"data"}),
        "spec": spec.digest,
        "params": spec.params,
        "mean": {name: mean([client[name] for client in clients]) for name in FIGURES},
        "clients": clients,
        "seconds": {
            "total": round(seconds, 2),
            "aggregate": [round(value, 3) for value in result.aggregate_seconds],
            "local_round_mean": mean(
                [record.seconds for curve in result.curves.values() for record in curve if record.seconds is not None]
            ),
        },
        "versions": versions(),
        "machine": {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
    }


def _accuracies(result: Simulation, client: str) -> Mapping[str, float | None]:
    """A client's figures at its best validation round, before the download, and its shadow's at the shadow's best."""
    best, last = result.best(client), result.curves[client][-1]
    if client not in result.shadows:
        best = replace(best, local_accuracy=best.accuracy, local_common=best.common)
    local = result.best_local(client) if client in result.shadows else best
    return {
        "accuracy_local": local.local_accuracy,
        "accuracy_personal": best.accuracy,
        "accuracy_after": best.accuracy_after,
        "accuracy_common_local": local.local_common,
        "accuracy_common_personal": best.common,
        "consistency": last.consistency,
        "generator_spread": last.spread,
    }
