"""A disk that does not answer says nothing: nothing is forgotten, trusted or trained a second time because of it."""

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_client.errors import StoreError
from edge_client.store.generations import Generations
from edge_client.store.private_store import DeliveryRecord, PrivateStore
from fedcg.files import file_sha256
from fedcg.wire.messages.envelopes import PinnedKey, SigningKey
from fedcg.wire.messages.schemas import Manifest, RoundAttempt
from tests.support.edge.world import DEVICE, FEDERATION, MakeWorld, toy_generation, toy_snapshot, toy_spec, update_of
from tests.support.waiting import wait_until

SPEC = toy_spec()
ENROLLED = SigningKey.generate().public
STATE_FILES = ("seen.json", "coordinator.json", "delivered.json", "accepted.json", "finalised.json")


@pytest.fixture
def store(tmp_path: Path) -> PrivateStore:
    return PrivateStore.open(tmp_path / "store", FEDERATION, DEVICE)


def filled(store: PrivateStore) -> None:
    store.save_seen((3, 7, 1))
    store.save_pinned_key(ENROLLED, PinnedKey(SigningKey.generate().public, 2))
    store.save_delivery(DeliveryRecord("f" * 64, 1, 1, "accepted", ""))
    store.accept_snapshot(SPEC.digest, 1, toy_snapshot)
    store.save_finalised({"aggregate": "a" * 64})


def read(store: PrivateStore, name: str) -> object:
    readers = {
        "seen.json": store.seen,
        "coordinator.json": lambda: store.pinned_key(ENROLLED),
        "delivered.json": store.deliveries,
        "accepted.json": lambda: store.accept_snapshot(SPEC.digest, 1, toy_snapshot),
        "finalised.json": store.finalised,
    }
    return readers[name]()


def unreadable(path: Path) -> None:
    """A directory in a file's place can't be read by anybody, root included."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", STATE_FILES)
def test_a_state_file_that_can_not_be_read_is_an_error_that_names_it(store: PrivateStore, name: str) -> None:
    filled(store)
    read(store, name)
    unreadable(store.root / name)
    with pytest.raises(StoreError, match=rf"{name}.*can't be read.*start the agent again"):
        read(store, name)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
@pytest.mark.parametrize("name", [name for name in STATE_FILES if name != "accepted.json"])
def test_a_damaged_state_file_is_an_error_and_never_an_empty_one(
    store: PrivateStore, name: str, content: bytes
) -> None:
    filled(store)
    (store.root / name).write_bytes(content)
    with pytest.raises(StoreError, match=rf"{name} is damaged. .*(estore the whole store from a backup|delete it)"):
        read(store, name)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
def test_a_damaged_snapshot_of_a_round_that_was_not_committed_is_taken_anew(
    store: PrivateStore, content: bytes
) -> None:
    filled(store)
    (store.root / "accepted.json").write_bytes(content)
    assert store.accept_snapshot(SPEC.digest, 1, lambda: toy_snapshot(2)) == toy_snapshot(2)
    assert store.accept_snapshot(SPEC.digest, 1, toy_snapshot) == toy_snapshot(2)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("seen.json", '{"highest": [1, 2]}'),
        ("seen.json", '{"highest": "x"}'),
        ("seen.json", '{"highest": [1, 2, null]}'),
        ("coordinator.json", f'{{"enrolled": "{ENROLLED.hex}", "key": "zz", "serial": 2}}'),
    ],
)
def test_an_order_or_key_that_can_not_be_parsed_does_not_bring_back_the_first_one(
    store: PrivateStore, name: str, content: str
) -> None:
    (store.root / name).write_text(content)
    with pytest.raises(StoreError, match=rf"{name} is damaged"):
        read(store, name)


def test_only_absent_state_files_are_empty(store: PrivateStore) -> None:
    assert store.seen() == (0, 0, 0)
    assert store.pinned_key(ENROLLED) == PinnedKey(ENROLLED)
    assert (store.deliveries(), store.finalised()) == ((), {})


@pytest.mark.parametrize("name", ["device.key", "cohort.key"])
def test_a_secret_that_can_not_be_read_is_not_made_anew(store: PrivateStore, name: str) -> None:
    (store.root / "secrets" / name).mkdir()
    with pytest.raises(StoreError, match=rf"{name} can't be read"):
        store.device_secret() if name == "device.key" else store.cohort_secret()


@pytest.fixture
def bad_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Reading a generation's files gives EIO until the patch is undone."""

    def fails(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("edge_client.store.generations.file_sha256", fails)
        yield patch


def test_one_failing_read_of_the_newest_generation_does_not_bring_back_the_one_before(
    store: PrivateStore, bad_disk: pytest.MonkeyPatch
) -> None:
    store.generations.commit(toy_generation(SPEC, RoundAttempt(1, 1)))
    store.generations.commit(toy_generation(SPEC, RoundAttempt(2, 1)))
    fresh = PrivateStore(store.root).generations
    for look in (fresh.current, fresh.load):
        with pytest.raises(StoreError, match=r"generations/2/\S+ can't be read: Input/output error"):
            look()
    bad_disk.undo()
    generation, problems = fresh.current()
    assert generation is not None
    assert (generation.round_attempt, problems) == (RoundAttempt(2, 1), ())


@pytest.mark.parametrize("look", ["current", "newest"])
def test_a_pointer_that_can_not_be_read_makes_no_uncommitted_generation_count(store: PrivateStore, look: str) -> None:
    store.generations.commit(toy_generation(SPEC, RoundAttempt(1, 1)))
    unreadable(store.root / "CURRENT")
    with pytest.raises(StoreError, match="CURRENT can't be read"):
        getattr(PrivateStore(store.root).generations, look)()


def test_the_newest_generation_is_that_of_another_process_and_falls_back_like_the_current_one(
    store: PrivateStore,
) -> None:
    trainer, agent = Generations(store.root), Generations(store.root)
    assert agent.newest() is None
    for number in (1, 2):
        committed = trainer.commit(toy_generation(SPEC, RoundAttempt(number, 1)))
        assert agent.newest() == committed
    (store.root / "generations" / "2" / "state.safetensors").write_bytes(b"torn")
    restarted = Generations(store.root)
    fallback, problems = restarted.current()
    assert fallback is not None
    assert (fallback.round_attempt, len(problems)) == (RoundAttempt(1, 1), 1)
    assert restarted.newest() == fallback, "what was found damaged at the start does not count later on"
    (store.root / "generations" / "2" / "state.json").write_bytes(b"torn")
    assert Generations(store.root).newest() == fallback


def test_no_state_file_is_hashed_on_the_loop_of_an_agent_at_work(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    world.connect()
    coordinator = world.coordinator
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(f"{path.name} on {threading.current_thread().name}")
        return file_sha256(path)

    monkeypatch.setattr("edge_client.store.generations.file_sha256", counted)
    coordinator.offer(world.spec, update_of(world.spec, RoundAttempt(0, 1)), 1)
    coordinator.invite(1)
    manifest = coordinator.wait(Manifest)
    assert coordinator.collect(manifest) == update_of(world.spec, RoundAttempt(1, 1))
    coordinator.receipt(manifest)
    wait_until(lambda: bool(world.events("receipt")), "the receipt is recorded")
    assert hashed == []
