"""The coordinator's handle on its aggregation worker: starts it, tells it what is wanted, starts it again when it dies.

Torch-free and never blocking: what is wanted is remembered here and told again to every new worker process. One thread
listens to the worker and another one tells it: in a long teacher pass it reads nothing, and its pipe may be full both ways.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from coordinator.aggregation.worker import worker_main
from coordinator.aggregation.worker_messages import (
    AddUpdate,
    FinishJob,
    Job,
    JobDone,
    JobFailed,
    JobReply,
    PhaseStarted,
    Reply,
    Request,
    UpdateAdded,
    UpdateFailed,
    Updates,
    WorkerBroke,
    WorkerDied,
    WorkerEvent,
    WorkerReady,
    WorkerSettings,
)
from coordinator.updates.robustness import Distances
from fedcg.worker_process import POLL_S, Watchdog

MAX_DEATHS = 5
"""Deaths over one update after which it is rejected; over anything else, after which the job is given up."""
STOP_TIMEOUT_S = 1.0
MAX_BACKOFF_S = 10.0

log = logging.getLogger(__name__)


class AggregationWorker:
    """Keeps one worker process alive and its job going; one that hangs, or whose card broke, is replaced.

    Args:
        settings: what the worker may use.
        notify: gets every event, on a thread of this object; it must only enqueue.
    """

    def __init__(self, settings: WorkerSettings, notify: Callable[[WorkerEvent], None]) -> None:
        self._watchdog = Watchdog(settings.stall_s)
        self._unanswered = 0
        self._under_way = ""  # the client whose update the worker counts now
        self._reason = ""
        self._settings = settings
        self._notify = notify
        self._lock = threading.Condition()
        self._wanted: list[Request] = []
        self._told = 0  # so many of them were sent to the worker that is there now
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._teller: threading.Thread | None = None
        self._stopping = threading.Event()
        self._deaths: Counter[str] = Counter()  # by the client whose update was under way; "" for none
        self._thread = threading.Thread(target=self._supervise, name="aggregation", daemon=True)

    def start(self) -> None:
        """Start the worker in the background; requests may come at once."""
        self._thread.start()

    def open(self, job: Job) -> None:
        """Begin an attempt; whatever was wanted before is forgotten."""
        with self._lock:
            self._forget()
            self._deaths.clear()
            self._wanted.append(job)
            self._lock.notify_all()

    def add(self, client: str, artifact: str) -> None:
        """Have the teacher pass of a stored update done. Asking twice does no harm."""
        with self._lock:
            self._ask(AddUpdate(client, artifact))

    def finish(self, updates: Updates, limits: Distances) -> None:
        """Have the updates of the open job merged."""
        with self._lock:
            self._ask(FinishJob(tuple(sorted(updates)), limits))

    def stop(self) -> None:
        """End the worker at once; nothing it has not stored is worth waiting for."""
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is not None:
            process.kill()
        self._thread.join(STOP_TIMEOUT_S)

    def _ask(self, request: AddUpdate | FinishJob) -> None:
        """Have a request served for the open job; without one (it failed, or is done) nothing would answer it."""
        if self._wanted and request not in self._wanted:
            self._wanted.append(request)
            self._lock.notify_all()

    def _forget(self) -> None:
        self._wanted, self._told, self._unanswered, self._under_way = [], 0, 0, ""

    def _drop(self, client: str) -> None:
        """Ask no worker any more for what an update that can't be merged is part of."""

        def is_kept(request: Request) -> bool:
            if isinstance(request, AddUpdate):
                return request.client != client
            return not isinstance(request, FinishJob) or all(client != name for name, *_ in request.updates)

        self._told = sum(map(is_kept, self._wanted[: self._told]))
        self._wanted = list(filter(is_kept, self._wanted))

    def _tell(self, connection: Connection) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._connection is not connection or self._told < len(self._wanted))
                if self._connection is not connection:
                    return
                request = self._wanted[self._told]
                self._told += 1
                if not isinstance(request, Job):
                    self._unanswered += 1
                    self._watchdog.alive()
            try:
                connection.send(request)
            except OSError:
                return  # the supervising thread sees the end of the pipe and starts another worker

    def _supervise(self) -> None:
        while not self._stopping.is_set():
            connection = self._spawn()
            if connection is None:
                return
            try:
                while True:
                    self._await(connection)
                    self._take(connection.recv())
            except (EOFError, OSError):
                self._bury()

    def _await(self, connection: Connection) -> None:
        """Wait for a reply; a worker that has work and gives no sign of life is killed, which ends its pipe."""
        while not connection.poll(POLL_S):
            with self._lock:
                process = self._process
                if process is not None and not self._reason and self._watchdog.is_hanging():
                    self._reason = self._watchdog.reason
                    process.kill()  # also ends a stopped process

    def _spawn(self) -> Connection | None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        with self._lock:
            if self._stopping.is_set():
                return None
            self._process = context.Process(
                target=worker_main, args=(theirs, self._settings), name="fedcg-aggregation", daemon=True
            )
            self._process.start()
            self._connection, self._reason, self._unanswered, self._under_way = ours, "", 0, ""
            self._watchdog.started()
        theirs.close()
        return ours

    def _take(self, reply: Reply) -> None:
        with self._lock:
            self._watchdog.alive()
            if isinstance(reply, WorkerBroke):
                self._reason = reply.reason
                return
            if isinstance(reply, WorkerReady):
                assert self._connection is not None
                self._told = 0
                self._teller = threading.Thread(
                    target=self._tell, args=(self._connection,), name="aggregation-requests", daemon=True
                )
                self._teller.start()
            elif self._is_about_current_job(reply):
                self._note(reply)
            if self._unanswered <= 0:
                self._watchdog.rest()
        self._notify(reply)

    def _note(self, reply: JobReply) -> None:
        """How far the open job is."""
        if isinstance(reply, PhaseStarted):
            self._under_way = reply.client
        elif isinstance(reply, JobDone | JobFailed):
            self._forget()
        elif isinstance(reply, UpdateAdded | UpdateFailed):
            self._unanswered -= 1
            self._under_way = ""
            if isinstance(reply, UpdateFailed):
                self._drop(reply.client)

    def _is_about_current_job(self, reply: JobReply) -> bool:
        job = self._job()
        return job is not None and (job.round, job.attempt) == (reply.round, reply.attempt)

    def _job(self) -> Job | None:
        return next((request for request in self._wanted if isinstance(request, Job)), None)

    def _bury(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
            teller, self._teller = self._teller, None
            self._lock.notify_all()
            client, job = self._under_way, self._job()
            is_busy = teller is None or self._unanswered > 0  # an idle worker was ended by somebody else
            self._deaths[client] += is_busy
            deaths = max(1, self._deaths[client])
            failed: UpdateFailed | JobFailed | None = None
            if deaths >= MAX_DEATHS and job is not None:
                over = f"the update of {client}" if client else "the same updates"
                reason = f"the aggregation worker died {deaths} times over {over} ({self._reason or 'out of memory?'})"
                where = (job.round, job.attempt)
                failed = UpdateFailed(*where, client, reason) if client else JobFailed(*where, reason)
                self._note(failed)
        if teller is not None:
            teller.join()  # nobody reads at the other end, so it does not wait for room
        if connection is not None:
            connection.close()
        if process is not None:
            process.join(STOP_TIMEOUT_S)
        if self._stopping.is_set():
            return
        pid = (process.pid or 0) if process is not None else 0
        log.warning("the aggregation worker (process %d) died; starting another one. %s", pid, self._reason)
        self._notify(WorkerDied(pid, deaths, self._reason))
        if failed is not None:
            self._notify(failed)
        if deaths > 1:
            self._stopping.wait(min(0.1 * 2.0**deaths, MAX_BACKOFF_S))
