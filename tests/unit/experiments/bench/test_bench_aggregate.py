"""`fedcg bench aggregate`: what it works out of its measurements, and that a case really merges."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.bench.learning import aggregate as bench_aggregate
from experiments.bench.learning.aggregate import Case, Measured, as_json, ratios, run
from fedcg.learning.method import Update
from fedcg.learning.spec import FederationSpec

CASE = Case("fedcg", 4, "mlp", 2, 2, 1)


def test_ratios_are_over_the_fewest_clients_of_the_same_method() -> None:
    few = Measured(CASE, last_add_s=1.0, finish_s=3.0, peak_bytes=100, growth_bytes=10)
    many = Measured(replace(CASE, clients=256), last_add_s=2.0, finish_s=3.0, peak_bytes=110, growth_bytes=15)
    other = Measured(replace(CASE, method="fedmd_cg", clients=256), 9.0, 9.0, 900, 90)
    assert ratios([many, other, few]) == {"fedcg_256_over_4": {"time": 1.25, "peak_memory": 1.1, "memory_growth": 1.5}}


def test_the_fastest_run_counts_with_the_median_of_memory() -> None:
    runs = [Measured(CASE, 1.0, seconds, peak, peak - 5) for seconds, peak in ((3.0, 10), (2.0, 30), (4.0, 20))]
    assert bench_aggregate._summary(runs) == Measured(CASE, 1.0, 2.0, 20, 15)


def test_a_case_merges_every_client_and_loads_none_of_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = bench_aggregate._load

    def counting(spec: FederationSpec, folder: Path, weights: int, client: str, counts: tuple[int, ...]) -> Update:
        loaded.append(client)
        return load(spec, folder, weights, client, counts)

    monkeypatch.setattr(bench_aggregate, "_load", counting)
    measured = run(replace(CASE, clients=5))
    warm_up, *added = loaded
    assert added == [f"client-{number:04}" for number in range(5)]
    assert warm_up == "client-0004"
    assert measured.finish_s > 0.0
    assert as_json(measured)["clients"] == 5


def test_asking_for_help_loads_no_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom experiments.bench.cli import app\n"
        "result = CliRunner().invoke(app, ['aggregate', '--help'])\n"
        "assert result.exit_code == 0 and 'clients' in result.output, result.output\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
