"""Checks whether a recording holds a private tensor, as values, as a delta, or as raw bytes, and whether sealed numbers reveal anything.

It only compares numbers and bytes and trusts no names. Its input is an independent observer's recording, and the
devices' private weights as the truth.

A private tensor leaks if one of its rows or columns is found in a sent tensor (`copied_rows`; scale, offset and sign do
not matter):
  * as values;
  * as value + base or value - base, where a base is a tensor that the attacker knows (of the aggregate that an update
    started from). A base may resemble the private tensor, so the sum only counts if it is twice as near as the base alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from audit.errors import CaptureError, DecodeError
from audit.recording.capture import SealedBits, is_spec, worst_bits
from audit.recording.copied_rows import copied_rows, searchable
from audit.recording.observer import ARTIFACTS, WIRE_FILE, gaps
from fedcg.learning.registry import get_method
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value
from fedcg.wire.artifacts.inspection import Inspection, decode, inspect
from fedcg.wire.errors import WireError
from fedcg.wire.parts import is_delta

NEEDLE_BYTES = 32  # a run of 8 float32 numbers does not occur by chance
NEEDLES_PER_TENSOR = 8
_HASH_BITS = 20
_ROUNDING = 1e-6  # of a correlation

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
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


class PrivateTensor(Value):
    """A tensor that must never leave a device: its owner (`client-1 round 2`), its name, its numbers."""

    owner: str
    name: str
    value: Array


class Match(Value):
    """A leak: its location and the private tensor that it reveals.

    Attributes:
        how: `value`, `delta` (with a base) or `bytes`.
        base: the base of a delta.
        correlation: absolute Pearson correlation, the largest of all rows and columns; 1.0 for bytes.
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
        base = f" ({self.base})" if self.base else ""
        return (
            f"artifact {self.artifact[:12]} {self.tensor}{base} shows {self.private} of {self.owner} "
            f"as {self.how} (correlation {self.correlation:.4f})"
        )


def compare(artifacts: Iterable[WireTensor], private: Sequence[PrivateTensor]) -> list[Match]:
    """Find rows and columns of private tensors in sent tensors, as values and as differences from their bases.

    Args:
        artifacts: the tensors that were sent, with bases from which they may be deltas.
        private: the private tensors, read on the devices.

    Returns:
        At most one match for each sent tensor, base and private tensor; empty when nothing leaked.
    """
    sent, values = list(artifacts), [tensor.value for tensor in private]
    sums = [
        (seen, name, base.reshape(seen.value.shape))
        for seen in sent
        for name, base in seen.bases.items()
        if base.size == seen.value.size and np.issubdtype(seen.value.dtype, np.floating)
    ]
    places = [(seen, None) for seen in sent] + [(seen, name) for seen, name, _ in sums]
    known = copied_rows([base for *_, base in sums], values)
    found = copied_rows([*(seen.value for seen in sent), *(seen.value + base for seen, _, base in sums)], values)
    return [
        Match(
            seen.artifact, seen.name, private[of].owner, private[of].name, "delta" if base else "value", base, strength
        )
        for (at, of), strength in found.items()
        if 1 - strength < (1 - known.get((at - len(sent), of), 0)) / 2 - _ROUNDING
        for seen, base in [places[at]]
    ]


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
    return np.asarray((words * np.uint32(2654435761)) >> np.uint32(32 - _HASH_BITS), dtype=np.uint32)


PRIVATE_PARTS = frozenset({"extractor", "discriminator", "shadow"})
"""Private in every method; `check_recording` adds those of the recorded federation's method. `shadow` is a device's model without the federation."""
UNSEEN = (
    "This check does not see numbers that were transformed one by one, non-linearly or by a ramp, left out, repeated, interleaved, "
    "pasted as a block, mixed, spread over many tensors or reordered within a row, labels, class counts and a device's other classifiers, rows of fewer than 24 "
    "numbers, pieces of fewer than 95, features of other layers, text in headers, nor low bits: one free bit in each weight is a channel."
)


