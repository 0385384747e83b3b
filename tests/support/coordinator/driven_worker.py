"""The aggregation worker's handle, driven as by the service's loop, and child processes that replace the worker and the trainer."""

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
    """Collects the events of the worker's replies."""

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
        """Continue until an event of one of these kinds, and return it."""
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
        """Continue for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.worker.tick()
            with contextlib.suppress(queue.Empty):
                self.events += self.worker.follow(self._replies.get(timeout=min(left, 0.05)))


STALL_S = 1.0


def work_slowly_then_idle(connection: Connection, _config: AgentConfig, _log: LogSettings) -> None:
    connection.send(TrainerReady())
    for command in requests_of(connection):  # when idle it may be silent forever
        idle = threading.Event()
        for _ in range(8):  # twice the allowed silence
            idle.wait(STALL_S / 4)
            connection.send(Working())
        connection.send(RoundCommitted(command.round_attempt))


def serve(connection: Connection, settings: jobs.WorkerSettings, first_time: Callable[[Connection], None]) -> None:
    """Work like the real worker without torch; the first request in its first life runs `first_time`."""
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
    """Run the real worker, with an error of the GPU when its job runner first opens a job."""
    import coordinator.aggregation.worker as real

    marker = settings.artifacts / "was here"

    class Runner(real.JobRunner):
        def _open(self) -> None:
            if not marker.exists():
                marker.touch()
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            self._send(jobs.JobDone(1, 1, "9" * 64, 1, "8" * 64))

        def serve(self, request: jobs.AddUpdate | jobs.AssessJob | jobs.FinishJob) -> None:
            """Do nothing: the job is done."""

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
    """Run a worker that is killed at every merge with a distillation, as if the kernel were out of memory."""
    connection.send(jobs.WorkerReady(os.getpid(), 1, "cpu"))
    job: jobs.Job | None = None
    for request in requests_of(connection):
        if isinstance(request, jobs.Job):
            job = request
        elif isinstance(request, jobs.FinishJob) and job is not None:
            if job.ease < jobs.AVERAGE:
                os.kill(os.getpid(), signal.SIGKILL)
            connection.send(jobs.JobDone(1, 1, "9" * 64, len(request.updates), "8" * 64, job.ease))
