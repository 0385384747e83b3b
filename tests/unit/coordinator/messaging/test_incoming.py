"""Incoming messages: a queue that is fair to senders, what a silenced device costs and how it comes back, cohort marks.

Real floods are in tests/faults/network/test_strangers.py.
"""

import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.broker.access_lists import end_silences, publish_access, refresh_access, silence
from coordinator.cli.opening import create_home
from coordinator.config import CoordinatorConfig
from coordinator.members.enrolment import make_bundles
from coordinator.messaging import incoming
from coordinator.messaging.incoming import Cohorts, EventQueue, FloodLimits, LineLimit
from coordinator.paths import Home
from coordinator.storage.store import Store
from coordinator.token_buckets import Rate
from fedcg.event_log import EventLog, read_events
from fedcg.wire.errors import _MAX_DETAIL, ALWAYS_REPORTED, MalformedError, Refusals, SignatureError
from fedcg.wire.messages.schemas import CohortVerdict, Heartbeat, RoundAttempt
from fedcg.wire.messages.topics import TopicKind
from tests.support.clock import Clock
from tests.support.commands import data_of, run_fedcg
from tests.support.coordinator.homes import add_federation
from tests.support.coordinator.world import MakeWorld, RunningService
from tests.support.waiting import wait_until


def sent(limits: FloodLimits, clock: Clock, rate: int, seconds: float, device: str = "a") -> int:
    """Send at an even rate; how many were let through."""
    passed = 0
    for _ in range(int(rate * seconds)):
        clock.now += 1.0 / rate
        passed += limits.admits(device, TopicKind.UP_CONTROL)
    return passed


def test_500_messages_a_second_are_thinned_out_for_ever_and_4000_are_silenced_for_a_while() -> None:
    clock = Clock()
    limits = FloodLimits(clock)
    passed = sent(limits, clock, 500, 60.0)
    assert limits.silenced() == frozenset()
    assert passed == pytest.approx(incoming.MESSAGES.burst + 60 * incoming.MESSAGES.per_s, rel=0.01)
    sent(limits, clock, 4000, 1.0)
    assert limits.silenced() == {"a"}
    assert sent(limits, clock, 100, 10.0) == 0
    assert sent(limits, clock, 100, 10.0, "b") == 1000
    assert (limits.silenced(), limits.is_silenced("a")) == (frozenset("a"), True)
    clock.now += incoming.SILENCE_S
    assert (limits.silenced(), limits.is_silenced("a")) == (frozenset(), False)
    assert sent(limits, clock, 100, 5.0) == 500, "its bucket is full again"
    sent(limits, clock, 10_000, 1.0)
    assert limits.silenced() == {"a"}


def test_devices_that_nobody_knows_share_a_bucket_and_are_not_silenced() -> None:
    clock = Clock()
    limits = FloodLimits(clock)
    assert sent(limits, clock, 10_000, 1.0, device="") < 1300
    assert sent(limits, clock, 10, 1.0) == 10
    assert limits.silenced() == frozenset()


def test_a_device_can_cause_few_lines_of_the_kinds_that_it_can_repeat_and_all_of_the_others(tmp_path: Path) -> None:
    clock = Clock()
    events = EventLog(tmp_path / "events.jsonl", clock, LineLimit(clock).allows)
    for name in (*incoming.LIMITED_EVENTS, "update_stored"):
        for _ in range(1000):
            events.write(name, client="a")
    events.write("online", client="b")
    lines = [str(event["event"]) for event in read_events(tmp_path / "events.jsonl")]
    assert len(lines) == incoming.LINES.burst + 1000 + 1
    assert lines.count("update_stored") == 1000
    clock.now = 10.0
    assert [events.write("online", client="a") for _ in range(7)] == [True] * 5 + [False] * 2


def test_refusals_are_counted_by_device_and_one_devices_flood_hides_no_other_devices(tmp_path: Path) -> None:
    refusals = Refusals(EventLog(tmp_path / "events.jsonl", time.time))
    for _ in range(10_000):
        refusals.note("a topic", SignatureError("x" * 5000), "a")
    assert refusals.note("a topic", SignatureError("forged"), "b")
    refusals.note("t" * 60_000, MalformedError("odd"), "b")
    assert (refusals.of("a"), refusals.of("b"), refusals.of("c")) == (10_000, 2, 0)
    assert refusals.counts == {"forged": 10_001, "malformed": 1}
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) <= ALWAYS_REPORTED + 14 + 2
    assert max(map(len, lines)) < 2 * _MAX_DETAIL + 200


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = create_home(tmp_path / "home", CoordinatorConfig())
    add_federation(made, "casting", ["a", "b"])
    return made


def listed(home: Home) -> set[str]:
    return set(refresh_access(home).devices)


def test_a_silenced_device_stays_off_every_access_list_that_is_written_meanwhile(home: Home, tmp_path: Path) -> None:
    assert listed(home) == {"a", "b"}
    assert not silence(home, ["a", "b"])  # no broker runs here
    assert listed(home) == set()
    silence(home, ["a"])
    store = Store(home.database)
    # as another process does, which writes the list anew
    make_bundles(home, store, ["c"], tmp_path / "more", time.time(), "casting")
    store.close()
    publish_access(home)
    assert listed(home) == {"b", "c"}
    end_silences(home)  # the coordinator starts
    assert listed(home) == {"a", "b", "c"}


