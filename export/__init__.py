"""Exports a personal model to ONNX, verifies it, keeps versions of it, and runs it on the device.

`model`, `serving` and `cli` don't import torch. `model` needs the extra `infer`, `serving` needs `serve`. `build` runs on the device
that trains.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from export.model.runtime import Model

__all__ = ["load"]


def load(directory: str | Path, *, threads: int = 0) -> Model:
    """Load a model for use in your own program: `load("models").classify("image.png")`.

    Args:
        directory: a model, or the root of its versions. The version currently in use is loaded; later changes are not followed.
        threads: threads of one prediction; 0 lets onnxruntime choose.

    Raises:
        ModelError: no valid manifest, altered bytes, or a model that onnxruntime can't load.
        SlotError: no usable version.
    """
    from export.model.manifest import check_by_this_box
    from export.model.runtime import Model  # imported here to keep the package import cheap

    return Model.load(Path(directory), threads=threads, accept=check_by_this_box)
