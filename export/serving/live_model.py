"""The model in service, the candidate compared with it, and the switch to a new version while requests run. Independent of HTTP.

With a stage, the successor of the version in service is first a candidate. It predicts images of answered requests, on one bounded thread that never delays requests, and takes the requests afterwards. The pointer already names the candidate, so a rejection moves the pointer back. A rollback takes effect at once, since the pointer's history no longer has the version in service.
During a stage, the pointer also names the version that answers requests.
"""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from export.errors import ExportError, ModelError
from export.model.manifest import Accept
from export.model.runtime import Floats, Model, Sample, in_words
from export.model.versions import ModelVersions, resolve
from export.serving.judge import CandidateStage, Comparison, Pair, Progress, VersionFault, Watch, least_agreement

PENDING = 2
"""Requests kept for the comparison, including the current one; others are skipped."""
WARM_UP_BYTES = 128 << 20
"""Largest inputs of a warm-up run in bytes: 40 of the largest images, fewer of the largest tensors."""
_FAILED = "version %s failed in the comparison (more failures are logged at debug level): %s"


def is_comparable(model: Model, current: Model) -> bool:
    """Whether two models have the same input and the same classes.

    With classes in another order, a model may swap class names and still predict the same class shares. Only a bound on the agreement,
    from their accuracies, detects that.
    """
    forms = [
        (sorted(one.manifest.classes), one.manifest.input.kind, one.predictor.shape, one.predictor.dtype)
        for one in (model, current)
    ]
    is_same_order = model.manifest.classes == current.manifest.classes
    return forms[0] == forms[1] and (is_same_order or _floor(model, current) > 0)


def _floor(model: Model, current: Model) -> float:
    return least_agreement(*(one.manifest.verification.accuracy_onnx for one in (current, model)))


