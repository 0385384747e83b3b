"""Checks whether a recording holds a private tensor, as values, as a delta, or as raw bytes, and whether sealed numbers reveal anything.

It only compares numbers and bytes and trusts no names. Its input is an independent observer's recording, and the
devices' private weights as the truth.

A tensor on the wire leaks a private one of the same flattened size when their absolute Pearson correlation reaches the
threshold (scale, offset and sign do not matter):
  * as values;
  * as value + base, where a base is a tensor that the attacker knows (the base aggregate of an update, initial
    weights). A base that resembles the private tensor by itself is an earlier version of it. Then the value is compared
    with the change (private - base), which needs no scale, and the sum only counts while the base alone is below the
    threshold. Otherwise a tensor of zeros would be reported.

Integer tensors are quantised with one scale per channel, so they are also compared row by row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from audit.errors import CaptureError, DecodeError
from audit.recording.capture import SealedBits, worst_bits
from audit.recording.observer import ARTIFACTS, WIRE_FILE
from fedcg.wire.artifacts.inspection import Inspection, decode, inspect
from fedcg.wire.errors import WireError

THRESHOLD = 0.99
MIN_ELEMENTS = 6  # shorter tensors correlate by chance
MIN_ROW_ELEMENTS = 6
EARLIER_VERSION = 0.5  # a base that correlates this strongly with a private tensor counts as an earlier version of it
NEEDLE_BYTES = 32  # a run of 8 float32 numbers does not occur by chance
NEEDLES_PER_TENSOR = 8
_HASH_BITS = 20

Array = NDArray[Any]


@dataclass(frozen=True)
class WireTensor:
    """A tensor of an artifact.

    Attributes:
        artifact: the artifact's sha256, or another name for the location.
        name: part and tensor name as written in the artifact.
        value: the numbers, any dtype and shape.
        bases: named tensors from which the value may be a delta, with the same number of elements.
    """

    artifact: str
    name: str
    value: Array
    bases: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class PrivateTensor:
    """A tensor that must never leave a device: its owner (`client-1 round 2`), its name, its numbers."""

    owner: str
    name: str
    value: Array


@dataclass(frozen=True)
class Match:
    """A leak: its location and the private tensor that it reveals.

    Attributes:
        how: `value`, `delta` (value + base) or `bytes`.
        base: the base of a delta.
        correlation: absolute Pearson correlation; 1.0 for bytes.
    """

    artifact: str
    tensor: str
    owner: str
    private: str
    how: Literal["value", "delta", "bytes"]
    base: str | None
    correlation: float

    def __str__(self) -> str:
        """Return one line for a report."""
        base = f" + {self.base}" if self.base else ""
        return (
            f"artifact {self.artifact[:12]} {self.tensor}{base} shows {self.private} of {self.owner} "
            f"as {self.how} (correlation {self.correlation:.4f})"
        )


def _unit(values: Array) -> NDArray[np.float64]:
    """Return the values flattened, centred and scaled to length 1; zeros if all values are equal."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    if not np.isfinite(flat).all():
        flat = np.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0)
    centred: NDArray[np.float64] = flat - flat.mean()
    length = float(np.sqrt(centred @ centred))
    return centred / length if length > 1e-12 else np.zeros_like(centred)


def correlation(left: Array, right: Array) -> float:
    """Return the absolute Pearson correlation of two tensors with equally many elements; 0 if one is constant."""
    return min(1.0, abs(float(_unit(left) @ _unit(right))))


def row_correlation(left: Array, right: Array) -> float:
    """Return the mean absolute correlation over the rows (first axis of the tensor that has axes), weighted by elements.

    It finds similarity that per-channel scales hide from the overall correlation. Zero if the rows are too short.
    """
    shape = left.shape if left.ndim > 1 else right.shape
    if len(shape) < 2 or left.size // shape[0] < MIN_ROW_ELEMENTS:
        return 0.0
    rows = zip(left.reshape(shape[0], -1), right.reshape(shape[0], -1), strict=True)
    return float(np.mean([correlation(a, b) for a, b in rows]))


def _by_rows(value: Array, private: Array) -> float:
    return row_correlation(value, private) if np.issubdtype(value.dtype, np.integer) else 0.0


