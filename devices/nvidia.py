"""Asks NVIDIA's driver about the first GPU, and its readings now: NVML where it is installed, else the driver's files in /proc.

A box without driver, library or GPU is an ordinary answer (None), not an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from devices.files import read_text
from devices.profile import Gpu

T = TypeVar("T")


# Bits of nvmlDeviceGetCurrentClocksThrottleReasons (nvml.h).
_SOFTWARE = {0x4: "GPU power cap", 0x20: "GPU temperature (software)"}
_HARDWARE = {0x8: "GPU hardware slowdown", 0x40: "GPU temperature (hardware)", 0x80: "GPU power brake"}
_SLOWDOWN_THRESHOLD = 1  # NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
_TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU


@dataclass(frozen=True)
class GpuReadings:
    """What NVML reads of the first GPU now; None where the board does not report it.

    Attributes:
        slowdown_c: from which temperature the hardware slows it down.
        software, hardware: why its clocks are lowered, by who lowers them.
    """

    temperature_c: float | None
    slowdown_c: float | None
    watts: float | None
    software: tuple[str, ...]
    hardware: tuple[str, ...]


def nvml_gpu() -> Gpu | None:
    """The first GPU as NVML describes it; None without the Python package, the library, the driver or a GPU."""
    return _with_first_gpu(_describe)


def nvml_readings() -> GpuReadings | None:
    """The readings of the first GPU now; None where NVML finds none."""
    return _with_first_gpu(_read)


def _with_first_gpu(work: Callable[[Any, Any, Callable[[Callable[[], Any]], Any]], T]) -> T | None:
    """Call `work` with NVML, GPU 0, and a way to ask that gives None for what the driver does not support on this board."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None

    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except pynvml.NVMLError:
            return None

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = ask(lambda: pynvml.nvmlDeviceGetHandleByIndex(0))
        return None if handle is None else work(pynvml, handle, ask)
    finally:
        pynvml.nvmlShutdown()


def _describe(nvml: Any, handle: Any, ask: Callable[[Callable[[], Any]], Any]) -> Gpu:
    memory = ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
    capability = ask(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return Gpu(
        name=ask(lambda: str(nvml.nvmlDeviceGetName(handle))) or "NVIDIA GPU",
        memory_bytes=memory or None,
        compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
        driver=ask(lambda: str(nvml.nvmlSystemGetDriverVersion())),
    )


def _read(nvml: Any, handle: Any, ask: Callable[[Callable[[], Any]], Any]) -> GpuReadings:
    temperature = ask(lambda: nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU))
    slowdown = ask(lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, _SLOWDOWN_THRESHOLD))
    milliwatts = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    bits = ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))) or 0
    return GpuReadings(
        temperature_c=None if temperature is None else float(temperature),
        slowdown_c=float(slowdown) if slowdown else None,
        watts=None if milliwatts is None else milliwatts / 1000,
        software=tuple(cause for bit, cause in _SOFTWARE.items() if bits & bit),
        hardware=tuple(cause for bit, cause in _HARDWARE.items() if bits & bit),
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
