"""The model in service, the candidate that runs beside it, and the change to a new version while requests run. Independent of HTTP.

With a stage, the version that was chosen as the successor of the one in service is first a candidate: it predicts images that were answered already (one thread, bounded, never in a caller's way), and takes the requests afterwards. The pointer names it all the time, so a rejection moves the pointer back. A rollback is no succession (the pointer then has forgotten the version in service) and takes effect at once.
The file `SERVING` beside the pointer, during a stage: which version answers while the one in use is compared with it.
"""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from export.errors import ExportError, ModelError
from export.model.manifest import Accept
from export.model.runtime import Floats, Model, Sample, in_words
from export.model.versions import ModelVersions, resolve
from export.serving.judge import CandidateStage, Comparison, Pair, Progress, VersionFault, Watch, least_agreement
from fedcg.files import READABLE, replace_durably

PENDING = 2
"""Requests whose images are kept for the comparison, the one in work included; further ones are left out."""
WARM_UP_BYTES = 128 << 20
"""Of the inputs of a first run: 40 of the largest images, fewer of the largest tensors."""
_FAILED = "version %s failed in the comparison (further failures are not logged): %s"


def is_comparable(model: Model, current: Model) -> bool:
    """Whether two models take the same pixels or tensors and name the same classes.

    In another order they may give every class another's name and still predict the same shares of classes: that shows only where their
    accuracies say how often both should agree.
    """
    forms = [
        (sorted(one.manifest.classes), one.manifest.input.kind, one.predictor.shape, one.predictor.dtype)
        for one in (model, current)
    ]
    is_same_order = model.manifest.classes == current.manifest.classes
    return forms[0] == forms[1] and (is_same_order or _floor(model, current) > 0)


def _floor(model: Model, current: Model) -> float:
    return least_agreement(*(one.manifest.verification.accuracy_onnx for one in (current, model)))


