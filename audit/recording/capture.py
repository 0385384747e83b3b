"""Reassembles the traffic of a broker: artifacts from chunks, fields of control messages, byte counts.

Pure: frames in, a record out. It trusts neither side: messages are read as plain JSON (the receivers check signatures),
and artifacts are decoded without a layout, so that unexpected content becomes visible.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedcg.learning.errors import LearningError
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value
from fedcg.wire.artifacts.inspection import Inspection, inspect
from fedcg.wire.errors import OrderError, WireError
from fedcg.wire.messages.envelopes import MAGIC as ENVELOPE_MAGIC
from fedcg.wire.messages.envelopes import OVERHEAD_BYTES, check_links, read_envelope
from fedcg.wire.messages.schemas import KeyChain
from fedcg.wire.messages.topics import ParsedTopic, TopicKind, Topics
from fedcg.wire.parts import Part, TensorCodec, is_delta
from fedcg.wire.transfer.chunks import parse_chunk

MAX_HELD_BYTES = 1 << 30  # chunks of unfinished artifacts; beyond it an artifact is dropped and reported as incomplete
MAX_PROBLEMS = 100

_CHUNK_KINDS = (TopicKind.UP_CHUNK, TopicKind.DOWN_CHUNK, TopicKind.AGGREGATE)
_UP_KINDS = (TopicKind.UP_CHUNK, TopicKind.UP_CONTROL, TopicKind.STATUS)
_ENVELOPE_FIELDS = frozenset({"v", "kind", "federation", "sender", "recipient", "epoch", "round", "attempt", "session"})


class SeenArtifact(Value):
    """A complete artifact as sent, decoded without its layout.

    Attributes:
        kind: update, aggregate, spec, or unknown when it could not be decoded.
        sender: its author, by its header; `coordinator` for a spec.
        tensors: shape per tensor key, as sent; `codecs`: number of tensors by codec, from the header; `report`: names
            of the report's fields with a value.
        facts: other facts about its author, from the header.
        worst_bits: for its sealed numbers; see `SealedBits`.
    """

    id: str
    kind: str
    sender: str
    round: int
    attempt: int
    size: int
    parts: tuple[str, ...] = ()
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    report: tuple[str, ...] = ()
    base: str | None = None
    codecs: Mapping[TensorCodec, int] = field(default_factory=dict)
    problem: str | None = None
    facts: Mapping[str, object] = field(default_factory=dict)
    worst_bits: Mapping[str, float] = field(default_factory=dict)


class SealedBits(Value):
    """Whether numbers of sealed sums, each device's and the coordinator's total, reveal anything without the secret.

    Under a cohort's masks every bit is a fair coin. Numbers without masks, or sums under one mask for all, are far from it.

    Attributes:
        tensors: number of tensors checked.
        worst: the largest distance of any bit's share of ones from half, in standard deviations, over all bits of all
            tensors.
        limit: a bound that fair coins exceed once in a million recordings.
    """

    tensors: int
    worst: float
    limit: float

    @staticmethod
    def of(worst_bits: Collection[float]) -> "SealedBits":
        """Build from results of `worst_bit`."""
        limit = math.sqrt(2 * math.log(64 * max(1, len(worst_bits)) / 1e-6))
        return SealedBits(len(worst_bits), max(worst_bits, default=0.0), limit)

    @property
    def is_fair(self) -> bool:
        """Whether the numbers reveal nothing."""
        return self.worst <= self.limit

    def __str__(self) -> str:
        """Return one line for a person."""
        found = "reveal nothing" if self.is_fair else "ARE NOT HIDDEN"
        return (
            f"{self.tensors} tensors of sealed numbers {found} without the cohort's secret: "
            f"their least random bit is {self.worst:.1f} deviations from half (limit {self.limit:.1f})"
        )


def worst_bit(numbers: NDArray[np.uint32]) -> float:
    """Return the largest |z| of any bit: of its share of ones, or of its agreement with its neighbour.

    Small numbers of both signs have ones in half of their high bits, but all their high bits agree.
    """
    steps = numbers ^ (numbers >> np.uint32(1))
    ones = np.array([np.count_nonzero(each >> np.uint32(bit) & 1) for each in (numbers, steps) for bit in range(32)])
    return float(np.abs(ones - numbers.size / 2).max() / (numbers.size / 4) ** 0.5) if numbers.size else 0.0


@dataclass
class _Incoming:
    size: int | None = None
    chunk_bytes: int = 0
    chunks: dict[int, bytes | memoryview] = field(default_factory=dict)
    given_up: bool = False

    @property
    def is_complete(self) -> bool:
        return self.size is not None and len(self.chunks) >= -(-self.size // self.chunk_bytes)


@dataclass
class _Messages:
    count: int = 0
    fields: set[str] = field(default_factory=set)
    senders: set[str] = field(default_factory=set)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _direction(parsed: ParsedTopic) -> tuple[str, str]:
    """Return the device of the topic (`*` for a broadcast), and `up` or `down`."""
    return parsed.device or "*", "up" if parsed.kind in _UP_KINDS else "down"


def worst_bits(seen: Inspection) -> dict[str, float]:
    """Return `worst_bit` of every tensor of sealed numbers in an artifact, by key; tensors of zeros, from before the first sum, are skipped."""
    return {
        key: worst_bit(array.ravel())
        for key, array in seen.tensors.items()
        if key.startswith(f"{Part.SEALED.value}/") and array.dtype == np.uint32 and array.any()
    }


def is_spec(data: bytes) -> bool:
    """Return whether bytes are a federation's spec, with nothing else in them."""
    try:
        return bool(FederationSpec.parse(data))
    except (LearningError, ValueError, RecursionError):
        return False


