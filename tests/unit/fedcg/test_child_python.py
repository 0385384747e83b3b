"""Children import nothing from the folder that they start in: real processes, started among modules with the names of what they import."""

import os
import queue
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from fedcg.child_python import module_command, spawning
from fedcg.worker_process import WorkerProcess, requests_of
from tests.support.traps import imported_in, lay_traps


def answer(connection: Connection) -> None:
    import json  # as torch and others are imported: when the child is at work

    for request in requests_of(connection):
        connection.send(json.dumps(request))


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
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
    process = WorkerProcess("child", answer, (), 60.0, reports.put)
    process.start()
    process.send("anything")
    try:
        assert reports.get(timeout=60) == '"anything"'
    finally:
        process.stop()
    with ProcessPoolExecutor(1, spawning()) as pool:
        assert pool.submit(os.getppid).result(timeout=60) == os.getpid()
    assert imported_in(traps) == ""
