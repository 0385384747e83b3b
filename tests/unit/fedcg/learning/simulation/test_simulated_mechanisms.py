"""Mechanisms in a federation of several clients: who may still train, what is spent, and what the server gets."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest
import torch
from opacus.accountants import RDPAccountant
from pydantic import TypeAdapter

from fedcg.learning.errors import PrivacyError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.dp_sgd import Spent
from fedcg.learning.method import Evaluation, Weights
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.simulation import simulation, tasks
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import NONE_TRAINED, Schedule, simulate, simulated_rounds
from fedcg.learning.simulation.tasks import SerialRunner
from fedcg.learning.spec import FederationSpec
from fedcg.learning.training.evaluation import evaluate
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import (
    NAMES,
    assert_same_simulation,
    bright_images,
    client_data,
    party_of,
    same_parts,
)


def private_party(name: str = "fedavg", **dp_sgd: float) -> Party:
    privacy = PrivacySettings.model_validate({"dp_sgd": {"noise_multiplier": 1.0, **dp_sgd}})
    party = replace(party_of(name), privacy=privacy)
    network = party.spec.network.model_copy(update={"discriminator": "mlp_plain"})
    return replace(party, spec=party.spec.model_copy(update={"network": network}))


def epsilon(steps: int, rate: float) -> float:
    accountant = RDPAccountant()
    accountant.history = [(1.0, rate, steps)]
    return float(accountant.get_epsilon(delta=1e-5))


def test_every_client_spends_by_its_own_images_and_all_stages() -> None:
    party = private_party()
    more = replace(party, datasets={**party.datasets, "b": client_data("b", 40)})
    now = simulate(more, Schedule(rounds=2, shadow=False))
    # 24 images, 8 expected in a batch: rate 1/3, 3 steps an epoch, 2 epochs, 2 rounds; 40 images: 1/5 and 5 steps.
    assert now.spent["a"].epsilon(1e-5) == pytest.approx(epsilon(12, 8 / 24), rel=1e-9)
    assert now.spent["b"].epsilon(1e-5) == pytest.approx(epsilon(20, 8 / 40), rel=1e-9)
    assert simulate(party_of("fedavg"), Schedule(rounds=1)).spent == {}


def test_a_client_whose_budget_ends_takes_no_part_any_more() -> None:
    party = private_party(budget_epsilon=1.001 * epsilon(12, 8 / 24))
    more = replace(party, datasets={**party.datasets, "b": client_data("b", 80)})
    stood = list(simulated_rounds(more, Schedule(rounds=4, shadow=False)))
    now, after_two = stood[-1], stood[1]
    for name in ("a", "c"):
        assert [failure.round for failure in now.failures[name]] == [3, 4]
        assert "privacy budget is used up: a round more would bring epsilon to" in now.failures[name][0].reason
        assert now.spent[name].epsilon(1e-5) == pytest.approx(epsilon(12, 8 / 24), rel=1e-9)
    assert "b" not in now.failures
    assert same_parts(now.states["a"].parts, after_two.states["a"].parts)
    assert not same_parts(now.states["b"].parts, after_two.states["b"].parts)


def test_where_all_budgets_have_ended_the_aggregate_stays() -> None:
    party = private_party(budget_epsilon=1.001 * epsilon(6, 8 / 24))
    first, _, now = simulated_rounds(party, Schedule(rounds=3, shadow=False))
    assert [failure.reason for failure in now.server_failures] == [NONE_TRAINED, NONE_TRAINED]
    assert same_parts(now.aggregate.parts, first.aggregate.parts)


def test_what_is_spent_survives_an_interruption() -> None:
    party = private_party("fedcg")
    whole = simulate(party, Schedule(rounds=2, shadow=False))
    first = simulate(party, Schedule(rounds=1, shadow=False))
    kept = TypeAdapter(dict[str, Spent]).validate_python(
        json.loads(json.dumps({name: asdict(one) for name, one in first.spent.items()}))
    )
    resumed = simulate(party, Schedule(rounds=2, shadow=False), resume=replace(first, spent=kept))
    assert_same_simulation(resumed, whole)
    assert resumed.spent == whole.spent
    assert set(whole.spent) == set(NAMES)


def test_a_run_whose_networks_cant_be_private_ends_before_its_first_round() -> None:
    with pytest.raises(PrivacyError, match=r"network\.discriminator"):
        simulate(replace(party_of("fedcg"), privacy=private_party().privacy), Schedule(rounds=1))


@pytest.mark.parametrize("batched", [False, True])
def test_the_server_gets_the_clipped_update_and_the_client_keeps_its_own(batched: bool) -> None:
    party = replace(party_of("fedsplit"), privacy=PrivacySettings(update_clip=0.05))
    before = simulate(party, Schedule(rounds=1, shadow=False), resume=None, runner=SerialRunner(batched=batched))
    start = simulate(replace(party, privacy=PrivacySettings(update_clip=1e-9)), Schedule(rounds=1, shadow=False))
    moved = torch.cat(
        [
            (tensor - start.aggregate.parts[Part.CLASSIFIER][name]).flatten()
            for name, tensor in before.aggregate.parts[Part.CLASSIFIER].items()
        ]
    )
    assert 0.0 < float(moved.norm()) <= 0.0501
    kept = before.states["a"].parts[Part.CLASSIFIER]
    own = torch.cat([(kept[name] - start.aggregate.parts[Part.CLASSIFIER][name]).flatten() for name in kept])
    assert float(own.norm()) > 0.1


def test_shadows_are_the_same_with_and_without_mechanisms() -> None:
    plain = simulate(party_of("fedavg"), Schedule(rounds=1))
    guarded = simulate(
        replace(party_of("fedavg"), privacy=PrivacySettings(gradient_noise=0.1, balance="logits")), Schedule(rounds=1)
    )
    for name in NAMES:
        assert same_parts(plain.shadows[name].parts, guarded.shadows[name].parts)
        assert not same_parts(plain.states[name].parts, guarded.states[name].parts)


def test_a_download_is_measured_as_the_client_uses_it_and_the_average_without_any_prior(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[torch.Tensor] = []

    def spy(spec: FederationSpec, parts: Mapping[Part, Weights], data: ImageSet, device: str = "cpu") -> Evaluation:
        measured.append(parts[Part.CLASSIFIER]["5.bias"])
        return evaluate(spec, parts, data, device)

    for module in (tasks, simulation):
        monkeypatch.setattr(module, "evaluate", spy)
    data = bright_images(30, 0)
    odd = replace(
        client_data("a"), train=data.rows((data.labels < 2).nonzero().flatten())
    )  # 10, 10 and 0 of the classes
    party = replace(party_of("fedavg", ["a"]), privacy=PrivacySettings(balance="logits"), datasets={"a": odd})
    now = simulate(party, Schedule(rounds=1, shadow=False))
    prior = torch.tensor([11 / 23, 11 / 23, 1 / 23]).log()
    sent = now.aggregate.parts[Part.CLASSIFIER]["5.bias"]
    assert sum(torch.allclose(bias, sent + prior, atol=1e-5) for bias in measured) == len(measured) - 1
    assert torch.allclose(measured[-1], sent, atol=1e-5)  # the average of all clients' models
