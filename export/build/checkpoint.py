"""Reads what `fedcg export` is given: a spec, and a safetensors file of weights. Uses torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file

from export.errors import InputError
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
    try:
        return FederationSpec.parse(path.read_bytes())
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error)) from error
    except ValueError as error:
        raise InputError(str(path), f"not a federation's spec: {error}") from error


def read_weights(path: Path, slot: str | None = None) -> Mapping[Part, Weights]:
    """Extractor and classifier from a safetensors file.

    Args:
        path: tensors named `part/name`, or `slot/part/name` as in an agent's private store.
        slot: which slot, where the file has slots.

    Raises:
        InputError: cannot be read, or has no extractor and classifier under that slot.
    """
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
