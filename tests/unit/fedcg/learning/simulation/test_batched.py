"""Clients that train together, their networks stacked, come out as if they had trained one after the other."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedcg.learning.method import TrainingParams, Weights
from fedcg.learning.networks import load_part
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.simulation.party import ClientData, Party
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulate
from fedcg.learning.simulation.tasks import SerialRunner
from fedcg.learning.spec import FederationSpec, NetworkChoice, ParameterValue
from fedcg.learning.training import batches
from fedcg.learning.training import stacked_training as batched_loops
from fedcg.learning.training.classification import train_classifier
from fedcg.learning.training.stacked_training import Learner, can_stack, train_classifiers
from fedcg.wire.parts import Part
from tests.support.learning import learning_cases as cases

SIZES = {"a": 44, "b": 30, "c": 9}  # six steps an epoch, four, and one: 9 images leave one over
SPLITS = ("lenet5", "lenet5_relu")


def spec_of(split: str, *, crop: ParameterValue = 0, **params: ParameterValue) -> FederationSpec:
    plan = cases.plan_of("local", NetworkChoice(noise_dim=8, split=split), cases.GREY, params)
    return complete_spec(plan.model_copy(update={"augment_flip": True, "augment_crop": crop}))


def learners(spec: FederationSpec) -> list[Learner]:
    parts = {name: initial_parts(spec, name.encode()) for name in SIZES}
    return [
        Learner(
            load_part(spec, Part.EXTRACTOR, parts[name][Part.EXTRACTOR]),
            load_part(spec, Part.CLASSIFIER, parts[name][Part.CLASSIFIER]),
            cases.bright_images(count, number),
            cases.context(spec, root=name.encode()),
        )
        for number, (name, count) in enumerate(SIZES.items())
    ]


def close(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], tolerance: float) -> bool:
    return first.keys() == second.keys() and all(
        torch.allclose(first[name], second[name], rtol=0.0, atol=tolerance) for name in first
    )


def test_only_chains_of_known_layers_are_stacked() -> None:
    assert can_stack(nn.Sequential(nn.Flatten(), nn.Linear(2, 2)))
    assert not can_stack(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert not can_stack(nn.Sequential(nn.Linear(2, 2, bias=False)))
    assert not can_stack(nn.Linear(2, 2))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("optimiser", "crop"), [("adam", 0), ("sgd", 0), ("sgd", 3)])
def test_clients_of_different_sizes_train_as_one_after_the_other(
    split: str, optimiser: str, crop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "BLOCK_ROWS", 16)  # several blocks, and several chunks of stacked batches
    monkeypatch.setattr(batched_loops, "BLOCK_ROWS", 48)
    spec = spec_of(split, crop=crop, optimiser=optimiser, lr=0.01 if optimiser == "adam" else 0.1)
    params = TrainingParams.model_validate(spec.params)
    together, apart, untrained = learners(spec), learners(spec), learners(spec)
    losses = train_classifiers(together, params)
    for mine, own, start, loss in zip(together, apart, untrained, losses, strict=True):
        expected = train_classifier(own.extractor, own.classifier, own.data, params, own.ctx)
        assert loss == pytest.approx(expected, abs=1e-5)
        assert close(mine.extractor.state_dict(), own.extractor.state_dict(), 1e-5)
        assert close(mine.classifier.state_dict(), own.classifier.state_dict(), 1e-5)
        assert not close(mine.classifier.state_dict(), start.classifier.state_dict(), 1e-4)


def test_a_client_that_diverges_leaves_the_others_alone() -> None:
    spec = spec_of("lenet5_relu")
    params = TrainingParams.model_validate(spec.params)
    some, others = learners(spec), learners(spec)
    with torch.no_grad():
        next(some[1].classifier.parameters()).fill_(float("nan"))
    losses, expected = train_classifiers(some, params), train_classifiers(others, params)
    assert "mean loss nan" in str(losses[1])
    for at in (0, 2):
        assert losses[at] == expected[at]
        assert cases.same(some[at].classifier.state_dict(), others[at].classifier.state_dict())


def party(method: str, **params: ParameterValue) -> Party:
    spec = cases.quick_spec(method, **params)
    datasets = {
        name: ClientData(
            cases.bright_images(count, number), cases.bright_images(6, 10 + number), cases.bright_images(9, 20 + number)
        )
        for number, (name, count) in enumerate(SIZES.items())
    }
    datasets["tiny"] = replace(datasets["c"], train=cases.bright_images(1, 5))
    return Party(spec, datasets, cases.roots_from_seed(3, tuple(datasets)))


def run(method: str, *, batched: bool, **params: ParameterValue) -> Simulation:
    return simulate(party(method, **params), Schedule(rounds=2), runner=SerialRunner(batched=batched))


def parts_of(simulation: Simulation) -> dict[str, Weights]:
    found: dict[str, Weights] = {f"aggregate {part}": tensors for part, tensors in simulation.aggregate.parts.items()}
    for kind, states in (("state", simulation.states), ("shadow", simulation.shadows)):
        found |= {f"{kind} {name} {part}": w for name, state in states.items() for part, w in state.parts.items()}
    return found


@pytest.mark.parametrize("method", ["fedavg", "fedsplit", "local"])
def test_a_simulation_with_batched_clients_is_the_simulation_without(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = run(method, batched=False)
    monkeypatch.setattr("fedcg.learning.methods._averaging.train_classifier", None)  # nobody trains alone
    together = run(method, batched=True)
    mine, other = parts_of(together), parts_of(apart)
    assert mine.keys() == other.keys()
    assert all(close(mine[key], other[key], 1e-4) for key in mine)
    assert together.failures == apart.failures
    assert "at least 2 are needed" in together.failures["tiny"][0].reason
    for name in SIZES:
        for now, then in zip(together.curves[name], apart.curves[name], strict=True):
            assert now.loss == pytest.approx(then.loss, abs=1e-4)


def test_a_method_that_cant_be_batched_trains_one_after_the_other_beside_batched_shadows() -> None:
    together, apart = run("fedprox", batched=True), run("fedprox", batched=False)
    assert all(cases.same_parts(together.states[name].parts, apart.states[name].parts) for name in SIZES)
    mine, other = parts_of(together), parts_of(apart)
    assert all(close(mine[key], other[key], 1e-4) for key in mine)
