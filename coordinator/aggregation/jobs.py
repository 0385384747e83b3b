"""The messages between the coordinator and its aggregation worker. Plain values, torch-free."""

from dataclasses import field
from pathlib import Path

from coordinator.updates.robustness import Distances, Figures
from fedcg.values import Value
from fedcg.wire.messages.schemas import OfAttempt
from fedcg.worker_process import STALL_S


class WorkerSettings(Value):
    """The settings of the worker process.

    Attributes:
        threads: torch threads.
        device: "auto", "cpu" or "cuda".
        secret: root of the coordinator's random streams; never logged or sent.
        artifacts: directory of the artifact store.
        spill: directory for the outputs of teacher passes.
        public_data: unlabelled images, or None; at most `public_images` of them are read.
        stall_s: seconds without a message after which a busy worker is replaced.
    """

    threads: int
    device: str
    secret: bytes = field(repr=False)
    artifacts: Path
    spill: Path
    public_data: Path | None = None
    public_images: int = 10_000
    stall_s: float = STALL_S


Updates = tuple[tuple[str, str, int], ...]
"""(client, artifact, weight in examples) of each update to merge."""


SMALLER_BATCHES, AVERAGE = 1, 2
"""Fallbacks if memory runs out or the worker dies: smaller batches, then a weighted average without distillation."""
EASED = {
    SMALLER_BATCHES: "merged with smaller batches, since the aggregation worker ran out of memory or died",
    AVERAGE: "merged by weighted averaging alone, since the aggregation worker ran out of memory or died",
}


class Job(Value):
    """One attempt to aggregate; all ids are artifact ids.

    Attributes:
        limits: updates farther from the base are scaled back.
        ease: 0, `SMALLER_BATCHES` or `AVERAGE`.
    """

    federation: str
    round: int
    attempt: int
    spec: str
    base: str
    server_state: str
    limits: Distances = field(default_factory=dict)
    ease: int = 0


class AddUpdate(Value):
    """Run the teacher pass of a client's update."""

    client: str
    artifact: str


class AssessJob(Value):
    """Measure these updates, (client, artifact) sorted by client, against each other."""

    updates: tuple[tuple[str, str], ...]


class OpenedSum(Value):
    """The correction that removes all masks except the cohort's from a sum of sealed numbers; empty if the sum can't be opened.

    Attributes:
        groups: the digest of the members' announcements and the clients of each group.
        correction: 4 bytes per number, little endian, to add to the sum.
    """

    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    correction: bytes = b""


class FinishJob(Value):
    """Merge exactly these updates, sorted by client. Limits other than the job's need another teacher pass.

    Attributes:
        opened: the correction for partly sealed updates.
    """

    updates: Updates
    limits: Distances = field(default_factory=dict)
    opened: OpenedSum = OpenedSum()


Request = Job | AddUpdate | AssessJob | FinishJob


class WorkerReady(Value):
    """The worker has imported torch and accepts requests."""

    pid: int
    threads: int
    device: str


class PhaseStarted(OfAttempt):
    """A teacher pass or the distillation has started."""

    pid: int
    phase: str
    client: str


class Progressed(OfAttempt):
    """Progress of a phase; `loss`: mean loss over the last recorded steps of a distillation."""

    pid: int
    phase: str
    step: int
    steps: int
    loss: float | None = None


class UpdateAdded(OfAttempt):
    """The teacher pass of a client is stored durably."""

    client: str


class UpdateFailed(OfAttempt):
    """One client's update can't be merged. The job continues; the coordinator must request a merge without that update."""

    client: str
    reason: str


class Assessed(OfAttempt):
    """The figures of an `AssessJob`, by client."""

    figures: dict[str, Figures]


class JobEased(OfAttempt):
    """The job continues with less memory; `ease` as in `Job`."""

    ease: int
    reason: str


class JobDone(OfAttempt):
    """Aggregate and server state are in the artifact store. `ease` as in `Job`; `sum_lost`: why no sum was opened, or ""."""

    aggregate: str
    size: int
    server_state: str
    ease: int = 0
    sum_lost: str = ""


class JobFailed(OfAttempt):
    """The updates can't be merged; a retry would fail the same way."""

    reason: str


class WorkerBroke(Value):
    """This process can't use its accelerator any more. It exits, and a new process retries."""

    reason: str


class WorkerDied(Value):
    """The worker has exited and is being restarted; `reason` is set if it reported one or hung."""

    pid: int
    deaths: int
    reason: str = ""


JobReply = PhaseStarted | Progressed | UpdateAdded | UpdateFailed | Assessed | JobEased | JobDone | JobFailed
Reply = WorkerReady | JobReply | WorkerBroke
WorkerEvent = WorkerReady | JobReply | WorkerDied
