"""Generations of the private state: written completely, activated by one atomic rename of `CURRENT`. Two are kept.

    generations/<n>/state.safetensors   tensors named slot/part/name, e.g. personal/extractor/conv1.weight, and extras/group/name
    generations/<n>/snapshot.json       the round's training data: files, their digests and splits
    generations/<n>/update.bin          the outbox: the packed update of the round, if any
    generations/<n>/state.json          round attempt (key "cursor"), spec, scores, and the sha256 of each file above
    CURRENT                             the number of the active generation, and a checksum
    checkpoint.bin                      the round in training; useless once it is committed

After a crash before the rename, the old generation is active; after it, the new one. If the newest generation fails its checksums, the one
before it is used. An unreadable disk is not treated as damage, because falling back would train a round twice.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from edge_client.errors import StoreDamagedError, unreadable
from fedcg.files import file_sha256, fsync_path, replace_durably, write_durably
from fedcg.values import Value
from fedcg.wire.artifacts.artifacts import artifact_id
from fedcg.wire.artifacts.payload import Array, PartArrays, flatten
from fedcg.wire.messages.schemas import RoundAttempt
from fedcg.wire.parts import Part

SPLITS = ("train", "val", "test")
CHECKPOINT_FILE = "checkpoint.bin"
GENERATION_FORMAT = 1
_EXTRAS = "extras"
_POINTER = re.compile(rb"([0-9]{1,18}) ([0-9a-f]{16})\n")
_DIGEST_BYTES = 32


class SnapshotFile(Value):
    """One image.

    Attributes:
        path: relative to the data root.
        sha256: of the file's bytes, in hex.
        label: index into the spec's classes.
        split: train, val or test.
    """

    path: str
    sha256: str
    label: int
    split: str


class Snapshot(Value):
    """All images of a round, ordered by path within each split.

    Accepting a round fixes its snapshot. The round and all its repetitions use only this snapshot, even if the folder changes meanwhile.

    Attributes:
        defence: the data defence applied to the training images, with its parameters; empty without one.
        defended: digest of the defended training images.
    """

    files: tuple[SnapshotFile, ...]
    defence: str = ""
    defended: str = ""

    def split(self, name: str) -> tuple[SnapshotFile, ...]:
        """The files of one split."""
        return tuple(file for file in self.files if file.split == name)

    def counts(self) -> dict[str, int]:
        """Images per split."""
        return {name: len(self.split(name)) for name in SPLITS}

    def encode(self) -> bytes:
        """Canonical JSON. The same snapshot always gives the same bytes."""
        files = [asdict(file) for file in self.files]
        whole = {"defence": self.defence, "defended": self.defended, "files": files} if self.defence else files
        return json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """The sha256 of `encode()`, in hex."""
        return hashlib.sha256(self.encode()).hexdigest()

    @staticmethod
    def decode(payload: bytes) -> Snapshot:
        """The snapshot in `payload`.

        Raises:
            ValueError: not a snapshot.
        """
        try:
            found = json.loads(payload)
            about = found if isinstance(found, dict) else {"files": found}
            return Snapshot(**{**about, "files": tuple(SnapshotFile(**entry) for entry in about["files"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a data snapshot: {error}") from error


class OutboxEntry(Value):
    """An update that waits for its receipt.

    Attributes:
        artifact: sha256 of the update's bytes, in hex.
    """

    round_attempt: Annotated[RoundAttempt, Field(alias="cursor")]
    artifact: str
    size: int


class Generation(Value):
    """The description of one generation, without its tensors.

    Attributes:
        number: counts up with every commit.
        round_attempt: the last trained round attempt.
        spec: digest of its spec.
        scores: figures kept across rounds, e.g. the best validation accuracy.
        backbone: of the private extractor if the spec lists several; else empty.
    """

    number: int
    round_attempt: Annotated[RoundAttempt, Field(alias="cursor")]
    spec: str
    snapshot: str
    scores: Mapping[str, float]
    outbox: OutboxEntry | None
    checksums: Mapping[str, str] = field(default_factory=dict)
    backbone: str = ""


_GENERATION = TypeAdapter(Generation)
_DAMAGE = (FileNotFoundError, ValueError, KeyError, TypeError)
"""Errors that mean an altered description or file. Any other OSError is a disk error."""


class StoredState(Value):
    """A generation with its tensors per slot (`personal`, `shadow`, `best`, ...) and part, and its method's `extras` by name."""

    generation: Generation
    slots: Mapping[str, PartArrays]
    extras: Mapping[str, Mapping[str, Array]]


