"""What a running service does not take: messages and updates that must not be, and updates that behave unlike the others."""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import TypeAdapter

from coordinator.config import Action, FigureRule, RobustnessSettings
from coordinator.facts.devices import device_facts
from coordinator.facts.federations import RoundFacts, attempts_by_round, round_facts
from coordinator.messaging.incoming import MessageChecks, Sessions
from coordinator.rounds.engine import Phase
from coordinator.rounds.records import ParticipantState
from coordinator.updates.upload_windows import Uploads
from coordinator.updates.validation import validate_update
from fedcg.event_log import EventLog, read_events
from fedcg.wire.artifacts.artifacts import artifact_id, pack
from fedcg.wire.errors import Refusals
from fedcg.wire.messages.envelopes import DOMAIN, MAGIC, SigningKey, seal
from fedcg.wire.messages.schemas import AnyMessage, DeviceStatus, Invite, Manifest, Need, Outcome, RoundAttempt
from fedcg.wire.messages.topics import Topics
from fedcg.wire.parts import ClassAccuracies, Part, Report
from fedcg.wire.transport.transport import Delivery
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.toy_artifacts import random_parts, shared_layouts, update_header
from tests.support.coordinator.world import (
    ALL_FIRST,
    FINE,
    REASON,
    TOO_LONG,
    MakeWorld,
    OddC,
    PlainWorker,
    RunningService,
    World,
)
from tests.support.present import present
from tests.support.waiting import wait_until
from tests.support.wire.artifact_chunks import make_ref

SPOILT: dict[str, tuple[str, dict[str, Any]]] = {  # the reason given, and what the header says instead of the truth
    "nan": ("NaN", {}),
    "huge": ("from the round's base is", {}),
    "extractor": ("no layout", {}),
    "shape": ("layouts", {}),
    "garbage": ("header", {}),
    "base": ("base", {"base": "0" * 64}),
    "client": ("client", {"client": "b"}),
    "round": ("round", {"round": 2}),
    "report": ("loss", {"report": Report(examples=3, loss=1.0)}),
    "per class": (
        "its accuracies by class are not for 3 classes",
        {"report": Report(examples=3, per_class=ClassAccuracies(accuracy=(0.25, 1.0)))},
    ),
    "examples": ("examples", {"report": Report(accuracy=0.5)}),
}


def spoilt(world: World, spoil: str) -> bytes:
    spec = world.spec
    parts = random_parts(shared_layouts(spec), seed=5)
    if spoil == "nan":
        parts[Part.CLASSIFIER]["weight"][0, 0] = np.nan
    elif spoil == "huge":
        parts[Part.GENERATOR]["weight"] *= np.float32(1e7)
    elif spoil == "extractor":
        parts |= random_parts({Part.EXTRACTOR: spec.layouts[Part.EXTRACTOR]}, 6)
    elif spoil == "shape":
        parts[Part.CLASSIFIER]["weight"] = parts[Part.CLASSIFIER]["weight"][:, :7].copy()
    elif spoil == "garbage":
        return b"FCGA" + bytes(2000)
    header = update_header(spec, 1, 1, "a", world.base_id)
    return pack(header.model_copy(update=SPOILT[spoil][1]), parts)


@pytest.mark.parametrize("spoil", SPOILT)
def test_an_update_that_must_not_be_merged_is_rejected_with_its_reason(make_world: MakeWorld, spoil: str) -> None:
    world = make_world(clients=("a", "b"), max_attempts=1)
    a = world.devices["a"]
    a.silent = world.devices["b"].silent = True
    with RunningService(world) as running:
        world.start_devices()
        wait_until(lambda: bool(a.of(Invite)), "an invite")
        data = spoilt(world, spoil)
        a.send_update(1, 1, data)
        wait_until(lambda: bool(a.receipts()), "a receipt")
        assert a.receipts()[0].outcome is Outcome.REJECTED
        assert SPOILT[spoil][0] in a.receipts()[0].reason
        assert not world.artifacts.has(artifact_id(data))
        wait_until(lambda: running.service.state.phase is Phase.STALLED, "one of two is not enough")
    people = {person.client: person.state for person in world.store.participants("tiny", RoundAttempt(1, 1))}
    assert people["a"] is ParticipantState.DECLINED


