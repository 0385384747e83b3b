"""The process that uses torch and the GPU: runs teacher passes as updates arrive, then the merge. Started by `worker_handle`.

It may be killed at any point. Outputs of finished teacher passes are on disk under the attempt's name. Everything else is a function of
the stored updates, the spec and the coordinator's secret, so the next worker computes the same bytes.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from coordinator.aggregation import jobs
from coordinator.updates import robustness
from coordinator.updates.validation import base_in, unpack_update
from fedcg.errors import told
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.parts import Part, Report
from fedcg.worker_process import requests_of

if TYPE_CHECKING:
    import torch

    from fedcg.learning.method import Aggregate, Aggregator, ServerState, Update
    from fedcg.learning.spec import ImageForm

PROGRESS_EVERY_S = 0.2
EASED_ROWS = 32
"""Batch size of a teacher pass if memory is short."""
Send = Callable[[jobs.Reply], None]
Public = Callable[["ImageForm"], "torch.Tensor | None"]


def worker_main(connection: Connection, settings: jobs.WorkerSettings) -> None:
    """Serve requests until the coordinator disconnects."""
    import torch

    torch.set_num_threads(settings.threads)
    torch.set_num_interop_threads(1)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    connection.send(jobs.WorkerReady(os.getpid(), settings.threads, device))
    runner: JobRunner | None = None
    public = public_images(settings.public_data, settings.public_images)
    for request in requests_of(connection):
        if isinstance(request, jobs.Job):
            runner = None
            gc.collect()  # aggregators are in reference cycles: without this, the tensors of many ended jobs would stay in memory
            runner = JobRunner(request, settings, device, connection.send, public)
        elif runner is not None:
            runner.serve(request)


def public_images(data: Path | None, most: int) -> Public:
    """Return a function that reads the public images for an image form, once: [N, C, H, W] uint8, or None without any.

    Raises:
        DataError: raised by that function if the images can't be read.
    """
    from fedcg.learning.data.public_images import read_public

    @lru_cache(maxsize=1)
    def read(form: ImageForm) -> torch.Tensor | None:
        return None if data is None else read_public(data, form, most).images

    return read


class JobRunner:
    """Runs one job: turns requests into calls of the method's aggregator. Every request gets one reply."""

    def __init__(self, job: jobs.Job, settings: jobs.WorkerSettings, device: str, send: Send, public: Public) -> None:
        self._job = job
        self._settings = settings
        self._device = device
        self._send = send
        self._public = public
        self._store = ArtifactStore(settings.artifacts)
        self._counted: dict[str, int]  # weight of each client in the aggregator
        self._movements: dict[str, robustness.Movement] = {}
        self._has_diverged = False
        self._failed = not self._guarded(self._open)

    def serve(self, request: jobs.AddUpdate | jobs.AssessJob | jobs.FinishJob) -> None:
        """Serve a request and reply. A failure not caused by a single update is reported once and ends the job."""
        if self._failed:
            return
        serve: dict[type, Callable[[Any], None]] = {
            jobs.AddUpdate: self._add,
            jobs.AssessJob: self._assess,
            jobs.FinishJob: self._finish,
        }
        self._failed = not self._guarded(partial(serve[type(request)], request))

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Run work, again with less memory if it runs out; return whether it succeeded."""
        from fedcg.learning.training.device_errors import is_out_of_memory

        while True:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the run loop of this process; the operator gets the reason
                reason = self._reason(error)
                if not is_out_of_memory(error) or self._job.ease >= jobs.AVERAGE:
                    self._send(jobs.JobFailed(self._job.round, self._job.attempt, reason))
                    return False
            else:
                return True
            self._job = replace(self._job, ease=self._job.ease + 1)
            self._send(jobs.JobEased(self._job.round, self._job.attempt, self._job.ease, reason))
            if work != self._open and not self._guarded(self._open):
                return False

    def _reason(self, error: Exception) -> str:
        """The error's text for the operator. If the error leaves the accelerator unusable, this process exits."""
        from fedcg.learning.training.device_errors import BROKEN_EXIT, is_sticky

        reason = told(error)[:280]
        if is_sticky(error):
            self._send(jobs.WorkerBroke(reason))
            os._exit(BROKEN_EXIT)
        return reason

    def _open(self) -> None:
        from coordinator.aggregation.server_state import decode_extras, unpack_aggregate
        from fedcg.learning.aggregation.averaging import DirectorySpill, parts_average
        from fedcg.learning.method import Callbacks, Machine, RoundContext, ServerState
        from fedcg.learning.registry import get_method
        from fedcg.learning.seeds import Streams
        from fedcg.learning.spec import FederationSpec

        job = self._job
        self._spec = FederationSpec.parse(self._store.get(job.spec))
        self._method = get_method(self._spec.method)
        packed = self._store.get(job.base)
        self._yardstick = robustness.Yardstick(base_in(packed, self._spec, job.base), {})
        aggregate = unpack_aggregate(packed, self._spec, self._method)
        state = ServerState(aggregate, decode_extras(self._store.get(job.server_state)))
        steps = Throttle(job, self._send)
        context = RoundContext(
            spec=self._spec,
            round=job.round,
            attempt=job.attempt,
            streams=Streams(self._settings.secret).at(job.federation, job.round, job.attempt),
            machine=Machine(self._device, graphs=not job.ease, most_rows=EASED_ROWS if job.ease else None),
            callbacks=Callbacks(steps, steps.watch_loss),
            public=self._public(self._spec.image) if self._method.needs.public else None,
        )
        self._streams, self._before = context.streams, state
        folder = spill_directory(self._settings.spill, job.federation, job.round, job.attempt)

        def start(limits: robustness.Distances) -> Aggregator:
            # clipped updates and smaller batches have different outputs
            plan = repr((limits, job.ease) if job.ease else limits)
            rows = DirectorySpill(folder / sha256(plan.encode()).hexdigest()[:16])
            if job.ease >= jobs.AVERAGE:
                clear = self._spec.shared_in(job.round) - frozenset(self._spec.sealed)
                return parts_average(clear, state, rows)
            return self._method.aggregator(state, context, rows)

        self._start = start
        self._begin_again(job.limits)

    def _begin_again(self, limits: robustness.Distances) -> None:
        """Restart without updates: a counted update now has another weight or other limits, or is not merged."""
        self._limits, self._counted, self._aggregator = limits, {}, self._start(limits)

    def _add(self, request: jobs.AddUpdate) -> None:
        if self._counts(request.client, request.artifact, 0):
            self._send(jobs.UpdateAdded(self._job.round, self._job.attempt, request.client))

    def _assess(self, request: jobs.AssessJob) -> None:
        for client, artifact in request.updates:
            if client not in self._counted and not self._counts(client, artifact, 0):
                return
        figures = robustness.figures_of({client: self._movements[client] for client, _ in request.updates})
        self._send(jobs.Assessed(self._job.round, self._job.attempt, figures))

    def _counts(self, client: str, artifact: str, weight: int) -> bool:
        """Add an update to the aggregator. If that fails, report it; the round continues without this update."""
        from fedcg.learning.training.device_errors import is_of_this_machine

        job = self._job
        self._send(jobs.PhaseStarted(job.round, job.attempt, os.getpid(), "teacher", client))
        try:
            update = self._update(client, artifact, weight)
            self._aggregator.add(update)
        except Exception as error:
            if is_of_this_machine(error):
                raise
            self._reject(client, self._reason(error))
            return False
        self._counted[client] = update.examples
        return True

    def _reject(self, client: str, reason: str) -> None:
        self._begin_again(self._limits)  # this update may be partly counted
        self._send(jobs.UpdateFailed(self._job.round, self._job.attempt, client, reason))

    def _finish(self, request: jobs.FinishJob) -> None:
        """Merge; reads outputs of teacher passes from disk for clients counted with another weight or not yet."""
        from fedcg.learning.method import DivergedError
        from fedcg.wire.errors import CodecError

        weights = {client: weight for client, _, weight in request.updates}
        is_other = any(weights.get(client) != weight for client, weight in self._counted.items())
        if is_other or request.limits != self._limits:
            self._begin_again(request.limits)
        for client, artifact, weight in request.updates:
            if client not in self._counted and not self._counts(client, artifact, weight):
                return
        self._send(jobs.PhaseStarted(self._job.round, self._job.attempt, os.getpid(), "distil", ""))
        try:
            self._merge(request)
        except (DivergedError, CodecError) as error:
            if self._has_diverged or len(weights) < 2:
                raise
            self._has_diverged = True
            farthest = robustness.outlier({client: self._movements[client].distances for client in weights})
            self._reject(farthest, f"the merge diverged, and this update is the farthest from the base: {error}"[:280])

    def _merge(self, request: jobs.FinishJob) -> None:
        from coordinator.aggregation.server_state import check_parts, encode_extras, pack_aggregate

        job = self._job
        updates = {
            client: partial(self._update, client, artifact, weight) for client, artifact, weight in request.updates
        }
        aggregate, state = self._aggregator.finish(updates)
        lost = ""
        if self._spec.sealed:
            aggregate, state, lost = self._with_sealed(request, aggregate, state)
        check_parts(aggregate.parts, self._spec, self._method)
        packed = pack_aggregate(self._spec, aggregate, job.round, job.attempt, job.base, self._device)
        stored, extras = self._store.put(packed), self._store.put(encode_extras(state))
        self._send(jobs.JobDone(job.round, job.attempt, stored, len(packed), extras, job.ease, lost))

    def _with_sealed(
        self, request: jobs.FinishJob, aggregate: Aggregate, state: ServerState
    ) -> tuple[Aggregate, ServerState, str]:
        """The clear merge with the sum that only the cohort can read, and why this round's sum is missing, or ""."""
        from fedcg.learning.aggregation.sealed_means import merged
        from fedcg.learning.tensor_conversion import to_weights
        from fedcg.wire.messages.schemas import SealedSum
        from fedcg.wire.sealed_numbers import added

        before, opened, spec = self._before.aggregate, request.opened, self._spec
        sealed, lost, parts = before.parts[Part.SEALED], "", spec.sealed_in(self._job.round)
        sums = cast("tuple[SealedSum, ...]", before.sums)
        names = frozenset(name for _, names in opened.groups for name in names)
        told = {client: artifact for client, artifact, _ in request.updates if client in names}
        if names - told.keys():
            lost = "it includes numbers of devices whose updates are not merged: "
            lost += ", ".join(sorted(names - told.keys()))
        elif told:
            correction = np.frombuffer(opened.correction, "<u4").astype(np.uint32)
            total = added([correction, *(self._numbers(told[client], parts) for client in sorted(told))])
            sizes = [len(sealed[part.value]) for part in parts]
            each = dict(zip((part.value for part in parts), np.split(total, np.cumsum(sizes)[:-1]), strict=True))
            sealed = {**sealed, **to_weights({Part.SEALED: each})[Part.SEALED]}
            at: dict[str, Any] = {"round": self._job.round, "attempt": self._job.attempt, "parts": parts}
            new = [SealedSum(**at, digest=digest, names=names) for digest, names in opened.groups]
            sums = (*(one for one in sums if not set(one.parts) & set(parts)), *new)
        return *merged((aggregate, state), self._before, {Part.SEALED: sealed}, sums), lost

    def _numbers(self, artifact: str, parts: tuple[Part, ...]) -> npt.NDArray[np.uint32]:
        """The sealed numbers of an update."""
        decoded = unpack_update(self._store.get(artifact), self._spec, self._yardstick.base)
        return np.concatenate([decoded.parts[Part.SEALED][part.value] for part in parts]).astype(np.uint32)

    def _update(self, client: str, artifact: str, weight: int) -> Update:
        """An update for the merge: clipped, with the given weight (its own for 0)."""
        from fedcg.learning.method import Update
        from fedcg.learning.tensor_conversion import to_weights

        yardstick = self._yardstick
        decoded = unpack_update(self._store.get(artifact), self._spec, yardstick.base)
        if client not in self._movements:
            seed = self._streams.seed("sketch")  # from the coordinator's secret: devices can't predict the sums
            self._movements[client] = robustness.movement_of(
                decoded.parts, yardstick, self._method.payload.with_base, seed
            )
        distances = self._movements[client].distances
        clear = {part: decoded.parts[part] for part in decoded.parts.keys() - {Part.SEALED}}
        parts = robustness.clipped(clear, yardstick.base.parts, robustness.over(distances, self._limits))
        report = decoded.header.report or Report()
        examples, counts = report.examples or 1, report.label_counts
        if weight and weight != examples and counts is not None:
            counts = tuple(-(-count * weight // examples) for count in counts)
        return Update(client=client, parts=to_weights(parts), examples=weight or examples, label_counts=counts)


class Throttle:
    """A progress callback that reports a phase's first and last step, steps with a loss, and otherwise five steps per second."""

    def __init__(self, job: jobs.Job, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self._job = job
        self._send = send
        self._clock = clock
        self._phase = ""
        self._sent_at = 0.0
        self._loss: float | None = None
        self._is_new_loss = False

    def watch_loss(self, loss: float) -> None:
        """Record the mean loss of the last steps for the next report."""
        self._loss = loss if math.isfinite(loss) else None
        self._is_new_loss = True

    def __call__(self, phase: str, step: int, steps: int) -> None:
        """Record a step."""
        now = self._clock()
        first = step > 0 and phase != self._phase
        is_awaited = first or step == steps or self._is_new_loss
        if not is_awaited and now - self._sent_at < PROGRESS_EVERY_S:
            return
        self._is_new_loss = False
        if phase != "distil":
            self._loss = None
        if step > 0:
            self._phase = "" if step == steps else phase
        self._sent_at = now
        self._send(jobs.Progressed(self._job.round, self._job.attempt, os.getpid(), phase, step, steps, self._loss))


def spill_directory(root: Path, federation: str, round_number: int, attempt: int) -> Path:
    """The folder for an attempt's teacher outputs."""
    return root / federation / f"{round_number}-{attempt}"