class Check(Value):
    """Outcome of a check: the amount compared, and the leaks.

    Attributes:
        undecoded: artifacts that were only searched as raw bytes, so that nothing is known of them.
        gaps: what the observer missed, so that nothing is known of it.
        too_short: private tensors with too few or too equal numbers to be found, but as raw bytes.
        sealed: whether the numbers of sealed sums reveal anything.
        without_base: tensors that are differences from an aggregate that was not recorded, by aggregate; they were
            compared as differences, not as values.
    """

    artifacts: int
    undecoded: tuple[str, ...]
    wire_tensors: int
    private_tensors: int
    too_short: int
    matches: tuple[Match, ...]
    gaps: tuple[str, ...] = ()
    without_base: Mapping[str, int] = field(default_factory=dict)
    sealed: SealedBits = field(default_factory=lambda: SealedBits.of(()))

    @property
    def is_clean(self) -> bool:
        """Whether everything that was sent was compared and nothing leaked."""
        return not (self.matches or self.undecoded or self.gaps) and self.sealed.is_fair

    def record(self) -> dict[str, object]:
        """Return the check as JSON values."""
        return {
            "artifacts": self.artifacts,
            "undecoded": self.undecoded,
            "gaps": self.gaps,
            "wire_tensors": self.wire_tensors,
            "private_tensors": self.private_tensors,
            "too_short": self.too_short,
            "without_base": dict(self.without_base),
            "sealed": vars(self.sealed) if self.sealed.tensors else None,
            "leaks": [vars(match) for match in self.matches],
        }

    def summary(self) -> str:
        """Return lines for a person: what was compared, what was not, and each place that leaks with its strongest match."""
        missed = "".join(
            f"\n{count} tensors are differences from aggregate {base}, which was not recorded: only compared as differences"
            for base, count in sorted(self.without_base.items())
        )
        missed += "".join(f"\nartifact {one[:12]} can't be decoded: nothing is known of it" for one in self.undecoded)
        missed += "".join(f"\nthe recording has gaps, of which nothing is known: {one}" for one in self.gaps)
        sealed = f"\n{self.sealed}" if self.sealed.tensors else ""
        places = Counter((match.artifact, match.tensor) for match in self.matches)
        strongest = {
            match.artifact + match.tensor: match for match in sorted(self.matches, key=lambda one: one.correlation)
        }
        leaks = (
            f"\nLEAK: {match}"
            + f", and {places[match.artifact, match.tensor] - 1} more" * (places[match.artifact, match.tensor] > 1)
            for match in strongest.values()
        )
        return (
            f"compared {self.wire_tensors} tensors of {self.artifacts} recorded artifacts "
            f"with {self.private_tensors} private tensors ({self.too_short} too short or constant to be found): "
            f"{len(places)} leaks{missed}{sealed}{''.join(leaks)}\n{UNSEEN}"
        )


def state_files(places: Iterable[Path]) -> list[Path]:
    """Return the files, and for each agent's store those of its last two rounds."""
    return [
        file
        for place in places
        for file in (sorted(place.glob("generations/*/state.safetensors")) if place.is_dir() else [place]) or [place]
    ]


def private_tensors(files: Iterable[Path], parts: frozenset[str] = PRIVATE_PARTS) -> list[PrivateTensor]:
    """Read the tensors of private `parts` in safetensors files or agents' stores; keys may have prefixes (`private/extractor/conv.weight`).

    Raises:
        DecodeError: a file can't be read, or holds no private part (an empty check would prove nothing).
    """
    tensors = []
    for path in state_files(files):
        try:
            found = [
                PrivateTensor(str(path), key, value)
                for key, value in load_file(path).items()
                if parts & set(key.replace(".", "/").split("/"))
            ]
        except (OSError, SafetensorError, TypeError) as error:  # numpy has no bfloat16
            raise DecodeError(
                f"{path} can't be read as safetensors: {error}; give an agent's store, or a safetensors file"
            ) from error
        if not found:
            raise DecodeError(f"{path} holds no tensor of a private part ({', '.join(sorted(parts))})")
        tensors.extend(found)
    return tensors


def changes(private: Sequence[PrivateTensor]) -> list[PrivateTensor]:
    """Return the differences of private weights from file to file, and of `before/` and `after/` in one file, later minus earlier."""
    by_name: dict[str, list[PrivateTensor]] = {}
    for one in private:
        by_name.setdefault(re.sub("^(before|after)/", "", one.name), []).append(one)
    return [
        PrivateTensor(f"{new.owner} minus {old.owner}", f"{new.name} minus {old.name}", new.value - old.value)
        for same in by_name.values()
        for old, new in pairwise(same)
        if new.value.shape == old.value.shape and np.issubdtype(new.value.dtype, np.floating)
    ]


