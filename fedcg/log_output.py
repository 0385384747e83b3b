"""The log of a long-running command on stderr: options and handler for its form (console or JSON lines) and level. SIGUSR1 changes the level.

Importing this module does not load structlog. Sentences for events come from `fedcg.sentences`.
"""

import io
import logging
import signal
import sys
from collections.abc import MutableMapping
from enum import Enum
from types import FrameType
from typing import Annotated, Any, TextIO

import typer

from fedcg.event_log import FIELDS, log_text
from fedcg.values import Value


class LogForm(str, Enum):
    """The form of a log: aligned lines for people, or one JSON object per line."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(str, Enum):
    """The lowest level that is shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogSettings(Value):
    """The form and the level of a log."""

    form: LogForm = LogForm.CONSOLE
    level: LogLevel = LogLevel.INFO


LogFormOption = Annotated[
    LogForm, typer.Option("--log", help="Log format on stderr: readable lines, or one JSON object per line.")
]
LogLevelOption = Annotated[LogLevel, typer.Option("--log-level", help="Lowest level to show.")]


def set_up_log(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Send the log of this process to a stream (default: stderr), in colour only where that is a terminal."""
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(settings.form, is_terminal=stream.isatty()))
    root = logging.getLogger()
    for earlier in root.handlers[:]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    root.setLevel(settings.level.value.upper())
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it logs its dialect at every start


def toggle_debug_on_signal(settings: LogSettings) -> None:
    """Let SIGUSR1 toggle between `debug` and the configured level (`info` if that is `debug`)."""
    usual = LogLevel.INFO if settings.level is LogLevel.DEBUG else settings.level

    def toggle(number: int, frame: FrameType | None) -> None:
        root = logging.getLogger()
        root.setLevel(usual.value.upper() if root.level == logging.DEBUG else logging.DEBUG)

    signal.signal(signal.SIGUSR1, toggle)


def _formatter(form: LogForm, *, is_terminal: bool) -> logging.Formatter:
    import structlog

    first: list[Any] = [structlog.stdlib.add_log_level, structlog.stdlib.add_logger_name, _printable]
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if form is LogForm.JSON:
        first += [structlog.processors.TimeStamper(key="t"), _add_fields]
        last: list[Any] = [structlog.processors.format_exc_info, _message_apart, remove_meta]
        last.append(structlog.processors.JSONRenderer())
    else:
        first.append(structlog.processors.TimeStamper("%Y-%m-%d %H:%M:%S UTC", utc=True))
        console = structlog.dev.ConsoleRenderer(colors=is_terminal, pad_event_to=0, exception_formatter=_traceback)
        last = [remove_meta, _without_logger, console]
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=first, processors=last)


def _printable(logger: object, name: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {**line, "event": log_text(str(line["event"]))}


def _traceback(stream: TextIO, error: Any) -> None:
    """An indented traceback without local variables, which may hold images and keys."""
    import structlog

    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    stream.write("\n".join(f"    {log_text(line)}" for line in text.getvalue().splitlines()))


def _add_fields(logger: object, name: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the fields of the line's event; they override those of the log."""
    fields = getattr(line.get("_record"), FIELDS, {})
    return {**line, "sentence": line["event"], **fields}


def _message_apart(logger: object, name: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """`message` is the sentence; only lines about an event have `event`."""
    sentence = line.pop("sentence")
    if line["event"] == sentence:
        del line["event"]
    return {**line, "message": sentence}


def _without_logger(logger: object, name: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    line.pop("logger", None)
    return line
