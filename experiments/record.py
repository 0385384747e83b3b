"""Publishable records of runs and measurements: settings, machine, date and results, without paths of the machine."""

import json
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from devices.detect import detect
from fedcg.files import READABLE, replace_durably
from fedcg.text_output import command_line

RECORD_FORMAT = 1


def machine() -> dict[str, object]:
    """Return processor, CPUs, memory and GPU of this machine; None for unknown values."""
    profile = detect()
    return {
        "kind": profile.kind.value,
        "model": profile.model,
        "processor": profile.cpu_model,
        "cpus": profile.cpus,
        "memory_bytes": profile.memory_bytes,
        "gpu": None if profile.gpu is None else profile.gpu.name,
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that determine the numbers."""
    return {name: _version(name) for name in ("fedcg-edge", "torch", "numpy", "onnxruntime")}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def bench_record(kind: str, setting: Mapping[str, Any], *words: object, **options: object) -> dict[str, Any]:
    """Return the head of every record: its kind, the date, this machine, the versions, the setting and the whole command.

    Args:
        kind: the command after `fedcg`.
        setting: of the measurement, as JSON values.
        words: of the command, after `kind`.
        options: of the command; a list repeats its option.
    """
    return {
        "format": RECORD_FORMAT,
        "kind": kind,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions()},
        "command": command_line(*kind.split(), *words, **options),
        "setting": dict(setting),
    }


def write_record(record: Mapping[str, Any], path: Path) -> None:
    """Write a record to a file; its folder is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, json.dumps(record, indent=1) + "\n", READABLE)
