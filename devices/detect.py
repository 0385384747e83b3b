"""Detects the hardware (device-tree, Jetson Linux release, NVIDIA driver, /proc, /sys, control groups) and looks it up in `catalogue.toml`.

Needs no root rights and no service. Values that can't be read are unavailable (None).
"""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from devices import files
from devices.files import LIVE_ROOT
from devices.nvidia import driver_files_gpu, nvml_gpu
from devices.profile import (
    LEAST_TRAINING_BYTES,
    MIB,
    Builds,
    DeviceKind,
    DeviceProfile,
    Gpu,
    L4tRelease,
    Trainable,
    gpu_obstacle,
)
from fedcg.config_file import read_toml
from fedcg.errors import FedcgError
from fedcg.values import Value

GB = 1_000_000_000
_PART_NUMBER = re.compile(r"p\d{4}-\d{4}")


class Soc(BaseModel, frozen=True, extra="forbid"):
    """A generation of Jetson, by its system on chip."""

    family: str
    compute_capability: tuple[int, int]
    can_train: bool
    first_l4t_major: Annotated[int, Field(ge=0)]
    advice: str


class Module(BaseModel, frozen=True, extra="forbid"):
    """A Jetson module, by its part number. The system reports less than its installed memory, because firmware reserves some."""

    name: str
    soc: str
    memory_gb: Annotated[int, Field(gt=0)]


class Kind(BaseModel, frozen=True, extra="forbid"):
    """A kind of device other than Jetson, identified by the start of its entry in the device-tree's `compatible`."""

    name: str
    compatible: str


class Catalogue(BaseModel, frozen=True, extra="forbid"):
    """All known systems on chip, modules and other kinds of devices."""

    soc: dict[str, Soc]
    module: dict[str, Module]
    power: dict[str, tuple[str, ...]]
    builds: tuple[Builds, ...]
    kind: tuple[Kind, ...]

    def kind_of(self, compatible: tuple[str, ...]) -> Kind | None:
        """The kind of device named in a device-tree's `compatible` list, for devices other than Jetson."""
        return next((one for one in self.kind if any(name.startswith(one.compatible) for name in compatible)), None)

    def identify(self, compatible: tuple[str, ...]) -> KnownJetson | None:
        """Find the Jetson named in a device-tree's `compatible` list.

        Args:
            compatible: Entries such as "nvidia,p3768-0000+p3767-0005", most specific first.

        Returns:
            The entry, without a module if only the system on chip is known; None if it is not a known Jetson.
        """
        names = [entry.partition(",")[2] for entry in compatible if entry.startswith("nvidia,")]
        soc_key = next((name for name in names if name in self.soc), None)
        if soc_key is None:
            return None
        numbers = [number for name in names for number in _PART_NUMBER.findall(name)]
        module = next(
            (self.module[number] for number in numbers if number in self.module and self.module[number].soc == soc_key),
            None,
        )
        power = next((self.power[number[:5]] for number in numbers if number[:5] in self.power), ())
        return KnownJetson(self.soc[soc_key], module, power, tuple(one for one in self.builds if one.soc == soc_key))


class KnownJetson(Value):
    """A Jetson from the catalogue: its generation, its module if known, the rails whose sum is its power draw, and builds for it."""

    soc: Soc
    module: Module | None
    power: tuple[str, ...] = ()
    builds: tuple[Builds, ...] = ()


@functools.cache
def load_catalogue() -> Catalogue:
    """Read the catalogue that is part of the package."""
    return read_toml(Path(__file__).with_name("catalogue.toml"), Catalogue, FedcgError)


def detect(root: Path | str = LIVE_ROOT) -> DeviceProfile:
    """Describe the hardware.

    Args:
        root: Root of its files: "/" for this device, or a recorded file tree of another one. The GPU driver is only queried for "/".

    Returns:
        The profile. Fields that the device does not report are None.
    """
    root = Path(root)
    live = root == LIVE_ROOT
    asked = nvml_gpu() if live else None
    catalogue, compatible = load_catalogue(), files.compatible(root)
    jetson, kind = catalogue.identify(compatible), catalogue.kind_of(compatible)
    memory = files.least(files.meminfo(root, "MemTotal"), files.memory_limit(root))
    l4t = files.l4t_release(root)
    gpu = _jetson_gpu(jetson, asked, memory) if jetson else asked or driver_files_gpu(root)
    return DeviceProfile(
        kind=_kind(jetson, gpu),
        model=_model(root, jetson),
        cpu_model=files.cpuinfo_field(root, "model name"),
        architecture=files.architecture(root) or (platform.machine() or None if live else None),
        cpus=_usable_cpus(root, live=live),
        memory_bytes=memory,
        gpu=gpu,
        l4t=l4t if jetson else None,
        # This program runs here, so Python is new enough, whatever the board's last JetPack has.
        trainable=_trainable(None if live else jetson, l4t, memory, gpu),
        known_as=f"Jetson {jetson.soc.family}" if jetson else kind.name if kind else None,
        builds=next((one for one in jetson.builds if l4t and l4t.major in one.jetson_linux), None) if jetson else None,
    )


