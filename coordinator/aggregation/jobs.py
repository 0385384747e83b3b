"""The messages between the coordinator and its aggregation worker; values only, torch-free."""

from dataclasses import dataclass, field
from pathlib import Path

from coordinator.updates.robustness import Distances, Figures
from fedcg.wire.messages.schemas import OfAttempt
from fedcg.worker_process import STALL_S


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of the worker process.

    Attributes:
        threads: torch threads.
        device: "auto", "cpu" or "cuda".
        secret: root of the coordinator's random streams; never shown, never sent.
        artifacts: directory of the artifact store.
        spill: directory for the rows of teacher passes.
        public_data: unlabelled images, or None; at most `public_images` of them are read.
        stall_s: seconds without a sign of life after which a worker that has work is replaced.
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
"""(client, artifact, the number of examples that it counts for) of each update to be merged."""


SMALLER_BATCHES, AVERAGE = 1, 2
"""How a job is eased when memory runs out or the worker dies: smaller batches, then a weighted average without distillation."""
EASED = {
    SMALLER_BATCHES: "merged with smaller batches, since the aggregation worker ran out of memory or died",
    AVERAGE: "merged by weighted averaging alone, since the aggregation worker ran out of memory or died",
}


@dataclass(frozen=True)
class Job:
    """One attempt to aggregate; all ids are artifact ids.

    Attributes:
        limits: an update farther from the base is scaled back.
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


@dataclass(frozen=True)
class AddUpdate:
    """Do the teacher pass of a client's update."""

    client: str
    artifact: str


@dataclass(frozen=True)
class AssessJob:
    """Measure these updates, (client, artifact) sorted by client, beside each other."""

    updates: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class OpenedSum:
    """What takes all masks but the cohort's off a sum of sealed numbers: empty where it can't be opened.

    Attributes:
        groups: of each group, the digest of its members' announcements, and the clients in it.
        correction: 4 bytes a number, little endian, to be added to the sum.
    """

    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    correction: bytes = b""


@dataclass(frozen=True)
class FinishJob:
    """Merge exactly these updates, sorted by client; other limits than the job's take another teacher pass.

    Attributes:
        opened: of updates that are sealed in part.
    """

    updates: Updates
    limits: Distances = field(default_factory=dict)
    opened: OpenedSum = OpenedSum()


Request = Job | AddUpdate | AssessJob | FinishJob


@dataclass(frozen=True)
class WorkerReady:
    """The worker has imported torch and takes requests."""

    pid: int
    threads: int
    device: str


@dataclass(frozen=True)
class PhaseStarted(OfAttempt):
    """A teacher pass or the distillation begins."""

    pid: int
    phase: str
    client: str


@dataclass(frozen=True)
class Progressed(OfAttempt):
    """How far a phase is; `loss`: the mean of its last steps that were looked at, of a distillation."""

    pid: int
    phase: str
    step: int
    steps: int
    loss: float | None = None


@dataclass(frozen=True)
class UpdateAdded(OfAttempt):
    """The teacher pass of a client is durable."""

    client: str


@dataclass(frozen=True)
class UpdateFailed(OfAttempt):
    """One client's update can't be merged. The job continues; the coordinator has to request a merge without that update."""

    client: str
    reason: str


@dataclass(frozen=True)
class Assessed(OfAttempt):
    """What the updates of an `AssessJob` do, by client."""

    figures: dict[str, Figures]


@dataclass(frozen=True)
class JobEased(OfAttempt):
    """The job goes on with less memory; `ease` as in `Job`."""

    ease: int
    reason: str


@dataclass(frozen=True)
class JobDone(OfAttempt):
    """Aggregate and server state are in the artifact store; `ease` as in `Job`; `sum_lost`: why it has no sum that was opened, or ""."""

    aggregate: str
    size: int
    server_state: str
    ease: int = 0
    sum_lost: str = ""


@dataclass(frozen=True)
class JobFailed(OfAttempt):
    """The updates can't be merged; another try would fail the same way."""

    reason: str


@dataclass(frozen=True)
class WorkerBroke:
    """The worker's accelerator can't be used by this process any more: it ends, and another one tries again."""

    reason: str


@dataclass(frozen=True)
class WorkerDied:
    """The worker has ended and another one is being started; `reason` is set when it reported one, or hung."""

    pid: int
    deaths: int
    reason: str = ""


JobReply = PhaseStarted | Progressed | UpdateAdded | UpdateFailed | Assessed | JobEased | JobDone | JobFailed
Reply = WorkerReady | JobReply | WorkerBroke
WorkerEvent = WorkerReady | JobReply | WorkerDied
