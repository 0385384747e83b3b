"""The demo's bookkeeping: event logs become times, accuracies and a table; options become a plan; the order of the steps."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments.demo.event_follower import AgentHistory, CoordinatorHistory, Follower
from experiments.demo.report import Progress, seconds, summarise
from experiments.demo.run_folder import new_run, resumed_run, write_secrets
from experiments.errors import OptionError
from experiments.record import record_of_summary, write_record
from experiments.settings import Setting, load_setting, parse_params, root_secret
from fedcg.files import secret_in
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.spec import plan_from_mapping
from tests.support.commands import fails

Histories = tuple[list[AgentHistory], CoordinatorHistory]
FIRST, SECOND, FINAL = "a" * 64, "b" * 64, "c" * 64


def event(at: float, name: str, **values: object) -> dict[str, object]:
    return {"t": at, "event": name, **values}


def agent_events(delay: float, accuracy: float) -> list[dict[str, object]]:
    """Two rounds of an agent that is `delay` seconds later than an ideal one at every step of round 1."""
    events = [event(101, "agent_started")]
    for number, base, at in ((1, FIRST, 103.0), (2, SECOND, 113.0)):
        late = delay if number == 1 else 0.0
        events += [
            event(at + late, "artifact_stored", artifact=base, what="aggregate", round=number),
            event(at + late + 0.5, "phase_started", phase="classify", round=number, attempt=1),
            event(at + late + 0.6, "progress", phase="classify", step=5, steps=10, round=number, attempt=1),
            event(at + late + 4, "committed", round=number, attempt=1, accuracy_personal=accuracy, accuracy_local=0.5,
                  accuracy_common_personal=accuracy, accuracy_common_local=0.4, consistency=0.9, spread=0.3),
            event(at + late + 4.25, "receipt", round=number, attempt=1, outcome="accepted"),
        ]  # fmt: skip
    return [
        *events,
        event(121, "artifact_stored", artifact=FINAL, what="aggregate", round=2),
        event(124 + delay, "finalised", candidate="own", accuracy_personal=accuracy, accuracy_local=0.5,
              accuracy_onnx=accuracy, accuracy_common_personal=accuracy, accuracy_common_local=0.4,
              accuracy_common_onnx=accuracy, model_dir="/m/0001", onnx_model="/m/0001/model.onnx"),
    ]  # fmt: skip


@pytest.fixture
def histories() -> Histories:
    agents = [AgentHistory("client-1"), AgentHistory("client-2")]
    agents[0].take(agent_events(0.0, 0.75))
    agents[1].take(agent_events(2.0, 0.85))
    coordinator = CoordinatorHistory()
    coordinator.take(
        [
            event(102.5, "attempt_opened", round=1, attempt=1, aggregate=FIRST),
            event(110.25, "aggregate_step", round=1, phase="distil", step=3, steps=4),
            event(112, "aggregate_stored", round=1, attempt=1, artifact=SECOND),
            event(112.1, "attempt_opened", round=2, attempt=1, aggregate=SECOND),
            event(120, "aggregate_stored", round=2, attempt=1, artifact=FINAL),
            event(120, "finished", round=2),
        ]
    )
    return agents, coordinator


def test_seconds_follow_the_critical_path_by_hand(histories: Histories) -> None:
    # Round 1: opened 102.5, last verified 105 (2.5); last commit 109, receipt 109.25 (0.25); stored 112 (2.75).
    # Round 2: opened 112.1, verified 113 (0.9); commit 117, receipt 117.25 (0.25); stored 120 (2.75).
    # Final: stored 120, verified 121 (1.0); last export 126 (5.0). Train: 105..109 and 113..117.
    times = seconds(*histories, started=100.0, ended=130.0)
    assert (times.total, times.startup) == (30.0, 2.5)
    assert times.transport == pytest.approx(2.5 + 0.25 + 0.9 + 0.25 + 1.0)
    assert (times.train, times.aggregate, times.export) == pytest.approx((4.0 + 4.0, 2.75 + 2.75, 5.0))
    assert times.rest == pytest.approx(30.0 - 2.5 - 4.9 - 8.0 - 5.5 - 5.0)


def test_of_a_resumed_run_only_the_later_rounds_count(histories: Histories) -> None:
    # Resumed at 112.5: round 1 is over; round 2 was open before, so its transport counts from 112.5 on.
    times = seconds(*histories, started=112.5, ended=130.0)
    assert times.startup == 0.0
    assert (times.train, times.transport) == pytest.approx((4.0, 0.5 + 0.25 + 1.0))


PARTS = ["classifier", "generator"]
WIRE: dict[str, Any] = {
    "finished": True,
    "parts_on_wire": PARTS,
    "fields_on_wire": ["accuracy", "examples"],
    "bytes": {"client-1": {"up": {"0": 1000, "1": 500_000, "2": 499_000}, "down": {"1": 7}}},
    "artifacts": [
        {"id": FIRST, "kind": "update", "sender": "client-1", "parts": PARTS, "report": ["examples"]},
        {"id": FINAL, "kind": "aggregate", "sender": "coordinator", "parts": ["classifier"], "report": []},
    ],
    "messages": {"hello": {"count": 2}},
}


def test_the_summary_has_the_promised_figures_and_of_what_crossed_what_the_observer_saw(histories: Histories) -> None:
    made = summarise(
        setting=Setting(rounds=2).model_dump(mode="json"),
        broker="mosquitto",
        times=seconds(*histories, started=100.0, ended=130.0),
        images={agent.id: {"train_images": 30, "test_images": 7} for agent in histories[0]},
        agents=histories[0],
        wire=WIRE,
        versions={"torch": "2"},
    )
    summary = json.loads(json.dumps(made))
    assert {"method", "rounds", "data", "broker", "parts_on_wire", "fields_on_wire"} <= set(summary)
    assert set(summary["seconds"]) == {"total", "startup", "train", "transport", "aggregate", "export", "rest"}
    first, second = summary["clients"]
    assert (first["train_images"], first["test_images"], first["onnx_model"]) == (30, 7, "/m/0001/model.onnx")
    assert (first["accuracy_personal"], first["accuracy_local"], first["accuracy_onnx"]) == (0.75, 0.5, 0.75)
    assert (first["accuracy_common_personal"], first["accuracy_common_local"]) == (0.75, 0.4)
    assert (first["id"], first["uplink_bytes_per_round"]) == ("client-1", 500_000)
    assert summary["mean"]["accuracy_common_personal"] == pytest.approx(0.8)
    assert (first["parts_on_wire"], first["fields_on_wire"]) == (PARTS, ["examples"])
    assert (second["parts_on_wire"], second["uplink_bytes_per_round"]) == ([], 0)


def test_the_live_table_and_the_lines_show_where_everybody_is(histories: Histories) -> None:
    console = Console(file=io.StringIO(), width=100)
    progress = Progress(console, 2)
    agents, coordinator = histories
    agents[1].problems.append("round 2: rejected because")
    with progress.shown():
        progress.show(agents, coordinator)
        progress.show(agents, coordinator)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("round 1/2") == 1
    assert "50.0 / 80.0" in text
    assert "client-2: round 2: rejected because" in text
    console.print(progress.render(agents, coordinator))
    assert "50.0 / 75.0" in console.file.getvalue()  # type: ignore[attr-defined]


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


def test_a_run_is_resumed_with_its_own_options_ports_and_steps(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", Setting(seed=5, clients=3), "auto")
    run.save(frozenset({"init"}))
    again = resumed_run(tmp_path / "run")
    assert (again, again.done()) == (run, frozenset({"init"}))
    assert load_setting(tmp_path / "run").seed == 5
    with pytest.raises(OptionError, match="--resume"):
        new_run(tmp_path / "run", Setting(), "auto")
    with pytest.raises(OptionError, match="no demo"):
        resumed_run(tmp_path)


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


def test_a_published_record_names_no_path_of_the_machine(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    model = root / "devices" / "client-1" / "store" / "models" / "0001" / "model.onnx"
    summary = {
        "method": "fedcg",
        "data": "/home/someone/photographs",
        "broker": "mosquitto (/usr/sbin/mosquitto)",
        "setting": {"data": "/home/someone/photographs", "seed": 3},
        "clients": [{"id": "client-1", "accuracy_personal": 0.5, "onnx_model": str(model)}],
    }
    (root / "summary.json").write_text(json.dumps(summary))
    out = tmp_path / "runs" / "record.json"
    write_record(record_of_summary(summary, root), out)
    text = out.read_text()
    record = json.loads(text)
    assert str(tmp_path) not in text
    assert "/home" not in text
    assert record["data"] == record["setting"]["data"] == "photographs"
    assert record["clients"][0]["onnx_model"] == "devices/client-1/store/models/0001/model.onnx"
    assert record["clients"][0]["accuracy_personal"] == 0.5
    assert record["machine"]["cpus"] >= 1
    assert len(record["date"]) == len("2000-01-01")


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
    assert done.stdout == f"starting a broker, a coordinator and 4 agents; everything goes to {tmp_path / 'run'}\n[]"
