"""The training processes of one device take turns, and one that waits gives signs of life and says so."""

import fcntl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_client.cli.status import WAITS, read_status
from edge_client.session.signals import RoundCommitted, RoundFailed
from edge_client.training.box_limits import turn
from edge_client.training.trainer_child import Trainer
from edge_client.training.trainer_handle import TrainerReport
from fedcg.event_log import EventLog
from fedcg.wire.messages.schemas import DeclineReason, RoundAttempt
from tests.support.edge.training_site import Site, real_spec

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


def test_while_a_training_process_works_no_other_one_can(tmp_path: Path) -> None:
    lock = tmp_path / ".training.lock"
    with turn(lock, lambda: None, lambda: None):
        assert not is_free(lock)


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
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_lock_that_can_be_neither_made_nor_read_declines_the_round_with_its_name(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec())
    site.config.training_lock.mkdir()
    report = site.declined()
    assert report == RoundFailed(RoundAttempt(1, 1), DeclineReason.TRAINING_FAILED, report.detail)
    assert ".training.lock" in report.detail
    assert site.events("phase_started") == []
