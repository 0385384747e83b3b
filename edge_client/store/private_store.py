"""The private store: one folder (0700) with all private data that a device keeps between rounds. Torch-free.

format.json     the format version, and the store's device and federation
lock            held by the agent; trainer.lock is held by its training process
secrets/        device.key and sums.key (created once), cohort.key (shared by all devices of a federation, never with the coordinator),
                cohort.before.key (the previous cohort secret)
specs/          accepted specs by digest           artifacts/   downloads by sha256, .partial/ unfinished ones
generations/    private state, see `generations`   CURRENT      the active generation
checkpoint.bin  the round in training, see `generations`
accepted.json   the data snapshot of the last accepted round
left_out.json   its images that could not be read, with reasons
seen.json       highest (epoch, round, attempt) of a broadcast
coordinator.json  the coordinator's current key, once it was replaced
roster.json     the keys for sums of the cohort's devices
sums.json, weights.json   this device's part in sums       sum_gate.json   the first round whose sums it may join, see `sum_gate`
counter.json    the latest numbers of files whose older copies are refused, see `checked_files`
delivered.json  receipts that ended outbox entries
finalised.json  the outcome of the federation      models/      exported models
control/        requests from the owner's commands to the running agent, see `edge_client.agent.owner`
signing.pub     public keys of this device, for checking its models where they are used, see `export.model.manifest`
audit/          the report of the last audit of an update, with pictures
defence/        the data defence's trained state and sample pictures
memory.json     the share of a batch that fits the memory; halved when memory runs out, discarded if the memory size changes
privacy.json    the privacy spent by DP-SGD; written before each round's training
events.jsonl    see `fedcg.event_log`
"""

from __future__ import annotations

import errno
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edge_client.config import AgentConfig
from edge_client.errors import DamagedFileError, StoreError, StoreFormatError, StoreLockedError, unreadable
from edge_client.store import generations
from edge_client.store.checked_files import (
    COUNTER,
    LEDGER_FILE,
    SENT_FILE,
    damage_of,
    damaged,
    read_json,
    write_json,
    writing_alone,
)
from edge_client.store.roster import Roster
from edge_client.store.sum_gate import GATE_FILE, RECORDS, SumGate
from fedcg.errors import NOT_FOUND
from fedcg.files import (
    SECRET_BYTES,
    HeldError,
    advice_for,
    checked_secret,
    file_sha256,
    locked,
    replace_durably,
    secret_in,
)
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.errors import WireError
from fedcg.wire.messages.envelopes import START, PinnedKey, Position, SigningKey, VerifyKey
from fedcg.wire.messages.schemas import MAX_ARTIFACT_BYTES, SumExchange
from fedcg.wire.transfer.partial_files import Partials

FORMAT_FILE = "format.json"
STORE_FORMAT = 2
_FOLDERS = ("secrets", "specs", "generations", "generations/[0-9]*")
_PRIVATE_FILES = ("secrets/*.key", "specs/*.json", "generations/[0-9]*/*", "*.json", generations.CHECKPOINT_FILE)
_OWN = re.compile(
    r"secrets|specs|artifacts|generations|models|audit|defence|control|CURRENT|lock|trainer\.lock|checkpoint\.bin|signing\.pub|"
    r"(sent|ledger|events|events\.old)\.jsonl|(format|accepted|left_out|seen|coordinator|counter|delivered|finalised|memory|privacy|sums|sum_gate|weights|numbers|"
    r"roster|consent|pause|traffic|revoked)\.json|\.[\w.]+\.\w{8}\.new"
)
"""Names of everything that the program creates in the folder. The last pattern matches files half written before a power cut."""
RECEIPTS_KEPT = 64
LEFT_OUT_KEPT = 200
AUDIT_FOLDER = "audit"
DEFENCE_FOLDER = "defence"
CONTROL_FOLDER = "control"
FINALISED_FILE = "finalised.json"
"""The outcome of the federation."""
PRIVACY_FILE = "privacy.json"
"""The privacy spent by DP-SGD on this device."""
NUMBERS_FILE = "numbers.json"
"""The training process's record of this device's numbers in the last sealed sum, which decides whether they may be in a sum."""
REVOKED_FILE = "revoked.json"
SECRET_FILES = ("device.key", "sums.key", "cohort.key", "cohort.before.key")
PARTIAL_FILES = 8
PARTIAL_BYTES = 2 * MAX_ARTIFACT_BYTES


