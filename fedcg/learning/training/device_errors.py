"""What an error of torch says about the machine: memory ran out, or its accelerator can't be used any more until a new process starts.

torch has one exception type for the memory of a GPU; all else are RuntimeErrors, told apart by their text alone.
"""

import errno

import torch

OUT_OF_MEMORY = {
    "DefaultCPUAllocator": "torch, c10/core/impl/alloc_cpu.cpp",
    "std::bad_alloc": "C++; torch passes it on by its text (torch/csrc/Exceptions.h)",
    "could not create a primitive": "oneDNN, which has no room for code or scratchpad (seen under a limit; oneDNN has one text for all its reasons)",
    "could not create a memory object": "oneDNN, the same for a buffer",
    "CUDA out of memory": "torch, c10/cuda/CUDACachingAllocator.cpp",
    "CUDA error: out of memory": "CUDA, cudaErrorMemoryAllocation of a call outside of torch's allocator",
    "CUBLAS_STATUS_ALLOC_FAILED": "cuBLAS, its handle or workspace",
    "CUDNN_STATUS_ALLOC_FAILED": "cuDNN, the same",
    "CUSOLVER_STATUS_ALLOC_FAILED": "cuSOLVER, the same",
    "NvMapMemAlloc": "Tegra's memory driver, error 12 (ENOMEM)",
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED": "torch on Tegra, in place of its own error (pytorch/pytorch#185240)",
}
"""Texts by which running out of memory is known, of the machine or of its accelerator, and whose they are. None leaves a context broken."""
_STICKY = ("CUDA error", "cuDNN error", "CUBLAS_STATUS", "device-side assert")
BROKEN_EXIT = 4
"""Exit code of a process that ended because its accelerator's context is broken."""


def is_sticky(error: BaseException) -> bool:
    """Whether an error leaves the accelerator's context broken, so that every later call fails too; running out of memory does not."""
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    return any(mark in str(error) for mark in _STICKY)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the machine or of its accelerator."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in OUT_OF_MEMORY)


def is_of_this_machine(error: BaseException) -> bool:
    """Whether an error is the machine's (memory, disk) rather than that of the numbers it was given."""
    return isinstance(error, OSError) or is_out_of_memory(error)