class NewGeneration(Value):
    """Everything that one commit saves together."""

    round_attempt: RoundAttempt
    spec: str
    slots: Mapping[str, PartArrays]
    snapshot: Snapshot
    scores: Mapping[str, float]
    update: bytes | None
    extras: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    backbone: str = ""


class Generations:
    """The folder `generations` and the file `CURRENT` of one private store."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = root / "generations"
        self._pointer = root / "CURRENT"
        # the content of CURRENT, and its verified generation
        self._verified: tuple[int | None, Generation] | None = None

    def newest(self) -> Generation | None:
        """The newest committed generation, from its description only. For the agent's loop, which hashes no state.

        A generation is verified by `current` when a process starts, and by `load` before training. Later generations were just written by the
        trainer.

        Raises:
            StoreDamagedError: see `current`.
            StoreError: the disk can't be read.
        """
        try:
            pointed = self._pointed()
            if self._verified is not None and self._verified[0] == pointed:
                return self._verified[1]
            if pointed is not None:
                return self._described(pointed)
        except _DAMAGE:
            pass  # `current` distinguishes an empty store from damage
        return self.current()[0]

    def current(self) -> tuple[Generation | None, tuple[str, ...]]:
        """The newest committed generation that passes its checksums, and the problems of newer ones.

        Raises:
            StoreDamagedError: there were commits, but no generation is intact.
            StoreError: the disk can't be read, so its content is unknown.
        """
        try:
            pointed = self._pointed()
        except FileNotFoundError:
            return None, ()
        problems = [] if pointed is not None else ["CURRENT is damaged; the newest intact generation is used"]
        for number in self._candidates(pointed):
            found = self._read(number)
            if isinstance(found, Generation):
                self._verified = pointed, found
                return found, tuple(problems)
            problems.append(f"generation {number} is damaged: {found}")
        raise StoreDamagedError(
            f"{self._root}: {'; '.join(problems) or 'CURRENT names no generation'}. Restore the folder from a backup, "
            "or move it away to let this device start from the beginning."
        )

    def load(self) -> StoredState | None:
        """The current generation with its tensors, or None before the first commit.

        Raises:
            StoreDamagedError: see `current`.
            StoreError: see `current`.
        """
        generation, _ = self.current()
        if generation is None:
            return None
        payload = (self._path(generation.number) / "state.safetensors").read_bytes()
        return StoredState(generation, *_split_names(load_safetensors(payload)))

    def update_path(self, generation: Generation) -> Path:
        """The path of a generation's outbox."""
        return self._path(generation.number) / "update.bin"

    def update_bytes(self, generation: Generation) -> bytes:
        """The outbox of a generation."""
        return self.update_path(generation).read_bytes()

    def snapshot(self, generation: Generation) -> Snapshot:
        """The data snapshot of a generation."""
        return Snapshot.decode((self._path(generation.number) / "snapshot.json").read_bytes())

    def commit(self, new: NewGeneration) -> Generation:
        """Make a new generation the current one, atomically and durably."""
        before = self.newest()
        number = max([*self._numbers(), 0 if before is None else before.number]) + 1
        files = {"state.safetensors": _join_names(new.slots, new.extras), "snapshot.json": new.snapshot.encode()}
        outbox = None
        if new.update is not None:
            files["update.bin"] = new.update
            outbox = OutboxEntry(new.round_attempt, artifact_id(new.update), len(new.update))
        checksums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        generation = Generation(
            number, new.round_attempt, new.spec, new.snapshot.digest, dict(new.scores), outbox, checksums, new.backbone
        )
        self._write(generation, files)
        replace_durably(self._pointer, f"{number} {_check_of(number)}\n")
        self._prune({number} if before is None else {number, before.number})
        return generation

    def _write(self, generation: Generation, files: Mapping[str, bytes]) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = self._folder / ".unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        for name, data in files.items():
            write_durably(unfinished / name, data)
        described = {"format": GENERATION_FORMAT, **_GENERATION.dump_python(generation, by_alias=True)}
        if not generation.backbone:  # keeps the format from before backbones could be chosen
            del described["backbone"]
        body = json.dumps(described, sort_keys=True).encode()
        check = hashlib.sha256(body).hexdigest()
        write_durably(unfinished / "state.json", body + b"\n" + check.encode() + b"\n")
        fsync_path(unfinished)
        unfinished.rename(self._path(generation.number))
        fsync_path(self._folder)

    def _read(self, number: int) -> Generation | Exception:
        """A generation that passes its checksums, or its error."""
        try:
            generation = self._described(number)
            for name, expected in generation.checksums.items():
                if file_sha256(self._path(number) / name) != expected:
                    return ValueError(f"{name} fails its checksum")
        except _DAMAGE as error:
            return error
        except OSError as error:
            raise unreadable(self._path(number), error) from error
        return generation

    def _described(self, number: int) -> Generation:
        folder = self._path(number)
        body, _, check = (folder / "state.json").read_bytes().partition(b"\n")
        if check != hashlib.sha256(body).hexdigest().encode() + b"\n":
            raise ValueError("state.json fails its checksum")
        values = json.loads(body)
        if values.pop("format") != GENERATION_FORMAT:
            raise ValueError("unknown generation format")
        return _GENERATION.validate_python(values)

    def _candidates(self, pointed: int | None) -> list[int]:
        numbers = sorted(self._numbers(), reverse=True)
        # Numbers above the pointer were never committed. If the pointer is unreadable, all numbers are tried.
        return [number for number in numbers if pointed is None or number <= pointed]

    def _pointed(self) -> int | None:
        """The number in CURRENT; None if the file is damaged or lost.

        Raises:
            FileNotFoundError: nothing was committed yet.
            StoreError: the disk can't be read.
        """
        try:
            found = _POINTER.fullmatch(self._pointer.read_bytes())
        except FileNotFoundError:
            if max(self._numbers(), default=0) > 1:  # there was an earlier commit, so the file is lost
                return None
            raise
        except OSError as error:
            raise unreadable(self._pointer, error) from error
        if found is None or found[2].decode() != _check_of(int(found[1])):
            return None
        return int(found[1])

    def _numbers(self) -> list[int]:
        return [int(path.name) for path in self._folder.glob("[0-9]*") if path.name.isdecimal()]

    def _path(self, number: int) -> Path:
        return self._folder / str(number)

    def _prune(self, kept: set[int]) -> None:
        for number in self._numbers():
            if number not in kept:
                shutil.rmtree(self._path(number), ignore_errors=True)


