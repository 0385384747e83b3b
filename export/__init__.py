"""Personal model to ONNX: exported, verified, versioned, and run on the box.

`model`, `serving` and `cli` import no torch: `model` needs the extra `infer`, `serving` the extra `serve`. `build` belongs to the
box that trains.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from export.model.runtime import Model

__all__ = ["load"]


def load(directory: str | Path, *, threads: int = 0) -> Model:
    """A model for a program of one's own, ready to classify: `load("models").classify("image.png")`.

    Args:
        directory: a model, or the root of its versions; the version in use now is loaded, later ones are not followed.
        threads: threads of one prediction; 0 lets onnxruntime choose.

    Raises:
        ModelError: no valid manifest, altered bytes, or a model that onnxruntime refuses.
        SlotError: versions without a usable one.
    """
    from export.model.manifest import check_by_this_box
    from export.model.runtime import Model  # here, so that importing the package stays cheap

    return Model.load(Path(directory), threads=threads, accept=check_by_this_box)
