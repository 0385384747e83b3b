"""Training takes turns with other federations, pauses while the box may not train, and makes room for predictions."""

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from devices.eligibility import EligibilitySettings
from devices.telemetry import Causes, Telemetry, Zone
from edge_client.cli.status import WAITS, read_status
from edge_client.session.signals import Noted, RoundCommitted
from edge_client.training import trainer_child
from edge_client.training.box_limits import LEAST_PAUSE_S, LOOK_EVERY_S, Pauses, turn
from edge_client.training.trainer_child import Trainer
from edge_client.training.trainer_handle import TrainerReport, trainer_process
from fedcg.event_log import EventLog, read_events
from fedcg.log_output import LogSettings
from fedcg.wire.messages.schemas import DeclineReason, Heartbeat, RoundAttempt
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import MakeWorld, in_training, make_config
from tests.support.waiting import wait_until

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that trains; killed at the end at the latest."""
    words = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_training_process_waits_for_that_of_another_federation_even_when_that_one_is_killed(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec())
    signs, reports = threading.Semaphore(0), list[TrainerReport]()
    trainer = Trainer(site.config, site.store, EventLog(site.events_path, lambda: 1.0), signs.release)
    work = threading.Thread(target=lambda: reports.append(trainer.do(site.round())), daemon=True)
    with held(site.config.training_lock):
        work.start()
        assert all(signs.acquire(timeout=20) for _ in range(3)), "signs of life"
        assert [event["phase"] for event in site.events("phase_started")] == ["wait"]
        assert read_status(site.config)["training"] == WAITS
    work.join(60)
    assert reports == [RoundCommitted(RoundAttempt(1, 1))]
    assert [event["phase"] for event in site.events("phase_started")][:2] == ["wait", "load"]
    assert read_status(site.config)["training"] is None


def test_a_lock_in_a_folder_that_only_another_user_writes_is_shared_by_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / ".training.lock"
    lock.touch()
    real = Path.open

    def read_only(path: Path, mode: str = "r", *rest: object) -> object:
        if mode != "r":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, mode)

    monkeypatch.setattr(Path, "open", read_only)
    with turn(lock, lambda: None, lambda: None):
        assert not is_free(lock)
    assert is_free(lock)


def is_free(lock: Path) -> bool:
    with lock.open() as probe:
        try:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)  # only an exclusive lock keeps a second one away
        except BlockingIOError:
            return False
    return True


def test_a_lock_that_can_be_neither_made_nor_read_declines_the_round_with_its_name(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec())
    site.config.training_lock.mkdir()
    assert ".training.lock" in site.declined(DeclineReason.TRAINING_FAILED)
    assert site.events("phase_started") == []


NOON = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)


def hot(degrees: float) -> Telemetry:
    return Telemetry(zones=(Zone("cpu", degrees, critical_c=100.0),))


def one_by_one(readings: Sequence[Telemetry]) -> Callable[[], Telemetry]:
    """Gives these readings, the last one for ever."""
    left = list(readings)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


class Box:
    """A box whose readings follow a list, one for each look, the last one for ever; sleeping is what lets time pass."""

    def __init__(self, folder: Path, *readings: Telemetry, stop_file: Path | None = None) -> None:
        self.now, self.signs = 0.0, 0
        self.path = folder / "events.jsonl"
        events = EventLog(self.path, lambda: self.now)
        self.stop_file = stop_file  # of the application, which is done with the first pause
        owner = EligibilitySettings(stop_file=stop_file)
        self.pauses = Pauses(owner, one_by_one(readings), self.sign, events, lambda: self.now, lambda: NOON, self.sleep)
        self.pauses.at = RoundAttempt(3, 2)

    def sign(self) -> None:
        self.signs += 1

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.stop_file is not None:
            self.stop_file.unlink(missing_ok=True)

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


def test_it_pauses_while_the_application_of_the_box_keeps_training_away(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    stop.touch()
    box = Box(tmp_path, Telemetry(), stop_file=stop)
    box.pauses()
    assert [(line["event"], line.get("reason")) for line in box.lines()] == [("paused", "reserved"), ("resumed", None)]
    assert str(stop) in str(box.lines()[0]["detail"])


def test_status_and_heartbeats_tell_of_a_pause(make_world: MakeWorld) -> None:
    world = in_training(make_world)
    where = {"round": 1, "attempt": 1}
    world.trainer.deliver(Noted({"event": "phase_started", "phase": "classify", "pid": 7, **where}))
    world.trainer.deliver(Noted({"event": "paused", "reason": "reserved", "detail": "in use", **where}))
    while world.coordinator.wait(Heartbeat).phase != "wait":
        pass
    EventLog(world.config.store / "events.jsonl", lambda: 1.0).write(
        "paused", reason="reserved", detail="in use", **where
    )
    assert read_status(world.config)["training"] == "round 1, attempt 1: paused: in use"


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


def test_a_paused_round_commits_what_an_undisturbed_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_client.training.box_limits.LOOK_EVERY_S", 0.0)
    updates = []
    for name, readings in (("calm", [hot(50)]), ("hot", [hot(50), hot(95), hot(50)])):
        site, sensors = Site(tmp_path / name, real_spec()), SimpleNamespace(read=one_by_one(readings))
        monkeypatch.setattr(trainer_child, "Sensors", lambda _disk, found=sensors: found)
        site.train()
        updates.append(site.update())
        assert len(site.events("paused")) == len(site.events("resumed")) == (name == "hot")
    assert updates[0] == updates[1]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.mark.parametrize(("duty", "slept"), [(1.0, []), (0.5, [0.4]), (0.25, [1.2])])
def test_a_duty_cycle_sleeps_after_each_step_for_the_rest(tmp_path: Path, duty: float, slept: list[float]) -> None:
    clock = Clock()
    events = EventLog(tmp_path / "events.jsonl", clock)
    pauses = Pauses(
        EligibilitySettings(), Telemetry, lambda: None, events, clock, lambda: NOON, clock.sleep, duty_cycle=duty
    )
    pauses()
    clock.now += 0.4  # the step
    pauses()
    assert clock.slept == pytest.approx(slept)


@pytest.mark.parametrize(
    ("priority", "nice", "policy"),
    [("normal", 0, os.SCHED_OTHER), ("low", 10, os.SCHED_OTHER), ("idle", 0, os.SCHED_IDLE)],
)
def test_the_training_process_goes_after_other_programs_as_its_owner_says(
    tmp_path: Path, priority: str, nice: int, policy: int
) -> None:
    before = os.nice(0)
    config = make_config(tmp_path)
    training = config.training.model_copy(update={"priority": priority})
    handle = trainer_process(config.model_copy(update={"training": training}), LogSettings(), lambda _: None)
    try:
        pid = handle.start()
        wait_until(
            lambda: (os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)) == (max(before, nice), policy),
            f"the priority {priority} of the training process",
        )
    finally:
        handle.stop()