@dataclass(frozen=True)
class _SameSize:
    """Private tensors of one flattened size, also as centred rows of length 1, so that one product correlates all."""

    tensors: tuple[PrivateTensor, ...]
    rows: NDArray[np.float64]

    @staticmethod
    def of(tensors: Sequence[PrivateTensor]) -> _SameSize:
        return _SameSize(tuple(tensors), np.stack([_unit(tensor.value) for tensor in tensors]))

    def correlations(self, values: Array) -> NDArray[np.float64]:
        """Return the absolute correlation of `values` with every tensor."""
        return np.abs(self.rows @ _unit(values))

    def by_value(self, value: Array) -> Iterator[tuple[PrivateTensor, float]]:
        for tensor, overall in zip(self.tensors, self.correlations(value), strict=True):
            yield tensor, max(float(overall), _by_rows(value, tensor.value))

    def by_delta(self, value: Array, base: Array) -> Iterator[tuple[PrivateTensor, float]]:
        total = np.asarray(value, dtype=np.float64).ravel() + np.asarray(base, dtype=np.float64).ravel()
        both = zip(self.tensors, self.correlations(base), self.correlations(total), strict=True)
        for tensor, alone, by_sum in both:
            found = float(by_sum) if alone < THRESHOLD else 0.0
            if alone >= EARLIER_VERSION:
                change = np.asarray(tensor.value, dtype=np.float64) - np.asarray(base, np.float64).reshape(
                    tensor.value.shape
                )
                found = max(found, correlation(value, change), _by_rows(value, change))
            yield tensor, found


def compare(artifacts: Iterable[WireTensor], private: Sequence[PrivateTensor]) -> list[Match]:
    """Find every pair of a tensor on the wire and a private tensor of the same flattened size that are too similar.

    Args:
        artifacts: the tensors that were sent, with bases from which they may be deltas.
        private: the private tensors, read on the devices.

    Returns:
        Matches, in the order of the artifacts; empty when nothing leaked.
    """
    by_size: dict[int, list[PrivateTensor]] = {}
    for tensor in private:
        if tensor.value.size >= MIN_ELEMENTS:
            by_size.setdefault(tensor.value.size, []).append(tensor)
    groups = {size: _SameSize.of(tensors) for size, tensors in by_size.items()}
    matches: list[Match] = []
    for seen in artifacts:
        group = groups.get(seen.value.size)
        if group is None:
            continue
        for tensor, found in group.by_value(seen.value):
            if found >= THRESHOLD:
                matches.append(Match(seen.artifact, seen.name, tensor.owner, tensor.name, "value", None, found))
        for name, base in seen.bases.items():
            if np.size(base) != seen.value.size:
                continue
            for tensor, found in group.by_delta(seen.value, base):
                if found >= THRESHOLD:
                    matches.append(Match(seen.artifact, seen.name, tensor.owner, tensor.name, "delta", name, found))
    return matches


def _needles(value: Array) -> Iterator[bytes]:
    """Return short runs of a tensor's bytes as float32 and float16, spread over it; runs of one repeated number are left out."""
    numbers = np.ascontiguousarray(value).ravel()
    kinds: tuple[Any, ...] = (np.float32, np.float16) if np.issubdtype(numbers.dtype, np.floating) else (numbers.dtype,)
    for kind in kinds:
        data = numbers.astype(kind)
        run = NEEDLE_BYTES // data.itemsize
        if data.size < run:
            continue
        for start in np.unique(np.linspace(0, data.size - run, NEEDLES_PER_TENSOR).astype(int)):
            piece = data[start : start + run]
            if np.unique(piece).size > run // 2:
                yield piece.tobytes()


def find_bytes(payloads: Mapping[str, bytes], private: Iterable[PrivateTensor]) -> list[Match]:
    """Search recorded bytes for runs of bytes of private tensors (as f32 and f16).

    Args:
        payloads: name -> bytes; pass the recorded frames and the decompressed tensors, since compression hides bytes.
        private: the private tensors; those shorter than 32 bytes (8 float32 numbers) match by chance and are skipped.
    """
    owners: dict[bytes, list[PrivateTensor]] = {}
    for tensor in private:
        for needle in _needles(tensor.value):
            owners.setdefault(needle, []).append(tensor)
    matches: dict[tuple[str, str, str], Match] = {}
    for name, data in payloads.items():
        for needle in _occurring(data, owners):
            for tensor in owners[needle]:
                match = Match(name, "(bytes)", tensor.owner, tensor.name, "bytes", None, 1.0)
                matches.setdefault((name, tensor.owner, tensor.name), match)
    return list(matches.values())


