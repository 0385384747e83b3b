"""A round pauses between two steps while the box may not train, and goes on with the same result."""

from datetime import datetime, timezone
from pathlib import Path

import pytest

from devices.eligibility import EligibilitySettings
from devices.telemetry import Causes, Telemetry, Zone
from edge_client.session.signals import RoundCommitted
from edge_client.training import trainer_child
from edge_client.training.box_limits import LEAST_PAUSE_S, LOOK_EVERY_S, Pauses
from edge_client.training.trainer_child import Trainer
from fedcg.event_log import EventLog, read_events
from fedcg.wire.messages.schemas import RoundAttempt
from tests.support.edge.training_site import Site, real_spec

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)


def hot(degrees: float) -> Telemetry:
    return Telemetry(zones=(Zone("cpu", degrees, critical_c=100.0),))


class Box:
    """A box whose readings follow a list, one for each look, the last one for ever; sleeping is what lets time pass."""

    def __init__(self, folder: Path, *readings: Telemetry, **settings: bool) -> None:
        self.readings = list(readings)
        self.now, self.signs = 0.0, 0
        self.path = folder / "events.jsonl"
        events = EventLog(self.path, lambda: self.now)
        owner = EligibilitySettings(**settings)
        self.pauses = Pauses(owner, self.read, self.sign, events, lambda: self.now, lambda: NOON, self.sleep)
        self.pauses.at = RoundAttempt(3, 2)

    def read(self) -> Telemetry:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def sign(self) -> None:
        self.signs += 1

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def lines(self) -> list[dict[str, object]]:
        return [dict(event) for event in read_events(self.path)]


def test_it_pauses_when_hot_and_resumes_five_degrees_cooler_with_signs_of_life_meanwhile(tmp_path: Path) -> None:
    box = Box(tmp_path, hot(91), hot(89), hot(86), hot(84))  # hot from 90 on, which is 10 below critical
    box.pauses()
    paused, resumed = box.lines()
    assert (paused["event"], paused["reason"], paused["round"], paused["attempt"]) == ("paused", "hot", 3, 2)
    assert "91 °C" in str(paused["detail"])
    assert (resumed["event"], resumed["seconds"]) == ("resumed", 3 * LOOK_EVERY_S / 4)
    assert box.signs == 4  # of the step, and of each look again


def test_the_sensors_are_read_every_two_seconds_at_most(tmp_path: Path) -> None:
    box = Box(tmp_path, hot(50), hot(95), hot(50))
    box.pauses()
    box.now = LOOK_EVERY_S - 0.1
    box.pauses()
    assert not box.path.exists()
    box.now = LOOK_EVERY_S
    box.pauses()
    assert [line["event"] for line in box.lines()] == ["paused", "resumed"]


def test_hardware_throttling_that_ends_without_load_still_pauses_half_a_minute(tmp_path: Path) -> None:
    box = Box(tmp_path, Telemetry(causes=Causes((), ("under-voltage",))), Telemetry())
    box.pauses()
    assert [line["event"] for line in box.lines()] == ["paused", "resumed"]
    assert box.now >= LEAST_PAUSE_S


def test_software_throttling_and_what_only_a_new_round_needs_do_not_pause(tmp_path: Path) -> None:
    box = Box(tmp_path, Telemetry(causes=Causes(("GPU power cap",), ()), free_disk_bytes=0))
    box.pauses()
    assert not box.path.exists()


def test_a_second_reason_during_a_pause_is_named_too(tmp_path: Path) -> None:
    box = Box(tmp_path, hot(95), Telemetry(causes=Causes((), ("GPU power brake",))), Telemetry())
    box.pauses()
    assert [line.get("reason") for line in box.lines()] == ["hot", "throttled", None]


def test_a_round_that_was_paused_commits_what_an_undisturbed_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = []
    for name, readings in (("calm", [hot(50)]), ("hot", [hot(50), hot(95), hot(50)])):
        site = Site(tmp_path / name, real_spec())

        class Sensors:
            def __init__(self, disk: Path, left: list[Telemetry] = readings) -> None:
                self.left = left

            def read(self) -> Telemetry:
                return self.left.pop(0) if len(self.left) > 1 else self.left[0]

        monkeypatch.setattr(trainer_child, "Sensors", Sensors)
        monkeypatch.setattr("edge_client.training.box_limits.LOOK_EVERY_S", 0.0)
        trainer = Trainer(site.config, site.store, EventLog(site.events_path, lambda: 1.0))
        assert trainer.do(site.round()) == RoundCommitted(RoundAttempt(1, 1))
        committed.append(site.store.generations.newest())
        assert len(site.events("paused")) == len(site.events("resumed")) == (name == "hot")
    calm, paused = committed
    assert calm is not None
    assert paused is not None
    assert calm.outbox is not None
    assert paused.outbox is not None
    assert calm.outbox.artifact == paused.outbox.artifact
