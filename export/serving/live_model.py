"""The model in service, and the change to a new version while requests run. Independent of HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from export.errors import ExportError, ModelError
from export.model.providers import in_words
from export.model.runtime import Model
from export.model.signature import Accept
from export.model.versions import Slots, resolve
from export.serving.drift_watch import Verdict

log = logging.getLogger(__name__)
Stamp = tuple[tuple[str, int, int, int], ...]


class ServedModel:
    """The newest usable version under a directory.

    `refresh` belongs to one thread. Others read `current` and `refused`, each of which changes in one step.

    Args:
        directory: a model, or the root of its versions.
        threads: threads of one prediction; 0 lets onnxruntime choose.
        warm_up: batch sizes to predict before a version comes into service.
        observe: gets "loaded" or "refused" for every version that was tried.
        accept: what a version's manifest must pass, e.g. the check of its signature; None for nothing.
    """

    def __init__(
        self,
        directory: Path,
        *,
        threads: int,
        warm_up: Sequence[int],
        observe: Callable[[str], None] = lambda _: None,
        accept: Accept | None = None,
    ) -> None:
        self._directory, self._threads, self._warm_up, self._observe = directory, threads, warm_up, observe
        self._accept = accept
        self._seen: tuple[Path, Stamp] | str | None = None
        self.current: Model | None = None
        self.since = datetime.now(timezone.utc)
        """When the version in service came into it."""
        self.refused = f"{directory}: no model was loaded yet"
        """Why the version that was chosen last is not the one in service; "" when it is."""
        self.taken_back = ""
        """Which version was taken out of service last because of what it did there, and why; "" when none was."""

    def refresh(self) -> None:
        """Look whether another version was chosen or its files changed; if so load it, warm it up and put it in service.

        A version that cannot be used is refused with a line in the log, and the one in service stays.
        """
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            model = self._load()
        except (ExportError, OSError, MemoryError) as error:
            self._refuse(str(error) or "not enough memory for it beside the one in service")
        else:
            self.current, self.refused, self.since = model, "", datetime.now(timezone.utc)
            self._observe("loaded")
            manifest = model.manifest
            log.info(
                "serving %s, round %d, version %s (%s) by %s",
                manifest.federation,
                manifest.round,
                model.version,
                model.served.name,
                in_words(model.predictor.providers),
            )

    def take_back(self, verdict: Verdict) -> bool:
        """Return from a version that fails or drifts in service to the one before it; whether that was possible.

        Nothing is done when there are no versions to choose from, or another one was chosen meanwhile.
        """
        slots = Slots(self._directory, accept=self._accept)
        try:
            if slots.current().name != verdict.version:
                return False
            back = slots.rollback()
        except (ExportError, OSError) as error:
            log.warning("version %s should be taken back (%s), but stays: %s", verdict.version, verdict.reason, error)
            return False
        self.taken_back = f"version {verdict.version}: {verdict.reason}"
        log.error("version %s is taken back to %s: %s", verdict.version, back.name, verdict.reason)
        return True

    def _look(self) -> tuple[Path, Stamp] | str:
        """What would be loaded; changes when another version is chosen or a file of it is replaced."""
        try:
            chosen = resolve(self._directory)
            files = ((path.name, path.stat()) for path in sorted(chosen.iterdir()))
            return chosen, tuple((name, stat.st_mtime_ns, stat.st_ino, stat.st_size) for name, stat in files)
        except (ExportError, OSError) as error:
            return str(error)

    def _load(self) -> Model:
        model = Model.load(self._directory, threads=self._threads, accept=self._accept)
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


def _try(model: Model, images: int) -> None:
    """Run a model once, on black images; the first run of a batch size is slower than those after it.

    Raises:
        ModelError: it does not run, or gives values that are not numbers.
    """
    try:
        rows = model.predict(np.zeros((images, *model.predictor.shape), dtype=np.uint8))
    except Exception as error:  # onnxruntime's own exception types are not public
        raise ModelError(f"{model.directory}: onnxruntime cannot run it ({error}); use another version") from error
    if not np.isfinite(rows).all():
        raise ModelError(f"{model.directory}: gives probabilities that are not numbers; use another version")
