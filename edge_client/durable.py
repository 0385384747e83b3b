"""Writes that survive a power cut: file and directory are fsynced, and a name appears whole or not at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def fsync_directory(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new private file (0600) and fsync it; the caller makes its name durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, data: bytes) -> None:
    """Give `path` new content in one atomic, durable step."""
    temporary = path.with_name(f".{path.name}.new")
    write_durably(temporary, data)
    temporary.replace(path)
    fsync_directory(path.parent)


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hex; reads it in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
