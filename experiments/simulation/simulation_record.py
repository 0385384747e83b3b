"""The record of one simulated run, format 2: settings, results, and what is needed to repeat it.

It may be published: it has no paths of this machine, weights or images. Curves are stored by column, rounded to five
digits, so that 250 rounds of ten clients take less than 150 KB.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from experiments.demo.report import mean
from experiments.record import machine, versions
from experiments.simulation.batch import PlannedRun
from fedcg.files import READABLE, replace_durably
from fedcg.learning.mechanisms.dp_sgd import Spent
from fedcg.learning.registry import get_method
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Failure, Simulation
from fedcg.learning.simulation.tasks import RoundRecord
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifacts import codecs_for
from fedcg.wire.artifacts.payload import data_bytes
from fedcg.wire.parts import Part, UpdateCodec

RECORD_FORMAT = 2
KIND = "simulation"
# Columns of a client's curve, and their fields of `RoundRecord`.
COLUMNS = {
    "round": "round",
    "accuracy": "accuracy",
    "validation": "validation",
    "common": "common",
    "after": "accuracy_after",
    "local": "local_accuracy",
    "loss": "loss",
    "consistency": "consistency",
    "spread": "spread",
}
_DIGITS = 5


def record_of(
    planned: PlannedRun,
    party: Party,
    result: Simulation,
    skipped: Sequence[tuple[str, str]],
    seconds: float,
    defended: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """Return the record of a finished run.

    Args:
        planned: the run's setting, and its differences from the published setting.
        party: the participants.
        result: the final state of the simulation.
        skipped: (file, reason) of unusable images; file names without folders.
        seconds: duration of the whole run, including parts before interruptions.
        defended: facts about the data defence by client; None or empty without one.
    """
    run, spec = planned.setting, party.spec
    method = get_method(spec.method)
    clients = [client_record(party, result, name) for name in sorted(result.states)]
    trained = [record.seconds for curve in result.curves.values() for record in curve if record.seconds is not None]
    accuracies = [accuracy for _, accuracy in result.global_accuracy]
    return {
        "format": RECORD_FORMAT,
        "kind": KIND,
        "date": datetime.now(tz=timezone.utc).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "paper": run.paper,
        "reduced": {name: list(pair) for name, pair in planned.reduced.items()},
        "method": spec.method,
        "variant": run.variant,
        **({"mechanisms": run.privacy.label} if run.privacy.is_on else {}),
        **({"defence": run.defence_label, "defended": defended} if defended else {}),
        "seed": run.seed,
        "data": run.data_name,
        "partition": run.partition,
        "rounds": result.rounds,
        "setting": run.published(),
        "spec": spec.digest,
        "params": spec.params,
        "network": spec.network.model_dump(mode="json"),
        "bytes": {
            "up": _bytes(spec, method.payload.up, spec.codec),
            "down": _bytes(spec, method.payload.down, spec.aggregate_codec),
            "up_artifact": _whole(mean([size for size in result.update_bytes if size])),
        },
        "mean": {
            **{
                name: _rounded(mean([client[name] for client in clients]))
                for name in figures_of(result, clients[0]["id"])
            },
            "global_accuracy_last": _rounded(accuracies[-1] if accuracies else None),
            "global_accuracy_best": _rounded(max(accuracies, default=None)),
        },
        "clients": clients,
        "global": {
            "round": [number for number, _ in result.global_accuracy],
            "accuracy": [_rounded(accuracy) for accuracy in accuracies],
        },
        "server_failures": _failures(result.server_failures),
        "seconds": {
            "total": round(seconds, 2),
            "local_round_mean": _rounded(mean(trained)),
            "aggregate": [round(value, 3) for value in result.aggregate_seconds],
        },
        "skipped": [{"file": name, "reason": reason} for name, reason in skipped],
    }


def _bytes(spec: FederationSpec, parts: frozenset[Part], codec: UpdateCodec) -> int:
    """Return the bytes of the encoded tensors of some parts, before compression."""
    layouts = {part: spec.layouts[part] for part in sorted(parts)}
    return data_bytes(layouts, codecs_for(layouts, codec, spec.with_base))


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def client_record(party: Party, result: Simulation, name: str) -> dict[str, Any]:
    """Return one client's figures, and its curves."""
    data = party.datasets[name]
    curve = result.curves[name]
    best = result.best(name)
    local = _local(result, name, best)
    below = None
    if name in result.shadows and best.accuracy is not None and local.local_accuracy is not None:
        below = best.accuracy < local.local_accuracy
    settings, spent = party.privacy_of(name).dp_sgd, result.spent.get(name)
    averaged = (
        {} if best.accuracy_ema is None else {"accuracy_ema": best.accuracy_ema, "accuracy_common_ema": best.common_ema}
    )
    epsilon = {} if settings is None else {"epsilon": (spent or Spent()).epsilon(settings.delta)}
    return {
        "id": name,
        "train_images": len(data.train),
        "val_images": len(data.val),
        "test_images": len(data.test),
        "common_images": None if party.common is None else len(party.common),
        "label_counts": list(data.train.label_counts()),
        **{key: _rounded(value) for key, value in {**figures_of(result, name), **averaged, **epsilon}.items()},
        "best_round": best.round,
        "deployed": _deployed_of(result, name)[0],
        "below_local": below,
        "failures": _failures(result.failures.get(name, ())),
        "shadow_failures": _failures(result.shadow_failures.get(name, ())),
        "warnings": _failures(result.warnings.get(name, ())),
        "curve": {
            column: [_rounded(getattr(record, of_record)) for record in curve] for column, of_record in COLUMNS.items()
        },
    }


