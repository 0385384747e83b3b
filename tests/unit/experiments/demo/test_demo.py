"""The demo's bookkeeping: event logs become accuracies and a table; options become a plan; the order of the steps."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments.demo.event_follower import AgentHistory, CoordinatorHistory, Follower
from experiments.demo.report import Progress, summarise
from experiments.demo.run_folder import new_run, write_secrets
from experiments.errors import OptionError
from experiments.settings import Setting, parse_params, root_secret
from fedcg.files import secret_in
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.spec import plan_from_mapping
from tests.support.commands import fails

Histories = tuple[list[AgentHistory], CoordinatorHistory]


def event(at: float, name: str, **values: object) -> dict[str, object]:
    return {"t": at, "event": name, **values}


def agent_events(accuracy: float) -> list[dict[str, object]]:
    """Two rounds of an agent, and its model."""
    common = {"accuracy_local": 0.5, "accuracy_common_personal": accuracy, "accuracy_common_local": 0.4}
    rounds = [event(107, "committed", round=at, attempt=1, accuracy_personal=accuracy, **common) for at in (1, 2)]
    onnx = {"accuracy_onnx": accuracy, "accuracy_common_onnx": accuracy, "onnx_model": "/m/0001/model.onnx"}
    return [*rounds, event(124, "finalised", candidate="own", accuracy_personal=accuracy, **common, **onnx)]


@pytest.fixture
def histories() -> Histories:
    agents = [AgentHistory("client-1"), AgentHistory("client-2")]
    agents[0].take(agent_events(0.75))
    agents[1].take(agent_events(0.85))
    coordinator = CoordinatorHistory()
    coordinator.take([event(102, "attempt_opened", round=1), event(112, "aggregate_stored", round=1)])
    return agents, coordinator


PARTS = ["classifier", "generator"]
WIRE: dict[str, Any] = {
    "finished": True,
    "parts_on_wire": PARTS,
    "fields_on_wire": ["accuracy", "examples"],
    "bytes": {"client-1": {"up": {"0": 1000, "1": 500_000, "2": 499_000}, "down": {"1": 7}}},
    "artifacts": [
        {"id": "a" * 64, "kind": "update", "sender": "client-1", "parts": PARTS, "report": ["examples"]},
        {"id": "c" * 64, "kind": "aggregate", "sender": "coordinator", "parts": ["classifier"], "report": []},
    ],
}


def test_the_summary_has_the_promised_figures_and_of_what_crossed_what_the_observer_saw(histories: Histories) -> None:
    made = summarise(
        setting=Setting(rounds=2).model_dump(mode="json"),
        broker="mosquitto",
        total_s=30.004,
        images={agent.id: {"train_images": 30, "test_images": 7} for agent in histories[0]},
        agents=histories[0],
        wire=WIRE,
        versions={"torch": "2"},
    )
    summary = json.loads(json.dumps(made))
    assert {"method", "rounds", "data", "broker", "parts_on_wire", "fields_on_wire"} <= set(summary)
    assert summary["seconds"] == {"total": 30.0}
    first, second = summary["clients"]
    assert (first["train_images"], first["test_images"], first["onnx_model"]) == (30, 7, "/m/0001/model.onnx")
    assert (first["accuracy_personal"], first["accuracy_local"], first["accuracy_onnx"]) == (0.75, 0.5, 0.75)
    assert (first["accuracy_common_personal"], first["accuracy_common_local"]) == (0.75, 0.4)
    assert (first["id"], first["uplink_bytes_per_round"]) == ("client-1", 500_000)
    assert summary["mean"]["accuracy_common_personal"] == pytest.approx(0.8)
    assert (first["parts_on_wire"], first["fields_on_wire"]) == (PARTS, ["examples"])
    assert (second["parts_on_wire"], second["uplink_bytes_per_round"]) == ([], 0)


def test_each_round_and_each_problem_is_one_line(histories: Histories) -> None:
    console = Console(file=io.StringIO(), width=100)
    progress = Progress(console, 2)
    agents, coordinator = histories
    agents[1].problems.append("round 2: rejected because")
    progress.show(agents, coordinator)
    progress.show(agents, coordinator)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("round 1/2") == 1
    assert "50.0 / 80.0" in text
    assert "client-2: round 2: rejected because" in text


def test_an_event_log_is_followed_line_by_line_and_a_torn_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = Follower(path)
    assert list(follower.new()) == []
    path.write_text('{"t": 1, "event": "a"}\n{"t": 2, "ev')
    assert [found["event"] for found in follower.new()] == ["a"]
    with path.open("a") as file:
        file.write('ent": "b"}\nnot json\n')
    assert [found["event"] for found in follower.new()] == ["b"]
    assert list(follower.new()) == []


def test_a_stalled_federation_and_a_refusal_are_noticed() -> None:
    coordinator, agent = CoordinatorHistory(), AgentHistory("client-1")
    coordinator.take([event(1, "stalled", reason="quorum missed")])
    agent.take([event(1, "receipt", round=1, outcome="rejected", reason="norm"), event(2, "trainer_died", pid=3)])
    assert coordinator.stalled == "quorum missed"
    assert len(agent.problems) == 2


def test_the_plan_is_a_valid_plan() -> None:
    setting = Setting(method="fedcg", params={"gan_lr": 0.001, "server_iterations": 77}, local_epochs=3, crop=4)
    plan = plan_from_mapping(setting.plan(setting.source()))
    assert (plan.params["epochs"], plan.params["server_iterations"]) == (3, 77)
    assert (plan.network.generator, plan.network.discriminator) == ("mlp", "mlp")
    assert (plan.image.mode, plan.min_clients, complete_spec(plan).augment_crop) == ("L", 4, 4)


def test_parameters_are_read_as_json_or_text() -> None:
    assert parse_params(["lr=0.01", "steps=3", "flag=true", "kind=min", "x=a=b"]) == {
        "lr": 0.01, "steps": 3, "flag": True, "kind": "min", "x": "a=b",
    }  # fmt: skip
    with pytest.raises(OptionError, match="key=value"):
        parse_params(["lr"])


def test_the_roots_differ_by_purpose_and_seed_and_are_private_files(tmp_path: Path) -> None:
    assert len({root_secret(0, "cohort"), root_secret(0, "device a"), root_secret(1, "cohort")}) == 3
    write_secrets(tmp_path / "secrets", 0, "client-1")
    write_secrets(tmp_path / "other", 0, "client-2")
    key = tmp_path / "secrets" / "device.key"
    assert key.stat().st_mode & 0o077 == 0
    assert secret_in(key.read_bytes()) == root_secret(0, "device client-1")
    assert key.read_bytes() != (tmp_path / "other" / "device.key").read_bytes()
    assert (tmp_path / "secrets" / "cohort.key").read_bytes() == (tmp_path / "other" / "cohort.key").read_bytes()


def test_a_folder_that_holds_files_is_refused_with_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(OptionError, match="choose another --out, or delete it first"):
        new_run(tmp_path, Setting())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--partition", "domain"], "neither"),
        (["--data", "/nowhere/at/all"], "not a folder"),
        (["--method", "feddf", "--public-images", "0"], "--public-images"),
        (["--set", "lrr=1"], "lrr: there is no such setting"),
    ],
)
def test_bad_options_end_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in fails(7 if "--data" in arguments else 2, "demo", *arguments)
    assert not list(tmp_path.iterdir())


def test_the_demo_and_its_help_import_no_torch() -> None:
    modules = "experiments.demo.demo, experiments.cli.demo_command, experiments.cli.simulate_command, audit.cli"
    code = f"import {modules}, sys; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.broker
def test_the_demos_first_line_is_through_a_pipe_before_anything_slow_is_imported_or_started(tmp_path: Path) -> None:
    code = """
import os, sys, types
from fedcg.cli import app
def stop(run, console, complete):
    os.write(1, repr(sorted({"torch", "sklearn", "matplotlib", "sqlalchemy"} & sys.modules.keys())).encode())
    os._exit(7)  # nothing that is still in a buffer comes out
sys.modules["experiments.demo.demo"] = types.SimpleNamespace(Demo=stop)
app.main(args=["demo", "--out", sys.argv[1]], prog_name="fedcg")
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"starting a broker, a coordinator and 4 agents; all files go to {tmp_path / 'run'}\n[]"
