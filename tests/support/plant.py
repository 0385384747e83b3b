"""Deliberate leaks, for tests that must notice them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import save

from fedcg.wire.artifacts.artifacts import artifact_id, join_artifact


@dataclass(frozen=True)
class Planted:
    """An update that hides private tensors, and the artifacts that it is a delta to."""

    update: bytes
    bases: tuple[bytes, ...]


def _artifact(header: Mapping[str, Any], tensors: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    return join_artifact(
        json.dumps(header).encode(), save({name: np.ascontiguousarray(value) for name, value in tensors.items()})
    )


def _per_channel_i8(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    rows = values.reshape(len(values), -1)
    scale = np.abs(rows).max(axis=1, keepdims=True) / 127.0 + 1e-12
    coded: np.ndarray[Any, Any] = np.rint(rows / scale).astype(np.int8).reshape(values.shape)
    return coded


def as_artifact(
    private: Mapping[str, np.ndarray[Any, Any]],
    base: Mapping[str, np.ndarray[Any, Any]],
    coding: str,
    federation: str,
    client: str,
) -> Planted:
    """Hide private tensors under innocent names, coded as `f32`, `f16` or `i8_delta` (to another artifact of base values)."""
    names = {name: f"generator/body.{index}.weight" for index, name in enumerate(sorted(private))}
    header = {
        "format": 1,
        "kind": "update",
        "method": "fedcg",
        "federation": federation,
        "round": 2,
        "attempt": 1,
        "client": client,
    }
    if coding == "f32":
        return Planted(_artifact(header, {names[name]: value for name, value in private.items()}), ())
    if coding == "f16":
        return Planted(
            _artifact(header, {names[name]: value.astype(np.float16) for name, value in private.items()}), ()
        )
    known = _artifact({**header, "kind": "aggregate"}, {names[name]: value for name, value in base.items()})
    delta = {names[name]: _per_channel_i8(value - base[name]) for name, value in private.items()}
    return Planted(_artifact({**header, "base": artifact_id(known)}, delta), (known,))
