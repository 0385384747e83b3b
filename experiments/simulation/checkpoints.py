"""Checkpoints of a simulation after a round: one file of tensors and plain values, replaced atomically.

Only for this machine: they contain private parts of all simulated clients. Read with `weights_only`, so that no code in
a file is run.
"""

import pickle
import shutil
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path

import torch
from pydantic import TypeAdapter

from experiments.simulation.batch import RunSetting
from fedcg.files import fsync_path
from fedcg.learning.simulation.simulation import Simulation

CHECKPOINT_FORMAT = 2


class Checkpoints:
    """The checkpoints of one run; only the newest is kept.

    Args:
        folder: created at the first write.
        setting: everything that determines the run's numbers; checkpoints of another setting are ignored.
    """

    def __init__(self, folder: Path, setting: RunSetting) -> None:
        self._folder = folder
        self._setting = setting

    def save(self, now: Simulation, seconds: float) -> None:
        """Write a checkpoint with the run's duration so far; after a crash the previous one remains."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        target = self._folder / f"round-{now.rounds:06d}.pt"
        fresh = target.with_suffix(".new")
        content = {"setting": self._setting.published(), "seconds": seconds, "now": _plain(replace(now, sent={}))}
        torch.save({"format": CHECKPOINT_FORMAT, **content}, fresh)
        fsync_path(fresh)
        fresh.replace(target)
        fsync_path(self._folder)
        for other in self.files():
            if other != target:
                other.unlink()

    def rounds(self) -> int:
        """Return the number of finished rounds, without reading tensors."""
        return max((int(path.stem.removeprefix("round-")) for path in self.files()), default=0)

    def newest(self) -> tuple[Simulation, float] | None:
        """Return the state of the newest valid checkpoint of this setting, and the run's seconds so far; None without one."""
        found = (self._read(file) for file in reversed(self.files()))
        return next((one for one in found if one is not None), None)

    def _read(self, file: Path) -> tuple[Simulation, float] | None:
        try:
            read = torch.load(file, weights_only=True, map_location="cpu")
            if read["format"] == CHECKPOINT_FORMAT and self._setting.is_same(read["setting"]):
                return TypeAdapter(Simulation).validate_python(read["now"]), float(read["seconds"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError):
            return None  # truncated by a power loss: use the previous one
        return None

    def remove(self) -> None:
        """Delete all checkpoints."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def files(self) -> list[Path]:
        """Return the checkpoints, the newest last."""
        return sorted(self._folder.glob("round-*.pt"))


def _plain(one: object) -> object:
    """Return a value as tensors and builtins, which `weights_only` reads, and from which pydantic restores the value."""
    if isinstance(one, torch.Tensor):
        return one.detach().clone()  # a view would include the whole tensor
    if isinstance(one, Enum):
        return one.value
    if is_dataclass(one):
        return {field.name: _plain(getattr(one, field.name)) for field in fields(one)}
    if isinstance(one, Mapping):
        return {_plain(key): _plain(value) for key, value in one.items()}
    return [_plain(value) for value in one] if isinstance(one, tuple) else one
