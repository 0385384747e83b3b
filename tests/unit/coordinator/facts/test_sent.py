"""What the page states of a federation's updates, and of what an attacker knows beforehand."""

from __future__ import annotations

from coordinator.facts.known import Known
from coordinator.facts.sent import sent
from tests.support.coordinator.world import MakeWorld


def test_a_public_backbone_is_stated_with_what_is_private_beside_it(make_world: MakeWorld) -> None:
    world = make_world(rounds=1, clients=())
    network = world.spec.network.model_copy(
        update={"split": "resnet18+project:16", "weights": "ab" * 32, "freeze": "all-but:layer4"}
    )
    spec = world.spec.model_copy(update={"network": network})
    facts = sent(Known(world.store, lambda record: spec, world.root), "tiny")
    assert facts.start == (
        "backbone public (sha256 abababababab, frozen before layer4), projection from the cohort secret, or the public spec seed on a "
        "device without one"
    )
    assert facts.open_start == []
