"""The private store: one atomic commit, two generations, checksums, secrets, locks."""

import itertools
import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_client.errors import StoreDamagedError, StoreError, StoreFormatError, StoreLockedError
from edge_client.store.checked_files import write_json
from edge_client.store.generations import Snapshot, SnapshotFile
from edge_client.store.private_store import RECEIPTS_KEPT, STORE_FORMAT, DeliveryRecord, PrivateStore
from fedcg import files
from fedcg.files import checked_secret
from fedcg.wire.messages.schemas import RoundAttempt
from fedcg.wire.parts import Part
from tests.support.edge.world import DEVICE, FEDERATION, newest, toy_generation, toy_snapshot, toy_spec
from tests.support.present import present

SPEC = toy_spec()


class PowerCutError(Exception):
    """Ends a commit in the middle."""


@pytest.fixture
def store(tmp_path: Path) -> PrivateStore:
    return PrivateStore.open(tmp_path / "store", FEDERATION, DEVICE)


def reopened(store: PrivateStore) -> PrivateStore:
    return PrivateStore.open(store.root, FEDERATION, DEVICE)


def test_a_commit_gives_back_exactly_what_was_put_in(store: PrivateStore) -> None:
    new = toy_generation(SPEC, RoundAttempt(3, 2))
    store.generations.commit(new)
    state = present(reopened(store).generations.load())
    for slot, parts in new.slots.items():
        for part, tensors in parts.items():
            assert {name: array.tolist() for name, array in tensors.items()} == {
                name: array.tolist() for name, array in state.slots[slot][part].items()
            }
    count = state.slots["personal"][Part.GENERATOR]["count"]
    assert (count.shape, count.dtype) == ((), np.dtype(np.int64))
    generation = state.generation
    assert (generation.round_attempt, generation.spec, dict(generation.scores)) == (
        RoundAttempt(3, 2),
        SPEC.digest,
        dict(new.scores),
    )
    assert store.generations.update_bytes(generation) == b"update"
    assert store.generations.snapshot(generation) == toy_snapshot()
    body, _, _ = (store.root / "generations" / "1" / "state.json").read_bytes().partition(b"\n")
    stored = json.loads(body)
    assert stored["cursor"] == stored["outbox"]["cursor"] == {"round": 3, "attempt": 2}  # the stored keys of format 1


def test_two_generations_are_kept_and_older_ones_deleted(store: PrivateStore) -> None:
    for round_number in (1, 2, 3):
        store.generations.commit(toy_generation(SPEC, RoundAttempt(round_number, 1)))
    assert sorted(path.name for path in (store.root / "generations").iterdir()) == ["2", "3"]


@pytest.mark.parametrize("damaged", ["state.safetensors", "state.json", "update.bin", "snapshot.json"])
def test_a_damaged_generation_falls_back_to_the_one_before_and_says_so(store: PrivateStore, damaged: str) -> None:
    store.generations.commit(toy_generation(SPEC, RoundAttempt(1, 1)))
    second = store.generations.commit(toy_generation(SPEC, RoundAttempt(2, 1)))
    path = store.root / "generations" / str(second.number) / damaged
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    generation, problems = newest(reopened(store).generations)
    assert (generation.round_attempt, len(problems)) == (RoundAttempt(1, 1), 1)
    assert str(second.number) in problems[0]
    store.generations.commit(toy_generation(SPEC, RoundAttempt(2, 1)))
    generation, problems = newest(store.generations)
    assert (generation.round_attempt, problems) == (RoundAttempt(2, 1), ())


def test_a_store_without_any_whole_generation_says_what_to_do(store: PrivateStore) -> None:
    number = store.generations.commit(toy_generation(SPEC, RoundAttempt(1, 1))).number
    shutil.rmtree(store.root / "generations" / str(number))
    with pytest.raises(StoreDamagedError, match="backup"):
        store.generations.current()


STEPS = ("write_durably", "fsync_path", "replace_durably")


