"""A broker that drops, delays, repeats, alters and injects: every federation ends as the undisturbed one does, or reports the reason, no update counts or is trained twice, and whatever is refused is counted under its reason and written to the event logs."""

import itertools
import logging
import random
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from edge_client.cli.status import read_status
from edge_client.store.private_store import PrivateStore
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import SigningKey, seal
from fedcg.wire.messages.topics import TopicKind
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.coordinator.world import RunningService
from tests.support.hostile import TOPICS, Behaviour, Box, Federation, HostileBroker, Passing, alter, honest
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(200)
BROKERS_KEY = SigningKey.generate()
LASTING = (TopicKind.OFFER, TopicKind.COORDINATOR, TopicKind.STATUS)
"""Published once and retained by the broker: one that drops them withholds the federation, which nobody can prevent."""
Run = Callable[..., Federation]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr("coordinator.service.service.REMIND_S", 0.5)
    monkeypatch.setattr("coordinator.service.service.OFFER_EVERY_S", 0.4)
    with ExitStack() as stack:
        yield lambda behaviour=honest, **options: stack.enter_context(
            closing(Federation(tmp_path / secrets.token_hex(4), behaviour, **options))
        )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final aggregate of two devices and two rounds over an honest broker, which leaves nothing to refuse."""
    federation = Federation(tmp_path_factory.mktemp("undisturbed")).run()
    federation.close()
    federation.assert_completed()
    assert federation.refusals == {"dropped": 0}
    assert not any(box.refused() for box in federation.boxes.values())
    return federation.final


def kind_of(passing: Passing) -> TopicKind:
    parsed = TOPICS.parse(passing.topic)
    assert parsed is not None
    return parsed.kind


def sometimes(share: float, do: Behaviour) -> Behaviour:
    """Leave most publishes alone, and everything that is said once only."""

    def behave(broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
        if kind_of(passing) in LASTING or broker.rng.random() >= share:
            return [passing]
        broker.did[do.__name__] += 1
        return do(broker, passing)

    return behave


def drops(_broker: HostileBroker, _passing: Passing) -> Iterable[Passing]:
    return []


def delays(broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
    return [replace(passing, after_s=broker.rng.uniform(0.01, 0.3))]


def repeats(broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
    """At once, a little later, and with it something older from the same topic."""
    older = [item for item in broker.seen if item.topic == passing.topic]
    return [passing, passing, *broker.rng.sample(older, min(2, len(older))), replace(passing, after_s=0.05)]


def alters(broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
    return [replace(passing, payload=alter(passing, broker.rng))]


def misdirects(_broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
    """Each message of, or for, one device also on the topic of the other."""
    swapped = {"a": "b", "b": "a"}
    parsed = TOPICS.parse(passing.topic)
    if parsed is None or parsed.device is None:
        return [passing]
    return [passing, replace(passing, topic=passing.topic.replace(f"/{parsed.device}/", f"/{swapped[parsed.device]}/"))]


def forges(_broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
    """Before each message another one of a later round, signed by the broker itself."""
    if passing.is_chunk:
        return [passing]
    bolder = passing.message.model_copy(update={"counter": passing.message.counter + 1, "epoch": 9, "round": 9})
    return [replace(passing, payload=seal(bolder, BROKERS_KEY), retain=False), passing]


def foreign(federation: Callable[[], Federation]) -> Behaviour:
    """Before each message the same one as another federation of the same parties has it, with authentic signatures."""

    def imports(_broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
        if passing.is_chunk:
            return [passing]
        message = passing.message.model_copy(update={"federation": "other"})
        home = federation()
        key = home.world.key if passing.identity == schemas.COORDINATOR else home.boxes[passing.identity].key
        return [replace(passing, payload=seal(message, key), retain=passing.retain), passing]

    return imports


CASES: dict[str, tuple[Behaviour, set[str], set[str]]] = {  # behaviour, refused by the coordinator, and by agents
    "repeats": (sometimes(1.0, repeats), {"replayed"}, {"replayed"}),
    "misdirects": (misdirects, {"other_device"}, {"other_device"}),
    "forges": (forges, {"forged"}, {"forged"}),
    "imports": (honest, {"other_federation"}, {"other_federation"}),
}


@pytest.mark.parametrize("name", CASES)
def test_whatever_a_broker_does_the_aggregate_is_that_of_an_honest_one(make: Run, undisturbed: str, name: str) -> None:
    behaviour, by_coordinator, by_agents = CASES[name]
    federation = make(behaviour)
    if name == "imports":
        federation.broker.behaviour = foreign(lambda: federation)
    federation.run()
    federation.assert_completed()
    assert federation.final == undisturbed
    assert {reason for reason, count in federation.refusals.items() if count} >= by_coordinator, federation.refusals
    logged = {str(event["reason"]) for event in federation.world.events("refused")}
    assert logged == set(federation.refusals) - {"dropped"}
    assert set.union(*(box.refused() for box in federation.boxes.values())) >= by_agents


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_random_mix_of_everything_changes_nothing(make: Run, undisturbed: str, seed: int) -> None:
    everything: list[Behaviour] = [drops, delays, repeats, alters, misdirects, forges]
    random.Random(seed).shuffle(everything)
    in_turn = itertools.cycle(everything)

    def mixed(broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
        return sometimes(1, next(in_turn))(broker, passing) if broker.rng.random() < 0.2 else [passing]

    federation = make(mixed, seed=seed).run()
    assert len(federation.broker.did) >= 2, federation.broker.did
    federation.assert_completed()
    assert federation.final == undisturbed
    assert set(federation.refusals) - {"dropped"} or any(box.refused() for box in federation.boxes.values())


WITHHELD = {("offer", 1): 12, ("finished", 2): 3}  # so many times, 0.4 s apart: two deadlines, and the end


@pytest.mark.slow
def test_withheld_offers_only_delay_the_rounds_and_the_end(make: Run, undisturbed: str) -> None:
    withheld: Counter[tuple[str, int]] = Counter()

    def withholds(_broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
        if kind_of(passing) is not TopicKind.OFFER:
            return [passing]
        which = (passing.message.kind, passing.message.round)
        withheld[which] += 1
        return [] if withheld[which] <= WITHHELD.get(which, 0) else [passing]

    federation = make(withholds, deadline_s=2.0).run()
    moved = federation.world.events("deadline_moved")
    assert len(moved) >= 2
    assert all("a (no answer), b (no answer)" in event["reason"] for event in moved)
    assert federation.world.events("attempt_failed") == []
    federation.assert_completed()
    assert federation.final == undisturbed


def recorded(federation: Federation, kind: type) -> list[Passing]:
    """What the coordinator said so far."""
    said = [
        passing
        for passing in federation.broker.seen
        if passing.identity == schemas.COORDINATOR and not passing.is_chunk
    ]
    return [passing for passing in said if isinstance(passing.message, kind)]


def test_recordings_of_earlier_epochs_and_sessions_are_refused_on_both_sides(make: Run, undisturbed: str) -> None:
    """A second coordinator process, the same federation: everything of the first one is played again in the second round."""
    federation = make()
    played: list[Passing] = []

    def replays(broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
        """With the second manifest of a, all that epoch 1 had; retained where it was."""
        if (
            passing.identity == "a"
            and not passing.is_chunk
            and isinstance(passing.message, schemas.Manifest)
            and not played
        ):
            played.extend(item for item in broker.seen if not item.is_chunk and kind_of(item) is not TopicKind.STATUS)
            return [*played, passing]
        return [passing]

    with RunningService(federation.world) as first:
        federation.start_boxes()
        wait_until(lambda: len(federation.world.events("update_stored")) >= 2, "the first round's updates")
        first.vanish()
    federation.broker.behaviour = replays
    with RunningService(federation.world) as second:
        wait_until(federation.is_over, "the end")
        counted = second.service.refusals
    federation.assert_completed()
    assert federation.final == undisturbed
    assert first.service.epoch in {item.message.epoch for item in played if item.identity == schemas.COORDINATOR}
    assert counted["other_session"] > 0
    assert all({"older_epoch", "other_session"} <= box.refused() for box in federation.boxes.values())


def test_a_box_that_stays_connected_names_its_epoch_to_an_older_copy_of_the_coordinator_and_costs_it_no_attempts(
    make: Run, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = make()
    world, box = federation.world, federation.boxes["a"]
    with RunningService(world) as first:
        box.start(federation)
        wait_until(lambda: bool(box.events("welcomed")), "it waits for the other box")
        first.vanish()
    with monkeypatch.context() as older:
        older.setattr(world.store, "next_epoch", lambda: first.service.epoch - 1)
        with RunningService(world) as behind:
            wait_until(lambda: "devices are ahead" in world.problems(behind.service), "it is named")
            assert not behind.service.state.online
            behind.vanish()
    with RunningService(world):
        federation.boxes["b"].start(federation)
        wait_until(federation.is_over, "the end")
    federation.assert_completed()
    assert federation.final == undisturbed


def test_an_agent_refuses_whatever_a_broker_makes_of_earlier_messages(make: Run) -> None:
    federation = make(devices=("a",), rounds=1)
    box = federation.boxes["a"]
    held: list[Passing] = []

    def holds_receipts(_broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
        if not passing.is_chunk and isinstance(passing.message, schemas.Receipt):
            held.append(passing)
            return []
        return [passing]

    federation.broker.behaviour = holds_receipts
    with RunningService(federation.world) as running:
        federation.start_boxes()
        wait_until(lambda: bool(held), "the update is delivered")
        seen = box.events("agent_started")
        offer, welcome = recorded(federation, schemas.Offer)[-1], recorded(federation, schemas.Welcome)[-1]
        key, epoch = federation.world.key, offer.message.epoch
        older = offer.message.model_copy(update={"epoch": epoch - 1, "round": 7})
        earlier = offer.message.model_copy(update={"attempt": 0})
        for expected, item in {
            "forged": replace(offer, payload=seal(offer.message.model_copy(update={"round": 7}), BROKERS_KEY)),
            "older_epoch": replace(offer, payload=seal(older, key)),  # as a coordinator without its lease would sign it
            "replayed": replace(offer, payload=seal(earlier, key)),
            "other_federation": replace(offer, payload=seal(offer.message.model_copy(update={"federation": "b"}), key)),
            "other_device": replace(welcome, payload=seal(welcome.message.model_copy(update={"recipient": "b"}), key)),
            "malformed": replace(offer, payload=offer.payload[:-1]),
            "too_large": replace(offer, payload=offer.payload * 100),
        }.items():
            before = len(box.events("refused"))
            federation.broker.deliver(replace(item, retain=False))
            wait_until(lambda: len(box.events("refused")) > before, expected)  # noqa: B023
            assert box.events("refused")[-1]["reason"] == expected
        for item in (welcome, recorded(federation, schemas.Invite)[-1], recorded(federation, schemas.Need)[-1]):
            before = len(box.events("refused"))
            federation.broker.deliver(item)
            wait_until(lambda: len(box.events("refused")) > before, f"{item.message.kind} again")  # noqa: B023
            assert box.events("refused")[-1]["reason"] == "replayed"
        assert box.events("agent_started") == seen
        assert box.events("receipt") == []  # nothing of it ended the update
        reasons = ("forged", "older_epoch", "other_federation", "other_device", "malformed", "too_large")
        assert read_status(box.config)["refused"] == {**dict.fromkeys(reasons, 1), "replayed": 4}
        federation.broker.behaviour = honest
        federation.broker.deliver(held[0])
        wait_until(federation.is_over, "the end")
        assert running.service.refusals == {"dropped": 0}
    federation.assert_completed()


def test_an_offer_played_again_after_the_end_does_not_open_the_round_again(make: Run) -> None:
    federation = make(devices=("a",), rounds=1)
    ended: list[Passing] = []

    def reopens(broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
        if passing.is_chunk or not isinstance(passing.message, schemas.Finished):
            return [passing]
        ended.append(passing)
        return [passing, recorded(federation, schemas.Offer)[-1], passing]

    federation.broker.behaviour = reopens
    federation.run()
    federation.assert_completed()
    assert ended
    box = federation.boxes["a"]
    refused = [event["reason"] for event in box.events("refused") if event["what"] == TOPICS.offer]
    assert refused == ["replayed"]  # a slow start adds refusals on the device's own topic: its hello is answered twice
    assert len(box.events("finished")) == 1


def test_a_recorded_hello_does_not_end_the_session_that_replaced_its_own(make: Run) -> None:
    federation = make(devices=("a", "b"), rounds=1)
    box = federation.boxes["a"]
    with RunningService(federation.world) as running:
        box.start(federation)
        wait_until(lambda: len(box.events("welcomed")) == 1, "a session stands")
        federation.broker.drop("a")
        federation.broker.restore("a")
        wait_until(lambda: len(box.events("welcomed")) == 2, "the session after it")
        greeting = next(
            item for item in federation.broker.seen if item.identity == "a" and kind_of(item) is TopicKind.UP_CONTROL
        )
        federation.broker.deliver(greeting)
        wait_until(lambda: running.service.refusals.get("replayed") == 1, "it is refused")
        federation.boxes["b"].start(federation)
        wait_until(federation.is_over, "the end")
        assert running.service.refusals == {"dropped": 0, "replayed": 1}
    federation.assert_completed()


def test_of_a_box_and_its_copy_the_first_update_counts_and_the_other_is_a_conflict(
    make: Run, caplog: pytest.LogCaptureFixture
) -> None:
    federation = make()
    box, broker = federation.boxes["a"], federation.broker
    PrivateStore.open(box.root / "store", FEDERATION, "a").device_secret()
    shutil.copytree(box.root, box.root.with_name("copy"))
    copy = Box("a", box.root.with_name("copy"), box.key, images="its own")
    held: list[Passing] = []

    def holds_manifests(_broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
        is_manifest = passing.identity == "a" and not passing.is_chunk and isinstance(passing.message, schemas.Manifest)
        held.extend([passing] if is_manifest else [])
        return [] if is_manifest else [passing]

    with RunningService(federation.world) as running, caplog.at_level(logging.WARNING):
        broker.behaviour = holds_manifests
        federation.boxes["b"].start(federation)
        box.start(federation)
        wait_until(lambda: bool(held), "the box has trained")
        broker.drop("a")
        broker.behaviour = lambda _broker, passing: [passing]
        copy.start(federation)
        wait_until(lambda: bool(copy.events("receipt")), "the copy delivers")
        copy.stop()
        assert running.service.conditions.doubled_at == {}
        broker.restore("a")
        wait_until(lambda: "a" in running.service.conditions.doubled_at, "both agents have reported under one identity")
        wait_until(federation.is_over, "the end")
    first, second = copy.events("receipt")[0], box.events("receipt")[0]
    assert (first["round"], first["outcome"]) == (1, "accepted")
    assert (second["round"], second["outcome"]) == (1, "conflict")
    assert first["artifact"] != second["artifact"]
    kept = federation.world.store.updates(FEDERATION, schemas.RoundAttempt(1, 1))
    assert [update.artifact for update in kept if update.client == "a"] == [first["artifact"]]
    (refused,) = federation.world.events("update_refused")
    assert (refused["client"], refused["outcome"]) == ("a", "conflict")
    for told in ("seem to use the same private store", "A copy of the device or of its private store is running"):
        assert any(told in record.message for record in caplog.records), told
    federation.assert_completed()
