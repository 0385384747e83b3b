"""Versions of one device's model: `0001/`, `0002/`, … under a root, and a pointer to the one in use.

One rename adds a version and one rename moves the pointer, so readers see either the old or the new state, even after a power cut.
Writers take a lock; readers need none. Independent of how a model is created or run.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from export.errors import ManifestError, ModelError, SlotError
from export.model.manifest import MANIFEST_NAME, SIGNATURE_NAME, Accept, Manifest, read_all
from fedcg.errors import NOT_FOUND
from fedcg.files import READABLE, checked, fsync_path, locked, replace_durably, with_check
from fedcg.values import Value

POINTER_NAME = "CURRENT"
KEEP = 3  # newest versions to keep, besides the one in use and the target of a rollback
HISTORY = 16
_LOCK_NAME = ".lock"
_STAGING_PREFIX = ".staging-"
_ENGINES_SUFFIX = ".engines"


Reason = Literal["errors", "drift", "latency", "incomparable", "operator"]
"""Why a version was rolled back."""


class Pointer(BaseModel, frozen=True, extra="forbid"):
    """The pointer file.

    Attributes:
        current: the version in use.
        previous: the earlier ones, latest first.
        answers: during a comparison, the version that answers requests; None otherwise.
        returned: the version that was rolled back last, and why.
    """

    format: Literal[1] = 1
    current: str
    previous: tuple[str, ...] = ()
    answers: str | None = None
    returned: tuple[str, Reason] | None = None


class Version(Value):
    """One installed version."""

    name: str
    directory: Path
    is_current: bool


class ModelVersions:
    """The versions under one root.

    Args:
        root: directory of the versions; created on the first install.
        accept: additional check of a version before it is put in use again; None for none.
    """

    def __init__(self, root: Path, accept: Accept | None = None) -> None:
        self.root = _root_of(root)
        self.accept = accept

    def versions(self) -> tuple[Version, ...]:
        """All versions, oldest first."""
        pointer = self.pointer()
        current = pointer.current if pointer else None
        return tuple(Version(name, self.root / name, name == current) for name in self._names())

    def current(self) -> Path:
        """Directory of the version in use.

        Raises:
            SlotError: nothing is installed.
        """
        return self.root / self._required_pointer().current

    def previous(self) -> tuple[str, ...]:
        """The versions in use before, latest first. A rollback removes the version that it left."""
        pointer = self.pointer()
        return pointer.previous if pointer else ()

    def note_answering(self, version: str | None) -> None:
        """Record which version answers requests during a comparison, None at its end.

        Raises:
            SlotError: the disk is full or broken.
        """
        pointer = self._sound_pointer()
        if pointer is not None and pointer.answers != version:  # else nothing is written, e.g. on a read-only disk
            with self._writing(), self._lock():
                self._write_pointer(self._required_pointer().model_copy(update={"answers": version}))

    def install(self, fill: Callable[[Path], None]) -> Path:
        """Create a new version and put it in use.

        Args:
            fill: writes model and manifest into the given directory. If it raises, nothing is installed.

        Returns:
            Directory of the new version.

        Raises:
            ModelError: the manifest and the model that `fill` wrote do not match.
            SlotError: the disk is full or broken; the incomplete version is removed.
        """
        with self._writing():
            self.root.mkdir(parents=True, exist_ok=True)
            with self._lock():
                # Left by a killed writer: no other process holds the lock.
                for leftover in (*self.root.glob(f"{_STAGING_PREFIX}*"), *self.root.glob(f".{POINTER_NAME}.*.new")):
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
                staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=self.root))
                try:
                    fill(staging)
                    return self._publish(staging)
                finally:
                    shutil.rmtree(staging, ignore_errors=True)
                    shutil.rmtree(engines_of(staging), ignore_errors=True)

    def check_signed(self, *, is_signed: bool) -> None:
        """Refuse to replace a signed version by an unsigned one, which readers that require the signature would reject.

        Raises:
            SlotError: the version in use is signed, and the new one is not.
        """
        pointer = self._sound_pointer()
        if pointer is not None and not is_signed and (self.root / pointer.current / SIGNATURE_NAME).exists():
            raise SlotError(
                f"{self.root}: version {pointer.current} in use is signed, but the new one is not; it was not installed. "
                "Give --sign KEY, the device's message key (signing.key next to its agent.toml)"
            )

    def _publish(self, staging: Path) -> Path:
        read_all(staging)
        self.check_signed(is_signed=(staging / SIGNATURE_NAME).exists())
        staging.chmod(0o755)
        for path in (*staging.iterdir(), staging):
            fsync_path(path)
        names = self._names()
        name = f"{int(names[-1]) + 1 if names else 1:04d}"
        staging.rename(self.root / name)
        try:
            fsync_path(self.root)  # the version is durable before anything points to it
            self._point_to(name)
        except OSError:
            pointer = self._sound_pointer()
            if pointer is None or pointer.current != name:
                shutil.rmtree(self.root / name)
            raise
        self._prune()
        return self.root / name

    def use(self, name: str) -> Path:
        """Verify an installed version and put it in use.

        Raises:
            SlotError: no such version, or the disk is full or broken.
            ModelError: the version is damaged; the version in use does not change.
        """
        with self._writing(), self._lock():
            self.verify(name)
            self._point_to(name)
        return self.root / name

    def rollback(self, reason: Reason = "operator") -> Path:
        """Return to the previous version; skip versions that are missing or damaged.

        Raises:
            SlotError: no such version, or the disk is full or broken.
        """
        with self._writing(), self._lock():
            pointer = self._required_pointer()
            for position, name in enumerate(pointer.previous):
                try:
                    self.verify(name)
                except (SlotError, ModelError):
                    continue
                left, previous = (pointer.current, reason), pointer.previous[position + 1 :]
                self._write_pointer(Pointer(current=name, previous=previous, returned=left))
                return self.root / name
        raise SlotError(
            f"{self.root}: no earlier version to return to; see `fedcg model list {self.root}`", exit_code=NOT_FOUND
        )

    def verify(self, name: str) -> tuple[Manifest, str]:
        """Check a version's manifest and model files; return the manifest and a description of the signature check.

        Raises:
            SlotError: no such version.
            ModelError: the version is damaged.
        """
        if name not in self._names():
            raise SlotError(
                f"{self.root}: no version {name!r}; versions: {', '.join(self._names()) or 'none'}", exit_code=NOT_FOUND
            )
        return read_all(self.root / name, self.accept)

    def _names(self) -> list[str]:
        if not self.root.is_dir():
            return []
        found = [path.name for path in self.root.iterdir() if path.name.isdecimal() and path.is_dir()]
        return sorted(found, key=int)

    def pointer(self) -> Pointer | None:
        """The pointer; None if nothing is installed.

        Raises:
            SlotError: it is damaged.
        """
        path = self.root / POINTER_NAME
        try:
            return Pointer.model_validate_json(checked(path.read_bytes()) or b"")
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise SlotError(
                f"{path} is damaged: it names no version; choose one with `fedcg model use {self.root} VERSION`"
            ) from error

    def _sound_pointer(self) -> Pointer | None:
        """The pointer; None if there is none or it is damaged. A damaged one is replaced without its history."""
        try:
            return self.pointer()
        except SlotError:
            return None

    def _required_pointer(self) -> Pointer:
        pointer = self.pointer()
        if pointer is None:
            raise SlotError(f"{self.root}: no model is installed there", exit_code=NOT_FOUND)
        if not (self.root / pointer.current).is_dir():
            raise SlotError(
                f"{self.root}: version {pointer.current} is missing; choose one with `fedcg model use {self.root} VERSION`"
            )
        return pointer

    def _point_to(self, name: str) -> None:
        before = self._sound_pointer() or Pointer(current=name)
        previous = tuple(dict.fromkeys(one for one in (before.current, *before.previous) if one != name))
        self._write_pointer(before.model_copy(update={"current": name, "previous": previous[:HISTORY]}))

    def _write_pointer(self, pointer: Pointer) -> None:
        replace_durably(self.root / POINTER_NAME, with_check(f"{pointer.model_dump_json()}\n".encode()), READABLE)

    def _prune(self) -> None:
        pointer = self._required_pointer()
        names = self._names()
        kept = {pointer.current, *pointer.previous[:1], *names[-KEEP:]}
        for name in names:
            if name not in kept:
                shutil.rmtree(self.root / name, ignore_errors=True)
        for engines in self.root.glob(f"*{_ENGINES_SUFFIX}"):
            if engines.stem not in kept:
                shutil.rmtree(engines, ignore_errors=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SlotError(
                f"{error.filename or self.root}: {error.strerror or error}; the version in use is unchanged. "
                f"Free space on, or repair, {self.root}, then try again"
            ) from error

    @contextmanager
    def _lock(self) -> Iterator[None]:
        if not self.root.is_dir():
            raise SlotError(f"{self.root}: no such folder", exit_code=NOT_FOUND)
        with locked(self.root / _LOCK_NAME):
            yield


def resolve(directory: Path) -> Path:
    """The model directory of a path: itself, or the version in use if it is a root of versions.

    Raises:
        ManifestError: neither a model nor versions.
        SlotError: no usable version.
    """
    if (directory / MANIFEST_NAME).is_file():
        return directory
    if (_root_of(directory) / POINTER_NAME).is_file():
        return ModelVersions(directory).current()
    if not directory.is_dir():
        why = "a file, not the folder of a model or of its versions" if directory.exists() else "no such folder"
        raise ManifestError(f"{directory}: {why}", exit_code=NOT_FOUND)
    raise ManifestError(f"{directory}: has neither {MANIFEST_NAME} (a model) nor {POINTER_NAME} (versions of a model)")


def _root_of(directory: Path) -> Path:
    """The root of versions for a path: `models` in a device's private store or folder, or the path itself.

    The private store has a pointer of the same name for its generations, so `models` is checked first.
    """
    places = (directory / "models", directory / "store" / "models", directory)
    return next((place for place in places if (place / POINTER_NAME).is_file()), directory)


def engines_of(model_dir: Path) -> Path:
    """The folder of a model's TensorRT engines: next to its directory, whose files are watched for changes."""
    return model_dir.with_name(model_dir.name + _ENGINES_SUFFIX)
