"""A private store on a disk that fails: the last committed round counts, or the loss is reported with its remedy; nothing is trusted or trained twice."""

import errno
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.cli.opening import create_home
from coordinator.config import CoordinatorConfig
from edge_client.errors import DamagedFileError, StoreError
from edge_client.store.checked_files import read_json, write_json
from edge_client.store.generations import Generations
from edge_client.store.private_store import FINALISED_FILE, PRIVACY_FILE, DeliveryRecord, PrivateStore
from fedcg.wire.messages.envelopes import PinnedKey, SigningKey
from fedcg.wire.messages.schemas import RoundAttempt
from tests.support.commands import data_of, run_fedcg
from tests.support.coordinator.homes import add_federation, bundle
from tests.support.edge.filled_store import SPEC, contents, files_of, fill
from tests.support.edge.world import DEVICE, FEDERATION, newest, toy_generation, toy_snapshot, write_device

ENROLLED = SigningKey.generate().public
WRITES: dict[str, Callable[[PrivateStore, int], object]] = {
    "seen.json": lambda store, number: store.save_seen((1, number, 1)),
    "sums.json": lambda store, number: store.save_sum_record("parts", {"round": number}),
    "weights.json": lambda store, number: store.save_sum_record("weights", {"round": number}),
    "sum_gate.json": lambda store, number: store.sum_gate.resume(number),
    "privacy.json": lambda store, number: store.save_record(PRIVACY_FILE, {"spent": number}),
    "coordinator.json": lambda store, number: store.save_pinned_key(ENROLLED, PinnedKey(ENROLLED, number)),
    "delivered.json": lambda store, number: store.save_delivery(DeliveryRecord("f" * 64, number, 1, "accepted", "")),
    "finalised.json": lambda store, number: store.save_record(FINALISED_FILE, {"aggregate": f"{number:064x}"}),
    "accepted.json": lambda store, _: store.accept_snapshot(SPEC.digest, 1, toy_snapshot),
}
READS: dict[str, Callable[[PrivateStore], object]] = {
    "seen.json": lambda store: store.seen(),
    "sums.json": lambda store: store.sum_record("parts"),
    "weights.json": lambda store: store.sum_record("weights"),
    "sum_gate.json": lambda store: store.sum_gate.first_round,
    "privacy.json": lambda store: store.record(PRIVACY_FILE),
    "coordinator.json": lambda store: store.pinned_key(ENROLLED),
    "delivered.json": lambda store: store.deliveries(),
    "finalised.json": lambda store: store.record(FINALISED_FILE),
    "accepted.json": lambda store: store.accept_snapshot(SPEC.digest, 1, toy_snapshot),
}
COUNTED = ("seen.json", "sums.json", "weights.json", "sum_gate.json", "privacy.json", "coordinator.json")
"""Files of which an older copy is told by the counter."""


@pytest.fixture
def store(tmp_path: Path) -> PrivateStore:
    return PrivateStore.open(tmp_path / "store", FEDERATION, DEVICE)


