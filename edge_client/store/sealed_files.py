"""The files of a private store as its other modules read and write them: encrypted where the store has a key, else as they are. Torch-free.

A sealed file begins with a magic and the mark of its key, is bound to its name in the store, and is authenticated in frames
(`fedcg.sealing.sealed_file`). The checksums of generations are those of contents, so they hold however a file is sealed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from edge_client.errors import DamagedFileError, StoreKeyError, unreadable
from fedcg.files import replace_durably, write_durably
from fedcg.sealing.sealed_file import Seal, SealedRanges, SealedReader, SealingWriter, of_secret

MAGIC = b"FEDCG-STORE-1\n"
KEY_BYTES = 32
MARK_BYTES = 8
_PIECE_BYTES = 1 << 20
SET_KEY = (
    "Nothing was changed; set `key` under [encryption] in agent.toml to the file with the store's key, or provide it as the systemd "
    "credential store.key"
)


@dataclass(frozen=True)
class StoreKey:
    """The key of a private store; its mark tells keys apart and nothing else about them."""

    secret: bytes

    @property
    def mark(self) -> bytes:
        """8 bytes."""
        return hashlib.sha256(b"fedcg store key 1\0" + self.secret).digest()[:MARK_BYTES]

    def seal(self, name: str) -> Seal:
        """The seal of a file of the store under its name."""
        return Seal(MAGIC + self.mark, of_secret(self.secret), DamagedFileError, name)


def read_key(path: Path) -> StoreKey:
    """The key in a file: 64 hex digits, readable by its owner alone.

    Raises:
        StoreKeyError: there is none, it is open to others, or it holds something else; says what to do.
    """
    try:
        mode, text = path.stat().st_mode, path.read_bytes()[: 4 * KEY_BYTES]
    except OSError as error:
        raise StoreKeyError(
            f"the key of the private store, {path}, can't be read: {error.strerror or error}. Nothing was changed; bring the "
            "file back: without it the store stays unreadable"
        ) from error
    is_credential = path.parent == Path(os.environ.get("CREDENTIALS_DIRECTORY", "/nonexistent"))
    if mode & 0o077 and not is_credential:  # systemd guards its own, and shows an access list as bits of the group
        raise StoreKeyError(f"{path} can be read by other users (mode {mode & 0o777:o}): chmod 600 {path}")
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise StoreKeyError(f"{path} is no key of a private store: {2 * KEY_BYTES} hex digits are expected")
    return StoreKey(secret)


def make_key(path: Path) -> StoreKey:
    """A new key, in a new file that its owner alone can read.

    Raises:
        StoreKeyError: the file is there already, or can't be written.
    """
    key = StoreKey(secrets.token_bytes(KEY_BYTES))
    try:
        write_durably(path, key.secret.hex().encode() + b"\n", is_new=True)
    except OSError as error:
        raise StoreKeyError(f"{path} can't be made: {error.strerror or error}") from error
    return key


class StoreFiles:
    """Reads and writes files of one store.

    Args:
        root: its folder.
        keys: that its files may be sealed with; new ones are sealed with the first, or not at all without any.
        takes_plain: whether a file that is not sealed is believed although there are keys.
        seals: whether new files are sealed, where there are keys.
    """

    def __init__(
        self, root: Path, keys: tuple[StoreKey, ...] = (), *, takes_plain: bool = False, seals: bool = True
    ) -> None:
        self._root = root
        self._keys = {key.mark: key for key in keys}
        self._key = keys[0] if keys and seals else None
        self._takes_plain = takes_plain or not keys

    def read(self, path: Path) -> bytes:
        """The content of a file.

        Raises:
            DamagedFileError: sealed, and altered, truncated or put in another file's place; or not sealed where all are.
            StoreKeyError: sealed with a key that is not at hand.
            OSError: as of the file system.
        """
        with self._opened(path) as file:
            return file.read()

    def sha256(self, path: Path) -> str:
        """The sha256 of a file's content, in hex; raises as `read` does."""
        digest = hashlib.sha256()
        with self._opened(path) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
        return digest.hexdigest()

    def ranges(self, path: Path) -> Callable[[int, int], bytes] | None:
        """What reads (offset, length) of a sealed file, which stays open, so that its name may go; None for any other file.

        Raises as `read` does.
        """
        file = path.open("rb")
        try:
            seal = self._seal_of(file, path)
            if seal is not None:
                ranges = SealedRanges(file, seal, str(path))
                weakref.finalize(ranges, file.close)
                return ranges.read
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def replace(self, path: Path, data: bytes) -> None:
        """Give a file new content in one atomic, durable step."""
        replace_durably(path, self._sealed(data, self._name(path)))

    def write(self, path: Path, data: bytes, place: Path) -> None:
        """Write a new file that will be known under another path, `place`; its name is not made durable."""
        write_durably(path, self._sealed(data, self._name(place)))

    def is_current(self, path: Path) -> bool:
        """Whether a file is in the form in which it would be written now."""
        with path.open("rb") as file:
            start = file.read(len(MAGIC) + MARK_BYTES)
        return start == MAGIC + self._key.mark if self._key is not None else not start.startswith(MAGIC)

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[BinaryIO | SealedReader]:
        with path.open("rb") as file:
            seal = self._seal_of(file, path)
            yield file if seal is None else SealedReader(file, seal, str(path))

    def _seal_of(self, file: BinaryIO, path: Path) -> Seal | None:
        try:
            start = file.read(len(MAGIC) + MARK_BYTES)
            file.seek(0)
        except OSError as error:
            raise unreadable(path, error) from error
        if not start.startswith(MAGIC):
            if not self._takes_plain:
                raise DamagedFileError(f"{path} is damaged, or not of this store: it is not encrypted as the store is")
            return None
        key = self._keys.get(start[len(MAGIC) :])
        if key is None:
            if self._keys:  # the store's own, which was compared when it was opened
                raise DamagedFileError(f"{path} is damaged: the mark of its key is not that of the store's")
            raise StoreKeyError(f"{path} is encrypted, and no key is set. {SET_KEY}")
        return key.seal(self._name(path))

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _sealed(self, data: bytes, name: str) -> bytes:
        if self._key is None:
            return data
        into = BytesIO()
        writer = SealingWriter(into, self._key.seal(name))
        writer.write(data)
        writer.finish()
        return into.getvalue()
