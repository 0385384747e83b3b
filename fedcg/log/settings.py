"""Form and level of a log, as values and as options of a command. Importing this loads no structlog."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import typer


class LogForm(str, Enum):
    """The form of a log: aligned lines for people, or one JSON object per line."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(str, Enum):
    """The least level that is shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class LogSettings:
    """The form and the level of a log."""

    form: LogForm = LogForm.CONSOLE
    level: LogLevel = LogLevel.INFO


LogFormOption = Annotated[
    LogForm, typer.Option("--log", help="Form of the log on stderr: lines for people, or a JSON object per line.")
]
LogLevelOption = Annotated[LogLevel, typer.Option("--log-level", help="Least level that is shown.")]