def figures_of(result: Simulation, name: str) -> dict[str, float | None]:
    """Return the final figures of a client's models; the record also has their means over clients."""
    best, last, (_, accuracy, common) = result.best(name), result.curves[name][-1], _deployed_of(result, name)
    local = _local(result, name, best)
    return {
        "accuracy_personal": best.accuracy,
        "accuracy_local": local.local_accuracy,
        "accuracy_after": best.accuracy_after,
        "accuracy_last": last.accuracy,
        "accuracy_common_personal": best.common,
        "accuracy_common_local": local.local_common,
        "accuracy_common_after": last.common_after,
        "accuracy_deployed": accuracy,
        "accuracy_common_deployed": common,
        "consistency": last.consistency,
        "generator_spread": last.spread,
    }


def _deployed_of(result: Simulation, name: str) -> tuple[str, float | None, float | None]:
    """Return the name of the model with the lowest calibrated validation loss, and its accuracies on own and common test images.

    Candidates: own of the best round, last average or download, or local-only.
    """
    best, last = result.best(name), result.curves[name][-1]
    local = _local(result, name, best)
    candidates = {
        "own": (best, best.accuracy, best.common),
        "ema": (last, last.accuracy_ema, last.common_ema),
        "downloaded": (last, last.accuracy_after, last.common_after),
        "local": (local, local.local_accuracy, local.local_common),
    }
    chosen = min(candidates, key=lambda kind: candidates[kind][0].losses.get(kind, math.inf))
    return chosen, *candidates[chosen][1:]


def _local(result: Simulation, name: str, best: RoundRecord) -> RoundRecord:
    """Return the record with the local-only figures: the local-only model's best; for the method `local`, its own."""
    if name in result.shadows:
        return result.best_local(name)
    if result.server.aggregate.parts:
        return replace(best, local_accuracy=None, local_common=None)
    return replace(best, local_accuracy=best.accuracy, local_common=best.common)


def _failures(failures: Sequence[Failure]) -> list[dict[str, Any]]:
    return [{"round": failure.round, "reason": failure.reason} for failure in failures]


def _rounded(value: float | None) -> float | int | None:
    if value is None or isinstance(value, int):
        return value
    return round(value, _DIGITS) if math.isfinite(value) else None


def label_of(record: Mapping[str, Any]) -> str:
    """Return a run's name without the seed: method, variant, data defence and mechanisms."""
    return " ".join(
        filter(None, (record["method"], record["variant"], record.get("defence"), record.get("mechanisms")))
    )


def write_json(value: Mapping[str, Any], path: Path) -> None:
    """Write a record atomically."""
    replace_durably(path, json.dumps(value, separators=(",", ":")) + "\n", READABLE)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return all run records of a folder, by file name; each gets its file's stem as "name"."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # not a run record
        if isinstance(record, dict) and record.get("format") == RECORD_FORMAT and record.get("kind") == KIND:
            records.append({**record, "name": path.stem})
    return records
