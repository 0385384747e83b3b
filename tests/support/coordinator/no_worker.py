"""An aggregation worker without learning, and federations that share one tensor of any size."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from coordinator.aggregation import jobs
from coordinator.aggregation.worker_handle import AggregationWorker
from coordinator.updates.robustness import Distances, Figures
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import ArtifactHeader, pack
from fedcg.wire.parts import Part, ReportField, TensorLayout
from tests.support.coordinator.toy_artifacts import tiny_spec


@dataclass
class NoWorker(AggregationWorker):
    """Every round's aggregate is its base."""

    settings: jobs.WorkerSettings
    notify: Callable[[jobs.WorkerReady | jobs.Assessed | jobs.JobDone], None]
    job: jobs.Job | None = None

    def start(self) -> None:
        self.notify(jobs.WorkerReady(0, 1, "cpu"))

    def open(self, job: jobs.Job) -> None:
        self.job = job

    def add(self, client: str, artifact: str) -> None:
        """No teacher pass."""

    def assess(self, updates: Mapping[str, str]) -> None:
        assert self.job is not None
        self.notify(jobs.Assessed(self.job.round, self.job.attempt, dict.fromkeys(updates, Figures())))

    def finish(self, updates: jobs.Updates, limits: Distances, opened: jobs.OpenedSum = jobs.OpenedSum()) -> None:
        assert self.job is not None
        size = ArtifactStore(self.settings.artifacts).path(self.job.base).stat().st_size
        self.notify(jobs.JobDone(self.job.round, self.job.attempt, self.job.base, size, self.job.server_state))

    def follow(self, reply: Any) -> tuple[jobs.WorkerEvent, ...]:
        return (reply,)

    def tick(self) -> None:
        """Do not restart anything."""

    def stop(self) -> None:
        """Nothing runs."""


def classifier_spec(federation: str, size: int, rounds: int) -> FederationSpec:
    """A federation that shares one tensor of `size` bytes."""
    layouts = {Part.CLASSIFIER: (TensorLayout(name="weight", dtype="float32", shape=(size // 4,)),)}
    only = {"classes": ("x", "y"), "params": {}, "upload": (Part.CLASSIFIER,), "report": (ReportField.EXAMPLES,)}
    return tiny_spec(rounds).model_copy(update={"federation": federation, "layouts": layouts, **only})


def packed(spec: FederationSpec, seed: str, **header: Any) -> bytes:
    """Return an artifact of a federation of `classifier_spec` that zstd can't compress."""
    count = spec.layouts[Part.CLASSIFIER][0].shape[0]
    # Random bytes as weights, with moderate exponents, so that the norm stays within its bound.
    words = np.frombuffer(random.Random(seed).randbytes(count * 4), dtype="<u4")
    weights = ((words & 0x807FFFFF) | 0x3A000000).view("<f4").astype(np.float32)
    head = ArtifactHeader(method=spec.method, federation=spec.federation, **header)
    return pack(head, {Part.CLASSIFIER: {"weight": weights}})
