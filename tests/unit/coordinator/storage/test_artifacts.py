"""Artifacts: durable in S3 before anything names them; the disk stays bounded, and what a restart, a late device or a reader needs stays."""

import asyncio
import gc
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import Response

from coordinator.errors import StoreError
from coordinator.facts.known import known_of
from coordinator.http.operator_api import readyz
from coordinator.storage.artifacts import ObjectStore, Pruner
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.errors import IntegrityError
from fedcg.wire.messages.schemas import RoundAttempt
from tests.support.coordinator.federations import hosting
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.coordinator.world import MakeWorld, RunningService, World
from tests.support.object_store import Moto, running_moto
from tests.support.waiting import wait_until


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Moto]:
    with running_moto(monkeypatch) as server:
        yield server


def test_what_is_stored_is_in_the_store_and_comes_back_into_an_empty_cache(moto: Moto, tmp_path: Path) -> None:
    first = ArtifactStore(tmp_path / "first", ObjectStore(moto.url))
    large = b"7" * 6_000_000  # in several parts
    written = tmp_path / "first" / "received"
    written.write_bytes(b"an update")
    first.adopt(written, hashlib.sha256(b"an update").hexdigest())
    assert {hashlib.sha256(b"an update").hexdigest(), first.put(large)} == moto.objects()
    second = ArtifactStore(tmp_path / "second", ObjectStore(moto.url))
    assert second.get(hashlib.sha256(large).hexdigest()) == large
    assert list(second.ids()) == [hashlib.sha256(large).hexdigest()]
    moto.overwrite(hashlib.sha256(large).hexdigest(), b"other")
    assert second.get(hashlib.sha256(large).hexdigest()) == large  # from the cache


def test_a_damaged_object_is_refused_and_leaves_nothing_in_the_cache(moto: Moto, tmp_path: Path) -> None:
    name = ArtifactStore(tmp_path / "first", ObjectStore(moto.url)).put(b"content")
    moto.overwrite(name, b"c0ntent")
    second = ArtifactStore(tmp_path / "second", ObjectStore(moto.url))
    with pytest.raises(IntegrityError, match="is damaged"):
        second.local(name)
    with pytest.raises(FileNotFoundError):
        second.local("0" * 64)
    assert list((tmp_path / "second").iterdir()) == []


def test_pruning_deletes_objects_too_with_their_size_and_passes_over_what_is_gone(moto: Moto, tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "cache", ObjectStore(moto.url))
    kept, *gone = (store.put(bytes([number]) * 10) for number in range(3))
    assert store.delete_all([*gone, "f" * 64]) == (2, 20)
    assert moto.objects() == set(store.ids()) == {kept}


