"""Runs one setting of a grid: a simulation that records its updates, and an audit of one client's last update, as a user would type them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.bench.privacy.grids import Grid
from experiments.errors import RunError
from experiments.record import bench_record

CLIENT = "client-1"


@dataclass(frozen=True)
class Sizes:
    """What decides how long a grid takes.

    Attributes:
        data: as for `fedcg simulate --data`.
        images: training images of a client, at most.
        effort: of the audits; `processes`: attacks at once.
    """

    data: str
    clients: int = 4
    images: int = 500
    epochs: int = 5
    effort: str = "quick"
    processes: int = 2


def run_cell(grid: Grid, options: Sequence[str], sizes: Sizes, seed: int) -> dict[str, Any]:
    """The record of one setting with one seed: accuracy, epsilon, and every figure of the audit.

    Raises:
        RunError: a command failed; its last lines are in the message.
    """
    with TemporaryDirectory(prefix="fedcg-privacy-") as place:
        out = Path(place)
        rounds = _value(options, "--rounds") or str(grid.rounds)
        simulated = [
            "simulate", "--data", sizes.data, "--clients", str(sizes.clients), "--images-per-client", str(sizes.images),
            "--local-epochs", str(sizes.epochs), "--rounds", rounds, *options, "--seeds", str(seed), "--no-shadow",
            "--no-plot", "--no-tensorboard", "--evaluate-every", rounds, "--keep-updates", rounds, "--workers", str(sizes.processes),
        ]  # fmt: skip
        (run,) = _result([*simulated, "--out", str(out / "runs")])["runs"]
        (recording,) = (out / "runs" / "updates").iterdir()
        truth = recording / "truth"
        audited = [
            "audit", "run", "--updates", str(recording), "--client", CLIENT, "--data", str(truth / f"{CLIENT}.npz"),
            "--private", str(truth / f"{CLIENT}-round-{rounds}.safetensors"), "--auxiliary", str(recording / "auxiliary.npz"),
            "--effort", sizes.effort, "--seed", str(seed), "--processes", str(sizes.processes),
            *(("--attacks", ",".join(grid.attacks)) if grid.attacks else ()),
        ]  # fmt: skip
        report = _result([*audited, "--out", str(out / "audit")])
        return {
            **bench_record("bench privacy"),
            "commands": [_published(words, sizes.data, out) for words in (simulated, audited)],
            "seed": seed,
            "accuracy": run["mean"]["accuracy_personal"],
            "accuracy_after": run["mean"]["accuracy_after"],
            "epsilon": max((client["epsilon"] for client in run["clients"] if "epsilon" in client), default=None),
            "sent": report["subject"]["sent"],
            "attacks": report["attacks"],
        }


def _value(options: Sequence[str], name: str) -> str | None:
    return options[options.index(name) + 1] if name in options else None


def _published(words: Sequence[str], data: str, out: Path) -> str:
    """A command without paths of this machine."""
    text = shlex.join(["fedcg", *words]).replace(data, Path(data).name)
    return text.replace(f"{out}/runs/", "").replace(str(out), "OUT")


def _result(words: Sequence[str]) -> Any:
    """What a command of ours prints with `--json`."""
    done = subprocess.run(
        [sys.executable, "-m", "fedcg", *words, "--json"], capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise RunError(f"fedcg {shlex.join(words)}: exit code {done.returncode}\n{lines[-1] if lines else ''}\n{last}")
    return json.loads(lines[-1])["data"]
