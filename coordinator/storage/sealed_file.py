"""A stream that is encrypted with a passphrase, in frames: scrypt makes the key, AES-GCM seals each frame.

The nonce of a frame is its number and whether it is the last, so frames that are changed, missing, repeated or in another order are refused.
Form: magic with the version, 16 bytes of salt, then frames of 1 MiB and a tag of 16 bytes each; the last may be shorter.
"""

from __future__ import annotations

import io
import secrets
from typing import TYPE_CHECKING, BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from coordinator.errors import StoreError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"FEDCG-BACKUP-1\n"
SALT_BYTES = 16
FRAME_BYTES = 1 << 20
TAG_BYTES = 16
# RFC 7914; 64 MiB of memory for each guess. Fixed by the version in MAGIC, so that no file can ask for more.
SCRYPT_N, SCRYPT_R, SCRYPT_P = 1 << 16, 8, 1


class SealingWriter(io.RawIOBase):
    """Encrypts what is written into `file`; only `close` writes the last frame."""

    def __init__(self, file: BinaryIO, passphrase: str) -> None:
        salt = secrets.token_bytes(SALT_BYTES)
        self._file = file
        self._head = MAGIC + salt
        self._cipher = _cipher(passphrase, salt)
        self._pending = bytearray()
        self._number = 0
        file.write(self._head)

    def write(self, data: bytes) -> int:  # type: ignore[override] # tarfile writes bytes
        """Take some bytes."""
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
    """Decrypts what a `SealingWriter` has written.

    Raises:
        StoreError: no such file, another passphrase, or a damaged or truncated file; from the constructor and from `read`.
    """

    def __init__(self, file: BinaryIO, passphrase: str, name: str) -> None:
        self._file = file
        self._name = name
        self._head = file.read(len(MAGIC) + SALT_BYTES)
        if len(self._head) != len(MAGIC) + SALT_BYTES or not self._head.startswith(MAGIC):
            raise StoreError(f"{name} is not a backup that this program can read")
        self._cipher = _cipher(passphrase, self._head[len(MAGIC) :])
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
            why = (
                "another passphrase was used for it, or it is damaged"
                if self._number == 0
                else "it is damaged or truncated"
            )
            raise StoreError(f"{self._name} can't be read: {why}; nothing was written") from error
        self._number += 1
        self._frame = io.BytesIO(opened)
        return True


def _cipher(passphrase: str, salt: bytes) -> AESGCM:
    scrypt = Scrypt(salt=salt, length=32, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P)
    return AESGCM(scrypt.derive(passphrase.encode()))


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])
