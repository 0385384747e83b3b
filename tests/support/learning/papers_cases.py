"""Hand-made records of runs, as `fedcg simulate` writes them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CIFAR = "fedcg:table1:cifar10-4"


def record(
    method: str,
    seed: int,
    personal: float,
    *,
    paper: str | None = CIFAR,
    local: float | None = None,
    variant: str = "",
    params: dict[str, Any] | None = None,
    setting: dict[str, Any] | None = None,
    reduced: dict[str, Any] | None = None,
    last: float | None = None,
    after: float | None = None,
    whole: float | None = None,
    validation: Sequence[float | None] = (0.4,),
    generator: str = "conv",
    network: str = "lenet5",
    up: int = 3_799_432,
) -> dict[str, Any]:
    """One run of two clients; accuracies are shares of 1, the second client is 0.02 above the first."""
    clients: list[dict[str, Any]] = [
        {
            "id": f"client-{number}",
            "accuracy_personal": personal + shift,
            "accuracy_local": local,
            "below_local": None if local is None else personal + shift < local,
            "failures": [],
            "curve": {"validation": list(validation)},
        }
        for number, shift in ((1, -0.01), (2, 0.01))
    ]
    return {
        "format": 2,
        "kind": "simulation",
        "date": "2026-01-01",
        "paper": paper,
        "reduced": reduced or {},
        "method": method,
        "variant": variant,
        "seed": seed,
        "data": "cifar10",
        "partition": "iid",
        "rounds": 100,
        "setting": {"rounds": 100, "lr": 3e-4, "generator": generator, "seed": seed, **(setting or {})},
        "params": params or {},
        "network": {"split": network, "generator": generator, "discriminator": generator, "noise_dim": 100},
        "bytes": {"up": up, "down": up},
        "mean": {
            "accuracy_personal": personal,
            "accuracy_local": local,
            "accuracy_last": last,
            "accuracy_after": after,
            "global_accuracy_last": whole,
            "global_accuracy_best": whole,
        },
        "clients": clients,
    }


def write(folder: Path, *records: dict[str, Any]) -> Path:
    """Write records into a folder, numbered."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(records):
        (folder / f"run-{number:03d}.json").write_text(json.dumps(content))
    return folder