class Candidate:
    """A version that was chosen, while it is compared with the one in service.

    `offer` and `as_json` may be called by any thread; `verdict` and `is_over` belong to the one that refreshes the served model.

    Args:
        model: the candidate, ready to run.
        current: the model in service; comparable.
        stage: how much is compared.
        began_s: when the stage began, as `clock` has it.
        clock: seconds of a steady clock.
        chance: a number in [0, 1) for each request; below the stage's share the request is compared.
    """

    def __init__(
        self,
        model: Model,
        current: Model,
        stage: CandidateStage,
        began_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.model, self._current, self._stage = model, current, stage
        self._began_s, self._clock, self._chance = began_s, clock, chance
        self.since = datetime.now(timezone.utc)
        self.progress = Progress(0, None, 0)
        """What was compared until the last look; changes in one step."""
        self._comparison = Comparison(model.version, current.version, stage, _floor(model, current))
        self._pairs: deque[Pair] = deque()  # from the thread to whoever asks for the verdict
        self._room = threading.BoundedSemaphore(PENDING)
        self._thread = ThreadPoolExecutor(1, "candidate")
        self._is_turned = self._has_failed = False

    def offer(self, served: Model, images: Sequence[Sample]) -> None:
        """Compare images that `served` has answered, if they are in the share and the thread is free; returns at once."""
        if served is not self._current or self._chance() >= self._stage.share or not self._room.acquire(blocking=False):
            return
        try:
            self._thread.submit(self._compare, images)
        except RuntimeError:  # closed a moment ago
            self._room.release()

    def verdict(self) -> VersionFault | None:
        """Why it should not take the requests, by what was compared until now."""
        while self._pairs:
            self._comparison.add(self._pairs.popleft())
        self.progress = self._comparison.progress()
        return self._comparison.verdict(self._elapsed_s())

    def is_over(self) -> bool:
        """Whether enough was compared, or the time is up."""
        return self._comparison.is_over(self._elapsed_s())

    def close(self) -> None:
        """Compare nothing further; does not wait for what is under way."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def as_json(self) -> dict[str, object]:
        """The stage as `/model` shows it."""
        stage = {"since": self.since.isoformat(), "of_images": self._stage.images}
        return {**self.model.identity(), **stage, **asdict(self.progress)}

    def _elapsed_s(self) -> float:
        return self._clock() - self._began_s

    def _compare(self, images: Sequence[Sample]) -> None:
        """On the thread: both versions one directly after the other, each first in turn, so that both meet the same other work."""
        try:
            self._is_turned = not self._is_turned
            if self._is_turned:
                candidate, candidate_s = self._predicted(self.model, images)
                current, current_s = self._predicted(self._current, images)
            else:
                current, current_s = self._predicted(self._current, images)
                candidate, candidate_s = self._predicted(self.model, images)
            if current is not None:
                self._pairs.append(Pair(current, current_s, candidate, candidate_s))
        finally:
            self._room.release()

    def _predicted(self, model: Model, images: Sequence[Sample]) -> tuple[Floats | None, float]:
        """Probabilities by class name, and seconds; None when the model fails or gives values that are not numbers."""
        began = self._clock()
        try:
            rows = model.predict(images)
        except Exception as error:  # noqa: BLE001 - onnxruntime's own exception types are not public, and whatever it is counts
            log.log(logging.DEBUG if self._has_failed else logging.WARNING, _FAILED, model.version, error)
            self._has_failed = True
            return None, self._clock() - began
        return (model.by_name(rows) if np.isfinite(rows).all() else None), self._clock() - began


RECORD_NAME = "SERVING"
Stamp = tuple[tuple[str, int, int, int], ...]
Look = tuple[Path, Stamp] | str
log = logging.getLogger(__name__)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    version: Annotated[str, Field(pattern=r"^\d{1,20}$")]


def read_serving(root: Path) -> str | None:
    """The version that answered when a stage was cut off; None when none was, or the file is damaged."""
    path = root / RECORD_NAME
    try:
        return _Record.model_validate_json(path.read_bytes()).version if path.exists() else None
    except (OSError, ValidationError) as error:
        log.warning("%s is ignored, the version in use is served: %s", path, error)
        return None


def note_serving(root: Path, version: str | None) -> None:
    """Note which version answers during a stage, None at its end; a disk that refuses costs a line in the log."""
    path = root / RECORD_NAME
    try:
        if version is not None:
            replace_durably(path, _Record(version=version).model_dump_json() + "\n", READABLE)
        elif path.exists():  # a read-only disk refuses to remove even what is not there
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: %s; a restart may serve, or compare, another version than now", path, error)


class ServedModel:
    """The newest usable version under a directory.

    `look`, `refresh` and `take_back` belong to one thread at a time. Others read `current`, `candidate` and `refused`, each of which
    changes in one step, and call `answered` and `failed`.

    Args:
        directory: a model, or the root of its versions.
        threads: threads of one prediction; 0 lets onnxruntime choose.
        warm_up: batch sizes to predict before a version comes into service.
        observe: gets "loaded" or "refused" for every version that was tried.
        accept: what a version's manifest must pass, e.g. the check of its signature; None for nothing.
        stage: how a new version is compared before it takes the requests; None: it takes them at once.
        watch: predictions by which a new version in service is compared with the one before it; 0 for never.
        clock: seconds of a steady clock.
    """

    def __init__(
        self,
        directory: Path,
        *,
        threads: int,
        warm_up: Sequence[int],
        observe: Callable[[str], None] = lambda _: None,
        accept: Accept | None = None,
        stage: CandidateStage | None = None,
        watch: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._threads, self._warm_up, self._observe = directory, threads, warm_up, observe
        self._accept, self._stage, self._watch, self._clock = accept, stage, Watch(watch), clock
        self._seen: Look | None = None
        self._served: Look | None = None  # what `_look` saw of the version in service
        self._began_s: float | None = None
        self._left: set[str] = set()  # versions that were taken back; one that is chosen again is meant
        self.current: Model | None = None
        self.candidate: Candidate | None = None
        """The version that was chosen, while it is compared with the one in service; None outside a stage."""
        self.since = datetime.now(timezone.utc)
        """When the version in service came into it."""
        self.refused = f"{directory}: no model was loaded yet"
        """Why the version that was chosen last is not the one in service; "" when it is."""
        self.taken_back = ""
        """Which version was taken out of service last because of what it did there, and why; "" when none was."""

    def look(self) -> list[VersionFault]:
        """Take the version in service back where it does badly, then `refresh`; why versions were taken back now."""
        verdict = self._watch.verdict()
        taken = [verdict] if verdict is not None and self.take_back(verdict) else []
        rejected = self.refresh()
        if rejected is not None:
            self._watch.accept(rejected.version)
            taken.append(rejected)
        return taken

    def refresh(self) -> VersionFault | None:
        """Look whether another version was chosen or its files changed; if so load it, warm it up, and serve or compare it.

        A version that cannot be used is refused with a line in the log, and the one in service stays.

        Returns:
            Why a version was taken back now, before it answered; None when none was.
        """
        seen = self._look()
        if seen == self._seen:
            return self._settled()
        self._seen = seen
        self._drop()  # before another is loaded: there is memory for two
        if self.current is not None and seen == self._served:
            self.refused = ""
            self._end_stage()
            return None
        if self.current is None and self._stage is not None:
            self._resume()
        try:
            model = self._loaded(self._directory)
        except (ExportError, OSError, MemoryError) as error:
            self._began_s = None
            self._refuse(str(error) or "not enough memory for it beside the one in service")
        else:
            self._observe("loaded")
            self.refused = ""
            return self._introduce(model)
        return None

    def failed(self, served: Model) -> None:
        """Note a request that `served` failed at; from any thread."""
        self._watch.failed(served.version)

    def answered(self, served: Model, images: Sequence[Sample], rows: Floats) -> None:
        """Note what `served` answered, and let the candidate, if there is one, predict the same images.

        From any thread; returns at once.
        """
        self._watch.answered(served.version, served.by_name(rows))
        candidate = self.candidate
        if candidate is not None:
            candidate.offer(served, images)

    def close(self) -> None:
        """End the comparison; a server that starts again begins it anew."""
        self._drop()

    def take_back(self, verdict: VersionFault) -> bool:
        """Return from a version that does badly to the one before it; whether that was possible.

        Nothing is done when there are no versions to choose from, or another one was chosen meanwhile. If that one is the candidate,
        it takes the requests at once: a version that does badly is nothing to compare it with.
        """
        installed = ModelVersions(self._directory, accept=self._accept)
        if self.candidate is not None and self.current is not None and verdict.version == self.current.version:
            log.error("version %s does badly, so the candidate takes all requests: %s", verdict.version, verdict.reason)
            self._promote(self.candidate.model)
            return False
        try:
            if installed.current().name != verdict.version:
                return False
            back = installed.rollback()
        except (ExportError, OSError) as error:
            log.warning("version %s should be taken back (%s), but stays: %s", verdict.version, verdict.reason, error)
            return False
        self._left.add(verdict.version)
        self.taken_back = f"version {verdict.version}: {verdict.reason}"
        log.error("version %s is taken back to %s: %s", verdict.version, back.name, verdict.reason)
        return True

    def _introduce(self, model: Model) -> VersionFault | None:
        """Serve a version that was loaded, or compare it first where it succeeds the one in service; a verdict where it can't be compared."""
        before, is_insisted = self.current, model.version in self._left
        if self._stage is None or before is None or is_insisted or not self._succeeds(before.version):
            self._promote(model)
        elif not is_comparable(model, before):
            reason = f"its classes or images are not those of version {before.version}, so it can't be compared; if it is right, "
            reason += f"`fedcg model use {self._root} {model.version}` puts it in service"
            return self._reject(VersionFault(model.version, "incomparable", reason))
        else:
            if self._began_s is None:  # one that replaces a candidate has the rest of its time
                self._began_s = self._clock()
            note_serving(self._root, before.version)
            self.candidate = Candidate(model, before, self._stage, self._began_s, clock=self._clock)
            told = "version %s is compared with version %s, which answers, on %d images or for %.0f s before it serves"
            log.info(told, model.version, before.version, self._stage.images, self._stage.limit_s)
        return None

    def _settled(self) -> VersionFault | None:
        """Look at the comparison: keep on, take the candidate back, or serve it. A verdict when it was taken back."""
        candidate = self.candidate
        if candidate is None:
            return None
        verdict = candidate.verdict()
        if verdict is not None:
            return self._reject(verdict)
        if candidate.is_over():
            log.info("version %s takes all requests: %s", candidate.model.version, candidate.progress)
            self._promote(candidate.model)
        return None

    def _reject(self, verdict: VersionFault) -> VersionFault | None:
        """Take a version back that does not answer yet, or refuse it where the pointer can't be moved."""
        self._drop()
        self._began_s = None
        if self.take_back(verdict):
            self._seen = None  # it may be chosen again before the next look
            return verdict
        self._refuse(f"version {verdict.version}: {verdict.reason}")
        return None

    def _promote(self, model: Model) -> None:
        """Put the version that is chosen in service, and end the stage if there was one: on disk first, for who was answered by it."""
        self._drop()
        self._end_stage()
        self._serve(model, self._seen)

    def _serve(self, model: Model, seen: Look | None) -> None:
        self.current, self.since, self._served = model, datetime.now(timezone.utc), seen
        manifest = model.manifest
        log.info(
            "serving %s, round %d, version %s (%s) by %s; %s",
            manifest.federation,
            manifest.round,
            model.version,
            model.served.name,
            in_words(model.predictor.providers),
            model.signature,
        )

    def _drop(self) -> None:
        if self.candidate is not None:
            self.candidate.close()
            self.candidate = None

    def _end_stage(self) -> None:
        self._began_s = None
        note_serving(self._root, None)

    @property
    def _root(self) -> Path:
        return ModelVersions(self._directory).root

    def _succeeds(self, version: str) -> bool:
        """Whether the pointer can return to `version`; not after a rollback from it."""
        try:
            return version in ModelVersions(self._directory).previous()
        except (ExportError, OSError):
            return False

    def _resume(self) -> None:
        """At the start: put the version in service that answered when a stage was cut off, if it is there and sound."""
        name = read_serving(self._root)
        if name is None or not self._succeeds(name):
            return
        try:
            seen = _stamped(self._root / name)
            self._serve(self._loaded(self._root / name), seen)
        except (ExportError, OSError, MemoryError) as error:
            log.warning("version %s, which answered before the restart, cannot be used: %s", name, error)

    def _look(self) -> Look:
        """What would be loaded; changes when another version is chosen or a file of it is replaced."""
        try:
            return _stamped(resolve(self._directory))
        except (ExportError, OSError) as error:
            return str(error)

    def _loaded(self, directory: Path) -> Model:
        model = Model.load(directory, threads=self._threads, accept=self._accept)
        before = self.current
        if before is not None and before.manifest.federation != model.manifest.federation:
            raise ModelError(
                f"{model.directory}: a model of federation {model.manifest.federation}, and this server serves "
                f"{before.manifest.federation}; start a server of its own for it"
            )
        for images in self._warm_up:
            _try(model, images)
        return model

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._observe("refused")
        kept = f"; version {self.current.version} stays in service" if self.current else ""
        log.error("a model is refused: %s%s", reason, kept)


def _stamped(chosen: Path) -> tuple[Path, Stamp]:
    files = ((path.name, path.stat()) for path in sorted(chosen.iterdir()))
    return chosen, tuple((name, stat.st_mtime_ns, stat.st_ino, stat.st_size) for name, stat in files)


def _try(model: Model, images: int) -> None:
    """Run a model once, on zeros; the first run of a batch size is slower than those after it.

    Raises:
        ModelError: it does not run, or gives values that are not numbers.
    """
    zeros = np.zeros((1, *model.predictor.shape), dtype=model.predictor.dtype)
    try:
        rows = model.predict(np.repeat(zeros, max(1, min(images, WARM_UP_BYTES // zeros.nbytes)), axis=0))
    except Exception as error:  # onnxruntime's own exception types are not public
        raise ModelError(f"{model.directory}: onnxruntime cannot run it ({error}); use another version") from error
    if not np.isfinite(rows).all():
        raise ModelError(f"{model.directory}: gives probabilities that are not numbers; use another version")
