"""Which errors say that memory ran out, and which that the accelerator is broken: by the table of texts, and by real limits of a process."""

import errno
import json
import subprocess
import sys

import pytest
import torch

from fedcg.learning.training.device_errors import OUT_OF_MEMORY, is_of_this_machine, is_out_of_memory, is_sticky

MEMORY = (
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("could not create a primitive"),
    RuntimeError("could not create a memory object"),
    RuntimeError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("NvMapMemAllocInternalTagged: 1075072515 error 12"),
    RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/opt/pytorch/c10/cuda/CUDACachingAllocator.cpp":995'),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
)
STICKY = (
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
)
NEITHER = (
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("CUDA error"),
    ValueError("std::bad_alloc"),
    OSError(errno.ENOSPC, "No space left on device"),
)


@pytest.mark.parametrize("error", [*MEMORY, *STICKY, *NEITHER], ids=repr)
def test_an_error_is_of_memory_or_of_a_broken_card_or_neither(error: Exception) -> None:
    assert (is_out_of_memory(error), is_sticky(error)) == (error in MEMORY, error in STICKY)
    assert is_of_this_machine(error) == (error in MEMORY or isinstance(error, OSError))


def test_every_text_of_the_table_has_a_source_and_a_message_that_it_is_met_in() -> None:
    assert all(source for source in OUT_OF_MEMORY.values())
    texts = [str(error) for error in MEMORY]
    assert not [mark for mark in OUT_OF_MEMORY if not any(mark in text for text in texts)]


UNDER_LIMITS = """
import json, os, resource, torch
from fedcg.learning.training.device_errors import is_out_of_memory
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Conv2d(32, 64, 5, padding=2), torch.nn.ReLU(), torch.nn.Conv2d(64, 96, 3, stride=2))
up, images, row = torch.nn.ConvTranspose2d(32, 16, 4, 2), torch.rand(2, 32, 32, 32), torch.empty(200_000)
steps = (lambda: net(images).sum().backward(), lambda: up(images).sum().backward())
cases = [(step, kib) for step in steps for kib in range(500, 9000, 500)]
cases += [(lambda: row.split(1), 4000), (lambda: bytearray(1 << 40), 4000)]
def outcome(work, left):
    ours, theirs = os.pipe()
    if os.fork() == 0:
        taken = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) << 10
        resource.setrlimit(resource.RLIMIT_AS, (taken + left, taken + left))
        try:
            work()
            said = ("", True)
        except Exception as error:
            said = (f"{type(error).__name__}: {error}"[:120], is_out_of_memory(error))
        os.write(theirs, json.dumps(said).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read()
    os.wait()
    return json.loads(said) if said else ("died", True)
print(json.dumps([outcome(work, kib << 10) for work, kib in cases]))
"""
"""First steps of networks and large allocations, each in a process whose address space may grow by so many KiB: what they fail with."""


@pytest.mark.slow
def test_what_torch_fails_with_under_a_real_limit_of_memory_is_known_as_that() -> None:
    done = subprocess.run([sys.executable, "-c", UNDER_LIMITS], capture_output=True, text=True, check=True, timeout=120)
    outcomes = json.loads(done.stdout)
    texts = {text for text, _ in outcomes}
    assert not [text for text, is_known in outcomes if not is_known]
    for mark in ("DefaultCPUAllocator", "could not create a primitive", "std::bad_alloc", "MemoryError"):
        assert any(mark in text for text in texts), (mark, texts)
