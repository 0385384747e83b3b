"""`fedcg simulate --keep-updates`, as a user types it."""

import json
import shlex
from pathlib import Path

import pytest

from experiments.simulation.batch import load_batch
from experiments.simulation.checkpoints import Checkpoints
from fedcg.learning.simulation.simulation import Simulation
from tests.support.commands import run_fedcg

TINY = shlex.split(
    "--clients 2 --partition iid --images-per-client 40 --rounds 2 --local-epochs 1 --image-size 16 --no-shadow "
    "--workers 1 --no-plot --no-tensorboard"
)


def test_a_user_records_runs_and_compares_a_recording_with_the_private_parts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    both = ["--method", "fedcg", "--method", "fedavg", "--set", "fedcg.server_iterations=3"]
    done = run_fedcg("simulate", *TINY, *both, "--keep-updates", "1,2", "--out", out)
    assert done.exit_code == 0, done.output
    first = out / "updates" / "digits-fedcg-seed0"
    data = first / "truth" / "client-1.npz"
    beside = (
        f"--auxiliary {first / 'auxiliary.npz'} --out DIR --private {first / 'truth' / 'client-1-round-2.safetensors'}"
    )
    command = f"fedcg audit run --updates {first} --client client-1 --data {data} {beside}"
    assert done.stderr.splitlines()[-1] == f"recorded updates: {out / 'updates'}; audit one with: {command}"
    places = [out / "updates", *(out / "updates").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in places if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in places if path.is_file()} == {0o600}
    for method, code in (("fedcg", 0), ("fedavg", 1)):
        folder = out / "updates" / f"digits-{method}-seed0"
        private = folder / "truth" / "client-2-round-2.safetensors"
        compared = run_fedcg("audit", "compare", "--observed", folder, "--private", private)
        assert compared.exit_code == code, compared.output
    again = run_fedcg("simulate", "--resume", out, "--no-plot", "--no-tensorboard")
    assert again.exit_code == 0
    assert "done before\n" in again.stderr
    forced = run_fedcg("simulate", *TINY, "--method", "fedavg", "--out", out, "--force")
    assert forced.exit_code == 0, forced.output
    assert not (out / "updates" / "digits-fedavg-seed0").exists()  # of numbers that its record no longer shows
    assert "recorded updates" not in forced.stderr


def test_a_finished_run_without_a_recording_is_named_with_what_to_do(tmp_path: Path) -> None:
    few = [*TINY, "--method", "fedavg", "--rounds", "1", "--out", str(tmp_path / "out")]
    assert run_fedcg("simulate", *few).exit_code == 0
    late = run_fedcg("simulate", "--resume", tmp_path / "out", "--keep-updates", "all", "--no-tensorboard", "--no-plot")
    assert late.exit_code == 0
    assert "done before, without a recording of its updates; --force runs it again" in late.stderr
    assert "recorded updates" not in late.stderr


@pytest.mark.slow
def test_a_resumed_run_may_begin_to_record_its_later_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, save = tmp_path / "out", Checkpoints.save

    def save_and_stop(self: Checkpoints, now: Simulation, seconds: float) -> None:
        save(self, now, seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", save_and_stop)
    assert run_fedcg("simulate", *TINY, "--method", "fedavg", "--out", out).exit_code == 130
    monkeypatch.undo()
    late = run_fedcg("simulate", "--resume", out, "--keep-updates", "all", "--no-tensorboard", "--no-plot")
    assert late.exit_code == 0, late.output
    folder = out / "updates" / "digits-fedavg-seed0"
    record = json.loads((folder / "wire.json").read_text())
    assert {seen["round"] for seen in record["artifacts"] if seen["kind"] == "update"} == {2}
    assert record["bases_not_seen"] == []
    (planned,) = load_batch(out).runs
    assert planned.keep_updates == "all"


@pytest.mark.parametrize(
    ("rounds", "why"),
    [
        ("some", "write all, or rounds with commas between them"),
        ("1,", "write all, or rounds with commas between them"),
        ("0", "digits-fedcg-seed0 has rounds 1 to 2, not 0"),
        ("1,5,10", "digits-fedcg-seed0 has rounds 1 to 2, not 5"),
    ],
)
def test_rounds_that_a_run_does_not_have_are_bad_input(rounds: str, why: str, tmp_path: Path) -> None:
    refused = run_fedcg("simulate", *TINY, "--keep-updates", rounds, "--out", tmp_path / "out")
    assert refused.exit_code == 2
    assert why in refused.output
    assert not (tmp_path / "out").exists()
