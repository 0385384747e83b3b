"""This device's images for a round: decoded once, split by content, fixed by the round's snapshot, defended. Uses torch.

Files that can't be decoded are in no split and no snapshot.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edge_client.config import DataSection
from edge_client.errors import RoundError
from edge_client.store.generations import Snapshot, SnapshotFile
from edge_client.store.private_store import PrivateStore
from fedcg.event_log import EventLog
from fedcg.learning.data.array_files import ArrayData
from fedcg.learning.data.image_folder import LocalImages, from_arrays, read_images, split_source
from fedcg.learning.data.sources import list_files, stamp
from fedcg.learning.defences.defence import SAMPLES_FILE, DefencePlace, defence_label, defence_of
from fedcg.learning.defences.scrambling import Scrambling
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import FileEntry, ImageSet, SkippedImage
from fedcg.learning.method import Progress, silent
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec, TensorForm, image_form
from fedcg.learning.training.task_round import task_of
from fedcg.values import Value
from fedcg.wire.messages.schemas import DeclineReason


class RoundData(Value):
    """The images of one round per split, after the device's defence, and their snapshot."""

    train: ImageSet
    val: ImageSet
    test: ImageSet
    snapshot: Snapshot


class LocalDefence(Value):
    """Applies the defence of `[data] defence`.

    Attributes:
        section: the defence and its parameters.
        store: keeps the defence's trained state and sample pictures.
        events: the event log, with one event per set of images.
        place: torch device.
    """

    section: DataSection
    store: PrivateStore
    events: EventLog
    place: str = "cpu"

    @property
    def label(self) -> str:
        """The defence with its parameters; empty without one."""
        return defence_label(self.section.defence, self.section.defence_params)

    def apply(self, spec: FederationSpec, images: ImageSet, progress: Progress) -> ImageSet:
        """The defended images to train on; the real ones without a defence.

        Raises:
            LearningError: the defence does not work with these images or with tensors, or its weights can't be read.
            DivergedError: its training diverged.
            OSError: the store can't be written.
        """
        if self.section.defence is None:
            return images
        defence, params = defence_of(self.section.defence, self.section.defence_params)
        image_form(spec.input, self.label)
        started = time.monotonic()
        made = defence.apply(images, params, self._where(spec.federation, progress))
        made.keep_picture(self.store.defence_folder)
        self.events.write(
            "defended",
            defence=self.label,
            count=len(images),
            detail=", ".join(f"{name} {value}" for name, value in made.facts.items()),
            samples=str(self.store.defence_folder / SAMPLES_FILE),
            seconds=round(time.monotonic() - started, 1),
        )
        return made.images

    def input_layer(self, spec: FederationSpec) -> Scrambling | None:
        """The transformation of all other images of this device before its networks use them; None: they stay unchanged.

        Raises:
            DefenceError: the spec's images, or this device's secrets, do not allow it.
        """
        if self.section.defence is None:
            return None
        defence, params = defence_of(self.section.defence, self.section.defence_params)
        if defence.input_layer is None:
            return None
        size = spec.image.tensor_shape
        return defence.input_layer(params, self._where(spec.federation, silent), size)

    def _where(self, federation: str, progress: Progress) -> DefencePlace:
        cohort = self.store.cohort_secret()
        return DefencePlace(
            Streams(self.store.device_secret()).at(federation, "defence"),
            progress,
            self.store.defence_folder,
            self.place,
            self.section.defence_stem,
            grows=True,
            cohort=None if cohort is None else Streams(cohort).at(federation, "defence"),
            warn=lambda text: self.events.write("defence_warning", detail=text),
        )