def wire_tensors(inspections: Mapping[str, Inspection]) -> list[WireTensor]:
    """Return all tensors of artifacts as sent, and integers and differences also decoded.

    Bases are the decoded tensors of the same name in the header's base artifact.
    """
    tensors = []
    for artifact, seen in inspections.items():
        base = inspections.get(str(seen.header.get("base")))
        known = {} if base is None else decode(base).tensors
        for key, value in seen.tensors.items():
            is_value = key in known and not is_delta(seen.codecs.get(key, "f32"))
            bases = {f"plus base {key}": known[key], f"minus base {key}": -known[key]} if is_value else {}
            tensors.append(WireTensor(artifact, key, value, bases))
        for key, value in decode(seen, base).tensors.items():
            if value is not seen.tensors.get(key) and seen.codecs[key] not in ("f32", "f16", "i64"):
                tensors.append(WireTensor(artifact, f"{key} (decoded)", value))
    return tensors


def _without_base(inspections: Mapping[str, Inspection]) -> Counter[str]:
    missed: Counter[str] = Counter()
    for seen in inspections.values():
        name = str(seen.header.get("base"))
        missed[name] += len(decode(seen, inspections.get(name)).without_base)
    return +missed


def _is_akin(match: Match) -> bool:
    """Whether a sent tensor resembles that of the device's shadow model of the same part: both were trained from one start on the same images."""
    names = match.private.split("/")
    return "shadow" in names and match.tensor.split("/")[0] in names


def check_recording(observed: Path, private: Iterable[Path], more: Sequence[PrivateTensor] = ()) -> Check:
    """Compare an observer's whole recording with private weights, their changes from file to file, and `more` private numbers.

    Raises:
        CaptureError: the folder is not a recording.
        DecodeError: a file of private weights can't be used.
    """
    try:
        listed = {str(entry["id"]) for entry in json.loads((observed / WIRE_FILE).read_text())["artifacts"]}
        blobs = {path.name: path.read_bytes() for path in sorted((observed / ARTIFACTS).glob("*")) if path.is_file()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CaptureError(
            f"{observed} is not an observer's folder: {error}; give the folder of `fedcg audit observe`"
        ) from error
    if not blobs:
        raise CaptureError(f"{observed} holds no artifact: start `fedcg audit observe` before anything is sent")
    if missing := sorted(listed - blobs.keys()):
        raise CaptureError(f"{observed} lacks artifact {missing[0]}, which {WIRE_FILE} lists: copy the whole folder")
    if damaged := [name for name, data in blobs.items() if sha256(data).hexdigest() != name]:
        raise DecodeError(f"{observed / ARTIFACTS / damaged[0]} is damaged: its sha256 is not its name")
    specs = [FederationSpec.parse(data) for data in blobs.values() if is_spec(data)]
    hidden = {part.value for spec in specs for part in {*get_method(spec.method).payload.private, *spec.sealed}}
    weights = private_tensors(private, PRIVATE_PARTS | hidden)
    weights += changes(weights)
    inspections: dict[str, Inspection] = {}
    for artifact, data in blobs.items():
        with suppress(WireError):  # a spec, and bytes that can't be decoded, are still searched as raw bytes
            inspections[artifact] = inspect(data)
    undecoded = tuple(name for name, data in blobs.items() if name not in inspections and not is_spec(data))
    seen = wire_tensors(inspections)
    payloads = dict(blobs) | {f"{name} (decompressed)": found.payload for name, found in inspections.items()}
    secrets = [*weights, *more]
    matches = [one for one in compare(seen, secrets) if not _is_akin(one)] + find_bytes(payloads, secrets)
    sealed = SealedBits.of([worst for one in inspections.values() for worst in worst_bits(one).values()])
    short = len(secrets) - searchable([one.value for one in secrets])
    missed = gaps(observed / WIRE_FILE, without=("undecoded", "bases_not_seen"))  # told on their own
    return Check(
        len(blobs),
        undecoded,
        len(seen),
        len(secrets),
        short,
        tuple(matches),
        missed,
        _without_base(inspections),
        sealed,
    )
