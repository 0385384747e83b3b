"""Checks a recording of the wire against the private weights of devices.

Reads an observer's folder and safetensors files of private weights, and hands numbers and bytes to `leakage`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file

from audit.errors import CaptureError, DecodeError
from audit.recording.leakage import Match, PrivateTensor, WireTensor, compare, find_bytes
from audit.recording.observer import ARTIFACTS, WIRE_FILE
from fedcg.wire.artifacts.inspection import Inspection, decode, inspect
from fedcg.wire.errors import WireError

PRIVATE_PARTS = frozenset({"extractor", "discriminator"})


@dataclass(frozen=True)
class Check:
    """Outcome of a check: how much was compared, and what leaked.

    Attributes:
        without_base: tensors by the aggregate that they are coded as the difference to and that was not recorded: they were compared as
            differences, not as values.
    """

    artifacts: int
    wire_tensors: int
    private_tensors: int
    matches: tuple[Match, ...]
    without_base: Mapping[str, int] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "artifacts": self.artifacts,
            "wire_tensors": self.wire_tensors,
            "private_tensors": self.private_tensors,
            "without_base": dict(self.without_base),
            "leaks": [vars(match) for match in self.matches],
        }

    def summary(self) -> str:
        """One line for a person, and one for each aggregate that was missed."""
        missed = (
            f"\n{count} tensors are differences to aggregate {base}, which was not recorded: compared as differences only"
            for base, count in sorted(self.without_base.items())
        )
        return (
            f"compared {self.wire_tensors} tensors of {self.artifacts} recorded artifacts "
            f"with {self.private_tensors} private tensors: {len(self.matches)} leaks{''.join(missed)}"
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
    """All tensors of artifacts as they came, and those that are coded decoded too.

    Bases are the decoded tensors of the same name in the artifact that a header names.
    """
    tensors = []
    for artifact, seen in inspections.items():
        base = inspections.get(str(seen.header.get("base")))
        known = {} if base is None else decode(base).tensors
        for key, value in seen.tensors.items():
            bases = {f"base {key}": known[key]} if key in known else {}
            tensors.append(WireTensor(artifact, key, value, bases))
        for key, value in decode(seen, base).tensors.items():
            if value is not seen.tensors.get(key) and seen.codecs[key] not in ("f32", "i64"):
                tensors.append(WireTensor(artifact, f"{key} (decoded)", value))
    return tensors


def _without_base(inspections: Mapping[str, Inspection]) -> Counter[str]:
    missed: Counter[str] = Counter()
    for seen in inspections.values():
        name = str(seen.header.get("base"))
        missed[name] += len(decode(seen, inspections.get(name)).without_base)
    return +missed


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
    inspections: dict[str, Inspection] = {}
    for artifact, data in blobs.items():
        with suppress(WireError):  # a spec, or bytes that can't be decoded, are still searched as raw bytes
            inspections[artifact] = inspect(data)
    seen = wire_tensors(inspections)
    payloads = dict(blobs) | {f"{name} (decompressed)": found.payload for name, found in inspections.items()}
    matches = compare(seen, truth) + find_bytes(payloads, truth)
    return Check(len(blobs), len(seen), len(truth), tuple(matches), _without_base(inspections))