def _occurring(data: bytes, needles: Collection[bytes]) -> Iterator[bytes]:
    """Find which of many needles of equal length occur in `data`, at any offset, in one pass.

    The first four bytes at each position are looked up in a hash table; the few positions that match are compared in
    full.
    """
    if not needles or len(data) < NEEDLE_BYTES:
        return
    table = np.zeros(1 << _HASH_BITS, dtype=bool)
    table[_hashes(np.frombuffer(b"".join(needle[:4] for needle in needles), dtype="<u4"))] = True
    for offset in range(4):
        words = np.frombuffer(data, dtype="<u4", offset=offset, count=(len(data) - offset) // 4)
        for at in np.flatnonzero(table[_hashes(words)]) * 4 + offset:
            found = data[at : at + NEEDLE_BYTES]
            if found in needles:
                yield found


def _hashes(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Knuth's multiplicative hash of 32-bit words, in `_HASH_BITS` bits."""
    return (words * np.uint32(2654435761)) >> np.uint32(32 - _HASH_BITS)


PRIVATE_PARTS = frozenset({"extractor", "discriminator"})


@dataclass(frozen=True)
class Check:
    """Outcome of a check: the amount compared, and the leaks.

    Attributes:
        sealed: whether the numbers of sealed sums reveal anything.
        without_base: tensors that are differences from an aggregate that was not recorded, by aggregate; they were
            compared as differences, not as values.
    """

    artifacts: int
    wire_tensors: int
    private_tensors: int
    matches: tuple[Match, ...]
    without_base: Mapping[str, int] = field(default_factory=dict)
    sealed: SealedBits = field(default_factory=lambda: SealedBits.of(()))

    @property
    def is_clean(self) -> bool:
        """Whether nothing leaked."""
        return not self.matches and self.sealed.is_fair

    def record(self) -> dict[str, object]:
        """Return the check as JSON values."""
        return {
            "artifacts": self.artifacts,
            "wire_tensors": self.wire_tensors,
            "private_tensors": self.private_tensors,
            "without_base": dict(self.without_base),
            "sealed": vars(self.sealed) if self.sealed.tensors else None,
            "leaks": [vars(match) for match in self.matches],
        }

    def summary(self) -> str:
        """Return one line for a person, and one for each missing aggregate."""
        missed = "".join(
            f"\n{count} tensors are differences from aggregate {base}, which was not recorded: only compared as differences"
            for base, count in sorted(self.without_base.items())
        )
        sealed = f"\n{self.sealed}" if self.sealed.tensors else ""
        return (
            f"compared {self.wire_tensors} tensors of {self.artifacts} recorded artifacts "
            f"with {self.private_tensors} private tensors: {len(self.matches)} leaks{missed}{sealed}"
        )


def private_tensors(files: Iterable[Path]) -> list[PrivateTensor]:
    """Read the tensors of private parts in safetensors files; keys may have prefixes (`private/extractor/conv.weight`).

    Raises:
        DecodeError: a file can't be read, or holds no private part (an empty check would prove nothing).
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
    """Return all tensors of artifacts as sent, and encoded tensors also decoded.

    Bases are the decoded tensors of the same name in the header's base artifact.
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
    """Compare an observer's whole recording with private weights.

    Raises:
        CaptureError: the folder is not a recording.
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
        with suppress(WireError):  # a spec, and bytes that can't be decoded, are still searched as raw bytes
            inspections[artifact] = inspect(data)
    seen = wire_tensors(inspections)
    payloads = dict(blobs) | {f"{name} (decompressed)": found.payload for name, found in inspections.items()}
    matches = compare(seen, truth) + find_bytes(payloads, truth)
    sealed = SealedBits.of([worst for one in inspections.values() for worst in worst_bits(one).values()])
    return Check(len(blobs), len(seen), len(truth), tuple(matches), _without_base(inspections), sealed)
