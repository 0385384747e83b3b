"""Sample pictures of a device's data defence before its first round: real images next to defended ones. Uses torch."""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from devices.detect import detect
from devices.profile import NotTrainableError
from edge_client.cli.doctor.findings import Finding, Result, finding_of
from edge_client.config import AgentConfig
from edge_client.errors import EdgeError
from edge_client.store.own_backbone import known_spec
from edge_client.store.private_store import PrivateStore, open_store
from edge_client.training.local_data import defence_place
from edge_client.training.trainer_child import plan_here
from fedcg.files import SECRET_BYTES, replace_durably
from fedcg.learning.data.image_folder import read_images
from fedcg.learning.data.sources import find_images, list_files
from fedcg.learning.defences.defence import DefencePlace, defence_label, defence_of
from fedcg.learning.defences.sample_pictures import SHOWN
from fedcg.learning.errors import DataError, LearningError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import DivergedError
from fedcg.learning.spec import FederationSpec, ImageForm

_PER_CLASS = 2  # antigan can't learn from one image per class
_TIMED_STEPS = 3
_ASSUMED = ImageForm(mode="RGB", height=96, width=96, mean=(0.5,) * 3, std=(0.5,) * 3)


class _EnoughError(Exception):
    """Training was stopped after a few steps. `seconds` is the estimated duration of the whole training."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class _Stopwatch:
    """Stops training once a few steps are timed. The first step is not counted because it has extra work."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def __call__(self, phase: str, step: int, steps: int) -> None:
        """Count a finished step."""
        self._ends.append(time.perf_counter())
        if len(self._ends) > _TIMED_STEPS:
            raise _EnoughError(steps * (self._ends[-1] - self._ends[0]) / _TIMED_STEPS)


def make_samples(config: AgentConfig, path: Path) -> Finding:
    """Write a PNG of a few real images next to their defended versions, or estimate how long the defence trains first.

    Nothing else is written: files created in the store would belong to the user that runs this command.
    """
    try:
        with TemporaryDirectory() as scratch:
            return finding_of("samples", _made(config, Path(scratch), path))
    except (EdgeError, LearningError, DivergedError, NotTrainableError, OSError) as error:
        return finding_of("samples", ("failed", str(error), "correct it, or run this as the agent's user"))


def _made(config: AgentConfig, scratch: Path, path: Path) -> Result:
    section = config.data
    if section.defence is None:
        return "ok", "none: models are trained on the real images", ""
    store = open_store(config) if PrivateStore(config.store).is_made else PrivateStore(scratch)
    spec = known_spec(store) or _newest_spec(store)
    classes, form = (_classes(section.root), _ASSUMED) if spec is None else (spec.classes, spec.image)
    size = f"images of {form.height}x{form.width} pixels"
    if spec is None:
        size += " (assumed, because the agent has no federation spec yet)"
    label = defence_label(section.defence, section.defence_params)
    defence, params = defence_of(section.defence, section.defence_params)
    try:
        images, place = _few_images(section.root, classes, form), _place(config, store, scratch)
        if not defence.is_per_image:
            place = replace(place, progress=_Stopwatch())
        replace_durably(path, defence.apply(images, params, place).picture)
    except LearningError as error:
        return "failed", f"{error} ({size})", "correct [data] in agent.toml"
    except _EnoughError as stopped:
        needed = f"the first round trains it, in about {_in_words(stopped.seconds)} on this device"
        return "ok", f"{label}: no picture yet: {needed} ({size})", ""
    return "ok", f"{label}: real images next to defended ones (private; {size}): {path}", ""


def _place(config: AgentConfig, store: PrivateStore, scratch: Path) -> DefencePlace:
    """The device's defence settings, with a copy of its trained state."""
    plan = plan_here(config, detect())
    torch.set_num_threads(plan.threads)
    secret = None if (store.root / "secrets" / "device.key").exists() else os.urandom(SECRET_BYTES)
    folder = scratch / "trained"
    if store.defence_folder.exists():
        shutil.copytree(store.defence_folder, folder)
    return replace(defence_place(config.data, config.federation, store, plan.device, secret), folder=folder)


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _newest_spec(store: PrivateStore) -> FederationSpec | None:
    files = sorted((store.root / "specs").glob("*.json"), key=lambda file: file.stat().st_mtime)
    return store.spec(files[-1].stem) if files else None


def _classes(root: Path) -> tuple[str, ...]:
    """The class folders, for a device without a spec."""
    if not root.is_dir():
        raise DataError(f"{root}: the classes of this data are in the federation's spec: start the agent first")
    return tuple(sorted({path.parent.name for path in find_images(root)[0]}))


def _few_images(root: Path, classes: Sequence[str], form: ImageForm) -> ImageSet:
    if root.is_dir():
        listed, chosen = list_files(root, classes), []
        for label in sorted({label for _, label in listed})[:SHOWN]:
            chosen += [path for path, other in listed if other == label][:_PER_CLASS]
        return read_images(root, classes, form, subset=chosen).images
    whole = read_images(root, classes, form).images
    rows = [(whole.labels == label).nonzero().flatten()[:_PER_CLASS] for label in whole.labels.unique()[:SHOWN]]
    return whole.rows(torch.cat(rows))
