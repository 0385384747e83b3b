"""Child processes: how they start, what they report, and how they end. Real processes."""

import logging
import multiprocessing
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from fedcg.child_python import module_command, spawning
from fedcg.worker_process import Exited, WorkerProcess, abandon, requests_of
from tests.support.traps import imported_in, lay_traps
from tests.support.waiting import wait_until


class Unreadable:
    """What no process can unpickle."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("not a number",)


def answer(connection: Connection) -> None:
    """Send back what is asked, as JSON."""
    import json  # as torch and others are imported: when the child is at work

    for request in requests_of(connection):
        connection.send(json.dumps(request))


def answer_unreadably(connection: Connection) -> None:
    for _ in requests_of(connection):
        connection.send(Unreadable())


@contextmanager
def worker(main: Callable[..., None]) -> Iterator[tuple[WorkerProcess, queue.SimpleQueue[Any]]]:
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
    process = WorkerProcess("child", main, (), 60.0, reports.put)
    try:
        yield process, reports
    finally:
        process.stop()


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_process_whose_report_can_not_be_read_is_ended_for_that_reason(caplog: pytest.LogCaptureFixture) -> None:
    with worker(answer_unreadably) as (process, reports), caplog.at_level(logging.ERROR):
        pid = process.start()
        process.send("anything")
        exited = reports.get(timeout=60)
        assert isinstance(exited, Exited)
        assert (exited.pid, exited.was_busy) == (pid, True)
        assert "ValueError: invalid literal for int()" in exited.reason
        wait_until(lambda: has_ended(pid), "the process has ended")
    assert "reports can't be read" in caplog.text


def test_of_a_process_that_was_replaced_nothing_more_is_reported() -> None:
    with worker(answer) as (process, reports):
        first = process.start()
        process.send("one")
        assert reports.get(timeout=60) == '"one"'
        second = process.start()
        assert has_ended(first)
        process.send("two")
        assert reports.get(timeout=60) == '"two"'
        os.kill(second, 9)
        assert reports.get(timeout=60).pid == second


def test_a_pool_is_abandoned_while_a_large_task_is_on_its_way_to_a_worker_that_is_busy() -> None:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    busy, large = pool.submit(time.sleep, 600), pool.submit(len, bytes(20_000_000))
    wait_until(busy.running, "the worker begins")
    time.sleep(0.5)  # until the pipe is full; nothing shows that
    abandon(pool)
    assert isinstance(large.exception(timeout=0), BrokenProcessPool)
    assert not multiprocessing.active_children()


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, full of traps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # it is set back when the test ends
    return lay_traps(tmp_path)


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_a_command_starts_among_traps_in_every_python(
    traps: Path, version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "version_info", version)
        command = module_command("fedcg", "--version")
    assert ("-P" in command) == (version == (3, 11))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split(",")[0], done.stderr) == (0, "fedcg", "")
    assert imported_in(traps) == ""


def test_a_worker_and_a_pool_start_among_traps(traps: Path) -> None:
    with worker(answer) as (process, reports):
        process.start()
        process.send("anything")
        assert reports.get(timeout=60) == '"anything"'
    with ProcessPoolExecutor(1, spawning()) as pool:
        assert pool.submit(os.getppid).result(timeout=60) == os.getpid()
    assert imported_in(traps) == ""