def _check_of(number: int) -> str:
    return hashlib.sha256(b"fedcg current %d" % number).hexdigest()[:16]


def _join_names(slots: Mapping[str, PartArrays], extras: Mapping[str, Mapping[str, Array]]) -> bytes:
    named = {f"{slot}/{key}": tensor for slot, parts in slots.items() for key, tensor in flatten(parts).items()}
    named |= {f"{_EXTRAS}/{group}/{name}": one for group, some in extras.items() for name, one in some.items()}
    return save_safetensors({key: np.asarray(named[key], order="C") for key in sorted(named)})


def _split_names(
    named: Mapping[str, Array],
) -> tuple[dict[str, dict[Part, dict[str, Array]]], dict[str, dict[str, Array]]]:
    slots: dict[str, dict[Part, dict[str, Array]]] = {}
    extras: dict[str, dict[str, Array]] = {}
    for key, tensor in named.items():
        slot, group, name = key.split("/", 2)
        if slot == _EXTRAS:
            extras.setdefault(group, {})[name] = tensor
        else:
            slots.setdefault(slot, {}).setdefault(Part(group), {})[name] = tensor
    return slots, extras


class CheckpointFile:
    """The file `checkpoint.bin` of one private store.

    Its content: a sha256 of the rest, a mark of everything that the round depends on, and tensors by name. If the file is damaged, or is for
    another round or other settings, the round starts from the beginning.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / CHECKPOINT_FILE

    def load(self, mark: bytes) -> tuple[Mapping[str, Array], str]:
        """The last tensors saved under this mark, or none; and the problem with the file, or an empty string.

        Args:
            mark: 32 bytes, a digest of everything that the round depends on.
        """
        try:
            payload = self._path.read_bytes()
            body = payload[_DIGEST_BYTES:]
            if hashlib.sha256(body).digest() != payload[:_DIGEST_BYTES]:
                return {}, f"{self._path} is damaged"
            return (load_safetensors(body[_DIGEST_BYTES:]), "") if body.startswith(mark) else ({}, "")
        except FileNotFoundError:
            return {}, ""
        except (OSError, SafetensorError) as error:
            return {}, str(error)

    def save(self, mark: bytes, tensors: Mapping[str, Array]) -> None:
        """Save tensors under a mark, replacing earlier ones.

        Raises:
            OSError: the disk is full or failing; the earlier ones are unchanged.
        """
        body = mark + save_safetensors(dict(tensors))
        replace_durably(self._path, hashlib.sha256(body).digest() + body)

    def delete(self) -> None:
        """Delete the checkpoint."""
        self._path.unlink(missing_ok=True)