def sabotaged_commit(
    monkeypatch: pytest.MonkeyPatch, store: PrivateStore, cut_before: int, round_attempt: RoundAttempt
) -> bool:
    """Commit with the power cut before one durable step; whether the commit got through."""
    steps = itertools.count()
    with monkeypatch.context() as patch:
        for name in STEPS:
            real = getattr(files, name)

            def wrapped(*args: object, real: object = real) -> object:
                if next(steps) == cut_before:
                    raise PowerCutError
                return real(*args)  # type: ignore[operator]

            patch.setattr(f"edge_client.store.generations.{name}", wrapped)
        try:
            store.generations.commit(toy_generation(SPEC, round_attempt))
        except PowerCutError:
            return False
    return True


def test_a_power_cut_at_any_step_of_a_commit_leaves_the_old_or_the_new_state_whole(
    monkeypatch: pytest.MonkeyPatch, store: PrivateStore
) -> None:
    store.generations.commit(toy_generation(SPEC, RoundAttempt(1, 1)))
    cuts = 0
    while not sabotaged_commit(monkeypatch, store, cuts, RoundAttempt(2, 1)):
        generation, problems = newest(reopened(store).generations)
        assert (generation.round_attempt, problems) == (RoundAttempt(1, 1), ()), f"before step {cuts}"
        assert store.generations.update_bytes(generation) == b"update"
        cuts += 1
    assert cuts >= 7  # four files, two folders, the pointer
    generation, _ = newest(reopened(store).generations)
    assert generation.round_attempt == RoundAttempt(2, 1)


def test_what_a_cut_commit_left_behind_never_counts(monkeypatch: pytest.MonkeyPatch, store: PrivateStore) -> None:
    # the folder is there, CURRENT was never written
    assert not sabotaged_commit(monkeypatch, store, 6, RoundAttempt(1, 1))
    assert reopened(store).generations.current() == (None, ())
    store.generations.commit(toy_generation(SPEC, RoundAttempt(1, 1), update=b"whole"))
    generation, _ = newest(store.generations)
    assert store.generations.update_bytes(generation) == b"whole"


def test_only_a_recorded_receipt_empties_the_outbox(store: PrivateStore) -> None:
    generation = store.generations.commit(toy_generation(SPEC, RoundAttempt(1, 1)))
    entry = present(reopened(store).outbox(generation))
    store.save_delivery(DeliveryRecord("f" * 64, 1, 1, "accepted", ""))
    assert store.outbox(generation) == entry
    store.save_delivery(DeliveryRecord(entry.artifact, 1, 1, "late", ""))
    assert reopened(store).outbox(generation) is None


def test_old_receipts_are_forgotten_but_not_the_newest(store: PrivateStore) -> None:
    for number in range(RECEIPTS_KEPT + 5):
        store.save_delivery(DeliveryRecord(f"{number:064x}", number, 1, "accepted", ""))
    kept = store.deliveries()
    assert len(kept) == RECEIPTS_KEPT
    assert kept[-1].round == RECEIPTS_KEPT + 4


def test_nobody_else_can_read_the_store(store: PrivateStore) -> None:
    store.device_secret()
    store.generations.commit(toy_generation(SPEC, RoundAttempt(1, 1)))
    store.save_seen((1, 2, 3))
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    files = [path for path in store.root.rglob("*") if path.is_file()]
    assert len(files) >= 7
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_the_device_secret_is_made_once_and_differs_between_devices(store: PrivateStore, tmp_path: Path) -> None:
    secret = store.device_secret()
    assert len(secret) == 32
    assert reopened(store).device_secret() == secret
    assert PrivateStore.open(tmp_path / "other", FEDERATION, "site-2").device_secret() != secret