def unreadable(path: Path) -> None:
    """A directory in a file's place can't be read by anybody, root included."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", WRITES)
def test_a_state_file_that_can_not_be_read_is_an_error_that_names_it(store: PrivateStore, name: str) -> None:
    WRITES[name](store, 1)
    READS[name](store)
    unreadable(store.root / name)
    with pytest.raises(StoreError, match=rf"{name}.*can't be read.*start the agent again"):
        READS[name](store)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b'{"highest": [1, 2]}'])
@pytest.mark.parametrize("name", [name for name in WRITES if name != "accepted.json"])
def test_a_damaged_state_file_is_an_error_never_an_empty_one(store: PrivateStore, name: str, content: bytes) -> None:
    WRITES[name](store, 1)
    (store.root / name).write_bytes(content)
    with pytest.raises(StoreError, match=rf"{name} is damaged. .*(estore|delete it)"):
        READS[name](store)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
def test_a_damaged_snapshot_of_a_round_without_a_commit_is_taken_anew(store: PrivateStore, content: bytes) -> None:
    WRITES["accepted.json"](store, 1)
    (store.root / "accepted.json").write_bytes(content)
    assert store.accept_snapshot(SPEC.digest, 1, lambda: toy_snapshot(2)) == toy_snapshot(2)
    assert store.accept_snapshot(SPEC.digest, 1, toy_snapshot) == toy_snapshot(2)


def test_only_absent_state_files_are_empty(store: PrivateStore) -> None:
    assert (store.seen(), store.pinned_key(ENROLLED)) == ((0, 0, 0), PinnedKey(ENROLLED))
    assert (store.deliveries(), store.record(FINALISED_FILE)) == ((), {})


@pytest.mark.parametrize("name", ["device.key", "sums.key", "cohort.key"])
def test_a_secret_that_can_not_be_read_is_not_made_anew(store: PrivateStore, name: str) -> None:
    (store.root / "secrets" / name).mkdir()
    read = {"device.key": store.device_secret, "sums.key": store.sum_key, "cohort.key": store.cohort_secret}[name]
    with pytest.raises(StoreError, match=rf"{name} can't be read"):
        read()


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
    generation, problems = newest(fresh)
    assert (generation.round_attempt, problems) == (RoundAttempt(2, 1), ())


@pytest.mark.parametrize("look", ["current", "newest"])
def test_a_pointer_that_can_not_be_read_makes_no_uncommitted_generation_count(store: PrivateStore, look: str) -> None:
    store.generations.commit(toy_generation(SPEC, RoundAttempt(1, 1)))
    unreadable(store.root / "CURRENT")
    with pytest.raises(StoreError, match="CURRENT can't be read"):
        getattr(PrivateStore(store.root).generations, look)()


def test_newest_is_the_generation_of_another_process_and_falls_back_like_the_current_one(store: PrivateStore) -> None:
    trainer, agent = Generations(store.root), Generations(store.root)
    assert agent.newest() is None
    for number in (1, 2):
        assert trainer.commit(toy_generation(SPEC, RoundAttempt(number, 1))) == agent.newest()
    (store.root / "generations" / "2" / "state.safetensors").write_bytes(b"torn")
    restarted = Generations(store.root)
    fallback, problems = newest(restarted)
    assert (fallback.round_attempt, len(problems)) == (RoundAttempt(1, 1), 1)
    assert restarted.newest() == fallback, "what was found damaged at the start does not count later on"
    (store.root / "generations" / "2" / "state.json").write_bytes(b"torn")
    assert Generations(store.root).newest() == fallback


REMEDIES = ("estore", "delete it", "move it away", "enrol")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_device(folder)
    fill(PrivateStore.open(folder / "store", FEDERATION, DEVICE))
    return folder


@st.composite
def damages(draw: st.DrawFn) -> tuple[float, float, str, int]:
    kind = draw(st.sampled_from(["truncate", "flip", "zeros", "append"]))
    return draw(st.floats(0, 0.9999)), draw(st.floats(0, 0.9999)), kind, draw(st.integers(1, 255))


def damaged(content: bytes, place: float, kind: str, value: int) -> bytes:
    at = int(place * len(content))
    if kind == "truncate":
        return content[:at]
    if kind == "append":
        return content + bytes([value]) * 3
    if kind == "zeros":
        return content[:at] + bytes(len(content) - at)
    return content[:at] + bytes([content[at] ^ value]) + content[at + 1 :] if content else bytes([value])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(damages())
def test_a_damaged_file_never_leads_to_other_state_in_silence(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, damage: tuple[float, float, str, int]
) -> None:
    copy = tmp_path_factory.mktemp("damaged") / "box"
    shutil.copytree(whole, copy)
    files = files_of(copy / "store")
    which, place, kind, value = damage
    name = list(files)[int(which * len(files))]
    (copy / "store" / name).write_bytes(damaged(files[name], place, kind, value))
    before = contents(PrivateStore.open(whole / "store", FEDERATION, DEVICE))
    status = run_fedcg("agent", "status", "--config", copy / "agent.toml")
    assert status.exception is None or isinstance(status.exception, SystemExit), (name, status.exception)
    try:
        after = contents(PrivateStore.open(copy / "store", FEDERATION, DEVICE))
    except StoreError as error:
        check_told(error, name)
        shutil.rmtree(copy.parent)
        return
    for what, value_before in before.items():
        found = after[what]
        if isinstance(found, StoreError):
            check_told(found, name)
        elif what == "generation" and found != value_before:
            assert found[1], "problems are reported"
            assert found[0] in (RoundAttempt(1, 1), RoundAttempt(2, 1))
            assert found[0] == RoundAttempt(1, 1) or found[2:] == value_before[2:]
            assert "damaged" in found[1][0]
        elif found != value_before:
            # A spec is fetched again; a checkpoint is left out, which the training process reports.
            assert (what, found) in (("spec", None), ("specs", frozenset()), ("checkpoint", {})), (name, what)
    shutil.rmtree(copy.parent)


def check_told(error: StoreError, name: str) -> None:
    text = str(error)
    assert Path(name).name in text or "generation" in text or "store" in text, (name, text)
    assert any(remedy in text for remedy in REMEDIES), (name, text)


UNCHECKED = ("agent.toml", "checkpoint.bin", "events.jsonl", "lock", "trainer.lock", "generations/1/", "models/")
"""Prefixes of files below a device's folder or its store that have no check, or only one at their use."""
CURES = ("estore", "delete it", "move it away", "enrol", "again", "anew", "the agent goes on")
_CHECKS = ("keys", "certificate", "broker", "store", "cohort secret")


