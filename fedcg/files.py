"""Files that survive a power cut: content and name are durable, and a file has its old or its new content, never a part.

Every package writes and locks such files with this module. Torch-free; imports no other package of this project.
"""

import errno
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PRIVATE = 0o600
READABLE = 0o644
BY_UMASK = 0o666
SECRET_BYTES = 32
LOOK_S = 0.02
_PIECE_BYTES = 1 << 20
DISK_FAILS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
"""Error numbers of failed writes; such an error names no file."""


def fsync_path(path: Path) -> None:
    """Make a file's content, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes, *, is_new: bool = False) -> None:
    """Write a private file (0600) and fsync its content; the caller makes its name durable.

    Args:
        path: the file.
        data: its whole content.
        is_new: never overwrite an existing file.

    Raises:
        FileExistsError: `is_new`, and the file exists.
        OSError: the disk is full or broken; the file may hold a part of `data`.
    """
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if is_new else os.O_TRUNC)
    with os.fdopen(os.open(path, flags, PRIVATE), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, data: bytes | str, mode: int = PRIVATE) -> None:
    """Give `path` new content in one atomic, durable step; several threads and processes may do so at once.

    Args:
        path: the file; its directory exists.
        data: its whole content; text is encoded as UTF-8.
        mode: permissions of the file, independent of the umask and of an earlier file.

    Raises:
        OSError: the disk is full or broken; the old content is untouched, unless only the last fsync of the directory failed.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def append_line(path: Path, text: str) -> int:
    """Append a line to a private file, after ending a torn last line. The line is durable on return.

    Returns:
        the size of the file.

    Raises:
        OSError: the line could not be made durable; no part of it remains.
    """
    is_new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, PRIVATE)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # by a power cut or a full disk
        line = ("\n" if is_torn else "").encode() + text.encode() + b"\n"
        if os.write(descriptor, line) < len(line):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if is_new:
        fsync_path(path.parent)
    return size + len(line)


class HeldError(Exception):
    """Another process holds a lock. The message is the id of that process, or empty if the file has none."""


def take_lock(file: IO[str], wait_s: float | None = 0.0) -> bool:
    """Lock an open file until it is closed, at the latest when the process ends in any way.

    Args:
        file: open in any mode.
        wait_s: how long to try; None: without limit.

    Returns:
        whether the lock was taken.
    """
    if wait_s is None:
        fcntl.flock(file, fcntl.LOCK_EX)
        return True
    deadline = time.monotonic() + wait_s
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_S)


@contextmanager
def locked(path: Path, wait_s: float | None = None, mode: int = BY_UMASK) -> Iterator[None]:
    """Hold a lock file, which is created if it does not exist.

    Args:
        path: the file; its folder exists.
        wait_s: how long to wait for another process; the file then holds the id of the process that has locked it. None waits
            without limit and leaves the file empty.
        mode: permissions of a new file, before the umask.

    Raises:
        HeldError: another process holds it for longer than `wait_s`.
        OSError: the file can't be opened.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode), "a+", errors="replace") as file:
        if not take_lock(file, wait_s):
            file.seek(0)
            raise HeldError(file.read(16).strip())
        if wait_s is not None:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock file. Takes the lock itself for an instant, and only needs read permission.

    Raises:
        OSError: the file exists and can't be opened.
    """
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def checked_secret(secret: bytes) -> bytes:
    """A secret as files hold it: its 32 bytes and an 8-byte checksum."""
    return secret + hashlib.sha256(b"fedcg secret 1\0" + secret).digest()[:8]


def secret_in(data: bytes) -> bytes | None:
    """The secret in a file's content; None if it is damaged."""
    secret = data[:SECRET_BYTES]
    return secret if data == checked_secret(secret) else None


def with_check(content: bytes) -> bytes:
    """A text file's content with its checksum as the first line."""
    return b"# sha256 " + hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def checked(content: bytes) -> bytes | None:
    """The content after the checksum line; None if it is damaged. A file without one, written by another program, is returned whole."""
    first, _, rest = content.partition(b"\n")
    if not first.startswith(b"# sha256") and b" sha256 " not in first and len(first) != len(with_check(b"")) - 1:
        return content
    return rest if content == with_check(rest) else None


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hex; reads it in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def is_passing(error: Exception) -> bool:
    """Whether a file error may be gone at the next start, such as a disk error, without a change of the file or its owner."""
    return isinstance(error, OSError) and not isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError))


def advice_for(error: OSError, place: Path) -> str:
    """The next step after a file-system error: fix permissions, or check a disk.

    Args:
        error: of the system.
        place: the folder in use, for an error that names no file.
    """
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Let the user with id {os.geteuid()} read and write {error.filename or place} (chown, chmod)"
    if error.errno == errno.EROFS:
        return (
            f"Mount the disk of {place} writable; `dmesg` shows whether Linux made it read-only because it is damaged"
        )
    return f"Free space on, or repair, {place}"
