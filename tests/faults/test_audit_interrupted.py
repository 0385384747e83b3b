"""An audit is interrupted and killed in the middle; run again, it goes on with what is missing and comes to the same figures."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.audit import simulated_case, write_images, write_private, write_recording
from tests.support.stack import wait_for

pytestmark = pytest.mark.slow


def start(place: Path, out: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "fedcg", "audit", "run", "--updates", str(place / "home"), "--client", "client-1", "--data", str(place / "data.npz"),
        "--private", str(place / "private.safetensors"), "--effort", "quick", "--processes", "1", "--attacks", "labels,reidentification,memorisation",
        "--auxiliary", str(place / "auxiliary.npz"), "--out", str(out),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def figures(out: Path) -> dict[str, Any]:
    report = json.loads((out / "report.json").read_text())
    return {attack["name"]: attack["figures"] for attack in report["attacks"]}


def processes_of(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(state[2]) == group and state[0] != "Z":
                found.append(int(entry.name))
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

    process = start(tmp_path, out)
    wait_for(lambda: kept.exists() or process.poll() is not None, "the first outcome", 120)
    process.send_signal(by)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert not (out / "report.json").exists(), "the audit was over before it could be disturbed"
    wait_for(lambda: not processes_of(process.pid), "the end of its processes", 30)
    before = kept.stat().st_mtime_ns

    resumed = start(tmp_path, out)
    _, errors = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, errors
    assert kept.stat().st_mtime_ns == before
    assert "labels: done" not in errors

    undisturbed = start(tmp_path, tmp_path / "undisturbed")
    _, errors = undisturbed.communicate(timeout=200)
    assert undisturbed.returncode == 0, errors
    assert figures(out) == figures(tmp_path / "undisturbed")
