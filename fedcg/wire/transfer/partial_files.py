"""Half-received artifacts on disk: chunks that a process received before it was killed are not fetched again.

A transfer is one file, `<name>.part`: every chunk at its place, and behind them the journal, a head (artifact, size, chunk
size) and one record per chunk (index, the chunk's own hash). Nothing is fsynced on the way, and no order of writing is relied
on: a process that opens the file again reads every recorded chunk and keeps it only when its hash fits, so a torn or altered file
costs its bad chunks and no others. The sha256 of the whole is always checked before `finish` cuts the journal off and hands
the file over.
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
from fedcg.wire.transfer.windows import Grants, Ranges, Window

MAGIC = b"FCGPART1"
_HEAD = struct.Struct(">8s32sQI")
_CRC = struct.Struct(">I")
HEAD_BYTES = _HEAD.size + _CRC.size
_RECORD = struct.Struct(f">I{CHECK_BYTES}s")
RECORD_BYTES = _RECORD.size + _CRC.size
EXPIRE_S = 7 * 24 * 3600.0
_NAME = re.compile(r"(?:[a-z0-9][a-z0-9-]{0,62}@)?[0-9a-f]{64}")


class PartialFile:
    """The file of one transfer. Opening it finds the chunks that are there already (`present`).

    Args:
        path: of the file; made when it is missing, one of another transfer is replaced.
        ref: the announced artifact; the caller has checked that its size is acceptable.

    Attributes:
        present: chunks that an earlier process left and whose hashes fit.
        damaged: recorded chunks whose hashes do not fit any more.
    """

    def __init__(self, path: Path, ref: ArtifactRef) -> None:
        self.ref = ref
        self._path = path
        self._head = _sealed(_HEAD.pack(MAGIC, bytes.fromhex(ref.id), ref.size, ref.chunk_bytes))
        self._end = ref.size  # of the journal
        self.present: list[int] = []
        self.damaged = 0
        self._digest = hashlib.sha256()
        self._hashed = 0  # chunks, from the first one on, that are in the digest
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def write(self, chunk: Chunk) -> None:
        """Keep a chunk that belongs to the artifact and is not here yet."""
        _write_all(self._file, chunk.data, chunk.index * self.ref.chunk_bytes)
        check = chunk.check or chunk_check(chunk.artifact, chunk.index, chunk.data)
        _write_all(self._file, _sealed(_RECORD.pack(chunk.index, check)), self._end)
        self._end += RECORD_BYTES
        if chunk.index == self._hashed:
            self._digest.update(chunk.data)
            self._hashed += 1

    def finish(self) -> Path:
        """Check the whole and return its path; the file is closed. The caller that takes it over makes it durable.

        Raises:
            IntegrityError: it does not have the announced sha256. The chunks still `present` then are those whose own hashes
                fit, when others do not; when all of them fit, none is kept.
        """
        while self._hashed < self.ref.chunks:
            self._digest.update(self._read(self._hashed))
            self._hashed += 1
        if self._digest.hexdigest() != self.ref.id:
            self._forget()
            self._recover()
            if not self.damaged:
                self._start_again()
            missing = self.ref.chunks - len(self.present)
            raise IntegrityError(
                f"the chunks of artifact {self.ref.id} don't have its sha256; {missing} of {self.ref.chunks} are fetched again"
            )
        os.ftruncate(self._file, self.ref.size)
        self.close()
        return self._path

    def close(self) -> None:
        """Close the file; it stays."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _recover(self) -> None:
        size = os.fstat(self._file).st_size
        if size == self.ref.size and self._is_whole():
            return
        if os.pread(self._file, HEAD_BYTES, self.ref.size) != self._head:
            self._start_again()
            return
        begin = self.ref.size + HEAD_BYTES
        records = (size - begin) // RECORD_BYTES  # a torn last record is written over
        checks: dict[int, bytes] = {}
        for start in range(0, records, 4096):
            wanted = min(4096, records - start) * RECORD_BYTES
            checks.update(_records(os.pread(self._file, wanted, begin + start * RECORD_BYTES), self.ref.chunks))
        self._end = begin + records * RECORD_BYTES
        for index in sorted(checks):
            data = self._read(index)
            if chunk_check(self.ref.id, index, data) != checks[index]:
                self.damaged += 1
                continue
            self.present.append(index)
            if index == self._hashed:
                self._digest.update(data)
                self._hashed += 1
        os.utime(self._file)  # a file in use does not expire

    def _is_whole(self) -> bool:
        """Whether the file was finished and not taken over."""
        for index in range(self.ref.chunks):
            self._digest.update(self._read(index))
        if self._digest.hexdigest() != self.ref.id:
            return False
        self._hashed = self.ref.chunks
        self.present = list(range(self.ref.chunks))
        return True

    def _forget(self) -> None:
        self.present = []
        self.damaged = 0
        self._digest = hashlib.sha256()
        self._hashed = 0

    def _start_again(self) -> None:
        self._forget()
        os.ftruncate(self._file, 0)
        _write_all(self._file, self._head, self.ref.size)  # sparse: the part in front takes no room yet
        self._end = self.ref.size + HEAD_BYTES

    def _read(self, index: int) -> bytes:
        return os.pread(self._file, chunk_length(self.ref, index), index * self.ref.chunk_bytes)


