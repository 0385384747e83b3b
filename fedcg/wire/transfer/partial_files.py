"""Partially received artifacts on disk: chunks that a process received before it was killed are not fetched again.

A transfer is one file, `<name>.part`: every chunk at its offset, then the journal. The journal has a head (artifact, size, chunk size)
and one record per chunk (index, the chunk's hash). The file is not fsynced and does not depend on the order of writes: a process that
opens it again reads every recorded chunk and keeps those whose hashes match. So a torn or altered file loses only its bad chunks. The
sha256 of the whole is always checked before `finish` removes the journal and hands the file over.
"""

import hashlib
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from fedcg.wire.errors import CapacityError, IntegrityError, MalformedError
from fedcg.wire.messages.schemas import ArtifactRef
from fedcg.wire.transfer.chunks import CHECK_BYTES, Chunk, check_chunk, chunk_check, chunk_length
from fedcg.wire.transfer.windows import ChunkRecord, Window

MAGIC = b"FCGPART1"
_HEAD = struct.Struct(">8s32sQI")
_CRC = struct.Struct(">I")
HEAD_BYTES = _HEAD.size + _CRC.size
_RECORD = struct.Struct(f">I{CHECK_BYTES}s")
RECORD_BYTES = _RECORD.size + _CRC.size
EXPIRE_S = 7 * 24 * 3600.0  # after a transfer was last opened, `collect` deletes it
_NAME = re.compile(r"(?:[a-z0-9][a-z0-9-]{0,62}@)?[0-9a-f]{64}")


class DurableReceiver(ChunkRecord):
    """The record of an artifact's chunks and the file that holds them. Opening it finds chunks that are already in the file.

    Args:
        path: of the file; created if missing, replaced if it is of another transfer.
        ref, window, stall_s: as for `ChunkRecord`.

    Attributes:
        resumed: chunks from an earlier process whose hashes match.
        fresh: chunks received since.
        repeated: chunks received again.
    """

    def __init__(self, path: Path, ref: ArtifactRef, window: Window | None = None, stall_s: float = 2.0) -> None:
        super().__init__(ref, window, stall_s)
        self._path = path
        self._head = _sealed(_HEAD.pack(MAGIC, bytes.fromhex(ref.id), ref.size, ref.chunk_bytes))
        self._end = ref.size  # of the journal
        self._digest = hashlib.sha256()
        self._hashed = 0  # chunks, from the first one on, that are in the digest
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            present, _ = self._recover()
        except BaseException:
            self.close()
            raise
        self.restore(present)
        self.resumed = len(present)
        self.fresh = self.repeated = 0

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of chunks by origin, for the event log."""
        return {"resumed": self.resumed, "received": self.fresh, "repeated": self.repeated}

    def feed(self, chunk: Chunk, now: float) -> bool:
        """Store a chunk, requested or not; True if it is new.

        Raises:
            MalformedError: an index or a length that this artifact can't have.
            OSError: it can't be written; the chunk is requested again later.
        """
        if not check_chunk(self.ref, chunk):
            return False
        if self.has(chunk.index):
            self.repeated += 1
            self.received(chunk.index, now)
            return False
        _write_all(self._file, chunk.data, chunk.index * self.ref.chunk_bytes)
        check = chunk.check or chunk_check(chunk.artifact, chunk.index, chunk.data)
        _write_all(self._file, _sealed(_RECORD.pack(chunk.index, check)), self._end)
        self._end += RECORD_BYTES
        self._hash(chunk.index, chunk.data)
        self.fresh += 1
        return self.received(chunk.index, now)

    def finish(self) -> Path:
        """The file with the whole artifact, verified and closed. The caller adopts it and makes it durable, or discards it.

        Raises:
            MalformedError: not complete yet.
            IntegrityError: it does not have the announced sha256. The receiver continues with the chunks whose own hashes match, or
                starts again if all of them match.
        """
        if not self.complete:
            raise MalformedError("an artifact was read before all its chunks arrived")
        while self._hashed < self.ref.chunks:
            self._hash(self._hashed, self._read(self._hashed))
        if self._digest.hexdigest() != self.ref.id:
            present, damaged = self._recover()
            if not damaged:
                present = []
                self._start_again()
            self.restore(present)
            raise IntegrityError(
                f"the chunks of artifact {self.ref.id} don't have its sha256; "
                f"{self.ref.chunks - len(present)} of {self.ref.chunks} are fetched again"
            )
        os.ftruncate(self._file, self.ref.size)
        self.close()
        return self._path

    def close(self) -> None:
        """Close the file; received chunks stay on disk."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _recover(self) -> tuple[list[int], int]:
        """The chunks on disk whose hashes match, and the number of those whose hashes don't. Restarts the digest."""
        self._digest, self._hashed = hashlib.sha256(), 0
        size = os.fstat(self._file).st_size
        if size == self.ref.size and self._is_whole():
            return list(range(self.ref.chunks)), 0
        if os.pread(self._file, HEAD_BYTES, self.ref.size) != self._head:
            self._start_again()
            return [], 0
        begin = self.ref.size + HEAD_BYTES
        records = (size - begin) // RECORD_BYTES  # a torn last record is overwritten
        checks: dict[int, bytes] = {}
        for start in range(0, records, 4096):
            wanted = min(4096, records - start) * RECORD_BYTES
            checks.update(_records(os.pread(self._file, wanted, begin + start * RECORD_BYTES), self.ref.chunks))
        self._end = begin + records * RECORD_BYTES
        present = []
        for index in sorted(checks):
            data = self._read(index)
            if chunk_check(self.ref.id, index, data) == checks[index]:
                present.append(index)
                self._hash(index, data)
        os.utime(self._file)  # a file in use does not expire
        return present, len(checks) - len(present)

    def _is_whole(self) -> bool:
        """Whether the file is finished and was not adopted."""
        for index in range(self.ref.chunks):
            self._hash(index, self._read(index))
        return self._digest.hexdigest() == self.ref.id

    def _hash(self, index: int, data: bytes | memoryview) -> None:
        """Add a chunk to the digest, if it is the next one."""
        if index == self._hashed:
            self._digest.update(data)
            self._hashed += 1

    def _start_again(self) -> None:
        self._digest, self._hashed = hashlib.sha256(), 0
        os.ftruncate(self._file, 0)
        _write_all(self._file, self._head, self.ref.size)  # sparse: the part before it uses no space yet
        self._end = self.ref.size + HEAD_BYTES

    def _read(self, index: int) -> bytes:
        return os.pread(self._file, chunk_length(self.ref, index), index * self.ref.chunk_bytes)


