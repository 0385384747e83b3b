"""Reads what `fedcg export` is given: a spec, and a safetensors file of weights. Uses torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file

from export.errors import InputError
from fedcg.errors import NOT_FOUND
from fedcg.learning.defences.defence import defence_names, defence_of
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

if TYPE_CHECKING:
    from fedcg.learning.method import Weights

_NEEDED = (Part.EXTRACTOR, Part.CLASSIFIER)


def read_spec(path: Path) -> FederationSpec:
    """A spec from its canonical JSON file.

    Raises:
        InputError: cannot be read, or is not a spec.
    """
    if not path.exists():
        raise InputError(str(path), "no such file", exit_code=NOT_FOUND)
    try:
        return FederationSpec.parse(path.read_bytes())
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error)) from error
    except ValueError as error:
        raise InputError(str(path), f"not a federation's spec: {error}") from error


def _check_defence(path: Path) -> None:
    """An agent's state names the data defence of its images in the snapshot beside it."""
    snapshot = path.with_name("snapshot.json")
    with contextlib.suppress(OSError, ValueError, AttributeError):  # weights from elsewhere
        label = json.loads(snapshot.read_bytes()).get("defence", "")
        name = label.partition("-")[0]
        if name in defence_names() and defence_of(name, {})[0].input_layer is not None:
            raise InputError(
                str(path),
                f"trained on images that the data defence {name} encrypted; a model without the device's key classifies no real "
                "image: use a version that the agent exported, under models/ of its store",
            )


def read_weights(path: Path, slot: str | None = None) -> Mapping[Part, Weights]:
    """Extractor and classifier from a safetensors file.

    Args:
        path: tensors named `part/name`, or `slot/part/name` as in an agent's private store.
        slot: which slot, where the file has slots.

    Raises:
        InputError: cannot be read, has no extractor and classifier under that slot, or a model of it needs an input layer
            that only the agent has.
    """
    if not path.exists():
        raise InputError(str(path), "no such file", exit_code=NOT_FOUND)
    _check_defence(path)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(str(path), f"not a safetensors file that can be read: {error}") from error
    prefix = f"{slot}/" if slot else ""
    parts: dict[Part, Weights] = {
        part: {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}
        for part in _NEEDED
        for start in (f"{prefix}{part.value}/",)
    }
    missing = [part.value for part, weights in parts.items() if not weights]
    if missing:
        slots = sorted({name.split("/")[0] for name in tensors if name.count("/") >= 2})
        hint = f"; choose one of its slots with --slot: {', '.join(slots)}" if slots else ""
        raise InputError(str(path), f"holds no tensor {prefix}{missing[0]}/…{hint}")
    return parts
