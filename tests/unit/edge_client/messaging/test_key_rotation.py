"""A device follows the coordinator's new key, keeps it, and listens to the old one no more."""

import errno
import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_client.link.coordinator_link import CoordinatorTrust
from edge_client.store.private_store import PrivateStore
from fedcg.wire.errors import WireError
from fedcg.wire.messages.envelopes import PinnedKey, SigningKey, make_link, seal
from fedcg.wire.messages.schemas import COORDINATOR, EVERYONE, Accept, Hello, KeyChain, KeyLink, Manifest
from tests.support.edge.world import DEVICE, FEDERATION, World
from tests.support.waiting import wait_until

KEYS = [SigningKey.generate() for _ in range(4)]
LINKS = tuple(make_link(FEDERATION, n + 1, 1, KEYS[n], KEYS[n + 1].public) for n in range(3))


def chain(links: tuple[KeyLink, ...]) -> KeyChain:
    return KeyChain(federation=FEDERATION, sender=COORDINATOR, recipient=EVERYONE, epoch=1, links=links)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.coordinator.key = KEYS[0]
    made.enrolled_key = KEYS[0].public
    yield made
    made.close()


def rotate(world: World, number: int, links: tuple[KeyLink, ...] | None = None) -> None:
    """As the real coordinator: the chain first, then everything else anew, signed with the new key."""
    coordinator = world.coordinator
    coordinator.key = KEYS[number]
    coordinator.publish(coordinator.topics.keys, chain(links or LINKS[:number]), retain=True)
    coordinator.come_online()


def pinned(world: World) -> PinnedKey:
    return PrivateStore(world.config.store).pinned_key(KEYS[0].public)


def refusals(world: World) -> list[str]:
    return [str(event["detail"]) for event in world.events("refused")]


def test_a_device_follows_in_the_middle_of_a_round_and_the_session_goes_on(world: World) -> None:
    coordinator = world.coordinator
    coordinator.come_online()
    world.start_agent()
    coordinator.wait(Hello)
    rotate(world, 1)
    coordinator.offer(world.spec, world.aggregate(), 1)
    coordinator.invite(1)
    coordinator.wait(Accept)
    manifest = coordinator.wait(Manifest)
    coordinator.receipt(manifest)
    coordinator.work_until(lambda: len(world.events("receipt")) == 1, "the receipt is recorded")
    assert world.events("coordinator_key")[0]["serial"] == 1
    assert pinned(world) == PinnedKey(KEYS[1].public, 1)
    assert sum(isinstance(message, Hello) for message in coordinator.heard) == 1


def test_a_device_that_was_off_for_two_rotations_hears_what_it_refused_at_first(world: World) -> None:
    """The retained offer comes before the chain: it is refused, then asked for again."""
    coordinator = world.coordinator
    world.start_agent()
    world.stop_agent()
    rotate(world, 2)
    coordinator.offer(world.spec, world.aggregate(), 1)
    subscribed: list[str] = []
    agent_topics = [coordinator.topics.offer, coordinator.topics.coordinator, coordinator.topics.keys]
    send = world.broker.send_retained

    def in_the_worst_order(transport: object, topic_filter: str) -> None:
        subscribed.append(topic_filter)
        if topic_filter == coordinator.topics.keys and subscribed.count(topic_filter) == 1:
            for topic in agent_topics:
                send(transport, topic)  # type: ignore[arg-type]
        elif topic_filter not in agent_topics or subscribed.count(topic_filter) > 1:
            send(transport, topic_filter)  # type: ignore[arg-type]

    world.broker.send_retained = in_the_worst_order  # type: ignore[method-assign]
    world.start_agent()
    coordinator.wait(Hello)
    coordinator.work_until(lambda: bool(world.events("offer")), "the offer is heard in the end")
    assert any("not signed by it" in refusal for refusal in refusals(world))
    assert pinned(world) == PinnedKey(KEYS[2].public, 2)


