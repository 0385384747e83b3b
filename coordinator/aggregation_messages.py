"""What the coordinator and its aggregation worker say to each other over their pipe; values only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedcg.watchdog import STALL_S


@dataclass(frozen=True)
class WorkerSettings:
    """What the worker may use.

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
    secret: bytes
    artifacts: Path
    spill: Path
    public_data: Path | None = None
    public_images: int = 10_000
    stall_s: float = STALL_S

    def __repr__(self) -> str:
        return f"WorkerSettings(threads={self.threads}, device={self.device!r})"


@dataclass(frozen=True)
class Job:
    """One attempt to aggregate; all ids are artifact ids."""

    federation: str
    round: int
    attempt: int
    spec: str
    base: str
    server_state: str


@dataclass(frozen=True)
class AddUpdate:
    """Do the teacher pass of a client's update."""

    client: str
    artifact: str


@dataclass(frozen=True)
class FinishJob:
    """Merge exactly these updates: (client, artifact) pairs sorted by client."""

    updates: tuple[tuple[str, str], ...]


Request = Job | AddUpdate | FinishJob


@dataclass(frozen=True)
class WorkerReady:
    """The worker has imported torch and waits."""

    pid: int
    threads: int
    device: str


@dataclass(frozen=True)
class PhaseStarted:
    """A teacher pass or the distillation begins."""

    pid: int
    round: int
    attempt: int
    phase: str
    client: str


@dataclass(frozen=True)
class Progressed:
    """How far a phase is."""

    pid: int
    round: int
    attempt: int
    phase: str
    step: int
    steps: int


@dataclass(frozen=True)
class UpdateAdded:
    """The teacher pass of a client is durable."""

    round: int
    attempt: int
    client: str


@dataclass(frozen=True)
class JobDone:
    """Aggregate and server state are in the artifact store."""

    round: int
    attempt: int
    aggregate: str
    size: int
    server_state: str


@dataclass(frozen=True)
class JobFailed:
    """The updates can't be merged; another try would fail the same way."""

    round: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class WorkerBroke:
    """The worker's accelerator can't be used by this process any more: it ends, and another one tries again."""

    reason: str


@dataclass(frozen=True)
class WorkerDied:
    """The worker is gone; another one is being started. `reason` when it said why it ends, or hung."""

    pid: int
    deaths: int
    reason: str = ""


Reply = WorkerReady | PhaseStarted | Progressed | UpdateAdded | JobDone | JobFailed | WorkerBroke
WorkerEvent = Reply | WorkerDied
