"""The disk stays bounded over many rounds, and what a restart, a late device or a reader of the last rounds needs stays."""

import gc
import os
from pathlib import Path

import pytest

from coordinator.rounds.engine import Phase
from coordinator.storage.artifacts import Pruner
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.coordinator.world import MakeWorld, RunningService, World
from tests.support.waiting import wait_until


def run_whole(world: World) -> None:
    with RunningService(world) as running:
        world.start_devices()
        world.wait_event("finished")
        assert running.service.state.phase is Phase.FINISHED


def test_what_is_kept_is_the_last_rounds_with_what_they_start_from(make_world: MakeWorld) -> None:
    world = make_world(6, keep_rounds=2)
    run_whole(world)
    aggregates = {record.round: record for record in world.store.aggregates(FEDERATION)}
    kept = {number for number, record in aggregates.items() if world.artifacts.has(record.artifact)}
    assert kept == {4, 5, 6}  # 4: the updates of round 5 are coded to it
    for number in range(1, 7):
        updates = world.store.updates(FEDERATION, RoundAttempt(number, 1))
        assert len(updates) == 2  # the database forgets nothing
        assert {world.artifacts.has(update.artifact) for update in updates} == {number >= 5}
    assert world.artifacts.has(world.store.federation(FEDERATION).spec)
    assert world.artifacts.has(aggregates[6].server_state)


@pytest.mark.slow
def test_a_restart_after_pruning_goes_on_and_still_answers_a_device_that_repeats_an_old_manifest(
    make_world: MakeWorld,
) -> None:
    world = make_world(4, keep_rounds=1)
    with RunningService(world) as running:
        world.start_devices()
        wait_until(lambda: running.service.state.round >= 3, "round 3 opens")
        running.vanish()
    assert not world.artifacts.has(world.store.updates(FEDERATION, RoundAttempt(1, 1))[0].artifact)
    old = world.store.update(FEDERATION, RoundAttempt(1, 1), "a")
    assert old is not None
    with RunningService(world) as running:
        wait_until(lambda: running.service.is_connected, "it is back")
        for device in world.devices.values():
            with device.lock:
                device.hello()
        world.wait_event("finished")
        device = world.devices["a"]
        known = len(device.receipts())
        with device.lock:
            data = device.make_update(4, 1, world.store.aggregates(FEDERATION)[3].artifact)
            device.send_update(1, 1, data)  # another one than it sent then, and for a round whose files are gone
        wait_until(lambda: len(device.receipts()) > known, "it is answered")
    assert device.receipts()[-1].outcome is Outcome.CONFLICT


def test_pruning_that_was_interrupted_is_made_up_for_and_shared_files_stay(make_world: MakeWorld) -> None:
    world = make_world(5, keep_rounds=100)
    run_whole(world)
    forgotten: list[str] = []
    first = world.store.updates(FEDERATION, RoundAttempt(1, 1))[0].artifact
    world.artifacts.delete(first)  # an earlier run got as far as this
    files, size = Pruner(world.store, world.artifacts, FEDERATION, 1, forgotten.append).prune(5)
    assert files == len(forgotten) - 1 == len(set(forgotten)) - 1
    assert size > 0
    state = world.store.aggregates(FEDERATION)[-1].server_state
    assert state == world.store.aggregates(FEDERATION)[1].server_state  # the plain worker's states are all the same
    assert world.artifacts.has(state)


def test_deleting_several_tells_their_size_and_passes_over_what_is_gone(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    ids = [store.put(b"x" * 100), store.put(b"y" * 50)]
    assert store.delete_all([*ids, "f" * 64]) == (2, 150)
    assert list(store.ids()) == []


def test_a_start_deletes_files_that_no_federation_knows_once_no_process_can_be_about_to_record_them(
    make_world: MakeWorld,
) -> None:
    world = make_world(2, keep_rounds=100)
    run_whole(world)
    known, old = set(world.artifacts.ids()), world.root / "artifacts"
    orphan, young = world.artifacts.put(b"its coordinator was killed"), world.artifacts.put(b"of a new federation")
    for artifact in known | {orphan}:
        os.utime(old / artifact, (0.0, 0.0))
    with RunningService(world):
        pass
    assert set(world.artifacts.ids()) == known | {young}
    assert world.events("pruned")[-1]["files"] == 1


def test_an_artifact_that_is_stored_again_counts_as_new(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    artifact = store.put(b"spec")
    os.utime(store.path(artifact), (0.0, 0.0))
    store.put(b"spec")
    assert store.path(artifact).stat().st_mtime > 0.0


def open_artifacts(world: World) -> list[str]:
    """Descriptors of this process on files below the artifacts' folder; a deleted file has its mark."""
    gc.collect()
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    named = [str(link.readlink()) for link in links if link.is_symlink()]
    return [name for name in named if name.startswith(str(world.root / "artifacts"))]


def test_no_file_of_a_deleted_aggregate_stays_open(make_world: MakeWorld) -> None:
    world = make_world(10, keep_rounds=2)
    with RunningService(world):
        world.start_devices()
        final = world.wait_finished()
        found = open_artifacts(world)
        assert [name for name in found if name.endswith(" (deleted)")] == []
        assert str(world.artifacts.path(final)) in found  # the newest one is served
