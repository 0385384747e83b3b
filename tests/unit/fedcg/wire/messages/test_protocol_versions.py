"""Hello lists versions, welcome picks one; who has none in common is told so, by which side, and is not answered with silence."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import SigningKey, seal
from fedcg.wire.messages.schemas import COORDINATOR, Hello, Invite, Refusal, Welcome
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.toy_artifacts import tiny_spec
from tests.support.coordinator.world import RunningService, World
from tests.support.edge.world import DEVICE
from tests.support.edge.world import World as EdgeWorld
from tests.support.waiting import wait_until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "home", tiny_spec(1))
    yield made
    made.close()


def say_hello(device: FakeDevice, spoken: tuple[int, ...], answer: type[Welcome | Refusal]) -> Any:
    """What the coordinator answers to a hello with these versions."""
    device.silent = True
    device.hello = lambda: None  # type: ignore[method-assign]
    device.start()
    device.nonce = "9" * 32
    hello = Hello(**device.addressed(), nonce=device.nonce, versions=spoken, agent="fake-2")
    device.transport.publish(device.topics.up_control(device.name), seal(hello, device.key))
    wait_until(lambda: bool(device.of(answer)), "an answer")
    return device.of(answer)[0]


@pytest.mark.parametrize(("spoken", "picked"), [((1,), 1), ((1, 2), 2), ((2, 3), 2)])
def test_a_coordinator_of_version_two_serves_agents_of_version_one_and_two(
    world: World, monkeypatch: pytest.MonkeyPatch, spoken: tuple[int, ...], picked: int
) -> None:
    monkeypatch.setattr(schemas, "SPOKEN", (1, 2))
    device = world.devices["a"]
    with RunningService(world):
        assert say_hello(device, spoken, Welcome).version == picked


@pytest.mark.parametrize(("ours", "spoken", "behind"), [((1,), (2, 3), "coordinator"), ((3, 4), (1, 2), "device")])
def test_an_agent_of_other_versions_is_refused_with_both_sides_versions_and_never_invited(
    world: World, monkeypatch: pytest.MonkeyPatch, ours: tuple[int, ...], spoken: tuple[int, ...], behind: str
) -> None:
    monkeypatch.setattr(schemas, "SPOKEN", ours)
    device = world.devices["a"]
    with RunningService(world) as running:
        refusal = say_hello(device, spoken, Refusal)
        assert running.service.refusals["version"] == 1
        assert running.service.state.online == frozenset()
    assert (refusal.versions, refusal.device_versions, refusal.update) == (ours, spoken, behind)
    told = [event for event in world.events("refused") if event["reason"] == "version"]
    assert [event["what"] for event in told] == ["the hello of a"]
    assert told[0]["detail"] == schemas.explain_versions(spoken, ours)
    assert device.of(Invite) == []


def test_a_device_tells_its_operator_why_it_was_refused_and_believes_no_forged_or_old_refusal(tmp_path: Path) -> None:
    edge = EdgeWorld(tmp_path)
    coordinator = edge.coordinator
    coordinator.answers_hello = False
    try:
        coordinator.come_online()
        edge.start_agent()
        nonce = coordinator.wait(Hello).nonce

        def refuse(device_nonce: str, key: SigningKey | None = None) -> None:
            values = {**coordinator.address(DEVICE), "sender": COORDINATOR, "device_nonce": device_nonce}
            values |= {"versions": (2, 3), "device_versions": (1,), "update": "device"}
            coordinator.publish(coordinator.topics.down_control(DEVICE), Refusal.model_validate(values), key=key)

        refuse(nonce, SigningKey.generate())
        refuse("f" * 32)
        wait_until(lambda: len(edge.events("refused")) == 2, "both are refused")
        assert [event["what"] for event in edge.events("refused")] == [coordinator.topics.down_control(DEVICE)] * 2
        coordinator.wait(Hello)  # neither kept it from trying on
        refuse(nonce)
        wait_until(lambda: len(edge.events("refused")) == 3, "the refusal is told")
        assert edge.events("refused")[-1]["detail"] == schemas.explain_versions((1,), (2, 3))
        wait_until(
            lambda: edge.agent._state.hello_at > edge.agent._clock() + 30, "it does not ask every two seconds now"
        )
    finally:
        edge.close()
