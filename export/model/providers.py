"""What onnxruntime computes with here: TensorRT before CUDA before the CPU, and what a form of a model that was made here is bound to."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnxruntime

TENSORRT = "TensorrtExecutionProvider"
CPU = "CPUExecutionProvider"
PROVIDERS = (TENSORRT, "CUDAExecutionProvider", CPU)  # best first
Provider = str | tuple[str, dict[str, str]]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorRt:
    """How TensorRT, where there is one, makes its engines.

    Attributes:
        cache: folder of this model's engines alone, made when it is needed; None: they are built anew at each start.
        is_half: whether float16 arithmetic may be used inside them.
    """

    cache: Path | None = None
    is_half: bool = False


def available_providers() -> tuple[str, ...]:
    """The execution providers this onnxruntime has, best first: TensorRT, CUDA, CPU."""
    present = onnxruntime.get_available_providers()
    return tuple(name for name in PROVIDERS if name in present)


def with_options(names: Sequence[str], tensorrt: TensorRt) -> list[Provider]:
    """Providers as onnxruntime's session takes them, TensorRT with its options."""
    return [(name, _tensorrt_options(tensorrt)) if name == TENSORRT else name for name in names]


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


def _tensorrt_options(tensorrt: TensorRt) -> dict[str, str]:
    options = {"trt_fp16_enable": str(tensorrt.is_half)}
    if tensorrt.cache is None:
        return options
    try:
        tensorrt.cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("TensorRT's engines are not kept, each start builds them again: %s", error)
        return options
    cache = str(tensorrt.cache)
    return options | {
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": cache,
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": cache,
    }
