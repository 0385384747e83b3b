"""Asks NVIDIA's driver about the first GPU: NVML where it is installed, else the driver's files in /proc.

A box without driver, library or GPU is an ordinary answer (None), not an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from devices.files import read_text
from devices.profile import Gpu

T = TypeVar("T")


def nvml_gpu() -> Gpu | None:
    """The first GPU as NVML describes it; None without the Python package, the library, the driver or a GPU."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return _first_gpu(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _first_gpu(nvml: Any) -> Gpu | None:
    """Read GPU 0; what the driver does not support on this board stays unavailable."""

    def ask(question: Callable[[], T]) -> T | None:
        try:
            return question()
        except nvml.NVMLError:
            return None

    handle = ask(lambda: nvml.nvmlDeviceGetHandleByIndex(0))
    if handle is None:
        return None
    memory = ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
    capability = ask(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return Gpu(
        name=ask(lambda: str(nvml.nvmlDeviceGetName(handle))) or "NVIDIA GPU",
        memory_bytes=memory or None,
        compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
        driver=ask(lambda: str(nvml.nvmlSystemGetDriverVersion())),
    )


def driver_files_gpu(root: Path) -> Gpu | None:
    """The first GPU as the driver's files below the root describe it: its name and the driver's version."""
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    if not folders:
        return None
    lines = (read_text(folders[0].parent, "information") or "").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    version = read_text(root, "proc/driver/nvidia/version") or ""
    numbers = [word for word in version.split() if word[0].isdigit() and word.count(".") >= 1]
    return Gpu(
        name=fields.get("Model", "").strip() or "NVIDIA GPU",
        memory_bytes=None,
        compute_capability=None,
        driver=numbers[0] if numbers else None,
    )
