"""An audit and a batch of simulations that are killed in the middle go on and end as if nothing had happened."""

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from experiments.simulation.batch import load_batch
from experiments.simulation.single_run import Runs
from fedcg.learning.simulation.simulation import simulate
from tests.support.audit import simulated_case, write_images, write_private, write_recording
from tests.support.commands import finished, start_fedcg
from tests.support.edge.filled_store import files_of
from tests.support.stack import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
ROUNDS = 12
NAME = "digits-fedmd_cg-seed0"
ARGUMENTS = (
    "--method fedmd_cg --clients 3 --partition iid --images-per-client 60 --local-epochs 1 --image-size 16 "
    f"--rounds {ROUNDS} --set server_iterations=3 --no-plot --no-tensorboard"
).split()
RECORDED = ("--keep-updates", f"1,2,3,{ROUNDS}")


def rounds_done(folder: Path) -> int:
    names = [path.stem for path in (folder / ".state" / NAME).glob("round-*.pt")]
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


def test_a_simulation_killed_and_interrupted_in_mid_run_gives_the_record_of_an_undisturbed_one(tmp_path: Path) -> None:
    folder = tmp_path / "disturbed"
    simulation = start_fedcg("simulate", *ARGUMENTS, *RECORDED, "--workers", "1", "--out", folder)
    code, _ = stop_after(simulation, folder, 2, signal.SIGKILL)
    assert code == -signal.SIGKILL
    stood = rounds_done(folder)
    assert 2 <= stood < ROUNDS
    resumed = start_fedcg("simulate", "--resume", folder, "--workers", "2")
    code, errors = stop_after(resumed, folder, stood + 2, signal.SIGINT)
    assert code == 130
    assert re.search(rf"fedcg simulate --resume {folder}", errors)
    finished(start_fedcg("simulate", "--resume", folder, "--workers", "1"))
    assert not (folder / ".state" / NAME).exists()  # nothing private is left behind

    torch.set_num_threads(1)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (planned,) = load_batch(folder).runs
    Runs(undisturbed, simulate, lambda _planned, _now: None).run(planned)
    assert record(folder) == record(undisturbed)
    assert len(files_of(folder / "updates")) == 1 + 3 * 4 + 6 + 3 * 5 + 3
    assert files_of(folder / "updates") == files_of(undisturbed / "updates")


def start_audit(place: Path, out: Path) -> subprocess.Popen[str]:
    given = ("--updates", place / "home", "--client", "client-1", "--data", place / "data.npz", "--out", out)
    known = ("--private", place / "private.safetensors", "--auxiliary", place / "auxiliary.npz")
    attacks = ("--effort", "quick", "--processes", "1", "--attacks", "labels,reidentification,memorisation")
    return start_fedcg("audit", "run", *given, *known, *attacks)


def figures(out: Path) -> dict[str, Any]:
    report = json.loads((out / "report.json").read_text())
    return {attack["name"]: attack["figures"] for attack in report["attacks"]}


def processes_of(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupted_audit_goes_on(tmp_path: Path, by: signal.Signals, code: int) -> None:
    case = simulated_case()
    write_recording(case, tmp_path / "home")
    write_images(case.truth.train, case.truth.held_out, tmp_path / "data.npz")
    write_private(case, tmp_path / "private.safetensors")
    assert case.view.auxiliary is not None
    write_images(case.view.auxiliary, None, tmp_path / "auxiliary.npz")
    out = tmp_path / "out"
    kept = out / "attacks" / "labels.json"

    process = start_audit(tmp_path, out)
    wait_for(lambda: kept.exists() or process.poll() is not None, "the first outcome", 120)
    process.send_signal(by)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert not (out / "report.json").exists(), "the audit was over before it could be disturbed"
    wait_for(lambda: not processes_of(process.pid), "the end of its processes", 30)
    before = kept.stat().st_mtime_ns

    errors = finished(start_audit(tmp_path, out))
    assert kept.stat().st_mtime_ns == before
    assert "labels: done" not in errors

    finished(start_audit(tmp_path, tmp_path / "undisturbed"))
    assert figures(out) == figures(tmp_path / "undisturbed")