def test_an_announced_update_over_its_bound_is_rejected_before_a_byte_is_asked_for(make_world: MakeWorld) -> None:
    world = make_world()
    a = world.devices["a"]
    a.silent = True
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: bool(a.of(Invite)), "an invite")
        a.tell(Manifest(**a.addressed(1, 1), artifact=make_ref(bytes(20_000_000), 1024)))
        wait_until(lambda: bool(a.receipts()), "a receipt")
    assert a.receipts()[0].outcome is Outcome.REJECTED
    assert a.of(Need) == []


def test_what_is_not_authentic_or_not_in_order_is_refused_and_counted(make_world: MakeWorld) -> None:
    world = make_world()
    a, b = world.devices["a"], world.devices["b"]
    a.silent = b.silent = True
    with RunningService(world) as running:
        world.start_devices()
        wait_until(lambda: bool(a.of(Invite)), "an invite")
        good = Manifest(**a.addressed(1, 1), artifact=make_ref(a.make_update(1, 1, world.base_id), 1024))
        stamped = present(a.session).stamp(good)
        forged: list[tuple[AnyMessage, SigningKey, str]] = [
            (stamped, SigningKey.generate(), "forged"),
            (stamped.model_copy(update={"sender": "stranger"}), a.key, "forged"),
            (stamped.model_copy(update={"sender": "b"}), b.key, "other_device"),
            (stamped.model_copy(update={"session": "0" * 64}), a.key, "other_session"),
            (stamped.model_copy(update={"counter": 1}), a.key, "replayed"),
            (stamped.model_copy(update={"federation": "other"}), a.key, "other_federation"),
            (DeviceStatus(**a.addressed(), online=False), a.key, "malformed"),
        ]
        for number, (message, key, _) in enumerate(forged, 1):
            a.transport.publish(a.topics.up_control("a"), seal(message, key))
            wait_until(lambda: len(world.events("refused")) == number, "the refusal is logged")  # noqa: B023
        reasons = [reason for _, _, reason in forged]
        assert [event["reason"] for event in world.events("refused")] == reasons
        assert running.service.refusals == {"dropped": 0, **Counter(reasons)}
        assert a.of(Need) == []
        assert a.receipts() == []
        a.transport.publish(a.topics.up_control("a"), seal(stamped, a.key))
        wait_until(lambda: bool(a.of(Need)), "the authentic one is answered")


def test_what_a_delivery_says_before_its_signature_holds_is_in_no_log(tmp_path: Path) -> None:
    evil = "EVIL\n\x1b[2J"
    log = tmp_path / "events.jsonl"
    checks = MessageChecks(Topics("casting"), Sessions(), Refusals(EventLog(log, lambda: 1.0)))
    key = SigningKey.generate()
    checks.learn_keys([("a", key.public.hex)])
    known = Topics("casting").up_control("a")
    fields = {"kind": "heartbeat", "federation": "casting", "sender": "a", "recipient": "coordinator", evil: 1}
    payload = json.dumps(fields).encode()
    forged, signed = MAGIC + bytes(64) + payload, MAGIC + key.sign(DOMAIN + payload) + payload
    for topic in (known, evil, f"fedcg/casting/devices/{evil}/up/control", Topics("casting").up_control("evil-name")):
        assert checks.open(Delivery(topic, forged, retained=False)) is None
    assert checks.open(Delivery(known, signed, retained=False)) is None
    refused = list(read_events(log))
    assert [event["what"] for event in refused][:1] == [known]
    assert len(refused) == 5
    assert "evil" not in json.dumps(refused).lower()


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world(rounds=1, clients=("a", "b", "c"), pacing=ALL_FIRST)


