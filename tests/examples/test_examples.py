"""The examples: each file's simulation, and the same file as the program of four agents over Mosquitto, up to its ONNX model's answers."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.io import wavfile
from torch import nn

import fedcg
from export.model.runtime import Model
from tests.support.program_stack import ProgramStack

EXAMPLES = Path(__file__).parents[2] / "examples"
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "wearables": ("fedcg", {"epochs": 10, "lr": 3e-3, "server_iterations": 20}),
    "tables": ("fedavg", {"epochs": 10, "lr": 3e-3}),
    "regression": ("fedprox", {"epochs": 15, "lr": 3e-3}),
    "segmentation": ("fedsplit", {"epochs": 2, "lr": 5e-3}),
}
ALLOWED = {"fedavg": ("classifier", "extractor"), "fedprox": ("classifier", "extractor")}


def example(name: str) -> ModuleType:
    if name == "wearables" and importlib.util.find_spec("aeon") is None:
        why = "no data: pip install --no-deps aeon==1.6.0"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CASES)
def test_the_sites_of_an_example_are_federated(name: str) -> None:
    module, (method, params) = example(name), CASES[name]
    settings: dict[str, Any] = {"params": {"server_iterations": 2}} if "server_iterations" in params else {}
    clients = {site: module.client(site) for site in module.SITES}
    run = fedcg.simulate(clients, method, rounds=1, local_epochs=1, **settings)
    assert list(run.table().index) == list(module.SITES) == list(ProgramStack.devices)


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.parametrize("name", CASES)
def test_the_same_file_trains_on_four_agents_and_its_exported_model_is_right(name: str, tmp_path: Path) -> None:
    module, (method, params) = example(name), CASES[name]
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(EXAMPLES / f"{name}.py", project / "client.py")
    stack = ProgramStack(tmp_path / "stack", project=project, method=method, params=params)
    stack.rounds = 3
    stack.allow_upload = {one: ALLOWED[method] for one in stack.devices if method in ALLOWED}
    stack.prepare()
    with stack.up(agents=True):
        stack.wait_finished()
    end = next(event for event in stack.events("site-1") if event["event"] == "finalised")
    model, client = Model.load(Path(end["model_dir"])), module.client("site-1")
    if client.trainer is None:
        held: Any = client.test
        inputs, labels = held if isinstance(held, tuple) else (held.inputs, held.labels)
        answers = model.predict(np.asarray(inputs, model.manifest.input.dtype))
        assert answers.shape == (len(labels), len(client.classes))
        assert (answers.argmax(1) == labels).mean() > 0.15 + 1 / len(client.classes)
    else:
        answers = model.predict(client.trainer.x[60:].numpy())
        assert answers.shape == (len(client.trainer.y[60:]), *{"regression": (1,), "segmentation": (3, 32, 32)}[name])
    assert np.isfinite(answers).all()


def test_the_short_program_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (EXAMPLES.parent / "docs" / "how-to" / "python.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(page.split("```python\n")[1].split("```")[0], {"__name__": "__main__"})  # noqa: S102 - our own page
    assert (tmp_path / "model.onnx").stat().st_size > 1000


def test_the_programs_of_the_page_on_tables_and_signals_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = (EXAMPLES.parent / "docs" / "how-to/tables-and-signals.md").read_text().split("```python\n")
    table, signals = (block.split("```")[0] for block in blocks[1:3])
    ages = np.arange(20, 80)
    rows = {"age": ages, "pressure": ages * 2.0, "ward": "b", "outcome": np.where(ages > 50, "stays", "home")}
    moves = {"x": ages, "y": ages, "z": ages, "activity": "walk", "recording": 1}
    monkeypatch.chdir(tmp_path)
    for site in "ab":
        pd.DataFrame(rows).to_csv(f"{site}.csv", index=False)
    pd.DataFrame(moves).loc[np.repeat(range(60), 5)].to_parquet("a.parquet")
    (tmp_path / "sounds" / "walk").mkdir(parents=True)
    wavfile.write("sounds/walk/one.wav", 16000, np.zeros(40_000, np.int16))
    names: dict[str, Any] = {"fedcg": fedcg, "nn": nn, "CLASSES": ["walk"], "site": "a"}
    exec(table + signals, names)  # noqa: S102 - our own page
    assert (names["moves"].inputs.shape, names["sound"].inputs.shape) == ((3, 3, 128), (2, 1, 16000))
    run = fedcg.simulate({site: names["client"](site) for site in "ab"}, "fedsplit", 1, local_epochs=1)
    assert list(run.table().index) == ["a", "b"]
