"""How often the coordinator goes over an update's bytes between its frames and its receipt: hashing and decoding are what it costs."""

import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.updates import validation
from fedcg.wire.artifacts.artifacts import unpack
from fedcg.wire.messages.schemas import Carrier, Manifest, Outcome, RoundAttempt
from fedcg.wire.transfer.chunks import parse_chunk
from tests.support.coordinator.published import Published, receiver_of
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.coordinator.world import World
from tests.support.waiting import wait_until
from tests.support.wire.artifact_chunks import frames_for, make_ref

SHA256 = hashlib.sha256
HEAD_BYTES = 100  # of a chunk: its artifact and its place, and what else its check may cover


class CountingSha256:
    """sha256 that counts its bytes."""

    hashed = 0

    def __init__(self, data: bytes = b"") -> None:
        self._digest = SHA256()
        self.update(data)

    def update(self, data: bytes) -> None:
        CountingSha256.hashed += len(data)
        self._digest.update(data)

    def digest(self) -> bytes:
        return self._digest.digest()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


@pytest.mark.parametrize(("carrier", "passes"), [(Carrier.MQTT, 1), (Carrier.HTTPS, 2)])
def test_the_receiver_decodes_an_update_once_and_hashes_it_once_and_over_https_each_chunk_for_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carrier: Carrier, passes: int
) -> None:
    spec = tiny_spec(rounds=1)
    world = World(tmp_path / "home", spec, aggregate_bytes(spec, 0, 0, seed=1))
    world.store.open_attempt("tiny", RoundAttempt(1, 1), world.base_id, frozenset("ab"), 0.0, 600.0)
    published = Published(carrier)
    decoded: list[int] = []

    def counted_unpack(data: bytes, *args: Any, **options: Any) -> Any:
        decoded.append(len(data))
        return unpack(data, *args, **options)

    monkeypatch.setattr(validation, "unpack", counted_unpack)
    monkeypatch.setattr(hashlib, "sha256", CountingSha256)
    receiver = receiver_of(world, published, lambda event: None)
    receiver.start()
    for count, name in enumerate("ba", 1):  # the base is read and decoded with the first one
        data = world.devices[name].make_update(1, 1, world.base_id)
        manifest = Manifest(**world.devices[name].addressed(1, 1), artifact=make_ref(data, 1024))
        receiver.announce(name, manifest)
        assert receiver.announced(name).result(30) == manifest.artifact
        frames = list(frames_for(data, manifest.artifact))
        chunks = [replace(parse_chunk(frame), check=b"") for frame in frames]
        CountingSha256.hashed = 0
        decoded.clear()
        for frame, chunk in zip(frames, chunks, strict=True):
            if carrier is Carrier.MQTT:
                assert receiver.frame(name, frame)
            else:
                receiver.chunk(name, chunk).result(30)
        wait_until(partial(has_receipts, published, count), "a receipt")
    receiver.close()
    world.close()
    assert 0 <= CountingSha256.hashed - passes * len(data) <= HEAD_BYTES * len(frames)
    assert decoded == [len(data)]


def has_receipts(published: Published, count: int) -> bool:
    return [outcome for _, outcome in published.receipts] == [Outcome.ACCEPTED] * count
