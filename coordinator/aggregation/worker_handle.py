"""The coordinator's handle on its aggregation worker: sends it work and restarts it if it dies.

Torch-free and never blocking; used by one thread. Keeps the open job and its requests, and sends them again to every new worker process.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from coordinator.aggregation import jobs
from coordinator.aggregation.worker import worker_main
from coordinator.updates.robustness import Distances
from fedcg.worker_process import Exited, WorkerProcess

MAX_DEATHS = 5
"""Deaths of the worker after which the update in progress is rejected, or the job fails if there is none."""
EASE_EVERY = 2
"""Deaths over the same work after which the job is eased; for a single update, only to smaller batches."""
MAX_BACKOFF_S = 10.0


class AggregationWorker:
    """Keeps one worker process running with its job. Replaces it if it hangs or loses its GPU.

    Args:
        settings: settings of the worker process.
        deliver: called on a thread with every reply of the process; must only enqueue it for `follow`.
    """

    def __init__(self, settings: jobs.WorkerSettings, deliver: Callable[[jobs.Reply | Exited], None]) -> None:
        self._process = WorkerProcess("fedcg-aggregation", worker_main, (settings,), settings.stall_s, deliver)
        self._wanted: list[jobs.Request] = []
        self._is_ready = False
        self._is_stopped = True
        self._restart_at: float | None = None
        self._under_way = ""  # the client whose update the worker is processing
        self._broke = ""  # the reason that the process reported before it exited
        self._deaths: Counter[str] = Counter()  # by the client whose update was in progress; "" for none

    def start(self) -> None:
        """Start the worker; requests may be sent at once."""
        self._is_ready, self._restart_at, self._under_way, self._broke = False, None, "", ""
        self._is_stopped = False
        self._process.start()

    def open(self, job: jobs.Job) -> None:
        """Begin an attempt and drop requests of earlier ones. The first attempt starts the worker."""
        if self._is_stopped:
            self.start()
        self._deaths.clear()
        self._wanted, self._under_way = [job], ""
        self._send(job)

    def add(self, client: str, artifact: str) -> None:
        """Request the teacher pass of a stored update; a repeated request changes nothing."""
        self._ask(jobs.AddUpdate(client, artifact))

    def assess(self, updates: Mapping[str, str]) -> None:
        """Request the figures of the open job's updates (artifacts by client)."""
        self._ask(jobs.AssessJob(tuple(sorted(updates.items()))))

    def finish(self, updates: jobs.Updates, limits: Distances, opened: jobs.OpenedSum = jobs.OpenedSum()) -> None:
        """Request the merge of the open job's updates."""
        self._ask(jobs.FinishJob(tuple(sorted(updates)), limits, opened))

    def tick(self) -> None:
        """Start a worker to replace one that died, when its delay is over."""
        if self._restart_at is not None and time.monotonic() >= self._restart_at:
            self.start()

    def stop(self) -> None:
        """Kill the worker; results that are not stored are computed again."""
        self._is_stopped, self._is_ready, self._restart_at = True, False, None
        self._process.stop()

    def follow(self, reply: jobs.Reply | Exited) -> tuple[jobs.WorkerEvent, ...]:
        """Handle a reply of the process; return the resulting events of the round."""
        if isinstance(reply, Exited):
            return () if self._is_stopped else self._died(reply)
        if isinstance(reply, jobs.WorkerBroke):
            self._broke = reply.reason
            return ()
        if isinstance(reply, jobs.WorkerReady):
            self._is_ready = True
            for request in self._wanted:
                self._process.send(request)
        elif self._is_about_open_job(reply):
            self._note(reply)
        return (reply,)

    def _ask(self, request: jobs.AddUpdate | jobs.AssessJob | jobs.FinishJob) -> None:
        """Send a request for the open job. Without one (failed or done), the worker would not reply."""
        if self._wanted and request not in self._wanted:
            self._wanted.append(request)
            self._send(request)

    def _send(self, request: jobs.Request) -> None:
        if self._is_ready:
            self._process.send(request)

    def _note(self, reply: jobs.JobReply) -> None:
        """Record the progress of the open job."""
        if isinstance(reply, jobs.PhaseStarted):
            self._under_way = reply.client
        elif isinstance(reply, jobs.JobEased):
            eased = (replace(each, ease=reply.ease) if isinstance(each, jobs.Job) else each for each in self._wanted)
            self._wanted = list(eased)
        elif isinstance(reply, jobs.JobDone | jobs.JobFailed):
            self._wanted, self._under_way = [], ""
        elif isinstance(reply, jobs.UpdateAdded | jobs.UpdateFailed):
            self._under_way = ""
            if isinstance(reply, jobs.UpdateFailed):
                self._wanted = [request for request in self._wanted if not _concerns(request, reply.client)]

    def _is_about_open_job(self, reply: jobs.JobReply) -> bool:
        job = self._job
        return job is not None and (job.round, job.attempt) == (reply.round, reply.attempt)

    @property
    def _job(self) -> jobs.Job | None:
        return next((request for request in self._wanted if isinstance(request, jobs.Job)), None)

    def _died(self, exited: Exited) -> tuple[jobs.WorkerEvent, ...]:
        client, job = self._under_way, self._job
        self._deaths[client] += exited.was_busy  # an idle worker was killed by another process
        deaths, reason = max(1, self._deaths[client]), exited.reason or self._broke
        self._is_ready, self._under_way, self._broke = False, "", ""
        self._restart_at = time.monotonic() + (min(0.1 * 2.0**deaths, MAX_BACKOFF_S) if deaths > 1 else 0.0)
        died = jobs.WorkerDied(exited.pid, deaths, reason)
        if deaths < MAX_DEATHS or job is None:
            return died, *self._eased(job, client, reason or "the worker died, possibly out of memory")
        over = f"the update of {client}" if client else "the same updates"
        reason = f"the aggregation worker died {deaths} times with {over} ({reason or 'out of memory?'})"
        failed: jobs.UpdateFailed | jobs.JobFailed = jobs.JobFailed(job.round, job.attempt, reason)
        if client:
            failed = jobs.UpdateFailed(job.round, job.attempt, client, reason)
        self._note(failed)
        return (died, failed)

    def _eased(self, job: jobs.Job | None, client: str, reason: str) -> tuple[jobs.JobEased, ...]:
        """Ease the job if this was not the first death over the same work."""
        deaths, most = self._deaths[client], jobs.SMALLER_BATCHES if client else jobs.AVERAGE
        if job is None or not deaths or deaths % EASE_EVERY or job.ease >= most:
            return ()
        eased = jobs.JobEased(job.round, job.attempt, job.ease + 1, reason)
        self._note(eased)
        return (eased,)


def _concerns(request: jobs.Request, client: str) -> bool:
    """Whether a request concerns a client's update."""
    if isinstance(request, jobs.AddUpdate):
        return request.client == client
    return isinstance(request, jobs.AssessJob | jobs.FinishJob) and any(client == name for name, *_ in request.updates)