def _usable_cpus(root: Path, *, live: bool) -> int | None:
    quota = files.cpu_limit(root)
    # sched_getaffinity only exists on Linux.
    affinity = len(os.sched_getaffinity(0)) if live and hasattr(os, "sched_getaffinity") else None
    return files.least(files.online_cpus(root), affinity, max(1, int(quota)) if quota is not None else None)


def _kind(jetson: KnownJetson | None, gpu: Gpu | None) -> DeviceKind:
    if jetson is not None:
        return DeviceKind.JETSON
    return DeviceKind.CUDA if gpu is not None else DeviceKind.CPU


def _model(root: Path, jetson: KnownJetson | None) -> str | None:
    """The board's name, with the module if known, because one developer kit name covers several modules."""
    board = files.machine_model(root)
    if jetson is None or jetson.module is None:
        return board
    return f"{board} [{jetson.module.name}]" if board else jetson.module.name


def _jetson_gpu(jetson: KnownJetson, reported: Gpu | None, memory: int | None) -> Gpu:
    """The integrated GPU: the driver's values, completed from the catalogue. Its memory is the system's memory."""
    return Gpu(
        name=reported.name if reported else f"{jetson.soc.family} (integrated)",
        memory_bytes=memory if memory is not None else (jetson.module.memory_gb * GB if jetson.module else None),
        compute_capability=(reported.compute_capability if reported else None) or jetson.soc.compute_capability,
        driver=reported.driver if reported else None,
        shares_memory=True,
    )


def runtime_providers() -> tuple[str, ...] | None:
    """The execution providers of the installed ONNX Runtime, best first; None if it is not installed."""
    try:
        import onnxruntime  # slow import, so only commands that show it call this
    except ImportError:
        return None
    names = [name.removesuffix("ExecutionProvider") for name in onnxruntime.get_available_providers()]
    return tuple(name for name in names if name != "Azure")  # a remote service, part of every build


def runtime_obstacle(profile: DeviceProfile) -> str:
    """Why predictions don't use this device's GPU, with the remedy; empty if they do, or without a GPU or ONNX Runtime."""
    providers = runtime_providers()
    if providers is None or profile.gpu is None or gpu_obstacle(profile.gpu) or {"CUDA", "Tensorrt"} & set(providers):
        return ""
    wanted = "pip uninstall onnxruntime onnxruntime-gpu, then pip install 'fedcg-edge[infer-gpu]'"
    if profile.kind is DeviceKind.JETSON:
        known = "unknown" if profile.builds is None else profile.builds.onnxruntime
        wanted = f"pip uninstall onnxruntime, then install the build for this board and JetPack: {known}"
    return f"this device has a GPU ({profile.gpu.name}), but onnxruntime is CPU-only: {wanted}"


def _trainable(jetson: KnownJetson | None, l4t: L4tRelease | None, memory: int | None, gpu: Gpu | None) -> Trainable:
    if jetson is not None and not jetson.soc.can_train:
        return Trainable(possible=False, reason=f"Jetson {jetson.soc.family}: {jetson.soc.advice}")
    if jetson is not None and l4t is not None and l4t.major < jetson.soc.first_l4t_major:
        return Trainable(possible=False, reason=f"Jetson Linux {l4t} is too old: {jetson.soc.advice}")
    if memory is not None and memory < LEAST_TRAINING_BYTES:
        return Trainable(
            possible=False,
            reason=f"it has {memory // MIB} MiB of memory, but training needs {LEAST_TRAINING_BYTES // MIB} MiB",
        )
    obstacle = gpu_obstacle(gpu)
    if gpu is not None and obstacle is None:
        return Trainable(possible=True, reason=f"on its GPU ({gpu.name})")
    return Trainable(possible=True, reason=f"on the CPU: {obstacle}")