class DeliveryRecord(Value):
    """The final outcome of an update."""

    artifact: str
    round: int
    attempt: int
    outcome: str
    reason: str


class PrivateStore:
    """One device's private folder for one federation."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.generations = generations.Generations(root)
        self.checkpoint = generations.CheckpointFile(root)
        self.sum_gate = SumGate(root)
        self.partials = Partials(root / "artifacts" / ".partial", PARTIAL_FILES, PARTIAL_BYTES)

    @staticmethod
    def open(root: Path, federation: str, device: str, *, make: bool = True) -> PrivateStore:
        """Open the store at `root`.

        Args:
            root: of the store.
            federation: its federation.
            device: its device.
            make: create a missing store; otherwise a missing store reads as empty.

        Raises:
            StoreError: the store can't be created.
            StoreFormatError: it belongs to another device or federation, has another format, or is not a private store.
        """
        try:
            if make:
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise StoreError(f"the folder {root} can't be created ({error.strerror}): set another `store`") from error
        path, owner = root / FORMAT_FILE, {"federation": federation, "device": device}
        found = read_json(path)
        if not found:
            _check_empty(root)
            if not make:
                return PrivateStore(root)
            root.chmod(0o700)
            SumGate(root).make()
            found = {**owner, "format": STORE_FORMAT}
            write_json(path, found)
        if found.get("format") != STORE_FORMAT:
            raise StoreFormatError(
                f"{root} has store format {found.get('format')}; this program only reads format {STORE_FORMAT}. Use the program that "
                "wrote it, or enrol this device again with a new store"
            )
        if {name: found.get(name) for name in owner} != owner:
            theirs = f"device {found.get('device')!r} of federation {found.get('federation')!r}"
            raise StoreFormatError(f"{root} belongs to {theirs}, not {device!r} of {federation!r}; set another `store`")
        for name in ("secrets", "specs", "artifacts", "generations", "models"):
            (root / name).mkdir(mode=0o700, exist_ok=True)
        return PrivateStore(root)

    @cached_property
    def artifacts(self) -> ArtifactStore:
        """The downloads. Their folder is created on first use."""
        return ArtifactStore(self.root / "artifacts")

    @property
    def is_made(self) -> bool:
        """Whether the store exists."""
        return (self.root / FORMAT_FILE).exists()

    def own(self) -> tuple[Path, ...]:
        """The store's files and folders, with the format file last."""
        kept = (path for path in self.root.glob("*") if _OWN.fullmatch(path.name))
        return tuple(sorted(kept, key=lambda path: (path.name == FORMAT_FILE, path.name)))

    def take_over(self) -> None:
        """Check the secrets, and that only this user can read private files.

        Raises:
            StoreError: names files that other users can access, and the command that fixes it.
        """
        if opened := self.open_to_others():
            named = " ".join(map(str, opened[:8]))
            raise StoreError(
                f"other users of this machine may read or change {opened[0]}{' and more' if len(opened) > 1 else ''}. Run: chmod go= {named}"
            )
        for name in SECRET_FILES:
            _secret(self.root / "secrets" / name)

    def damage(self) -> tuple[str, ...]:
        """Harmless damage outside the generations: files that are recreated, fetched again or ignored.

        Raises:
            StoreError: an important file is damaged; names it, what is lost and what to do.
        """
        kept = (path for name in (SENT_FILE, LEDGER_FILE) if (path := self.root / name).exists())
        specs = (path for path in self.root.glob("specs/*.json") if self.spec(path.stem) is None)
        artifacts = filter(_is_altered, map(self.artifacts.path, self.artifacts.ids()))
        again = (f"{path} is damaged: it is fetched again when needed" for path in (*specs, *artifacts))
        return *self.check_small_files(), *filter(None, map(damage_of, kept)), *again

    def check_small_files(self) -> tuple[str, ...]:
        """Damage in small files that are recreated.

        Raises:
            StoreError: another small file is damaged; names it.
        """
        small = (path for path in self.root.iterdir() if path.suffix in (".json", ".pub") and _OWN.fullmatch(path.name))
        return tuple(filter(None, map(damage_of, sorted(small))))

    def open_to_others(self) -> tuple[Path, ...]:
        """Folders and private files that other users of the machine may read or change, the outermost first."""
        folders = [path for pattern in _FOLDERS for path in self.root.glob(pattern)]
        files = {path for pattern in _PRIVATE_FILES for path in self.root.glob(pattern) if path.is_file()}
        return tuple(path for path in (self.root, *folders, *sorted(files)) if path.stat().st_mode & 0o077)

    @property
    def defence_folder(self) -> Path:
        """The folder of the data defence's trained state. It exists once the defence was applied."""
        return self.root / DEFENCE_FOLDER

    @contextmanager
    def locked(self, name: str = "lock", wait_s: float = 0.0) -> Iterator[None]:
        """Hold a lock file of the store: `lock` for the agent, `trainer.lock` for its training process.

        Raises:
            StoreLockedError: another process holds it for longer than `wait_s`.
            StoreError: this user can't write there, or the disk is read-only.
        """
        with ExitStack() as stack:
            try:
                with _writing_to(self.root):
                    stack.enter_context(locked(self.root / name, wait_s))
            except HeldError as error:
                holder = f"process {str(error) or '(unknown)'}"
                raise StoreLockedError(
                    f"{self.root / name} is held by {holder}, an agent of this device or its training process; stop it first"
                ) from error
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the locks of the agent and of its training process. Raises like `locked`."""
        with self.locked("lock"), self.locked("trainer.lock"):
            yield

    def device_secret(self) -> bytes:
        """This device's root of randomness. Created once, never sent."""
        return self._own_secret("device.key")

    def sum_key(self) -> SigningKey:
        """This device's key, used only for sealed sums. Created once. Its public half is on the cohort's roster."""
        return SigningKey(Ed25519PrivateKey.from_private_bytes(self._own_secret("sums.key")))

    def _own_secret(self, name: str) -> bytes:
        """A secret of this device, created on first use. Two processes at once get the same secret."""
        path = self.root / "secrets" / name
        kept = _secret(path)
        if kept is None:
            with writing_alone(path.parent):
                kept = _secret(path) or secrets.token_bytes(SECRET_BYTES)
                replace_durably(path, checked_secret(kept))
        return kept

    def cohort_secret(self) -> bytes | None:
        """The secret shared by all devices of the federation, or None without one.

        Raises:
            StoreError: the file is too short to be a secret.
        """
        return _secret(self.root / "secrets" / "cohort.key")

    def keep_cohort_secret(self, secret: bytes) -> None:
        """Save the cohort's secret, readable only by the owner.

        If it replaces another secret, this device joins no more sums of rounds it has seen, because they started with the previous secret. That
        secret is kept to open the last of them.
        """
        if (before := self.cohort_secret()) is not None:
            replace_durably(self.root / "secrets" / "cohort.before.key", checked_secret(before))
            if self.sum_gate.first_round is not None:
                self.sum_gate.resume(self.seen()[1])
        replace_durably(self.root / "secrets" / "cohort.key", checked_secret(secret))

    def secrets_of_sum(self, round_number: int) -> tuple[bytes, ...]:
        """The secrets that may open a round's sum: the cohort's, and for rounds before its renewal also the previous one."""
        first = self.sum_gate.first_round
        before = (
            None if first is None or round_number >= first else _secret(self.root / "secrets" / "cohort.before.key")
        )
        return tuple(secret for secret in (self.cohort_secret(), before) if secret is not None)

    def save_spec(self, payload: bytes) -> FederationSpec:
        """Save a spec under its digest.

        Raises:
            ValueError: the bytes are not a canonical spec.
        """
        spec = FederationSpec.parse(payload)
        path = self.root / "specs" / f"{spec.digest}.json"
        if self.spec(spec.digest) is None:
            replace_durably(path, payload)
        return spec

    def spec(self, digest: str) -> FederationSpec | None:
        """A stored spec. A damaged file counts as missing."""
        path = self.root / "specs" / f"{digest}.json"
        if not path.exists():
            return None
        try:
            spec = FederationSpec.parse(path.read_bytes())
        except ValueError:
            return None
        return spec if spec.digest == digest else None

    def spec_digests(self) -> frozenset[str]:
        """Digests of all intact stored specs."""
        kept = (path.stem for path in (self.root / "specs").glob("*.json"))
        return frozenset(digest for digest in kept if self.spec(digest) is not None)

    def accept_snapshot(
        self, spec: str, round_number: int, make: Callable[[], generations.Snapshot]
    ) -> generations.Snapshot:
        """The snapshot of a round: the one saved when it was first accepted, or a new one that is saved now."""
        path = self.root / "accepted.json"
        try:
            kept = read_json(path)
            if kept.get("spec") == spec and kept.get("round") == round_number:
                return generations.Snapshot.decode(kept["snapshot"].encode())
        except (DamagedFileError, ValueError, KeyError):
            pass  # its round was not committed, so no trained state depends on it
        snapshot = make()
        write_json(path, {"spec": spec, "round": round_number, "snapshot": snapshot.encode().decode()})
        return snapshot

    def save_left_out(self, reasons: Mapping[str, str]) -> None:
        """Save which images of the last snapshot can't be read, and why. Names stay on this device."""
        some = dict(sorted(reasons.items())[:LEFT_OUT_KEPT])
        if some or (self.root / "left_out.json").exists():
            write_json(self.root / "left_out.json", {"count": len(reasons), "images": some})

    def left_out(self) -> tuple[int, Mapping[str, str]]:
        """The number of images left out of the last snapshot, and the reasons for the first ones, by path."""
        path = self.root / "left_out.json"
        kept = read_json(path)
        try:
            return int(kept.get("count", 0)), {str(name): str(why) for name, why in kept.get("images", {}).items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise damaged(path) from error

    def forget_snapshot(self) -> None:
        """Make the next round attempt take a new snapshot, because files of the saved one are missing or changed."""
        (self.root / "accepted.json").unlink(missing_ok=True)

    def seen(self) -> Position:
        """The highest (epoch, round, attempt) of an admitted broadcast."""
        kept = read_json(self.root / "seen.json").get("highest", START)
        try:
            epoch, round_number, attempt = map(int, kept)
        except (TypeError, ValueError) as error:
            raise damaged(self.root / "seen.json") from error
        return (epoch, round_number, attempt)

    def save_seen(self, highest: Position) -> None:
        """Save the highest admitted broadcast."""
        write_json(self.root / "seen.json", {"highest": highest})

    def pinned_key(self, enrolled: VerifyKey) -> PinnedKey:
        """The coordinator's current key, followed from the enrolled one; the enrolled key before any replacement."""
        kept = read_json(self.root / "coordinator.json")
        if kept.get("enrolled") != enrolled.hex:
            return PinnedKey(enrolled)
        try:
            return PinnedKey(VerifyKey.from_hex(str(kept["key"])), int(kept["serial"]))
        except (WireError, KeyError, TypeError, ValueError) as error:
            raise damaged(self.root / "coordinator.json") from error

    def save_pinned_key(self, enrolled: VerifyKey, pinned: PinnedKey) -> None:
        """Save the coordinator's current key."""
        values = {"enrolled": enrolled.hex, "key": pinned.key.hex, "serial": pinned.serial}
        write_json(self.root / "coordinator.json", values)

    def is_revoked(self, key: str) -> bool:
        """Whether the coordinator has revoked this device. Tied to the message key, so void once the device is enrolled again.

        Args:
            key: this device's public message key, in hex.
        """
        return read_json(self.root / REVOKED_FILE).get("key") == key

    def save_revoked(self, key: str, *, revoked: bool) -> None:
        """Save the coordinator's revocation, or its end after a welcome."""
        if revoked:
            write_json(self.root / REVOKED_FILE, {"key": key})
        else:
            (self.root / REVOKED_FILE).unlink(missing_ok=True)

    def deliveries(self) -> tuple[DeliveryRecord, ...]:
        """All receipts, oldest first."""
        path = self.root / "delivered.json"
        try:
            return tuple(DeliveryRecord(**entry) for entry in read_json(path).get("entries", ()))
        except TypeError as error:
            raise damaged(path) from error

    def save_delivery(self, record: DeliveryRecord) -> None:
        """Save a receipt, which ends the outbox entry."""
        entries = [asdict(entry) for entry in (*self.deliveries(), record)][-RECEIPTS_KEPT:]
        write_json(self.root / "delivered.json", {"entries": entries})

    def save_reason(self, artifact: str, reason: str) -> DeliveryRecord | None:
        """Save what happened to an update after its receipt. Returns the changed record, or None if there is no change."""
        kept = self.deliveries()
        ended = next((each for each in kept if each.artifact == artifact), None)
        if ended is None or ended.reason == reason:
            return None
        amended = replace(ended, reason=reason)
        entries = [asdict(amended if each is ended else each) for each in kept]
        write_json(self.root / "delivered.json", {"entries": entries})
        return amended

    def outbox(self, generation: generations.Generation | None) -> generations.OutboxEntry | None:
        """The update of `generation` if it is still waiting for a receipt."""
        if generation is None or generation.outbox is None:
            return None
        ended = {record.artifact for record in self.deliveries()}
        return None if generation.outbox.artifact in ended else generation.outbox

    def record(self, file: str) -> dict[str, Any]:
        """The values in `FINALISED_FILE`, `PRIVACY_FILE` or `NUMBERS_FILE`; empty before the first ones."""
        return read_json(self.root / file)

    def save_record(self, file: str, values: Mapping[str, Any]) -> None:
        """Replace the values in such a file."""
        write_json(self.root / file, values)

    def sum_record(self, exchange: SumExchange) -> dict[str, Any]:
        """This device's record of the last sealed sum of weights or parts; empty before the first sum."""
        return read_json(self.root / RECORDS[exchange])

    def save_sum_record(self, exchange: SumExchange, record: Mapping[str, Any]) -> None:
        """Save this device's record of a sealed sum. `round` in it is its round."""
        self.sum_gate.note(int(record["round"]))
        write_json(self.root / RECORDS[exchange], record)

    def roster(self) -> Roster:
        """The keys for sums of the cohort's devices, as set by the owner; empty before."""
        path = self.root / "roster.json"
        try:
            kept = read_json(path)
            keys = {str(device): VerifyKey.from_hex(str(key)) for device, key in dict(kept.get("keys", {})).items()}
            return Roster(keys, frozenset(map(str, kept.get("alone", ()))))
        except (WireError, TypeError, ValueError) as error:
            raise damaged(path) from error

    def save_roster(self, roster: Roster) -> None:
        """Save the keys for sums of the cohort's devices, and which owners agreed to `alone`."""
        keys = {name: key.hex for name, key in roster.keys.items()}
        write_json(self.root / "roster.json", {"keys": keys, "alone": sorted(roster.alone)})

    def prune_artifacts(self, kept: set[str]) -> None:
        """Delete downloads that are no longer needed."""
        self.artifacts.delete_all(set(self.artifacts.ids()) - kept)


def open_store(config: AgentConfig, *, make: bool = False) -> PrivateStore:
    """The private store of a device. Like `PrivateStore.open`, but it is only created with `make`."""
    with _writing_to(config.store):
        return PrivateStore.open(config.store, config.federation, config.device, make=make)


def existing_store(config: AgentConfig) -> PrivateStore:
    """The existing private store of a device, without reading it.

    Raises:
        StoreFormatError: no store at the configured path.
    """
    store = PrivateStore(config.store)
    if not store.is_made:
        raise StoreFormatError(
            f"{config.store} contains no private store yet; `fedcg agent run` creates it", exit_code=NOT_FOUND
        )
    return store


@contextmanager
def _writing_to(root: Path) -> Iterator[None]:
    """Turn write errors that only a person can fix into a StoreError that names the store."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise StoreError(
            f"the private store {root} can't be written ({error.strerror}). {advice_for(error, root)}, or set another `store`"
        ) from error


def _check_empty(root: Path) -> None:
    """Check that a new store's folder is empty, because everything in it may be erased with the store.

    Secrets, the models folder (created by the prediction service) and a new disk's lost+found are allowed.
    """
    try:
        found = {str(path.relative_to(root)) for path in (*root.iterdir(), *root.glob("secrets/*"))}
        found -= {"secrets", *(f"secrets/{name}" for name in SECRET_FILES), "models", "lost+found", GATE_FILE, COUNTER}
        torn = tuple(f".{name}." for name in (FORMAT_FILE, GATE_FILE, COUNTER))
        names = sorted(name for name in found if not name.startswith(torn))
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(root, error) from error
    if {"CURRENT", "generations"}.intersection(names):
        raise StoreFormatError(f"{root} contains private state but no format.json; restore that file from a backup")
    if names:
        raise StoreFormatError(
            f"store = {root} is not a private store, and contains {names[0]}{' and more' if len(names) > 1 else ''}: set `store` in "
            "agent.toml to a new or empty folder"
        )


def _is_altered(artifact: Path) -> bool:
    try:
        return file_sha256(artifact) != artifact.name
    except FileNotFoundError:  # deleted by a running agent
        return False


def _secret(path: Path) -> bytes | None:
    """The secret in a file of the store, or None if the file is missing. A damaged file is an error, never replaced by a new secret."""
    try:
        value = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    secret = secret_in(value)
    if secret is None:
        raise DamagedFileError(
            f"{path} is damaged: it must contain {SECRET_BYTES} bytes and their checksum. Restore it from a backup. To restore a "
            "cohort secret, delete the file and run `fedcg cohort join`"
        )
    return secret
