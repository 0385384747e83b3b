"""What onnxruntime computes with here: TensorRT before CUDA before the CPU, and what a form of a model that was made here is bound to."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Sequence
from pathlib import Path

import onnxruntime

TENSORRT = "TensorrtExecutionProvider"
CPU = "CPUExecutionProvider"
PROVIDERS = (TENSORRT, "CUDAExecutionProvider", CPU)  # best first
Provider = str | tuple[str, dict[str, str]]
log = logging.getLogger(__name__)


def available_providers() -> tuple[str, ...]:
    """The execution providers this onnxruntime has, best first: TensorRT, CUDA, CPU."""
    present = onnxruntime.get_available_providers()
    return tuple(name for name in PROVIDERS if name in present)


def session_providers(engines: Path | None, *, is_half: bool) -> list[Provider]:
    """The available providers as onnxruntime's session takes them, best first.

    Args:
        engines: folder of this model's TensorRT engines alone, made when it is needed; None: they are built anew at each start.
        is_half: whether TensorRT may use float16 arithmetic inside them.
    """
    options = {"trt_fp16_enable": str(is_half)}
    names = available_providers()
    if TENSORRT in names and engines is not None:
        try:
            engines.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("TensorRT's engines are not kept, each start builds them again: %s", error)
        else:
            options |= {"trt_engine_cache_enable": "True", "trt_engine_cache_path": str(engines)}
            options |= {"trt_timing_cache_enable": "True", "trt_timing_cache_path": str(engines)}
    return [(name, options) if name == TENSORRT else name for name in names]


def in_words(names: Sequence[str]) -> str:
    """Providers for a person, in the order in which they are asked: "TensorRT > CUDA > CPU"."""
    return " > ".join(name.removesuffix("ExecutionProvider").replace("Tensorrt", "TensorRT") for name in names)


def machine() -> str:
    """What a form of a model is bound to that was made or measured here: instructions of the CPU, onnxruntime, providers."""
    from devices.files import cpuinfo_field  # only a few models ask

    root = Path("/")
    features = cpuinfo_field(root, "flags") or cpuinfo_field(root, "Features") or ""
    instructions = hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()[:12]
    return (
        f"{platform.machine()} CPU with instructions {instructions}, "
        f"onnxruntime {onnxruntime.__version__}, {in_words(available_providers())}"
    )
