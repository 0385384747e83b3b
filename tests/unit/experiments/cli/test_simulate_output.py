"""What `fedcg simulate` prints: progress where there is no terminal, a table for 80 columns; and that its default is quick."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from experiments.simulation.batch import load_batch
from experiments.simulation.batch_runner import table
from fedcg.cli import app

TINY = "--clients 2 --partition iid --images-per-client 40 --rounds 2 --local-epochs 1 --method fedavg --image-size 16"
HEADERS = {"personal", "only", "download", "common", "last", "local", "seconds"}


def test_a_pipe_gets_a_line_per_round_with_its_accuracies_and_the_default_is_quick(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", *TINY.split(), "--workers", "1", "--no-plot", "--no-tensorboard", "--out", str(tmp_path)]
    app.main(args=arguments, prog_name="fedcg", standalone_mode=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if ": round " in line]
    assert [line.split(": accuracy")[0] for line in lines] == [
        f"digits-fedavg-seed0: round {number}/2" for number in (1, 2)
    ]
    assert all("own test personal " in line and "local only " in line for line in lines)
    (planned,) = load_batch(tmp_path).runs
    assert planned.setting.all_params()["lr"] == 1e-3


@pytest.mark.parametrize("variant", ["", "without-the-generator-and-with-a-much-longer-name"])
def test_the_table_fits_80_columns_and_breaks_nothing_but_a_runs_name(variant: str) -> None:
    mean = {f"accuracy_{name}": 0.98765 for name in ("personal", "local", "after", "common_personal")}
    record = {
        "method": "fedmd_cg",
        "variant": variant,
        "seed": 0,
        "mean": {**mean, "global_accuracy_last": 1.0},
        "clients": [{"below_local": False}] * 10,
        "seconds": {"total": 12345.6},
    }
    out = io.StringIO()
    Console(file=out, width=80).print(table([record]))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert set(text.split()) >= HEADERS | {"98.8", "100.0", "12346"}
    assert "0 of 10" in text
    assert "".join(variant.split()) in "".join(line[:14].strip() for line in text.splitlines())
