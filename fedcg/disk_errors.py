"""Advice for a person when the system refuses to read or write a file."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def advice_for(error: OSError, place: Path) -> str:
    """The next step after an error of the file system: who may use the file, or which disk to check.

    Args:
        error: of the system.
        place: the folder in use, for an error that names no file.
    """
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Let the user with id {os.geteuid()} read and write {error.filename or place} (chown, chmod)"
    return f"Free space on, or repair, {place}"
