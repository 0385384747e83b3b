"""A tar archive in a sealed file, as backups are: written without names of this machine, read entry by entry."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from fedcg.errors import FedcgError
from fedcg.files import PRIVATE, fsync_path
from fedcg.sealing.sealed_file import Seal, SealedReader, SealingWriter


@contextlib.contextmanager
def sealed_archive(target: Path, seal: Seal) -> Iterator[tarfile.TarFile]:
    """An archive to write into; `target` appears, mode 0600, when the block has ended without an error."""
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
    finally:
        temporary.unlink(missing_ok=True)


def add_bytes(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file with this content."""
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def without_accounts(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """An entry without the names of accounts of this machine."""
    entry.uname = entry.gname = ""
    entry.uid = entry.gid = 0
    return entry


def read_small(content: IO[bytes], name: str, most: int, error: type[FedcgError]) -> bytes:
    """The whole content of an entry.

    Raises:
        FedcgError: `error`: it has more than `most` bytes.
    """
    data = content.read(most + 1)
    if len(data) > most:
        raise error(f"{name} in the backup has more than {most} bytes")
    return data


def sealed_entries(file: BinaryIO, seal: Seal, source: str) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """The files in a sealed tar archive, each with its content, which is to be read before the next one.

    Args:
        file: at its begin.
        seal: of the archive; its `error` is raised where the archive is damaged, cut, or holds what is no file.
        source: for messages.
    """
    reader = SealedReader(file, seal, source)
    try:
        with tarfile.open(fileobj=reader, mode="r|") as archive:
            for entry in archive:
                content = archive.extractfile(entry) if entry.isreg() else None
                if content is None:
                    raise seal.error(f"{source} holds {entry.name!r}, which is no file of a backup")
                yield entry, content
    except tarfile.TarError as error:
        raise seal.error(f"{source} can't be read: {error}") from error
    reader.read()  # to the last frame, which shows that nothing is missing
