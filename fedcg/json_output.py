"""The output of every command with `--json`: one envelope, one object per line, on stdout.

`{"ok": true, "data": …}` for a result, `{"ok": false, "error": {"type", "message", "next"}}` where the command failed. A command
that goes on (`run`, `serve`) prints one envelope for each line. The exit codes are in `fedcg.errors`.
"""

from __future__ import annotations

import json
import sys

from fedcg.errors import FAILED, NEXT_STEPS, FedcgError


def print_data(data: object) -> None:
    """Print the result of a command; it is on its way when this returns."""
    _print({"ok": True, "data": data})


def print_error(kind: str, message: str, next_step: str) -> None:
    """Print why a command failed, and what to do."""
    _print({"ok": False, "error": {"type": kind, "message": message, "next": next_step}})


def print_failure(error: Exception) -> None:
    """Print the error with which a command ended."""
    code = error.exit_code if isinstance(error, FedcgError) else FAILED
    own = error.next_step if isinstance(error, FedcgError) else ""
    print_error(type(error).__name__.removesuffix("Error"), str(error), own or NEXT_STEPS[code])


def _print(envelope: object) -> None:
    sys.stdout.write(f"{json.dumps(envelope, ensure_ascii=False)}\n")
    sys.stdout.flush()