def test_secrets_that_were_put_there_before_the_first_start_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "secrets"
    folder.mkdir(parents=True)
    (folder / "device.key").write_bytes(checked_secret(b"d" * 32))
    store = PrivateStore.open(tmp_path / "store", FEDERATION, DEVICE)
    (folder / "device.key").chmod(0o600)
    folder.chmod(0o700)
    store.root.chmod(0o700)
    store.take_over()
    assert store.device_secret() == b"d" * 32
    checked = (folder / "device.key").read_bytes()
    for bit in range(8 * len(checked)):
        data = bytearray(checked)
        data[bit // 8] ^= 1 << bit % 8
        (folder / "device.key").write_bytes(data)
        with pytest.raises(StoreError, match=r"device\.key is damaged.*Restore it from a backup"):
            store.device_secret()


@pytest.mark.parametrize(
    ("federation", "device", "said"), [(FEDERATION, "site-2", "site-1"), ("letters", DEVICE, "shapes")]
)
def test_a_store_of_somebody_else_is_refused(store: PrivateStore, federation: str, device: str, said: str) -> None:
    with pytest.raises(StoreFormatError, match=said):
        PrivateStore.open(store.root, federation, device)


@pytest.mark.parametrize("version", [STORE_FORMAT - 1, STORE_FORMAT + 1])
def test_a_store_of_another_format_is_refused_by_name_and_left_as_it_was(store: PrivateStore, version: int) -> None:
    write_json(store.root / "format.json", {"format": version, "federation": FEDERATION, "device": DEVICE})
    before = (store.root / "format.json").read_bytes()
    with pytest.raises(
        StoreFormatError,
        match=rf"has store format {version}; this program only reads format {STORE_FORMAT}. Use the program that",
    ):
        reopened(store)
    assert (store.root / "format.json").read_bytes() == before


def test_private_state_without_its_format_is_not_adopted(store: PrivateStore) -> None:
    (store.root / "format.json").unlink()
    with pytest.raises(StoreFormatError, match=r"format\.json"):
        reopened(store)


@pytest.fixture
def holder(store: PrivateStore) -> Iterator[subprocess.Popen[str]]:
    code = (
        "import sys, pathlib; from edge_client.store.private_store import PrivateStore\n"
        "with PrivateStore(pathlib.Path(sys.argv[1])).locked():\n    print('held', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, str(store.root)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert present(process.stdout).readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_cannot_work_in_the_store_until_the_first_is_dead(
    store: PrivateStore, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(StoreLockedError, match=f"is held by process {holder.pid},"), store.locked():
        pass
    holder.kill()
    with store.locked(wait_s=10.0):
        pass


def test_the_snapshot_of_a_round_is_fixed_when_it_is_first_accepted(store: PrivateStore) -> None:
    first, grown = toy_snapshot(3), toy_snapshot(5)
    assert store.accept_snapshot(SPEC.digest, 1, lambda: first) == first
    assert reopened(store).accept_snapshot(SPEC.digest, 1, lambda: grown) == first
    assert store.accept_snapshot(SPEC.digest, 2, lambda: grown) == grown
    store.forget_snapshot()
    assert store.accept_snapshot(SPEC.digest, 2, lambda: first) == first


def test_a_snapshot_survives_its_encoding_and_its_digest_tells_any_difference() -> None:
    snapshot = Snapshot((SnapshotFile("a/ü.png", "0" * 64, 0, "train"), SnapshotFile("b/1.png", "1" * 64, 1, "val")))
    assert Snapshot.decode(snapshot.encode()) == snapshot
    assert snapshot.counts() == {"train": 1, "val": 1, "test": 0}
    assert Snapshot((snapshot.files[0], SnapshotFile("b/1.png", "1" * 64, 1, "test"))).digest != snapshot.digest
    with pytest.raises(ValueError, match="snapshot"):
        Snapshot.decode(b'[{"path": "a"}]')


def test_a_spec_that_was_tampered_with_counts_as_absent_and_the_next_download_replaces_it(store: PrivateStore) -> None:
    store.save_spec(SPEC.canonical())
    assert reopened(store).spec(SPEC.digest) == SPEC
    path = store.root / "specs" / f"{SPEC.digest}.json"
    for damaged in (path.read_bytes().replace(b'"rounds":2', b'"rounds":9'), b"{"):
        path.write_bytes(damaged)
        assert (store.spec(SPEC.digest), store.spec_digests()) == (None, frozenset())
    store.save_spec(SPEC.canonical())
    assert store.spec(SPEC.digest) == SPEC


def test_only_downloads_that_something_refers_to_are_kept(store: PrivateStore) -> None:
    kept, dropped = store.artifacts.put(b"kept"), store.artifacts.put(b"dropped")
    store.prune_artifacts({kept})
    assert store.artifacts.has(kept)
    assert not store.artifacts.has(dropped)
