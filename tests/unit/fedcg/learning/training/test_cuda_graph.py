"""The student's step under a CUDA graph: the same results as without; on the CPU the plain step."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from fedcg.learning.aggregation.distillation import Distillation
from fedcg.learning.round_checkpoint import optimiser_state
from fedcg.learning.training import cuda_graph
from fedcg.learning.training.cuda_graph import graphed

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MANY = 1000
SETTINGS = Distillation(iterations=60, batch=8, lr=0.01, weight_decay=1e-4)
ROWS = 476  # the last batch is smaller


def network() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    stream = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=stream)
    return net


class Refusing:
    """Stands for a CUDA graph that can't be captured, after a warm-up that has already trained."""

    def __init__(self, step: cuda_graph.Step, inputs: list[torch.Tensor], rewind: object) -> None:
        step(*inputs)
        raise RuntimeError("operation not permitted when stream is capturing")


class OnDevice(torch.Tensor):
    """Says of itself that it is on a CUDA device."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def test_a_step_that_cant_be_captured_runs_without_a_graph_from_where_it_began(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_graph, "GraphedStep", Refusing)
    net = network()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.1)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(inputs.as_subclass(torch.Tensor)).square().mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        for group in optimiser.param_groups:
            group["capturable"] = False  # this test runs on the CPU
        optimiser.step()
        return loss

    inputs = torch.randn(4, 5).as_subclass(OnDevice)
    with caplog.at_level(logging.WARNING):
        graphed(step, [net], [optimiser], MANY)(inputs)
    assert "without a CUDA graph: operation not permitted" in caplog.text
    twin = network()
    other = torch.optim.Adam(twin.parameters(), lr=0.1)
    twin(inputs.as_subclass(torch.Tensor)).square().mean().backward()
    other.step()
    assert all(torch.equal(net.state_dict()[name], twin.state_dict()[name]) for name in twin.state_dict())


def test_a_few_steps_are_not_worth_a_graph() -> None:
    def step(rows: torch.Tensor) -> torch.Tensor:
        return rows

    assert graphed(step, [], [], 49) is step
    assert graphed(step, [], [], 50) is not step


@needs_cuda
def test_the_step_really_runs_under_a_graph_on_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network().to("cuda")
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(inputs).square().mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        return loss

    made: list[cuda_graph.GraphedStep] = []

    class Noted(cuda_graph.GraphedStep):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(cuda_graph, "GraphedStep", Noted)
    graphed(step, [net], [optimiser], MANY)(torch.randn(4, 5, device="cuda"))
    assert len(made) == 1


def test_a_warm_up_leaves_an_optimiser_of_a_checkpoint_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        optimiser.zero_grad()
        loss: torch.Tensor = net(inputs).square().mean()
        loss.backward()
        optimiser.step()
        return loss.detach()

    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(2))
    step(inputs)
    moments = {name: value.clone() for name, value in optimiser_state(optimiser).items()}

    def captured(taken: Any, examples: Any, _rewind: Any) -> None:
        for _ in range(3):
            taken(*examples)
        raise RuntimeError("can't be captured")

    monkeypatch.setattr(cuda_graph, "GraphedStep", captured)
    monkeypatch.setattr(cuda_graph, "on_cuda", lambda _: True)
    seen: list[dict[str, torch.Tensor]] = []

    def watched(*given: torch.Tensor) -> torch.Tensor:
        seen.append({name: value.clone() for name, value in optimiser_state(optimiser).items()})
        return step(*given)

    graphed(watched, [net], [optimiser], MANY)(inputs)
    assert len(seen) == 4
    assert moments.keys() == seen[-1].keys()
    assert all(torch.equal(moments[name], seen[-1][name]) for name in moments), "the step after the warm-up"
