"""`track`: a run at MLflow and in TensorBoard's event files."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedcg
from experiments.simulation.batch import PlannedRun
from experiments.simulation.batch_runner import BatchRunner
from fedcg import tracking
from fedcg.files import file_sha256
from fedcg.learning.simulation.simulation import Simulation
from fedcg.tracking import TrackedRun, Tracking
from tests.support.simulations import fedcg_simulate
from tests.support.waiting import free_port, wait_until
from tests.unit.experiments.test_face import QUICK, clients


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.HTTPError:
        return False


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], str]]:
    """Starts an MLflow server on a port: the package's REST handlers in a process, on SQLite; gives its URL."""
    monkeypatch.setattr(tracking, "END_S", 120.0)  # a busy machine may take long
    running: list[subprocess.Popen[bytes]] = []
    env = {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{tmp_path / 'mlflow.sqlite'}",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(tmp_path / "mlflow"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }

    def start(port: int) -> str:
        command = [sys.executable, "-m", "flask", "--app", "mlflow.server:app", "run", "--port", str(port)]
        with (tmp_path / "mlflow.log").open("ab") as log:
            running.append(subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=log))
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(url), "the MLflow server answers", 90.0)
        return url

    yield start
    for server in running:
        server.kill()
        server.wait()


def runs_of(url: str) -> list[dict[str, Any]]:
    """All runs of MLflow's experiment `fedcg`, with their parameters and tags as mappings."""
    api = f"{url}/api/2.0/mlflow"
    experiment = httpx.get(f"{api}/experiments/get-by-name", params={"experiment_name": "fedcg"}).json()["experiment"]
    found = httpx.post(f"{api}/runs/search", json={"experiment_ids": [experiment["experiment_id"]]}).json()["runs"]
    return [
        {
            **run["info"],
            **{kind: {one["key"]: one["value"] for one in run["data"][kind]} for kind in ("params", "tags")},
        }
        for run in found
    ]


def history(url: str, run: str, name: str) -> list[tuple[int, float]]:
    """(round, value) of an MLflow run's metric, as often as it was sent."""
    asked = {"run_id": run, "metric_key": name}
    found = httpx.get(f"{url}/api/2.0/mlflow/metrics/get-history", params=asked).json()["metrics"]
    return [(one["step"], one["value"]) for one in found]


def test_an_interrupted_run_goes_on_in_its_mlflow_run_and_is_not_sent_again_when_it_is_read(
    serve: Callable[[int], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, out, after_round = serve(free_port()), tmp_path / "out", BatchRunner._after_round

    def interrupt(runner: BatchRunner, planned: PlannedRun, now: Simulation) -> None:
        after_round(runner, planned, now)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(BatchRunner, "_after_round", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fedcg.simulate(clients(), "fedavg", 2, out=out, track=f"mlflow:{url}", **QUICK)
    assert [run["status"] for run in runs_of(url)] == ["KILLED"]
    first = fedcg.simulate(clients(), "fedavg", 2, out=out, track=f"mlflow:{url}", **QUICK)
    fedcg.simulate(clients(), "fedavg", 2, out=out, track=f"mlflow:{url}", **QUICK)
    [run] = runs_of(url)
    assert (run["status"], run["params"]["method"], run["params"]["local_epochs"]) == ("FINISHED", "fedavg", "2")
    curve = first.curves().set_index("client").loc["a"]
    sent = history(url, run["run_id"], "accuracy/a")
    assert [step for step, _ in sent] == [1, 2]
    assert [value for _, value in sent] == pytest.approx(curve["accuracy"].tolist(), abs=1e-5)
    assert [step for step, _ in history(url, run["run_id"], "accuracy/mean")] == [1, 2]
    tables = {path.name: path for path in (tmp_path / "mlflow").rglob("*.json")}
    assert f'["a", {first.record["clients"][0]["accuracy_personal"]}, ' in tables["clients.json"].read_text()
    model = next(out.rglob("round-000002.pt"))
    assert f'["{model.name}", "{file_sha256(model)}"]' in tables["files.json"].read_text()
    assert max(path.stat().st_size for path in tables.values()) < 1000, "no weights"


def test_a_returning_server_gets_all_rounds_once(serve: Callable[[int], str], caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    track, run = f"mlflow:http://user:secret@127.0.0.1:{port}", TrackedRun("one", "abc", lambda: {"lr": {"first": 0.1}})
    interrupted = Tracking(track, run)
    interrupted.add(1, {"accuracy/a": 0.5})
    interrupted.add(2, {"accuracy/a": 0.6})
    wait_until(lambda: bool(caplog.messages), "it warns")
    url = serve(port)
    interrupted.add(3, {"accuracy/a": 0.7})
    interrupted.close()
    assert [found["status"] for found in runs_of(url)] == ["KILLED"]
    continued = Tracking(track, run)
    continued.add(4, {"accuracy/a": 0.8})
    continued.finish({})
    continued.close()
    [found] = runs_of(url)
    assert (found["status"], found["params"]) == ("FINISHED", {"lr.first": "0.1"})
    assert history(url, found["run_id"], "accuracy/a") == [(1, 0.5), (2, 0.6), (3, 0.7), (4, 0.8)]
    [warning] = caplog.messages
    assert "nothing can be sent" in warning
    assert "secret" not in warning


def test_a_command_without_server_warns_once_and_ends_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = fedcg_simulate(tmp_path / "out", f"--method local --rounds 2 --track mlflow:http://127.0.0.1:{free_port()}")
    assert done.exit_code == 0, done.output
    assert len(caplog.messages) == 1


def test_event_files_have_settings_rounds_and_tables_once(tmp_path: Path) -> None:
    for is_continued, rounds in ((False, (1, 2, 3)), (False, (1, 2)), (True, (3,))):
        run = Tracking("tensorboard:curves", TrackedRun("one", "abc", lambda: {"lr": 0.1}, is_continued), tmp_path)
        for number in rounds:
            run.add(number, {"accuracy/a": number / 10})
        run.finish({"clients": [{"client": "a", "accuracy": 0.3}], "files": []})
        run.close()
    read = EventAccumulator(str(tmp_path / "curves" / "one")).Reload()
    assert [one.step for one in read.Scalars("accuracy/a")] == [1, 2, 3]
    texts = [read.Tensors(name)[-1].tensor_proto.string_val for name in ("settings", "clients")]
    assert texts == [
        [b"| setting | value |\n| --- | --- |\n| lr | 0.1 |"], [b"| client | accuracy |\n| --- | --- |\n| a | 0.3 |"]
    ]  # fmt: skip
