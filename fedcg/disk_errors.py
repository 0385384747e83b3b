"""What a person can do when the system refuses to read or write a file."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def advice_for(error: OSError, place: Path) -> str:
    """The next step after an error of the file system: who may use the file, or which disk to look at.

    Args:
        error: of the system.
        place: the folder that was worked in, for an error that names no file.
    """
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Let the user with id {os.geteuid()} read and write {error.filename or place} (chown, chmod)"
    return f"Free space on, or repair, {place}"
