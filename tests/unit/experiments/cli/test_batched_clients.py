"""`fedcg simulate --batched-clients`."""

from pathlib import Path

import pytest

from tests.support.commands import data_of, run_fedcg


def test_a_user_batches_clients_by_an_option(tmp_path: Path) -> None:
    few = ["--rounds", "1", "--clients", "2", "--images-per-client", "40", "--local-epochs", "1", "--no-plot"]
    base = ["--method", "fedsplit", *few, "--no-tensorboard", "--json", "--workers", "1", "--out"]
    curves = []
    for option in ("--batched-clients", "--no-batched-clients"):
        done = run_fedcg("simulate", *base, str(tmp_path / option), option)
        assert done.exit_code == 0, done.output
        (record,) = data_of(done.stdout)["runs"]
        assert record["setting"]["batched_clients"] is (option == "--batched-clients")
        curves.append([client["curve"]["loss"] for client in record["clients"]])
    assert curves[0] == [pytest.approx(loss, abs=1e-4) for loss in curves[1]]


def test_batched_clients_with_several_processes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    command = ["--batched-clients", "--workers", "2", "--out", str(tmp_path / "out")]
    refused = run_fedcg("simulate", *command)
    assert refused.exit_code == 2
    assert "leave out --workers" in refused.output
    assert not (tmp_path / "out").exists()