def unnamed(device: Path) -> list[str]:
    """Files of a device's folder with a check, of which `fedcg doctor` does not report a flipped byte together with a remedy."""
    assert "damaged" not in _found(device)
    kept = [name for name, content in files_of(device).items() if content and not _is_unchecked(name)]
    assert len(kept) > 15
    return [name for name in kept if not _is_named(device, name)]


def undocumented() -> list[str]:
    """Those in `UNCHECKED` that the documentation does not exclude."""
    text = Path("docs/how-to/troubleshooting.md").read_text().partition("## A file is damaged")[2].partition("\n## ")[0]
    return [name for name in UNCHECKED if f"`{name.replace('/1/', '/')}`" not in text]


def _is_unchecked(name: str) -> bool:
    return name.removeprefix("store/").startswith(UNCHECKED) or name.endswith(".training.lock")


def _is_named(device: Path, name: str) -> bool:
    path = device / name
    whole = path.read_bytes()
    at = len(whole) // 2
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    try:
        lines = _found(device).splitlines()
    finally:
        path.write_bytes(whole)
    return any(path.name in line and "damaged" in line and any(cure in line for cure in CURES) for line in lines)


def _found(device: Path) -> str:
    told = data_of(run_fedcg("doctor", "--config", device / "agent.toml", "--json").stdout)["findings"]
    return "\n".join(f"{one['detail']} {one['advice']}" for one in told if one["check"] in _CHECKS)


@pytest.mark.slow
def test_a_flipped_byte_in_any_file_of_a_device_is_named_with_its_cure_but_where_the_documentation_says_why_not(
    tmp_path: Path,
) -> None:
    home = create_home(tmp_path / "home", CoordinatorConfig())
    add_federation(home, FEDERATION, [DEVICE])
    fill(PrivateStore.open(bundle(home, DEVICE) / "store", FEDERATION, DEVICE))
    assert unnamed(bundle(home, DEVICE)) == []
    assert undocumented() == []


