"""Classifies torch errors: out of memory, or an accelerator that is unusable until a new process starts.

torch has an exception type for GPU memory. All others are RuntimeErrors that differ only in their text.
"""

import errno

import torch

OUT_OF_MEMORY = {
    "DefaultCPUAllocator": "torch, c10/core/impl/alloc_cpu.cpp",
    "std::bad_alloc": "C++; torch passes it on by its text (torch/csrc/Exceptions.h)",
    "could not create a primitive": "oneDNN, no memory for code or scratchpad (seen under a limit; oneDNN uses one text for all reasons)",
    "could not create a memory object": "oneDNN, the same for a buffer",
    "CUDA out of memory": "torch, c10/cuda/CUDACachingAllocator.cpp",
    "CUDA error: out of memory": "CUDA, cudaErrorMemoryAllocation of a call outside of torch's allocator",
    "CUBLAS_STATUS_ALLOC_FAILED": "cuBLAS, its handle or workspace",
    "CUDNN_STATUS_ALLOC_FAILED": "cuDNN, the same",
    "CUSOLVER_STATUS_ALLOC_FAILED": "cuSOLVER, the same",
    "NvMapMemAlloc": "Tegra's memory driver, error 12 (ENOMEM)",
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED": "torch on Tegra, instead of its usual error (pytorch/pytorch#185240)",
}
"""Texts of out-of-memory errors, of the machine or its accelerator, and their sources. They leave the context usable."""
_STICKY = ("CUDA error", "cuDNN error", "CUBLAS_STATUS", "device-side assert")
BROKEN_EXIT = 4
"""Exit code of a process that ended because of a broken accelerator context."""


def is_sticky(error: BaseException) -> bool:
    """Whether an error leaves the accelerator's context broken, so that all later calls fail. Running out of memory does not."""
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    return any(mark in str(error) for mark in _STICKY)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the machine or its accelerator ran out of memory."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in OUT_OF_MEMORY)


def is_of_this_machine(error: BaseException) -> bool:
    """Whether the machine (memory, disk) caused an error, rather than the data."""
    return isinstance(error, OSError) or is_out_of_memory(error)
