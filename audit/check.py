"""Checks a recording of the wire against the private weights of devices.

Reads an observer's folder and safetensors files of private weights, and hands numbers and bytes to `leakage`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file

from audit.errors import CaptureError, DecodeError
from audit.leakage import Match, PrivateTensor, WireTensor, compare, find_bytes
from audit.observer import ARTIFACTS, WIRE_FILE
from fedcg.wire.errors import WireError
from fedcg.wire.inspection import Inspection, inspect

PRIVATE_PARTS = frozenset({"extractor", "discriminator"})


@dataclass(frozen=True)
class Check:
    """Outcome of a check: how much was compared, and what leaked."""

    artifacts: int
    wire_tensors: int
    private_tensors: int
    matches: tuple[Match, ...]

    def record(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "artifacts": self.artifacts,
            "wire_tensors": self.wire_tensors,
            "private_tensors": self.private_tensors,
            "leaks": [vars(match) for match in self.matches],
        }

    def summary(self) -> str:
        """One line for a person."""
        return (
            f"compared {self.wire_tensors} tensors of {self.artifacts} recorded artifacts "
            f"with {self.private_tensors} private tensors: {len(self.matches)} leaks"
        )


def private_tensors(files: Iterable[Path]) -> list[PrivateTensor]:
    """The tensors of private parts in safetensors files; keys may have prefixes (`private/extractor/conv.weight`).

    Raises:
        DecodeError: a file that can't be read, or that holds no private part at all (a check of nothing proves nothing).
    """
    tensors = []
    for path in files:
        try:
            found = [
                PrivateTensor(str(path), key, value)
                for key, value in load_file(path).items()
                if PRIVATE_PARTS & set(key.replace(".", "/").split("/"))
            ]
        except (OSError, SafetensorError) as error:
            raise DecodeError(f"{path} can't be read as safetensors: {error}") from error
        if not found:
            raise DecodeError(f"{path} holds no tensor of a private part ({', '.join(sorted(PRIVATE_PARTS))})")
        tensors.extend(found)
    return tensors


def wire_tensors(inspections: Mapping[str, Inspection]) -> list[WireTensor]:
    """All tensors of decoded artifacts; bases are the tensors of the same name in the artifact that a header names."""
    tensors = []
    for artifact, seen in inspections.items():
        base = inspections.get(str(seen.header.get("base")))
        for key, value in seen.tensors.items():
            bases = {} if base is None or key not in base.tensors else {f"base {key}": base.tensors[key]}
            tensors.append(WireTensor(artifact, key, value, bases))
    return tensors


def _inspected(data: bytes) -> Inspection | None:
    """What an artifact holds; None for a spec, or bytes nobody can decode, which are still searched as raw bytes."""
    try:
        return inspect(data)
    except WireError:
        return None


def check_recording(observed: Path, private: Iterable[Path]) -> Check:
    """Compare everything an observer recorded with private weights.

    Raises:
        CaptureError: the folder is no recording.
        DecodeError: a file of private weights can't be used.
    """
    try:
        listed = json.loads((observed / WIRE_FILE).read_text())["artifacts"]
        blobs = {str(entry["id"]): (observed / ARTIFACTS / entry["id"]).read_bytes() for entry in listed}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"{observed} is not an observer's folder: {error}") from error
    truth = private_tensors(private)
    decoded = {artifact: _inspected(data) for artifact, data in blobs.items()}
    inspections = {artifact: found for artifact, found in decoded.items() if found is not None}
    seen = wire_tensors(inspections)
    payloads = dict(blobs) | {f"{name} (decompressed)": found.payload for name, found in inspections.items()}
    matches = compare(seen, truth) + find_bytes(payloads, truth)
    return Check(len(blobs), len(seen), len(truth), tuple(matches))
