"""CUDA graphs and the errors of an accelerator."""

import errno
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedcg.learning.round_checkpoint import optimiser_state
from fedcg.learning.training import cuda_graph
from fedcg.learning.training.cuda_graph import graphed
from fedcg.learning.training.device_errors import is_of_this_machine, is_out_of_memory, is_sticky
from tests.support.learning.learning_cases import same

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MANY = 1000


def step_of(net: nn.Module, optimiser: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(inputs).square().mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        return loss

    return step


def network() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    stream = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=stream)
    return net


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_step_that_cant_be_captured_runs_without_a_graph_from_where_it_began(
    steps_before: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(step: cuda_graph.Step, inputs: list[torch.Tensor], rewind: object) -> None:
        for _ in range(3):  # a warm-up that trains
            step(*inputs)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graph, "GraphedStep", refusing)
    monkeypatch.setattr(cuda_graph, "on_cuda", lambda _: True)
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(2))
    states = []
    for wrapped in (False, True):
        net = network()
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        step = step_of(net, optimiser)
        for _ in range(steps_before):
            step(inputs)
        with caplog.at_level(logging.WARNING):
            (graphed(step, [net], [optimiser], MANY) if wrapped else step)(inputs)
        states.append({**net.state_dict(), **optimiser_state(optimiser)})
    assert "without a CUDA graph: operation not permitted" in caplog.text
    assert same(*states)


def test_a_few_steps_are_not_worth_a_graph() -> None:
    def step(rows: torch.Tensor) -> torch.Tensor:
        return rows

    assert graphed(step, [], [], 49) is step
    assert graphed(step, [], [], 50) is not step


@needs_cuda
def test_the_step_really_runs_under_a_graph_on_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network().to("cuda")
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)
    step = step_of(net, optimiser)
    made: list[cuda_graph.GraphedStep] = []

    class Noted(cuda_graph.GraphedStep):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(cuda_graph, "GraphedStep", Noted)
    graphed(step, [net], [optimiser], MANY)(torch.randn(4, 5, device="cuda"))
    assert len(made) == 1


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
