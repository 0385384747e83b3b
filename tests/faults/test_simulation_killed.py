"""A batch of simulations is killed and interrupted in the middle of a run; resumed, it ends as if nothing had happened."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.simulation.batch import load_batch
from experiments.simulation.single_run import Runs
from fedcg.learning.simulation.simulation import simulate
from tests.support.stack import wait_for

ROUNDS = 12
NAME = "digits-fedmd_cg-seed0"
ARGUMENTS = (
    "--method fedmd_cg --clients 3 --partition iid --images-per-client 60 --local-epochs 1 --image-size 16 "
    f"--rounds {ROUNDS} --set server_iterations=3 --no-plot --no-tensorboard"
).split()
RECORDED = ("--keep-updates", f"1,2,3,{ROUNDS}")


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedcg", "simulate", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rounds_done(folder: Path) -> int:
    names = [path.name for path in (folder / ".state" / NAME).glob("round-*")]
    return max((int(name.removeprefix("round-")) for name in names), default=0)


def stop_after(process: subprocess.Popen[str], folder: Path, rounds: int, by: signal.Signals) -> tuple[int, str]:
    """Stop a simulation once so many rounds are done and others are not."""
    wait_for(lambda: rounds_done(folder) >= rounds or process.poll() is not None, f"round {rounds}")
    process.send_signal(by)
    _, errors = process.communicate(timeout=60)
    assert not (folder / f"{NAME}.json").exists(), "the run was over before it could be disturbed"
    return process.returncode, errors


def record(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / f"{NAME}.json").read_text())
    return {name: value for name, value in content.items() if name not in ("seconds", "date")}


def recording(folder: Path) -> dict[str, bytes]:
    """Every file of the recorded updates, by its path."""
    files = (path for path in (folder / "updates").rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_a_simulation_killed_and_interrupted_in_mid_run_gives_the_record_of_an_undisturbed_one(tmp_path: Path) -> None:
    folder = tmp_path / "disturbed"
    code, _ = stop_after(
        start(*ARGUMENTS, *RECORDED, "--workers", "1", "--out", str(folder)), folder, 2, signal.SIGKILL
    )
    assert code == -signal.SIGKILL
    stood = rounds_done(folder)
    assert 2 <= stood < ROUNDS
    resumed = start("--resume", str(folder), "--workers", "2")
    code, errors = stop_after(resumed, folder, stood + 2, signal.SIGINT)
    assert code == 130
    assert re.search(rf"fedcg simulate --resume {folder}", errors)
    last = start("--resume", str(folder), "--workers", "1")
    _, errors = last.communicate(timeout=120)
    assert last.returncode == 0, errors
    assert not (folder / ".state" / NAME).exists()  # nothing private is left behind

    torch.set_num_threads(1)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (planned,) = load_batch(folder).runs
    Runs(undisturbed, simulate, lambda _planned, _now: None).run(planned)
    assert record(folder) == record(undisturbed)
    assert len(recording(folder)) == 1 + 3 * 4 + 6 + 3 * 5 + 3
    assert recording(folder) == recording(undisturbed)
