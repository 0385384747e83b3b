"""Small simulations: one setting, also as a call of `fedcg simulate`, and folders of images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from typer.testing import Result

from experiments.simulation.batch import PlannedRun, RunSetting
from experiments.simulation.single_run import Runs
from fedcg.learning.simulation.simulation import Simulation, simulate
from tests.support.commands import data_of, run_fedcg

SMALL = RunSetting(
    clients=2,
    partition="iid",
    images_per_client=60,
    rounds=2,
    local_epochs=1,
    image_size=16,
    params={"server_iterations": 3},
    shadow=False,
)
SMALL_AVERAGED = SMALL.model_copy(update={"method": "fedavg", "params": {}})
WORDS = "--clients 2 --partition iid --images-per-client 40 --rounds 1 --local-epochs 1 --image-size 16 --no-shadow"
QUIET = "--workers 1 --no-plot --no-tensorboard"


def ignore(_planned: PlannedRun, _now: Simulation) -> None:
    """Ignore a finished round."""


def run_of(setting: RunSetting, folder: Path, simulator: Any = simulate, rounds: str | None = None) -> dict[str, Any]:
    """Run and return the record; `rounds` as for `--keep-updates`."""
    folder.mkdir(exist_ok=True)
    return Runs(folder, simulator, ignore).run(PlannedRun(setting=setting, keep_updates=rounds))


def fedcg_simulate(out: Path, text: str = "", *words: object) -> Result:
    """Run `fedcg simulate` on a small federation; if an option is repeated, the last one counts."""
    return run_fedcg("simulate", *WORDS.split(), *QUIET.split(), *text.split(), *words, "--out", out)


def records_of(done: Result) -> list[dict[str, Any]]:
    """Return the records that `fedcg simulate --json` printed."""
    assert done.exit_code == 0, done.output
    runs: list[dict[str, Any]] = data_of(done.stdout)["runs"]
    return runs


def image_tree(
    root: Path, per_class: int, classes: Sequence[str] = ("cat", "dog"), mode: str = "RGB", seed: int = 0
) -> Path:
    """Make a folder with this many random images of 6 x 6 pixels in the folder of each class."""
    generator = np.random.default_rng(seed)
    for name in classes:
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            pixels = generator.integers(0, 256, (6, 6) if mode == "L" else (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number:03d}.png")
    return root
