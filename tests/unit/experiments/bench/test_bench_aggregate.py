"""`fedcg bench aggregate`: what it works out of its measurements, and that a case really merges."""

from __future__ import annotations

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