@dataclass(eq=False)
class LocalData:
    """The data folder of one device.

    Args:
        root: this device's images, in any form that `read_images` supports.
        common: folder with a balanced test set shared by all clients of a demo, or None.
        store: keeps the snapshot of the last accepted round.
        program: reads the data of this device's own program instead of `root`; None: no program.
        on_skipped: called with the images that could not be decoded (possibly none) whenever the source was read for a new snapshot.
        defence: rewrites the training images, or None.
    """

    root: Path
    common: Path | None
    store: PrivateStore
    on_skipped: Callable[[tuple[SkippedImage, ...]], None] = lambda _: None
    program: Callable[[FederationSpec], ArrayData] | None = None
    defence: LocalDefence | None = None
    _defended: tuple[str, RoundData] | None = field(default=None, init=False)
    _loaded: tuple[str, RoundData] | None = field(default=None, init=False)
    _listing: tuple[object, ...] | None = field(default=None, init=False)
    _common_set: tuple[str, LocalImages] | None = field(default=None, init=False)

    def for_round(self, spec: FederationSpec, round_number: int, progress: Progress = silent) -> RoundData:
        """The data of a round, from the snapshot saved when it was accepted, or from a new one.

        Args:
            spec: has classes and image form.
            round_number: the round.
            progress: of the defence, which may train for minutes before the first round.

        Raises:
            RoundError: no usable images, or files of the snapshot are missing or changed; the next attempt takes a new snapshot.
            LearningError: the defence fails for a reason other than images.
            DivergedError: the defence's training diverged.
        """
        if (task := task_of(spec)) is not None:
            return RoundData(*task.held(), Snapshot(()))
        try:
            snapshot = self.store.accept_snapshot(spec.digest, round_number, lambda: self._take(spec).snapshot)
            if self._loaded is None or self._loaded[0] != _key(spec, snapshot):
                self._loaded = (_key(spec, snapshot), self._load(spec, snapshot))
            if self.defence is None or not self.defence.label:
                return self._loaded[1]
            if self._defended is None or self._defended[0] != self._loaded[0]:
                self._defended = None  # free the old set first, because two may not fit into memory
                self._defended = (self._loaded[0], self._defend(self.defence, self._loaded[1], spec, progress))
        except DataError as error:
            self.store.forget_snapshot()
            raise RoundError(DeclineReason.NO_DATA, str(error)) from error
        return self._defended[1]

    def _defend(self, defence: LocalDefence, data: RoundData, spec: FederationSpec, progress: Progress) -> RoundData:
        train, layer = defence.apply(spec, data.train, progress), defence.input_layer(spec)
        val, test = (one if layer is None else layer.seen(one) for one in (data.val, data.test))
        snapshot = replace(data.snapshot, defence=defence.label, defended=train.digest())
        return RoundData(train, val, test, snapshot)

    def input_layer(self, spec: FederationSpec) -> Scrambling | None:
        """The transformation of real images before this device's networks use them; None: none."""
        return None if self.defence is None else self.defence.input_layer(spec)

    def common_test(self, spec: FederationSpec) -> ImageSet | None:
        """The shared balanced test set as this device's networks see it, if there is one."""
        found = self._common_images(spec)
        if found is None:
            return None
        layer = self.input_layer(spec)
        return found.images if layer is None else layer.seen(found.images)

    def samples(
        self, spec: FederationSpec, snapshot: Snapshot, split: str
    ) -> tuple[Sequence[Path | NDArray[Any]], list[int]]:
        """Paths of a split's image files, or its tensors, with labels; empty for images from other sources.

        Raises:
            DataError: tensors of the snapshot are missing or changed.
        """
        if task_of(spec) is not None:
            return [], []
        if isinstance(spec.input, TensorForm):
            if self._loaded is None or self._loaded[0] != _key(spec, snapshot):
                self._loaded = (_key(spec, snapshot), self._load(spec, snapshot))
            return _tensors(getattr(self._loaded[1], split))
        if not self.root.is_dir():
            return [], []
        chosen = snapshot.split(split)
        return [self.root / file.path for file in chosen], [file.label for file in chosen]

    def common_samples(self, spec: FederationSpec) -> tuple[Sequence[Path | NDArray[Any]], list[int]]:
        """Like `samples`, for the shared balanced test set."""
        found = self._common_images(spec)
        if found is not None and isinstance(spec.input, TensorForm):
            return _tensors(found.images)
        if found is None or self.common is None or not self.common.is_dir():
            return [], []
        return [self.common / entry.path for entry in found.entries], [entry.label for entry in found.entries]

    def _common_images(self, spec: FederationSpec) -> LocalImages | None:
        if self.common is None:
            return None
        if self._common_set is None or self._common_set[0] != spec.digest:
            self._common_set = (spec.digest, read_images(self.common, spec.classes, spec.input))
        return self._common_set[1]

    def _take(self, spec: FederationSpec) -> RoundData:
        listing = self._list(spec)
        if self._loaded is not None and listing == self._listing:
            return self._loaded[1]
        found = self._read(spec)
        self.on_skipped(found.skipped)
        data = _divide(found.images, found.entries, _snapshot_of(self.root, found.entries, spec))
        if len(data.train) < 2:
            raise DataError(f"{self.root}: {len(data.train)} training images after the split; at least 2 are needed")
        self._listing, self._loaded = listing, (_key(spec, data.snapshot), data)
        return data

    def _read(self, spec: FederationSpec, subset: Sequence[str] | None = None) -> LocalImages:
        if self.program is None:
            return read_images(self.root, spec.classes, spec.input, subset=subset)
        return from_arrays(self.program(spec), self.root, spec.classes, spec.input, subset)

    def _load(self, spec: FederationSpec, snapshot: Snapshot) -> RoundData:
        self._listing = None
        found = self._read(spec, [file.path for file in snapshot.files])
        for entry, file in zip(found.entries, snapshot.files, strict=True):
            if entry.sha256 != file.sha256 or entry.label != file.label:
                raise DataError(f"{self.root / file.path}: changed since this round was accepted")
        return _divide(found.images, found.entries, snapshot)

    def _list(self, spec: FederationSpec) -> tuple[object, ...]:
        if self.program is not None:
            return (object(),)  # changes are only found by reading the data
        if not self.root.is_dir():
            return (spec.digest, stamp(self.root))
        paths = [path for path, _ in list_files(self.root, spec.classes)]
        return (spec.digest, *((path, _stamp_of(self.root / path)) for path in paths))


def _tensors(rows: ImageSet) -> tuple[list[NDArray[Any]], list[int]]:
    return list(rows.images.numpy()), rows.labels.tolist()


def _stamp_of(path: Path) -> tuple[int, int] | None:
    """Size and modification time of an image; None for files that reading skips, such as a broken link."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _key(spec: FederationSpec, snapshot: Snapshot) -> str:
    return f"{spec.digest}/{snapshot.digest}"


def _snapshot_of(root: Path, entries: list[FileEntry], spec: FederationSpec) -> Snapshot:
    where = split_source(root, entries, spec.classes)
    return Snapshot(tuple(SnapshotFile(one.path, one.sha256, one.label, where[one.path]) for one in entries))


def _divide(images: ImageSet, entries: list[FileEntry], snapshot: Snapshot) -> RoundData:
    row = {entry.path: number for number, entry in enumerate(entries)}
    train, val, test = (
        images.rows([row[file.path] for file in snapshot.split(name)]) for name in ("train", "val", "test")
    )
    return RoundData(train, val, test, snapshot)
