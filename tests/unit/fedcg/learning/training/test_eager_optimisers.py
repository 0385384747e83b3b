"""Optimisers without torch's compiler: the same weights as torch's own, and a process that trains never imports the compiler."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedcg.learning.training.optimisers import SGD, Adam

ROOT = Path(__file__).parents[5]
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
PAIRS: dict[str, tuple[Make, Make]] = {
    "adam": (lambda w: Adam(w, lr=0.1, weight_decay=0.01), lambda w: torch.optim.Adam(w, lr=0.1, weight_decay=0.01)),
    "fused adam": (lambda w: Adam(w, lr=0.1, fused=True), lambda w: torch.optim.Adam(w, lr=0.1, fused=True)),
    "sgd": (lambda w: SGD(w, lr=0.1, weight_decay=0.01), lambda w: torch.optim.SGD(w, lr=0.1, weight_decay=0.01)),
    "momentum": (lambda w: SGD(w, lr=0.1, momentum=0.9), lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9)),
}

# Two clients train one round with every method, their updates are merged, and everybody is evaluated; with what a box's trainer and
# a coordinator's worker import beside.
TRAINS = """
import sys
import coordinator.aggregation.worker, coordinator.aggregation.server_state, edge_client.training.trainer_child
from fedcg.learning.registry import method_names
from fedcg.learning.simulation.party import ClientData, Party
from fedcg.learning.simulation.simulation import simulate
from fedcg.learning.simulation.simulation import Schedule
from tests.support.learning.learning_cases import bright_images, quick_spec, roots_from_seed
data = {name: ClientData(*(bright_images(12, seed) for seed in (1, 2, 3))) for name in "ab"}
for method, optimiser in [*((name, "adam") for name in method_names()), ("fedmd_cg", "sgd")]:
    spec, public = quick_spec(method, optimiser=optimiser, epochs=1), bright_images(10, 77).images
    simulate(Party(spec, data, roots_from_seed(0, tuple("ab")), public=public), Schedule(rounds=1, shadow=False))
print(*sorted({"torch._dynamo", "sympy"} & sys.modules.keys()))
"""


def trained(make: Make) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Weights after five steps, the rate halved after two, and the optimiser replaced by its saved state after three."""
    stream = torch.Generator().manual_seed(3)
    weights = [torch.randn(shape, generator=stream).requires_grad_() for shape in ((4, 3), (7,))]
    optimiser = make(weights)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, step_size=2, gamma=0.5)
    for step in range(5):
        if step == 3:
            saved, optimiser = optimiser.state_dict(), make(weights)
            optimiser.load_state_dict(saved)
        optimiser.zero_grad()
        (weights[0].pow(3).sum() + weights[1].sin().sum()).backward()
        optimiser.step()
        if step < 3:
            schedule.step()
    return weights, optimiser


@pytest.mark.parametrize("name", PAIRS)
def test_an_optimiser_without_the_compiler_takes_torchs_own_steps_bit_for_bit(name: str) -> None:
    (ours, mine), (theirs, torchs) = (trained(make) for make in PAIRS[name])
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert not any(weight.grad_fn for weight in ours)
    assert mine.param_groups[0]["lr"] == torchs.param_groups[0]["lr"] == 0.05


@pytest.mark.slow
def test_a_process_that_trains_and_merges_never_imports_torchs_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
