"""A coordinator may not make a box work or fetch without end: bounds of the box's own policy, checked before it accepts."""

import pytest

from edge_client.config import PolicySection
from edge_client.firewall import check_spec
from fedcg.wire.messages.schemas import EVERYONE, Accept, ArtifactRef, Decline, DeclineReason, Need, Offer
from tests.support.edge.world import MakeWorld, toy_spec
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"epochs": 10**9}, "epochs = 1000000000; policy.max_epochs of this device is 200"),
        ({"steps": 10**9, "epochs": 1}, "steps = 1000000000; policy.max_steps"),
        ({"batch_size": 10**9}, "batch_size = 1000000000; policy.max_batch"),
        ({"epochs": 1e9}, r"epochs = 1000000000.0; policy.max_epochs"),
    ],
)
def test_a_spec_that_asks_for_more_work_than_the_policy_allows_is_declined_before_it_is_accepted(
    make_world: MakeWorld, params: dict[str, float], said: str
) -> None:
    world = make_world(spec=toy_spec(params=params))
    world.connect()
    world.coordinator.offer(world.spec, world.aggregate(), 1)
    world.coordinator.invite(1)
    decline = world.coordinator.wait(Decline)
    assert decline.reason is DeclineReason.NEEDS_APPROVAL
    assert not any(isinstance(message, Accept) for message in world.coordinator.heard)
    assert world.trainer.rounds() == []
    told = world.events("refused")[0]["detail"]
    assert check_spec(world.spec, PolicySection()) == (DeclineReason.NEEDS_APPROVAL, told)
    assert said in str(told)


@pytest.mark.parametrize("params", [{}, {"epochs": 200}, {"steps": 100_000}, {"steps": 20, "epochs": 10**9}])
def test_a_spec_within_the_policy_is_taken(params: dict[str, float]) -> None:
    assert check_spec(toy_spec(params=params), PolicySection()) is None


def test_the_owner_sets_the_bounds() -> None:
    spec = toy_spec(params={"epochs": 20})
    assert check_spec(spec, PolicySection(max_epochs=20)) is None
    refusal = check_spec(spec, PolicySection(max_epochs=19))
    assert refusal is not None
    assert refusal[0] is DeclineReason.NEEDS_APPROVAL


def test_an_aggregate_above_the_bound_is_declined_and_no_byte_of_it_asked_for(make_world: MakeWorld) -> None:
    world = make_world()
    world.connect()
    coordinator = world.coordinator
    coordinator.publish(
        coordinator.topics.offer,
        Offer(
            **coordinator.address(EVERYONE, 1, 1),
            spec=coordinator.serve(world.spec.canonical()),
            aggregate=ArtifactRef(id="a" * 64, size=512 * 1024 * 1024, chunk_bytes=120 * 1024),
            rounds=2,
            deadline_at=0.0,
        ),
        retain=True,
    )
    coordinator.invite(1)
    assert coordinator.wait(Decline).reason is DeclineReason.SPEC_REFUSED
    wait_until(lambda: bool(world.events("declined")), "the decline is recorded")
    assert "policy.max_download_mb of this device is 128" in str(world.events("refused")[0]["detail"])
    assert not any(isinstance(message, Accept | Need) for message in coordinator.heard)
