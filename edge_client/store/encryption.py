"""Whether a private store is encrypted, with which key, and the change from one to the other. Torch-free.

format.json, which is never encrypted, names the marks of the keys that files may be sealed with. While a change is under way it names all keys
that are involved, and files are replaced one by one, each in one atomic step: a change that was killed is taken up by the same command.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.errors import DamagedFileError, StoreKeyError
from edge_client.store.checkpoint_file import CHECKPOINT_FILE
from edge_client.store.sealed_files import SET_KEY, StoreFiles, StoreKey
from edge_client.store.small_files import damaged, read_json, write_json

FORMAT_FILE = "format.json"
STORE_FORMAT, EARLIER_FORMAT = 2, 1
"""Format 1 has no checks in its small files and can't be encrypted; it becomes format 2 when an agent starts on it."""
_PATTERNS = ("secrets/*.key", "specs/*.json", "generations/[0-9]*/*", "*.json", CHECKPOINT_FILE)
_PLAIN = (
    FORMAT_FILE,
    "consent.json",
    "pause.json",
    "traffic.json",
    "memory.json",
)  # the owner's decisions and counts: no images, no weights
_FOLDERS = (".", "secrets", "specs", "generations", "generations/[0-9]*")


@dataclass(frozen=True)
class Encryption:
    """What format.json says of a store.

    Attributes:
        marks: of the keys that its files may be sealed with; none: it is not encrypted.
        is_changing: files of different forms lie side by side.
    """

    marks: frozenset[str] = frozenset()
    is_changing: bool = False

    @staticmethod
    def of(values: Mapping[str, Any], path: Path) -> Encryption:
        """The encryption in format.json's values.

        Raises:
            DamagedFileError: they are not such values.
        """
        found = values.get("encryption", {"keys": [], "changing": False})
        try:
            marks, is_changing = frozenset(found["keys"]), found["changing"]
        except (KeyError, TypeError) as error:
            raise damaged(path) from error
        if not all(isinstance(mark, str) for mark in marks) or not isinstance(is_changing, bool):
            raise damaged(path)
        return Encryption(marks, is_changing)

    def values(self) -> dict[str, Any]:
        """The values in format.json beside the store's owner."""
        if not self.marks:
            return {"format": STORE_FORMAT}
        return {"format": STORE_FORMAT, "encryption": {"keys": sorted(self.marks), "changing": self.is_changing}}

    def files(self, root: Path, key: StoreKey | None) -> StoreFiles:
        """The store's files with a key, or without one.

        Raises:
            StoreKeyError: the key does not fit; says what to do.
        """
        if not self.marks:
            if key is not None:
                raise StoreKeyError(
                    f"{root} is not encrypted, and a key for it is set: run `fedcg agent store encrypt`, or take the key away"
                )
            return StoreFiles(root)
        if key is None:
            raise StoreKeyError(f"{root} is encrypted, and no key is set. {SET_KEY}")
        if key.mark.hex() not in self.marks:
            raise StoreKeyError(f"{root} is encrypted with another key than the one that is set. {SET_KEY}")
        if len(self.marks) > 1:
            raise StoreKeyError(
                f"the change of the key of {root} was interrupted; nothing is lost. Run `fedcg agent store rekey` with the same "
                "--new-key again"
            )
        return StoreFiles(root, (key,), takes_plain=self.is_changing)


def encryption_of(root: Path) -> Encryption:
    """What format.json of a store says; nothing where there is no store.

    Raises:
        StoreError: it can't be read.
    """
    return Encryption.of(read_json(StoreFiles(root), root / FORMAT_FILE), root / FORMAT_FILE)


def change_encryption(root: Path, current: StoreKey | None, target: StoreKey | None) -> tuple[int, tuple[Path, ...]]:
    """Bring every private file of a store into another form; nobody else uses the store.

    Args:
        root: the store's folder.
        current: the key of an encrypted store.
        target: the key that files have afterwards; None: none is encrypted.

    Returns:
        How many files were rewritten, and those that were left alone because they are damaged.

    Raises:
        StoreKeyError: files may be sealed with a key that is not given.
        StoreError: format.json can't be read.
        OSError: the disk is full or broken; the same call goes on.
    """
    plain, path = StoreFiles(root), root / FORMAT_FILE
    values = read_json(plain, path)
    found = Encryption.of(values, path)
    keys = tuple(key for key in (target, current) if key is not None)
    if missing := found.marks - {key.mark.hex() for key in keys}:
        raise StoreKeyError(f"{root} is encrypted with another key ({', '.join(sorted(missing))}). {SET_KEY}")
    owner = {name: values[name] for name in ("federation", "device")}
    under_way = Encryption(found.marks | {key.mark.hex() for key in keys}, is_changing=True)
    if not under_way.marks:
        return 0, ()
    write_json(plain, path, {**owner, **under_way.values()})
    shutil.rmtree(root / "generations" / ".unfinished", ignore_errors=True)
    for folder in _FOLDERS:
        for torn in root.glob(f"{folder}/.*.new"):  # of a process that was killed while it wrote
            torn.unlink()
    takes_plain = found.is_changing or not found.marks
    files = StoreFiles(root, keys, takes_plain=takes_plain, seals=target is not None)
    outdated = [private for private in private_files(root) if not files.is_current(private)]
    left = tuple(private for private in outdated if not _rewrite(files, private))
    done = Encryption(frozenset() if target is None else frozenset({target.mark.hex()}))
    write_json(plain, path, {**owner, **done.values()})
    return len(outdated) - len(left), left


def _rewrite(files: StoreFiles, path: Path) -> bool:
    """Bring a file into the form in which it would be written now; False where it is damaged."""
    try:
        files.replace(path, files.read(path))
    except DamagedFileError:
        return False
    return True


def private_files(root: Path) -> Iterator[Path]:
    """The files of a store that are encrypted where it has a key."""
    found = {path for pattern in _PATTERNS for path in root.glob(pattern)}
    return (path for path in sorted(found) if path.is_file() and path.name not in _PLAIN and path.name[0] != ".")


def open_to_others(root: Path) -> tuple[Path, ...]:
    """Folders and private files of a store that other users of the machine may read or change, the outermost first."""
    folders = (found for folder in _FOLDERS for found in ([root] if folder == "." else root.glob(folder)))
    return tuple(path for path in (*folders, *private_files(root)) if path.stat().st_mode & 0o077)
