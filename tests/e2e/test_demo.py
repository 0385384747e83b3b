"""`fedcg demo` as a newcomer runs it: separate processes, a real broker, a summary, models that classify."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.commands import data_of, run_fedcg
from tests.support.traps import imported_in, lay_traps

pytestmark = [pytest.mark.broker, pytest.mark.timeout(280)]

FEDCG = str(Path(sys.executable).with_name("fedcg"))
SMALL = ["--rounds", "2", "--local-epochs", "1", "--clients", "3", "--set", "server_iterations=20"]


def _fedcg(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([FEDCG, *arguments], capture_output=True, text=True, cwd=cwd, timeout=200, check=False)


def _summary(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return content


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small finished demo, which was started among modules with the names of those that its processes import."""
    root = lay_traps(tmp_path_factory.mktemp("demo"))
    done = _fedcg("demo", *SMALL, "--out", "run", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert imported_in(root) == ""
    assert done.stderr == ""
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[1:3]] == ["broker", "the first round is open"]
    assert "crossed the broker" in done.stdout
    return root / "run"


def test_the_summary_tells_what_was_observed_on_the_wire(demo: Path) -> None:
    summary = _summary(demo)
    assert summary["parts_on_wire"] == ["classifier", "generator"]
    assert summary["fields_on_wire"] == ["accuracy", "examples", "health", "loss"]
    assert len(summary["clients"]) == 3
    for client in summary["clients"]:
        assert client["accuracy_onnx"] == client["accuracy_personal"], "ONNX decides like the trained model"
        assert 150_000 < client["uplink_bytes_per_round"] < 200_000
    assert {name: len(curve) for name, curve in summary["curves"].items()} == {f"client-{n}": 2 for n in (1, 2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedseal", "analytic"])
def test_sealed_numbers_cross_the_broker_and_show_nothing_to_its_observer(tmp_path: Path, method: str) -> None:
    few = ["--clients", "4", "--rounds", "2", "--local-epochs", "1", "--images-per-client", "100"]
    done = _fedcg("demo", *few, "--method", method, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    observed = _summary(tmp_path / "run")["observer"]["sealed"]
    assert observed["tensors"] >= 4 + 1
    assert observed["is_fair"], observed["text"]
    assert "of sealed numbers reveal nothing" in done.stdout
    words = "--updates run/observer --client client-1 --data run/data/client-1 --attacks labels --effort quick"
    audited = _fedcg("audit", "run", *words.split(), "--out", "audit", "--json", cwd=tmp_path)
    assert audited.returncode == 0, audited.stderr
    subject = data_of(audited.stdout)["subject"]
    assert "extractor" not in subject["sent"]
    assert subject["round"] == {"fedseal": 1, "analytic": 2}[method], "the last round that trained"


def test_an_agent_of_a_demo_finds_its_images_when_a_person_starts_it_again(demo: Path) -> None:
    told = run_fedcg("doctor", "--config", demo / "devices" / "client-1" / "agent.toml", "--json")
    findings = {each["check"]: each for each in data_of(told.stdout)["findings"]}
    assert findings["data"]["state"] == "ok", findings


def test_no_private_tensor_is_in_the_recording_of_the_demo(demo: Path) -> None:
    private = [
        argument
        for path in sorted(demo.glob("devices/*/store/generations/*/state.safetensors"))
        for argument in ("--private", str(path))
    ]
    assert len(private) == 2 * 3 * 2
    done = _fedcg("audit", "compare", "--observed", str(demo / "observer"), *private, cwd=demo)
    assert done.returncode == 0, done.stdout
    assert "0 leaks" in done.stdout


def test_a_demo_whose_plan_is_refused_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    done = _fedcg("demo", "--set", "nonsense=1", "--out", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: the plan can't be completed: 1 problem\n  params.nonsense: ")
    assert not list(tmp_path.iterdir())
    assert not _processes_with(str(tmp_path))


def _processes_with(text: str) -> list[str]:
    commands = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [command for command in commands if text in command]