class Partials:
    """A folder of partially received artifacts, bounded in number and bytes. The oldest ones that are not in use are deleted first.

    Args:
        root: the folder, on the file system of the complete artifacts; created with the first transfer.
        max_files: the most transfers to keep.
        max_bytes: the largest sum of their announced sizes.
        clock: unix time, as in the files' time stamps.
    """

    def __init__(self, root: Path, max_files: int, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._clock = clock
        self._open: set[str] = set()
        self._kept: dict[str, int] | None = None  # size by name, oldest first; read from the folder once

    def open(self, ref: ArtifactRef, window: Window | None = None, owner: str = "") -> DurableReceiver:
        """The receiver of a transfer; it continues with the file of an earlier process if there is one.

        Args:
            ref: the announced artifact.
            window: how much is requested at once; None: everything.
            owner: its sender; transfers of different owners never share a file.

        Raises:
            CapacityError: transfers in progress use up the limits.
            OSError: the disk is full or broken.
        """
        name = _name(ref.id, owner)
        self._make_room(name, ref.size)
        receiver = DurableReceiver(self._part(name), ref, window)
        self._open.add(name)
        kept = self._known()
        kept.pop(name, None)
        kept[name] = ref.size
        return receiver

    def release(self, artifact: str, owner: str = "") -> None:
        """Stop a transfer; its file stays for later."""
        self._open.discard(_name(artifact, owner))

    def discard(self, artifact: str, owner: str = "") -> None:
        """Stop a transfer and delete its file."""
        self.release(artifact, owner)
        self._delete(_name(artifact, owner))

    def clear(self) -> None:
        """Delete all transfers that are not in progress."""
        for name in self._known().keys() - self._open:
            self._delete(name)

    def collect(self) -> None:
        """Delete expired files and files that belong to no transfer."""
        if not self._root.is_dir():
            return
        oldest = self._clock() - EXPIRE_S
        for path in list(self._root.iterdir()):
            if path.stem in self._open:
                continue
            is_ours = path.suffix == ".part" and _NAME.fullmatch(path.stem) is not None
            stat = _stat(path)
            if not is_ours or (stat is not None and stat.st_mtime < oldest):
                path.unlink(missing_ok=True)
        self._kept = None

    def _make_room(self, name: str, size: int) -> None:
        kept = self._known()
        others = len(kept) - (name in kept)
        taken = sum(kept.values()) - kept.get(name, 0)
        for other in list(kept):
            if others < self._max_files and taken + size <= self._max_bytes:
                return
            if other != name and other not in self._open:
                others, taken = others - 1, taken - kept[other]
                self._delete(other)
        if others >= self._max_files or taken + size > self._max_bytes:
            raise CapacityError(
                f"{others} transfers are in progress; another one of {size} bytes must wait "
                f"(limits: {self._max_files} transfers, {self._max_bytes} bytes)"
            )

    def _known(self) -> dict[str, int]:
        if self._kept is None:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = [path.stem for path in self._root.glob("*.part") if _NAME.fullmatch(path.stem)]
            found = [(name, stat) for name in names if (stat := _stat(self._part(name))) is not None]
            found.sort(key=lambda entry: entry[1].st_mtime)
            self._kept = {name: stat.st_size for name, stat in found}
        return self._kept

    def _delete(self, name: str) -> None:
        self._known().pop(name, None)
        self._part(name).unlink(missing_ok=True)

    def _part(self, name: str) -> Path:
        return self._root / f"{name}.part"


def _stat(path: Path) -> os.stat_result | None:
    """The size and time of a file; None if another thread has just adopted it."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _name(artifact: str, owner: str) -> str:
    name = f"{owner}@{artifact}" if owner else artifact
    if not _NAME.fullmatch(name):
        raise MalformedError(f"{name!r} can't name a transfer")
    return name


def _sealed(body: bytes) -> bytes:
    return body + _CRC.pack(zlib.crc32(body))


def _records(block: bytes, chunks: int) -> Iterator[tuple[int, bytes]]:
    for start in range(0, len(block) - RECORD_BYTES + 1, RECORD_BYTES):
        record = block[start : start + RECORD_BYTES]
        if _sealed(record[: _RECORD.size]) != record:
            continue  # torn or altered: that chunk is fetched again
        index, check = _RECORD.unpack_from(record)
        if index < chunks:
            yield index, check


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