def is_refused_alone(world: World, reason: str) -> None:
    with RunningService(world) as running:
        world.start_devices()
        world.wait_event("finished")
        assert running.service.refusals["unforeseen"] == 1
        assert running.service.refused_of("a") >= 1
        assert running.service.refused_of("b") == 0
    [rejected] = world.events("update_refused")
    assert (rejected["client"], rejected["round"], rejected["outcome"]) == ("a", 1, "rejected")
    assert reason in rejected["reason"]
    assert {receipt.outcome for receipt in world.devices["a"].receipts()} == {
        Outcome.REJECTED
    }  # again where it asked again
    assert sorted(event["client"] for event in world.events("update_stored")) == ["b", "c"]
    assert not world.events("attempt_failed")


@pytest.mark.parametrize("error", [RuntimeError("nobody thought of it"), MemoryError("too many numbers")])
def test_an_update_whose_check_breaks_is_rejected_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def breaks_on_a(data: bytes, spec: Any, client: str, *more: Any) -> Any:
        if client == "a":
            raise error
        return validate_update(data, spec, client, *more)

    monkeypatch.setattr("coordinator.updates.update_checks.validate_update", breaks_on_a)
    with caplog.at_level(logging.ERROR):
        is_refused_alone(world, type(error).__name__)
    [first, *_] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "a" in first.getMessage().split()
    assert first.exc_info is not None  # with the traceback


def test_a_chunk_that_breaks_its_check_ends_its_update_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Uploads.feed

    def breaks_on_a(self: Uploads, device: str, chunk: Any, now: float) -> Any:
        if device == "a":
            raise RuntimeError("nobody thought of it")
        return feed(self, device, chunk, now)

    monkeypatch.setattr(Uploads, "feed", breaks_on_a)
    is_refused_alone(world, "RuntimeError")


class Unmeasured(PlainWorker):
    """Dies before it has measured."""

    def assess(self, updates: Mapping[str, str]) -> None:
        self.asked.append(("assess", tuple(updates)))


def first_attempt(world: World) -> dict[str, Any]:
    """The first attempt of the first round as the API shows it."""
    known = world.known()
    found = round_facts(known, attempts_by_round(known, "tiny")[1][:1])
    attempt: dict[str, Any] = TypeAdapter(RoundFacts).dump_python(found, mode="json")["attempts"][0]
    return attempt


def shown_updates(world: World) -> dict[str, Any]:
    return {update["client"]: update for update in first_attempt(world)["updates"]}


def merged(world: World) -> list[list[str]]:
    return [[client for client, *_ in updates] for updates in world.merges()]


def test_an_odd_update_is_receipted_and_shown_with_its_figures_and_not_merged(make_world: MakeWorld) -> None:
    world = make_world(2, clients=("a", "b", "c", "d"), make_worker=OddC, pacing=ALL_FIRST)
    world.run()
    shown = shown_updates(world)
    assert merged(world) == [["a", "b", "d"]] * 2
    why = f"not merged (quarantine): {TOO_LONG}; {REASON}"
    receipts = world.devices["c"].receipts()
    assert [receipt.outcome for receipt in receipts] == [Outcome.ACCEPTED] * 4
    assert [(receipt.round, receipt.reason) for receipt in receipts] == [(1, ""), (1, why), (2, ""), (2, why)]
    assert {receipt.reason for receipt in world.devices["a"].receipts()} == {""}
    assert (shown["c"]["outcome"], shown["c"]["weight"]) == ("accepted", 0)
    assert shown["c"]["figures"]["direction"] == -0.5
    assert shown["c"]["figures"]["action"] == "quarantine"
    assert shown["c"]["figures"]["reasons"] == [TOO_LONG, REASON]
    assert shown["c"]["reason"] == why
    assert shown["a"]["weight"] == 11
    assert shown["a"]["figures"] == FINE.as_json()
    events = [(event["client"], event["action"], event["round"]) for event in world.events("update_odd")]
    assert events == [("c", "quarantine", 1), ("c", "quarantine", 2)]