def test_an_operator_sees_who_is_silenced(home: Home) -> None:
    silence(home, ["a"])
    listed_devices = data_of(run_fedcg("device", "list", "--dir", str(home.root), "--json").stdout)
    assert {one["id"]: one["silenced"] for one in listed_devices} == {"a": True, "b": False}
    lines = run_fedcg("device", "list", "--dir", str(home.root)).stdout.splitlines()
    assert ["silenced" in line for line in lines[1:]] == [True, False]
    assert "silenced" in run_fedcg("device", "show", "a", "--dir", str(home.root)).stdout


def test_a_list_of_silenced_devices_that_can_not_be_read_keeps_nobody_out(home: Home) -> None:
    silence(home, ["a"])
    assert listed(home) == {"b"}
    (home.broker / "silenced.json").write_text("{")
    assert listed(home) == {"a", "b"}


def test_a_flooding_device_is_left_out_and_comes_back(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world, silenced = make_world(clients=("a", "b", "c")), list[set[str]]()

    def publish_access(devices: Collection[str]) -> bool:
        silenced.append(set(devices))
        return True

    context = replace(world.service_context(), publish_access=publish_access)
    monkeypatch.setattr(world, "service_context", lambda: context)
    monkeypatch.setattr(incoming, "FLOOD", Rate(300, 500.0))
    monkeypatch.setattr(incoming, "SILENCE_S", 2.0)
    a, b, c = (world.devices[name] for name in "abc")
    a.silent = b.silent = True  # they accept, and deliver nothing
    with RunningService(world) as running:
        for device in (a, b):
            device.start()
        world.wait_event("attempt_opened")
        c.start()
        world.wait_event("online", 3)
        beat = Heartbeat(**a.addressed())
        while not running.service.floods.is_silenced("a"):
            for _ in range(100):
                a.tell(beat)
        world.wait_event("silenced")
        failed = world.wait_event("attempt_failed")  # a and b were invited, two updates are needed, and a is out
        assert "declined, were rejected or left" in failed["reason"]
        assert world.wait_event("attempt_opened", 2)["participants"] == ["b", "c"]
        assert running.service.refused_of("a") > 0
        assert running.service.refused_of("b") == 0
        people = {person.client: person for person in world.store.participants("tiny", RoundAttempt(1, 1))}
        assert "500 messages per second" in people["a"].reason
        world.wait_event("silence_ended")
        a.tell(beat)
        wait_until(lambda: "a" in running.service.state.online, "it is back")
        wait_until(lambda: {"a"} in silenced and silenced[-1] == set(), "the access list follows")
        links = [event["t"] >= world.events("silenced")[0]["t"] for event in world.events("link") if event["up"]]
        assert True in links  # a new one: what of the flood waits at the broker is left behind


def taken_from(queue: EventQueue[str], count: int) -> list[str | None]:
    return [queue.get(0.01) for _ in range(count)]


def test_our_own_items_come_first_and_then_each_sender_has_a_turn_in_its_own_order() -> None:
    queue: EventQueue[str] = EventQueue()
    for name, sender in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b"), ("c1", "c")):
        queue.put(name, 1, sender)
    queue.put("ours")
    early = taken_from(queue, 4)
    queue.put("c2", 1, "c")
    assert early + taken_from(queue, 5) == ["ours", "a1", "b1", "c1", "a2", "b2", "c2", "a3", None]


def test_a_sender_that_fills_its_share_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "ITEM_BYTES", 3)
    monkeypatch.setattr(incoming, "SENDER_BYTES", 10)
    queue: EventQueue[str] = EventQueue()
    for number in range(100):
        queue.put(f"many{number}", 1, "many")
    for name, size in (("large", 6), ("too large", 6), ("small", 4)):
        queue.put(name, size, "large")
    queue.put("honest", 5, "honest")
    assert taken_from(queue, 7) == ["many0", "large", "honest", "many1", "small", "many2", None]
    assert queue.dropped == 98


def test_the_queue_is_bounded_in_total_and_never_drops_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "ITEM_BYTES", 1)
    monkeypatch.setattr(incoming, "MAX_BYTES", 10)
    queue: EventQueue[str] = EventQueue()
    for name, size in (("a", 6), ("b", 6), ("ours", 0), ("c", 4)):
        queue.put(name, size, name)
    taken = taken_from(queue, 3)
    queue.put("d", 10, "d")
    assert (taken + taken_from(queue, 2), queue.dropped) == (["ours", "a", "c", "d", None], 1)


def test_a_cohort_is_compared_without_a_device_that_is_gone() -> None:
    cohorts = Cohorts()
    cohorts.note("a", "1" * 32)
    cohorts.note("b", "1" * 32)
    assert cohorts.note("odd", "2" * 32) == ("a", "b")
    assert cohorts.verdict("a") is CohortVerdict.DIFFERENT
    cohorts.forget("odd")
    assert cohorts.verdict("a") is CohortVerdict.SAME
    cohorts.forget("b")
    assert cohorts.verdict("a") is CohortVerdict.ALONE
