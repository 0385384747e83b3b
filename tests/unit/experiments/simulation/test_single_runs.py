"""A simulation trains what a demo of the same seed trains; its record: what it takes to repeat it, the deployed model, coded bytes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edge_client.store.private_store import PrivateStore
from edge_client.training.local_data import LocalData
from experiments.data.client_datasets import build_cohort
from experiments.demo.run_folder import prepare
from experiments.settings import discriminator_for
from experiments.simulation.party_builder import WireCoding, coding_of, roots_of
from experiments.simulation.simulation_record import client_record
from fedcg.learning.method import DivergedError, Weights
from fedcg.learning.networks.gan import GENERATORS
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulate
from fedcg.learning.spec import FederationSpec, plan_from_mapping
from fedcg.learning.training.evaluation import calibrated_loss, logits_of
from fedcg.wire.parts import AggregateCodec, Part, UpdateCodec
from tests.support.learning.learning_cases import NAMES, party_of, plan, same_parts
from tests.support.simulations import SMALL, SMALL_AVERAGED, fedcg_simulate, records_of, run_of

GLOBAL = {"global_accuracy_last", "global_accuracy_best"}
SHADOWED = SMALL.model_copy(update={"shadow": True})


def without_timings(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("seconds", "date", "name")}


@pytest.mark.parametrize("method", ["fedcg", "local"])
def test_a_small_simulation_gives_a_complete_record_that_is_the_same_again(method: str, tmp_path: Path) -> None:
    params = SMALL.params if method == "fedcg" else {}
    setting = SHADOWED.model_copy(update={"method": method, "params": params})
    record, again = run_of(setting, tmp_path / "one"), run_of(setting, tmp_path / "two")
    assert without_timings(record) == without_timings(again)
    clients = record["clients"]
    assert [client["id"] for client in clients] == ["client-1", "client-2"]
    assert all(
        client["curve"]["round"] == [1, 2] and record["mean"].keys() - GLOBAL <= client.keys() for client in clients
    )
    assert all(sum(client["label_counts"]) == client["train_images"] for client in clients)
    assert all(0 <= client["accuracy_common_local"] <= 1 for client in clients)
    assert record["global"]["round"] == [1, 2]
    assert record["mean"]["global_accuracy_best"] == max(record["global"]["accuracy"])
    assert (clients[0]["consistency"] is None) == (method == "local")
    assert (clients[0]["below_local"] is None) == (method == "local")
    assert (record["bytes"]["up"] == 0) == (method == "local")


def test_a_simulation_splits_a_clients_images_exactly_as_its_agent_does(tmp_path: Path) -> None:
    setting = SMALL.model_copy(update={"clients": 4, "images_per_client": 100})
    source = setting.source()
    prepare(source, tmp_path, setting.deal())
    spec = complete_spec(plan_from_mapping(setting.plan(source)))
    mine = build_cohort(source, spec.image, setting.deal()).clients["client-1"]
    store = PrivateStore.open(tmp_path / "store", spec.federation, "client-1")
    agents = LocalData(tmp_path / "client-1", None, store).for_round(spec, 1)
    for ours, theirs in ((mine.train, agents.train), (mine.val, agents.val), (mine.test, agents.test)):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
    assert len(mine.train) + len(mine.val) == 100


def test_test_images_dealt_out_evenly_measure_clients_by_share_and_their_average_as_a_whole(tmp_path: Path) -> None:
    record = run_of(SMALL_AVERAGED.model_copy(update={"test": "even"}), tmp_path)
    assert record["mean"]["accuracy_common_personal"] is None
    tests = [client["test_images"] for client in record["clients"]]
    right = record["global"]["accuracy"][-1] * sum(tests)
    assert right == pytest.approx(round(right), abs=0.01)  # a share of all of them, and of nothing else
    assert max(tests) - min(tests) <= 1


def test_every_party_of_a_simulation_has_a_root_of_its_own() -> None:
    roots = roots_of(0, ("client-1", "client-2"))
    assert len({roots.cohort, roots.coordinator, *roots.devices.values()}) == 4
    assert roots_of(1, ("client-1",)).devices["client-1"] != roots.devices["client-1"]


def test_a_compact_generator_brings_the_discriminator_of_its_kind() -> None:
    kinds = {"conv": "conv", "conv_small": "conv", "mlp": "mlp", "mlp3": "mlp", "mlp_small": "mlp", "gaussians": "mlp"}
    assert {name: discriminator_for(name) for name in kinds} == kinds
    assert set(kinds) == set(GENERATORS)


PARTY = party_of("fedsplit", ("a", "b"), ema=0.9)


@pytest.fixture(scope="module")
def ended() -> Simulation:
    return simulate(PARTY, Schedule(rounds=2, shadow=True))


def test_losses_are_of_the_validation_images_of_each_model(ended: Simulation) -> None:
    last, val = ended.curves["a"][-1], PARTY.datasets["a"].val
    own = ended.states["a"].parts
    assert set(last.losses) == {"own", "ema", "downloaded", "local"}
    assert last.losses["own"] == calibrated_loss(logits_of(PARTY.spec, own, val), val.labels)
    downloaded = {**own, **ended.aggregate.parts}
    assert last.losses["downloaded"] == calibrated_loss(logits_of(PARTY.spec, downloaded, val), val.labels)
    assert last.common_after is not None


@pytest.mark.parametrize(
    ("name", "figure"), [("own", "personal"), ("ema", "ema"), ("downloaded", "after"), ("local", "local")]
)
def test_the_model_of_the_least_loss_is_the_deployed_one(ended: Simulation, name: str, figure: str) -> None:
    losses = dict.fromkeys(("own", "ema", "downloaded", "local"), 1.0) | {name: 0.5}
    last = replace(ended.curves["a"][-1], losses=losses)
    found = client_record(PARTY, replace(ended, curves={**ended.curves, "a": (last,)}), "a")
    assert found["deployed"] == name
    for prefix in ("accuracy", "accuracy_common"):
        assert found[f"{prefix}_deployed"] == found[f"{prefix}_{figure}"] is not None


def coded(
    method: str,
    codec: UpdateCodec = "i8-delta",
    aggregate_codec: AggregateCodec = "f16",
    names: tuple[str, ...] = NAMES,
) -> Party:
    spec = spec_of(method, codec, aggregate_codec)
    return replace(party_of(method, names), spec=spec, coding=coding_of(spec))


def spec_of(method: str, codec: UpdateCodec, aggregate_codec: AggregateCodec) -> FederationSpec:
    chosen = {"codec": codec, "aggregate_codec": aggregate_codec}
    return complete_spec(plan(method).model_copy(update=chosen))


@pytest.mark.parametrize("method", ["fedcg", "fedmd_cg", "fedavg", "fedgen"])
def test_the_aggregate_is_one_that_the_wire_brings_unchanged(method: str) -> None:
    one = coded(method)
    assert one.coding is not None
    done = simulate(one, Schedule(rounds=2, shadow=False))
    again, _ = one.coding.aggregate(done.aggregate.parts)
    assert same_parts(done.aggregate.parts, again)
    assert len(done.update_bytes) == 2
    assert not done.failures


def test_the_server_gets_the_decoded_updates_and_the_client_keeps_its_own() -> None:
    one = coded("fedavg", "i8-delta", "f32")
    assert one.coding is not None
    done = simulate(one, Schedule(rounds=1, shadow=False))
    exact = simulate(replace(one, coding=None), Schedule(rounds=1, shadow=False))
    for name in one.datasets:
        assert same_parts(done.states[name].parts, exact.states[name].parts)
    assert not same_parts(done.aggregate.parts, exact.aggregate.parts)
    for part, weights in exact.aggregate.parts.items():
        for name, tensor in weights.items():
            torch.testing.assert_close(done.aggregate.parts[part][name], tensor, atol=1e-3, rtol=0)


def test_without_codecs_nothing_is_touched() -> None:
    spec = spec_of("fedavg", "f32", "f32")
    assert coding_of(spec) is None
    assert simulate(replace(party_of("fedavg"), spec=spec), Schedule(rounds=1)).update_bytes == ()


def test_a_client_with_an_uncodable_update_keeps_its_state_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    without = simulate(coded("fedavg", names=("a", "b")), Schedule(rounds=1, shadow=False))
    update = WireCoding.update

    def refusing(coding: WireCoding, client: str, *parts: Mapping[Part, Weights]) -> tuple[Mapping[Part, Weights], int]:
        if client == "c":
            raise DivergedError("too large")
        return update(coding, client, *parts)

    monkeypatch.setattr(WireCoding, "update", refusing)
    done = simulate(coded("fedavg"), Schedule(rounds=1, shadow=False))
    assert [failure.reason for failure in done.failures["c"]] == ["too large"]
    assert same_parts(done.aggregate.parts, without.aggregate.parts)
    assert done.update_bytes == without.update_bytes


def test_what_float16_can_not_hold_is_a_divergence() -> None:
    spec = spec_of("fedavg", "f16", "f16")
    parts = initial_parts(spec, b"cohort")
    huge = {part: {name: tensor * 1e9 for name, tensor in parts[part].items()} for part in spec.upload}
    with pytest.raises(DivergedError, match="the update can't be encoded"):
        WireCoding(spec).update("a", huge, huge)


def test_the_record_shows_the_bytes_of_an_update_as_it_is_coded(tmp_path: Path) -> None:
    runs = {
        codec: records_of(fedcg_simulate(tmp_path / codec, f"--method fedsplit --image-size 32 --json {more}"))[0]
        for codec, more in (("f32", ""), ("i8-delta", "--codec i8-delta --aggregate-codec f16"))
    }
    weights, exact, scales = 48000 + 10080 + 840, 120 + 84 + 10, 120 + 84 + 10  # LeNet-5's classifier
    assert runs["f32"]["bytes"] == {"up": 4 * (weights + exact), "down": 4 * (weights + exact), "up_artifact": None}
    sizes = runs["i8-delta"]["bytes"]
    assert (sizes["up"], sizes["down"]) == (weights + 4 * (exact + scales), 2 * weights + 4 * exact)
    assert 40_000 < sizes["up_artifact"] < 65_000
    assert (runs["i8-delta"]["setting"]["codec"], runs["i8-delta"]["setting"]["aggregate_codec"]) == ("i8-delta", "f16")
