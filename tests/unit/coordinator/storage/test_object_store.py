"""Artifacts in S3: durable before anything names them, read from the cache or fetched and checked, waited for when the store is away."""

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import Response

from coordinator.errors import StoreError
from coordinator.facts.known import known_of
from coordinator.http.operator_api import readyz
from coordinator.storage.artifacts import ObjectStore
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.errors import IntegrityError
from tests.support.coordinator.federations import hosting
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.coordinator.world import RunningService, World
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


def test_pruning_deletes_the_objects_too(moto: Moto, tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "cache", ObjectStore(moto.url))
    kept, *gone = (store.put(bytes([number])) for number in range(3))
    assert store.delete_all(gone) == (2, 2)
    assert moto.objects() == set(store.ids()) == {kept}


def test_a_store_that_is_away_is_waited_for_and_a_command_is_refused(
    moto: Moto, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert "can be used again" in caplog.text
    moto.kill()
    remote.stop_waiting()
    with pytest.raises(StoreError, match="can't be stored"):
        store.put(b"refused")


def test_a_bucket_that_does_not_exist_is_named(moto: Moto, tmp_path: Path) -> None:
    remote = ObjectStore("s3://another-bucket/prefix")
    remote.stop_waiting()
    with pytest.raises(StoreError, match="there is no bucket for the artifact store s3://another-bucket"):
        ArtifactStore(tmp_path, remote).put(b"x")


@pytest.mark.slow
def test_a_round_waits_for_its_store_of_artifacts_loses_nothing_and_goes_on(moto: Moto, tmp_path: Path) -> None:
    spec = tiny_spec(rounds=2)
    world = World(
        tmp_path / "home", spec, aggregate_bytes(spec, 0, 0, seed=1), deadline_s=4.0, remote=ObjectStore(moto.url)
    )
    world.devices["b"].silent = True
    with RunningService(world) as running:
        world.start_devices()
        world.wait_event("update_stored")
        moto.kill()
        world.devices["b"].silent = False
        world.devices["b"].act()
        wait_until(lambda: running.service.store_problem != "", "the problem is seen")
        world.wait_event("artifact_store")
        answer = Response()
        health = asyncio.run(readyz(known_of(hosting(running.service, world.artifacts), world.root), answer))
        assert (answer.status_code, moto.url in health.status) == (503, True)
        deadline_at = running.service.state.deadline_at
        wait_until(lambda: time.time() > deadline_at + 0.5, "the deadline has passed")
        assert len(world.events("update_stored")) == 1  # no commit names what is not durable
        moto.start()
        world.wait_event("finished")
    assert [event for event in world.events("attempt_failed") if event["round"] == 1] == []
    assert world.events("distilling")[0]["clients"] == ["a", "b"]
    final = world.events("finished")[0]["aggregate"]
    assert final in moto.objects()
    world.close()


def test_a_coordinator_that_is_stopped_while_its_store_is_away_rejects_no_update(moto: Moto, tmp_path: Path) -> None:
    spec = tiny_spec(rounds=1)
    world = World(tmp_path / "home", spec, aggregate_bytes(spec, 0, 0, seed=1), remote=ObjectStore(moto.url))
    world.devices["b"].silent = True
    with RunningService(world) as running:
        world.start_devices()
        world.wait_event("update_stored")
        moto.kill()
        world.devices["b"].silent = False
        world.devices["b"].act()
        wait_until(lambda: running.service.store_problem != "", "the problem is seen")
    moto.start()
    world.artifacts = ArtifactStore(world.artifacts.root, ObjectStore(moto.url))
    with RunningService(world) as running:
        wait_until(lambda: running.service.is_connected, "it is back")
        for device in world.devices.values():
            with device.lock:
                device.hello()
        world.wait_event("finished")
    assert world.events("update_refused") == []
    assert world.events("distilling")[-1]["clients"] == ["a", "b"]
    world.close()
