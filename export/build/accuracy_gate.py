"""The gate before a new version: on the box's own held-out images it must be as good as the one in service, or nearly. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from export.errors import GateError, ModelError, SlotError
from export.model.manifest import Gate
from export.model.preprocess import load_image
from export.model.runtime import Model
from export.model.versions import Slots

ALLOWED = 0.01  # accuracy that a new version may lose, as a share: chance moves a few hundred images by as much


def pass_gate(
    candidate: Path,
    slots: Slots,
    files: Sequence[Path],
    labels: Sequence[int],
    allowed: float = ALLOWED,
    *,
    threads: int = 0,
) -> Gate | None:
    """Compare a model with the one in service on the same image files.

    Args:
        candidate: directory of the new model, not installed yet.
        slots: where the one in service is.
        files: held-out image files of this box.
        labels: index of the right class per file.
        allowed: accuracy that the new one may lose, as a share.
        threads: threads of one prediction; 0 lets onnxruntime choose.

    Returns:
        What was compared; None where nothing can be: no files, no usable model in service, or one of other classes.

    Raises:
        GateError: the new one is worse by more than is allowed.
        ModelError: the new one does not run.
        InputError: a file that cannot be read as an image.
    """
    if not files:
        return None
    new = Model.load(candidate, threads=threads)
    try:
        old = Model.load(slots.current(), threads=threads)
    except (ModelError, SlotError):
        return None
    if set(old.manifest.classes) != set(new.manifest.classes):
        return None
    names = [new.manifest.classes[label] for label in labels]
    right = [_right(model, files, names) for model in (old, new)]
    if right[1] < right[0] - allowed:
        raise GateError(
            f"the new model gets {right[1]:.1%} of {len(files)} held-out images right, version {old.directory.name} in service "
            f"{right[0]:.1%}; at most {allowed:.1%} less is allowed, so {old.directory.name} stays"
        )
    return Gate(against=old.directory.name, images=len(files), before=right[0], accuracy=right[1], allowed=allowed)


def _right(model: Model, files: Sequence[Path], names: Sequence[str]) -> float:
    pictures = [load_image(file, model.manifest.image) for file in files]
    guessed = [model.manifest.classes[index] for index in model.predict(pictures).argmax(axis=1)]
    return float(np.mean([guess == name for guess, name in zip(guessed, names, strict=True)]))
