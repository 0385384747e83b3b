"""`fedcg.Trainer`: any task with a loop of its own, and what is wrong with one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

import fedcg
from fedcg.errors import FedcgError, users_trace
from fedcg.wire.parts import Part


class Line(fedcg.Trainer):
    private = ("0.*",)
    metric = "r2"

    def __init__(self, seed: int, **changes: Any) -> None:
        stream = torch.Generator().manual_seed(seed)
        self.x = torch.randn(40, 4, generator=stream)
        self.y = self.x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]]) + 0.1 * torch.randn(40, 1, generator=stream)
        self.examples, self.met = 30, list[float]()
        vars(self).update(changes)

    def train(self, model: nn.Module, context: fedcg.TrainerContext) -> None:
        optimiser = torch.optim.SGD(model.parameters(), lr=context.lr)
        for _ in range(context.epochs):
            optimiser.zero_grad()
            penalty = context.penalty(model)
            self.met.append(penalty.item())
            ((model(self.x[:30]) - self.y[:30]).square().mean() + penalty).backward()
            optimiser.step()

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"r2": float(1 - (model(self.x[30:]) - self.y[30:]).square().mean() / self.y[30:].var()), "more": 1.0}


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def clients(kind: type[Line] = Line, **changes: Any) -> dict[str, fedcg.Client]:
    return {
        name: fedcg.Client(net(), trainer=kind(seed, **changes), example=torch.zeros(4))
        for seed, name in enumerate("abc")
    }


QUICK: dict[str, Any] = {"rounds": 3, "local_epochs": 20, "lr": 0.05}


def test_what_a_trainer_keeps_differs_and_what_it_shares_is_the_mean(tmp_path: Path) -> None:
    run = fedcg.simulate(clients(), "fedsplit", out=tmp_path, **QUICK)
    assert (run.table()["own model"] > 80).all()
    assert {"local only", "downloaded", "deployed"} <= set(run.table().columns)
    sent = [run._stood.states[name].parts for name in "abc"]
    for name, tensor in run._stood.aggregate.parts[Part.CLASSIFIER].items():
        assert torch.allclose(tensor, torch.stack([one[Part.CLASSIFIER][name] for one in sent]).mean(0), atol=1e-6)
    assert set(run._stood.aggregate.parts) == {Part.CLASSIFIER}
    assert not torch.equal(sent[0][Part.EXTRACTOR]["0.weight"], sent[1][Part.EXTRACTOR]["0.weight"])
    path, inputs = run.clients["b"].export(tmp_path / "b.onnx"), torch.randn(5, 4)
    answer = onnxruntime.InferenceSession(path).run(None, {"input": inputs.numpy()})[0]
    assert torch.allclose(torch.from_numpy(answer), run.clients["b"].model(inputs), atol=1e-5)


def test_fedprox_gives_a_penalty_that_grows_with_the_distance_and_fedavg_none() -> None:
    given = clients(private=())
    fedcg.simulate(copy.copy(given), "fedprox", params={"mu": 10.0}, **QUICK)
    met = given["a"].trainer.met  # type: ignore[union-attr]
    assert met[0] == 0.0 < met[1]
    averaged = clients(private=())
    fedcg.simulate(averaged, "fedavg", **QUICK)
    assert set(averaged["a"].trainer.met) == {0.0}  # type: ignore[union-attr]


class Reshapes(Line):
    def train(self, model: nn.Module, context: fedcg.TrainerContext) -> None:
        assert isinstance(model, nn.Sequential)
        model[0] = nn.Linear(4, 9)


class Silent(Line):
    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"mae": 0.1}


class Unbounded(Line):
    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"r2": 2.0}


class Fails(Line):
    def train(self, model: nn.Module, context: fedcg.TrainerContext) -> None:
        raise KeyError("no such column")


class Copies(Line):
    def train(self, model: nn.Module, context: fedcg.TrainerContext) -> None:
        super().train(copy.deepcopy(model), context)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.head.weight = self.backbone.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(self.head(self.backbone(x)))
        return made


def tied(**more: Any) -> dict[str, fedcg.Client]:
    return {
        name: fedcg.Client(Tied(), trainer=Line(1, private=("backbone.*",)), example=torch.zeros(4), **more)
        for name in "ab"
    }


WRONG: dict[str, tuple[Callable[[], dict[str, fedcg.Client]], str, dict[str, Any]]] = {
    r"client a: after Trainer.train 0.bias is \(9,\) but was \(8,\)": (lambda: clients(Reshapes), "fedsplit", {}),
    "client a: Trainer.evaluate must return {'r2': a number": (lambda: clients(Silent), "fedsplit", {}),
    "a number up to 1, higher is better}, not {'r2': 2.0}": (lambda: clients(Unbounded), "fedsplit", {}),
    "Trainer.train failed in round 1: KeyError: 'no such column' .test_trainer.py, line": (
        lambda: clients(Fails), "fedsplit", {},
    ),
    "Trainer.private lists some: choose fedsplit": (clients, "fedavg", {}),
    "Trainer.private is empty, but method fedsplit": (lambda: clients(private=()), "fedsplit", {}),
    "'layer.*' matches no tensor; the tensors are 0.weight": (lambda: clients(private=("layer.*",)), "fedsplit", {}),
    "Trainer.private matches all tensors": (lambda: clients(private=("*",)), "fedsplit", {}),
    "fedcg has its own training stages and does not support a Trainer": (clients, "fedcg", {}),
    "Trainer.examples is 1: set": (lambda: clients(examples=1), "fedsplit", {}),
    "dropout: not supported with a Trainer": (clients, "fedsplit", {"privacy": {"dropout": 0.5}}),
    "server_momentum needs initial weights": (
        lambda: clients(private=()), "fedavg", {"params": {"server_momentum": 0.3}},
    ),
    "backbone.weight and head.weight are one tensor": (tied, "fedsplit", {}),
    "returned a NoneType, or changed no parameter": (lambda: clients(Copies), "fedsplit", {}),
    r"can't run on inputs like example, \[2, 7\]": (
        lambda: {name: fedcg.Client(net(), trainer=Line(1), example=torch.zeros(7)) for name in "ab"}, "fedsplit", {},
    ),
    "with a trainer, set example": (
        lambda: {"a": fedcg.Client(net(), trainer=Line(1), classes=("x", "y"))}, "fedsplit", {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_with_a_trainer_is_one_sentence(words: str) -> None:
    made, method, more = WRONG[words]
    with pytest.raises(FedcgError, match=words) as caught:
        fedcg.simulate(made(), method, **QUICK, **more)
    if "KeyError" in words:
        assert 'raise KeyError("no such column")' in users_trace(caught.value)