class DurableReceiver:
    """Puts one artifact together on disk and names the chunks to ask for, within a window or all at once.

    Attributes:
        resumed: chunks that were on disk when it was opened.
        fresh: chunks that came since.
        repeated: chunks that came and were here already.
    """

    def __init__(self, file: PartialFile, window: Window | None = None, stall_s: float = 2.0) -> None:
        self._file = file
        self._grants = Grants(file.ref, window, stall_s)
        self._grants.restore(file.present)
        self.resumed = len(file.present)
        self.fresh = self.repeated = 0

    @property
    def ref(self) -> ArtifactRef:
        """The artifact being received."""
        return self._file.ref

    @property
    def complete(self) -> bool:
        """Whether every chunk is here (their sum is checked by `finish`)."""
        return self._grants.complete

    @property
    def under_way(self) -> int:
        """Chunks granted and not received."""
        return self._grants.under_way

    def feed(self, chunk: Chunk, now: float) -> bool:
        """Take a chunk, asked for or not; True when it brought something new.

        Raises:
            MalformedError: an index or a length that this artifact can't have.
            OSError: the disk does not take it; the chunk is asked for again later.
        """
        if not check_chunk(self.ref, chunk):
            return False
        if self._grants.has(chunk.index):
            self.repeated += 1
            self._grants.received(chunk.index, now)
            return False
        self._file.write(chunk)
        self.fresh += 1
        return self._grants.received(chunk.index, now)

    def next_need(self, now: float, room: int | None = None) -> Ranges | None:
        """Chunks to grant now; see `Grants.next_need`."""
        return self._grants.next_need(now, room)

    def finish(self) -> Path:
        """The file with the whole artifact: verified and closed; adopt it, or leave it to be discarded.

        Raises:
            MalformedError: not complete yet.
            IntegrityError: the chunks don't add up to the announced sha256; the receiver goes on with those that are sound, or
                from nothing when no chunk's hash is wrong.
        """
        if not self.complete:
            raise MalformedError("an artifact was read before all its chunks were there")
        try:
            return self._file.finish()
        except IntegrityError:
            self._grants.start_again()
            self._grants.restore(self._file.present)
            raise

    def close(self) -> None:
        """Close the file; received chunks stay on disk."""
        self._file.close()


class Partials:
    """A folder of half-received artifacts, bounded in number and bytes; the oldest that are not in use are deleted first.

    Args:
        root: the folder, on the file system where the artifacts end up; made when the first transfer begins.
        max_files: transfers kept at most.
        max_bytes: the sum of their announced sizes at most.
        expire_s: transfers that were not opened for so long are deleted by `collect`.
        clock: unix time, that of the files.
    """

    def __init__(
        self,
        root: Path,
        max_files: int,
        max_bytes: int,
        expire_s: float = EXPIRE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = root
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._expire_s = expire_s
        self._clock = clock
        self._open: set[str] = set()
        self._kept: dict[str, int] | None = None  # size by name, the oldest first; read from the folder once

    def open(self, ref: ArtifactRef, owner: str = "") -> PartialFile:
        """The file of a transfer, the one that an earlier process left if there is one.

        Args:
            ref: the announced artifact.
            owner: its sender; transfers of different owners never share a file.

        Raises:
            CapacityError: the bounds are taken up by transfers that are under way.
            OSError: the disk is full or broken.
        """
        name = _name(ref.id, owner)
        self._make_room(name, ref.size)
        file = PartialFile(self._part(name), ref)
        self._open.add(name)
        kept = self._known()
        kept.pop(name, None)
        kept[name] = ref.size
        return file

    def release(self, artifact: str, owner: str = "") -> None:
        """End the work on a transfer; its file stays for later."""
        self._open.discard(_name(artifact, owner))

    def discard(self, artifact: str, owner: str = "") -> None:
        """Forget a transfer and its file."""
        self.release(artifact, owner)
        self._delete(_name(artifact, owner))

    def clear(self) -> None:
        """Forget all transfers that are not under way."""
        for name in self._known().keys() - self._open:
            self._delete(name)

    def collect(self) -> None:
        """Delete expired files and files that belong to no transfer."""
        if not self._root.is_dir():
            return
        oldest = self._clock() - self._expire_s
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
                f"{others} transfers are under way; another one of {size} bytes has to wait "
                f"(bounds: {self._max_files} transfers, {self._max_bytes} bytes)"
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
    """The size and time of a file; None when another thread has just taken it over."""
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
