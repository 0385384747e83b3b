"""Queries NVIDIA's driver for the first GPU and its readings: with NVML if installed, else from the driver's files in /proc.

Also checks whether the installed torch was built for CUDA, without importing it. Without driver, library or GPU, the result is None, not an
error.
"""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from devices.files import read_text
from devices.profile import Gpu
from fedcg.values import Value

T = TypeVar("T")


# Bits of nvmlDeviceGetCurrentClocksThrottleReasons (nvml.h).
_SOFTWARE = {0x4: "GPU power cap", 0x20: "GPU temperature (software)"}
_HARDWARE = {0x8: "GPU hardware slowdown", 0x40: "GPU temperature (hardware)", 0x80: "GPU power brake"}
_SLOWDOWN_THRESHOLD = 1  # NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
_TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU


class GpuReadings(Value):
    """NVML's current readings of the first GPU; None for values that the board does not report.

    Attributes:
        slowdown_c: temperature at which the hardware lowers its clocks.
        software, hardware: reasons for lowered clocks, by origin.
        free_bytes: free GPU memory.
    """

    temperature_c: float | None
    slowdown_c: float | None
    watts: float | None
    software: tuple[str, ...]
    hardware: tuple[str, ...]
    free_bytes: int | None = None


def torch_obstacle() -> str:
    """Why the installed torch can't use a GPU, with the remedy; empty if it was built for CUDA or is not installed. Imports nothing."""
    found = find_spec("torch")
    for folder in () if found is None else found.submodule_search_locations or ():
        text = read_text(Path(folder), "version.py") or ""
        facts = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*=\s*(\S+)", text, re.MULTILINE))
        if facts.get("cuda") == "None":
            version = facts.get("__version__", "").strip("'\"")
            return (
                f"this torch ({version}) has no CUDA: install the build for this board (https://pytorch.org/get-started/locally, on a "
                'Jetson the wheel for NVIDIA\'s JetPack), or set device = "cpu" under [training]'
            )
    return ""


def nvml_gpu() -> Gpu | None:
    """The first GPU, from NVML; None without the Python package, the library, the driver or a GPU."""
    return _with_first_gpu(_describe)


def nvml_readings() -> GpuReadings | None:
    """The current readings of the first GPU; None if NVML finds no GPU."""
    return _with_first_gpu(_read)


def _with_first_gpu(work: Callable[[Any, Any, Callable[[Callable[[], Any]], Any]], T]) -> T | None:
    """Call `work` with NVML, GPU 0, and a query function that returns None for values not supported on this board."""
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
        free_bytes=ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).free)),
    )


def driver_files_gpu(root: Path) -> Gpu | None:
    """The first GPU, from the driver's files below the root: its name and the driver's version."""
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
