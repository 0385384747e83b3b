"""`import fedcg`: a federation of a program's own network and data."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedcg
from fedcg.errors import BadInputError, FedcgError

CLASSES = ("slow", "fast", "still")


def windows(seed: int, count: int = 60) -> TensorDataset:
    """Sines of two speeds and noise, [2, 32]; a client's have a phase of its own."""
    stream = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    times = torch.linspace(0, 6.0, 32)
    speeds = torch.tensor([1.0, 3.0, 0.0])[labels]
    waves = torch.sin(speeds[:, None, None] * times + seed + torch.tensor([0.0, 1.0])[:, None])
    return TensorDataset(waves + 0.3 * torch.randn(count, 2, 32, generator=stream), labels)


def net() -> nn.Module:
    """A small network, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv1d(2, 8, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4))
        return nn.Sequential(body, nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))


def client(seed: int) -> fedcg.Client:
    return fedcg.Client(fedcg.split(net(), after="0"), windows(seed), CLASSES, test=windows(seed + 100, 30))


def clients() -> dict[str, fedcg.Client]:
    return {"a": client(1), "b": client(2), "c": client(3)}


QUICK: dict[str, Any] = {"local_epochs": 2, "batch_size": 8, "lr": 3e-3}


@pytest.mark.parametrize("method", ["fedcg", "fedavg", "fedseal", "fedgh"])
def test_a_program_of_ones_own_is_federated(method: str, tmp_path: Path) -> None:
    run = fedcg.simulate(clients(), method=method, rounds=2, seed=1, out=tmp_path, **QUICK)
    table = run.table()
    assert list(table.index) == ["a", "b", "c"]
    assert (table["own model"] > 50).all()
    assert len(run.curves()) == 6
    assert run.plot().axes[0].get_ylabel() == "accuracy on own test images, %"
    one = run.clients["b"]
    inputs, labels = windows(102, 30).tensors
    logits = one.model(inputs)
    assert float((logits.argmax(1) == labels).float().mean()) > 0.5, one.choice
    session = onnxruntime.InferenceSession(one.export(tmp_path / "b.onnx"))
    answer = session.run(["logits"], {"input": inputs.numpy()})[0]
    assert torch.allclose(torch.from_numpy(answer), logits, atol=1e-4)


def test_a_finished_run_is_not_run_again_and_other_data_is_another_run(tmp_path: Path) -> None:
    first = fedcg.simulate(clients(), "fedavg", 2, out=tmp_path, **QUICK)
    record = next(tmp_path.glob("*.json"))
    written = record.stat().st_mtime_ns
    again = fedcg.simulate(clients(), "fedavg", 2, out=tmp_path, **QUICK)
    assert record.stat().st_mtime_ns == written
    inputs = windows(1).tensors[0][:4]
    assert torch.equal(again.clients["a"].model(inputs), first.clients["a"].model(inputs))
    fedcg.simulate({**clients(), "c": client(9)}, "fedavg", 2, out=tmp_path, **QUICK)
    assert len(list(tmp_path.glob("program-*.json"))) == 2


@pytest.mark.slow
def test_workers_change_no_number(tmp_path: Path) -> None:
    one, two = (
        fedcg.simulate(clients(), "fedcg", 1, out=tmp_path / str(count), workers=count, **QUICK) for count in (1, 2)
    )
    inputs = windows(1).tensors[0]
    assert torch.equal(one.clients["a"].model(inputs), two.clients["a"].model(inputs))


def test_frozen_weights_stay_and_a_model_that_knows_its_batch_is_not_exported(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(len(x), -1)

    body, head = nn.Sequential(Fixed(), nn.Linear(64, 8)), nn.Linear(8, 3).requires_grad_(False)  # noqa: FBT003 - torch's own
    given = {name: fedcg.Client(fedcg.Split(body, head), windows(1), CLASSES) for name in "ab"}
    run = fedcg.simulate(given, "fedavg", 1, **QUICK)
    assert any(torch.equal(weights, head.weight) for weights in run.clients["a"].model.state_dict().values())
    with pytest.raises(FedcgError, match="the exported model fails on"):
        run.clients["a"].export(tmp_path / "a.onnx")


WRONG: dict[str, Callable[[], dict[str, Any]]] = {
    "clients: a federation has two or more": lambda: {"a": client(1)},
    "clients: b is a Sequential": lambda: {"a": client(1), "b": net()},
    "'a/b': give each a unique name": lambda: {"a/b": client(1), "c": client(2)},
    "client b: classes differ from those of a": lambda: {
        "a": client(1), "b": fedcg.Client(client(2).model, windows(2), CLASSES[::-1])
    },
    r"client b: inputs are float32 \[4\], but those of a are float32 \[2, 32\]": lambda: {
        "a": client(1), "b": fedcg.Client(client(2).model, (torch.randn(40, 4), torch.arange(40) % 3), CLASSES)
    },
    "returns \\[3\\] per input, not one logit for each of 4 classes": lambda: {
        name: fedcg.Client(client(1).model, windows(seed), [*CLASSES, "more"]) for seed, name in enumerate("ab")
    },
    "client b: its network differs from that of a": lambda: {
        "a": client(1), "b": fedcg.Client(fedcg.Split(nn.Flatten(), nn.Linear(64, 3)), windows(2), CLASSES)
    },
    "weight of the classifier is also a parameter of the extractor": lambda: {
        name: fedcg.Client(fedcg.Split(layer, layer), windows(1), CLASSES) for name, layer in [("a", nn.Linear(3, 3))]
    },
    "give a list, or a mapping from names": lambda: cast(Any, iter("ab")),
    "the classifier is a str": lambda: {"a": fedcg.Split(nn.Flatten(), "head")},  # type: ignore[arg-type]
    "model is a Sequential": lambda: {name: fedcg.Client(net(), windows(1), CLASSES) for name in "ab"},
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_federated_is_one_sentence(words: str) -> None:
    with pytest.raises(FedcgError, match=words):
        fedcg.simulate(WRONG[words](), rounds=1)


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(BadInputError, match="did you mean `local_epochs`"):
        fedcg.simulate(clients(), rounds=1, local_epoch=3)
    with pytest.raises(BadInputError, match="flip: not allowed here"):
        fedcg.simulate(clients(), rounds=1, flip=True)
    with pytest.raises(AttributeError, match="no attribute 'simulat'; there are Audit, Client"):
        getattr(fedcg, "simulat")  # noqa: B009 - mypy knows that it is not there


UNUSUAL = """import sys, torch, fedcg
class Spectrum(torch.nn.Module):
    forward = lambda self, x: torch.fft.rfft(x).abs()
x = torch.randn(60, 16)
one = fedcg.Client(fedcg.Split(Spectrum(), torch.nn.Linear(9, 2)), (x, (x[:, 0] > 0).long()), ["no", "yes"])
run = fedcg.simulate([one, one], "fedsplit", 1, local_epochs=1)
run.clients["client-1"].export(sys.argv[1])
print(run.folder.is_dir())
"""


def test_a_run_without_a_folder_leaves_none_and_an_exporter_that_fails_first_prints_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNUSUAL, str(tmp_path / "m.onnx")]
    (tmp_path / "passing").mkdir()
    there = {**os.environ, "TMPDIR": str(tmp_path / "passing")}
    done = subprocess.run(command, env=there, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert (tmp_path / "m.onnx").stat().st_size > 0
    assert not list((tmp_path / "passing").glob("fedcg-*"))