def test_a_file_whose_check_is_missing_or_has_a_damaged_name_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "privacy.json"
    write_json(path, {"spent": "x", "epsilon": 1.0})
    whole = path.read_bytes()
    assert read_json(path) == {"format": 1, "spent": "x", "epsilon": 1.0}
    name = whole.index(b"check")
    for at in range(name, name + len(b"check")):
        for bit in range(8):
            changed = bytearray(whole)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(StoreError, match="damaged"):
                read_json(path)
    path.write_bytes(b'{"format": 1, "spent": "y"}')
    with pytest.raises(StoreError, match="damaged"):
        read_json(path)


def test_a_lost_pointer_beside_later_generations_is_no_new_store(tmp_path: Path) -> None:
    store = PrivateStore.open(tmp_path / "store", FEDERATION, DEVICE)
    fill(store)
    (store.root / "CURRENT").unlink()
    generation, problems = newest(PrivateStore.open(store.root, FEDERATION, DEVICE).generations)
    assert generation.round_attempt == RoundAttempt(2, 1)
    assert "CURRENT is damaged" in problems[0]


@pytest.fixture
def lived(tmp_path: Path) -> tuple[PrivateStore, Path]:
    """A store in which each file was written three times, in turns, and a copy of it from before the last ones."""
    store = PrivateStore.open(tmp_path / "store", FEDERATION, DEVICE)
    for number in (1, 2, 3):
        if number == 3:
            shutil.copytree(store.root, tmp_path / "earlier")
        for name in COUNTED:
            WRITES[name](store, number)
    return store, tmp_path / "earlier"


@pytest.mark.parametrize("name", COUNTED)
def test_an_old_copy_of_a_file_is_refused_by_name_and_others_read(lived: tuple[PrivateStore, Path], name: str) -> None:
    store, earlier = lived
    shutil.copyfile(earlier / name, store.root / name)
    with pytest.raises(DamagedFileError, match=rf"{name} is an older copy.*(fedcg agent restore|delete it)"):
        READS[name](store)
    for other in set(COUNTED) - {name}:
        READS[other](store)
    shutil.copytree(earlier, store.root.parent / "whole")
    READS[name](PrivateStore.open(store.root.parent / "whole", FEDERATION, DEVICE))  # a whole store is a backup's


def test_a_file_of_a_promise_that_is_gone_or_an_older_counter_is_refused(lived: tuple[PrivateStore, Path]) -> None:
    store, earlier = lived
    (store.root / "seen.json").unlink()
    with pytest.raises(DamagedFileError, match=r"seen\.json is missing"):
        store.seen()
    (store.root / "sums.json").unlink()  # as its remedy says
    assert store.sum_record("parts") == {}
    shutil.copyfile(earlier / "counter.json", store.root / "counter.json")
    with pytest.raises(DamagedFileError, match=r"counter\.json is missing, or older than privacy\.json"):
        store.record(PRIVACY_FILE)


def test_a_kill_between_a_file_and_the_counter_loses_nothing(lived: tuple[PrivateStore, Path]) -> None:
    store, _ = lived
    counter = (store.root / "counter.json").read_bytes()
    store.save_seen((1, 4, 1))
    (store.root / "counter.json").write_bytes(counter)
    assert store.seen() == (1, 4, 1)
    store.save_record(PRIVACY_FILE, {"spent": 4})
    assert (store.seen(), store.record(PRIVACY_FILE)["spent"]) == ((1, 4, 1), 4)


def test_agent_and_training_process_write_at_once_and_no_reader_is_misled(tmp_path: Path) -> None:
    store = PrivateStore.open(tmp_path / "store", FEDERATION, DEVICE)

    def write(name: str) -> None:
        for number in range(1, 40):
            WRITES[name](PrivateStore(store.root), number)

    with ThreadPoolExecutor(3) as threads:
        writers = [threads.submit(write, name) for name in ("seen.json", "privacy.json")]
        while not all(writer.done() for writer in writers):
            READS["seen.json"](store)
            READS["privacy.json"](store)
        assert [writer.result() for writer in writers] == [None, None]
    assert (store.seen(), store.record(PRIVACY_FILE)["spent"]) == ((1, 39, 1), 39)
