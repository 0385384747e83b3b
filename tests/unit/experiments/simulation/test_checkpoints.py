"""A checkpoint brings back a simulation whole, with what the clients' methods remember."""

from dataclasses import replace
from pathlib import Path

import torch

from experiments.simulation.batch import RunSetting
from experiments.simulation.checkpoints import Checkpoints
from fedcg.learning.simulation.simulation import Schedule, simulate
from tests.support.learning.learning_cases import assert_same_simulation, party_of, same


def test_clients_extras_and_statistics_come_back(tmp_path: Path) -> None:
    now = simulate(party_of("fedproto", ("a", "b")), Schedule(rounds=1))
    extras = {"raw": {"0.weight": torch.tensor([1.5, -2.0])}, "done": {"steps": torch.tensor([7])}}
    now = replace(now, states={**now.states, "b": replace(now.states["b"], extras=extras)}, update_bytes=(7,), sent={})
    checkpoints = Checkpoints(tmp_path, RunSetting())
    checkpoints.save(now, 2.5)
    found = checkpoints.newest()
    assert found is not None
    back, seconds = found
    assert_same_simulation(back, now)
    assert (seconds, back.update_bytes) == (2.5, (7,))
    assert not back.states["a"].extras
    assert back.states["b"].extras.keys() == extras.keys()
    assert all(same(back.states["b"].extras[name], weights) for name, weights in extras.items())
