"""Backbones that differ from device to device in one federation: the spec that lists them, and simulations of them."""

import json
from pathlib import Path

import pytest

from experiments.settings import Setting
from experiments.simulation.party_builder import own_specs
from fedcg.cli import app
from fedcg.learning.errors import NetworkError
from fedcg.learning.networks.own_backbone import device_spec
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.spec import BackboneChoice, FederationSpec, NetworkChoice
from fedcg.learning.split_names import WEIGHTS_VARIABLE, least_work
from fedcg.wire.parts import Part
from tests.support.learning.tiny_backbone import SPLIT, TIMM, tiny_plan, write_tiny_weights

OTHER = "timm:test_resnet"


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FederationSpec:
    path = write_tiny_weights(tmp_path / "weights")
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(path.parent))
    plan = tiny_plan("fedsplit", path)
    network = plan.network.model_copy(update={"backbones": (BackboneChoice(name=OTHER),)})
    return complete_spec(plan.model_copy(update={"network": network}))


def test_a_device_has_the_federations_digest_and_classifier_and_an_extractor_of_its_own(spec: FederationSpec) -> None:
    own, usual = device_spec(spec, OTHER), device_spec(spec, f"timm:{TIMM}")
    assert own.digest == usual.digest == spec.digest
    assert (own.network.split, own.network.weights, own.network.freeze) == (f"{OTHER}+project:16", None, "none")
    assert usual.layouts == spec.layouts
    assert own.layouts[Part.CLASSIFIER] == spec.layouts[Part.CLASSIFIER]
    assert own.layouts[Part.EXTRACTOR] != spec.layouts[Part.EXTRACTOR]
    mine, theirs = initial_parts(own, b"c" * 32), initial_parts(usual, b"c" * 32)
    assert {name: value.tolist() for name, value in mine[Part.CLASSIFIER].items()} == {
        name: value.tolist() for name, value in theirs[Part.CLASSIFIER].items()
    }
    assert len(mine[Part.EXTRACTOR]) > len(theirs[Part.EXTRACTOR])
    assert type(own.model_copy(update={"rounds": 9})) is type(own)


def test_a_spec_without_a_choice_is_every_devices_own_and_keeps_the_bytes_of_before(spec: FederationSpec) -> None:
    alone = spec.model_copy(update={"network": spec.network.model_copy(update={"backbones": ()})})
    assert device_spec(alone, "anything") is alone
    assert "backbones" not in json.loads(alone.canonical())["network"]
    assert FederationSpec.parse(spec.canonical()) == spec


def test_backbones_that_can_not_be_had_are_named(spec: FederationSpec) -> None:
    with pytest.raises(NetworkError, match=f"no backbone 'resnet18'; a device may choose timm:{TIMM}, {OTHER}"):
        device_spec(spec, "resnet18")
    plan = tiny_plan("fedavg", None, "none")
    others = plan.network.model_copy(update={"backbones": (BackboneChoice(name=OTHER),)})
    with pytest.raises(NetworkError, match="fedavg averages extractors, which have to be alike"):
        complete_spec(plan.model_copy(update={"network": others}))
    strange = plan.network.model_copy(update={"backbones": (BackboneChoice(name="timm:no_such_network"),)})
    with pytest.raises(NetworkError, match="no network no_such_network"):
        complete_spec(plan.model_copy(update={"method": "fedsplit", "network": strange}))
    with pytest.raises(ValueError, match="lenet5 has no projection"):
        NetworkChoice(split="lenet5", backbones=(BackboneChoice(name=OTHER),))
    with pytest.raises(ValueError, match="each backbone once"):
        NetworkChoice(split=SPLIT, backbones=(BackboneChoice(name=f"timm:{TIMM}"),))


def test_the_cheapest_backbone_is_one_whose_work_is_known() -> None:
    assert least_work(("resnet18@layer3", "timm:vit_tiny", "mobilenetv3_small_100")) == "mobilenetv3_small_100"
    assert least_work(("timm:vit_tiny", "timm:test_vit")) == "timm:vit_tiny"


@pytest.mark.slow
def test_clients_of_a_simulation_take_the_backbones_in_turn_and_only_what_is_alike_is_averaged(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = (
        f"simulate --out {out} --method fedsplit --clients 3 --images-per-client 10 --rounds 1 --network {SPLIT} "
        f"--backbones {OTHER} --weights random --local-epochs 1 --workers 1 --partition iid"
    )
    app.main(args=options.split(), prog_name="fedcg", standalone_mode=False)
    record = json.loads((out / "digits-fedsplit-seed0.json").read_text())
    assert record["setting"]["backbones"] == OTHER
    assert [client["curve"]["round"] for client in record["clients"]] == [[1], [1], [1]]
    assert record["global"]["round"] == []


def test_backbones_are_taken_in_turn(spec: FederationSpec) -> None:
    from types import SimpleNamespace

    cohort = SimpleNamespace(clients=dict.fromkeys(("c", "a", "b")))
    names = {client: own.network.split for client, own in own_specs(spec, cohort).items()}  # type: ignore[arg-type]
    assert names == {"a": SPLIT, "b": f"{OTHER}+project:16", "c": SPLIT}


def test_each_backbone_of_a_plan_has_its_own_weights(tmp_path: Path) -> None:
    setting = Setting(network="efficientnet_lite0+project:8", backbones="efficientnet_lite1,resnet18", weights="random")
    network = NetworkChoice.model_validate(setting.plan(setting.source())["network"])
    assert network.backbone_names == ("efficientnet_lite0", "efficientnet_lite1", "resnet18")
    assert {one.weights for one in network.backbones} == {None}
    pinned = Setting(network="efficientnet_lite0+project:8", backbones="efficientnet_lite1", freeze="all")
    chosen = NetworkChoice.model_validate(pinned.plan(pinned.source())["network"])
    assert chosen.weights is not None
    assert chosen.backbones[0].weights not in {None, chosen.weights}
    assert chosen.backbones[0].freeze == "all"
