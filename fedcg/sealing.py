"""Encrypted files: a stream in frames, each sealed by AES-256-GCM, under a key derived from a passphrase (scrypt) and a random salt.

The nonce of a frame is its number and a flag for the last frame, so changed, missing, repeated or reordered frames are refused. The salt
gives every file its own key, so no nonce is used twice. Format: magic with the version, 16 bytes of salt, then frames of 1 MiB with a tag
of 16 bytes each; the last frame may be shorter. Torch-free.

Backups are tar archives in such a file (`sealed_archive`, `sealed_entries`), without account names of this machine, read entry by entry.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from pydantic import BaseModel, ValidationError

from fedcg.errors import EXISTS, FedcgError
from fedcg.files import DISK_FAILS, PRIVATE, fsync_path
from fedcg.values import Value

if TYPE_CHECKING:
    from typing_extensions import Buffer

SALT_BYTES = 16
FRAME_BYTES = 1 << 20
TAG_BYTES = 16
# RFC 7914; 64 MiB of memory for each guess. Fixed by the version in MAGIC, so no file can demand more.
SCRYPT_N, SCRYPT_R, SCRYPT_P = 1 << 16, 8, 1
FACTS_FILE = "backup.json"
FactsT = TypeVar("FactsT", bound=BaseModel)


class Seal(Value):
    """How one kind of file is sealed.

    Attributes:
        magic: its first bytes, with a version.
        passphrase: gives the key of each file, with its salt.
        error: raised by a reader.
        most_small: bytes of the largest entry of a backup that is read into memory.
    """

    magic: bytes
    passphrase: str = field(repr=False)
    error: type[FedcgError]
    most_small: int = 1 << 20

    @property
    def head_bytes(self) -> int:
        """Bytes before the first frame."""
        return len(self.magic) + SALT_BYTES

    def cipher(self, head: bytes) -> AESGCM:
        """The cipher of a file with this head."""
        derived = Scrypt(salt=head[len(self.magic) :], length=32, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P)
        return AESGCM(derived.derive(self.passphrase.encode()))

    def small(self, entry: tarfile.TarInfo, content: IO[bytes]) -> bytes:
        """The whole content of an entry.

        Raises:
            FedcgError: `error`: it has more than `most_small` bytes.
        """
        data = content.read(self.most_small + 1)
        if len(data) > self.most_small:
            raise self.error(f"{entry.name} in the backup has more than {self.most_small} bytes")
        return data


class SealingWriter(io.RawIOBase):
    """Encrypts written bytes into `file`; only `finish` writes the last frame."""

    def __init__(self, file: BinaryIO, seal: Seal) -> None:
        self._file = file
        self._head = seal.magic + secrets.token_bytes(SALT_BYTES)
        self._cipher = seal.cipher(self._head)
        self._pending = bytearray()
        self._number = 0
        file.write(self._head)

    def write(self, data: bytes) -> int:  # type: ignore[override] # tarfile writes bytes
        """Buffer bytes and seal full frames."""
        self._pending += data
        while len(self._pending) > FRAME_BYTES:
            self._seal(FRAME_BYTES, is_last=False)
        return len(data)

    def finish(self) -> None:
        """Write the last frame; a file without it is refused."""
        self._seal(len(self._pending), is_last=True)

    def _seal(self, size: int, *, is_last: bool) -> None:
        frame = bytes(self._pending[:size])
        del self._pending[:size]
        self._file.write(self._cipher.encrypt(_nonce(self._number, is_last=is_last), frame, self._head))
        self._number += 1


class SealedReader(io.RawIOBase):
    """Decrypts the output of a `SealingWriter`.

    Raises:
        FedcgError: `Seal.error`: another key, or a damaged or truncated file; by the constructor and by `read`.
    """

    def __init__(self, file: BinaryIO, seal: Seal, name: str) -> None:
        self._file = file
        self._seal = seal
        self._name = name
        head = file.read(seal.head_bytes)
        if len(head) != seal.head_bytes or not head.startswith(seal.magic):
            raise seal.error(f"{name} is not a file of this kind that this program can read")
        self._cipher, self._head = seal.cipher(head), head
        self._number = 0
        self._next = file.read(FRAME_BYTES + TAG_BYTES)
        self._frame = io.BytesIO()
        self._open()

    def readinto(self, buffer: Buffer) -> int:
        """Fill a buffer, or a part of it; 0 at the end."""
        while not (count := self._frame.readinto(buffer)) and self._open():
            pass
        return count

    def _open(self) -> bool:
        """Decrypt the next frame; False after the last."""
        sealed = self._next
        if not sealed:
            return False
        self._next = self._file.read(FRAME_BYTES + TAG_BYTES)
        try:
            opened = self._cipher.decrypt(_nonce(self._number, is_last=not self._next), sealed, self._head)
        except InvalidTag as error:
            at_first = "another passphrase was used for it, or it is damaged"
            why = "it is damaged or truncated" if self._number else at_first
            refused = self._seal.error(f"{self._name} can't be read: {why}; nothing was written")
            refused.next_step = "give the passphrase that it was written with, or use another copy"
            raise refused from error
        self._number += 1
        self._frame = io.BytesIO(opened)
        return True


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


@contextlib.contextmanager
def sealed_archive(target: Path, seal: Seal) -> Iterator[tarfile.TarFile]:
    """An archive to write into; `target` (mode 0600) appears when the block ends without an error.

    Raises:
        FedcgError: `Seal.error`: the file exists.
    """
    if target.exists():
        raise seal.error(f"{target} exists already; name another file", exit_code=EXISTS)
    temporary = target.with_name(f".{target.name}.new")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE), "wb") as file:
            sealed = SealingWriter(file, seal)
            with tarfile.open(fileobj=sealed, mode="w|", format=tarfile.PAX_FORMAT) as archive:
                yield archive
            sealed.finish()
        fsync_path(temporary)
        temporary.rename(target)
        fsync_path(target.parent)
    except OSError as error:
        if error.filename is None and error.errno in DISK_FAILS:  # a failed write names no path
            error.filename = str(target)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def add_bytes(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file with this content."""
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def without_accounts(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """An entry without account names of this machine."""
    entry.uname = entry.gname = ""
    entry.uid = entry.gid = 0
    return entry


def sealed_entries(source: Path, seal: Seal) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """The files in a sealed tar archive, each with its content, which must be read before the next entry.

    Args:
        source: the file.
        seal: of the archive.

    Raises:
        FedcgError: `Seal.error`: the archive is damaged, truncated, or holds an entry that is not a file.
        OSError: the file can't be read.
    """
    with source.open("rb") as file:
        reader = SealedReader(file, seal, str(source))
        try:
            with tarfile.open(fileobj=reader, mode="r|") as archive:
                for entry in archive:
                    content = archive.extractfile(entry) if entry.isreg() else None
                    if content is None:
                        raise seal.error(f"{source} holds {entry.name!r}, which does not belong in a backup")
                    yield entry, content
        except tarfile.TarError as error:
            raise seal.error(f"{source} can't be read: {error}") from error
        reader.read()  # up to the last frame, which proves that nothing is missing


def read_facts(source: Path, seal: Seal, kind: type[FactsT], is_entry: Callable[[str], bool]) -> FactsT:
    """The first entry of a backup, `FACTS_FILE`. Reads the whole file and checks each name in it.

    Raises:
        FedcgError: `Seal.error`: no backup, one of another version, or an entry whose name is not one.
        OSError: the file can't be read.
    """
    facts: FactsT | None = None
    for number, (entry, content) in enumerate(sealed_entries(source, seal)):
        if number == 0 and entry.name == FACTS_FILE:
            try:
                facts = kind.model_validate_json(seal.small(entry, content))
            except ValidationError as error:
                raise seal.error(f"{source} is a backup of another version of this program") from error
        elif not is_entry(entry.name):
            raise seal.error(f"{source} contains {entry.name!r}, which is not part of a backup")
    if facts is None:
        raise seal.error(f"{source} is not a backup")
    return facts
