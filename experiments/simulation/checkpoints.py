"""Where a simulation stands after a round, on disk: tensors as safetensors, the rest as JSON, replaced in one rename.

For this machine alone: it holds private parts of all simulated clients. No pickle.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from experiments.simulation.batch import RunSetting
from fedcg.files import fsync_path
from fedcg.learning.method import Aggregate, ClientState, ServerState, Weights
from fedcg.learning.simulation.simulation import Simulation
from fedcg.wire.parts import Part

CHECKPOINT_FORMAT = 1
_TENSORS, _REST = "tensors.safetensors", "state.json"
_HELD_ELSEWHERE = ("server", "states", "shadows", "sent")  # fields of a simulation: in tensors, or in no checkpoint


class Checkpoints:
    """The checkpoints of one run; only the newest is kept.

    Args:
        folder: made when it is first written to.
        setting: what decides the run's numbers; the checkpoint of another setting does not count.
    """

    def __init__(self, folder: Path, setting: RunSetting) -> None:
        self._folder = folder
        self._setting = setting

    def save(self, now: Simulation, seconds: float) -> None:
        """Write a checkpoint, and how long the run has taken so far; a crash leaves the one before it in place."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        target = self._folder / f"round-{now.rounds:06d}"
        fresh = self._folder / f".{target.name}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        save_file(dict(_tensors(now)), fresh / _TENSORS)
        (fresh / _REST).write_text(json.dumps({**_rest(now), "setting": self._setting.published(), "seconds": seconds}))
        for path in (fresh / _TENSORS, fresh / _REST, fresh):
            fsync_path(path)
        shutil.rmtree(target, ignore_errors=True)
        fresh.replace(target)
        fsync_path(self._folder)
        for other in self._saved():
            if other != target:
                shutil.rmtree(other, ignore_errors=True)

    def rounds(self) -> int:
        """How many rounds were done then; tensors are not read."""
        return max((int(path.name.removeprefix("round-")) for path in self._saved()), default=0)

    def newest(self) -> tuple[Simulation, float] | None:
        """Where the newest whole checkpoint of this setting stands, and the run's seconds until then; None without one."""
        found = (self._read(folder) for folder in reversed(self._saved()))
        return next((one for one in found if one is not None), None)

    def _read(self, folder: Path) -> tuple[Simulation, float] | None:
        try:
            rest = json.loads((folder / _REST).read_text())
            if self._setting.is_same(rest["setting"]):
                return _simulation(load_file(folder / _TENSORS), rest), float(rest["seconds"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return None  # cut off by a power loss: the one before it counts
        return None

    def remove(self) -> None:
        """Forget all of them."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _saved(self) -> list[Path]:
        return sorted(self._folder.glob("round-*"))


def _tensors(now: Simulation) -> Iterator[tuple[str, torch.Tensor]]:
    def keyed(
        prefix: str, groups: Mapping[Part, Weights] | Mapping[str, Weights]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for group, weights in groups.items():
            for name, tensor in weights.items():
                key = f"{prefix}/{group.value if isinstance(group, Part) else group}/{name}"
                # a copy of its own: safetensors refuses tensors that share storage, as clients do before their first round
                yield key, tensor.detach().clone(memory_format=torch.contiguous_format)

    yield from keyed("aggregate", now.server.aggregate.parts)
    yield from keyed("extra", now.server.extras)
    for kind, states in (("state", now.states), ("shadow", now.shadows)):
        for client, state in states.items():
            yield from keyed(f"{kind}/{client}", state.parts)
            yield from keyed(f"{kind}-extra/{client}", state.extras)


def _rest(now: Simulation) -> dict[str, Any]:
    figures = asdict(replace(now, server=ServerState(Aggregate({})), states={}, shadows={}, sent={}))
    return {
        "format": CHECKPOINT_FORMAT,
        **{name: value for name, value in figures.items() if name not in _HELD_ELSEWHERE},
        "label_distribution": now.server.aggregate.label_distribution,
        "parts": sorted(now.server.aggregate.parts),
        "extras": sorted(now.server.extras),
    }


def _simulation(tensors: Mapping[str, torch.Tensor], rest: Mapping[str, Any]) -> Simulation:
    if rest["format"] != CHECKPOINT_FORMAT:
        raise ValueError(f"checkpoint format {rest['format']!r}")
    tree: dict[str, dict[str, dict[Any, Any]]] = {}
    for key, tensor in tensors.items():
        kind, owner, *names = key.split("/", 3 if key.startswith(("state", "shadow")) else 2)
        branch = tree.setdefault(kind, {}).setdefault(owner, {})
        if len(names) == 2:
            branch.setdefault(names[0] if kind.endswith("-extra") else Part(names[0]), {})[names[1]] = tensor
        else:
            branch[names[0]] = tensor

    def states(kind: str) -> dict[str, ClientState]:
        extras = tree.get(f"{kind}-extra", {})
        return {
            client: ClientState(parts, extras.get(client, {})) for client, parts in sorted(tree.get(kind, {}).items())
        }

    published = rest["label_distribution"]
    aggregate = Aggregate(
        {Part(name): tree["aggregate"][name] for name in rest["parts"]}, None if published is None else tuple(published)
    )
    extras = {name: tree.get("extra", {}).get(name, {}) for name in rest["extras"]}
    held = {"server": ServerState(aggregate, extras), "states": states("state"), "shadows": states("shadow")}
    return TypeAdapter(Simulation).validate_python({**rest, **held})
