"""Errors after which a process can't use its accelerator any more: every later call fails too, until a new process starts."""

from __future__ import annotations

import torch

_STICKY = ("CUDA error", "cuDNN error", "CUBLAS_STATUS", "device-side assert")
BROKEN_EXIT = 4
"""Exit code of a process that ended because its accelerator's context is broken."""


def is_sticky(error: BaseException) -> bool:
    """Whether an error leaves the accelerator's context broken; running out of its memory does not."""
    if isinstance(error, torch.cuda.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    return any(mark in str(error) for mark in _STICKY)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the machine or of its accelerator; torch's own allocator on the CPU raises a RuntimeError."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def is_of_this_machine(error: BaseException) -> bool:
    """Whether an error is the machine's (memory, disk) rather than that of the numbers it was given."""
    return isinstance(error, OSError) or is_out_of_memory(error)
