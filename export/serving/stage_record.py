"""The file `SERVING` beside the pointer, during a stage: which version answers while the one in use is compared with it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcg.files import READABLE, replace_durably

RECORD_NAME = "SERVING"
log = logging.getLogger(__name__)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    version: Annotated[str, Field(pattern=r"^\d{1,20}$")]


def read_serving(root: Path) -> str | None:
    """The version that answered when a stage was cut off; None when none was, or the file is damaged."""
    path = root / RECORD_NAME
    try:
        return _Record.model_validate_json(path.read_bytes()).version if path.exists() else None
    except (OSError, ValidationError) as error:
        log.warning("%s is ignored, the version in use is served: %s", path, error)
        return None


def note_serving(root: Path, version: str | None) -> None:
    """Note which version answers during a stage, None at its end; a disk that refuses costs a line in the log."""
    path = root / RECORD_NAME
    try:
        if version is not None:
            replace_durably(path, _Record(version=version).model_dump_json() + "\n", READABLE)
        elif path.exists():  # a read-only disk refuses to remove even what is not there
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: %s; a restart may serve, or compare, another version than now", path, error)