def test_a_store_that_is_away_is_waited_for(moto: Moto, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remote = ObjectStore(moto.url)
    store = ArtifactStore(tmp_path / "cache", remote)
    moto.kill()
    putting = threading.Thread(target=store.put, args=(b"waits",))
    with caplog.at_level(logging.WARNING):
        putting.start()
        wait_until(lambda: moto.url in store.problem, "the problem is named")
        assert putting.is_alive()
        moto.start()
        putting.join(30)
    assert (putting.is_alive(), store.problem) == (False, "")
    assert moto.objects() == {hashlib.sha256(b"waits").hexdigest()}
    assert "is available again" in caplog.text
    moto.kill()
    remote.stop_waiting()
    with pytest.raises(StoreError, match="can't be stored"):
        store.put(b"refused")


def test_a_bucket_that_does_not_exist_is_named(moto: Moto, tmp_path: Path) -> None:
    remote = ObjectStore("s3://another-bucket/prefix")
    remote.stop_waiting()
    with pytest.raises(StoreError, match="the bucket of the artifact store s3://another-bucket"):
        ArtifactStore(tmp_path, remote).put(b"x")


def its_store_goes_away(world: World, running: RunningService, moto: Moto) -> None:
    world.start_devices()
    world.wait_event("update_stored")
    moto.kill()
    world.devices["b"].silent = False
    world.devices["b"].act()
    wait_until(lambda: running.service.store_problem != "", "the problem is seen")


@pytest.mark.slow
def test_a_round_waits_for_its_store_of_artifacts_loses_nothing_and_goes_on(moto: Moto, make_world: MakeWorld) -> None:
    world = make_world(deadline_s=4.0, remote=ObjectStore(moto.url))
    world.devices["b"].silent = True
    with RunningService(world) as running:
        its_store_goes_away(world, running, moto)
        world.wait_event("artifact_store")
        answer = Response()
        health = asyncio.run(readyz(known_of(hosting(running.service), world.root), answer))
        assert (answer.status_code, moto.url in health.status) == (503, True)
        deadline_at = running.service.state.deadline_at
        wait_until(lambda: time.time() > deadline_at + 0.5, "the deadline has passed")
        assert len(world.events("update_stored")) == 1  # no commit names what is not durable
        moto.start()
        world.wait_event("finished")
    assert [event for event in world.events("attempt_failed") if event["round"] == 1] == []
    assert world.events("distilling")[0]["clients"] == ["a", "b"]
    assert world.events("finished")[0]["aggregate"] in moto.objects()


def test_a_coordinator_stopped_while_its_store_is_away_rejects_no_update(moto: Moto, make_world: MakeWorld) -> None:
    world = make_world(rounds=1, remote=ObjectStore(moto.url))
    world.devices["b"].silent = True
    with RunningService(world) as running:
        its_store_goes_away(world, running, moto)
    moto.start()
    world.artifacts = ArtifactStore(world.artifacts.root, ObjectStore(moto.url))
    with RunningService(world) as running:
        wait_until(lambda: running.service.is_connected, "it is back")
        for device in world.devices.values():
            device.hello()
        world.wait_event("finished")
    assert world.events("update_refused") == []
    assert world.events("distilling")[-1]["clients"] == ["a", "b"]


def test_what_is_kept_is_the_last_rounds_with_what_they_start_from(make_world: MakeWorld) -> None:
    world = make_world(6, keep_rounds=2)
    world.run()
    aggregates = {record.round: record for record in world.store.aggregates(FEDERATION)}
    kept = {number for number, record in aggregates.items() if world.artifacts.has(record.artifact)}
    assert kept == {4, 5, 6}  # 4: the updates of round 5 are coded to it
    for number in range(1, 7):
        updates = world.store.updates(FEDERATION, RoundAttempt(number, 1))
        assert len(updates) == 2  # the database forgets nothing
        assert {world.artifacts.has(update.artifact) for update in updates} == {number >= 5}
    assert world.artifacts.has(world.store.federation(FEDERATION).spec)
    assert world.artifacts.has(aggregates[6].server_state)


def test_pruning_that_was_interrupted_is_made_up_for_and_shared_files_stay(make_world: MakeWorld) -> None:
    world = make_world(5, keep_rounds=100)
    world.run()
    forgotten: list[str] = []
    first = world.store.updates(FEDERATION, RoundAttempt(1, 1))[0].artifact
    world.artifacts.delete(first)  # an earlier run got as far as this
    world.store.pin(FEDERATION, 2, "best")
    files, size = Pruner(world.store, world.artifacts, FEDERATION, 1, forgotten.append).prune(5)
    assert files == len(forgotten) - 1 == len(set(forgotten)) - 1
    assert size > 0
    state = world.store.aggregates(FEDERATION)[-1].server_state
    assert state == world.store.aggregates(FEDERATION)[1].server_state  # the plain worker's states are all the same
    assert world.artifacts.has(state)
    versions = {each.round: each.artifact for each in world.store.aggregates(FEDERATION)}
    assert [number for number in (1, 2, 3) if world.artifacts.has(versions[number])] == [2]


def test_a_start_deletes_files_that_no_federation_knows_and_that_were_stored_long_ago(make_world: MakeWorld) -> None:
    world = make_world(2, keep_rounds=100)
    world.run()
    known, old = set(world.artifacts.ids()), world.root / "artifacts"
    orphan, young = world.artifacts.put(b"its coordinator was killed"), world.artifacts.put(b"of a new federation")
    again = world.artifacts.put(b"stored again")
    for artifact in known | {orphan, again}:
        os.utime(old / artifact, (0.0, 0.0))
    world.artifacts.put(b"stored again")
    with RunningService(world):
        pass
    assert set(world.artifacts.ids()) == known | {young, again}
    assert world.events("pruned")[-1]["files"] == 1


def test_no_file_of_a_deleted_aggregate_stays_open(make_world: MakeWorld) -> None:
    world = make_world(10, keep_rounds=2)
    with RunningService(world):
        world.start_devices()
        final = world.wait_finished()
        gc.collect()
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        named = [str(link.readlink()) for link in links if link.is_symlink()]  # a deleted file has its mark
        found = [name for name in named if name.startswith(str(world.root / "artifacts"))]
        assert [name for name in found if name.endswith(" (deleted)")] == []
        assert str(world.artifacts.path(final)) in found  # the newest one is served
