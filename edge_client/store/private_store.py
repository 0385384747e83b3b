"""The private store: one folder (0700) with all private data that a device keeps between rounds. Torch-free.

format.json     the format version, and whose store it is
lock            held by the agent; trainer.lock is held by its training process
secrets/        device.key (made once), cohort.key (given to all devices of a federation, never to the coordinator)
specs/          accepted specs by digest           artifacts/   downloads by sha256, .partial/ those under way
generations/    private state, see `generations`   CURRENT      which one counts
accepted.json   the data snapshot of the round that was accepted last
seen.json       highest (epoch, round, attempt) of a broadcast
coordinator.json  the coordinator's key that counts, once it was replaced
delivered.json  receipts that ended outbox entries
finalised.json  the outcome of the federation      models/      exported models
audit/          the report of the last audit of an update, with pictures
defence/        what the data defence learned, and sample pictures of what it does
privacy.json    what DP-SGD has spent; written before each round's training
events.jsonl    see `fedcg.event_log`
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_client.errors import StoreError, StoreFormatError, StoreLockedError, unreadable
from edge_client.store.data_snapshot import Snapshot
from edge_client.store.generations import Generation, Generations, OutboxEntry
from fedcg.files import replace_durably
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.errors import WireError
from fedcg.wire.messages.key_chain import PinnedKey
from fedcg.wire.messages.messages import MAX_ARTIFACT_BYTES
from fedcg.wire.messages.ordering import START, Position
from fedcg.wire.messages.signing import VerifyKey
from fedcg.wire.transfer.partial_files import Partials

STORE_FORMAT = 1
SECRET_BYTES = 32
RECEIPTS_KEPT = 64
AUDIT_FOLDER, AUDIT_PAGE = "audit", "report.html"
DEFENCE_FOLDER = "defence"
PRIVACY_FILE = "privacy.json"
PARTIAL_FILES = 8
PARTIAL_BYTES = 2 * MAX_ARTIFACT_BYTES


@dataclass(frozen=True)
class DeliveryRecord:
    """The end of an update."""

    artifact: str
    round: int
    attempt: int
    outcome: str
    reason: str


class PrivateStore:
    """One device's private folder for one federation."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.generations = Generations(root)
        self.artifacts = ArtifactStore(root / "artifacts")
        self.partials = Partials(root / "artifacts" / ".partial", PARTIAL_FILES, PARTIAL_BYTES)

    @staticmethod
    def open(root: Path, federation: str, device: str) -> PrivateStore:
        """Open the store at `root`, making it when there is none yet.

        Raises:
            StoreFormatError: it is another device's or federation's, newer than this program, or not a private store.
        """
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        expected = {"format": STORE_FORMAT, "federation": federation, "device": device}
        found = _read_json(root / "format.json")
        if not found:
            if (root / "CURRENT").exists() or (root / "generations").exists():
                raise StoreFormatError(
                    f"{root} holds private state but no format.json; restore that file from a backup"
                )
            replace_durably(root / "format.json", json.dumps(expected))
            found = expected
        if found.get("format") != STORE_FORMAT:
            raise StoreFormatError(f"{root} has store format {found.get('format')}; this program reads {STORE_FORMAT}")
        if found != expected:
            owner = f"device {found.get('device')!r} of federation {found.get('federation')!r}"
            raise StoreFormatError(
                f"{root} belongs to {owner}, not to {device!r} of {federation!r}; set another `store`"
            )
        for name in ("secrets", "specs", "artifacts", "generations", "models"):
            (root / name).mkdir(mode=0o700, exist_ok=True)
        return PrivateStore(root)

    @property
    def defence_folder(self) -> Path:
        """Where the data defence keeps what it learned; there once it was applied."""
        return self.root / DEFENCE_FOLDER

    @contextmanager
    def locked(self, name: str = "lock", wait_s: float = 0.0) -> Iterator[None]:
        """Hold a lock file of the store; `lock` for the agent, `trainer.lock` for its training process.

        Raises:
            StoreLockedError: another process holds it for longer than `wait_s`.
        """
        deadline = time.monotonic() + wait_s
        with (self.root / name).open("a+") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if time.monotonic() >= deadline:
                        file.seek(0)
                        holder = f"process {file.read(16).strip() or '(unknown)'}"
                        raise StoreLockedError(
                            f"{self.root / name} is held by {holder}, an agent of this device or its training process; stop it first"
                        ) from error
                    time.sleep(0.02)
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def device_secret(self) -> bytes:
        """This device's own root of randomness: made once, never sent."""
        path = self.root / "secrets" / "device.key"
        kept = _secret(path)
        if kept is None:
            replace_durably(path, kept := secrets.token_bytes(SECRET_BYTES))
        return kept

    def cohort_secret(self) -> bytes | None:
        """The secret shared by all devices of the federation, or None without one.

        Raises:
            StoreError: the file is too short to be a secret.
        """
        return _secret(self.root / "secrets" / "cohort.key")

    def keep_cohort_secret(self, secret: bytes) -> None:
        """Keep the cohort's secret, for its owner's eyes only; replaces none."""
        replace_durably(self.root / "secrets" / "cohort.key", secret)

    def save_spec(self, payload: bytes) -> FederationSpec:
        """Keep a spec under its digest.

        Raises:
            ValueError: the bytes are not a canonical spec.
        """
        spec = FederationSpec.parse(payload)
        path = self.root / "specs" / f"{spec.digest}.json"
        if not path.exists():
            replace_durably(path, payload)
        return spec

    def spec(self, digest: str) -> FederationSpec | None:
        """A spec that was kept earlier; a damaged file counts as absent."""
        path = self.root / "specs" / f"{digest}.json"
        if not path.exists():
            return None
        try:
            spec = FederationSpec.parse(path.read_bytes())
        except ValueError:
            return None
        return spec if spec.digest == digest else None

    def spec_digests(self) -> frozenset[str]:
        """Digests of all kept specs that are whole."""
        kept = (path.stem for path in (self.root / "specs").glob("*.json"))
        return frozenset(digest for digest in kept if self.spec(digest) is not None)

    def accept_snapshot(self, spec: str, round_number: int, make: Callable[[], Snapshot]) -> Snapshot:
        """The snapshot of a round: the one kept when it was first accepted, or a new one that is now kept."""
        path = self.root / "accepted.json"
        kept = _read_json(path)
        if kept.get("spec") == spec and kept.get("round") == round_number:
            return Snapshot.decode(kept["snapshot"].encode())
        snapshot = make()
        _write_json(path, {"spec": spec, "round": round_number, "snapshot": snapshot.encode().decode()})
        return snapshot

    def forget_snapshot(self) -> None:
        """Let the next round attempt take a new snapshot, because files of the kept one are gone or changed."""
        (self.root / "accepted.json").unlink(missing_ok=True)

    def seen(self) -> Position:
        """The highest (epoch, round, attempt) of a broadcast admitted so far."""
        kept = _read_json(self.root / "seen.json").get("highest", START)
        try:
            epoch, round_number, attempt = map(int, kept)
        except (TypeError, ValueError) as error:
            raise _damaged(self.root / "seen.json") from error
        return (epoch, round_number, attempt)

    def save_seen(self, highest: Position) -> None:
        """Store the highest broadcast admitted."""
        _write_json(self.root / "seen.json", {"highest": highest})

    def pinned_key(self, enrolled: VerifyKey) -> PinnedKey:
        """The coordinator's key that was followed from the enrolled one; that one itself before any replacement."""
        kept = _read_json(self.root / "coordinator.json")
        if kept.get("enrolled") != enrolled.hex:
            return PinnedKey(enrolled)
        try:
            return PinnedKey(VerifyKey.from_hex(str(kept["key"])), int(kept["serial"]))
        except (WireError, KeyError, TypeError, ValueError) as error:
            raise _damaged(self.root / "coordinator.json") from error

    def save_pinned_key(self, enrolled: VerifyKey, pinned: PinnedKey) -> None:
        """Store the coordinator's key that counts."""
        values = {"enrolled": enrolled.hex, "key": pinned.key.hex, "serial": pinned.serial}
        _write_json(self.root / "coordinator.json", values)

    def deliveries(self) -> tuple[DeliveryRecord, ...]:
        """Receipts so far, oldest first."""
        return tuple(DeliveryRecord(**entry) for entry in _read_json(self.root / "delivered.json").get("entries", ()))

    def save_delivery(self, record: DeliveryRecord) -> None:
        """Store a receipt: this ends the outbox entry."""
        entries = [asdict(entry) for entry in (*self.deliveries(), record)][-RECEIPTS_KEPT:]
        _write_json(self.root / "delivered.json", {"entries": entries})

    def outbox(self, generation: Generation | None) -> OutboxEntry | None:
        """The update of `generation` that still waits for a receipt."""
        if generation is None or generation.outbox is None:
            return None
        ended = {record.artifact for record in self.deliveries()}
        return None if generation.outbox.artifact in ended else generation.outbox

    def finalised(self) -> dict[str, Any]:
        """The outcome of the federation; empty before its end."""
        return _read_json(self.root / "finalised.json")

    def save_finalised(self, outcome: dict[str, Any]) -> None:
        """Store the outcome of the federation."""
        _write_json(self.root / "finalised.json", outcome)

    def privacy(self) -> dict[str, Any]:
        """What DP-SGD has spent here; empty before its first round."""
        return _read_json(self.root / PRIVACY_FILE)

    def save_privacy(self, record: Mapping[str, Any]) -> None:
        """Store what DP-SGD has spent."""
        _write_json(self.root / PRIVACY_FILE, record)

    def prune_artifacts(self, kept: set[str]) -> None:
        """Delete downloads that nothing refers to any more."""
        self.artifacts.delete_all(set(self.artifacts.ids()) - kept)


def _secret(path: Path) -> bytes | None:
    """The secret in a file of the store, or None when there is no such file; anything else is an error, never a new secret."""
    try:
        path.chmod(0o600)
        value = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    if len(value) < SECRET_BYTES:
        raise StoreError(f"{path} has {len(value)} bytes; a secret needs at least {SECRET_BYTES}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    """A small JSON file of the store; only an absent one counts as empty.

    Raises:
        StoreError: it is there and can't be read, or its content is damaged: an empty one in its place would start the
            order of broadcasts anew, or trust a key that was rotated away.
    """
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise _damaged(path)
    return values


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    replace_durably(path, json.dumps({"format": 1, **values}))


def _damaged(path: Path) -> StoreError:
    return StoreError(f"{path} is damaged; restore it from a backup, or enrol this device anew with a new store")
