"""The aggregation worker's handle, driven as the service's loop does it, and child processes that stand in for the worker and the trainer."""

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from typing_extensions import Self

from coordinator.aggregation import jobs
from coordinator.aggregation.worker_handle import AggregationWorker
from edge_client.config import AgentConfig
from edge_client.session.signals import RoundCommitted, TrainerReady, Working
from fedcg.log_output import LogSettings
from fedcg.worker_process import requests_of

DEADLINE_S = 60.0


def worker_settings(folder: Path) -> jobs.WorkerSettings:
    return jobs.WorkerSettings(1, "cpu", b"s" * 32, folder / "artifacts", folder / "spill")


class DrivenWorker:
    """Collects what the worker's replies mean."""

    def __init__(self, settings: jobs.WorkerSettings) -> None:
        self.events: list[jobs.WorkerEvent] = []
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.worker = AggregationWorker(settings, self._replies.put)

    def __enter__(self) -> Self:
        self.worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.stop()

    def until(self, *kinds: type[jobs.WorkerEvent]) -> Any:
        """Go on until an event of one of these kinds came, and return it."""
        end = time.monotonic() + DEADLINE_S
        while not any(isinstance(event, kinds) for event in self.events):
            assert time.monotonic() < end, self.events
            self.worker.tick()
            try:
                self.events += self.worker.follow(self._replies.get(timeout=0.05))
            except queue.Empty:
                continue
        return next(event for event in self.events if isinstance(event, kinds))

    def drain(self, seconds: float) -> None:
        """Go on for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.worker.tick()
            with contextlib.suppress(queue.Empty):
                self.events += self.worker.follow(self._replies.get(timeout=min(left, 0.05)))


STALL_S = 1.0


def work_slowly_then_idle(connection: Connection, _config: AgentConfig, _log: LogSettings) -> None:
    connection.send(TrainerReady())
    for command in requests_of(connection):  # with nothing to do it may be silent for ever
        idle = threading.Event()
        for _ in range(8):  # twice as long as a silent one may be
            idle.wait(STALL_S / 4)
            connection.send(Working())
        connection.send(RoundCommitted(command.round_attempt))


def serve(connection: Connection, settings: jobs.WorkerSettings, first_time: Callable[[Connection], None]) -> None:
    """As the real worker without torch; what is asked first in its first life does `first_time`."""
    connection.send(jobs.WorkerReady(os.getpid(), 1, "cpu"))
    marker = settings.artifacts / "was here"
    for request in requests_of(connection):
        if isinstance(request, jobs.Job):
            continue
        if not marker.exists():
            marker.touch()
            first_time(connection)
        if isinstance(request, jobs.AddUpdate):
            connection.send(jobs.UpdateAdded(1, 1, request.client))
        elif isinstance(request, jobs.FinishJob):
            connection.send(jobs.JobDone(1, 1, "9" * 64, len(request.updates), "8" * 64))


def _stop(_connection: Connection) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_once(connection: Connection, settings: jobs.WorkerSettings) -> None:
    serve(connection, settings, _stop)


def break_the_card_once(connection: Connection, settings: jobs.WorkerSettings) -> None:
    """The real worker, whose job runner meets an error of the card the first time that it opens a job."""
    import coordinator.aggregation.worker as real

    marker = settings.artifacts / "was here"

    class Runner(real.JobRunner):
        def _open(self) -> None:
            if not marker.exists():
                marker.touch()
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            self._send(jobs.JobDone(1, 1, "9" * 64, 1, "8" * 64))

        def serve(self, request: jobs.AddUpdate | jobs.AssessJob | jobs.FinishJob) -> None:
            """Nothing more: the job is done."""

    real.JobRunner = Runner  # type: ignore[misc]
    real.worker_main(connection, settings)


def die_over_b(connection: Connection, _settings: jobs.WorkerSettings) -> None:
    connection.send(jobs.WorkerReady(os.getpid(), 1, "cpu"))
    for request in requests_of(connection):
        if isinstance(request, jobs.AddUpdate):
            connection.send(jobs.PhaseStarted(1, 1, os.getpid(), "teacher", request.client))
            if request.client == "b":
                os.kill(os.getpid(), signal.SIGKILL)
            connection.send(jobs.UpdateAdded(1, 1, request.client))
        elif isinstance(request, jobs.FinishJob):
            connection.send(jobs.JobDone(1, 1, "9" * 64, len(request.updates), "8" * 64))


def die_over_the_merge_until_it_averages(connection: Connection, _settings: jobs.WorkerSettings) -> None:
    """Killed by SIGKILL over every merge with a distillation, as by a kernel that is out of memory."""
    connection.send(jobs.WorkerReady(os.getpid(), 1, "cpu"))
    job: jobs.Job | None = None
    for request in requests_of(connection):
        if isinstance(request, jobs.Job):
            job = request
        elif isinstance(request, jobs.FinishJob) and job is not None:
            if job.ease < jobs.AVERAGE:
                os.kill(os.getpid(), signal.SIGKILL)
            connection.send(jobs.JobDone(1, 1, "9" * 64, len(request.updates), "8" * 64, job.ease))


THREADS_FILE = "threads.txt"


class NotingConnection:
    """A connection that notes on which thread a request was received."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.receiver = ""

    def recv(self) -> object:
        request = self._connection.recv()
        self.receiver = threading.current_thread().name
        return request

    def send(self, report: object) -> None:
        self._connection.send(report)


def count_and_note_threads(connection: Connection, settings: jobs.WorkerSettings) -> None:
    """Writes the names of the thread that received the request for an update and of the one that serves it to a file."""
    connection.send(jobs.WorkerReady(os.getpid(), 1, "cpu"))
    noting = NotingConnection(connection)
    for request in requests_of(cast(Connection, noting)):
        if isinstance(request, jobs.AddUpdate):
            names = [noting.receiver, threading.current_thread().name]
            (settings.artifacts / THREADS_FILE).write_text("\n".join(names))
            connection.send(jobs.UpdateAdded(1, 1, request.client))