@dataclass(eq=False)
class Candidate:
    """A chosen version while it is compared with the version in service.

    `offer` and `as_json` are thread-safe; call `verdict` and `is_over` only from the thread that refreshes the served model.

    Args:
        model: the candidate, ready to run.
        current: the model in service; must be comparable.
        stage: length of the comparison.
        began_s: start of the stage, by `clock`.
        clock: seconds of a steady clock.
        chance: a number in [0, 1) for each request; below the stage's share the request is compared.
    """

    model: Model
    current: Model
    stage: CandidateStage
    began_s: float
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        self.since = datetime.now(timezone.utc)
        self.progress = Progress(0, None, 0)
        """Progress at the last check; replaced atomically."""
        self._comparison = Comparison(
            self.model.version, self.current.version, self.stage, _floor(self.model, self.current)
        )
        self._pairs: deque[Pair] = deque()  # from the comparison's thread to the caller of `verdict`
        self._room = threading.BoundedSemaphore(PENDING)
        self._thread = ThreadPoolExecutor(1, "candidate")
        self._is_turned = self._has_failed = False

    def offer(self, served: Model, images: Sequence[Sample]) -> None:
        """Compare images that `served` has answered, if they are in the share and there is room; returns at once."""
        if served is not self.current or self.chance() >= self.stage.share or not self._room.acquire(blocking=False):
            return
        try:
            self._thread.submit(self._compare, images)
        except RuntimeError:  # just closed
            self._room.release()

    def verdict(self) -> VersionFault | None:
        """Why it should not serve, from the comparison so far; None while there is no reason."""
        while self._pairs:
            self._comparison.add(self._pairs.popleft())
        self.progress = self._comparison.progress()
        return self._comparison.verdict(self._elapsed_s())

    def is_over(self) -> bool:
        """Whether enough was compared, or the time limit is reached."""
        return self._comparison.is_over(self._elapsed_s())

    def close(self) -> None:
        """Stop comparing, without waiting for the current request."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def as_json(self) -> dict[str, object]:
        """The stage as shown by `/model`."""
        stage = {"since": self.since.isoformat(), "of_images": self.stage.images}
        return {**self.model.identity(), **stage, **asdict(self.progress)}

    def _elapsed_s(self) -> float:
        return self.clock() - self.began_s

    def _compare(self, images: Sequence[Sample]) -> None:
        """On the thread: run both versions directly after each other, in alternating order, so that other load affects both equally."""
        try:
            self._is_turned = not self._is_turned
            order = (self.model, self.current) if self._is_turned else (self.current, self.model)
            found = {one.version: self._predicted(one, images) for one in order}
            (current, current_s), (candidate, candidate_s) = found[self.current.version], found[self.model.version]
            if current is not None:
                self._pairs.append(Pair(current, current_s, candidate, candidate_s))
        finally:
            self._room.release()

    def _predicted(self, model: Model, images: Sequence[Sample]) -> tuple[Floats | None, float]:
        """Probabilities by class name, and seconds; None if the model fails or returns values that are not finite."""
        began = self.clock()
        try:
            rows = model.predict(images)
        except Exception as error:  # noqa: BLE001 - onnxruntime's own exception types are not public, and every failure counts
            log.log(logging.DEBUG if self._has_failed else logging.WARNING, _FAILED, model.version, error)
            self._has_failed = True
            return None, self.clock() - began
        return (model.by_name(rows) if np.isfinite(rows).all() else None), self.clock() - began


Stamp = tuple[tuple[str, int, int, int], ...]
Look = tuple[Path, Stamp] | str
log = logging.getLogger(__name__)


@dataclass(eq=False)
class ServedModel:
    """The newest usable version under a directory.

    Call `look`, `refresh` and `take_back` from one thread at a time. Other threads may read `current`, `candidate` and `refused`, each
    of which changes atomically, and call `answered` and `failed`.

    Args:
        directory: a model, or the root of its versions.
        threads: threads of one prediction; 0 lets onnxruntime choose.
        warm_up: batch sizes to predict before a version enters service.
        observe: called with "loaded" or "refused" for every version tried.
        accept: check of a version's manifest, e.g. of its signature; None for none.
        stage: comparison of a new version before it serves; None: it serves at once.
        watch: predictions by which a new version in service is compared with the previous one; 0 for never.
        clock: seconds of a steady clock.
    """

    directory: Path
    _: KW_ONLY
    threads: int
    warm_up: Sequence[int]
    observe: Callable[[str], None] = lambda _: None
    accept: Accept | None = None
    stage: CandidateStage | None = None
    watch: int = 0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._watch = Watch(self.watch)
        self._seen: Look | None = None
        self._served: Look | None = None  # result of `_look` for the version in service
        self._began_s: float | None = None
        self._left: set[str] = set()  # versions that were rolled back; choosing one again is deliberate
        self.current: Model | None = None
        self.candidate: Candidate | None = None
        """The chosen version while it is compared with the one in service; None outside a stage."""
        self.since = datetime.now(timezone.utc)
        """When the version in service started to serve."""
        self.refused = f"{self.directory}: no model is loaded yet"
        """Why the version chosen last is not in service; "" if it is."""
        self.taken_back = ""
        """The version that was rolled back last, and why; "" if none was."""

    def look(self) -> list[VersionFault]:
        """Roll back the version in service if it performs badly, then `refresh`; return why versions were rolled back."""
        verdict = self._watch.verdict()
        taken = [verdict] if verdict is not None and self.take_back(verdict) else []
        rejected = self.refresh()
        if rejected is not None:
            self._watch.accept(rejected.version)
            taken.append(rejected)
        return taken

    def refresh(self) -> VersionFault | None:
        """If another version was chosen or its files changed, load it, warm it up, and serve or compare it.

        An unusable version is refused and logged; the version in service does not change.

        Returns:
            Why a version was rolled back before it served; None if none was.
        """
        seen = self._look()
        if seen == self._seen:
            return self._settled()
        self._seen = seen
        self.close()  # before another is loaded: memory suffices for two
        if self.current is not None and seen == self._served:
            self.refused = ""
            self._end_stage()
            return None
        if self.current is None and self.stage is not None:
            self._resume()
        try:
            model = self._loaded(self.directory)
        except (ExportError, OSError, MemoryError) as error:
            self._began_s = None
            self._refuse(str(error) or "not enough memory for it next to the one in service")
        else:
            self.observe("loaded")
            self.refused = ""
            return self._introduce(model)
        return None

    def failed(self, served: Model) -> None:
        """Record a request that failed in `served`; thread-safe."""
        self._watch.failed(served.version)

    def answered(self, served: Model, images: Sequence[Sample], rows: Floats) -> None:
        """Record the predictions of `served`, and offer the same images to the candidate, if any.

        Thread-safe; returns at once.
        """
        self._watch.answered(served.version, served.by_name(rows))
        candidate = self.candidate
        if candidate is not None:
            candidate.offer(served, images)

    def close(self) -> None:
        """End the comparison, if any; a restarted server begins a new one."""
        if self.candidate is not None:
            self.candidate.close()
            self.candidate = None

    def take_back(self, verdict: VersionFault) -> bool:
        """Roll a version that performs badly back to the previous one; return whether that was possible.

        Nothing changes if there is no other version, or another one was chosen in the meantime. If that one is the candidate, it takes
        the requests at once: comparing it with a bad version is useless.
        """
        installed = ModelVersions(self.directory, accept=self.accept)
        if self.candidate is not None and self.current is not None and verdict.version == self.current.version:
            log.error("version %s performs badly, so the candidate serves: %s", verdict.version, verdict.reason)
            self._promote(self.candidate.model)
            return False
        try:
            if installed.current().name != verdict.version:
                return False
            back = installed.rollback(verdict.kind)
        except (ExportError, OSError) as error:
            log.warning("version %s should be rolled back (%s), but stays: %s", verdict.version, verdict.reason, error)
            return False
        self._left.add(verdict.version)
        self.taken_back = f"version {verdict.version}: {verdict.reason}"
        log.error("version %s rolled back to %s: %s", verdict.version, back.name, verdict.reason)
        return True

    def _introduce(self, model: Model) -> VersionFault | None:
        """Serve a loaded version, or compare it first if it succeeds the one in service; a verdict if it can't be compared."""
        before, is_insisted = self.current, model.version in self._left
        if self.stage is None or before is None or is_insisted or not self._succeeds(before.version):
            self._promote(model)
        elif not is_comparable(model, before):
            reason = f"its classes or inputs differ from version {before.version}, so it can't be compared; if that is intended, "
            reason += f"put it in service with `fedcg model use {self._root} {model.version}`"
            return self._reject(VersionFault(model.version, "incomparable", reason))
        else:
            if self._began_s is None:  # a version that replaces a candidate gets the rest of its time
                self._began_s = self.clock()
            self._note_answering(before.version)
            self.candidate = Candidate(model, before, self.stage, self._began_s, clock=self.clock)
            told = "comparing version %s with version %s, which serves, on %d images or for %.0f s"
            log.info(told, model.version, before.version, self.stage.images, self.stage.limit_s)
        return None

    def _settled(self) -> VersionFault | None:
        """Check the comparison: continue it, reject the candidate, or serve it. A verdict if it was rejected."""
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
        """Roll back a version that does not serve yet, or refuse it if the pointer can't be moved."""
        self.close()
        self._began_s = None
        if self.take_back(verdict):
            self._seen = None  # it may be chosen again before the next check
            return verdict
        self._refuse(f"version {verdict.version}: {verdict.reason}")
        return None

    def _promote(self, model: Model) -> None:
        """Put the chosen version in service and end the stage, if any: on disk first, so that a restart serves the same version."""
        self.close()
        self._end_stage()
        self._serve(model, self._seen)

    def _serve(self, model: Model, seen: Look | None) -> None:
        self.current, self.since, self._served = model, datetime.now(timezone.utc), seen
        manifest = model.manifest
        log.info(
            "serving %s, round %d, version %s (%s) on %s; %s",
            manifest.federation,
            manifest.round,
            model.version,
            model.served.name,
            in_words(model.predictor.providers),
            model.signature,
        )

    def _end_stage(self) -> None:
        self._began_s = None
        self._note_answering(None)

    def _note_answering(self, version: str | None) -> None:
        """Record which version answers during a stage, None at its end. Disk errors are only logged."""
        try:
            ModelVersions(self.directory).note_answering(version)
        except (ExportError, OSError) as error:
            log.warning("%s; a restart may serve or compare a different version", error)

    @property
    def _root(self) -> Path:
        return ModelVersions(self.directory).root

    def _succeeds(self, version: str) -> bool:
        """Whether a rollback can return to `version`; not after a rollback from it."""
        try:
            return version in ModelVersions(self.directory).previous()
        except (ExportError, OSError):
            return False

    def _resume(self) -> None:
        """At the start: serve the version that answered when a stage was interrupted, if it is present and valid."""
        try:
            pointer = ModelVersions(self.directory).pointer()
            if pointer is None or (name := pointer.answers) is None or name not in pointer.previous:
                return
            seen = _stamped(self._root / name)
            self._serve(self._loaded(self._root / name), seen)
        except (ExportError, OSError, MemoryError) as error:
            log.warning("the version that answered before the restart cannot be used: %s", error)

    def _look(self) -> Look:
        """Identity of the model to load; changes if another version is chosen or one of its files is replaced."""
        try:
            return _stamped(resolve(self.directory))
        except (ExportError, OSError) as error:
            return str(error)

    def _loaded(self, directory: Path) -> Model:
        model = Model.load(directory, threads=self.threads, accept=self.accept)
        before = self.current
        if before is not None and before.manifest.federation != model.manifest.federation:
            raise ModelError(
                f"{model.directory}: a model of federation {model.manifest.federation}, but this server serves "
                f"{before.manifest.federation}; start a separate server for it"
            )
        for images in self.warm_up:
            _try(model, images)
        return model

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self.observe("refused")
        kept = f"; version {self.current.version} stays in service" if self.current else ""
        log.error("model refused: %s%s", reason, kept)


def _stamped(chosen: Path) -> tuple[Path, Stamp]:
    files = ((path.name, path.stat()) for path in sorted(chosen.iterdir()))
    return chosen, tuple((name, stat.st_mtime_ns, stat.st_ino, stat.st_size) for name, stat in files)


def _try(model: Model, images: int) -> None:
    """Run a model once, on zeros, since the first run of a batch size is slower than later ones.

    Raises:
        ModelError: it does not run, or returns values that are not finite.
    """
    zeros = np.zeros((1, *model.predictor.shape), dtype=model.predictor.dtype)
    try:
        rows = model.predict(np.repeat(zeros, max(1, min(images, WARM_UP_BYTES // zeros.nbytes)), axis=0))
    except Exception as error:  # onnxruntime's own exception types are not public
        raise ModelError(f"{model.directory}: onnxruntime cannot run it ({error}); use another version") from error
    if not np.isfinite(rows).all():
        raise ModelError(f"{model.directory}: its probabilities are not finite numbers; use another version")