def test_after_a_rotation_the_old_key_is_refused_also_by_a_restarted_agent(world: World) -> None:
    coordinator = world.coordinator
    coordinator.come_online()
    world.start_agent()
    coordinator.wait(Hello)
    rotate(world, 1)
    wait_until(lambda: bool(world.events("coordinator_key")), "the key is followed")
    for _ in range(2):
        known = len(refusals(world))
        coordinator.key = KEYS[0]
        coordinator.epoch += 1
        coordinator.come_online()
        wait_until(lambda: len(refusals(world)) > known, "the old key is refused")  # noqa: B023
        assert "not signed by it" in refusals(world)[-1]
        assert pinned(world) == PinnedKey(KEYS[1].public, 1)
        world.stop_agent()
        coordinator.key = KEYS[1]
        coordinator.come_online()
        world.start_agent()
        coordinator.wait(Hello)  # what comes from now on is no message that the broker kept


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (chain((make_link(FEDERATION, 2, 1, KEYS[3], KEYS[2].public),)), "without the key that is pinned"),
        (chain((LINKS[1].model_copy(update={"epoch": 7}),)), "not signed by the key that it replaces"),
        (chain((make_link("other", 2, 1, KEYS[1], KEYS[2].public),)), "not signed by the key that it replaces"),
        (chain(LINKS[:1]).model_copy(update={"federation": "other"}), "of federation 'other'"),
    ],
    ids=["another key's", "altered", "another federation's link", "another federation's chain"],
)
def test_a_forged_chain_is_refused_counted_and_told_with_its_reason(world: World, attack: KeyChain, why: str) -> None:
    coordinator = world.coordinator
    coordinator.come_online()
    world.start_agent()
    coordinator.wait(Hello)
    rotate(world, 1)
    wait_until(lambda: bool(world.events("coordinator_key")), "the key is followed")
    coordinator.publish(coordinator.topics.keys, attack, key=KEYS[2])
    wait_until(lambda: any(why in refusal for refusal in refusals(world)), why)
    assert 0 not in [event["count"] for event in world.events("refused")]
    assert pinned(world) == PinnedKey(KEYS[1].public, 1)


def test_a_replayed_earlier_chain_is_refused(world: World) -> None:
    coordinator = world.coordinator
    coordinator.come_online()
    world.start_agent()
    coordinator.wait(Hello)
    rotate(world, 2)
    wait_until(lambda: bool(world.events("coordinator_key")), "the key is followed")
    coordinator.publish(coordinator.topics.keys, chain(LINKS[:1]), key=KEYS[1])
    wait_until(lambda: any("a replay" in refusal for refusal in refusals(world)), "the replay is refused")
    assert pinned(world) == PinnedKey(KEYS[2].public, 2)


def remembered(root: Path, enrolled: SigningKey = KEYS[0]) -> CoordinatorTrust:
    return CoordinatorTrust(PrivateStore.open(root, FEDERATION, DEVICE), FEDERATION, enrolled.public)


def test_the_pin_is_for_its_owner_only_and_a_cut_in_the_middle_of_writing_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = remembered(tmp_path)
    memory.follow(seal(chain(LINKS[:1]), KEYS[1]))
    memory.save()
    kept = tmp_path / "coordinator.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert json.loads(kept.read_text())["key"] == KEYS[1].public.hex
    memory.follow(seal(chain(LINKS[:2]), KEYS[2]))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "cut")))
        with pytest.raises(OSError, match="cut"):
            memory.save()
    assert memory.key == KEYS[2].public  # it counts in this process all the same
    again = remembered(tmp_path)
    assert again.key == KEYS[1].public
    assert again.follow(seal(chain(LINKS[:2]), KEYS[2])) == PinnedKey(KEYS[2].public, 2)
    memory.save()
    assert remembered(tmp_path).key == KEYS[2].public


def test_a_device_that_is_enrolled_anew_starts_from_the_key_that_came_with_it(tmp_path: Path) -> None:
    memory = remembered(tmp_path)
    memory.follow(seal(chain(LINKS[:1]), KEYS[1]))
    memory.save()
    fresh = remembered(tmp_path, enrolled=KEYS[3])
    assert fresh.key == KEYS[3].public
    with pytest.raises(WireError):
        fresh.follow(seal(chain(LINKS[:2]), KEYS[2]))
    assert fresh.follow(seal(chain(LINKS), KEYS[3])) is None
    assert remembered(tmp_path).key == KEYS[1].public  # the earlier pin stands until the new one is saved