def describe(artifact: str, data: bytes) -> SeenArtifact:
    """Decode the bytes of an artifact; accepts any bytes."""
    try:
        seen = inspect(data)
    except WireError as error:
        if is_spec(data):
            return SeenArtifact(artifact, "spec", "coordinator", 0, 0, len(data))
        return SeenArtifact(artifact, "unknown", "unknown", 0, 0, len(data), problem=str(error))
    header = seen.header
    base = header.get("base")
    return SeenArtifact(
        artifact,
        str(header.get("kind", "unknown")),
        str(header.get("client", "unknown")),
        _number(header.get("round")),
        _number(header.get("attempt")),
        len(data),
        tuple(sorted(seen.part_names)),
        {key: tuple(array.shape) for key, array in seen.tensors.items()},
        tuple(sorted(seen.report_fields)),
        base if isinstance(base, str) else None,
        dict(sorted(Counter(seen.codecs.values()).items())),
        facts=seen.facts,
        worst_bits=worst_bits(seen),
    )


class Capture:
    """The traffic of one federation over a broker, from the frames fed to it.

    Args:
        federation: its id; frames of other topics are counted as foreign.
    """

    def __init__(self, federation: str) -> None:
        self.federation = federation
        self.artifacts: dict[str, SeenArtifact] = {}
        self.finished_with: str | None = None
        self._topics = Topics(federation)
        self._incoming: dict[str, _Incoming] = {}
        self._held = 0
        self._messages: dict[str, _Messages] = {}
        self._round_of: dict[str, int] = {}
        self._chunk_bytes: Counter[tuple[str, str, str]] = Counter()
        self._control_bytes: Counter[tuple[str, str, int]] = Counter()
        self._keys: dict[int, str] = {}
        self._key_problems: list[str] = []
        self._foreign = 0
        self._damaged = 0

    def feed(self, topic: str, payload: bytes) -> dict[str, bytes]:
        """Process one frame; return the bytes of the artifacts that it completed, by id."""
        parsed = self._topics.parse(topic)
        if parsed is None:
            self._foreign += 1
            return {}
        if parsed.kind in _CHUNK_KINDS:
            return self._feed_chunk(parsed, payload)
        return self._feed_message(parsed, payload)

    def add(self, data: bytes) -> str:
        """Add a whole artifact without its frames, once, and return its id. Its bytes count as sent by or to its client."""
        artifact = hashlib.sha256(data).hexdigest()
        if artifact not in self.artifacts:
            seen = self.artifacts[artifact] = describe(artifact, data)
            way = (seen.sender, "up") if seen.kind == "update" else ("*", "down")
            self._chunk_bytes[way[0], way[1], artifact] += len(data)
        return artifact

    def restore(
        self, bytes_per_round: Mapping[str, Mapping[str, Mapping[str, int]]], artifacts: Mapping[str, bytes]
    ) -> None:
        """Continue an earlier recording, with its byte counts and complete artifacts."""
        for device, ways in bytes_per_round.items():
            for way, rounds in ways.items():
                for round_number, size in rounds.items():
                    self._control_bytes[device, way, int(round_number)] += size
        for artifact, data in artifacts.items():
            self.artifacts[artifact] = describe(artifact, data)

    @property
    def is_finished(self) -> bool:
        """Whether the end of the federation was announced and every started transfer is complete."""
        return self.finished_with in self.artifacts and not self._open()

    def _open(self) -> list[str]:
        return sorted(name for name, incoming in self._incoming.items() if incoming.chunks or incoming.given_up)

    def _bases_not_seen(self) -> list[str]:
        """Return aggregates that were not recorded although updates are encoded as differences from them; such updates can't be read as values."""
        deltas = [seen for seen in self.artifacts.values() if any(map(is_delta, seen.codecs))]
        return sorted({str(seen.base) for seen in deltas} - self.artifacts.keys())

    def _feed_chunk(self, parsed: ParsedTopic, payload: bytes) -> dict[str, bytes]:
        sender, way = _direction(parsed)
        try:
            chunk = parse_chunk(payload)
        except WireError:
            self._damaged += 1
            self._control_bytes[sender, way, 0] += len(payload)
            return {}
        self._chunk_bytes[sender, way, chunk.artifact] += len(payload)
        if chunk.artifact in self.artifacts:
            return {}
        incoming = self._incoming.setdefault(chunk.artifact, _Incoming())
        if chunk.index not in incoming.chunks and not incoming.given_up:
            incoming.chunks[chunk.index] = chunk.data
            self._held += len(chunk.data)
        if self._held > MAX_HELD_BYTES:
            self._held -= sum(map(len, incoming.chunks.values()))
            incoming.chunks.clear()
            incoming.given_up = True
        return self._complete(chunk.artifact)

    def _complete(self, artifact: str) -> dict[str, bytes]:
        incoming = self._incoming.get(artifact)
        if incoming is None or not incoming.is_complete:
            return {}
        data = b"".join(chunk for _, chunk in sorted(incoming.chunks.items()))
        self._held -= len(data)
        incoming.chunks.clear()
        if hashlib.sha256(data).hexdigest() != artifact:
            self._damaged += 1
            return {}
        del self._incoming[artifact]
        self.artifacts[artifact] = describe(artifact, data)
        return {artifact: data}

    def _feed_message(self, parsed: ParsedTopic, payload: bytes) -> dict[str, bytes]:
        fields = self._read_message(payload)
        sender, way = _direction(parsed)
        self._control_bytes[sender, way, _number(fields.get("round"))] += len(payload)
        if not fields:
            if payload:  # an empty payload clears a retained message
                self._damaged += 1
            return {}
        kind = str(fields.get("kind", "unknown"))
        entry = self._messages.setdefault(kind, _Messages())
        entry.count += 1
        entry.fields |= set(fields) - _ENVELOPE_FIELDS
        entry.senders.add(str(fields.get("sender", "unknown")))
        if kind == "key_chain":
            self._learn_keys(payload)
        completed: dict[str, bytes] = {}
        for value in fields.values():
            if isinstance(value, dict) and isinstance(value.get("id"), str):
                completed |= self._learn_reference(value, _number(fields.get("round")))
        final = fields.get("aggregate")
        if kind == "finished" and isinstance(final, dict):
            self.finished_with = str(final.get("id"))
        return completed

    def _learn_keys(self, payload: bytes) -> None:
        """Record the coordinator's keys, and any error in their order."""
        try:
            chain = read_envelope(payload).message
            if isinstance(chain, KeyChain):
                check_links(chain)
                for link in chain.links:
                    if self._keys.setdefault(link.serial, link.new) != link.new:
                        raise OrderError(f"key {link.serial} was announced twice, with different content")
        except WireError as error:
            if str(error) not in self._key_problems and len(self._key_problems) < MAX_PROBLEMS:
                self._key_problems.append(str(error))

    def _learn_reference(self, value: Mapping[str, object], round_number: int) -> dict[str, bytes]:
        artifact, size, chunk_bytes = str(value["id"]), _number(value.get("size")), _number(value.get("chunk_bytes"))
        self._round_of.setdefault(artifact, round_number)
        if artifact in self.artifacts or size < 1 or chunk_bytes < 1:
            return {}
        incoming = self._incoming.setdefault(artifact, _Incoming())
        incoming.size, incoming.chunk_bytes = size, chunk_bytes
        return self._complete(artifact)

    @staticmethod
    def _read_message(payload: bytes) -> Mapping[str, object]:
        if not payload.startswith(ENVELOPE_MAGIC):
            return {}
        try:
            fields = json.loads(payload[OVERHEAD_BYTES:])
        except (ValueError, RecursionError):  # of deeply nested lists
            return {}
        return fields if isinstance(fields, dict) else {}

    def sealed_bits(self) -> dict[str, object] | None:
        """Check all sealed numbers that were sent; None if there were none."""
        found = [worst for seen in self.artifacts.values() for worst in seen.worst_bits.values()]
        bits = SealedBits.of(found)
        return {**vars(bits), "is_fair": bits.is_fair, "text": str(bits)} if found else None

    def bytes_per_round(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return payload bytes by device (`*`: broadcasts), direction (`up`, `down`) and round (`0`: outside any round)."""
        counted = Counter(self._control_bytes)
        for (device, way, artifact), size in self._chunk_bytes.items():
            seen = self.artifacts.get(artifact)
            is_of_round = seen is not None and seen.kind in ("update", "aggregate")
            round_number = seen.round if seen is not None and is_of_round else self._round_of.get(artifact, 0)
            counted[device, way, round_number] += size
        totals: dict[str, dict[str, dict[str, int]]] = {}
        for (device, way, round_number), size in counted.items():
            totals.setdefault(device, {}).setdefault(way, {})[str(round_number)] = size
        return totals

    def record(self) -> dict[str, object]:
        """Return the whole recording, as written to `wire.json`."""
        artifacts = sorted(self.artifacts.values(), key=lambda seen: (seen.round, seen.kind, seen.sender, seen.id))
        return {
            "format": 1,
            "federation": self.federation,
            "finished": self.is_finished,
            "parts_on_wire": sorted({part for seen in artifacts for part in seen.parts}),
            "fields_on_wire": sorted({name for seen in artifacts for name in seen.report}),
            "bytes": self.bytes_per_round(),
            "artifacts": [vars(seen) for seen in artifacts],
            "messages": {
                kind: {"count": entry.count, "fields": sorted(entry.fields), "senders": sorted(entry.senders)}
                for kind, entry in sorted(self._messages.items())
            },
            "sealed": self.sealed_bits(),
            "coordinator_keys": {str(serial): key for serial, key in sorted(self._keys.items())},
            "key_problems": self._key_problems,
            "incomplete": self._open(),
            "bases_not_seen": self._bases_not_seen(),
            "undecoded": [seen.id for seen in artifacts if seen.problem],
            "damaged_frames": self._damaged,
            "foreign_frames": self._foreign,
        }
