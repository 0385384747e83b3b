"""Artifacts that are not open are read once for all devices that wait, however many requests a device sends."""

from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.updates.published_artifacts import ArtifactRequests, PublishedArtifacts
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.messages.schemas import COORDINATOR, Need
from fedcg.wire.transfer.chunk_sender import ChunkFile
from fedcg.wire.transfer.windows import Ranges


class Requested:
    """Requests for three artifacts whose reads wait in `work`, and what was sent."""

    def __init__(self, root: Path) -> None:
        self.store = ArtifactStore(root)
        self.ids = [self.store.put(bytes([number]) * 600) for number in range(3)]
        self.published = PublishedArtifacts(self.store, 300)
        for artifact in self.ids:
            self.published.allow(artifact)
        self.work: list[Callable[[], object]] = []
        self.sent: list[tuple[str, str, Ranges]] = []
        self.requests = ArtifactRequests(self.published, self._send, self.work.append)

    def _send(self, device: str, source: ChunkFile, ranges: Ranges) -> None:
        self.sent.append((device, source.ref.id, ranges))

    def ask(self, device: str, artifact: str, first: int = 0) -> None:
        at = {"federation": "tiny", "sender": device, "recipient": COORDINATOR, "round": 1, "attempt": 1}
        self.requests.serve(device, Need(**at, artifact=artifact, ranges=((first, 1),)))

    def read(self) -> None:
        while self.work:
            self.work.pop(0)()


@pytest.fixture
def requested(tmp_path: Path) -> Requested:
    return Requested(tmp_path)


def test_an_artifact_is_read_once_for_all_that_wait_and_then_sent_at_once(requested: Requested) -> None:
    first = requested.ids[0]
    for _ in range(1000):
        requested.ask("a", first)
    requested.ask("b", first, 1)
    assert len(requested.work) == 1
    requested.read()
    assert requested.sent == [("a", first, ((0, 1),)), ("b", first, ((1, 1),))]
    requested.ask("a", first, 1)
    assert (len(requested.work), requested.sent[-1]) == (0, ("a", first, ((1, 1),)))


def test_a_device_that_asks_for_everything_in_turn_has_its_newest_request_served(
    requested: Requested, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    source = requested.published.source

    def noted_source(artifact: str) -> ChunkFile:
        reads.append(artifact)
        return source(artifact)

    monkeypatch.setattr(requested.published, "source", noted_source)
    for _ in range(1000):
        for artifact in requested.ids:
            requested.ask("a", artifact)
    assert len(requested.work) == len(requested.ids)
    requested.read()
    assert (reads, requested.sent) == ([requested.ids[-1]], [("a", requested.ids[-1], ((0, 1),))])


def test_what_is_not_published_is_never_read_and_what_can_not_be_read_is_not_sent(requested: Requested) -> None:
    requested.published.forget(requested.ids[0])
    requested.ask("a", requested.ids[0])
    assert requested.work == []
    requested.store.path(requested.ids[1]).write_bytes(b"damaged")
    requested.ask("a", requested.ids[1])
    requested.read()
    assert requested.sent == []