def test_a_round_that_needs_the_odd_update_weighs_it_down_and_goes_on(make_world: MakeWorld) -> None:
    world = make_world(1, clients=("a", "b", "c"), make_worker=OddC, min_clients=3, max_attempts=1)
    world.run()
    shown = shown_updates(world)
    assert merged(world) == [["a", "b", "c"]]
    assert [shown[client]["weight"] for client in "abc"] == [11, 11, 1]
    assert shown["c"]["figures"]["action"] == "down-weight"
    assert shown["c"]["reason"] == f"down-weighted: {TOO_LONG}; {REASON}; kept because the round needs it"
    assert not world.events("attempt_failed")


def test_an_operator_may_have_such_a_round_fail_by_the_devices_name(make_world: MakeWorld) -> None:
    strict = RobustnessSettings(below_quorum="fail")
    world = make_world(1, clients=("a", "b", "c"), make_worker=OddC, min_clients=3, max_attempts=1, robustness=strict)
    stalled = world.run("stalled")
    assert f"c (not merged (quarantine): {TOO_LONG}" in str(stalled["reason"])
    assert "2 updates are left, but 3 are required" in str(stalled["reason"])
    assert merged(world) == []


def test_a_coordinator_that_was_killed_before_the_figures_came_decides_the_same(make_world: MakeWorld) -> None:
    world = make_world(1, clients=("a", "b", "c", "d"), make_worker=Unmeasured, pacing=ALL_FIRST)
    with RunningService(world) as running:
        world.start_devices()
        world.wait_event("distilling")
        running.vanish()
    world.make_worker = OddC
    with RunningService(world):
        world.wait_event("finished")
    assert merged(world) == [["a", "b", "d"]]
    odd = present(world.store.update("tiny", RoundAttempt(1, 1), "c"))
    assert odd.weight == 0


def deliver(device: FakeDevice, round_number: int) -> None:
    """Let a silent device train one round."""

    def is_done() -> bool:
        with device.lock:
            device.silent = False
            device.act()
            device.silent = True
            return (round_number, 1) in device.trained

    wait_until(is_done, f"{device.name} delivers round {round_number}")


@pytest.mark.parametrize("action", ["warn", "down-weight", "quarantine"])
def test_an_odd_update_is_a_problem_until_the_next_normal_one(make_world: MakeWorld, action: Action) -> None:
    settings = RobustnessSettings(
        norm=FigureRule(bound=3.0, action=action), direction=FigureRule(bound=0.3, action=action)
    )
    first_only = partial(OddC, rounds=(1,))
    world = make_world(3, clients=("a", "b", "c"), make_worker=first_only, pacing=ALL_FIRST, robustness=settings)
    world.devices["a"].silent = True
    with RunningService(world) as running:
        world.start_devices()
        deliver(world.devices["a"], 1)
        world.wait_event("aggregate_stored")
        remarks = {each.id: each.remarks for each in device_facts(world.known(running.service))}
        assert len(remarks["c"]) == 1, "whatever the action is, the device's page names it"
        assert ("odd update" in world.problems(running.service)) == (action != "warn")
        deliver(world.devices["a"], 2)
        world.wait_event("aggregate_stored", 2)
        assert "odd update" not in world.problems(running.service)


class Eased(PlainWorker):
    """Merges by averaging, since it ran out of memory."""

    result: ClassVar[Mapping[str, Any]] = {"ease": 2}


def test_a_merge_without_enough_memory_is_named_with_its_round(make_world: MakeWorld) -> None:
    world = make_world(1, make_worker=Eased)
    world.run()
    assert first_attempt(world)["reason"].startswith("merged by weighted averaging alone")
